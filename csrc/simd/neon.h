/* Arm NEON (AArch64): 32 registers of 16 bytes, so the tile is that of AVX-512 with narrower lanes. */
#ifndef SDPA_SIMD_NEON_H
#define SDPA_SIMD_NEON_H

#include "compiler.h"
#include "simd/half.h"
#include "simd/real.h"

#include <arm_neon.h>

enum { VECTORS = 4, TILE = 24 };

#if SDPA_REAL_BYTES == 4

enum { VL = 4 };
typedef float32x4_t vf;
typedef uint32x4_t vm;
#define V(name) v##name##q_f32
#define V_EXPONENT_SHIFT(t) vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23))

static inline vf vf_from_float(const float *p) { return vld1q_f32(p); }
static inline uint16x4_t four_halves(const char *p)
{
    uint64_t bits;
    memcpy(&bits, p, sizeof bits);
    return vcreate_u16(bits);
}
static inline vf vf_from_int8(const char *p)
{
    const signed char *x = (const signed char *)p;
    const int32_t four[4] = {x[0], x[1], x[2], x[3]};
    return vcvtq_f32_s32(vld1q_s32(four));
}
static inline vf vf_from_float16(const char *p) { return vcvt_f32_f16(vreinterpret_f16_u16(four_halves(p))); }
static inline vf vf_from_bfloat16(const char *p) { return vreinterpretq_f32_u32(vshll_n_u16(four_halves(p), 16)); }
static inline void vf_to_float16(char *p, vf a) { vst1_u8((uint8_t *)p, vreinterpret_u8_f16(vcvt_f16_f32(a))); }
static inline void vf_to_bfloat16(char *p, vf a) /* see half.h */
{
    const uint32x4_t bits = vreinterpretq_u32_f32(a), upper = vshrq_n_u32(bits, 16);
    const uint32x4_t half_unit = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, half_unit), 16);
    const uint32x4_t halves = vbslq_u32(vceqq_f32(a, a), rounded, vorrq_u32(upper, vdupq_n_u32(0x40)));
    vst1_u8((uint8_t *)p, vreinterpret_u8_u16(vmovn_u32(halves)));
}
/* seen[column] lane row = row[row][at + column] is not 0. */
static inline void vm_transpose_bools(vm seen[4], char *const row[4], ptrdiff_t at)
{
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        const uint32_t lanes[4] = {row[0][at + i], row[1][at + i], row[2][at + i], row[3][at + i]};
        seen[i] = vcgtq_u32(vld1q_u32(lanes), vdupq_n_u32(0));
    }
}

static inline void vf_transpose(vf r[4])
{
    float32x4x2_t low = vtrnq_f32(r[0], r[1]), high = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
    r[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
    r[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
    r[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}

/* Lane i of the result is the sum over the lanes of a[i]. */
static inline ALWAYS_INLINE vf vf_sums(vf a[4]) { return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])); }

#else

enum { VL = 2 };
typedef float64x2_t vf;
static inline ALWAYS_INLINE vf vf_sums(vf a[2]) { return vpaddq_f64(a[0], a[1]); }

typedef uint64x2_t vm;
#define V(name) v##name##q_f64
#define V_EXPONENT_SHIFT(t) vreinterpretq_f64_u64(vshlq_n_u64(vreinterpretq_u64_f64(t), 52))

static inline vf vf_from_float(const float *p) { return vcvt_f64_f32(vld1_f32(p)); }
static inline vf vf_from_int8(const char *p)
{
    const float two[2] = {*(const signed char *)p, *(const signed char *)(p + 1)};
    return vf_from_float(two);
}
static inline vf vf_from_float16(const char *p)
{
    const float two[2] = {float_of_float16(read_bits(p)), float_of_float16(read_bits(p + 2))};
    return vf_from_float(two);
}
static inline vf vf_from_bfloat16(const char *p)
{
    const float two[2] = {float_of_bfloat16(read_bits(p)), float_of_bfloat16(read_bits(p + 2))};
    return vf_from_float(two);
}
static inline void vm_transpose_bools(vm seen[2], char *const row[2], ptrdiff_t at)
{
    UNROLL_FOR (int i = 0; i < 2; ++i) {
        const uint64_t lanes[2] = {row[0][at + i], row[1][at + i]};
        seen[i] = vcgtq_u64(vld1q_u64(lanes), vdupq_n_u64(0));
    }
}

static inline void vf_transpose(vf r[2])
{
    vf low = vtrn1q_f64(r[0], r[1]);
    r[1] = vtrn2q_f64(r[0], r[1]);
    r[0] = low;
}

#endif

static inline vf vf_load(const real *p) { return V(ld1)(p); }
static inline void vf_store(real *p, vf a) { V(st1)(p, a); }
static inline vf vf_set1(real a)
{
#if SDPA_REAL_BYTES == 4
    return vdupq_n_f32(a);
#else
    return vdupq_n_f64(a);
#endif
}
static inline vf vf_add(vf a, vf b) { return V(add)(a, b); }
static inline vf vf_sub(vf a, vf b) { return V(sub)(a, b); }
static inline vf vf_mul(vf a, vf b) { return V(mul)(a, b); }
static inline vf vf_div(vf a, vf b) { return V(div)(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return V(fma)(c, a, b); }  /* a*b + c */
static inline vf vf_fnma(vf a, vf b, vf c) { return V(fms)(c, a, b); } /* c - a*b */
static inline vf vf_abs(vf a) { return V(abs)(a); }
static inline vf vf_exponent(vf t) { return V_EXPONENT_SHIFT(t); } /* see ROUNDER in vmath.h */
static inline vm vf_lt(vf a, vf b) { return V(clt)(a, b); }
static inline vm vf_eq(vf a, vf b) { return V(ceq)(a, b); }
static inline vf vf_select(vm m, vf a, vf b) { return V(bsl)(m, a, b); } /* m ? a : b */
/* b where either is NaN, as on x86: neither vmaxq (NaN wins) nor vmaxnmq (numbers win) says that. */
static inline vf vf_max(vf a, vf b) { return vf_select(vf_lt(b, a), a, b); }
static inline vf vf_min(vf a, vf b) { return vf_select(vf_lt(a, b), a, b); }

#endif
