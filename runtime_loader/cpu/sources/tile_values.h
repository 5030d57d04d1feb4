// Sums of a block of values by the weights of up to 16 queries, by tiles of bytes. They are to the bit those of values.h.
#pragma once
#include "plan.h"
#include "tiles.h"

// The weights of a tile of queries as bytes of rows of tiles, [groups, 2] tiles.
INLINE void spread_weights(const int32_t *pairs, int num_groups, int rows, uint8_t *tiles) {
    for (int row = 0; row < rows; row++)
        for (int group = 0; group < num_groups; group++) {
            const int16_t *integers = (const int16_t *)(pairs + (row * num_groups + group) * (BLOCK / 2));
            uint8_t *to = tiles + 2 * group * TILE_BYTES + row * STEP_BYTES;
            for (int token = 0; token < BLOCK; token++) save_bytes(to + token, integers[token]);
        }
}

// 16 bytes of each of four tokens, as they lie.
INLINE H bytes_of_four(Place place, int token, int64_t at) {
    typedef Vectors<4>::I Bytes;
    __m512i x = {};
    const auto part = [&](int i) { return (__m128i)load_within<Bytes>(place.rows[token + i] + place.offset + at, place.limit); };
    x = _mm512_inserti32x4(x, part(0), 0);
    x = _mm512_inserti32x4(x, part(1), 1);
    x = _mm512_inserti32x4(x, part(2), 2);
    return (H)_mm512_inserti32x4(x, part(3), 3);
}
// The same byte of four tokens side by side.
INLINE H transposed_bytes(H x) {
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return (H)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, (__m512i)x), bytes);
}

// Codes of a block of values as columns of tiles, [slots / 2, byte_tiles] of them. `place` is that of the head; at 3 bits
// of staged rows.
template <int B> static void value_columns(Place place, const SidePlan &values, Ahead &ahead, uint8_t *columns) {
    constexpr int HALF = slots_of(B) / 2;
    const int byte_tiles = values.byte_tiles, of_high = values.units * 2, tokens_of_tile = (BLOCK + byte_tiles - 1) / byte_tiles;
    for (int tile = 0; tile < byte_tiles; tile++, columns += TILE_BYTES) {
        ahead.fetch(tokens_of_tile);
        uint8_t *to = columns;
        for (int token = 0; token < BLOCK; token += 4, to += STEP_BYTES) {
            const H raw = bytes_of_four(place, token, tile * 16), low = B == 3 ? raw : transposed_bytes(raw);
            const H high = B == 3 ? bytes_of_four(place, token, of_high + tile * 16) : low;
            UNROLL for (int s = 0; s < HALF; s++) {
                const H codes = byte_codes<B>(low, high, s);
                save(to + s * byte_tiles * TILE_BYTES, B == 3 ? transposed_bytes(codes) : codes);
            }
        }
    }
}

// Adds the sums of `columns` to `sums`, [slots / 2, byte_tiles, TILE_ROWS, TILE_COLUMNS]. In a column stand the codes of
// a byte, of two slots in turn: where these have scales of their own, each has the weights of its group.
INLINE void tile_sums(const TileUnit &unit, const uint8_t *columns, const SidePlan &values, const uint8_t *tiles, const Weights &weights, int rows, int32_t *products, float *sums) {
    const int half = values.slots / 2, byte_tiles = values.byte_tiles, num_groups = values.num_groups;
    const bool shared = num_groups == 1;
    for (int s = 0; s < half; s++)
        for (int side = 0; side < (shared ? 1 : 2); side++) {
            const int group = (s + side * half) / values.slots_per_group;
            I chosen;
            UNROLL for (int i = 0; i < LANES; i++) chosen[i] = shared || i % 2 == side ? -1 : 0;
            for (int column = s * byte_tiles; column < (s + 1) * byte_tiles; column += 2) {
                const uint8_t *first = columns + column * TILE_BYTES;
                unit.multiply(tiles + 2 * group * TILE_BYTES, first, first + TILE_BYTES, 1, products);
                float *to = sums + column * TILE_ROWS * TILE_COLUMNS;
                for (int row = 0; row < rows; row++, to += TILE_COLUMNS) {
                    const F shrink = F{} + weights.shrink[row], back = F{} + weights.back[row * num_groups + group];
                    UNROLL for (int u = 0; u < 2; u++) {
                        float *of_tile = to + u * TILE_ROWS * TILE_COLUMNS;
                        const F before = load<F>(of_tile), added = as_float(joined_sums(products + u * TILE_SUMS, row));
                        const F after = before * shrink + added * back;
                        save(of_tile, chosen ? after : before);
                    }
                }
            }
        }
}

// The sums of a row of a tile, by channel, that `tile_sums` leaves.
INLINE void read_tile_sums(const float *sums, const SidePlan &values, int row, float *out) {
    const int half = values.slots / 2;
    for (int slot = 0; slot < values.slots; slot++)
        for (int unit = 0; unit < values.units; unit++) {
            const int byte = 2 * unit + slot / half, column = slot % half * values.byte_tiles + byte / TILE_COLUMNS;
            *out++ = sums[(column * TILE_ROWS + row) * TILE_COLUMNS + byte % TILE_COLUMNS];
        }
}
