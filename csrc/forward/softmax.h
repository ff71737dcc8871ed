/* The online log-sum-exp, block by block, with rows in lanes: no horizontal operation anywhere.
 *
 * max, sum and o describe the keys seen so far: sum = sum of exp(s - max), o = sum of exp(s - max) * V.  A new block
 * raises max, and `shrink` = exp(old max - new max) brings what was summed before to the new one.  A block that a row
 * does not see leaves its max alone: shrink is exactly 1 and everything added exactly 0, so its bits stay.
 *
 * Where weights are rounded before they meet V (pairs.h), `kept` sums the rounded ones: it divides the result, so that
 * the weights of a row sum to 1 exactly as they are.  The lse comes from `sum`. */
#ifndef SDPA_FORWARD_SOFTMAX_H
#define SDPA_FORWARD_SOFTMAX_H

#include "forward/scores.h"

#include <math.h>

/* -inf (nothing seen yet) must not be subtracted from -inf: that would be NaN. */
static inline vf subtractable(vf max) { return vf_select(vf_eq(max, vf_set1(-(real)INFINITY)), vf_set1(0), max); }

/* Queries to q, and nothing seen yet.  Sums that overflowed are formed anew from the highest score on, by weights that
 * are divided by `lift`. */
static void begin_forward(const sdpa_input *in, sdpa_task *t)
{
    if (!t->scratch.has_queries) {
        load_queries(in, t);
#if ADDITIVE
        if (in->v) begin_additive(in, t);
#endif
        t->scratch.has_queries = 1; /* for other parts of the keys */
    }
    real *max = t->scratch.max, *sum = t->scratch.sum, *kept = t->scratch.kept, *lift = t->scratch.lift;
    const vf one = vf_set1(1), zero = vf_set1(0), lowest_max = vf_set1(-(real)INFINITY);
    for (int row = 0; row < t->rows.vectors * VL; row += VL) {
        if (!t->scratch.lifted) vf_store(lift + row, one);
        const vf first = t->scratch.lifted ? vf_load(max + row) : lowest_max;
        vf_store(max + row, vf_select(vf_eq(vf_load(lift + row), one), lowest_max, first));
        vf_store(sum + row, zero);
        vf_store(kept + row, zero);
    }
    t->scratch.started = 0;
    t->scratch.poisonous = 0;
}

#if !SDPA_FEW_ROWS
/* s = exp(s - from) for the keys of vector v; returns their sum.  (Few rows: see few.h.) */
static inline ALWAYS_INLINE vf exponentiate_scores(const sdpa_task *t, int v, vf from, vf factors, vf floor, vf *kept)
{
    const sdpa_segment keys = t->block.of_vector[v];
    vf sum = vf_set1(0);
    int key = keys.begin;
    for (; key + 4 <= keys.end; key += 4) {
        vf weight[4];
        UNROLL_FOR (int i = 0; i < 4; ++i) weight[i] = vf_sub(vf_load(scores_at(t, key + i, v)), from);
        exp_all(weight, 4, factors, floor);
        *kept = keep_weights(t, key, v, weight, 4, *kept);
        UNROLL_FOR (int i = 0; i < 4; ++i) sum = vf_add(sum, weight[i]);
    }
    for (; key < keys.end; key += STEP) { /* what is left; half a step is filled up with 0 */
        vf weight[STEP];
        UNROLL_FOR (int i = 0; i < STEP; ++i) {
            weight[i] = vf_set1(0);
            if (key + i < keys.end) weight[i] = vf_exp(vf_sub(vf_load(scores_at(t, key + i, v)), from), factors, floor);
            sum = vf_add(sum, weight[i]);
        }
        *kept = keep_weights(t, key, v, weight, STEP, *kept);
    }
    return sum;
}
#endif

static void softmax_block(const sdpa_input *in, sdpa_task *t)
{
    const real factor = exponent_factor(in);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    for (int v = 0; v < t->rows.vectors; ++v) {
        real *max_at = (real *)t->scratch.max + v * VL, *sum_at = (real *)t->scratch.sum + v * VL,
             *kept_at = (real *)t->scratch.kept + v * VL;
        const vf old_max = vf_load(max_at), new_max = vf_max(vf_load((real *)t->scratch.high + v * VL), old_max),
                 from = subtractable(new_max);
        const vf shrink = vf_exp(vf_sub(old_max, from), factors, floor);
        vf kept = vf_set1(0);
        const vf sum = exponentiate_scores(t, v, from, factors, floor, &kept);
#if TILES
        fill_up_pairs(t, v, t->scratch.s);
#endif
        vf_store(max_at, new_max);
        vf_store(sum_at, vf_fma(vf_load(sum_at), shrink, sum));
        if (PAIRS) vf_store(kept_at, vf_fma(vf_load(kept_at), shrink, kept));
        vf_store((real *)t->scratch.shrink + v * VL, shrink);
    }
}

/* What a row is divided by: the sum of its weights as they meet V, or as they are given out. */
static inline void *divisor(const sdpa_input *in, const sdpa_task *t)
{
    return PAIRS && !in->weights.data ? t->scratch.kept : t->scratch.sum;
}

/* Of a sum, for the lse: an error of one rounding. */
static inline double log_of(double x) { return sizeof(real) == sizeof(float) ? (double)logf((float)x) : log(x); }

/* One row at the end of its sums: its sink joins the denominator, its lse is written.  A row that saw nothing has the
 * sum 0 (one that saw NaN has NaN): its lse is its sink, or -inf without one. */
static void close_row(const sdpa_input *in, const sdpa_task *t, int row)
{
    const double unit = scale_in_exponent(in) ? in->scale : 1; /* of max, in natural logarithms */
    real *shrink = (real *)t->scratch.shrink + row;
    double high = ((real *)t->scratch.max)[row] * unit, total = ((real *)t->scratch.sum)[row];
    const double kept = ((real *)divisor(in, t))[row];
    const int empty = total == 0;
    const double sink = in->sinks ? in->sinks[head_index(in, &t->rows, row)] : -(double)INFINITY;
    if (in->sinks && !empty) {
        const double higher = sink > high ? sink : high;
        const double factor = exp(high - higher);
        *shrink = ((real *)t->scratch.lift)[row] * (real)(factor / (kept * factor + exp(sink - higher)));
        total = total * factor + exp(sink - higher);
        high = higher;
    }
    if (in->lse.data) write_one(t->rows.lse[row], in->lse.dtype, empty ? sink : high + log_of(total));
}

/* Ends the sums of all rows; `shrink` becomes the factor from exp(s - max) / lift to a probability. */
static void close_sums(const sdpa_input *in, sdpa_task *t)
{
    const vf zero = vf_set1(0), one = vf_set1(1);
    vf lifted = zero;
    for (int v = 0; v < t->rows.vectors; ++v) {
        const vf sum = vf_load((real *)divisor(in, t) + v * VL), lift = vf_load((real *)t->scratch.lift + v * VL);
        vf_store((real *)t->scratch.shrink + v * VL, vf_select(vf_eq(sum, zero), zero, vf_div(lift, sum)));
        lifted = vf_add(lifted, vf_sub(lift, one));
    }
    t->scratch.lifted = !is_zero(lifted);
    if (in->sinks || in->lse.data)
        for (int row = 0; row < t->rows.count; ++row) close_row(in, t, row);
}

/* ---- The sums over other keys */

/* A vector of x a + y b, with the factors of their rows. */
static inline vf joined(const real *x, const real *a, const real *y, const real *b, int64_t line, int v)
{
    return vf_fma(vf_load(x), of_rows(a, line, v), vf_mul(vf_load(y), of_rows(b, line, v)));
}

/* Rows of which a number of x a + y b is not finite where those of x and y are: their lift is twice as large. */
static void lift_overflows(const sdpa_input *in, const sdpa_task *t, const sdpa_task *part, real *own, real *share)
{
    const vf zero = vf_set1(0);
    real poison[ROWS] = {0}, *lift = t->scratch.lift;
    FOR_OUTPUT (in, t, line, v) {
        const ptrdiff_t at = output_offset(in, line, v);
        const real *x = (const real *)t->scratch.o + at, *y = (const real *)part->scratch.o + at;
        const vm numbers = vf_eq(vf_mul(vf_add(vf_mul(vf_load(x), zero), vf_load(y)), zero), zero);
        add_to_rows(vf_select(numbers, vf_mul(joined(x, own, y, share, line, v), zero), zero), poison, line, v);
    }
    for (int row = 0; row < t->rows.count; ++row)
        if (poison[row] != 0) lift[row] *= 2, own[row] /= 2, share[row] /= 2;
}

/* They join those of t: both come to the higher max, and to the larger lift, or twice that. */
static void join(const sdpa_input *in, const sdpa_task *t, const sdpa_task *part)
{
    const real factor = exponent_factor(in);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    const sdpa_scratch *s = &t->scratch, *other = &part->scratch;
    real own[ROWS], share[ROWS];
    for (int i = 0; i < t->rows.vectors * VL; i += VL) {
#define AT(scratch, field) ((real *)(scratch)->field + i)
        const vf max = vf_load(AT(s, max)), other_max = vf_load(AT(other, max)), higher = vf_max(other_max, max);
        const vf lift = vf_load(AT(s, lift)), other_lift = vf_load(AT(other, lift)), larger = vf_max(other_lift, lift);
        const vf a = vf_exp(vf_sub(max, subtractable(higher)), factors, floor),
                 b = vf_exp(vf_sub(other_max, subtractable(higher)), factors, floor);
        vf_store(AT(s, max), higher);
        vf_store(AT(s, sum), vf_fma(vf_load(AT(s, sum)), a, vf_mul(vf_load(AT(other, sum)), b)));
        if (PAIRS) vf_store(AT(s, kept), vf_fma(vf_load(AT(s, kept)), a, vf_mul(vf_load(AT(other, kept)), b)));
        vf_store(AT(s, lift), larger);
        vf_store(own + i, vf_mul(a, vf_div(lift, larger)));
        vf_store(share + i, vf_mul(b, vf_div(other_lift, larger)));
#undef AT
    }
    real *o = s->o;
    const real *added = other->o;
    vf poison = vf_set1(0);
    FOR_OUTPUT (in, t, line, v) {
        const ptrdiff_t at = output_offset(in, line, v);
        poison = vf_fma(joined(o + at, own, added + at, share, line, v), vf_set1(0), poison);
    }
    if (!is_zero(poison)) lift_overflows(in, t, part, own, share);
    FOR_OUTPUT (in, t, line, v) {
        const ptrdiff_t at = output_offset(in, line, v);
        vf_store(o + at, joined(o + at, own, added + at, share, line, v));
    }
}

#endif
