// Products of a few queries with a block of keys: tokens side by side in a vector, so that nothing is summed across one.
#pragma once
#include "blocks.h"
#include "codes.h"

// What scores of a tile of queries need beside codes, for one head.
struct KeyScales {
    const float *query_scale;       // [queries]: the value of one integer of a query
    const float *query_sum;         // [queries, num_groups]: sums of a query's channels, scaled as its products
    const float *scale, *minimum;   // [num_groups, BLOCK]; null of numbers that are no codes
    int num_groups, slots_per_group, channels_per_group;
};

constexpr int key_vectors(int queries) { return LANES == 16 && queries == 4 ? 2 : queries == 4 ? 2 : 4; }

INLINE F scaled(const KeyScales &scales, F products, int g, int group, int token) {
    const F sums = F{} + scales.query_sum[g * scales.num_groups + group];
    const F minimum = sums * load<F>(scales.minimum + group * BLOCK + token);
    return fma(products, load<F>(scales.scale + group * BLOCK + token), minimum);
}

// The words of a pair of units for T vectors of tokens: at 3 bits low halfwords, and high ones behind all of those.
template <int B, int T> INLINE void load_words(const int32_t *words, int pairs, int v, int token, H (&low)[T], H (&high)[T]) {
    UNROLL for (int u = 0; u < T; u++) {
        low[u] = load<H>(words + v * BLOCK + token + u * LANES);
        if constexpr (B == 3) high[u] = load<H>(words + (pairs + v) * BLOCK + token + u * LANES);
    }
}

// Products in integers: `words` are pairs of units by token (at 3 bits low halfwords, then high ones), `q` the same
// pairs of channels of each slot, [pairs, slots, G]. Scores [G, BLOCK] are scaled and whole.
template <int B, int G> static void integer_scores(const int32_t *words, int pairs, const int32_t *q, const KeyScales &scales, Ahead &ahead, float *scores) {
    constexpr int T = key_vectors(G), SLOTS = slots_of(B);
    const int steps = BLOCK / (T * LANES) * pairs, tokens_of_step = (BLOCK + steps - 1) / steps;
    for (int token = 0; token < BLOCK; token += T * LANES) {
        F scores_of[T][G] = {};
        for (int group = 0; group < scales.num_groups; group++) {
            const int first = group * scales.slots_per_group;
            Products<LANES> sums[T][G] = {};
            auto add = [&](const H *low, const H *high, const int32_t *pair, int k) __attribute__((always_inline)) {
                H codes[T];
                UNROLL for (int u = 0; u < T; u++) codes[u] = code_of<B>(low[u], high[u], k);
                UNROLL for (int g = 0; g < G; g++) {
                    const H query = (H)(I{} + pair[k * G + g]);
                    UNROLL for (int u = 0; u < T; u++) sums[u][g] = dot(sums[u][g], codes[u], query);
                }
            };
            for (int v = 0; v < pairs; v++) {
                H low[T], high[T] = {};
                load_words<B>(words, pairs, v, token, low, high);
                ahead.fetch(tokens_of_step);
                const int32_t *pair = q + v * SLOTS * G;
                if (scales.slots_per_group == SLOTS) {
                    UNROLL for (int k = 0; k < SLOTS; k++) add(low, high, pair, k);
                } else {
                    for (int k = first; k < first + scales.slots_per_group; k++) add(low, high, pair, k);
                }
            }
            UNROLL for (int u = 0; u < T; u++)
                UNROLL for (int g = 0; g < G; g++) {
                    const F products = as_float(whole(sums[u][g])) * scales.query_scale[g];
                    scores_of[u][g] += scaled(scales, products, g, group, token + u * LANES);
                }
        }
        UNROLL for (int u = 0; u < T; u++)
            UNROLL for (int g = 0; g < G; g++) save(scores + g * BLOCK + token + u * LANES, scores_of[u][g]);
    }
}

// Products in float32 of numbers [head_dim, BLOCK], codes or not, with queries [G, head_dim].
template <int G> static void float_scores(const float *numbers, int head_dim, const float *q, const KeyScales &scales, float *scores) {
    constexpr int T = key_vectors(G);
    for (int token = 0; token < BLOCK; token += T * LANES) {
        F scores_of[T][G] = {};
        for (int group = 0; group < scales.num_groups; group++) {
            F sums[T][G] = {};
            const int first = group * scales.channels_per_group;
            for (int c = first; c < first + scales.channels_per_group; c++) {
                F x[T];
                UNROLL for (int u = 0; u < T; u++) x[u] = load<F>(numbers + c * BLOCK + token + u * LANES);
                UNROLL for (int g = 0; g < G; g++)
                    UNROLL for (int u = 0; u < T; u++) sums[u][g] = fma(x[u], F{} + q[g * head_dim + c], sums[u][g]);
            }
            UNROLL for (int u = 0; u < T; u++)
                UNROLL for (int g = 0; g < G; g++)
                    scores_of[u][g] += scales.scale ? scaled(scales, sums[u][g], g, group, token + u * LANES) : sums[u][g];
        }
        UNROLL for (int u = 0; u < T; u++)
            UNROLL for (int g = 0; g < G; g++) save(scores + g * BLOCK + token + u * LANES, scores_of[u][g]);
    }
}

template <int B> static void key_codes(const int32_t *words, int units, float *numbers) {
    constexpr int SLOTS = slots_of(B);
    const int pairs = (units + 1) / 2;
    for (int v = 0; v < pairs; v++)
        for (int token = 0; token < BLOCK; token += LANES) {
            const H low = load<H>(words + v * BLOCK + token), high = B == 3 ? load<H>(words + (pairs + v) * BLOCK + token) : H{};
            UNROLL for (int k = 0; k < SLOTS; k++) {
                const I codes = (I)code_of<B>(low, high, k);
                float *to = numbers + (k * units + 2 * v) * BLOCK + token;
                save(to, as_float(codes & 0xFFFF));
                if (2 * v + 1 < units) save(to + BLOCK, as_float(codes >> 16 & 0xFFFF));
            }
        }
}

// Keys of one head as float32 numbers [head_dim, BLOCK], in stored space: codes, or what rows of 16 bits hold.
static void key_numbers(const Side &side, const int32_t *words, float *numbers) {
    if (side.bits == 2) return key_codes<2>(words, side.head_dim / 8, numbers);
    if (side.bits == 3) return key_codes<3>(words, side.head_dim / 8, numbers);
    if (side.bits == 4) return key_codes<4>(words, side.head_dim / 4, numbers);
    if (side.bits == 8) return key_codes<8>(words, side.head_dim / 2, numbers);
    if (side.numbers == FLOAT32) {
        memcpy(numbers, words, sizeof(float) * side.head_dim * BLOCK);
        return;
    }
    for (int c = 0; c < side.head_dim; c++)
        for (int token = 0; token < BLOCK; token += LANES) {
            const I word = load<I>(words + c / 2 * BLOCK + token), half = c % 2 ? word >> 16 : word;
            save(numbers + c * BLOCK + token, side.numbers == BFLOAT16 ? (F)(half << 16) : from_half(half));
        }
}
