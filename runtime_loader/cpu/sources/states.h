// Keys, values, queries and outputs as a model has them, and the steps of transforms on float32.
#pragma once
#include "half.h"
#include "interface.h"

constexpr float LARGEST_HALF = 65504;

inline int64_t size_of(int32_t numbers) { return numbers == FLOAT32 ? 4 : 2; }

inline void read_numbers(const void *from, int64_t at, int32_t numbers, int count, float *to) {
    if (numbers == FLOAT32) {
        memcpy(to, (const float *)from + at, sizeof(float) * count);
    } else if (numbers == BFLOAT16) {
        const uint16_t *halves = (const uint16_t *)from + at;
        for (int c = 0; c < count; c++) to[c] = float_of((uint32_t)halves[c] << 16);
    } else {
        const uint16_t *halves = (const uint16_t *)from + at;
        for (int c = 0; c < count; c++) to[c] = half_to_float(halves[c]);
    }
}

// Rounds to nearest, ties to even; in fp16 what lies beyond its largest number is that.
inline void write_numbers(const float *from, int count, int32_t numbers, void *to, int64_t at) {
    if (numbers == FLOAT32) {
        memcpy((float *)to + at, from, sizeof(float) * count);
    } else if (numbers == BFLOAT16) {
        uint16_t *halves = (uint16_t *)to + at;
        for (int c = 0; c < count; c++) {
            const uint32_t bits = bits_of(from[c]), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
            halves[c] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
        }
    } else {
        uint16_t *halves = (uint16_t *)to + at;
        for (int c = 0; c < count; c++) {
            const float x = from[c] > LARGEST_HALF ? LARGEST_HALF : from[c] < -LARGEST_HALF ? -LARGEST_HALF : from[c];
            halves[c] = to_half(x);
        }
    }
}

// Sylvester's, in blocks of channels, as kvtuner/quant.py sums it.
inline void hadamard(float *x, int count, int block, float factor) {
    if (block == 1) return;
    for (int h = 1; h < block; h *= 2)
        for (int i = 0; i < count; i += 2 * h)
            for (int c = i; c < i + h; c++) {
                const float a = x[c], b = x[c + h];
                x[c] = a + b, x[c + h] = a - b;
            }
    for (int c = 0; c < count; c++) x[c] *= factor;
}
