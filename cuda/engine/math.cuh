// SPDX-License-Identifier: Apache-2.0
// Float functions that are bitwise equal on the GPU and on the host: they call no library, and
// every operation is one that IEEE 754 rounds correctly. Build with contraction off
// (--fmad=false, -ffp-contract=off), no fast-math, denormals kept. The payload and the sign of a
// NaN are the only bits that may differ.
//
// "Max N ulp": the largest error seen, in units of the last place of the exact result, over all
// 2^32 arguments with glibc's double functions as reference (tests/compile/test_math.py measures it). The
// polynomial coefficients are this project's own: a minimax fit of the relative error by Lawson's
// reweighted least squares, where each coefficient in turn, from the lowest, is rounded to float
// before the rest is fitted again.
#pragma once

#include "kernel.cuh"

namespace math {

#if defined(__CUDACC__)
HD u32 bits(float x) { return __float_as_uint(x); }
HD float from_bits(u32 b) { return __uint_as_float(b); }
HD float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// Exact: correctly rounded; NaN below -0.
HD float sqrt(float x) { return __fsqrt_rn(x); }
HD float choose(bool p, float a, float b) { return p ? a : b; }
// Number of the lowest bit that is set, of at least one.
HD int lowest_bit(u32 b) { return __ffs((i32)b) - 1; }
#else
HD u32 bits(float x) {
    u32 b;
    __builtin_memcpy(&b, &x, sizeof b);
    return b;
}
HD float from_bits(u32 b) {
    float x;
    __builtin_memcpy(&x, &b, sizeof x);
    return x;
}
HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Exact: correctly rounded; NaN below -0.
HD float sqrt(float x) { return __builtin_sqrtf(x); }
// p ? a : b without a branch: the compiler cannot move the computation of a and b into one, so loops stay vectorised.
HD float choose(bool p, float a, float b) { return from_bits(bits(b) ^ ((bits(a) ^ bits(b)) & -(u32)p)); }
// Number of the lowest bit that is set, of at least one.
HD int lowest_bit(u32 b) { return __builtin_ctz(b); }
#endif

constexpr u32 SIGN = 0x80000000u;
constexpr u32 INF_BITS = 0x7f800000u;
constexpr u32 NAN_BITS = 0x7fc00000u;
// Added to |t| < 2^22 it leaves no bits for a fraction, so the sum holds round(t) in its low
// mantissa bits. Unlike a cast this is defined for every t, NaN included.
constexpr float ROUNDER = 0x1.8p23f;

// Exact.
HD bool is_nan(float x) { return x != x; }
// Exact.
HD bool is_finite(float x) { return (bits(x) & ~SIGN) < INF_BITS; }
// Exact.
HD bool is_finite(double x) { return x - x == 0; }
HD bool is_finite(int) { return true; }
// Exact: clears the sign, of a zero and a NaN too.
HD float abs(float x) { return from_bits(bits(x) & ~SIGN); }
// Exact, but the most negative int stays itself.
HD i32 abs(i32 x) { return x < 0 ? (i32)(0u - (u32)x) : x; }

// Exact. min and max: the second argument wins where neither is smaller: an equal one (zeros of
// either sign) or a NaN on either side. Without fast-math no compiler may
// replace the comparison and selection by an instruction with other rules for NaNs or zeros.
HD float min(float a, float b) { return a < b ? a : b; }
HD float max(float a, float b) { return a > b ? a : b; }
HD i32 min(i32 a, i32 b) { return a < b ? a : b; }
HD i32 max(i32 a, i32 b) { return a > b ? a : b; }
// Exact, for lo <= hi: a NaN x stays NaN, and a zero x between the bounds keeps its sign.
HD float clamp(float x, float lo, float hi) { return min(hi, max(lo, x)); }
HD i32 clamp(i32 x, i32 lo, i32 hi) { return min(hi, max(lo, x)); }

// Exact: truncates, saturates at the limits of int, NaN gives 0.
HD i32 to_int(float x) {
    i32 inside = (i32)(abs(x) < 0x1p31f ? x : 0.0f);
    return x >= 0x1p31f ? 0x7fffffff : x <= -0x1p31f ? -0x7fffffff - 1 : inside;
}

// Exact, like C's floorf: floor(-0) is -0.
HD float floor(float x) {
    // From 2^23 on there is no fraction; a NaN becomes a bound here, so that the cast is defined.
    float part = choose(x > -0x1p23f, x, -0x1p23f);
    part = choose(part < 0x1p23f, part, 0x1p23f);
    // A zero of either sign: GCC's -fno-trapping-math may fuse the two casts and keep the sign.
    float whole = (float)(i32)part;
    whole -= whole > part ? 1.0f : 0.0f;
    return choose(abs(x) < 0x1p23f, from_bits(bits(whole) | (bits(x) & SIGN)), x);
}

// x - trunc(x / y) * y for x >= 0, y > 0, x / y < 2^24. The rounded quotient never falls below an
// integer that the exact one reaches, so its integer part is right or one too large; the remainder,
// at least -y, is then a float and the fused multiply-add exact, and so is the correction.
HD float remainder_of_close(float x, float y) {
    float r = fma(-floor(x / y), y, x);
    return r < 0.0f ? r + y : r;
}

// Exact for x >= 0: the floored modulo in [0, y). For x < 0 the exact |x| mod y is subtracted from
// y with one rounding (as np.mod does), and a difference that rounds to y gives 0. NaN unless y > 0
// and x is finite.
HD float mod(float x, float y) {
    float r;
    if (x >= 0.0f && x < y) {
        r = x;
    } else if (x < 0.0f && x > -y) {
        r = x + y;
    } else if (x >= y && x < 2.0f * y) {
        r = x - y;
    } else if (y > 0.0f && is_finite(x)) {
        r = abs(x);
        // Long division: subtract multiples of exact powers of two times y, each within 2^24 of the
        // remainder, down to y itself.
        for (float step = y; r >= y * 0x1p23f; step = y) {
            while (step <= r * 0x1p-23f) step *= 0x1p22f;
            r = remainder_of_close(r, step);
        }
        r = remainder_of_close(r, y);
        r = x < 0.0f && r > 0.0f ? y - r : r;
    } else {
        return from_bits(NAN_BITS);
    }
    // The sum turns -0 into +0.
    return r < y ? r + 0.0f : 0.0f;
}

// An angle minus the nearest multiple of pi/2: |angle| = quadrant * pi/2 + high + low, with |high|
// below pi/4 + 2^-8 and low of the size of high's rounding error. Only the last two bits of
// quadrant count.
struct Reduced {
    float high, low;
    u32 quadrant;
};

// The first bits of 2/pi, after 32 zero bits that stand for its integer part.
TABLE u32 TWO_OVER_PI[8] = {0x00000000u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                            0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};

// Payne and Hanek, "Radian Reduction for Trigonometric Functions", 1983, for a finite x >= 2^16.
// With x = m * 2^e the leading bits of 2/pi, whose product with x is a multiple of 4, are skipped;
// the next 96 bits are enough, because no float is nearer than about 2^-30 to a multiple of pi/2.
HD Reduced reduce_large(float x) {
    u32 m = (bits(x) & 0x7fffffu) | 0x800000u;
    i32 e = (i32)(bits(x) >> 23) - 150;
    // The first bit used has weight 2^(1 - e); the table's first bit has weight 2^31.
    u32 first = (u32)(e + 30);
    u32 word = first / 32, shift = first % 32;
    u64 window[3];
    for (u32 k = 0; k < 3; ++k) {
        u64 pair = (u64)TWO_OVER_PI[word + k] << 32 | TWO_OVER_PI[word + k + 1];
        window[k] = (u32)(pair >> (32 - shift));
    }
    // x * 2/pi modulo 4 in units of 2^-62.
    u64 turns = (m * window[0] << 32) + m * window[1] + (m * window[2] >> 32);
    u32 quadrant = (u32)((turns + (1ull << 61)) >> 62);
    i64 fraction = (i64)(turns - ((u64)quadrant << 62));
    float high = (float)fraction;
    float low = (float)(fraction - (i64)high) * 0x1p-62f;
    high *= 0x1p-62f;
    // Times pi/2 = A + B.
    const float A = 0x1.921fb6p+0f, B = -0x1.777a5cp-25f;
    float angle = high * A;
    return {angle, fma(high, A, -angle) + fma(high, B, low * A), quadrant};
}

// Cody and Waite, "Software Manual for the Elementary Functions", 1980, for 0 <= x < 2^16 or a NaN:
// pi/2 = A + B + C, each cut off to 24 bits.
HD Reduced reduce_small(float x) {
    const float A = 0x1.921fb4p+0f, B = 0x1.4442d0p-24f, C = 0x1.846988p-48f;
    float rounded = fma(x, 0x1.45f306p-1f, ROUNDER);
    float k = rounded - ROUNDER;
    // Exact: less than 1 and a multiple of 2^-24, as A is and x too unless k is 0.
    float rest = fma(-k, A, x);
    float kb = k * B;
    float kb_error = fma(k, B, -kb);
    // The difference and its rounding error, whichever of the two is larger (Knuth's TwoSum).
    float high = rest - kb;
    float taken = high - rest;
    float error = (rest - (high - taken)) - (kb + taken);
    return {high, fma(-k, C, error - kb_error), bits(rounded)};
}

// Max 0.76 ulp in each. Infinities give NaN; the sine of a zero is that zero.
HD void sincos(float x, float* s, float* c) {
    float a = abs(x);
    Reduced t;
    if (host_simd::needs_scalar_path(a >= 0x1p16f)) {
        t = reduce_large(a);
        if (!is_finite(a)) t.high = from_bits(NAN_BITS);
    } else {
        t = reduce_small(min(0x1p16f, a));  // in a SIMD loop large angles come here too; their result is discarded
    }
    float r = t.high, z = r * r;
    float sine = fma(fma(-1.950788e-04f, z, 8.332106e-03f), z, -1.6666654e-01f);
    // 1 - r^2 / 2 and its rounding error.
    float leading = fma(-0.5f * r, r, 1.0f);
    float error = fma(-0.5f * r, r, 1.0f - leading);
    sine = r + fma(r * z, sine, t.low * leading);
    float cosine = fma(fma(2.4431425e-05f, z, -1.3887305e-03f), z, 4.1666646e-02f);
    cosine = leading + fma(z * z, cosine, fma(-r, t.low, error));
    bool odd = t.quadrant & 1u;
    u32 s_sign = (t.quadrant & 2u) << 30 ^ (bits(x) & SIGN);
    u32 c_sign = ((t.quadrant + 1u) & 2u) << 30;
    *s = from_bits(bits(odd ? cosine : sine) ^ s_sign);
    *c = from_bits(bits(odd ? sine : cosine) ^ c_sign);
}

// Max 0.76 ulp.
HD float sin(float x) {
    float s, c;
    sincos(x, &s, &c);
    return s;
}

// Max 0.76 ulp.
HD float cos(float x) {
    float s, c;
    sincos(x, &s, &c);
    return c;
}

// exp for -104 <= x <= 89, or a NaN: beyond, the result is 0 or infinity already.
HD float exp_within(float x) {
    float rounded = fma(x, 0x1.715476p+0f, ROUNDER);
    float k = rounded - ROUNDER;
    // log(2) in two parts.
    const float A = 0x1.62e430p-1f, B = -0x1.05c610p-29f;
    float rest = fma(-k, A, x);
    float r = fma(-k, B, rest);
    float low = fma(-k, B, rest - r);
    float p = fma(fma(1.3821457e-03f, r, 8.368662e-03f), r, 4.1668255e-02f);
    p = fma(fma(p, r, 1.6666521e-01f), r, 4.9999994e-01f);
    float y = 1.0f + (r + fma(r * r, p, low));
    // 2^k in two factors, because k reaches from -150 to 128; only the second product can round.
    const u32 ONE = 0x3f800000u, DOUBLE = 0x800000u;
    i32 n = (i32)(bits(rounded) - bits(ROUNDER)), half = n >> 1;
    return y * from_bits((u32)half * DOUBLE + ONE) * from_bits((u32)(n - half) * DOUBLE + ONE);
}

// Max 0.88 ulp, through gradual underflow; infinity from 88.722839 on, 0 below -103.972084.
HD float exp(float x) { return exp_within(clamp(x, -104.0f, 89.0f)); }

// Max 1.51 ulp; an odd function, zeros too, that reaches 1 at 8.66434.
HD float tanh(float x) {
    float a = abs(x), z = x * x;
    float p = fma(fma(-5.6922962e-03f, z, 2.0628167e-02f), z, -5.3736515e-02f);
    p = fma(fma(p, z, 1.3331406e-01f), z, -3.333328e-01f);
    float t = exp(-2.0f * a);
    float y = a < 0.625f ? fma(a * z, p, a) : (1.0f - t) / (1.0f + t);
    return from_bits(bits(y) | (bits(x) & SIGN));
}

// Max 0.67 ulp; -infinity for both zeros, NaN below.
HD float log(float x) {
    bool denormal = x < 0x1p-126f;
    u32 b = bits(denormal ? x * 0x1p23f : x);
    // x = 2^k * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2).
    const u32 SQRT_HALF = 0x3f3504f3u;
    u32 above = b - SQRT_HALF;
    float k = (float)((i32)above >> 23) - (denormal ? 23.0f : 0.0f);
    float f = from_bits((above & 0x7fffffu) + SQRT_HALF) - 1.0f;
    float z = f * f;
    float p = fma(fma(-7.636439e-02f, f, 1.2762217e-01f), f, -1.315961e-01f);
    p = fma(fma(p, f, 1.420158e-01f), f, -1.6623409e-01f);
    p = fma(fma(fma(p, f, 2.0001242e-01f), f, -2.500082e-01f), f, 3.333333e-01f);
    // f - f^2 / 2 and k * log(2) + that, each with its rounding error; k * A is exact, A having 15
    // bits.
    const float A = 0x1.62e4p-1f, B = 0x1.7f7d1cp-20f;
    float leading = fma(-0.5f * f, f, f);
    float leading_error = fma(-0.5f * f, f, f - leading);
    float whole = k * A;
    float sum = whole + leading;
    float sum_error = leading - (sum - whole);
    float y = sum + fma(k, B, sum_error + fma(f * z, p, leading_error));
    y = bits(x) < INF_BITS ? y : x;
    return x == 0.0f ? from_bits(INF_BITS | SIGN) : x < 0.0f ? from_bits(NAN_BITS) : y;
}

// Max 1.54 ulp, over 1.6e9 random pairs only; zeros and infinities of either sign as in C's atan2f.
HD float atan2(float y, float x) {
    float ax = abs(x), ay = abs(y);
    bool steep = ay > ax;
    float large = steep ? ay : ax, small = steep ? ax : ay;
    // 0/0 counts as 0 and infinity/infinity as 1; a NaN stays in `small` or in the quotient.
    float t = large == 0.0f ? small : small == large ? 1.0f : small / large;
    float z = t * t;
    // The first coefficient is 4e-9 above the fit's, so that atan2(1, 1) is the float next to pi/4.
    float p = fma(fma(-1.7828284e-03f, z, 1.086871e-02f), z, -3.1097002e-02f);
    p = fma(fma(fma(p, z, 5.7881393e-02f), z, -8.399306e-02f), z, 1.09508805e-01f);
    p = fma(fma(fma(p, z, -1.4264016e-01f), z, 1.999853e-01f), z, -3.33333e-01f);
    float a = fma(t * z, p, t);
    // The angle of (|y|, x) is a, pi/2 - a, pi/2 + a or pi - a.
    bool left = bits(x) & SIGN;
    float quarters = steep ? 1.0f : left ? 2.0f : 0.0f;
    a = steep != left ? -a : a;
    float angle = quarters * 0x1.921fb6p+0f + fma(quarters, -0x1.777a5cp-25f, a);
    return from_bits(bits(angle) | (bits(y) & SIGN));
}

}  // namespace math
