/* The engine for many rows, with rows in lanes: the two products of attention, and nearly all of its time.  Both are
 *
 *     C[i][rows] = sum over k of A(i, k) * B[k][rows]
 *
 * scores: i is a key, k a feature, A = K as it lies in memory, B = the transposed queries;
 * output: i is a feature of a value, k a key, A = V as it lies in memory, B = the weights.
 *
 * The sum of each element runs over k in the same order, however rows and keys are cut into tiles: the bits of a row do
 * not depend on it.  vectors.h and tiles.h are two ways to compute both.
 *
 * k goes in `steps` of a number (singles.h) or of a pair (pairs.h); either is one `real`, and one multiply-add. */
#ifndef SDPA_FORWARD_PRODUCT_H
#define SDPA_FORWARD_PRODUCT_H

#include "simd/vmath.h"
#include "memory/pages.h"
#include "memory/prefetch.h"
#include "memory/write.h"
#if TILES
#include "forward/tiles.h"
#else
#include "forward/vectors.h"
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
    if (TILES) memset(columns + dim * ROWS, 0, (size_t)(whole_vectors(dim) - dim) * ROWS * sizeof(real));
}

/* q[feature][rows] */
static void load_queries(const sdpa_input *in, sdpa_task *t)
{
    extremes found = no_extremes();
    load_columns(&t->rows, &in->query, t->rows.query, in->dim, t->scratch.q, &found);
    find_odd_rows(in, t, found);
}

/* ---- s[key][rows] = K[key][:] . q[:][rows], for the keys of one segment */

/* Whether no block follows for these rows: then what comes after them is asked for, where that comes from memory. */
static int ends_with_block(const sdpa_task *t)
{
    return t->rows.ahead && t->block.first + t->block.count >= t->rows.keys.end;
}

static void score_products(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand k)
{
    agenda soon;
    soon.count = 0;
    add_pending_bias(in, t, g, &soon);
    if (g.begin == t->block.segment[0].begin) {
        const int keys = g.end - g.begin, vectors = g.end_vector - g.first_vector, ends = ends_with_block(t);
        if (ends) {
            const sdpa_rows *rows = &t->rows;
            add_pending_next(in, t, &in->query, rows->next_query, rows->next_queries, in->dim, keys, vectors, &soon);
            add_pending_next(in, t, &in->key, rows->next_keys, in->kv_len, in->dim, keys, vectors, &soon);
            add_pending_results(in, t, keys, vectors, &soon);
        }
        if (!ends || !t->rows.next_values)
            add_pending_keys(in, t, &in->value, t->rows.values_at, in->value_dim, 0, t->block.count, keys, vectors,
                             &soon);
    }
    segment_products(g, k, in->dim, t->scratch.q, t->scratch.s, t->scratch.high, t->scratch.visible, &soon);
}

/* ---- o[feature][rows] = o[feature][rows] * shrink[rows] + sum over keys of V[key][feature] * s[key][rows] */

static void output_block(const sdpa_input *in, const sdpa_task *t, operand values, const real *s, real *o,
                         const real *shrink)
{
    agenda soon;
    soon.count = 0;
    const int next = t->block.count + BLOCK_KEYS;
    add_pending_keys(in, t, &in->key, t->rows.keys_at, in->dim, t->block.count, next, in->value_dim, t->rows.vectors,
                     &soon);
    if (ends_with_block(t))
        add_pending_next(in, t, &in->value, t->rows.next_values, in->kv_len, in->value_dim, in->value_dim,
                         t->rows.vectors, &soon);
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

/* Of a row of o, as its room is measured. */
static inline int64_t output_width(int64_t value_dim) { return whole_vectors(value_dim); }

/* The vectors of o: a line of them for each feature; where they lie, and what belongs to their rows. */
static inline int64_t output_lines(const sdpa_input *in, const sdpa_task *t)
{
    (void)t;
    return in->value_dim;
}
static inline int output_vectors(const sdpa_input *in, const sdpa_task *t)
{
    (void)in;
    return t->rows.vectors;
}
static inline ptrdiff_t output_offset(const sdpa_input *in, int64_t line, int v)
{
    (void)in;
    return line * ROWS + v * VL;
}
static inline vf of_rows(const real *per_row, int64_t line, int v)
{
    (void)line;
    return vf_load(per_row + v * VL);
}
static inline void add_to_rows(vf x, real *per_row, int64_t line, int v)
{
    (void)line;
    vf_store(per_row + v * VL, vf_add(vf_load(per_row + v * VL), x));
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
