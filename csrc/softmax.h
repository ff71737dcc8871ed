/* The online log-sum-exp step, with rows in lanes: no horizontal operation anywhere.
 *
 * max, sum and o describe the keys seen so far: sum = sum of exp(s - max), o = sum of exp(s - max) * V.  A new block
 * raises max, and `shrink` = exp(old max - new max) brings what was summed before to the new one.  A block that a row
 * does not see leaves its max alone: shrink is exactly 1 and everything added exactly 0, so its bits stay. */

/* -inf (nothing seen yet) must not be subtracted from -inf: that would be NaN. */
static inline vf subtractable(vf max) { return vf_select(vf_eq(max, vf_set1(-(real)INFINITY)), vf_set1(0), max); }

/* Largest score of each row in the block.  Four running maxima: one chain would wait for the latency of each. */
static inline vf block_max(const sdpa_task *t, int v, vf max)
{
    const sdpa_segment keys = t->of_vector[v];
    vf partial[4] = {max, max, max, max};
    int key = keys.begin;
    for (; key + 4 <= keys.end; key += 4)
        UNROLL for (int i = 0; i < 4; ++i) partial[i] = vf_max(vf_load(scores_at(t, key + i, v)), partial[i]);
    for (; key < keys.end; ++key) partial[0] = vf_max(vf_load(scores_at(t, key, v)), partial[0]);
    return vf_max(vf_max(partial[0], partial[1]), vf_max(partial[2], partial[3]));
}

static void softmax_step(const sdpa_problem *p, sdpa_task *t)
{
    const real factor = exponent_factor(p);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    for (int v = 0; v < t->vectors; ++v) {
        real *max_at = (real *)t->max + v * VL, *sum_at = (real *)t->sum + v * VL;
        const vf old_max = vf_load(max_at), new_max = block_max(t, v, old_max), from = subtractable(new_max);
        const vf shrink = vf_exp(vf_sub(old_max, from), factors, floor);
        vf sum = vf_mul(vf_load(sum_at), shrink);
        const sdpa_segment keys = t->of_vector[v];
        int key = keys.begin;
        for (; key + 4 <= keys.end; key += 4) {
            vf weight[4];
            UNROLL for (int i = 0; i < 4; ++i) weight[i] = vf_sub(vf_load(scores_at(t, key + i, v)), from);
            exp_all(weight, 4, factors, floor);
            UNROLL for (int i = 0; i < 4; ++i) vf_store(scores_at(t, key + i, v), weight[i]);
            UNROLL for (int i = 0; i < 4; ++i) sum = vf_add(sum, weight[i]);
        }
        for (; key < keys.end; ++key) {
            vf weight = vf_exp(vf_sub(vf_load(scores_at(t, key, v)), from), factors, floor);
            vf_store(scores_at(t, key, v), weight);
            sum = vf_add(sum, weight);
        }
        vf_store(max_at, new_max);
        vf_store(sum_at, sum);
        vf_store((real *)t->shrink + v * VL, shrink);
    }
}

/* Ends the sums of all rows: sinks join the denominator, lse is written, `shrink` becomes the factor from
 * exp(s - max) to a probability; 0 for a row that saw nothing (its sum is 0; that of a row that saw NaN is NaN). */
static void close_sums(const sdpa_problem *p, sdpa_task *t)
{
    const double unit = scale_in_exponent(p) ? p->scale : 1; /* of max, in natural logarithms */
    const real *max = t->max, *sum = t->sum;
    real *shrink = t->shrink;
    for (int row = 0; row < t->vectors * VL; ++row) {
        const int empty = sum[row] == 0;
        double high = max[row] * unit, total = sum[row], factor = 1;
        if (p->sinks && !empty) {
            const double sink = p->sinks[head_index(p, t, row < t->rows ? row : t->rows - 1)];
            const double higher = sink > high ? sink : high;
            factor = exp(high - higher);
            total = total * factor + exp(sink - higher);
            high = higher;
        }
        shrink[row] = empty ? 0 : (real)(factor / total);
        if (p->lse.data && row < t->rows)
            write_one(t->lse_row[row], p->lse.dtype, empty ? -(double)INFINITY : high + log(total));
    }
}
