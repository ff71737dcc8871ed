/* What the products of backward.h multiply, number by number: the same interface as pairs.h. */
#ifndef SDPA_BACKWARD_SINGLES_H
#define SDPA_BACKWARD_SINGLES_H

#include "forward/care.h"

/* V and K along features, and K along keys. */
static operand read_values_across(const sdpa_input *in, sdpa_task *t) { return read_values(in, t); }

static operand read_keys_along(const sdpa_input *in, sdpa_backward_task *b)
{
    sdpa_task *t = &b->task;
    if (!b->scratch.careful) return read_keys(in, t);
    real *copy = t->scratch.key_copy;
    copy_block(in, t, &in->key, t->rows.keys_at, &in->key_scale, t->rows.key_scales_at, in->dim, copy);
    t->scratch.copied[0].rows = 0; /* of no use to others */
    for (int64_t i = 0; i < t->block.count * whole_vectors(in->dim); i += VL) {
        const vf x = vf_load(copy + i);
        vf_store(copy + i, vf_select(is_finite(x), x, vf_set1(0)));
    }
    return copied_rows(copy, in->dim);
}

/* A hidden key has slope 0, but 0 * NaN is NaN. */
static int needs_care(const sdpa_input *in, const sdpa_task *t) { return !finite_sums(t, in->dim); }

static inline ptrdiff_t task_row_stride(int64_t width) { return whole_vectors(width); }

/* The scale is multiplied into what is copied of Q, and not into the gradient of K. */
static inline double query_factor(const sdpa_input *in) { return in->scale; }
static inline double key_factor(const sdpa_input *in)
{
    (void)in;
    return 1;
}

/* rows[row][features] of the task, times `factor`, 0 for NaN and inf.  Returns a bit per row that had any. */
static uint64_t copy_task_rows(const sdpa_rows *of, const sdpa_array *array, char *const *row_at, int64_t width,
                               double factor, real *rows)
{
    const vf factors = vf_set1(narrowed(factor));
    uint64_t odd = 0;
    vf poison = vf_set1(0);
    for (int row = 0; row < of->count; ++row) {
        real *to = rows + row * whole_vectors(width);
        copy_row(row_at[row], array, width, to);
        for (int64_t i = 0; i < width; i += VL) {
            const vf x = vf_load(to + i);
            vf_store(to + i, vf_mul(x, factors));
            poison = vf_fma(x, vf_set1(0), poison);
        }
    }
    if (is_zero(poison)) return 0;
    for (int row = 0; row < of->count; ++row, rows += whole_vectors(width)) {
        poison = vf_set1(0);
        for (int64_t i = 0; i < width; i += VL) {
            const vf x = vf_load(rows + i);
            poison = vf_fma(x, vf_set1(0), poison);
            vf_store(rows + i, vf_select(is_finite(x), x, vf_set1(0)));
        }
        if (!is_zero(poison)) odd |= (uint64_t)1 << row;
    }
    return odd;
}

/* They take the place of the scores and of dP. */
static inline ALWAYS_INLINE void keep_slopes(const sdpa_backward_task *b, int key, int v, const vf *weight,
                                             const vf *slope, const int count)
{
    UNROLL_FOR (int i = 0; i < count; ++i) {
        vf_store(scores_at(&b->task, key + i, v), weight[i]);
        vf_store((real *)b->scratch.slope + (ptrdiff_t)(key + i) * ROWS + v * VL, slope[i]);
    }
}
static inline real row_weight_at(const sdpa_task *t, int key, int row) { return scores_at(t, key, 0)[row]; }
static inline real row_slope_at(const sdpa_backward_task *b, int key, int row)
{
    return ((real *)b->scratch.slope)[(ptrdiff_t)key * ROWS + row];
}

#endif
