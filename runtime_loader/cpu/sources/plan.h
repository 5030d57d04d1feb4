// What is known of a job before it runs: the sizes of either side, and its parts.
#pragma once
#include <math.h>

#include "blocks.h"
#include "codes.h"
#include "tiles.h"
#include "values.h"

constexpr float LARGEST_INTEGER = 32767.0f;

// One side of a job, with what is derived from it.
struct SidePlan {
    Side side;
    bool integers, has_codes, fits_tiles;
    int slots, units, pairs, num_groups, slots_per_group, num_words, lanes, chunks, stride;
    int steps, byte_tiles;  // of tiles: products that sum up a query's channels, and the columns of a head's bytes
    int64_t head_bytes;

    explicit SidePlan(const Side &from, bool in_integers) : side(from) {
        has_codes = side.bits < 16;
        integers = in_integers && has_codes;
        slots = has_codes ? slots_of(side.bits) : 1;
        units = side.head_dim / slots;
        pairs = (units + 1) / 2;
        num_groups = has_codes ? side.head_dim / side.group_size : 1;
        slots_per_group = slots / num_groups;
        const int itemsize = side.numbers == FLOAT32 ? 4 : 2;
        head_bytes = has_codes ? side.bits == 3 ? units * 2 : (int64_t)side.head_dim * side.bits / 8 : (int64_t)side.head_dim * itemsize;
        num_words = has_codes ? side.bits == 3 ? 2 * pairs : pairs : (side.head_dim * itemsize + 3) / 4;
        lanes = unit_lanes(units);
        chunks = num_chunks(units, lanes);
        stride = (side.head_dim + LANES - 1) / LANES * LANES;
        fits_tiles = HAS_TILES && integers && !is_per_channel();
        steps = (2 * slots * pairs + STEP_BYTES - 1) / STEP_BYTES;
        byte_tiles = (2 * units + 2 * TILE_COLUMNS - 1) / (2 * TILE_COLUMNS) * 2;
    }
    int channels_per_group() const { return side.head_dim / num_groups; }
    const uint8_t *limit() const {
        return side.num_rows ? side.rows + (side.num_rows - 1) * side.row_stride + side.row_bytes : side.rows;
    }
    int words_of_heads(int heads) const {
        return has_codes && !is_per_channel() ? ((heads * num_groups * side.word_bits / 8 + 3) / 4 + TILE) / TILE * TILE : 0;
    }
    bool is_per_channel() const { return side.token_group > 1; }
    // Of a query of keys; per channel it is folded later, and float32 till then.
    int64_t query_numbers() const { return is_per_channel() ? stride : integers ? (int64_t)pairs * slots : side.head_dim; }
    // The largest integer of a query, so that its sum over all channels of the largest codes stays within 31 bits.
    float largest_integer() const {
        const double most = 2147483647.0 / ((double)((1 << side.bits) - 1) * side.head_dim);
        return most < LARGEST_INTEGER ? floorf((float)most * 0.999f) : LARGEST_INTEGER;
    }
    int64_t sums_numbers() const { return integers ? (int64_t)chunks * slots * 2 * lanes : side.head_dim; }
};

// Some queries of a request, as rows of `gqa` for each head, over tokens [first, last) of it.
struct Item {
    int64_t request, query, num_queries, first, last, partial;  // `partial`: where sums go that are merged later, or -1
    int32_t head, num_heads;
};
