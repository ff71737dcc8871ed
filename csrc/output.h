/* Sums of weight * value, and results. */

static void begin(const sdpa_problem *p, sdpa_task *t)
{
    load_queries(p, t);
#if ADDITIVE
    if (p->v) begin_additive(p, t);
#endif
    real *max = t->max, *sum = t->sum, *kept = t->kept;
    for (int row = 0; row < t->vectors * VL; ++row) {
        max[row] = -(real)INFINITY;
        sum[row] = kept[row] = 0;
    }
    t->started = 0;
    t->any_odd_values = 0;
}

/* What lies at one place of V. */
static inline real value_at(const sdpa_problem *p, const sdpa_task *t, int key, int64_t feature)
{
    const sdpa_array *value = &p->value;
    int alone = key + 1;
    const real x = read_one(value_address(p, t, key, &alone) + feature * value->column, value->dtype);
    if (!p->value_scale.data) return x;
    const char *scales = row_address(p, &p->value_scale, t->value_scales_at, t, key, &alone);
    return x * read_one(scales + (feature >> p->group_shift) * p->value_scale.column, SDPA_FLOAT32);
}

static inline int is_computed(const sdpa_task *t, int key, int row)
{
    return key >= t->of_vector[row / VL].begin && key < t->of_vector[row / VL].end;
}

#if PAIRS
/* The values that the products of pairs took for 0 (see pairs.h).  Rare, hence element by element. */
static void add_small_values(const sdpa_problem *p, sdpa_task *t)
{
    for (int key = 0; key < t->block; ++key)
        for (int64_t e = 0; e < p->value_dim; ++e) {
            const real x = value_at(p, t, key, e);
            if (!is_small_value(bfloat16_of_float(x))) continue;
            for (int row = 0; row < t->rows; ++row)
                if (is_computed(t, key, row)) *output_at(p, t, row, e) += weight_at(t, key, row) * x;
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
        if (!is_computed(t, key, row)) continue;
        const real visible = ((real *)t->visible)[score_index(t, key, 0) + row];
        if (visible != -(real)INFINITY) *output_at(p, t, row, feature) += weight_at(t, key, row) * x;
    }
}

/* Like accumulate, where V holds NaN or inf.  A hidden key has weight 0, but 0 * NaN is NaN: so the sums take 0 for
 * such values, and then they are added where they are seen.  Rare, hence element by element. */
static void accumulate_seen(const sdpa_problem *p, sdpa_task *t)
{
    const operand values = copy_values(p, t);
    for (int key = 0; key < t->block; ++key)
        for (int64_t e = 0; e < p->value_dim; ++e)
            if (!isfinite(value_at(p, t, key, e))) clear_value(p, t, key, e);
    add_values(p, t, values);
    find_visible(p, t);
    for (int key = 0; key < t->block; ++key)
        for (int64_t e = 0; e < p->value_dim; ++e) {
            const real x = value_at(p, t, key, e);
            if (!isfinite(x)) add_poison(p, t, key, e, x);
        }
}

/* Nothing was seen: the sums are 0. */
static void start(const sdpa_problem *p, sdpa_task *t)
{
    if (!t->started) memset(t->o, 0, (size_t)padded(p->value_dim) * ROWS * sizeof(real));
    t->started = 1;
}

static void write_out(const sdpa_problem *p, sdpa_task *t)
{
    start(p, t);
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
