/* Elementary functions on vectors.  Coefficients: weighted Remez fits on |f| <= 1/2 in 60 digits. */
#ifndef SDPA_SIMD_VMATH_H
#define SDPA_SIMD_VMATH_H

#include "variant.h"

#define LOG2_E 1.4426950408889634074

#if SDPA_REAL_BYTES == 4
/* 2**f = 1 + f * poly(f), relative error 9.2e-8 (1.5 half-roundings of float). */
static const real EXP2_POLY[] = {0x1.5bba18p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f};
/* (2**f - 1) / f, relative error 1.1e-8: for tanh, where small arguments must keep their digits. */
static const real EXPM1_POLY[] = {0x1.4308fap-13f, 0x1.5f07b4p-10f, 0x1.3b2ba0p-7f,
                                  0x1.c6af6ep-5f,  0x1.ebfbdep-3f,  0x1.62e430p-1f};
/* (Phi(x) - 1/2) / x for |x| <= NORMAL_END, as a polynomial in 2 (x / NORMAL_END)**2 - 1: Phi has an error of 2.3e-8.
 * At the end it is 4.4e-8 from 0 and 1. */
static const real NORMAL_POLY[] = {0x1.5e88acp-12f, -0x1.d183a0p-11f, 0x1.a4a3dcp-11f, -0x1.2c555ap-10f,
                                   0x1.bc63c2p-9f,  -0x1.9b01b0p-8f,  0x1.2ec40cp-7f,  -0x1.bd0f26p-7f,
                                   0x1.3c2080p-6f,  -0x1.a2550cp-6f,  0x1.070670p-5f,  -0x1.42ca2ep-5f,
                                   0x1.9070c6p-5f,  -0x1.0e00fep-4f,  0x1.0ea424p-3f};
#define NORMAL_END 5.35
#else
/* Relative error 3.4e-18 and 2.4e-19. */
static const real EXP2_POLY[] = {0x1.e79ba5e93dac6p-32, 0x1.e61b4f5049cd6p-28, 0x1.b5267cea5f68ep-24,
                                 0x1.62bfc79d7642ap-20, 0x1.ffcbfba97c6d7p-17, 0x1.4309130ed8bc8p-13,
                                 0x1.5d87fe78cd6dcp-10, 0x1.3b2ab6fba011ap-7,  0x1.c6b08d7049fe8p-5,
                                 0x1.ebfbdff82c5a4p-3,  0x1.62e42fefa39efp-1};
static const real EXPM1_POLY[] = {0x1.c3bd5d1e60ec9p-36, 0x1.e9ebc1b5e2d26p-32, 0x1.e4cfae597a2e1p-28,
                                  0x1.b524ec0c0172dp-24, 0x1.62c0221b620dcp-20, 0x1.ffcbfc6d8d398p-17,
                                  0x1.430912f874164p-13, 0x1.5d87fe78a3fe5p-10, 0x1.3b2ab6fba4e60p-7,
                                  0x1.c6b08d704a0c6p-5,  0x1.ebfbdff82c58fp-3,  0x1.62e42fefa39efp-1};
/* The error of Phi is 1.6e-18, and 5.2e-17 at the end. */
static const real NORMAL_POLY[] = {
    0x1.0b94b28bcd0a8p-22, -0x1.74b72e908c3bbp-21, -0x1.74899c43b1a04p-21, 0x1.58dcd987480e2p-19,
    0x1.06850bdd6b54fp-18, -0x1.9f06b9a3683a7p-17, 0x1.34589e4f8a704p-20,  0x1.0ed7071a3647ap-17,
    0x1.b5bb2e1860e0dp-16, -0x1.143cb124c839fp-14, 0x1.18ebcaf33e05fp-14,  -0x1.9678c30228b7dp-14,
    0x1.c0a13ed5af047p-13, -0x1.854ecf61e9f1ep-12, 0x1.2492cb7cd570ap-11,  -0x1.bdcce68b5cb85p-11,
    0x1.526c89b1e5b40p-10, -0x1.eb2ba2cdda4f5p-10, 0x1.56607ef1ece0ep-9,   -0x1.cea3b1bd463c2p-9,
    0x1.2eb67d2a1e732p-8,  -0x1.7f3afcf046243p-8,  0x1.d5ff00d6cdfd6p-8,   -0x1.17c0ba6d6f1bbp-7,
    0x1.4404acd8bd4abp-7,  -0x1.6e3e0844e2e95p-7,  0x1.9587764366900p-7,   -0x1.b9d1f4efdd254p-7,
    0x1.dbe97b5fedebbp-7,  -0x1.fd56349644865p-7,  0x1.1018565f18a05p-6,   -0x1.2385c4690df60p-6,
    0x1.3a8d20a49710ap-6,  -0x1.57653ff241fd7p-6,  0x1.7da38810ef678p-6,   -0x1.b42f5a2fcf324p-6,
    0x1.05b6d573d96f0p-5,  -0x1.5cf3f004e7cffp-5,  0x1.5cf3f39176f2cp-4};
#define NORMAL_END 8.3
#endif
enum { EXP2_TERMS = sizeof EXP2_POLY / sizeof(real), EXPM1_TERMS = sizeof EXPM1_POLY / sizeof(real) };
enum { NORMAL_TERMS = sizeof NORMAL_POLY / sizeof(real) };

/* Added to x, it leaves round(x) + REAL_BIAS in the low bits of the mantissa: the rounding is that of the addition,
 * and a shift by the width of the mantissa turns those bits into the number 2**round(x).  For round(x) = -REAL_BIAS
 * that is 0. */
#define ROUNDER ((real)(1.5 * ((real_bits)1 << REAL_MANTISSA_BITS) + REAL_BIAS))

/* x * factor = n + f with n whole and |f| <= 1/2: returns f, and 2**n in *power. */
static inline vf split_power(vf x, vf factor, vf *power)
{
    const vf rounder = vf_set1(ROUNDER);
    vf biased = vf_fma(x, factor, rounder);
    *power = vf_exponent(biased);
#if defined(SDPA_ISA_baseline)
    return vf_small_difference(x, factor, vf_sub(biased, rounder));
#else
    return vf_fma(x, factor, vf_sub(rounder, biased)); /* the product is exact inside the fma */
#endif
}

/* d = exp(d * factor * ln 2) for `count` vectors d <= 0, given floor = lowest(factor).  2 ulp with fma; exactly 1 for
 * d = 0 and exactly 0 where d * factor <= -REAL_BIAS, so a hidden score (-inf) adds nothing; NaN for NaN.
 * The vectors go through each operation together: one after the other, their chains of dependent operations (40 cycles)
 * fill the scheduler of the CPU before it reaches the next. */
static inline ALWAYS_INLINE void exp_all(vf *d, const int count, vf factor, vf floor)
{
    vf f[4], power[4], poly[4];
    UNROLL_FOR (int i = 0; i < count; ++i) d[i] = vf_max(floor, d[i]); /* this operand order keeps a NaN in d */
    UNROLL_FOR (int i = 0; i < count; ++i) f[i] = split_power(d[i], factor, &power[i]);
    UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_set1(EXP2_POLY[0]);
    UNROLL_FOR (int term = 1; term < EXP2_TERMS; ++term)
        UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_fma(poly[i], f[i], vf_set1(EXP2_POLY[term]));
    UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_fma(poly[i], f[i], vf_set1(1));
    UNROLL_FOR (int i = 0; i < count; ++i) d[i] = vf_mul(poly[i], power[i]);
}
static inline vf vf_exp(vf d, vf factor, vf floor)
{
    exp_all(&d, 1, factor, floor);
    return d;
}
static inline real lowest(real factor) { return (real)-REAL_BIAS / factor; }

/* tanh(x), relative error below 4 ulp; +-1 for large |x|, NaN for NaN.  With m = exp(2|x|) - 1 it is m / (m + 2);
 * m comes from 2**n * (2**f - 1) + (2**n - 1), which cancels nothing. */
static inline vf vf_tanh(vf x)
{
    vf size = vf_abs(x);
    size = vf_select(vf_lt(vf_set1(20), size), vf_set1(20), size); /* keeps NaN */
    vf power, f = split_power(size, vf_set1((real)(2 * LOG2_E)), &power);
    vf poly = vf_set1(EXPM1_POLY[0]);
    UNROLL_FOR (int i = 1; i < EXPM1_TERMS; ++i) poly = vf_fma(poly, f, vf_set1(EXPM1_POLY[i]));
    vf m = vf_fma(vf_mul(poly, f), power, vf_sub(power, vf_set1(1)));
    vf y = vf_div(m, vf_add(m, vf_set1(2)));
    return vf_select(vf_lt(x, vf_set1(0)), vf_sub(vf_set1(0), y), y);
}

/* x = Phi(x), the normal distribution, (1 + erf(x / sqrt 2)) / 2, for `count` vectors; within a rounding of 1.  Beyond
 * the end the polynomial stands still, and x times it goes past 0 and 1; NaN for NaN. */
static inline ALWAYS_INLINE void normal_all(vf *x, const int count)
{
    const vf zero = vf_set1(0), half = vf_set1((real)0.5), one = vf_set1(1);
    const vf end = vf_set1((real)(NORMAL_END * NORMAL_END)), scale = vf_set1((real)(2 / (NORMAL_END * NORMAL_END)));
    vf at[4], poly[4];
    UNROLL_FOR (int i = 0; i < count; ++i) /* these operand orders keep a NaN */
        at[i] = vf_sub(vf_mul(vf_min(end, vf_mul(x[i], x[i])), scale), one);
    UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_set1(NORMAL_POLY[0]);
    UNROLL_FOR (int term = 1; term < NORMAL_TERMS; ++term)
        UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_fma(poly[i], at[i], vf_set1(NORMAL_POLY[term]));
    UNROLL_FOR (int i = 0; i < count; ++i) x[i] = vf_min(one, vf_max(zero, vf_fma(poly[i], x[i], half)));
}

/* x = 1 / (1 + exp(-x)) for `count` vectors; neither side overflows or cancels. */
static inline ALWAYS_INLINE void sigmoid_all(vf *x, const int count)
{
    const vf factor = vf_set1((real)LOG2_E), floor = vf_set1(lowest((real)LOG2_E)), one = vf_set1(1), zero = vf_set1(0);
    vf power[4];
    UNROLL_FOR (int i = 0; i < count; ++i) power[i] = vf_sub(zero, vf_abs(x[i]));
    exp_all(power, count, factor, floor);
    UNROLL_FOR (int i = 0; i < count; ++i)
        x[i] = vf_div(vf_select(vf_lt(x[i], zero), power[i], one), vf_add(one, power[i]));
}

/* Whether all lanes are 0; NaN is not. */
static inline int is_zero(vf x)
{
    real lane[VL], any = 0;
    vf_store(lane, x);
    for (int i = 0; i < VL; ++i) any += lane[i] == 0 ? 0 : 1;
    return any == 0;
}

#endif
