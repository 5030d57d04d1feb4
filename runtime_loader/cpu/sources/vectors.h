// Vectors of GCC and clang, and what their operators lack. One width for each library: LANES numbers of 32 bits.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(KVTUNER_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <int L> struct Vectors {
    typedef float F __attribute__((vector_size(4 * L), may_alias, aligned(4)));
    typedef int32_t I __attribute__((vector_size(4 * L), may_alias, aligned(4)));
    typedef uint16_t H __attribute__((vector_size(4 * L), may_alias, aligned(4)));   // two halfwords a lane
    typedef int16_t S __attribute__((vector_size(2 * L), may_alias, aligned(2)));    // one halfword a lane
};
typedef Vectors<LANES>::F F;
typedef Vectors<LANES>::I I;
typedef Vectors<LANES>::H H;

template <class V> INLINE V load(const void *from) { V x; memcpy(&x, from, sizeof x); return x; }
template <class V> INLINE void save(void *to, V x) { memcpy(to, &x, sizeof x); }
// The bytes from `from` on as far as `limit`, beyond which no memory is ours; then zeros.
template <class V> INLINE V load_within(const uint8_t *from, const uint8_t *limit) {
    if (__builtin_expect(from + sizeof(V) <= limit, 1)) return load<V>(from);
    V x{};
    if (from < limit) memcpy(&x, from, (size_t)(limit - from));
    return x;
}

// The sum is rounded once where the processor can. Nothing else fuses: rows that are stored must be those of quant.py.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(KVTUNER_NEON)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE F as_float(I x) { return __builtin_convertvector(x, F); }
// Sums and maxima over the lanes of a vector, by halves.
template <int L> INLINE float sum_of(typename Vectors<L>::F x) {
    if constexpr (L == 1) {
        return x[0];
    } else {
        typename Vectors<L / 2>::F half[2];
        memcpy(half, &x, sizeof x);
        return sum_of<L / 2>(half[0] + half[1]);
    }
}
template <int L> INLINE float largest_of(typename Vectors<L>::F x) {
    if constexpr (L == 1) {
        return x[0];
    } else {
        typename Vectors<L / 2>::F half[2];
        memcpy(half, &x, sizeof x);
        return largest_of<L / 2>(half[0] > half[1] ? half[0] : half[1]);
    }
}
template <int L> INLINE int32_t largest_of_integers(typename Vectors<L>::I x) {
    if constexpr (L == 1) {
        return x[0];
    } else {
        typename Vectors<L / 2>::I half[2];
        memcpy(half, &x, sizeof x);
        return largest_of_integers<L / 2>(half[0] > half[1] ? half[0] : half[1]);
    }
}
INLINE float sum(F x) { return sum_of<LANES>(x); }
INLINE float largest(F x) { return largest_of<LANES>(x); }

// Magnitudes are in the order of their bits; NaN and infinity are above all others.
struct Magnitude {
    I bits = {};

    INLINE_MEMBER void add(F x) {
        const I magnitude = (I)x & 0x7FFFFFFF;
        bits = magnitude > bits ? magnitude : bits;
    }
    INLINE_MEMBER float largest() const {
        const int32_t most = largest_of_integers<LANES>(bits);
        float x;
        memcpy(&x, &most, sizeof x);
        return x;
    }
};

// fp16 in the low bits of each lane, exactly: subnormal numbers, infinity and NaN too.
INLINE F from_half(I h) {
    const I magnitude = (h & 0x7FFF) << 13, sign = (h & 0x8000) << 16;
    const F scaled = (F)magnitude * 0x1p112f;
    return (F)(((h & 0x7C00) == 0x7C00 ? magnitude | 0x7F800000 : (I)scaled) | sign);
}

// 2 to the power of x <= 0, to 3e-7 of it; NaN stays NaN. The series of 2**f, |f| <= 1/2, and an exponent beside it.
INLINE F exp2_of(F x) {
    const I none = x < -125.0f;
    x = none ? F{} - 125.0f : x;
    const F rounded = x + 0x1.8p23f, f = x - (rounded - 0x1.8p23f);
    F p = F{} + 1.5403530e-4f;
    p = fma(p, f, F{} + 1.3333558e-3f);
    p = fma(p, f, F{} + 9.6181291e-3f);
    p = fma(p, f, F{} + 5.5504109e-2f);
    p = fma(p, f, F{} + 2.4022651e-1f);
    p = fma(p, f, F{} + 6.9314718e-1f);
    p = fma(p, f, F{} + 1.0f);
    const F y = (F)((I)p + ((I)rounded << 23));
    return none ? F{} : y;
}

// The hyperbolic tangent, to 1e-7; NaN stays NaN.
INLINE F tanh_of(F x) {
    const I sign = (I)x & INT32_MIN;
    const F power = exp2_of((F)((I)x | INT32_MIN) * 2.88539008f);  // e to the power of -2 |x|
    return (F)((I)((1.0f - power) / (1.0f + power)) | sign);
}

// Of each lane the products of its two signed halfwords, added to an exact sum; `whole` is that sum.
#if defined(KVTUNER_NEON)
// NEON multiplies the low and the high half of a vector apart. Neighbours, which are those of a lane, are added up once.
template <int L> struct Products {
    static_assert(L == 4, "a vector of NEON has four lanes");
    Vectors<4>::I low, high;
};
INLINE Products<4> dot(Products<4> s, Vectors<4>::H a, Vectors<4>::H b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    s.low = (Vectors<4>::I)vmlal_s16((int32x4_t)s.low, vget_low_s16(x), vget_low_s16(y));
    s.high = (Vectors<4>::I)vmlal_high_s16((int32x4_t)s.high, x, y);
    return s;
}
INLINE Vectors<4>::I whole(Products<4> s) { return (Vectors<4>::I)vpaddq_s32((int32x4_t)s.low, (int32x4_t)s.high); }
#else
template <int L> using Products = typename Vectors<L>::I;
template <class V> INLINE V whole(V s) { return s; }
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
INLINE Vectors<16>::I dot(Vectors<16>::I s, Vectors<16>::H a, Vectors<16>::H b) {
    return (Vectors<16>::I)_mm512_dpwssd_epi32((__m512i)s, (__m512i)a, (__m512i)b);
}
INLINE Vectors<8>::I dot(Vectors<8>::I s, Vectors<8>::H a, Vectors<8>::H b) {
    return (Vectors<8>::I)_mm256_dpwssd_epi32((__m256i)s, (__m256i)a, (__m256i)b);
}
INLINE Vectors<4>::I dot(Vectors<4>::I s, Vectors<4>::H a, Vectors<4>::H b) {
    return (Vectors<4>::I)_mm_dpwssd_epi32((__m128i)s, (__m128i)a, (__m128i)b);
}
#elif defined(__AVX2__)
INLINE Vectors<8>::I dot(Vectors<8>::I s, Vectors<8>::H a, Vectors<8>::H b) {
    return s + (Vectors<8>::I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
INLINE Vectors<4>::I dot(Vectors<4>::I s, Vectors<4>::H a, Vectors<4>::H b) {
    return s + (Vectors<4>::I)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
#elif !defined(KVTUNER_NEON)
INLINE Vectors<4>::I dot(Vectors<4>::I s, Vectors<4>::H a, Vectors<4>::H b) {
    typedef Vectors<4>::I Words;
    const Words x = (Words)a, y = (Words)b;
    return s + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
}
#endif

#define SHUFFLE(V, a, b, ...) ((V)__builtin_shufflevector(a, b, __VA_ARGS__))
// Halfwords of two vectors in turn, in lanes of 128 bits.
INLINE void interleave(Vectors<4>::H x, Vectors<4>::H y, Vectors<4>::H *out) {
    out[0] = SHUFFLE(Vectors<4>::H, x, y, 0, 8, 1, 9, 2, 10, 3, 11);
    out[1] = SHUFFLE(Vectors<4>::H, x, y, 4, 12, 5, 13, 6, 14, 7, 15);
}
INLINE void interleave(Vectors<8>::H x, Vectors<8>::H y, Vectors<8>::H *out) {
    out[0] = SHUFFLE(Vectors<8>::H, x, y, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
    out[1] = SHUFFLE(Vectors<8>::H, x, y, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
}
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
INLINE void interleave(Vectors<16>::H x, Vectors<16>::H y, Vectors<16>::H *out) {
    out[0] = (Vectors<16>::H)_mm512_unpacklo_epi16((__m512i)x, (__m512i)y);
    out[1] = (Vectors<16>::H)_mm512_unpackhi_epi16((__m512i)x, (__m512i)y);
}
#endif
// The unit of lane i of the half `half` that `interleave` leaves.
INLINE int unit_of(int half, int i) { return i / 4 * 8 + half * 4 + i % 4; }
