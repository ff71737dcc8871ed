/* Plain C for any CPU and any compiler: a vector is an array of 16 bytes, which compilers map to whatever
 * the machine has.  Also the reading version: what each operation of the other headers means. */
#ifndef SDPA_SIMD_BASELINE_H
#define SDPA_SIMD_BASELINE_H

#include "compiler.h"
#include "simd/half.h"
#include "simd/real.h"

#include <string.h>

enum { VECTORS = 2, TILE = 8, VL = 16 / SDPA_REAL_BYTES };

typedef struct {
    real lane[VL];
} vf;
typedef struct {
    int lane[VL];
} vm;

#define LANES(type, expression)                                                                                        \
    type result;                                                                                                       \
    UNROLL_FOR (int i = 0; i < VL; ++i) result.lane[i] = (expression);                                                 \
    return result

static inline vf vf_from_float(const float *p)
{
    float narrow[VL]; /* of any alignment, like all loads and stores */
    memcpy(narrow, p, sizeof narrow);
    LANES(vf, (real)narrow[i]);
}
static inline vf vf_from_int8(const char *p) { LANES(vf, (real)((const signed char *)p)[i]); }
static inline vf vf_from_float16(const char *p) { LANES(vf, (real)float_of_float16(read_bits(p + 2 * i))); }
static inline vf vf_from_bfloat16(const char *p) { LANES(vf, (real)float_of_bfloat16(read_bits(p + 2 * i))); }
static inline void vf_to_float16(char *p, vf a)
{
    for (int i = 0; i < VL; ++i) write_bits(p + 2 * i, float16_of_float((float)a.lane[i]));
}
static inline void vf_to_bfloat16(char *p, vf a)
{
    for (int i = 0; i < VL; ++i) write_bits(p + 2 * i, bfloat16_of_float((float)a.lane[i]));
}
static inline vf vf_load(const real *p)
{
    vf result;
    memcpy(&result, p, sizeof result);
    return result;
}
static inline vf vf_set1(real a) { LANES(vf, a); }
static inline vf vf_add(vf a, vf b) { LANES(vf, a.lane[i] + b.lane[i]); }
static inline vf vf_sub(vf a, vf b) { LANES(vf, a.lane[i] - b.lane[i]); }
static inline vf vf_mul(vf a, vf b) { LANES(vf, a.lane[i] * b.lane[i]); }
static inline vf vf_div(vf a, vf b) { LANES(vf, a.lane[i] / b.lane[i]); }
static inline vf vf_fma(vf a, vf b, vf c) { LANES(vf, a.lane[i] * b.lane[i] + c.lane[i]); } /* two roundings */
static inline vf vf_fnma(vf a, vf b, vf c) { LANES(vf, c.lane[i] - a.lane[i] * b.lane[i]); }
static inline vf vf_max(vf a, vf b) { LANES(vf, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
static inline vf vf_min(vf a, vf b) { LANES(vf, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
static inline vf vf_abs(vf a) { LANES(vf, a.lane[i] < 0 ? -a.lane[i] : a.lane[i]); }
static inline vm vf_lt(vf a, vf b) { LANES(vm, a.lane[i] < b.lane[i]); }
static inline vm vf_eq(vf a, vf b) { LANES(vm, a.lane[i] == b.lane[i]); }
static inline vf vf_select(vm m, vf a, vf b) { LANES(vf, m.lane[i] ? a.lane[i] : b.lane[i]); }

static inline void vf_store(real *p, vf a) { memcpy(p, &a, sizeof a); }

/* a*b - c where that is small: a and b in two parts, whose products are exact. */
static inline real upper_half(real x)
{
    real_bits bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= ~(real_bits)0 << (REAL_MANTISSA_BITS + 2) / 2;
    memcpy(&x, &bits, sizeof bits);
    return x;
}
static inline real lane_small_difference(real a, real b, real c)
{
    const real a_high = upper_half(a), b_high = upper_half(b), a_low = a - a_high;
    return ((a_high * b_high - c) + a_low * b_high) + a * (b - b_high);
}
static inline vf vf_small_difference(vf a, vf b, vf c)
{
    LANES(vf, lane_small_difference(a.lane[i], b.lane[i], c.lane[i]));
}

static inline real lane_exponent(real t) /* see ROUNDER in vmath.h */
{
    real_bits bits;
    memcpy(&bits, &t, sizeof bits);
    bits <<= REAL_MANTISSA_BITS;
    memcpy(&t, &bits, sizeof t);
    return t;
}
static inline vf vf_exponent(vf t) { LANES(vf, lane_exponent(t.lane[i])); }

static inline void vf_transpose(vf r[VL])
{
    for (int i = 0; i < VL; ++i)
        for (int j = 0; j < i; ++j) {
            real lower = r[i].lane[j];
            r[i].lane[j] = r[j].lane[i];
            r[j].lane[i] = lower;
        }
}

/* Lane i of the result is the sum over the lanes of a[i]. */
static inline ALWAYS_INLINE vf vf_sums(vf a[VL])
{
    vf sums;
    for (int i = 0; i < VL; ++i) {
        sums.lane[i] = a[i].lane[0];
        for (int j = 1; j < VL; ++j) sums.lane[i] += a[i].lane[j];
    }
    return sums;
}

/* seen[column] lane row = row[row][at + column] is not 0. */
static inline void vm_transpose_bools(vm seen[VL], char *const row[VL], ptrdiff_t at)
{
    for (int column = 0; column < VL; ++column)
        for (int i = 0; i < VL; ++i) seen[column].lane[i] = row[i][at + column] != 0;
}

#endif
