// Tiles of AMX: exact products of int16 with bytes. A number of 16 bits is two bytes there, a signed and an unsigned
// one, of which each has a product of its own.
#pragma once
#include "vectors.h"

// A processor without them takes loops in their place where KVTUNER_TILES is defined, which tests do.
#if defined(__AMX_INT8__)
#define KVTUNER_TILES
#endif
#if defined(KVTUNER_TILES)
constexpr bool HAS_TILES = true;
static_assert(LANES == 16, "processors with tiles have vectors of 16 numbers");
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE_ROWS = 16;                           // queries of a tile
constexpr int TILE_COLUMNS = 16;                        // sums of a row
constexpr int STEP_BYTES = 64;                          // numbers of a row that one product sums up
constexpr int TILE_BYTES = TILE_ROWS * STEP_BYTES;      // of a tile
constexpr int TILE_SUMS = 2 * TILE_ROWS * TILE_COLUMNS;  // numbers that a tile of columns leaves, high and low ones

// The bytes of a row of int16 in two tiles, one behind the other: `at` is its place in the first.
INLINE void save_bytes(uint8_t *at, int16_t number) { at[0] = (uint8_t)(number >> 8), at[TILE_BYTES] = (uint8_t)number; }
// The sums of int16 that those of its bytes make.
INLINE I joined_sums(const int32_t *sums, int row) {
    const int32_t *high = sums + row * TILE_COLUMNS;
    return (load<I>(high) << 8) + load<I>(high + TILE_ROWS * TILE_COLUMNS);
}

class TileUnit {
   public:
    // Products of so many rows follow.
    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
#if defined(__AMX_INT8__)
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = STEP_BYTES, config.rows[tile] = (uint8_t)(tile < 6 ? rows : TILE_ROWS);
        __asm__ volatile("" : : "r"(&config) : "memory");  // GCC knows of a part of what the next line reads
        _tile_loadconfig(&config);
#endif
    }

    // The registers are given up, so that nothing saves them when threads change.
    void release() {
#if defined(__AMX_INT8__)
        if (rows_) _tile_release();
#endif
        rows_ = 0;
    }

    // Sums over `steps` products of rows [steps, 2, TILE_ROWS, STEP_BYTES] with each of two tiles of columns, whose
    // steps lie one behind the other: [steps, 16, TILE_COLUMNS, 4] bytes. They come as [2, TILE_SUMS].
    void multiply(const uint8_t *rows, const uint8_t *first, const uint8_t *second, int steps, int32_t *sums) const {
#if defined(__AMX_INT8__)
        __asm__ volatile("" ::: "memory");  // GCC does not know that a tile is loaded from memory
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < steps; step++) {
            _tile_loadd(4, rows + 2 * step * TILE_BYTES, STEP_BYTES);
            _tile_loadd(5, rows + (2 * step + 1) * TILE_BYTES, STEP_BYTES);
            _tile_loadd(6, first + step * TILE_BYTES, STEP_BYTES);
            _tile_loadd(7, second + step * TILE_BYTES, STEP_BYTES);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbuud(1, 5, 6);
            _tile_dpbsud(2, 4, 7);
            _tile_dpbuud(3, 5, 7);
        }
        _tile_stored(0, sums, STEP_BYTES);
        _tile_stored(1, sums + TILE_SUMS / 2, STEP_BYTES);
        _tile_stored(2, sums + TILE_SUMS, STEP_BYTES);
        _tile_stored(3, sums + TILE_SUMS * 3 / 2, STEP_BYTES);
#else
        for (int tile = 0; tile < 2; tile++)
            for (int half = 0; half < 2; half++)
                for (int row = 0; row < rows_; row++) {
                    I sum = {};
                    for (int i = 0; i < steps * STEP_BYTES; i++) {
                        const int step = i / STEP_BYTES, byte = i % STEP_BYTES;
                        const uint8_t number = rows[(2 * step + half) * TILE_BYTES + row * STEP_BYTES + byte];
                        const I columns = load<I>((tile ? second : first) + step * TILE_BYTES + byte / 4 * STEP_BYTES);
                        sum += (columns >> (byte % 4 * 8) & 255) * (half ? (int32_t)number : (int8_t)number);
                    }
                    save(sums + tile * TILE_SUMS + half * TILE_SUMS / 2 + row * TILE_COLUMNS, sum);
                }
#endif
    }

   private:
    int rows_ = 0;
};
