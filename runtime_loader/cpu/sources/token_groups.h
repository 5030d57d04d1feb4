// Scores of keys per channel, whose scales the tokens of a group share. A query is folded with the scales once for each
// group, so that its products with codes are scores but for one sum: q . (code * scale + minimum) is
// (q * scale) . code + q . minimum.
#pragma once
#include "keys.h"
#include "queries.h"

// Tokens of a block, in a row, whose scales are those of one group of the pool's token slots.
struct TokenRun {
    int first, last;  // of the block, without the last
    int64_t group;
};

// A tile of queries that is folded with the scales of a group.
struct FoldedQueries {
    int32_t *integers;  // [queries, slots, pairs]: pairs of neighbouring channels of a slot, int16 each
    float *numbers;     // [queries, stride]: the same before they are rounded
    float *back;        // [queries]: the value of one integer
    float *low;         // [queries]: the sums of a query's products with minimums
};

// The scales and minimums of one head's channels in a group, [stride] each with zeros behind the last channel. Its
// words, those of head 0 first, are cut into a share for each row of the group.
INLINE void channel_scales(const SidePlan &keys, int64_t group, int head, int32_t *words, float *scale, float *minimum) {
    const Side &side = keys.side;
    const int64_t share = side.token_share(), end = (int64_t)4 * (head + 1) * side.head_dim;
    const uint8_t *shares = side.rows + group * side.token_group * side.row_stride + side.first_word;
    uint8_t *to = (uint8_t *)words;
    for (int64_t at = end - (int64_t)4 * side.head_dim, count; at < end; at += count, to += count) {
        const int64_t inside = at % share;
        count = share - inside < end - at ? share - inside : end - at;
        memcpy(to, shares + at / share * side.row_stride + inside, (size_t)count);
    }
    for (int c = side.head_dim; c < keys.stride; c++) words[c] = 0;
    for (int c = 0; c < keys.stride; c += LANES) {
        const I word = load<I>(words + c);
        save(scale + c, from_half(word));
        save(minimum + c, from_half(word >> 16));
    }
}

// Folds query g of a tile, scaled float32 [stride] with zeros behind its last channel.
INLINE void fold_query(const SidePlan &keys, const float *x, const float *scale, const float *minimum, int g, const FoldedQueries &to) {
    float *numbers = to.numbers + (int64_t)g * keys.stride;
    Magnitude magnitude;
    F low = {};
    for (int c = 0; c < keys.stride; c += LANES) {
        const F query = load<F>(x + c), folded = query * load<F>(scale + c);
        low = fma(query, load<F>(minimum + c), low);
        magnitude.add(folded);
        save(numbers + c, folded);
    }
    to.low[g] = sum(low);
    if (!keys.integers) return;
    const float most = magnitude.largest(), largest_integer = keys.largest_integer();
    const bool finite = __builtin_isfinite(most);
    const float factor = finite && most > 1e-37f ? largest_integer / most : 0;
    to.back[g] = finite ? factor ? 1 / factor : 0.0f : NAN;
    int16_t *integers = (int16_t *)(to.integers + (int64_t)g * keys.slots * keys.pairs);
    // What a vector writes behind a slot, the next slot writes over.
    for (int k = 0; k < keys.slots; k++)
        for (int unit = 0; unit < keys.units; unit += LANES) {
            const F folded = finite ? load<F>(numbers + k * keys.units + unit) : F{};
            // The lowest bits of a number of this size are the integer that it is rounded to.
            const F rounded = folded * factor + 0x1.8p23f;
            save(integers + k * 2 * keys.pairs + unit, __builtin_convertvector((I)rounded, Vectors<LANES>::S));
        }
    // The other half of an odd slot's last word has codes of another head.
    if (keys.units % 2) for (int k = 0; k < keys.slots; k++) save(integers + k * 2 * keys.pairs + keys.units, (int16_t)0);
}

// A vector of scores from a token on, but for those of other runs.
INLINE void save_scores(float *scores, int token, const TokenRun &run, F x) {
    if (token + LANES <= run.last) save(scores + token, x);
    else for (int i = 0; token + i < run.last; i++) scores[token + i] = x[i];
}

// Scores [G, BLOCK] of the tokens of a run by products in integers, of words as `integer_scores` takes them.
template <int B, int G> static void run_integer_scores(const int32_t *words, int pairs, const FoldedQueries &q, const TokenRun &run, Ahead &ahead, float *scores) {
    constexpr int T = 2, SLOTS = slots_of(B);
    const int steps = BLOCK / (T * LANES) * pairs, tokens_of_step = (BLOCK + steps - 1) / steps;
    for (int token = run.first; token < run.last; token += T * LANES) {
        Products<LANES> sums[T][G] = {};
        for (int v = 0; v < pairs; v++) {
            H low[T], high[T] = {};
            load_words<B>(words, pairs, v, token, low, high);
            ahead.fetch(tokens_of_step);
            UNROLL for (int k = 0; k < SLOTS; k++) {
                H codes[T];
                UNROLL for (int u = 0; u < T; u++) codes[u] = code_of<B>(low[u], high[u], k);
                UNROLL for (int g = 0; g < G; g++) {
                    const H query = (H)(I{} + q.integers[(g * SLOTS + k) * pairs + v]);
                    UNROLL for (int u = 0; u < T; u++) sums[u][g] = dot(sums[u][g], codes[u], query);
                }
            }
        }
        UNROLL for (int u = 0; u < T; u++)
            UNROLL for (int g = 0; g < G; g++)
                save_scores(scores + g * BLOCK, token + u * LANES, run, as_float(whole(sums[u][g])) * q.back[g] + q.low[g]);
    }
}

// The same by products in float32 of codes [head_dim, BLOCK].
template <int G> static void run_float_scores(const float *codes, const SidePlan &keys, const FoldedQueries &q, const TokenRun &run, float *scores) {
    constexpr int T = 2;
    for (int token = run.first; token < run.last; token += T * LANES) {
        F sums[T][G] = {};
        for (int c = 0; c < keys.side.head_dim; c++) {
            F x[T];
            UNROLL for (int u = 0; u < T; u++) x[u] = load<F>(codes + c * BLOCK + token + u * LANES);
            UNROLL for (int g = 0; g < G; g++)
                UNROLL for (int u = 0; u < T; u++) sums[u][g] = fma(x[u], F{} + q.numbers[g * keys.stride + c], sums[u][g]);
        }
        UNROLL for (int u = 0; u < T; u++)
            UNROLL for (int g = 0; g < G; g++) save_scores(scores + g * BLOCK, token + u * LANES, run, sums[u][g] + q.low[g]);
    }
}
