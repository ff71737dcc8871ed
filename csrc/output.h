/* Sums of weight * value, and results. */

static void begin(const sdpa_problem *p, sdpa_task *t)
{
    load_queries(p, t);
    real *max = t->max, *sum = t->sum;
    for (int row = 0; row < t->vectors * VL; ++row) {
        max[row] = -(real)INFINITY;
        sum[row] = 0;
    }
    t->started = 0;
}

static void add_values(const sdpa_problem *p, sdpa_task *t, const real *values, ptrdiff_t stride)
{
    output_block(t, p->value_dim, values, stride, t->started ? t->shrink : NULL);
    t->started = 1;
}

static void accumulate(const sdpa_problem *p, sdpa_task *t)
{
    ptrdiff_t stride;
    const real *values = read_block(&p->value, block_address(&p->value, t), t->block, p->value_dim, WHOLE_VECTORS,
                                    t->value_copy, &stride);
    add_values(p, t, values, stride);
}

/* visible[key][rows] of the block: -inf where a key is hidden, by whichever option.  What hides scores is asked to hide
 * zeros. */
static void find_visible(const sdpa_problem *p, sdpa_task *t)
{
    real *weights = t->s;
    t->s = t->visible;
    memset(t->s, 0, (size_t)t->block * ROWS * sizeof(real));
    for (int v = 0; v < t->vectors; ++v)
        shape(p, t, v, t->of_vector[v].begin, t->of_vector[v].end, steps_of(p, t) & (BIAS | MASK | CUT));
    t->s = weights;
}

/* o[feature] += weight * x for the rows that see the key, x being NaN or inf. */
static void add_poison(const sdpa_problem *p, sdpa_task *t, int key, int64_t feature, real x)
{
    for (int row = 0; row < t->rows; ++row) {
        const sdpa_segment computed = t->of_vector[row / VL];
        if (key < computed.begin || key >= computed.end) continue;
        const ptrdiff_t at = (ptrdiff_t)key * ROWS + row;
        if (((real *)t->visible)[at] != -(real)INFINITY) *output_at(p, t, row, feature) += ((real *)t->s)[at] * x;
    }
}

/* Like accumulate, where V holds NaN or inf.  A hidden key has weight 0, but 0 * NaN is NaN: so the sums take 0 for
 * such values, and then they are added where they are seen.  Rare, hence element by element. */
static void accumulate_seen(const sdpa_problem *p, sdpa_task *t)
{
    const sdpa_array *value = &p->value;
    const char *at = block_address(value, t);
    real *clean = t->value_copy;
    memset(clean, 0, (size_t)(t->block * padded(p->value_dim)) * sizeof(real));
#define VALUE(key, e) read_one(at + (key) * value->row + (e) * value->column, value->dtype)
    for (int key = 0; key < t->block; ++key)
        for (int64_t e = 0; e < p->value_dim; ++e) {
            const real x = VALUE(key, e);
            clean[key * padded(p->value_dim) + e] = isfinite(x) ? x : 0;
        }
    add_values(p, t, clean, padded(p->value_dim));
    find_visible(p, t);
    for (int key = 0; key < t->block; ++key)
        for (int64_t e = 0; e < p->value_dim; ++e) {
            const real x = VALUE(key, e);
            if (!isfinite(x)) add_poison(p, t, key, e, x);
        }
#undef VALUE
}

static void write_out(const sdpa_problem *p, sdpa_task *t)
{
    if (!t->started) memset(t->o, 0, (size_t)padded(p->value_dim) * ROWS * sizeof(real));
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
    store_transposed(&p->weights, t, t->s, t->key, t->block, NULL);
}
