/* Shared by the x86 headers: bytes of 8 rows x 8 columns, as pairs of columns: pair[j] holds column 2 j of the 8 rows,
 * then column 2 j + 1. */
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
