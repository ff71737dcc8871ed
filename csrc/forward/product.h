/* The engine for many rows, with rows in lanes: the two products of attention, and nearly all of its time.  Both are
 *
 *     C[i][rows] = sum over k of A(i, k) * B[k][rows]
 *
 * scores: i is a key, k a feature, A = K as it lies in memory, B = the transposed queries;
 * output: i is a feature of a value, k a key, A = V as it lies in memory, B = the weights.
 *
 * A tile holds `height` x `vectors` accumulators in registers.  Per k it loads `vectors` vectors of B, broadcasts
 * `height` scalars of A and does height * vectors multiply-adds: with 6 x 4 that is 10 loads for 24 fma, so the fma
 * units are the limit.  Fewer vectors make higher tiles.  The sum of each element runs over k in order, one fma at a
 * time, whatever the tile: the bits of a row do not depend on how rows and keys are cut into tiles.
 *
 * k goes in `steps` of a number (singles.h) or of a pair (pairs.h); either is one `real`, and one multiply-add. */
#ifndef SDPA_FORWARD_PRODUCT_H
#define SDPA_FORWARD_PRODUCT_H

#include "simd/vmath.h"
#include "memory/pages.h"
#include "memory/prefetch.h"
#include "memory/write.h"
#if PAIRS
#include "forward/pairs.h"
#else
#include "forward/singles.h"
#endif

/* columns[feature][rows] from the rows of the task in an array of `width` features. */
static void load_columns(const sdpa_rows *of, const sdpa_array *array, char *const *row_at, int64_t width,
                         real *columns, extremes *found)
{
    const int64_t dim = steps(width);
    for (int v = 0; v < of->vectors; ++v) fetch_rows(array, row_at + v * VL, width);
    for (int v = 0; v < of->vectors; ++v)
        for (int64_t column = 0; column < dim; column += VL) {
            const int64_t d = chunk_begin(column, dim);
            const int count = dim < VL ? (int)dim : VL;
            real *to = columns + d * ROWS + v * VL;
            vf tile[VL];
            read_columns(tile, row_at + v * VL, d, count, width, array, found);
            if (count == VL)
                UNROLL_FOR (int i = 0; i < VL; ++i) vf_store(to + i * ROWS, tile[i]);
            else
                for (int i = 0; i < count; ++i) vf_store(to + i * ROWS, tile[i]);
        }
}

/* q[feature][rows] */
static void load_queries(const sdpa_input *in, sdpa_task *t)
{
    extremes found = no_extremes();
    load_columns(&t->rows, &in->query, t->rows.query, in->dim, t->scratch.q, &found);
    find_odd_rows(in, t, found);
}

static inline ALWAYS_INLINE void set_to_zero(const int height, const int vectors, vf sum[][SDPA_MAX_VECTORS])
{
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) sum[i][v] = vf_set1(0);
}

/* sum[i][v] += A(i, k) * B[k][v] for k < k_end and the vectors first <= v < end. */
static inline ALWAYS_INLINE void multiply(const int height, const int first, const int end, vf sum[][SDPA_MAX_VECTORS],
                                          int64_t k_end, const real *a, ptrdiff_t a_i, ptrdiff_t a_k, const real *b,
                                          ptrdiff_t b_k)
{
    for (int64_t k = 0; k < k_end; ++k) {
        vf row[SDPA_MAX_VECTORS];
        UNROLL_FOR (int v = first; v < end; ++v) row[v] = vf_load(b + k * b_k + v * VL);
        UNROLL_FOR (int i = 0; i < height; ++i) {
            const vf scalar = vf_set1(a[i * a_i + k * a_k]);
            UNROLL_FOR (int v = first; v < end; ++v) sum[i][v] = vf_product(scalar, row[v], sum[i][v]);
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

/* Expands `call(n)` for n = `vectors`, so that the compiler sees a constant and unrolls each number on its own. */
#define WITH_VECTORS(vectors, call)                                                                                    \
    do {                                                                                                               \
        if ((vectors) == 1) call(1);                                                                                   \
        if ((vectors) == 2) call(2);                                                                                   \
        if (VECTORS > 2 && (vectors) == 3) call(3);                                                                    \
        if (VECTORS > 2 && (vectors) == 4) call(4);                                                                    \
    } while (0)

/* ---- s[key][rows] = K[key][:] . q[:][rows], for the keys of one segment */

/* Rows that are needed soon and may come from memory: some are asked for with each tile, as more at once would be
 * waited for. */
typedef struct {
    const sdpa_input *in;
    const sdpa_task *t;
    const sdpa_array *array;
    char *const *row_at; /* where each row begins, or NULL: rows are keys, from row 0 of the block at `keys_at` on */
    const char *keys_at;
    int row, end, with_each; /* the next one, that behind the last, and so many with each tile */
    ptrdiff_t first_byte, end_byte;
} pending;

/* Those of a product: of one array, two, or none; NULL is none, too. */
typedef struct {
    int count;
    pending rows[2];
} agenda;

static void fetch_pending(pending *rows)
{
    const int end = rows->end - rows->row < rows->with_each ? rows->end : rows->row + rows->with_each;
    const ptrdiff_t bytes = rows->end_byte - rows->first_byte;
    for (; rows->row < end; ++rows->row) {
        int alone = rows->row + 1;
        /* Rows of a bias that lie a multiple of 4096 bytes apart share one set of the first-level cache. */
        if (rows->row_at)
            fetch(rows->row_at[rows->row] + rows->first_byte, bytes, 0);
        else
            fetch(row_address(rows->in, rows->array, rows->keys_at, rows->t, rows->row, &alone), bytes, 1);
    }
}
static inline ALWAYS_INLINE void fetch_some(agenda *soon)
{
    for (int i = 0; soon && i < soon->count; ++i)
        if (soon->rows[i].row < soon->rows[i].end) fetch_pending(&soon->rows[i]);
}

/* Those are asked for while a product of so many keys or features goes on, for so many vectors of rows. */
static void add_pending(agenda *soon, pending rows, int64_t count, int vectors)
{
    if (count == 0) return;
    const int64_t height = TILE / vectors, tiles = (count + height - 1) / height;
    rows.with_each = (int)((rows.end - rows.row + tiles - 1) / tiles);
    soon->rows[soon->count++] = rows;
}

/* Whether rows of K or V are to be asked for: they come from memory, or each lies in a page of its own, where the
 * hardware, which looks ahead within a page, does not find the next. */
static int fetched(const sdpa_task *t, const sdpa_array *array)
{
    enum { PAGE = 4096 };
    return array->data && t->scratch.leads && (t->rows.far || array->row >= PAGE) && array->column == array->itemsize;
}

/* Keys begin..end of the block, or behind it, of K or V.  The first task of a bundle does that for all. */
static void add_pending_keys(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *keys_at,
                             int64_t width, int begin, int end, int64_t count, int vectors, agenda *soon)
{
    const int64_t left = t->rows.keys.end - t->block.first;
    if (end > left) end = (int)left;
    if (begin >= end || !fetched(t, array)) return;
    const pending rows = {.in = in,
                          .t = t,
                          .array = array,
                          .keys_at = keys_at,
                          .row = begin,
                          .end = end,
                          .end_byte = width * array->itemsize};
    add_pending(soon, rows, count, vectors);
}

/* What the scores of a segment meet in the bias.  One row for all stays in a cache; one that is not adjacent is read
 * element by element. */
static void add_pending_bias(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, agenda *soon)
{
    const sdpa_array *bias = &in->bias;
    if (!bias->data || bias->row == 0 || bias->column != bias->itemsize) return;
    const pending rows = {.array = bias,
                          .row_at = t->rows.bias,
                          .row = g.first_vector * VL,
                          .end = g.end_vector * VL < t->rows.count ? g.end_vector * VL : t->rows.count,
                          .first_byte = (t->block.first + g.begin) * bias->itemsize,
                          .end_byte = (t->block.first + g.end) * bias->itemsize};
    add_pending(soon, rows, g.end - g.begin, g.end_vector - g.first_vector);
}

/* The sum is added to what s holds, unless it is the `first`.  high[rows] is raised to the result; NaN does not raise
 * it. */
static inline ALWAYS_INLINE void score_tile(const int height, const int vectors, int64_t dim, const real *k,
                                            ptrdiff_t k_stride, const real *q, int first, real *s, real *high,
                                            agenda *soon)
{
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    fetch_some(soon);
    multiply(height, 0, vectors, sum, dim, k, k_stride, 1, q, ROWS);
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
static void score_products(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand k)
{
    agenda soon;
    soon.count = 0;
    add_pending_bias(in, t, g, &soon);
    if (g.begin == t->block.segment[0].begin)
        add_pending_keys(in, t, &in->value, t->rows.values_at, in->value_dim, 0, t->block.count, g.end - g.begin,
                         g.end_vector - g.first_vector, &soon);
    segment_products(g, k, in->dim, t->scratch.q, t->scratch.s, t->scratch.high, t->scratch.visible, &soon);
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
    multiply(height, first, last + 1, sum, steps(g.end - g.begin), from, 1, stride, weights, ROWS)
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
            vf_store(at, shrink ? vf_fma(vf_load(at), vf_load(shrink + v * VL), sum[i][v]) : sum[i][v]);
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
static void output_block(const sdpa_input *in, const sdpa_task *t, operand values, const real *s, real *o,
                         const real *shrink)
{
    agenda soon;
    soon.count = 0;
    const int next = t->block.count + BLOCK_KEYS;
    add_pending_keys(in, t, &in->key, t->rows.keys_at, in->dim, t->block.count, next, in->value_dim, t->rows.vectors,
                     &soon);
    weighted_sums(t, values, in->value_dim, s, o, shrink, &soon);
}

static inline ALWAYS_INLINE int all_finite(const int vectors, const real *o, int64_t width)
{
    vf poison[2 * SDPA_MAX_VECTORS]; /* one chain would wait for each fma */
    UNROLL_FOR (int i = 0; i < 2 * vectors; ++i) poison[i] = vf_set1(0);
    for (int64_t e = 0; e < width; e += 2)
        UNROLL_FOR (int i = 0; i < 2 * vectors; ++i) {
            const int64_t feature = e + i / vectors < width ? e + i / vectors : e;
            poison[i] = vf_fma(vf_load(o + feature * ROWS + i % vectors * VL), vf_set1(0), poison[i]);
        }
    UNROLL_FOR (int i = 1; i < 2 * vectors; ++i) poison[0] = vf_add(poison[0], poison[i]);
    return is_zero(poison[0]);
}

/* No NaN and no inf in o: x * 0 is 0 exactly then. */
static int finite_sums(const sdpa_task *t, int64_t width)
{
    int result = 1;
#define ALL_FINITE(vectors) result = all_finite(vectors, t->scratch.o, width)
    if (t->scratch.started) WITH_VECTORS(t->rows.vectors, ALL_FINITE);
#undef ALL_FINITE
    return result;
}

/* The vectors of o, one after the other: where they lie, and what belongs to their rows. */
static inline int64_t output_vectors(const sdpa_input *in, const sdpa_task *t)
{
    return in->value_dim * t->rows.vectors;
}
static inline ptrdiff_t output_offset(const sdpa_input *in, const sdpa_task *t, int64_t i)
{
    (void)in;
    return i / t->rows.vectors * ROWS + i % t->rows.vectors * VL;
}
static inline vf of_rows(const sdpa_input *in, const sdpa_task *t, int64_t i, const real *per_row)
{
    (void)in;
    return vf_load(per_row + i % t->rows.vectors * VL);
}
static inline void add_to_rows(const sdpa_input *in, const sdpa_task *t, int64_t i, vf x, real *per_row)
{
    (void)in;
    real *to = per_row + i % t->rows.vectors * VL;
    vf_store(to, vf_add(vf_load(to), x));
}

/* out = o * shrink. */
static void store_output(const sdpa_input *in, const sdpa_task *t)
{
#if PAIRS
    if (store_pairs(&in->out, t, in->value_dim)) return;
#endif
    store_transposed(&in->out, &t->rows, t->rows.out, t->scratch.o, 0, in->value_dim, t->scratch.shrink);
}

#endif
