/* Gradients of keys: what a task adds to the sums of a block.
 *
 *     sums[key][features] += sum over rows of weights[key][row] * rows[row][features] */
#ifndef SDPA_BACKWARD_GATHER_H
#define SDPA_BACKWARD_GATHER_H

#include "variant.h"
#if PAIRS
#include "backward/pairs.h"
#else
#include "backward/singles.h"
#endif

#if TILES
/* Weights and slopes, which lie as halves in the first half of a row of scores, become 0 where a tile has them but the
 * rows of vector v do not see the key. */
static void fill_up_slopes(const sdpa_backward_task *b)
{
    const sdpa_task *t = &b->task;
    for (int v = 0; v < (t->rows.vectors + 1) / 2 * 2; ++v) {
        const sdpa_segment none = {0, 0, v, v}, own = v < t->rows.vectors ? t->block.of_vector[v] : none;
        const sdpa_segment all = seen_by_neighbours(t, v);
        for (int key = all.begin; key < all.end; ++key) {
            if (own.begin <= key && key < own.end) continue;
            memset((char *)t->scratch.s + key * ROW_BYTES + v * VL * 2, 0, VL * 2);
            memset((char *)b->scratch.slope + key * ROW_BYTES + v * VL * 2, 0, VL * 2);
        }
        if (v < t->rows.vectors) fill_up_pairs(t, v, b->scratch.key_slope);
    }
}

/* For up to 2 SIDE keys and features.  Sums that do not fill their tiles are computed in a copy. */
static void gather_tile(int keys, int vectors, int64_t count, matrix weights, matrix rows, int first, real *sums,
                        ptrdiff_t stride)
{
    real copy[2 * SIDE * 2 * SIDE];
    const size_t width = (size_t)(vectors > 1 ? 2 * SIDE : SIDE) * sizeof(real);
    if (keys == SIDE || keys >= 2 * SIDE) {
        multiply_some(keys, vectors, count, weights, rows, sums, stride * (ptrdiff_t)sizeof(real), first, NOTHING_SOON);
        return;
    }
    for (int key = 0; key < keys; ++key) memcpy(copy + key * 2 * SIDE, sums + key * stride, width);
    multiply_some(keys, vectors, count, weights, rows, copy, 2 * SIDE * (ptrdiff_t)sizeof(real), first, NOTHING_SOON);
    for (int key = 0; key < keys; ++key) memcpy(sums + key * stride, copy + key * 2 * SIDE, width);
}

/* For the keys of a segment and the rows that see them; `first`: instead of what the sums hold. */
static void gather(const sdpa_task *t, sdpa_segment g, const void *weights, const void *rows, int first,
                   const sdpa_sums *to)
{
    const int begin = g.first_vector / 2, end = (g.end_vector + 1) / 2; /* in whole steps of the sum */
    const ptrdiff_t row = interleaved_width(to->width) * (ptrdiff_t)sizeof(real);
    use_tiles();
    for (int key = g.begin; key < g.end; key += 2 * SIDE)
        for (int64_t e = 0; e < to->width; e += 2 * SIDE) {
            const matrix a = {(const char *)weights + key * ROW_BYTES + begin * WHOLE_STEP * 2, ROW_BYTES,
                              WHOLE_STEP * 2};
            const matrix b = {(const char *)rows + begin * SIDE * row + e * (ptrdiff_t)sizeof(real), row, SIDE * row};
            real *sums = (real *)to->at + (t->block.first - to->keys.begin + key) * to->stride + e;
            gather_tile(g.end - key, to->width - e > SIDE ? 2 : 1, end - begin, a, b, first, sums, to->stride);
        }
}
#else
/* The sum over the rows of a task is formed on its own: errors grow with the number of tasks, not of rows. */
static inline ALWAYS_INLINE void gather_tile(const int height, const int vectors, int64_t count, const real *weights,
                                             const real *rows, ptrdiff_t stride, int first, real *sums,
                                             ptrdiff_t sums_stride)
{
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    multiply(height, 0, vectors, sum, count, weights, ROWS, 1, 0, rows, stride);
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) {
            real *at = sums + i * sums_stride + v * VL;
            vf_store(at, vf_add(first ? vf_set1(0) : vf_load(at), sum[i][v])); /* no -0, whichever task is first */
        }
}

static inline ALWAYS_INLINE void gather_tiles(const int vectors, int64_t keys, int64_t count, const real *weights,
                                              const real *rows, ptrdiff_t stride, int first, real *sums,
                                              ptrdiff_t sums_stride)
{
#define GATHER_TILE(height, key)                                                                                       \
    gather_tile(height, vectors, count, weights + (key) * ROWS, rows, stride, first, sums + (key) * sums_stride,       \
                sums_stride)
    FOR_TILES(vectors, keys, GATHER_TILE);
#undef GATHER_TILE
}

/* For the keys of a segment and the rows that see them; `first`: instead of what the sums hold. */
static void gather(const sdpa_task *t, sdpa_segment g, const void *weights, const void *rows, int first,
                   const sdpa_sums *to)
{
    const int64_t begin = g.first_vector * VL,
                  end = g.end_vector * VL < t->rows.count ? g.end_vector * VL : t->rows.count;
    const ptrdiff_t stride = task_row_stride(to->width), sums_stride = to->stride;
    const real *from = (const real *)rows + begin / STEP * stride;
    const real *weight = (const real *)weights + g.begin * ROWS + begin / STEP;
    real *sums = (real *)to->at + (t->block.first - to->keys.begin + g.begin) * sums_stride;
    for (int64_t e = 0, vectors; e < to->width; e += vectors * VL) {
        vectors = (to->width - e + VL - 1) / VL;
        if (vectors > VECTORS) vectors = VECTORS;
#define GATHER_TILES(vectors)                                                                                          \
    gather_tiles(vectors, g.end - g.begin, steps(end - begin), weight, from + e, stride, first, sums + e, sums_stride)
        WITH_VECTORS(vectors, GATHER_TILES);
#undef GATHER_TILES
    }
}
#endif

#endif
