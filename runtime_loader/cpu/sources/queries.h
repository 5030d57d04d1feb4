// Queries as integers, for products with codes.
#pragma once
#include "half.h"
#include "plan.h"

// A query as integers of its channels [head_dim]; returns the value of one, NaN where it is not finite.
// The sums are those of the integers too, so that a score is the product of one rounded query with a key.
inline float round_query(const SidePlan &keys, float scale, const float *x, int16_t *integers, float *group_sums) {
    const int D = keys.side.head_dim, of_group = keys.channels_per_group();
    uint32_t most = 0;  // as in `Magnitude`
    for (int c = 0; c < D; c++) {
        const uint32_t magnitude = bits_of(x[c]) & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
    }
    const bool finite = most < 0x7F800000;
    const float loudest = float_of(most);
    const float factor = finite && loudest > 1e-37f ? keys.largest_integer() / loudest : 0;
    const float back = finite ? factor ? scale / factor : 0.0f : NAN;
    // The lowest bits of a number of this size are the integer that it is rounded to.
    for (int c = 0; c < D; c++) integers[c] = (int16_t)bits_of((factor ? x[c] * factor : 0.0f) + 0x1.8p23f);
    for (int group = 0; group < keys.num_groups; group++) {
        int32_t sum = 0;
        for (int c = group * of_group; c < (group + 1) * of_group; c++) sum += integers[c];
        group_sums[group] = (float)sum * back;
    }
    return back;
}

// Query g of a tile as pairs of the integers of neighbouring channels, [pairs, slots, tile].
inline void pair_query(const SidePlan &keys, const int16_t *integers, int tile, int g, int32_t *to) {
    for (int v = 0; v < keys.pairs; v++)
        for (int k = 0; k < keys.slots; k++) {
            const int16_t *at = integers + k * keys.units + 2 * v;
            const uint32_t second = 2 * v + 1 < keys.units ? (uint16_t)at[1] : 0;
            to[(v * keys.slots + k) * tile + g] = (int32_t)((uint16_t)at[0] | second << 16);
        }
}
