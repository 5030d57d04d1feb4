// A step of decoding, whole: queries to the stored space, rows and exact copies, and the way back. One call of a layer:
// a small model's step has so many that what each call costs adds up to more than what it computes.
#include <algorithm>
#include <math.h>

#include "checks.h"
#include "scratch.h"
#include "states.h"
#include "vectors.h"

namespace {

struct Copy {
    int64_t position, place;
};

// What attention over a part of the tokens takes and gives.
struct Part {
    float *q, *out, *lse;
    int64_t *tokens, *slots;
};

struct Pieces {
    Part rows, copies;
    float *bias;
    int64_t *queries;
    Copy *near;  // the copies that a request reads
};

Pieces pieces_of(const DecodeJob &job, uint8_t *memory, int64_t *num_bytes) {
    Scratch scratch(memory);
    const int64_t requests = job.rows.num_requests, heads = requests * job.rows.keys.num_heads * job.rows.gqa;
    Pieces pieces = {};
    const auto take_part = [&](int64_t num_slots) {
        Part part = {};
        part.q = scratch.take<float>(heads * job.rows.keys.head_dim);
        part.out = scratch.take<float>(heads * job.rows.values.head_dim);
        part.lse = scratch.take<float>(heads);
        part.tokens = scratch.take<int64_t>(num_slots < 0 ? 0 : requests + 1);
        part.slots = scratch.take<int64_t>(num_slots < 0 ? 0 : num_slots);
        return part;
    };
    const bool has_window = job.window.requests;
    pieces.rows = take_part(has_window ? job.rows.tokens[requests] - job.rows.tokens[0] : -1);
    if (has_window) {
        pieces.copies = take_part(requests * job.window.num_places);
        pieces.near = scratch.take<Copy>(job.window.num_places);
    }
    pieces.bias = scratch.take<float>(heads);
    pieces.queries = scratch.take<int64_t>(requests + 1);
    *num_bytes = scratch.used();
    return pieces;
}

// The copies at hand that the last token of a request of `length` tokens reads, by their positions, each once.
int64_t find_near(const Window &window, int64_t slot, int64_t length, Copy *near) {
    const int32_t *positions = window.positions + slot * window.num_places;
    int64_t count = 0;
    for (int64_t place = 0; place < window.num_places; place++) {
        const int64_t position = positions[place];
        const bool is_near = position >= length - window.residual_length || position < window.num_sinks;
        if (is_near && position >= 0 && position < length) near[count++] = {position, slot * window.num_places + place};
    }
    std::sort(near, near + count, [](const Copy &a, const Copy &b) { return a.position < b.position; });
    return std::unique(near, near + count, [](const Copy &a, const Copy &b) { return a.position == b.position; }) - near;
}

// The slots of rows that each request reads, and those of the copies that it reads in place of others.
void split_by_window(const DecodeJob &job, const Pieces &pieces) {
    const Part &rows = pieces.rows, &copies = pieces.copies;
    rows.tokens[0] = copies.tokens[0] = 0;
    for (int64_t r = 0; r < job.rows.num_requests; r++) {
        const int64_t length = job.rows.tokens[r + 1] - job.rows.tokens[r], *slots = job.rows.slots + job.rows.tokens[r];
        const int64_t count = find_near(job.window, job.window.requests[r], length, pieces.near);
        int64_t *to = rows.slots + rows.tokens[r], from = 0;
        for (int64_t i = 0; i <= count; i++) {
            const int64_t until = i < count ? pieces.near[i].position : length;
            to = std::copy(slots + from, slots + until, to);
            from = until + 1;
        }
        for (int64_t i = 0; i < count; i++) copies.slots[copies.tokens[r] + i] = pieces.near[i].place;
        rows.tokens[r + 1] = to - rows.slots;
        copies.tokens[r + 1] = copies.tokens[r] + count;
    }
}

// A head's query in the space of the rows, and the part of its scores that the mean key has.
void transform_query(const DecodeJob &job, int head, float *x, float *bias) {
    const int D = job.rows.keys.head_dim;
    const int64_t at = (int64_t)(head / job.rows.gqa) * D;
    *bias = 0;
    if (job.mu) for (int c = 0; c < D; c++) *bias += x[c] * job.mu[at + c] * job.rows.scale;
    if (job.lambda) for (int c = 0; c < D; c++) x[c] *= job.lambda[at + c];
    hadamard(x, D, job.k_block, job.k_factor);
}

// The logarithm of exp(a) + exp(b).
float log_of_sum(float a, float b) {
    const float most = fmaxf(a, b);
    return most == -INFINITY ? most : most + log1pf(expf(fminf(a, b) - most));
}

// The output of a head: rows and copies by their weights, beside a sink.
void finish(const DecodeJob &job, const Pieces &pieces, int64_t request, int head) {
    const int D = job.rows.values.head_dim, heads = job.rows.keys.num_heads * job.rows.gqa;
    const int64_t at = request * heads + head;
    float *x = pieces.rows.out + at * D, lse = pieces.rows.lse[at];
    hadamard(x, D, job.v_block, job.v_factor);
    if (job.window.requests) {
        const float of_copies = pieces.copies.lse[at], both = log_of_sum(lse, of_copies);
        const float share = both == -INFINITY ? 0 : expf(of_copies - both), *exact = pieces.copies.out + at * D;
        for (int c = 0; c < D; c++) x[c] = lse == -INFINITY ? exact[c] : x[c] + share * (exact[c] - x[c]);
        lse = both;
    }
    if (job.sinks) {
        const float share = lse == -INFINITY ? 0 : expf(lse - log_of_sum(lse, job.sinks[head]));
        for (int c = 0; c < D; c++) x[c] *= share;
    }
    write_numbers(x, D, job.out_numbers, job.out, request * job.out_stride + (int64_t)head * D);
}

}  // namespace

extern "C" VISIBLE int kvtuner_decode(const DecodeJob *given) {
    const DecodeJob &job = *given;
    const int64_t requests = job.rows.num_requests;
    if (requests == 0) return DONE;
    if (const int status = check_tokens(job.rows)) return status;
    if (job.window.requests)
        if (const int status = check_window(job.window, requests)) return status;
    int64_t num_bytes = 0;
    pieces_of(job, nullptr, &num_bytes);
    uint8_t *memory = allocate(num_bytes);
    if (!memory) return NO_MEMORY;
    const Pieces pieces = pieces_of(job, memory, &num_bytes);
    const int D = job.rows.keys.head_dim, heads = job.rows.keys.num_heads * job.rows.gqa;
    for (int64_t r = 0; r <= requests; r++) pieces.queries[r] = r;
    for (int64_t r = 0; r < requests; r++)
        for (int head = 0; head < heads; head++) {
            float *x = pieces.rows.q + (r * heads + head) * D;
            read_numbers(job.q, r * job.q_stride + (int64_t)head * D, job.q_numbers, D, x);
            if (job.window.requests) memcpy(pieces.copies.q + (r * heads + head) * D, x, sizeof(float) * D);
            transform_query(job, head, x, pieces.bias + r * heads + head);
        }
    AttendJob rows = job.rows;
    rows.q = pieces.rows.q, rows.out = pieces.rows.out, rows.lse = pieces.rows.lse;
    rows.bias = job.mu ? pieces.bias : nullptr;
    rows.queries = pieces.queries, rows.num_queries = requests;
    int status = DONE;
    if (job.window.requests) {
        split_by_window(job, pieces);
        rows.tokens = pieces.rows.tokens, rows.slots = pieces.rows.slots, rows.num_slots = pieces.rows.tokens[requests];
        AttendJob copies = rows;
        copies.keys = job.window.keys, copies.values = job.window.values, copies.bias = nullptr, copies.integers = 0;
        copies.q = pieces.copies.q, copies.out = pieces.copies.out, copies.lse = pieces.copies.lse;
        copies.tokens = pieces.copies.tokens, copies.slots = pieces.copies.slots;
        copies.num_slots = pieces.copies.tokens[requests];
        status = kvtuner_attend(&copies);
    }
    if (status == DONE) status = kvtuner_attend(&rows);
    for (int64_t r = 0; status == DONE && r < requests; r++)
        for (int head = 0; head < heads; head++) finish(job, pieces, r, head);
    free(memory);
    return status;
}

extern "C" VISIBLE int kvtuner_copy(const CopyJob *job) {
    const Window &window = job->window;
    if (const int status = check_window(window, job->num_requests)) return status;
    if (window.residual_length < 0 || window.num_sinks < 0) return BAD_PLACES;
    if (window.residual_length + window.num_sinks > window.num_places) return BAD_PLACES;
    const int64_t k_bytes = window.keys.row_bytes, v_bytes = window.values.row_bytes;
    for (int64_t r = 0; r < job->num_requests; r++) {
        const int64_t position = job->tokens[r + 1] - job->tokens[r] - 1;
        if (position < 0) continue;  // a request without tokens
        const bool is_sink = position < window.num_sinks;
        if (!is_sink && window.residual_length == 0) continue;
        const int64_t of_request = is_sink ? position : window.num_sinks + position % window.residual_length;
        const int64_t place = window.requests[r] * window.num_places + of_request;
        memcpy(window.keys.rows + place * window.keys.row_stride, (const uint8_t *)job->k + r * job->k_stride, (size_t)k_bytes);
        memcpy(window.values.rows + place * window.values.row_stride, (const uint8_t *)job->v + r * job->v_stride, (size_t)v_bytes);
        window.positions[place] = (int32_t)position;
    }
    return DONE;
}
