/* What the products multiply, number by number: the same interface as pairs.h. */
#ifndef SDPA_FORWARD_SINGLES_H
#define SDPA_FORWARD_SINGLES_H

#include "memory/pages.h"
#include "memory/read.h"
#include "forward/scratch.h"

static inline int64_t steps(int64_t count) { return count; }
static inline vf vf_product(vf a, vf b, vf c) { return vf_fma(a, b, c); }

/* Whether the products can read K or V where it lies.  The engine for few rows widens what it loads, and finds rows in
 * pages. */
static inline int in_place(const sdpa_input *in, const sdpa_array *array, const char *at, int64_t width)
{
    if (!is_adjacent(array, at)) return 0;
    return SDPA_FEW_ROWS ? width % VL == 0 : array->dtype == REAL_DTYPE && !in->pages;
}

static int copies(const sdpa_input *in)
{
    return !in_place(in, &in->key, in->key.data, in->dim) ||
           (in->value.data && !in_place(in, &in->value, in->value.data, in->value_dim));
}

/* One row as `real`, padded with 0 to whole vectors. */
static inline ALWAYS_INLINE void widen_row(const char *at, const sdpa_array *array, int64_t width, real *copy,
                                           const int dtype)
{
    int64_t i = 0;
    for (; i + VL <= width; i += VL) vf_store(copy + i, read_adjacent(at + i * size_of(dtype), dtype));
    if (i < width) vf_store(copy + i, read_chunk(at + i * size_of(dtype), size_of(dtype), (int)(width - i), array));
}
static void copy_row(const char *at, const sdpa_array *array, int64_t width, real *copy)
{
    const int adjacent = array->column == array->itemsize;
    if (adjacent && array->dtype == SDPA_FLOAT16)
        widen_row(at, array, width, copy, SDPA_FLOAT16);
    else if (adjacent && array->dtype == SDPA_BFLOAT16)
        widen_row(at, array, width, copy, SDPA_BFLOAT16);
    else if (adjacent && array->dtype == REAL_DTYPE)
        widen_row(at, array, width, copy, REAL_DTYPE);
    else
        read_row(at, array, width, copy);
}

/* Where int8 is stored: the factor of number d is scale[d >> group_shift]. */
static void multiply_row(const sdpa_input *in, const sdpa_array *scale, const char *scales, int64_t width, real *row)
{
    for (int64_t d = 0; d < width; ++d)
        row[d] *= read_one(scales + (d >> in->group_shift) * scale->column, SDPA_FLOAT32);
}

/* The rows of the block as `real` rows. */
static void copy_block(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *rows_at,
                       const sdpa_array *scale, const char *scales_at, int64_t width, real *copy)
{
    for (int key = 0; key < t->block.count;) {
        int end = t->block.count;
        const char *at = row_address(in, array, rows_at, t, key, &end);
        for (; key < end; ++key, at += array->row, copy += whole_vectors(width)) {
            copy_row(at, array, width, copy);
            int alone = key + 1;
            if (scale->data) multiply_row(in, scale, row_address(in, scale, scales_at, t, key, &alone), width, copy);
        }
    }
}

static inline operand copied_rows(const real *copy, int64_t width)
{
    return (operand){(const char *)copy, whole_vectors(width) * (ptrdiff_t)sizeof(real), REAL_DTYPE};
}

/* The rows of the block where they lie: in pages, unless those and what comes ahead follow each other in memory. */
static inline operand rows_in_place(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array,
                                    const char *rows_at)
{
    enum { MORE = 32 };
    const int64_t left = t->rows.keys.end - t->block.first;
    const int wanted = left < t->block.count + MORE ? (int)left : t->block.count + MORE;
    int end = wanted;
    const char *at = row_address(in, array, rows_at, t, 0, &end);
    return (operand){end < wanted ? NULL : at, array->row, array->dtype};
}

static operand read_keys(const sdpa_input *in, const sdpa_task *t)
{
    int end = t->block.count;
    const char *at = key_address(in, t, 0, &end);
    if (in_place(in, &in->key, at, in->dim)) return rows_in_place(in, t, &in->key, t->rows.keys_at);
    if (must_copy(t, &t->scratch.copied[0]))
        copy_block(in, t, &in->key, t->rows.keys_at, &in->key_scale, t->rows.key_scales_at, in->dim,
                   t->scratch.key_copy);
    return copied_rows(t->scratch.key_copy, in->dim);
}

static operand copy_values(const sdpa_input *in, sdpa_task *t)
{
    if (must_copy(t, &t->scratch.copied[1]))
        copy_block(in, t, &in->value, t->rows.values_at, &in->value_scale, t->rows.value_scales_at, in->value_dim,
                   t->scratch.value_copy);
    return copied_rows(t->scratch.value_copy, in->value_dim);
}
static operand read_values(const sdpa_input *in, sdpa_task *t)
{
    int end = t->block.count;
    const char *at = value_address(in, t, 0, &end);
    if (!in_place(in, &in->value, at, in->value_dim)) return copy_values(in, t);
    return rows_in_place(in, t, &in->value, t->rows.values_at);
}

/* The weights of `count` keys from `key` on take the place of the scores.  Where they were rounded, `kept` would sum
 * them. */
static inline ALWAYS_INLINE vf keep_weights(const sdpa_task *t, int key, int v, const vf *weight, const int count,
                                            vf kept)
{
    UNROLL_FOR (int i = 0; i < count; ++i) vf_store(scores_at(t, key + i, v), weight[i]);
    return kept;
}

#if !SDPA_FEW_ROWS
/* The weights of the block, divided by the lift of their rows. */
static void lower_weights(const sdpa_task *t)
{
    for (int v = 0; v < t->rows.vectors; ++v) {
        const vf factor = vf_div(vf_set1(1), vf_load((real *)t->scratch.lift + v * VL));
        for (int key = t->block.of_vector[v].begin; key < t->block.of_vector[v].end; ++key)
            vf_store(scores_at(t, key, v), vf_mul(vf_load(scores_at(t, key, v)), factor));
    }
}

/* Rows of x for linear.h: in place, or converted. */
static operand read_linear(const sdpa_linear *l, int64_t row, int rows, real *copy, int copied)
{
    const char *at = l->x.data + row * l->x.row;
    if (l->x.dtype == REAL_DTYPE && is_adjacent(&l->x, at)) return (operand){at, l->x.row, REAL_DTYPE};
    for (int i = 0; i < rows && !copied; ++i)
        copy_row(at + i * l->x.row, &l->x, l->ins, copy + i * whole_vectors(l->ins));
    return copied_rows(copy, l->ins);
}
static inline void pack_one(const char *at, int dtype, real *to, int64_t half)
{
    (void)half;
    *to = read_one(at, dtype);
}

/* What is unusual about rows that were loaded: nothing, here. */
typedef int extremes;
static inline extremes no_extremes(void) { return 0; }
static inline void find_odd_rows(const sdpa_input *in, sdpa_task *t, extremes found) { (void)in, (void)t, (void)found; }

/* tile[column] lane row, for VL rows and `count` columns from `d` on. */
static inline ALWAYS_INLINE void read_columns(vf *tile, char *const *row_at, int64_t d, int count, int64_t width,
                                              const sdpa_array *array, extremes *found)
{
    (void)width, (void)found;
    read_transposed(tile, row_at, d * array->column, count, array);
}
#endif

#endif
