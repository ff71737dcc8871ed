/* AVX-512: 32 registers of 64 bytes.  Tiles hold 24 accumulators; four registers of rows, and the scalars of K or V
 * that are broadcast into the rest, leave none to spill.
 *
 * Each ISA header defines, for the compute type `real` (float or double), VL lanes of it as `vf`, a lane mask `vm`,
 * and the operations of baseline.h under the same names.  Nothing else in the sources depends on the instruction set. */
#ifndef SDPA_SIMD_AVX512_H
#define SDPA_SIMD_AVX512_H

#include "simd/x86.h"

enum { VECTORS = 4, TILE = 24 };

#if SDPA_REAL_BYTES == 4

/* See ROUNDER in vmath.h. */
static inline vf vf_exponent(vf t) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23)); }

static inline vf vf_from_float(const float *p) { return _mm512_loadu_ps(p); }
static inline vf vf_from_int8(const char *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_from_float16(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vf vf_from_bfloat16(const char *p)
{
    const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}
static inline void vf_to_float16(char *p, vf a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
/* In whole numbers, see half.h: the instructions of AVX512-BF16 make zeros of denormals. */
static inline void vf_to_bfloat16(char *p, vf a)
{
    const __m512i bits = _mm512_castps_si512(a), upper = _mm512_srli_epi32(bits, 16);
    const __m512i half_unit =
        _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half_unit), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i halves = _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(halves));
}
/* seen[column] lane row = row[row][at + column] is not 0: four rows to a register, interleaved by bytes and by pairs,
 * then each column's four groups of four rows brought together. */
static inline void vm_transpose_bools(vm seen[16], char *const row[16], ptrdiff_t at)
{
    __m512i every_fourth[4], by_two[4], columns[4];
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[i] + at)));
        four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(row[i + 4] + at)), 1);
        four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(row[i + 8] + at)), 2);
        every_fourth[i] = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(row[i + 12] + at)), 3);
    }
    by_two[0] = _mm512_unpacklo_epi8(every_fourth[0], every_fourth[1]);
    by_two[1] = _mm512_unpackhi_epi8(every_fourth[0], every_fourth[1]);
    by_two[2] = _mm512_unpacklo_epi8(every_fourth[2], every_fourth[3]);
    by_two[3] = _mm512_unpackhi_epi8(every_fourth[2], every_fourth[3]);
    columns[0] = _mm512_unpacklo_epi16(by_two[0], by_two[2]);
    columns[1] = _mm512_unpackhi_epi16(by_two[0], by_two[2]);
    columns[2] = _mm512_unpacklo_epi16(by_two[1], by_two[3]);
    columns[3] = _mm512_unpackhi_epi16(by_two[1], by_two[3]);
    const __m512i gather = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        const __m512i four = _mm512_permutexvar_epi32(gather, columns[i]);
        const uint64_t bits = _mm512_test_epi8_mask(four, four);
        UNROLL_FOR (int j = 0; j < 4; ++j) seen[4 * i + j] = (vm)(bits >> (16 * j));
    }
}

/* r[i] lane j  <->  r[j] lane i: pairs of lanes, pairs of pairs, then the four 128-bit quarters twice. */
static inline void vf_transpose(vf r[16])
{
    vf t[16];
    UNROLL_FOR (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL_FOR (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

/* Lane i of the result is the sum over the lanes of a[i]: half as many shuffles as a transposition. */
static inline ALWAYS_INLINE vf vf_sums(vf a[16])
{
    vf by_two[8], by_four[4], by_eight[2];
    UNROLL_FOR (int i = 0; i < 8; ++i)
        by_two[i] =
            _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL_FOR (int i = 0; i < 4; ++i)
        by_four[i] = _mm512_add_ps(_mm512_shuffle_ps(by_two[2 * i], by_two[2 * i + 1], 0x44),
                                   _mm512_shuffle_ps(by_two[2 * i], by_two[2 * i + 1], 0xee));
    UNROLL_FOR (int i = 0; i < 2; ++i)
        by_eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(by_four[2 * i], by_four[2 * i + 1], 0x88),
                                    _mm512_shuffle_f32x4(by_four[2 * i], by_four[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(by_eight[0], by_eight[1], 0x88),
                         _mm512_shuffle_f32x4(by_eight[0], by_eight[1], 0xdd));
}

#else

static inline vf vf_exponent(vf t) { return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(t), 52)); }

static inline vf vf_from_float(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
static inline vf vf_from_int8(const char *p)
{
    return _mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_from_float16(const char *p)
{
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_from_bfloat16(const char *p)
{
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)));
}
static inline void vm_transpose_bools(vm seen[8], char *const row[8], ptrdiff_t at)
{
    __m128i pair[4];
    transpose_8x8_bytes(pair, row, at);
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        const unsigned bits = _mm_test_epi8_mask(pair[i], pair[i]);
        seen[2 * i] = (vm)bits;
        seen[2 * i + 1] = (vm)(bits >> 8);
    }
}

static inline void vf_transpose(vf r[8])
{
    vf t[8];
    UNROLL_FOR (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 2; ++i) {
        r[i] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
        r[i + 2] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
        r[i + 4] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
        r[i + 6] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
    }
    UNROLL_FOR (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0xdd);
    }
    UNROLL_FOR (int i = 0; i < 8; ++i) r[i] = t[i];
}

static inline ALWAYS_INLINE vf vf_sums(vf a[8])
{
    vf by_two[4], by_four[2];
    UNROLL_FOR (int i = 0; i < 4; ++i)
        by_two[i] =
            _mm512_add_pd(_mm512_unpacklo_pd(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_pd(a[2 * i], a[2 * i + 1]));
    UNROLL_FOR (int i = 0; i < 2; ++i)
        by_four[i] = _mm512_add_pd(_mm512_shuffle_f64x2(by_two[2 * i], by_two[2 * i + 1], 0x88),
                                   _mm512_shuffle_f64x2(by_two[2 * i], by_two[2 * i + 1], 0xdd));
    return _mm512_add_pd(_mm512_shuffle_f64x2(by_four[0], by_four[1], 0x88),
                         _mm512_shuffle_f64x2(by_four[0], by_four[1], 0xdd));
}

#endif

static inline vf vf_abs(vf a) { return V(abs)(a); }
static inline vf vf_select(vm m, vf a, vf b) { return V(mask_blend)(m, b, a); } /* m ? a : b */

#endif
