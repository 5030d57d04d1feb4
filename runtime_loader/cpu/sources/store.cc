// Keys or values as rows: transformed, quantized and packed as kvtuner/quant.py and row_packing.py do.
#include <atomic>

#include "interface.h"
#include "scratch.h"
#include "states.h"
#include "vectors.h"
// After vectors.h, whose INLINE it uses.
#include "grids.h"

namespace {

constexpr int64_t TOKENS_OF_A_THREAD = 16;

struct Pieces {
    float *x, *integers, *codes;
    uint8_t *packed;        // codes [head_dim]
    float *states;          // of a group of tokens [tokens, head_dim]
    uint8_t *packed_group;  // and their codes [tokens, head_dim]
    int64_t num_bytes;
};

// What a thread needs; without memory its size is counted alone.
Pieces pieces_of(uint8_t *memory, const Side &side) {
    Scratch scratch(memory);
    Pieces pieces = {};
    const int64_t numbers = side.head_dim > side.token_group ? side.head_dim : side.token_group;
    const int64_t of_group = side.token_group > 1 ? (int64_t)side.token_group * side.head_dim : 0;
    pieces.x = scratch.take<float>(numbers), pieces.integers = scratch.take<float>(numbers);
    pieces.codes = scratch.take<float>(numbers), pieces.packed = scratch.take<uint8_t>(numbers);
    pieces.states = scratch.take<float>(of_group), pieces.packed_group = scratch.take<uint8_t>(of_group);
    pieces.num_bytes = scratch.used();
    return pieces;
}

void transform(const StoreJob &job, int head, float *x) {
    const int D = job.side.head_dim;
    if (job.mu) for (int c = 0; c < D; c++) x[c] -= job.mu[(int64_t)head * D + c];
    if (job.inverse_lambda) for (int c = 0; c < D; c++) x[c] *= job.inverse_lambda[(int64_t)head * D + c];
    hadamard(x, D, job.hadamard_block, job.hadamard_factor);
}

// Codes one group, and returns its scale word.
uint32_t quantize(const GridKind &kind, float *x, float *integers, float *codes, uint8_t *packed) {
    float low = x[0], high = x[0];
    bool finite = true;
    for (int c = 0; c < kind.channels; c++) {
        finite &= x[c] - x[c] == 0;
        low = x[c] < low ? x[c] : low, high = x[c] > high ? x[c] : high;
    }
    if (!finite) {
        memset(packed, 0, kind.channels);
        return kind.short_words ? 0xFFE0 : 0x7E00u << 16;
    }
    low = clamped(low + 0.0f, -FP16_MAX, FP16_MAX), high = clamped(high + 0.0f, -FP16_MAX, FP16_MAX);
    for (int c = 0; c < kind.channels; c++) x[c] = clamped(x[c], -FP16_MAX, FP16_MAX);
    Grid grid;
    if (!kind.fitted || !fit_grid(kind, x, low, high, integers, codes, &grid)) {
        grid = minmax_grid(kind, low, high);
        const float inverse = inverse_of(grid.scale), top = (float)kind.top();
        for (int c = 0; c < kind.channels; c++) codes[c] = clamped(rintf((x[c] - grid.minimum) * inverse), 0, top);
    }
    for (int c = 0; c < kind.channels; c++) packed[c] = (uint8_t)(int)codes[c];
    if (kind.short_words) return grid.scale ? (uint32_t)(grid.scale >> 4 << 5 | grid.zero_point) : 0;
    return grid.scale | (uint32_t)to_half(grid.minimum) << 16;
}

void pack(const Side &side, int head, const uint8_t *codes, uint8_t *row) {
    const int slots = side.bits == 3 ? 8 : 16 / side.bits, units = side.head_dim / slots;
    uint8_t *low = row + (int64_t)head * units * 2, *third = row + (int64_t)side.num_heads * units * 2 + (int64_t)head * units;
    for (int unit = 0; unit < units; unit++) {
        uint32_t word = 0;
        for (int slot = 0; slot < slots; slot++) word |= (uint32_t)codes[slot * units + unit] << (slot * side.bits);
        low[2 * unit] = (uint8_t)word, low[2 * unit + 1] = (uint8_t)(word >> 8);
        if (side.bits == 3) third[unit < units / 2 ? 2 * unit : 2 * (unit - units / 2) + 1] = (uint8_t)(word >> 16);
    }
}

void store_token(const StoreJob &job, int64_t token, const Pieces &pieces) {
    const Side &side = job.side;
    const bool short_words = side.word_bits == 16;
    const GridKind kind = {side.bits, side.group_size, job.symmetric != 0, job.fitted != 0, short_words};
    const int num_groups = side.head_dim / side.group_size, word_bytes = side.word_bits / 8;
    uint8_t *row = side.rows + job.slots[token] * side.row_stride;
    const int64_t code_bytes = (int64_t)side.num_heads * side.head_dim * side.bits / 8;
    const int64_t last_word = side.first_word + (int64_t)side.num_heads * num_groups * word_bytes;
    memset(row + code_bytes, 0, side.first_word - code_bytes);
    memset(row + last_word, 0, side.row_bytes - last_word);
    for (int head = 0; head < side.num_heads; head++) {
        read_numbers(job.states, token * job.token_stride + head * job.head_stride, job.numbers, side.head_dim, pieces.x);
        transform(job, head, pieces.x);
        for (int group = 0; group < num_groups; group++) {
            const int first = group * side.group_size;
            const uint32_t word = quantize(kind, pieces.x + first, pieces.integers, pieces.codes, pieces.packed + first);
            uint8_t *to = row + side.first_word + ((int64_t)head * num_groups + group) * word_bytes;
            for (int i = 0; i < word_bytes; i++) to[i] = (uint8_t)(word >> (8 * i));
        }
        pack(side, head, pieces.packed, row);
    }
}

// Tokens of one group, whose rows have a share of its scale words each: those of all channels, head 0 first.
void store_group(const StoreJob &job, int64_t first_token, const Pieces &pieces) {
    const Side &side = job.side;
    const int D = side.head_dim, G = side.token_group;
    const GridKind kind = {side.bits, G, job.symmetric != 0, false, false};
    const int64_t share = side.token_share();
    const auto row = [&](int64_t token) { return side.rows + job.slots[first_token + token] * side.row_stride; };
    for (int t = 0; t < G; t++) memset(row(t) + side.first_word, 0, side.row_bytes - side.first_word);
    for (int head = 0; head < side.num_heads; head++) {
        for (int t = 0; t < G; t++)
            read_numbers(job.states, (first_token + t) * job.token_stride + head * job.head_stride, job.numbers, D, pieces.states + (int64_t)t * D);
        for (int c = 0; c < D; c++) {
            for (int t = 0; t < G; t++) pieces.x[t] = pieces.states[(int64_t)t * D + c];
            const uint32_t word = quantize(kind, pieces.x, pieces.integers, pieces.codes, pieces.packed);
            for (int t = 0; t < G; t++) pieces.packed_group[(int64_t)t * D + c] = pieces.packed[t];
            for (int i = 0; i < 4; i++) {
                const int64_t at = ((int64_t)head * D + c) * 4 + i;
                row(at / share)[side.first_word + at % share] = (uint8_t)(word >> (8 * i));
            }
        }
        for (int t = 0; t < G; t++) pack(side, head, pieces.packed_group + (int64_t)t * D, row(t));
    }
}

// Whether tokens are whole groups, each in the slots of one group of the pool, from which its scales are read.
bool has_whole_groups(const StoreJob &job) {
    const int64_t G = job.side.token_group;
    if (job.num_tokens % G) return false;
    for (int64_t i = 0; i < job.num_tokens; i++) {
        const int64_t place = i % G, first = job.slots[i - place];
        if (first % G || job.slots[i] != first + place) return false;
    }
    return true;
}

struct Work {
    const StoreJob &job;
    uint8_t *memory;
    int64_t scratch_bytes, tokens_at_once;
    int threads;
    std::atomic<int64_t> next{0};
    std::atomic<int> started{0};
};

void run(void *pointer) {
    Work &work = *(Work *)pointer;
    const int thread = work.started.fetch_add(1);
    if (thread >= work.threads) return;
    const Pieces pieces = pieces_of(work.memory + thread * work.scratch_bytes, work.job.side);
    for (int64_t first; (first = work.next.fetch_add(work.tokens_at_once)) < work.job.num_tokens;) {
        if (work.job.side.token_group > 1) {
            store_group(work.job, first, pieces);
            continue;
        }
        for (int64_t token = first; token < first + work.tokens_at_once && token < work.job.num_tokens; token++)
            store_token(work.job, token, pieces);
    }
}

}  // namespace

extern "C" VISIBLE int kvtuner_store(const StoreJob *job, int threads, void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    for (int64_t i = 0; i < job->num_tokens; i++)
        if (job->slots[i] < 0 || job->slots[i] >= job->side.num_rows) return BAD_SLOT;
    if (job->side.token_group > 1 && !has_whole_groups(*job)) return BROKEN_GROUP;
    const int64_t at_once = job->side.token_group > 1 ? job->side.token_group : TOKENS_OF_A_THREAD;
    const int64_t most = (job->num_tokens + at_once - 1) / at_once;
    if (most == 0) return DONE;
    if (!parallel || threads < 1) threads = 1;
    if (threads > most) threads = (int)most;
    const int64_t scratch_bytes = pieces_of(nullptr, job->side).num_bytes;
    uint8_t *memory = allocate(threads * scratch_bytes);
    if (!memory) return NO_MEMORY;
    Work work{*job, memory, scratch_bytes, at_once, threads};
    if (threads > 1) parallel(run, &work, (unsigned)threads, 0);
    else run(&work);
    free(memory);
    return DONE;
}
