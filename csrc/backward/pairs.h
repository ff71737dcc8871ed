/* What the products of backward.h multiply, in pairs of bfloat16: the same interface as singles.h.
 *
 *     dP       V as it lies: pairs of features
 *     dQ       slopes and rows of K in pairs of keys: key_slope, key_pairs
 *     dV, dK   weights and slopes in pairs of rows: those of a key lie side by side, so two of them are the 32 bits to
 *              broadcast; grad_out and Q with rows interleaved by twos
 *
 * Numbers and products below 2**-126 count as 0, as `vdpbf16ps` has it; where scores come from them they are as in the
 * forward pass. */
#ifndef SDPA_BACKWARD_PAIRS_H
#define SDPA_BACKWARD_PAIRS_H

#include "forward/care.h"

static operand read_values_across(const sdpa_input *in, sdpa_task *t)
{
    return read_rows_across(in, t, &in->value, t->rows.values_at, in->value_dim, &t->scratch.copied[1],
                            t->scratch.value_copy);
}

static inline ptrdiff_t task_row_stride(int64_t width) { return interleaved_width(width); }

/* NaN and inf become 0. */
static void drop_not_finite(char *halves_at, int64_t count)
{
    for (int64_t i = 0; i < count; ++i)
        if ((read_bits(halves_at + 2 * i) & 0x7fff) >= INFINITE) write_bits(halves_at + 2 * i, 0);
}

static operand read_keys_along(const sdpa_input *in, const sdpa_backward_task *b)
{
    const sdpa_task *t = &b->task;
    real *copy = b->scratch.key_pairs;
    if (must_copy(t, &t->scratch.copied[2])) {
        const seen_numbers seen = copy_rows_by_twos(in, t, &in->key, t->rows.keys_at, in->dim, copy);
        if (halves_any_from(seen.size, 2 * INFINITE)) drop_not_finite((char *)copy, 2 * copied_pairs(in, in->dim));
    }
    return (operand){(const char *)copy, copied_stride(in, in->dim) * 4, SDPA_BFLOAT16};
}
static int needs_care(const sdpa_input *in, const sdpa_task *t)
{
    (void)in, (void)t;
    return 0;
}

/* The scale would round what is copied of Q: it comes last. */
static inline double key_factor(const sdpa_input *in) { return in->scale; }
static inline double query_factor(const sdpa_input *in)
{
    (void)in;
    return 1;
}

/* to[feature] = the pair of two rows, 0 for NaN and inf; `second` NULL is 0.  Returns whether there was any. */
static int interleave_rows(const char *first, const char *second, const sdpa_array *array, int64_t width, real *to)
{
    halves size = halves_zero();
    for (int64_t i = 0; i < width; i += 2 * VL) {
        const ptrdiff_t at = i * array->column;
        const halves low = read_halves(first + at, array->column, width - i);
        const halves high = second ? read_halves(second + at, array->column, width - i) : halves_zero();
        size = halves_max_distance(halves_max_distance(size, low, 0), high, 0);
        halves_interleave(to + i, low, high);
    }
    if (!halves_any_from(size, 2 * INFINITE)) return 0;
    drop_not_finite((char *)to, 2 * width);
    return 1;
}

static uint64_t copy_task_rows(const sdpa_rows *of, const sdpa_array *array, char *const *row_at, int64_t width,
                               double factor, real *rows)
{
    (void)factor;
    uint64_t odd = 0;
    for (int row = 0; row < of->count; row += 2, rows += interleaved_width(width)) {
        const char *second = row + 1 < of->count ? row_at[row + 1] : NULL;
        if (interleave_rows(row_at[row], second, array, width, rows)) odd |= (uint64_t)3 << row;
    }
    for (int row = (of->count + 1) / 2 * 2; TILES && row % (2 * VL); row += 2, rows += interleaved_width(width))
        memset(rows, 0, (size_t)interleaved_width(width) * sizeof(real)); /* of a whole step of the sum */
    return odd;
}

/* Weights and slopes, two to the room of one: in the first half of what held scores and dP.  Vectors come in their
 * order, so what is overwritten was read. */
static inline ALWAYS_INLINE void keep_slopes(const sdpa_backward_task *b, int key, int v, const vf *weight,
                                             const vf *slope, const int count)
{
    UNROLL_FOR (int i = 0; i < count; ++i) {
        const ptrdiff_t row = (ptrdiff_t)(key + i) * ROWS * 4 + v * VL * 2;
        halves_store_half((char *)b->task.scratch.s + row, weight[i]);
        halves_store_half((char *)b->scratch.slope + row, slope[i]);
    }
    UNROLL_FOR (int i = 0; i < count; i += 2)
        vf_store((real *)b->scratch.key_slope + (key + i) / 2 * ROWS + v * VL, vf_round_pairs(slope[i], slope[i + 1]));
}
static inline real kept_at(const void *kept, int key, int row)
{
    return float_of_bfloat16(read_bits((const char *)kept + (ptrdiff_t)key * ROWS * 4 + 2 * row));
}
static inline real row_weight_at(const sdpa_task *t, int key, int row) { return kept_at(t->scratch.s, key, row); }
static inline real row_slope_at(const sdpa_backward_task *b, int key, int row)
{
    return kept_at(b->scratch.slope, key, row);
}

#endif
