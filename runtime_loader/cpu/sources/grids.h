// Codes, scale and minimum of one group of channels: kvtuner/quant.py and grid_fit.py, operation by operation.
#pragma once
#include <math.h>

#include "half.h"

constexpr float FP16_MAX = 65504.0f, LARGEST_SCALE = 65024.0f, MIN_SCALE = 0x1p-14f, MAX_OFFSET = 256.0f, MAX_GAIN = 1.6f;
constexpr int FRACTION = 1 << 14, LAST_ZERO_POINT = 31, SYMMETRIC_ZERO_POINT = 16;

struct GridKind {
    int bits, channels;
    bool symmetric, fitted, short_words;

    int top() const { return (1 << bits) - 1; }
    int zero() const { return 1 << (bits - 1); }
    float zero_point_unit() const { return bits == 2 ? 0.125f : bits == 3 ? 0.25f : 0.5f; }
    float units() const { return symmetric ? 127.0f : 255.0f; }
};

// What a scale word holds: a minimum as float32 and as fp16, or a zero point.
struct Grid {
    uint16_t scale;
    float minimum;
    int zero_point;
};

INLINE float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline Grid with_zero_point(const GridKind &kind, uint16_t scale, float zero_point) {
    return {scale, zero_point * -kind.zero_point_unit() * half_to_float(scale), (int)zero_point};
}
inline Grid with_minimum(uint16_t scale, uint16_t minimum) { return {scale, half_to_float(minimum), 0}; }
inline uint16_t scale_above(uint16_t half) { return (uint16_t)((half + 15) >> 4 << 4); }
inline float inverse_of(uint16_t scale) {
    const float step = half_to_float(scale);
    return step == 0 ? 0.0f : 1.0f / step;
}

inline Grid minmax_grid(const GridKind &kind, float low, float high) {
    const float half = (float)kind.zero(), levels = (float)kind.top();
    if (kind.symmetric) {
        const float wanted = fmaxf(fabsf(low), fabsf(high)) / (half - 1);
        if (kind.short_words) return with_zero_point(kind, scale_above(half_up(fminf(wanted, LARGEST_SCALE / half))), SYMMETRIC_ZERO_POINT);
        const uint16_t scale = half_up(fminf(wanted, FP16_MAX / half));
        return with_minimum(scale, to_half(-half * half_to_float(scale)));
    }
    if (kind.short_words) {
        low = low < 0 ? low : 0.0f, high = high > 0 ? high : 0.0f;
        const uint16_t scale = scale_above(half_up((high - low) / levels));
        const float zero_point = rintf(-low * inverse_of(scale) / kind.zero_point_unit());
        return with_zero_point(kind, scale, clamped(zero_point, 0, LAST_ZERO_POINT));
    }
    const uint16_t minimum = half_down(low);
    const float span = high - half_to_float(minimum);
    uint16_t scale = to_half(span / levels);
    if (half_to_float(scale) * levels < span) scale++;
    return with_minimum(scale, minimum);
}

// An exact integer below 2**31, rounded to float32 once.
inline float difference(double count, double products, double one, double other) { return (float)(count * products - one * other); }

// Fits a grid to finite channels; false where the group keeps its min-max grid, whatever `codes` holds then.
inline bool fit_grid(const GridKind &kind, const float *x, float low, float high, float *integers, float *codes, Grid *grid) {
    const int n = kind.channels, zero = kind.zero();
    const float largest = fmaxf(fabsf(low), fabsf(high)), units = kind.units(), top = (float)kind.top();
    const float origin = kind.symmetric ? 0.0f : low, span = kind.symmetric ? largest : high - low;
    if (!(largest < FP16_MAX) || span < MIN_SCALE) return false;
    if (kind.short_words && !kind.symmetric && !(low <= 0 && high >= 0)) return false;
    const float ratio = units / span, unit = span / units;
    int64_t total = 0, squares = 0;
    for (int c = 0; c < n; c++) integers[c] = rintf((x[c] - origin) * ratio);
    for (int c = 0; c < n; c++) {
        const int value = (int)integers[c];
        total += value, squares += value * value;
    }
    const float variance_of_x = kind.symmetric ? (float)squares : difference(n, (double)squares, (double)total, (double)total);
    static const int starts[3][3] = {{275, -2341, 276}, {514, 0, 516}, {1028, 0, 1032}};
    const int *start = starts[kind.bits - 2];
    float multiplier = (float)start[kind.symmetric ? 2 : 0], offset = (float)(kind.symmetric ? FRACTION / 2 + (FRACTION << (kind.bits - 1)) : start[1]);
    float zero_point = SYMMETRIC_ZERO_POINT, covariance = 0, variance = 0;
    int64_t sum = 0;
    for (int remaining = 2; remaining >= 0; remaining--) {
        if (kind.short_words && !kind.symmetric && !remaining) {
            const float place = rintf(clamped(-origin * ratio, 0, units) * multiplier), step = FRACTION * kind.zero_point_unit();
            zero_point = clamped(rintf((place + (offset - FRACTION / 2)) / step), 0, LAST_ZERO_POINT);
            offset = zero_point * step + (FRACTION / 2 - place);
        }
        const float by = multiplier / FRACTION, add = offset / FRACTION;
        for (int c = 0; c < n; c++) codes[c] = clamped(floorf(integers[c] * by + add), 0, top);
        int64_t of_squares = 0, products = 0;
        sum = 0;
        for (int c = 0; c < n; c++) {
            const int code = (int)codes[c];
            sum += code, of_squares += code * code, products += code * (int)integers[c];
        }
        if (kind.symmetric) {
            covariance = (float)(products - zero * total);
            variance = (float)(of_squares - 2 * zero * sum + (int64_t)zero * zero * n);
        } else {
            covariance = difference(n, (double)products, (double)sum, (double)total);
            variance = difference(n, (double)of_squares, (double)sum, (double)sum);
        }
        if (!remaining) break;
        multiplier = rintf(fminf(variance / fmaxf(covariance, 1.0f), 1.0f) * FRACTION);
        if (!kind.symmetric) offset = FRACTION / 2 + rintf(difference(FRACTION, (double)sum, (double)total, multiplier) / (float)n);
    }
    const float slope = fminf(variance_of_x / fmaxf(covariance, 1.0f), covariance / fmaxf(variance, 1.0f) * MAX_GAIN);
    const float most = (kind.short_words ? LARGEST_SCALE : FP16_MAX) / (kind.symmetric ? (float)zero : 1.0f);
    uint16_t scale = to_half(fminf(slope * unit, most));
    if (kind.short_words) scale = (uint16_t)((scale + 8) >> 4 << 4);
    const float step = half_to_float(scale);
    if (!(covariance > 0) || !(step >= MIN_SCALE)) return false;
    if (kind.short_words) {
        *grid = with_zero_point(kind, scale, zero_point);
    } else if (kind.symmetric) {
        *grid = with_minimum(scale, to_half(-(float)zero * step));
    } else {
        const float mean = origin + (float)total / (float)n * unit;
        const float minimum = clamped(mean - step * ((float)sum / (float)n), -FP16_MAX, FP16_MAX);
        if (!(fabsf(minimum) <= step * MAX_OFFSET)) return false;
        *grid = with_minimum(scale, to_half(minimum));
    }
    return true;
}
