// Codes out of units, two units in the halfwords of a lane.
#pragma once
#include "interface.h"
#include "vectors.h"

constexpr int slots_of(int bits) { return bits == 3 ? 8 : 16 / bits; }

// Code k of units, of which `low` has the low 16 bits, and at 3 bits `high` the other 8.
template <int B, class V> INLINE V code_of(V low, V high, int k) {
    if constexpr (B == 3) {
        if (k < 5) return (low >> (3 * k)) & 7;
        if (k == 5) return low >> 15 | (high & 3) << 1;
        return (high >> (3 * k - 16)) & 7;
    } else if constexpr (B == 8) {
        return k ? low >> 8 : low & 255;
    } else {
        return (low >> (B * k)) & ((1 << B) - 1);
    }
}
// Codes k and k + slots / 2 of units, in the two bytes of each; or, of bytes in any order but for 3 bits, those of each.
template <int B, class V> INLINE V byte_codes(V low, V high, int k) {
    if constexpr (B == 8) return low;
    else if constexpr (B == 3) return code_of<3>(low, high, k) | code_of<3>(low, high, k + 4) << 8;
    else return (low >> (B * k)) & ((1 << B) - 1) * 257;
}
INLINE uint32_t code_at(int bits, uint32_t low, uint32_t high, int k) {
    return (low | high << 16) >> (bits * k) & ((1u << bits) - 1);
}
