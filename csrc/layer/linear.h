/* The projections of a layer: y[row][out] = act(sum over k of x[row][k] * w[out][k] + bias[out]) + residual[row][out].
 *
 * With the features of y in lanes, and w transposed once for all calls, this is the product of scores (product.h):
 * a row of x takes the place of a key, and a panel of w that of the queries.
 *
 *     x[row][k]                        as it lies, or a copy where it must be converted
 *     w[panel][k in steps][ROWS]       ROWS features of y to a panel, the last one filled up with 0;
 *                                      with gates, ROWS / 2 gates and then what they weigh
 *     s[row][ROWS]                     sums of one panel; finished there, then written
 *
 * Parts of LONGEST_SUM steps of a panel (32 KB) stay in the first-level cache while the rows of a block go by. */
#ifndef SDPA_LAYER_LINEAR_H
#define SDPA_LAYER_LINEAR_H

#include "forward/product.h"
#include "layer/activations.h"

/* Features of the result in a panel. */
static int panel_width(const sdpa_linear *l) { return l->gated ? ROWS / 2 : ROWS; }

/* Rows of w as lanes of a panel, from one of them on; the others stay as they are. */
static void pack_panel(const sdpa_array *weight, int64_t outs, int64_t ins, int lane, void *panel)
{
    for (int64_t out = 0; out < outs; ++out) {
        const char *from = weight->data + out * weight->row;
        for (int64_t k = 0; k < ins; ++k)
            pack_one(from + k * weight->column, weight->dtype, (real *)panel + k / STEP * ROWS + lane + out, k % STEP);
    }
}

/* s = act(s + bias), or in the last vectors, act(gate + bias) * (s + bias) of those before. */
static inline ALWAYS_INLINE void activate_sums(int rows, const int gated, const int activation, const real *bias,
                                               real *s)
{
    const int count = gated ? VECTORS / 2 : VECTORS;
    for (int row = 0; row < rows; ++row, s += ROWS) {
        vf x[VECTORS];
        UNROLL_FOR (int v = 0; v < VECTORS; ++v) {
            x[v] = vf_load(s + v * VL);
            if (bias) x[v] = vf_add(x[v], vf_load(bias + v * VL));
        }
        activate(x, count, activation);
        UNROLL_FOR (int v = 0; v < count; ++v) vf_store(s + v * VL, gated ? vf_mul(x[v], x[v + VECTORS / 2]) : x[v]);
    }
}

static void finish_sums(const sdpa_linear *l, int rows, const real *bias, real *s)
{
#define ACTIVATE(activation)                                                                                           \
    case activation:                                                                                                   \
        if (l->gated)                                                                                                  \
            activate_sums(rows, 1, activation, bias, s);                                                               \
        else                                                                                                           \
            activate_sums(rows, 0, activation, bias, s);                                                               \
        break
    switch (l->activation) {
        ACTIVATE(SDPA_IDENTITY);
        ACTIVATE(SDPA_RELU);
        ACTIVATE(SDPA_GELU);
        ACTIVATE(SDPA_GELU_TANH);
        ACTIVATE(SDPA_SILU);
    }
#undef ACTIVATE
}

/* out[row][first ...] = s[row][:] + bias + residual[row][first ...] */
static inline ALWAYS_INLINE void write_linear(const sdpa_linear *l, int64_t row, int rows, int64_t first,
                                              const real *bias, const real *s, const int dtype)
{
    const sdpa_array *more = &l->residual;
    const int64_t left = l->outs - first;
    const int adjacent = l->out.column == l->out.itemsize, width = panel_width(l);
    char *at = l->out.data + row * l->out.row + first * l->out.column;
    const char *more_at = more->data ? more->data + row * more->row + first * more->column : NULL;
    for (int i = 0; i < rows; ++i, at += l->out.row, s += ROWS) {
        for (int v = 0; v * VL < left && v * VL < width; ++v) {
            const int count = left - v * VL < VL ? (int)(left - v * VL) : VL;
            vf y = vf_load(s + v * VL);
            char *const to = at + v * VL * l->out.column;
            if (bias) y = vf_add(y, vf_load(bias + v * VL));
            if (more_at) y = vf_add(y, read_chunk(more_at + v * VL * more->column, more->column, count, more));
            if (adjacent && count == VL)
                write_adjacent(to, dtype, y);
            else
                write_chunk(to, l->out.column, count, &l->out, y);
        }
        if (more_at) more_at += more->row;
    }
}

/* One panel for one block of rows.  *copied: the first row of the block whose copy the scratch holds, if any. */
static void linear(const sdpa_linear *l, int64_t row, int rows, int64_t panel, void *scratch, int64_t *copied)
{
    real *s = scratch, high[ROWS] = {0};
    const int64_t first = panel * panel_width(l), left = l->gated ? ROWS : l->outs - first;
    const sdpa_segment all = {0, rows, 0, left < ROWS ? (int)((left + VL - 1) / VL) : VECTORS};
    const operand x = read_linear(l, row, rows, s + l->block_rows * ROWS, *copied == row);
    const real *bias = l->bias ? (const real *)l->bias + panel * ROWS : NULL;
    *copied = row;
    segment_products(all, x, l->ins, (const real *)l->weights + panel * steps(l->ins) * ROWS, s, high, NULL, NULL);
    if (l->activation || l->gated) {
        finish_sums(l, rows, bias, s);
        bias = NULL;
    }
    if (l->out.dtype == SDPA_FLOAT16)
        write_linear(l, row, rows, first, bias, s, SDPA_FLOAT16);
    else if (l->out.dtype == SDPA_BFLOAT16)
        write_linear(l, row, rows, first, bias, s, SDPA_BFLOAT16);
    else
        write_linear(l, row, rows, first, bias, s, REAL_DTYPE);
}

#endif
