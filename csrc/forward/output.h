/* Sums of weight * value, and results. */

/* Sums that overflowed are formed anew from the highest score on, by weights that are divided by `lift`. */
static void begin(const sdpa_problem *p, sdpa_task *t)
{
    load_queries(p, t);
#if ADDITIVE
    if (p->v) begin_additive(p, t);
#endif
    real *max = t->max, *sum = t->sum, *kept = t->kept, *lift = t->lift;
    const vf one = vf_set1(1), zero = vf_set1(0), lowest_max = vf_set1(-(real)INFINITY);
    for (int row = 0; row < t->vectors * VL; row += VL) {
        if (!t->lifted) vf_store(lift + row, one);
        const vf first = t->lifted ? vf_load(max + row) : lowest_max;
        vf_store(max + row, vf_select(vf_eq(vf_load(lift + row), one), lowest_max, first));
        vf_store(sum + row, zero);
        vf_store(kept + row, zero);
    }
    t->started = 0;
    t->poisonous = 0;
}

#if PAIRS
/* The values that the products of pairs took for 0 (see pairs.h): the same product, of multiples of them. */
static void add_small_values(const sdpa_problem *p, sdpa_task *t)
{
    real *sums = t->o;
    t->o = t->block_o;
    output_block(p, t, small_values(p, t), NULL);
    t->o = sums;
    const vf unit = vf_set1(1 / SMALL_VALUE_FACTOR);
    for (int64_t i = 0; i < output_vectors(p, t); ++i) {
        real *at = sums + output_offset(p, t, i);
        const vf x = vf_load(at), small = vf_load((real *)t->block_o + output_offset(p, t, i));
        vf_store(at, vf_select(vf_eq(small, vf_set1(0)), x, vf_fma(small, unit, x))); /* -0 stays */
    }
}
#endif

static void add_values(const sdpa_problem *p, sdpa_task *t, operand values)
{
    output_block(p, t, values, t->started ? t->shrink : NULL);
    t->started = 1;
#if PAIRS
    if (t->odd_values & SMALL) add_small_values(p, t);
#endif
}

static void accumulate(const sdpa_problem *p, sdpa_task *t) { add_values(p, t, read_values(p, t)); }

/* Nothing was seen: the sums are 0. */
static void start(const sdpa_problem *p, sdpa_task *t)
{
    if (!t->started) memset(t->o, 0, (size_t)padded(p->value_dim) * ROWS * sizeof(real));
    t->started = 1;
}

/* o * shrink, no larger than the largest number unless o is: the weights sum to 1 but for the rounding. */
static void limit_output(const sdpa_problem *p, const sdpa_task *t)
{
    real *o = t->o, *shrink = t->shrink;
    const vf most = vf_set1(REAL_MAX), least = vf_set1(-REAL_MAX);
    for (int64_t i = 0; i < output_vectors(p, t); ++i) {
        const vf x = vf_load(o + output_offset(p, t, i)), y = vf_mul(x, of_rows(p, t, i, shrink));
        const vm is_number = vf_eq(vf_sub(x, x), vf_set1(0));
        vf_store(o + output_offset(p, t, i), vf_select(is_number, vf_max(least, vf_min(most, y)), y));
    }
    for (int row = 0; row < t->vectors * VL; ++row) shrink[row] = 1;
}

static void write_out(const sdpa_problem *p, sdpa_task *t)
{
    start(p, t);
    if (t->lifted) limit_output(p, t);
    store_output(p, t);
}

/* The probabilities of the block, once max and the sums over all keys are known: exp(s - max) * shrink. */
static void write_weights(const sdpa_problem *p, sdpa_task *t)
{
    const real factor = exponent_factor(p);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    const vf hidden = vf_set1(-(real)INFINITY), zero = vf_set1(0);
    for (int v = 0; v < t->vectors; ++v) {
        const vf from = subtractable(vf_load((real *)t->max + v * VL)), share = vf_load((real *)t->shrink + v * VL);
        for (int key = 0; key < t->block; ++key) {
            const int seen = key >= t->of_vector[v].begin && key < t->of_vector[v].end;
            real *s = scores_at(t, key, v);
            const vf score = vf_load(s), weight = vf_exp(vf_sub(score, from), factors, floor);
            const vf part = vf_select(vf_eq(score, hidden), zero, vf_mul(weight, share)); /* 0 beside NaN too */
            vf_store(s, seen ? part : zero);
        }
    }
    store_transposed(&p->weights, t, t->out_row, t->s, t->key, t->block, NULL);
}
