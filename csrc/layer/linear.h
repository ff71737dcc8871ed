/* The projections of a layer: y[row][out] = sum over k of x[row][k] * w[out][k], + bias[out].
 *
 * With the features of y in lanes, and w transposed once for all calls, this is the product of scores (product.h):
 * a row of x takes the place of a key, and a panel of w that of the queries.
 *
 *     x[row][k]                        as it lies, or a copy where it must be converted
 *     w[panel][k in steps][ROWS]       ROWS features of y to a panel, the last one filled up with 0
 *     s[row][ROWS]                     sums of one panel, then written with the bias added
 *
 * Parts of LONGEST_SUM steps of a panel (32 KB) stay in the first-level cache while the rows of a block go by. */
#ifndef SDPA_LAYER_LINEAR_H
#define SDPA_LAYER_LINEAR_H

#include "forward/product.h"

static int64_t count_panels(int64_t outs) { return (outs + ROWS - 1) / ROWS; }

/* w[out][k] as panels. */
static void pack_weights(const sdpa_array *weight, int64_t outs, int64_t ins, void *packed)
{
    char *to = packed;
    memset(packed, 0, (size_t)(count_panels(outs) * steps(ins) * ROWS) * sizeof(real));
    for (int64_t panel = 0; panel < count_panels(outs); ++panel, to += steps(ins) * ROWS * sizeof(real))
        for (int64_t lane = 0; lane < ROWS && panel * ROWS + lane < outs; ++lane) {
            const char *from = weight->data + (panel * ROWS + lane) * weight->row;
            for (int64_t k = 0; k < ins; ++k)
                pack_one(from + k * weight->column, weight->dtype, (real *)to + k / STEP * ROWS + lane, k % STEP);
        }
}

/* out[row][first ...] = s[row][:] + bias */
static inline ALWAYS_INLINE void write_linear(const sdpa_linear *l, int64_t row, int rows, int64_t first, const real *s,
                                              const int dtype)
{
    const int64_t left = l->outs - first;
    const int adjacent = l->out.column == l->out.itemsize;
    char *at = l->out.data + row * l->out.row + first * l->out.column;
    for (int i = 0; i < rows; ++i, at += l->out.row, s += ROWS)
        for (int v = 0; v * VL < left && v < VECTORS; ++v) {
            vf y = vf_load(s + v * VL);
            char *const to = at + v * VL * l->out.column;
            if (l->bias) y = vf_add(y, vf_load((const real *)l->bias + first + v * VL));
            if (adjacent && (v + 1) * VL <= left)
                write_adjacent(to, dtype, y);
            else
                write_chunk(to, l->out.column, left - v * VL < VL ? (int)(left - v * VL) : VL, &l->out, y);
        }
}

/* One panel for one block of rows.  *copied: the first row of the block whose copy the scratch holds, if any. */
static void linear(const sdpa_linear *l, int64_t row, int rows, int64_t panel, void *scratch, int64_t *copied)
{
    real *s = scratch, high[ROWS] = {0};
    const int64_t first = panel * ROWS, left = l->outs - first;
    const sdpa_segment all = {0, rows, 0, left < ROWS ? (int)((left + VL - 1) / VL) : VECTORS};
    const operand x = read_linear(l, row, rows, s + l->block_rows * ROWS, *copied == row);
    *copied = row;
    segment_products(all, x, l->ins, (const real *)l->weights + panel * steps(l->ins) * ROWS, s, high, NULL, NULL);
    if (l->out.dtype == SDPA_FLOAT16)
        write_linear(l, row, rows, first, s, SDPA_FLOAT16);
    else if (l->out.dtype == SDPA_BFLOAT16)
        write_linear(l, row, rows, first, s, SDPA_BFLOAT16);
    else
        write_linear(l, row, rows, first, s, REAL_DTYPE);
}

#endif
