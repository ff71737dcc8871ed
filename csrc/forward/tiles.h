/* Both products of product.h by matrices of pairs (amx.h): 32 x 32 sums at once.
 *
 *     scores   K as it lies, or a copy filled up to whole tiles       q[D/2][rows]
 *     output   values transposed: copy[E][keys/2]                     s[keys/2][rows], 0 where a tile has more keys
 *                                                                     than its rows see
 *
 * A sum goes on in its tile, or in memory, from the first feature (key) to the last: each instruction sums 32 of them
 * on their own and adds that, so errors grow with a 32nd of their number. */
#ifndef SDPA_FORWARD_TILES_H
#define SDPA_FORWARD_TILES_H

#include "forward/agenda.h"
#include "forward/pairs.h"

#define NOTHING_SOON ((lines_soon){NULL, 0})
enum { ROW_BYTES = ROWS * SDPA_REAL_BYTES };

/* c (+)= a b for any number of rows of a, and vectors of b, up to two tiles of each. */
static void multiply_some(int64_t rows, int64_t vectors, int64_t steps, matrix a, matrix b, real *c, ptrdiff_t c_row,
                          int first, lines_soon soon)
{
    if (rows > SIDE && vectors > 1)
        multiply_tiles(2, 2, steps, a, b, c, c_row, first, soon);
    else if (rows > SIDE)
        multiply_tiles(2, 1, steps, a, b, c, c_row, first, soon);
    else if (vectors > 1)
        multiply_tiles(1, 2, steps, a, b, c, c_row, first, soon);
    else
        multiply_tiles(1, 1, steps, a, b, c, c_row, first, soon);
}

/* high[rows] is raised to the largest s of a segment, for the rows of vector v. */
static void raise_high(sdpa_segment g, int v, const real *s, real *high)
{
    vf highest[4] = {vf_load(high + v * VL), vf_set1(-INFINITY), vf_set1(-INFINITY), vf_set1(-INFINITY)};
    for (int key = g.begin; key < g.end; key += 4)
        UNROLL_FOR (int i = 0; i < 4; ++i) {
            const int at = key + i < g.end ? key + i : key;
            highest[i] = vf_max(vf_load(s + at * ROWS + v * VL), highest[i]);
        }
    vf_store(high + v * VL, vf_max(vf_max(highest[0], highest[1]), vf_max(highest[2], highest[3])));
}

/* s[key][rows] = K[key][:] . q[:][rows] in a segment, for rows of `width` features; `s` is that of the block.  `high` is
 * raised later, where nothing shapes the scores. */
static void segment_products(sdpa_segment g, operand k, int64_t width, const real *q, real *s, real *high, real *spare,
                             agenda *soon)
{
    (void)spare, (void)high;
    use_tiles();
    for (int key = g.begin; key < g.end; key += 2 * SIDE)
        for (int v = g.first_vector; v < g.end_vector; v += 2) {
            const matrix a = {k.at + key * k.stride, k.stride, WHOLE_STEP * 2};
            const matrix b = {q + v * VL, ROW_BYTES, SIDE * ROW_BYTES};
            fetch_some(soon);
            multiply_some(g.end - key, g.end_vector - v, whole_vectors(steps(width)) / SIDE, a, b,
                          s + key * ROWS + v * VL, ROW_BYTES, 1, NOTHING_SOON);
        }
}

/* Keys that the rows of v, or of the vector beside it, see: in whole steps of the sum. */
static sdpa_segment seen_by_neighbours(const sdpa_task *t, int v)
{
    sdpa_segment seen = t->block.of_vector[v & ~1];
    if ((v | 1) < t->rows.vectors) {
        const sdpa_segment other = t->block.of_vector[v | 1];
        if (seen.begin >= seen.end) seen = other;
        if (other.begin < other.end && other.begin < seen.begin) seen.begin = other.begin;
        if (other.begin < other.end && other.end > seen.end) seen.end = other.end;
    }
    seen.begin = seen.begin / WHOLE_STEP * WHOLE_STEP;
    seen.end = (seen.end + WHOLE_STEP - 1) / WHOLE_STEP * WHOLE_STEP;
    return seen;
}

/* pairs[keys/2][rows] of vector v become 0 where a tile has them but the rows do not see them. */
static void fill_up_pairs(const sdpa_task *t, int v, real *pairs)
{
    const sdpa_segment own = t->block.of_vector[v], all = seen_by_neighbours(t, v);
    const int begin = own.begin < own.end ? own.begin : all.end, end = (own.end + 1) / 2 * 2;
    for (int key = all.begin; key < all.end; key += 2)
        if (key < begin || key >= end) vf_store(pairs + key / 2 * ROWS + v * VL, vf_set1(0));
}

/* to = to * shrink, in 2 SIDE features of two vectors at most.  Returns whether there is a denormal, which the products
 * would take for 0: `denormals` then has them, and 0 elsewhere. */
static int shrink_sums(int features, int vectors, real *to, const real *shrink, vf denormals[2 * SIDE][2])
{
    int any = 0;
    for (int v = 0; v < vectors; ++v)
        for (int e = 0; e < features; ++e) {
            const vf x = vf_mul(vf_load(to + e * ROWS + v * VL), vf_load(shrink + v * VL));
            vf_store(to + e * ROWS + v * VL, x);
            any |= vf_any_denormal(x, x);
        }
    for (int e = 0; any && e < features; ++e)
        for (int v = 0; v < vectors; ++v) denormals[e][v] = vf_denormals(vf_load(to + e * ROWS + v * VL));
    return any;
}

static void add_denormals(int features, int vectors, real *to, vf denormals[2 * SIDE][2])
{
    for (int e = 0; e < features; ++e)
        for (int v = 0; v < vectors; ++v) {
            const vf x = vf_load(to + e * ROWS + v * VL), more = denormals[e][v];
            vf_store(to + e * ROWS + v * VL, vf_select(vf_eq(more, vf_set1(0)), x, vf_add(x, more))); /* -0 stays */
        }
}

/* o[feature][rows] = o * shrink + values^T s, for values of `width` features; `shrink` NULL: o is taken as 0. */
static void weighted_sums(const sdpa_task *t, operand values, int64_t width, const real *s, real *o, const real *shrink,
                          agenda *soon)
{
    vf denormals[2 * SIDE][2];
    use_tiles();
    for (int v = 0; v < t->rows.vectors; v += 2) {
        const int vectors = t->rows.vectors - v < 2 ? 1 : 2;
        const sdpa_segment keys = seen_by_neighbours(t, v);
        const matrix b = {s + keys.begin / 2 * ROWS + v * VL, ROW_BYTES, SIDE * ROW_BYTES};
        for (int64_t e = 0; e < width; e += 2 * SIDE) {
            const int features = width - e < 2 * SIDE ? (int)(width - e) : 2 * SIDE;
            const matrix a = {values.at + e * values.stride + keys.begin * 2, values.stride, WHOLE_STEP * 2};
            real *const sums = o + e * ROWS + v * VL;
            fetch_some(soon);
            const int odd = shrink ? shrink_sums(features, vectors, sums, shrink + v * VL, denormals) : 0;
            multiply_some(features, vectors, (keys.end - keys.begin) / WHOLE_STEP, a, b, sums, ROW_BYTES, !shrink,
                          NOTHING_SOON);
            if (odd) add_denormals(features, vectors, sums, denormals);
        }
    }
}

#endif
