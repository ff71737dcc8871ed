/* AVX512-BF16: products of pairs.  A lane of 32 bits holds two neighbouring bfloat16, the first in its lower half. */
#ifndef SDPA_SIMD_AVX512_BF16_H
#define SDPA_SIMD_AVX512_BF16_H

#include "simd/avx512.h"

/* c + a.low * b.low + a.high * b.high in each lane.  Denormals count as 0, in the operands and in the sum. */
static inline vf vf_dot_pairs(vf a, vf b, vf c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}

/* The pair of each lane of `low` and `high`, rounded to nearest even. */
static inline vf vf_round_pairs(vf low, vf high)
{
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(high, low); /* all of low, then all of high */
    const __m512i by_two = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, /**/
                                            23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(by_two, apart));
}

/* The numbers of each pair. */
static inline vf vf_first(vf pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pair), 16)); }
static inline vf vf_second(vf pair)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pair), _mm512_set1_epi32((int)0xffff0000)));
}

/* 16 numbers, rounded. */
static inline void halves_store_half(char *p, vf a)
{
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a));
}

static inline int vf_any_denormal(vf a, vf b)
{
    enum { DENORMAL = 0x20 };
    return _mm512_fpclass_ps_mask(a, DENORMAL) | _mm512_fpclass_ps_mask(b, DENORMAL);
}

/* Denormals, and 0 for all other numbers. */
static inline vf vf_denormals(vf a)
{
    enum { DENORMAL = 0x20 };
    return _mm512_maskz_mov_ps(_mm512_fpclass_ps_mask(a, DENORMAL), a);
}

/* The same bits as vf_to_bfloat16, sooner: the instruction takes denormals for 0, but they are rare. */
static inline void vf_store_bfloat16(char *p, vf a)
{
    if (vf_any_denormal(a, a))
        vf_to_bfloat16(p, a);
    else
        halves_store_half(p, a);
}

typedef __m512i halves; /* 32 numbers */

static inline halves halves_load(const char *p) { return _mm512_loadu_si512(p); }
/* The first `count` < 32 of them, and 0 for the others, which are not read. */
static inline halves halves_load_some(const char *p, int64_t count)
{
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
}
/* The same bits. */
static inline vf halves_as_pairs(halves x) { return _mm512_castsi512_ps(x); }
static inline halves pairs_as_halves(vf x) { return _mm512_castps_si512(x); }

static inline halves halves_zero(void) { return _mm512_setzero_si512(); }

/* to[0 .. 31]: pairs of low[i] and high[i]. */
static inline void halves_interleave(real *to, halves low, halves high)
{
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, /**/
                                           39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(low, first, high));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(low, second, high));
}

/* The same in registers, in an order that takes half as many instructions: quarters of each are taken in turns, and
 * vf_in_order brings sums of such pairs to the order of `low`. */
static inline vf halves_pairs_low(halves low, halves high)
{
    return _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
}
static inline vf halves_pairs_high(halves low, halves high)
{
    return _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
}
static inline void vf_in_order(vf *first, vf *second)
{
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const vf a = *first, b = *second;
    *first = _mm512_permutex2var_ps(a, low, b);
    *second = _mm512_permutex2var_ps(a, high, b);
}

/* Lane i of the result: numbers at[2 i] and at[2 i + 1] of the 32 in low and high, rounded. */
static inline vf vf_round_and_pair(vf low, vf high, halves at)
{
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(at, apart));
}

/* Largest and smallest of the exponents matter in pairs.h: collected here as whole numbers, 2 |x| - 2 * from modulo
 * 2**16, so that numbers below `from` come out as the largest. */
static inline halves halves_max_distance(halves max, halves x, uint16_t from)
{
    const __m512i twice = _mm512_add_epi16(x, x); /* drops the sign */
    return _mm512_max_epu16(max, _mm512_sub_epi16(twice, _mm512_set1_epi16((short)(2 * from))));
}
static inline int halves_any_from(halves distance, uint16_t limit)
{
    return _mm512_cmpge_epu16_mask(distance, _mm512_set1_epi16((short)limit)) != 0;
}

#endif
