/* AVX2 and FMA: 16 registers of 32 bytes.  6 x 2 accumulators leave four for operands. */
#ifndef SDPA_SIMD_AVX2_H
#define SDPA_SIMD_AVX2_H

#include "simd/x86.h"

#include <string.h>

enum { VECTORS = 2, TILE = 12 };

#if SDPA_REAL_BYTES == 4

#define V_CAST(i) _mm256_castsi256_ps(i)
/* See ROUNDER in vmath.h. */
static inline vf vf_exponent(vf t) { return V_CAST(_mm256_slli_epi32(_mm256_castps_si256(t), 23)); }

static inline vf vf_from_float(const float *p) { return _mm256_loadu_ps(p); }
static inline vf vf_from_int8(const char *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_from_float16(const char *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vf vf_from_bfloat16(const char *p)
{
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return V_CAST(_mm256_slli_epi32(halves, 16));
}
static inline void vf_to_float16(char *p, vf a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline void vf_to_bfloat16(char *p, vf a) /* see half.h */
{
    const __m256i bits = _mm256_castps_si256(a), upper = _mm256_srli_epi32(bits, 16);
    const __m256i half_unit =
        _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half_unit), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
    const __m256i packed = _mm256_packus_epi32(halves, halves); /* within each half of the register */
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
/* seen[column] lane row = row[row][at + column] is not 0. */
static inline void vm_transpose_bools(vf seen[8], char *const row[8], ptrdiff_t at)
{
    __m128i pair[4];
    transpose_8x8_bytes(pair, row, at);
    UNROLL_FOR (int i = 0; i < 8; ++i) {
        const __m256i lanes = _mm256_cvtepu8_epi32(i % 2 ? _mm_unpackhi_epi64(pair[i / 2], pair[i / 2]) : pair[i / 2]);
        seen[i] = V_CAST(_mm256_cmpgt_epi32(lanes, _mm256_setzero_si256()));
    }
}

static inline void vf_transpose(vf r[8])
{
    vf t[8];
    UNROLL_FOR (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    UNROLL_FOR (int i = 0; i < 8; ++i) r[i] = t[i];
}

/* Lane i of the result is the sum over the lanes of a[i]. */
static inline ALWAYS_INLINE vf vf_sums(vf a[8])
{
    vf by_two[4], by_four[2];
    UNROLL_FOR (int i = 0; i < 4; ++i)
        by_two[i] =
            _mm256_add_ps(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL_FOR (int i = 0; i < 2; ++i)
        by_four[i] = _mm256_add_ps(_mm256_shuffle_ps(by_two[2 * i], by_two[2 * i + 1], 0x44),
                                   _mm256_shuffle_ps(by_two[2 * i], by_two[2 * i + 1], 0xee));
    return _mm256_add_ps(_mm256_permute2f128_ps(by_four[0], by_four[1], 0x20),
                         _mm256_permute2f128_ps(by_four[0], by_four[1], 0x31));
}

#else

#define V_CAST(i) _mm256_castsi256_pd(i)
static inline vf vf_exponent(vf t) { return V_CAST(_mm256_slli_epi64(_mm256_castpd_si256(t), 52)); }

static inline vf vf_from_float(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
static inline vf vf_from_int8(const char *p)
{
    int four;
    memcpy(&four, p, sizeof four);
    return _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
}
static inline vf vf_from_float16(const char *p)
{
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_from_bfloat16(const char *p)
{
    const __m128i halves = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(halves, 16)));
}
static inline void vm_transpose_bools(vf seen[4], char *const row[4], ptrdiff_t at)
{
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        const int64_t a = row[0][at + i] != 0, b = row[1][at + i] != 0, c = row[2][at + i] != 0,
                      d = row[3][at + i] != 0;
        const __m256i lanes = _mm256_setr_epi64x(a, b, c, d);
        seen[i] = V_CAST(_mm256_cmpgt_epi64(lanes, _mm256_setzero_si256()));
    }
}

static inline void vf_transpose(vf r[4])
{
    vf t[4];
    UNROLL_FOR (int i = 0; i < 4; i += 2) {
        t[i] = _mm256_unpacklo_pd(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_pd(r[i], r[i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 2; ++i) {
        r[i] = _mm256_permute2f128_pd(t[i], t[i + 2], 0x20);
        r[i + 2] = _mm256_permute2f128_pd(t[i], t[i + 2], 0x31);
    }
}

static inline ALWAYS_INLINE vf vf_sums(vf a[4])
{
    const vf low = _mm256_add_pd(_mm256_unpacklo_pd(a[0], a[1]), _mm256_unpackhi_pd(a[0], a[1]));
    const vf high = _mm256_add_pd(_mm256_unpacklo_pd(a[2], a[3]), _mm256_unpackhi_pd(a[2], a[3]));
    return _mm256_add_pd(_mm256_permute2f128_pd(low, high, 0x20), _mm256_permute2f128_pd(low, high, 0x31));
}

#endif

static inline vf vf_abs(vf a) { return V(andnot)(V(set1)((real)-0.0), a); }
static inline vf vf_select(vm m, vf a, vf b) { return V(blendv)(b, a, m); } /* m ? a : b */

#endif
