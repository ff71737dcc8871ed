/* Sums of weight * value, and results. */
#ifndef SDPA_FORWARD_OUTPUT_H
#define SDPA_FORWARD_OUTPUT_H

#include "forward/softmax.h"

#if PAIRS && !SDPA_FEW_ROWS
/* The values that the products of pairs took for 0 (see pairs.h): the same product, of multiples of them. */
static void add_small_values(const sdpa_input *in, const sdpa_task *t)
{
    real *sums = t->scratch.o, *of_small = t->scratch.block_o;
    output_block(in, t, small_values(in, t), t->scratch.s, of_small, NULL);
    const vf unit = vf_set1(1 / SMALL_VALUE_FACTOR);
    FOR_OUTPUT (in, t, line, v) {
        real *at = sums + output_offset(in, line, v);
        const vf x = vf_load(at), small = vf_load(of_small + output_offset(in, line, v));
        vf_store(at, vf_select(vf_eq(small, vf_set1(0)), x, vf_fma(small, unit, x))); /* -0 stays */
    }
}
#endif

static void add_values(const sdpa_input *in, sdpa_task *t, operand values)
{
    output_block(in, t, values, t->scratch.s, t->scratch.o, t->scratch.started ? t->scratch.shrink : NULL);
    t->scratch.started = 1;
#if PAIRS && !SDPA_FEW_ROWS
    if (t->scratch.odd_values & SMALL) add_small_values(in, t);
#endif
}

static void accumulate(const sdpa_input *in, sdpa_task *t) { add_values(in, t, read_values(in, t)); }

/* The sums of a task, or of a part of its keys, end: where nothing was seen they are 0. */
static void start(const sdpa_input *in, sdpa_task *t)
{
    if (!t->scratch.started) memset(t->scratch.o, 0, (size_t)output_width(in->value_dim) * ROWS * sizeof(real));
    t->scratch.started = 1;
    release_tiles();
}

/* o * shrink, no larger than the largest number unless o is: the weights sum to 1 but for the rounding. */
static void limit_output(const sdpa_input *in, const sdpa_task *t)
{
    real *o = t->scratch.o, *shrink = t->scratch.shrink;
    const vf most = vf_set1(REAL_MAX), least = vf_set1(-REAL_MAX);
    FOR_OUTPUT (in, t, line, v) {
        real *at = o + output_offset(in, line, v);
        const vf x = vf_load(at), y = vf_mul(x, of_rows(shrink, line, v));
        const vm is_number = vf_eq(vf_sub(x, x), vf_set1(0));
        vf_store(at, vf_select(is_number, vf_max(least, vf_min(most, y)), y));
    }
    for (int row = 0; row < t->rows.vectors * VL; ++row) shrink[row] = 1;
}

static void write_out(const sdpa_input *in, sdpa_task *t)
{
    start(in, t);
    if (t->scratch.lifted) limit_output(in, t);
    store_output(in, t);
}

#if STORES_ROWS
/* Whether results can be stored row by row, in whole vectors. */
static int stores_rows(const sdpa_input *in)
{
    return !in->weights.data && in->value_dim > 0 && in->value_dim % VL == 0 &&
           writes_adjacent(&in->out, in->out.column);
}

/* out = shrink * s V, where the block has all keys that are seen.  Returns 0 where that is to be done in another way,
 * as something is not finite or too small. */
static int write_at_once(const sdpa_input *in, sdpa_task *t)
{
    const operand values = read_values(in, t);
    if (PAIRS && t->scratch.odd_values & SMALL) return 0;
    agenda soon;
    soon.count = 0;
    const int vectors = in->value_dim / VL < VECTORS ? (int)(in->value_dim / VL) : VECTORS;
    add_pending_next(in, t, &in->value, t->rows.next_values, in->kv_len, in->value_dim, t->rows.count, vectors, &soon);
    return write_rows(&in->out, t, values, in->value_dim, &soon);
}
#endif

/* The probabilities of the block, once max and the sums over all keys are known: exp(s - max) * shrink. */
static void write_weights(const sdpa_input *in, sdpa_task *t)
{
    const real factor = exponent_factor(in);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    const vf hidden = vf_set1(-(real)INFINITY), zero = vf_set1(0);
    for (int v = 0; v < t->rows.vectors; ++v) {
        const vf from = subtractable(vf_load((real *)t->scratch.max + v * VL)),
                 share = vf_load((real *)t->scratch.shrink + v * VL);
        for (int key = 0; key < t->block.count; ++key) {
            const int seen = key >= t->block.of_vector[v].begin && key < t->block.of_vector[v].end;
            real *s = scores_at(t, key, v);
            const vf score = vf_load(s), weight = vf_exp(vf_sub(score, from), factors, floor);
            const vf part = vf_select(vf_eq(score, hidden), zero, vf_mul(weight, share)); /* 0 beside NaN too */
            vf_store(s, seen ? part : zero);
        }
    }
    store_transposed(&in->weights, &t->rows, t->rows.out, t->scratch.s, t->block.first, t->block.count, NULL);
    release_tiles();
}

#endif
