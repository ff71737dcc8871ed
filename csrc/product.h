/* The two products of attention, and nearly all of its time.  Both are
 *
 *     C[i][rows] = sum over k of A(i, k) * B[k][rows]
 *
 * scores: i is a key, k a feature, A = K as it lies in memory, B = the transposed queries;
 * output: i is a feature of a value, k a key, A = V as it lies in memory, B = the weights.
 *
 * A tile holds `height` x `vectors` accumulators in registers.  Per k it loads `vectors` vectors of B, broadcasts
 * `height` scalars of A and does height * vectors multiply-adds: with 6 x 4 that is 10 loads for 24 fma, so the fma
 * units are the limit.  Fewer vectors make higher tiles.  The sum of each element runs over k in order, one fma at a time, whatever the tile: the
 * bits of a row do not depend on how rows and keys are cut into tiles. */

/* sum[i][v] += A(i, k) * B[k][v] for k < k_end and the vectors first <= v < end. */
static inline ALWAYS_INLINE void multiply(const int height, const int first, const int end, vf sum[][SDPA_MAX_VECTORS],
                                          int64_t k_end, const real *a, ptrdiff_t a_i, ptrdiff_t a_k, const real *b)
{
    for (int64_t k = 0; k < k_end; ++k) {
        vf row[SDPA_MAX_VECTORS];
        UNROLL for (int v = first; v < end; ++v) row[v] = vf_load(b + k * ROWS + v * VL);
        UNROLL for (int i = 0; i < height; ++i) {
            const vf scalar = vf_set1(a[i * a_i + k * a_k]);
            UNROLL for (int v = first; v < end; ++v) sum[i][v] = vf_fma(scalar, row[v], sum[i][v]);
        }
    }
}

/* Covers 0 <= i < count with tiles as high as the registers allow, then of 4, 2 and 1: nothing is computed twice or in
 * vain.  `tile(height, i)` is expanded with a constant height. */
#define FOR_TILES(vectors, count, tile)                                                                                \
    do {                                                                                                               \
        int64_t i = 0;                                                                                                 \
        for (; i + TILE / (vectors) <= (count); i += TILE / (vectors)) tile(TILE / (vectors), i);                      \
        if (TILE / (vectors) > 12)                                                                                     \
            for (; i + 12 <= (count); i += 12) tile(12, i);                                                            \
        if (TILE / (vectors) > 4)                                                                                      \
            for (; i + 4 <= (count); i += 4) tile(4, i);                                                               \
        for (; i + 2 <= (count); i += 2) tile(2, i);                                                                   \
        for (; i < (count); ++i) tile(1, i);                                                                           \
    } while (0)

/* Expands `call(n)` for n = `vectors`, so that the compiler sees a constant and unrolls each number on its own. */
#define WITH_VECTORS(vectors, call)                                                                                    \
    do {                                                                                                               \
        if ((vectors) == 1) call(1);                                                                                   \
        if ((vectors) == 2) call(2);                                                                                   \
        if (VECTORS > 2 && (vectors) == 3) call(3);                                                                    \
        if (VECTORS > 2 && (vectors) == 4) call(4);                                                                    \
    } while (0)

/* ---- s[key][rows] = K[key][:] . q[:][rows], for the keys of one segment */

static inline ALWAYS_INLINE void score_tile(const int height, const int vectors, int64_t dim, const real *k,
                                            ptrdiff_t k_stride, const real *q, real *s)
{
    vf sum[TILE][SDPA_MAX_VECTORS];
    UNROLL for (int i = 0; i < height; ++i)
        UNROLL for (int v = 0; v < vectors; ++v) sum[i][v] = vf_set1(0);
    multiply(height, 0, vectors, sum, dim, k, k_stride, 1, q);
    UNROLL for (int i = 0; i < height; ++i)
        UNROLL for (int v = 0; v < vectors; ++v) vf_store(s + i * ROWS + v * VL, sum[i][v]);
}

static inline ALWAYS_INLINE void score_tiles(const int vectors, int64_t keys, int64_t dim, const real *k,
                                             ptrdiff_t k_stride, const real *q, real *s)
{
#define SCORE_TILE(height, key) score_tile(height, vectors, dim, k + (key) * k_stride, k_stride, q, s + (key) * ROWS)
    FOR_TILES(vectors, keys, SCORE_TILE);
#undef SCORE_TILE
}

static void score_segment(int vectors, int64_t keys, int64_t dim, const real *k, ptrdiff_t k_stride, const real *q, real *s)
{
#define SCORE_TILES(vectors) score_tiles(vectors, keys, dim, k, k_stride, q, s)
    WITH_VECTORS(vectors, SCORE_TILES);
#undef SCORE_TILES
}

/* ---- o[feature][rows] = o[feature][rows] * shrink[rows] + sum over keys of V[key][feature] * s[key][rows] */

/* A tile stays in registers over all segments of a block; a segment adds to the vectors that see its keys. */
static inline ALWAYS_INLINE void output_tile(const int height, const int vectors, const sdpa_task *t, const real *values,
                                             ptrdiff_t stride, real *o, const real *shrink)
{
    vf sum[TILE][SDPA_MAX_VECTORS];
    UNROLL for (int i = 0; i < height; ++i)
        UNROLL for (int v = 0; v < vectors; ++v)
            sum[i][v] = shrink ? vf_mul(vf_load(o + i * ROWS + v * VL), vf_load(shrink + v * VL)) : vf_set1(0);
    for (int n = 0; n < t->segments; ++n) {
        const sdpa_segment g = t->segment[n];
        const real *from = values + g.begin * stride, *weights = (const real *)t->s + (ptrdiff_t)g.begin * ROWS;
#define SEEN_BY(first, last)                                                                                           \
    if (last < vectors && g.first_vector == first && g.end_vector == last + 1)                                         \
    multiply(height, first, last + 1, sum, g.end - g.begin, from, 1, stride, weights)
        SEEN_BY(0, 0);
        SEEN_BY(0, 1);
        SEEN_BY(0, 2);
        SEEN_BY(0, 3);
        SEEN_BY(1, 1);
        SEEN_BY(1, 2);
        SEEN_BY(1, 3);
        SEEN_BY(2, 2);
        SEEN_BY(2, 3);
        SEEN_BY(3, 3);
#undef SEEN_BY
    }
    UNROLL for (int i = 0; i < height; ++i)
        UNROLL for (int v = 0; v < vectors; ++v) vf_store(o + i * ROWS + v * VL, sum[i][v]);
}

static inline ALWAYS_INLINE void output_tiles(const int vectors, int64_t value_dim, const sdpa_task *t, const real *values,
                                              ptrdiff_t stride, const real *shrink)
{
    real *o = t->o;
#define OUTPUT_TILE(height, e) output_tile(height, vectors, t, values + (e), stride, o + (e) * ROWS, shrink)
    FOR_TILES(vectors, value_dim, OUTPUT_TILE);
#undef OUTPUT_TILE
}

/* `shrink` NULL: o is taken as 0. */
static void output_block(const sdpa_task *t, int64_t value_dim, const real *values, ptrdiff_t stride, const real *shrink)
{
#define OUTPUT_TILES(vectors) output_tiles(vectors, value_dim, t, values, stride, shrink)
    WITH_VECTORS(t->vectors, OUTPUT_TILES);
#undef OUTPUT_TILES
}
