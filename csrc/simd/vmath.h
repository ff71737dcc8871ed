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
/* erf(z) / z for |z| <= ERF_END, as a polynomial in 2 (z / ERF_END)**2 - 1; relative error 2.5e-8.  From there on erf
 * rounds to 1. */
static const real ERF_POLY[] = {-0x1.ba7774p-11f, 0x1.1316acp-9f, -0x1.6d8f8cp-10f, 0x1.f74f1ep-10f,
                                -0x1.f60b22p-8f,  0x1.d1a1aep-7f, -0x1.479916p-6f,  0x1.e690a6p-6f,
                                -0x1.63d5bap-5f,  0x1.de6146p-5f, -0x1.2f2f66p-4f,  0x1.7315d0p-4f,
                                -0x1.bf32b8p-4f,  0x1.129aecp-3f, -0x1.70dccap-3f,  0x1.7164fep-2f};
#define ERF_END 3.92
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
/* Relative error 2.5e-19. */
static const real ERF_POLY[] = {
    0x1.c378850af5c09p-23, -0x1.35e622aee6225p-21, -0x1.72ef1a0a6dd37p-21, 0x1.3485eb0b3fe50p-19,
    0x1.0ab53d0008525p-18, -0x1.89ccde1837a9bp-17, -0x1.1762c08bb9d44p-23, 0x1.234632b92382bp-17,
    0x1.e9b23ba9efd9cp-16, -0x1.2cba696a29e48p-14, 0x1.2bc01bf644714p-14,  -0x1.d0523ac4fbb1bp-14,
    0x1.12612f90e9babp-12, -0x1.ed1fea6dcf090p-12, 0x1.80e9062904602p-11,  -0x1.33c045e5c4329p-10,
    0x1.eaebb6c4ba3ddp-10, -0x1.75d45c5506ab7p-9,  0x1.11b17c83a8f1fp-8,   -0x1.84e7a35a98864p-8,
    0x1.0baa4f2e4fd20p-7,  -0x1.6448e7da834ccp-7,  0x1.caf204bf52c79p-7,   -0x1.1e6362b39a8eep-6,
    0x1.5ab83376c11edp-6,  -0x1.97efc99e4f30bp-6,  0x1.d3a11302051a2p-6,   -0x1.05fc27400c0a5p-5,
    0x1.200b4e250c629p-5,  -0x1.382026c4a9b10p-5,  0x1.4ee87dba4fc9ap-5,   -0x1.658362905c49cp-5,
    0x1.7d6437c9fbf4dp-5,  -0x1.984945f0a9ca7p-5,  0x1.b85e157b03ab3p-5,   -0x1.e0ac4a8800101p-5,
    0x1.0b167d2003aadp-4,  -0x1.3141d04366724p-4,  0x1.6e4fd26eec173p-4,   -0x1.e86a96f584e1dp-4,
    0x1.e86a9a7601801p-3};
#define ERF_END 5.93
#endif
enum { EXP2_TERMS = sizeof EXP2_POLY / sizeof(real), EXPM1_TERMS = sizeof EXPM1_POLY / sizeof(real) };
enum { ERF_TERMS = sizeof ERF_POLY / sizeof(real) };

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

/* x = erf(x) for `count` vectors, relative error below 4 ulp; +-1 for large |x|, NaN for NaN. */
static inline ALWAYS_INLINE void erf_all(vf *x, const int count)
{
    const vf end = vf_set1((real)ERF_END), one = vf_set1(1), zero = vf_set1(0);
    vf at[4], poly[4];
    UNROLL_FOR (int i = 0; i < count; ++i) {
        const vf size = vf_abs(x[i]), inside = vf_select(vf_lt(end, size), end, size); /* keeps NaN */
        at[i] = vf_sub(vf_mul(vf_mul(inside, inside), vf_set1((real)(2 / (ERF_END * ERF_END)))), one);
    }
    UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_set1(ERF_POLY[0]);
    UNROLL_FOR (int term = 1; term < ERF_TERMS; ++term)
        UNROLL_FOR (int i = 0; i < count; ++i) poly[i] = vf_fma(poly[i], at[i], vf_set1(ERF_POLY[term]));
    UNROLL_FOR (int i = 0; i < count; ++i) {
        const vf sign = vf_select(vf_lt(x[i], zero), vf_set1(-1), one);
        x[i] = vf_select(vf_lt(end, vf_abs(x[i])), sign, vf_mul(poly[i], x[i]));
    }
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
