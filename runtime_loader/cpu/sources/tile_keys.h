// Products of up to 16 queries with a block of keys, by tiles of bytes. Scores are to the bit those of keys.h.
#pragma once
#include "keys.h"
#include "queries.h"
#include "tiles.h"

// A query as bytes of a row of tiles, [groups, steps, 2] tiles, of which those of a group are zeros elsewhere.
inline void spread_query(const SidePlan &keys, const int16_t *integers, int row, uint8_t *tiles) {
    const int half = keys.slots / 2;
    for (int slot = 0; slot < keys.slots; slot++) {
        uint8_t *of_group = tiles + slot / keys.slots_per_group * keys.steps * 2 * TILE_BYTES + row * STEP_BYTES;
        const int first = slot % half * 4 + slot / half;
        for (int unit = 0; unit < keys.units; unit++) {
            const int byte = unit / 2 * half * 4 + unit % 2 * 2 + first;
            save_bytes(of_group + byte / STEP_BYTES * 2 * TILE_BYTES + byte % STEP_BYTES, *integers++);
        }
    }
}

// Codes of a block of keys as columns of tiles, [BLOCK / 16, steps] of them, from words as `integer_scores` takes them.
template <int B> static void key_columns(const int32_t *words, const SidePlan &keys, Ahead &ahead, uint8_t *columns) {
    constexpr int HALF = slots_of(B) / 2;
    const int pairs = keys.pairs, steps = keys.steps, tokens_of_pair = (TILE_COLUMNS + pairs - 1) / pairs;
    for (int token = 0; token < BLOCK; token += TILE_COLUMNS, columns += steps * TILE_BYTES) {
        uint8_t *to = columns;
        for (int v = 0; v < pairs; v++) {
            H low[1], high[1] = {};
            load_words<B>(words, pairs, v, token, low, high);
            ahead.fetch(tokens_of_pair);
            UNROLL for (int s = 0; s < HALF; s++, to += STEP_BYTES) save(to, byte_codes<B>(low[0], high[0], s));
        }
    }
}

// Scores [rows, BLOCK] of queries as `spread_query` leaves them.
INLINE void tile_scores(const TileUnit &unit, const uint8_t *columns, const SidePlan &keys, const uint8_t *queries, const KeyScales &scales, int rows, int32_t *sums, float *scores) {
    const int steps = keys.steps;
    for (int group = 0; group < keys.num_groups; group++, queries += steps * 2 * TILE_BYTES)
        for (int token = 0; token < BLOCK; token += 2 * TILE_COLUMNS) {
            const uint8_t *first = columns + token / TILE_COLUMNS * steps * TILE_BYTES;
            unit.multiply(queries, first, first + steps * TILE_BYTES, steps, sums);
            for (int row = 0; row < rows; row++)
                UNROLL for (int u = 0; u < 2; u++) {
                    float *to = scores + row * BLOCK + token + u * TILE_COLUMNS;
                    const F products = as_float(joined_sums(sums + u * TILE_SUMS, row)) * scales.query_scale[row];
                    const F before = group ? load<F>(to) : F{};
                    save(to, before + scaled(scales, products, row, group, token + u * TILE_COLUMNS));
                }
        }
}
