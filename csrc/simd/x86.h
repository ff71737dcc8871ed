/* What AVX2 and AVX-512 say alike: `vf` holds VL numbers, `vm` says yes or no of each, and V(name) is
 * the intrinsic of that name for them. */
#ifndef SDPA_SIMD_X86_H
#define SDPA_SIMD_X86_H

#include "compiler.h"
#include "simd/real.h"

#include <immintrin.h>
#include <stddef.h>

#if defined(SDPA_ISA_avx2) && SDPA_REAL_BYTES == 4
typedef __m256 vf, vm; /* all bits of a lane, or none */
#define V(name) _mm256_##name##_ps
#define V_COMPARE _mm256_cmp_ps
#elif defined(SDPA_ISA_avx2)
typedef __m256d vf, vm;
#define V(name) _mm256_##name##_pd
#define V_COMPARE _mm256_cmp_pd
#elif SDPA_REAL_BYTES == 4
typedef __m512 vf;
typedef __mmask16 vm;
#define V(name) _mm512_##name##_ps
#define V_COMPARE _mm512_cmp_ps_mask
#else
typedef __m512d vf;
typedef __mmask8 vm;
#define V(name) _mm512_##name##_pd
#define V_COMPARE _mm512_cmp_pd_mask
#endif
enum { VL = sizeof(vf) / sizeof(real) };

static inline vf vf_load(const real *p) { return V(loadu)(p); }
static inline void vf_store(real *p, vf a) { V(storeu)(p, a); }
static inline vf vf_set1(real a) { return V(set1)(a); }
static inline vf vf_add(vf a, vf b) { return V(add)(a, b); }
static inline vf vf_sub(vf a, vf b) { return V(sub)(a, b); }
static inline vf vf_mul(vf a, vf b) { return V(mul)(a, b); }
static inline vf vf_div(vf a, vf b) { return V(div)(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return V(fmadd)(a, b, c); }   /* a*b + c */
static inline vf vf_fnma(vf a, vf b, vf c) { return V(fnmadd)(a, b, c); } /* c - a*b */
static inline vf vf_max(vf a, vf b) { return V(max)(a, b); }              /* b where either is NaN */
static inline vf vf_min(vf a, vf b) { return V(min)(a, b); }              /* likewise */
static inline vm vf_lt(vf a, vf b) { return V_COMPARE(a, b, _CMP_LT_OQ); }
static inline vm vf_eq(vf a, vf b) { return V_COMPARE(a, b, _CMP_EQ_OQ); }

/* A vector that stays in a register: compilers take loading it again with each use for cheap. */
#define LOADED_ONCE(vector) IN_REGISTER(vector)

/* Bytes of 8 rows x 8 columns, as pairs of columns: pair[j] holds column 2 j of the 8 rows, then column 2 j + 1. */
static inline void transpose_8x8_bytes(__m128i pair[4], char *const row[8], ptrdiff_t at)
{
    __m128i by_two[4], by_four[4];
    UNROLL_FOR (int i = 0; i < 4; ++i)
        by_two[i] = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(row[2 * i] + at)),
                                      _mm_loadl_epi64((const __m128i *)(row[2 * i + 1] + at)));
    by_four[0] = _mm_unpacklo_epi16(by_two[0], by_two[1]);
    by_four[1] = _mm_unpackhi_epi16(by_two[0], by_two[1]);
    by_four[2] = _mm_unpacklo_epi16(by_two[2], by_two[3]);
    by_four[3] = _mm_unpackhi_epi16(by_two[2], by_two[3]);
    pair[0] = _mm_unpacklo_epi32(by_four[0], by_four[2]);
    pair[1] = _mm_unpackhi_epi32(by_four[0], by_four[2]);
    pair[2] = _mm_unpacklo_epi32(by_four[1], by_four[3]);
    pair[3] = _mm_unpackhi_epi32(by_four[1], by_four[3]);
}

#endif
