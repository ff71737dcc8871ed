/* Both products of product.h by multiply-adds of vectors.
 *
 * A tile holds `height` x `vectors` accumulators in registers.  Per k it loads `vectors` vectors of B, broadcasts
 * `height` scalars of A and does height * vectors multiply-adds: with 6 x 4 that is 10 loads for 24 fma, so the fma
 * units are the limit.  Fewer vectors make higher tiles. */
#ifndef SDPA_FORWARD_VECTORS_H
#define SDPA_FORWARD_VECTORS_H

#include "forward/agenda.h"
#include "memory/write.h"
#include "simd/vmath.h"
#if PAIRS
#include "forward/pairs.h"
#else
#include "forward/singles.h"
#endif

static inline ALWAYS_INLINE void set_to_zero(const int height, const int vectors, vf sum[][SDPA_MAX_VECTORS])
{
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) sum[i][v] = vf_set1(0);
}

/* sum[i][v] += A(i, k) * B[k][v] for k < k_end and the vectors first <= v < end.  `apart`: rows of A are an unknown number
 * of others apart. */
static inline ALWAYS_INLINE void multiply(const int height, const int first, const int end, vf sum[][SDPA_MAX_VECTORS],
                                          int64_t k_end, const real *a, ptrdiff_t a_i, ptrdiff_t a_k, const int apart,
                                          const real *b, ptrdiff_t b_k)
{
    enum { FEW_ADDRESSES = 6, FEW_LOADS = 3 }; /* of two or three rows, loads of B in each multiply-add are the limit */
    const int grouped = apart && height > FEW_ADDRESSES;
    const real *group[(TALLEST + GROUP_ROWS - 1) / GROUP_ROWS];
    UNROLL_FOR (int i = 0; grouped && i < height; i += GROUP_ROWS) group[i / GROUP_ROWS] = a + i * a_i;
    for (int64_t k = 0; k < k_end; ++k) {
        vf row[SDPA_MAX_VECTORS];
        UNROLL_FOR (int v = first; v < end; ++v) {
            row[v] = vf_load(b + k * b_k + v * VL);
            if (height > 1 && height <= FEW_LOADS) LOADED_ONCE(row[v]);
        }
        UNROLL_FOR (int i = 0; i < height; ++i) {
            const vf scalar = vf_set1(grouped ? group[i / GROUP_ROWS][i % GROUP_ROWS * a_i] : a[i * a_i + k * a_k]);
            UNROLL_FOR (int v = first; v < end; ++v) sum[i][v] = vf_product(scalar, row[v], sum[i][v]);
        }
        UNROLL_FOR (int i = 0; grouped && i < height; i += GROUP_ROWS) {
            group[i / GROUP_ROWS] += a_k;
            NOT_DERIVED(group[i / GROUP_ROWS]);
        }
    }
}

/* Covers 0 <= i < count with tiles as high as the registers allow, then lower ones: nothing is computed in vain.
 * `tile(height, i)` is expanded with a constant height. */
#define FOR_TILES(vectors, count, tile)                                                                                \
    do {                                                                                                               \
        const int full = TILE / (vectors);                                                                             \
        int64_t i = 0;                                                                                                 \
        for (; i + full <= (count); i += full) tile(full, i);                                                          \
        if (full > 16 && i + 16 <= (count)) tile(16, i), i += 16;                                                      \
        if (full > 8 && i + 8 <= (count)) tile(8, i), i += 8;                                                          \
        if (full > 4 && i + 4 <= (count)) tile(4, i), i += 4;                                                          \
        if (i + 2 <= (count)) tile(2, i), i += 2;                                                                      \
        if (i < (count)) tile(1, i);                                                                                   \
    } while (0)

/* ---- s[key][rows] = K[key][:] . q[:][rows] */

/* The sum is added to what s holds, unless it is the `first`.  high[rows] is raised to the result; NaN does not raise
 * it. */
static inline ALWAYS_INLINE void score_tile(const int height, const int vectors, int64_t dim, const real *k,
                                            ptrdiff_t k_stride, const real *q, int first, real *s, real *high,
                                            agenda *soon)
{
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    fetch_some(soon);
    multiply(height, 0, vectors, sum, dim, k, k_stride, 1, 1, q, ROWS);
    if (!first)
        UNROLL_FOR (int i = 0; i < height; ++i)
            UNROLL_FOR (int v = 0; v < vectors; ++v) sum[i][v] = vf_add(vf_load(s + i * ROWS + v * VL), sum[i][v]);
    UNROLL_FOR (int v = 0; v < vectors; ++v) {
        vf highest = vf_load(high + v * VL);
        UNROLL_FOR (int i = 0; i < height; ++i) highest = vf_max(sum[i][v], highest);
        vf_store(high + v * VL, highest);
    }
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) vf_store(s + i * ROWS + v * VL, sum[i][v]);
}

static inline ALWAYS_INLINE void score_tiles(const int vectors, int64_t keys, int64_t dim, const real *k,
                                             ptrdiff_t k_stride, const real *q, int first, real *s, real *high,
                                             agenda *soon)
{
#define SCORE_TILE(height, key)                                                                                        \
    score_tile(height, vectors, dim, k + (key) * k_stride, k_stride, q, first, s + (key) * ROWS, high, soon)
    FOR_TILES(vectors, keys, SCORE_TILE);
#undef SCORE_TILE
}

static void score_keys(int vectors, int64_t keys, int64_t dim, const real *k, ptrdiff_t k_stride, const real *q,
                       int first, real *s, real *high, agenda *soon)
{
#define SCORE_TILES(vectors) score_tiles(vectors, keys, dim, k, k_stride, q, first, s, high, soon)
    WITH_VECTORS(vectors, SCORE_TILES);
#undef SCORE_TILES
}

/* The error of one sum over hundreds of steps would exceed twice that of NumPy: they are summed in parts, and where
 * there are many of these, in groups of parts. */
enum { LONGEST_SUM = 128, GROUP_OF_SUMS = 32 * LONGEST_SUM };

/* s += more; high is raised to the result. */
static void add_products(sdpa_segment g, const real *more, real *s, real *high)
{
    for (int v = g.first_vector; v < g.end_vector; ++v) {
        vf highest = vf_load(high + v * VL);
        for (ptrdiff_t i = g.begin * ROWS + v * VL; i < g.end * ROWS; i += ROWS) {
            const vf sum = vf_add(vf_load(s + i), vf_load(more + i));
            vf_store(s + i, sum);
            highest = vf_max(sum, highest);
        }
        vf_store(high + v * VL, highest);
    }
}

/* s[key][rows] = K[key][:] . q[:][rows] in a segment, for rows of `width` features; `s` and `high` are those of the
 * block.  Groups of parts are formed in `spare`, which is as s; NULL: there are none. */
static void segment_products(sdpa_segment g, operand k, int64_t width, const real *q, real *s, real *high, real *spare,
                             agenda *soon)
{
    const int64_t dim = steps(width);
    const ptrdiff_t stride = k.stride / (ptrdiff_t)sizeof(real);
    const real *keys = (const real *)k.at + g.begin * stride;
    real unused[ROWS] = {0}, *to = s;
    int64_t d = 0, end;
    do {
        const int begins = d == 0 || (spare && d % GROUP_OF_SUMS == 0);
        end = dim - d < LONGEST_SUM ? dim : d + LONGEST_SUM;
        if (begins && d) to = spare;
        score_keys(g.end_vector - g.first_vector, g.end - g.begin, end - d, keys + d, stride,
                   q + d * ROWS + g.first_vector * VL, begins, to + g.begin * ROWS + g.first_vector * VL,
                   end == dim && to == s ? high + g.first_vector * VL : unused, soon);
        d = end;
        if (to != s && (d == dim || d % GROUP_OF_SUMS == 0)) add_products(g, spare, s, d == dim ? high : unused);
    } while (d < dim);
}
/* ---- o[feature][rows] = o[feature][rows] * shrink[rows] + sum over keys of V[key][feature] * s[key][rows] */

/* A tile stays in registers over all segments of a block; a segment adds to the vectors that see its keys.  A block is
 * summed on its own before it joins `o`: the error of long rows grows with the number of blocks, not of keys. */
static inline ALWAYS_INLINE void output_tile(const int height, const int vectors, const sdpa_task *t, const real *s,
                                             const real *values, ptrdiff_t stride, real *o, const real *shrink,
                                             agenda *soon)
{
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    fetch_some(soon);
    for (int n = 0; n < t->block.segments; ++n) {
        const sdpa_segment g = t->block.segment[n];
        const ptrdiff_t begin = g.begin / STEP; /* a block, and so a segment, begins with a whole step */
        const real *from = values + begin * stride, *weights = s + begin * ROWS;
#define SEEN_BY(first, last)                                                                                           \
    if (last < vectors && g.first_vector == first && g.end_vector == last + 1)                                         \
    multiply(height, first, last + 1, sum, steps(g.end - g.begin), from, 1, stride, 0, weights, ROWS)
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
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) {
            real *at = o + i * ROWS + v * VL;
            /* A sum that underflows may be -0, and would not be after the 0 of a block that is not seen. */
            vf_store(at,
                     shrink ? vf_fma(vf_load(at), vf_load(shrink + v * VL), sum[i][v]) : vf_add(sum[i][v], vf_set1(0)));
        }
}

static inline ALWAYS_INLINE void output_tiles(const int vectors, int64_t width, const sdpa_task *t, const real *s,
                                              const real *values, ptrdiff_t stride, real *o, const real *shrink,
                                              agenda *soon)
{
#define OUTPUT_TILE(height, e) output_tile(height, vectors, t, s, values + (e), stride, o + (e) * ROWS, shrink, soon)
    FOR_TILES(vectors, width, OUTPUT_TILE);
#undef OUTPUT_TILE
}

/* o[feature][rows] = o * shrink + values^T s, for values of `width` features; `shrink` NULL: o is taken as 0. */
static void weighted_sums(const sdpa_task *t, operand values, int64_t width, const real *s, real *o, const real *shrink,
                          agenda *soon)
{
    const ptrdiff_t stride = values.stride / (ptrdiff_t)sizeof(real);
#define OUTPUT_TILES(vectors) output_tiles(vectors, width, t, s, (const real *)values.at, stride, o, shrink, soon)
    WITH_VECTORS(t->rows.vectors, OUTPUT_TILES);
#undef OUTPUT_TILES
}

/* ---- out[row][features] = factor[row] * sum over keys of s[key][row] * V[key][features]
 *
 * Where all keys are in one block, no sum outlives it.  So features can be lanes, and rows of the result go from the
 * registers to where the caller wants them, without a transpose.  Each sum is formed in the same order as in `o`. */

/* The keys that any of `count` rows from `row` on sees; they are of one vector where the block is cut. */
static inline sdpa_range seen_by_rows(const sdpa_task *t, int row, int count)
{
    if (!t->block.cut) return (sdpa_range){0, t->block.count};
    const int begin = t->block.sees[row].begin / STEP * STEP, end = t->block.sees[row + count - 1].end;
    return (sdpa_range){begin, end > begin ? end : begin};
}

/* `poison` stays 0 as long as all sums are finite. */
static inline ALWAYS_INLINE void row_tile(const int height, const int vectors, const sdpa_array *out,
                                          const sdpa_task *t, int row, const real *values, ptrdiff_t stride,
                                          ptrdiff_t offset, vf *poison, agenda *soon)
{
    const sdpa_range keys = seen_by_rows(t, row, height);
    const real *weights = (const real *)t->scratch.s + keys.begin / STEP * ROWS + row,
               *factor = (const real *)t->scratch.shrink + row;
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    fetch_some(soon);
    multiply(height, 0, vectors, sum, steps(keys.end - keys.begin), weights, 1, ROWS, 0,
             values + keys.begin / STEP * stride, stride);
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) poison[v] = vf_fma(sum[i][v], vf_set1(0), poison[v]);
    /* Which it is, is asked once: of each vector it would take as long as storing it. */
#define WRITE_AS(of)                                                                                                   \
    if (out->dtype == (of))                                                                                            \
        UNROLL_FOR (int i = 0; i < height; ++i)                                                                        \
            UNROLL_FOR (int v = 0; v < vectors; ++v)                                                                   \
    write_adjacent(t->rows.out[row + i] + offset + v * VL * size_of(of), of, vf_mul(sum[i][v], vf_set1(factor[i])))
    WRITE_AS(REAL_DTYPE);
    WRITE_AS(SDPA_FLOAT16);
    WRITE_AS(SDPA_BFLOAT16);
#undef WRITE_AS
}

static inline ALWAYS_INLINE void row_tiles(const int vectors, const sdpa_array *out, const sdpa_task *t, int first,
                                           int count, const real *values, ptrdiff_t stride, ptrdiff_t offset,
                                           vf *poison, agenda *soon)
{
#define ROW_TILE(height, row)                                                                                          \
    row_tile(height, vectors, out, t, first + (int)(row), values, stride, offset, poison, soon)
    FOR_TILES(vectors, count, ROW_TILE);
#undef ROW_TILE
}

/* For rows of whole vectors.  Returns whether all sums are finite. */
static int write_rows(const sdpa_array *out, const sdpa_task *t, operand values, int64_t width, agenda *soon)
{
    const ptrdiff_t stride = values.stride / (ptrdiff_t)sizeof(real);
    const int run = t->block.cut ? VL : ROWS;
    vf poison[SDPA_MAX_VECTORS];
    for (int v = 0; v < SDPA_MAX_VECTORS; ++v) poison[v] = vf_set1(0);
    for (int64_t e = 0, vectors; e < width; e += vectors * VL) {
        vectors = (width - e) / VL < VECTORS ? (width - e) / VL : VECTORS;
        for (int first = 0; first < t->rows.count; first += run) {
            const int count = t->rows.count - first < run ? t->rows.count - first : run;
#define ROW_TILES(vectors)                                                                                             \
    row_tiles(vectors, out, t, first, count, (const real *)values.at + e, stride, e * out->itemsize, poison, soon)
            WITH_VECTORS(vectors, ROW_TILES);
#undef ROW_TILES
        }
    }
    for (int v = 1; v < SDPA_MAX_VECTORS; ++v) poison[0] = vf_add(poison[0], poison[v]);
    return is_zero(poison[0]);
}

#endif
