// A block of tokens: the rows of its slots, and their words with tokens side by side in a vector.
#pragma once
#include "interface.h"
#include "vectors.h"

constexpr int BLOCK = 64;             // tokens; what is kept of a head's block stays in the first cache
constexpr int TILE = LANES < 8 ? 4 : 8;  // words that are transposed at once

// The bytes of one head, or of the scale words of several, in each row of a block.
struct Place {
    const uint8_t *const *rows;  // [BLOCK]
    int64_t offset;
    const uint8_t *limit;        // the end of memory that may be read
};

// The lines of one head in the rows of the next block, asked for a few at a time between what is computed: all at once
// they would wait for one another. After `BLOCK` tokens there are no more.
struct Ahead {
    const uint8_t *const *rows;  // [BLOCK]; null where no block follows
    int64_t offset, num_bytes;
    int next;

    INLINE_MEMBER void fetch(int tokens) {
        if (!rows) return;
        for (const int end = next + tokens; next < end && next < BLOCK; next++)
            for (int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(rows[next] + offset + line);
    }
};

INLINE void transpose_tile(I *r) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    I a[8], b[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        a[i] = (I)_mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        a[i + 1] = (I)_mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        b[i] = (I)_mm512_unpacklo_epi64((__m512i)a[i], (__m512i)a[i + 2]);
        b[i + 1] = (I)_mm512_unpackhi_epi64((__m512i)a[i], (__m512i)a[i + 2]);
        b[i + 2] = (I)_mm512_unpacklo_epi64((__m512i)a[i + 1], (__m512i)a[i + 3]);
        b[i + 3] = (I)_mm512_unpackhi_epi64((__m512i)a[i + 1], (__m512i)a[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = SHUFFLE(I, b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        r[i + 4] = SHUFFLE(I, b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
#elif defined(__AVX2__)
    I a[8], b[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        a[i] = (I)_mm256_unpacklo_epi32((__m256i)r[i], (__m256i)r[i + 1]);
        a[i + 1] = (I)_mm256_unpackhi_epi32((__m256i)r[i], (__m256i)r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        b[i] = (I)_mm256_unpacklo_epi64((__m256i)a[i], (__m256i)a[i + 2]);
        b[i + 1] = (I)_mm256_unpackhi_epi64((__m256i)a[i], (__m256i)a[i + 2]);
        b[i + 2] = (I)_mm256_unpacklo_epi64((__m256i)a[i + 1], (__m256i)a[i + 3]);
        b[i + 3] = (I)_mm256_unpackhi_epi64((__m256i)a[i + 1], (__m256i)a[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = SHUFFLE(I, b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = SHUFFLE(I, b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
    const I a = SHUFFLE(I, r[0], r[1], 0, 4, 1, 5), b = SHUFFLE(I, r[0], r[1], 2, 6, 3, 7);
    const I c = SHUFFLE(I, r[2], r[3], 0, 4, 1, 5), d = SHUFFLE(I, r[2], r[3], 2, 6, 3, 7);
    r[0] = SHUFFLE(I, a, c, 0, 1, 4, 5);
    r[1] = SHUFFLE(I, a, c, 2, 3, 6, 7);
    r[2] = SHUFFLE(I, b, d, 0, 1, 4, 5);
    r[3] = SHUFFLE(I, b, d, 2, 3, 6, 7);
#endif
}

// Words of 32 bits from a place on, as [num_words, BLOCK]; there is room for whole tiles of words.
INLINE void transpose_words(Place place, int num_words, int32_t *words) {
    for (int word = 0; word < num_words; word += TILE)
        for (int token = 0; token < BLOCK; token += LANES) {
            const int64_t at = place.offset + 4 * word;
            I r[TILE];
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
            UNROLL for (int i = 0; i < 8; i++) {
                typedef Vectors<8>::I Half;
                const Half low = load_within<Half>(place.rows[token + i] + at, place.limit);
                const Half high = load_within<Half>(place.rows[token + 8 + i] + at, place.limit);
                r[i] = (I)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
            }
#else
            UNROLL for (int i = 0; i < TILE; i++) r[i] = load_within<I>(place.rows[token + i] + at, place.limit);
#endif
            transpose_tile(r);
            UNROLL for (int i = 0; i < TILE; i++) save(words + (word + i) * BLOCK + token, r[i]);
        }
}

// The units of 3 bits of one head, whose low halfwords and third bytes lie apart, as low halfwords and then high ones.
INLINE void stage_three_bits(const uint8_t *row, int num_heads, int head, int units, uint16_t *out) {
    const uint8_t *low = row + (int64_t)head * units * 2, *third = row + (int64_t)num_heads * units * 2 + head * units;
    memcpy(out, low, 2 * units);
    for (int i = 0; i < units / 2; i++) {
        out[units + i] = third[2 * i];
        out[units + units / 2 + i] = third[2 * i + 1];
    }
}

// The scales and minimums of the groups of one head, [num_groups, BLOCK], from words of all heads, [.., BLOCK].
INLINE void scales_of(const Side &side, const int32_t *words, int first, float *scale, float *minimum) {
    const int num_groups = side.head_dim / side.group_size;
    for (int group = 0; group < num_groups; group++)
        for (int token = 0; token < BLOCK; token += LANES) {
            const int at = first + group, to = group * BLOCK + token;
            if (side.word_bits == 32) {
                const I word = load<I>(words + at * BLOCK + token);
                save(scale + to, from_half(word));
                save(minimum + to, from_half(word >> 16));
            } else {
                const I word = load<I>(words + at / 2 * BLOCK + token) >> (at % 2 * 16) & 0xFFFF;
                const F exact = from_half(word >> 5 << 4);
                const float unit = side.bits == 2 ? -0.125f : side.bits == 3 ? -0.25f : -0.5f;
                save(scale + to, exact);
                save(minimum + to, as_float(word & 31) * unit * exact);
            }
        }
}
