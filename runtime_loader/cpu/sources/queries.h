// Queries as integers, for products with codes.
#pragma once
#include "plan.h"

// Query g of a tile as pairs of integers [pairs, slots, tile]; returns the value of one, NaN where it is not finite.
// The sums are those of the integers too, so that a score is the product of one rounded query with a key.
inline float integer_query(const SidePlan &keys, float scale, const float *x, int tile, int g, int32_t *to, float *group_sums) {
    const int D = keys.side.head_dim;
    float loudest = 0;
    bool finite = true;
    for (int c = 0; c < D; c++) {
        finite &= __builtin_isfinite(x[c]);
        loudest = fmaxf(loudest, fabsf(x[c]));
    }
    const float factor = finite && loudest > 1e-37f ? keys.largest_integer() / loudest : 0;
    const float back = finite ? factor ? scale / factor : 0.0f : NAN;
    for (int v = 0; v < keys.pairs; v++)
        for (int k = 0; k < keys.slots; k++) {
            const int unit = 2 * v;
            uint32_t pair = 0;
            for (int i = 0; i < 2 && unit + i < keys.units; i++) {
                const int16_t integer = (int16_t)(factor ? lrintf(x[k * keys.units + unit + i] * factor) : 0);
                pair |= (uint32_t)(uint16_t)integer << (16 * i);
                group_sums[k / keys.slots_per_group] += integer;  // exact below 2**24
            }
            to[(v * keys.slots + k) * tile + g] = (int32_t)pair;
        }
    for (int group = 0; group < keys.num_groups; group++) group_sums[group] *= back;
    return back;
}
