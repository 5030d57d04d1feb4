// Sums of a block of values by the weights of a few queries: channels side by side in a vector.
#pragma once
#include "blocks.h"
#include "codes.h"

// The weights of a tile of queries, for one head.
struct Weights {
    const int32_t *pairs;     // [queries, num_groups, BLOCK / 2]: those of two tokens, int16 each, times the scales
    const float *back;        // [queries, num_groups]: the value of one of their integers
    const float *exact;       // [queries, num_groups, BLOCK]: float32, times the scales
    const float *shrink;      // [queries]: what becomes of the sums so far
    int num_groups, slots_per_group, channels_per_group, num_tokens;
};

// Lanes of the vectors that hold units of one head: whole ones, or the fewest that are not.
INLINE int unit_lanes(int units) {
    if (LANES == 16 && units % 32 == 0) return 16;
    return LANES >= 8 && units >= 12 ? 8 : 4;
}
INLINE int num_chunks(int units, int lanes) { return (units + 2 * lanes - 1) / (2 * lanes); }

// Units of neighbouring tokens in turn, [chunks, BLOCK / 2, 2] vectors of L lanes.
template <int L> static void interleave_units(Place place, int chunks, uint16_t *out) {
    typedef typename Vectors<L>::H Units;
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int token = 0; token < BLOCK; token += 2) {
            const int64_t at = place.offset + chunk * 4 * L;
            Units both[2];
            interleave(load_within<Units>(place.rows[token] + at, place.limit), load_within<Units>(place.rows[token + 1] + at, place.limit), both);
            save(out, both[0]);
            save(out + 2 * L, both[1]);
            out += 4 * L;
        }
}

// Sums in integers of `units` as `interleave_units` leaves them, at 3 bits low halfwords and then high ones. They are
// added to `sums`, [chunks, slots, 2, G] vectors of L numbers.
template <int L, int B, int G> static void integer_sums(const uint16_t *units, int chunks, const Weights &weights, Ahead &ahead, float *sums) {
    typedef typename Vectors<L>::I Words;
    typedef typename Vectors<L>::F Numbers;
    typedef typename Vectors<L>::H Units;
    constexpr int SLOTS = slots_of(B), AT_ONCE = LANES == 16 ? 2 : 1, STEP = 4 * L;
    const int pairs = (weights.num_tokens + 1) / 2;
    for (int chunk = 0; chunk < chunks; chunk++) {
        const uint16_t *low = units + chunk * (BLOCK / 2) * STEP, *high = low + (B == 3 ? chunks * (BLOCK / 2) * STEP : 0);
        UNROLL for (int k = 0; k < SLOTS; k += AT_ONCE) {
            Products<L> s[AT_ONCE][2][G] = {};
            const int32_t *of_pair[AT_ONCE];
            UNROLL for (int i = 0; i < AT_ONCE; i++) of_pair[i] = weights.pairs + (k + i) / weights.slots_per_group * (BLOCK / 2);
            const int next = weights.num_groups * (BLOCK / 2);
            for (int pair = 0; pair < pairs; pair++) {
                if (k == 0) ahead.fetch(2);
                UNROLL for (int half = 0; half < 2; half++) {
                    const Units x = load<Units>(low + pair * STEP + half * 2 * L);
                    const Units y = B == 3 ? load<Units>(high + pair * STEP + half * 2 * L) : x;
                    UNROLL for (int i = 0; i < AT_ONCE; i++) {
                        const Units codes = code_of<B>(x, y, k + i);
                        UNROLL for (int g = 0; g < G; g++)
                            s[i][half][g] = dot(s[i][half][g], codes, (Units)(Words{} + of_pair[i][g * next + pair]));
                    }
                }
            }
            UNROLL for (int i = 0; i < AT_ONCE; i++)
                UNROLL for (int half = 0; half < 2; half++)
                    UNROLL for (int g = 0; g < G; g++) {
                        float *to = sums + (((chunk * SLOTS + k + i) * 2 + half) * G + g) * L;
                        const float back = weights.back[g * weights.num_groups + (k + i) / weights.slots_per_group];
                        save(to, load<Numbers>(to) * weights.shrink[g] + __builtin_convertvector(whole(s[i][half][g]), Numbers) * back);
                    }
        }
    }
}

// The sums of query g of a tile, by channel, that `integer_sums` leaves.
INLINE void read_integer_sums(const float *sums, int slots, int units, int chunks, int lanes, int tile, int g, float *out) {
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int slot = 0; slot < slots; slot++)
            for (int half = 0; half < 2; half++) {
                const float *from = sums + (((chunk * slots + slot) * 2 + half) * tile + g) * lanes;
                for (int lane = 0; lane < lanes; lane++) {
                    const int unit = chunk * 2 * lanes + unit_of(half, lane);
                    if (unit < units) out[slot * units + unit] = from[lane];
                }
            }
}

// Sums in float32 of numbers [BLOCK, stride], added to `sums` [G, head_dim].
template <int G> static void float_sums(const float *numbers, int stride, int head_dim, const Weights &weights, float *sums) {
    for (int group = 0; group < weights.num_groups; group++) {
        const int first = group * weights.channels_per_group, last = first + weights.channels_per_group;
        const float *weight = weights.exact + group * BLOCK;
        const int next = weights.num_groups * BLOCK;
        int c = first;
        for (; c + LANES <= last; c += LANES) {
            F s[G];
            UNROLL for (int g = 0; g < G; g++) s[g] = load<F>(sums + g * head_dim + c) * weights.shrink[g];
            for (int token = 0; token < weights.num_tokens; token++) {
                const F x = load<F>(numbers + token * stride + c);
                UNROLL for (int g = 0; g < G; g++) s[g] = fma(x, F{} + weight[g * next + token], s[g]);
            }
            UNROLL for (int g = 0; g < G; g++) save(sums + g * head_dim + c, s[g]);
        }
        for (; c < last; c++)
            for (int g = 0; g < G; g++) {
                float s = sums[g * head_dim + c] * weights.shrink[g];
                for (int token = 0; token < weights.num_tokens; token++) s += numbers[token * stride + c] * weight[g * next + token];
                sums[g * head_dim + c] = s;
            }
    }
}

// The values of one head as float32 numbers [BLOCK, stride], in stored space: codes, or what rows of 16 bits hold.
// `rows` are those of the head; at 3 bits staged ones.
static void value_numbers(const Side &side, Place place, int num_tokens, int stride, float *numbers) {
    const int D = side.head_dim, bits = side.bits, slots = bits < 16 ? slots_of(bits) : 1, units = D / slots;
    for (int token = 0; token < num_tokens; token++, numbers += stride) {
        const uint8_t *from = place.rows[token] + place.offset;
        if (bits < 16) {
            const uint8_t *high = from + 2 * units;
            for (int k = 0; k < slots; k++)
                for (int unit = 0; unit < units; unit++) {
                    const uint32_t low = load<uint16_t>(from + 2 * unit), third = bits == 3 ? load<uint16_t>(high + 2 * unit) : 0;
                    numbers[k * units + unit] = (float)code_at(bits, low, third, k);
                }
        } else if (side.numbers == FLOAT32) {
            memcpy(numbers, from, sizeof(float) * D);
        } else {
            typedef Vectors<LANES>::S Halves;
            for (int c = 0; c < D; c += LANES) {  // to a stride of whole vectors
                const Halves raw = load_within<Halves>(from + 2 * c, place.limit);
                const I half = __builtin_convertvector(raw, I);
                save(numbers + c, side.numbers == BFLOAT16 ? (F)(half << 16) : from_half(half));
            }
        }
    }
}
