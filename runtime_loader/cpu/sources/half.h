// One fp16 number at a time, rounded as IEEE rounds: to nearest, ties to even.
#pragma once
#include <stdint.h>
#include <string.h>

inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

inline uint16_t to_half(float x) {
    const uint32_t all = bits_of(x), sign = all >> 16 & 0x8000, magnitude = all & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // rounds to 65536 or more
    if (magnitude < 0x38800000) return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000));  // subnormal
    return (uint16_t)(sign | (magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}
inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    if ((half & 0x7C00) == 0x7C00) return float_of(magnitude | 0x7F800000 | sign);
    return float_of(bits_of(float_of(magnitude) * 0x1p112f) | sign);
}
// The largest fp16 at or below x, and the smallest at or above; |x| <= 65504.
inline uint16_t half_down(float x) {
    const uint16_t nearest = to_half(x);
    if (half_to_float(nearest) <= x) return nearest;
    return (uint16_t)(nearest & 0x8000 ? nearest + 1 : nearest - 1);
}
inline uint16_t half_up(float x) { return half_down(-x) ^ 0x8000; }
