/* From products to scores: softcap, ALiBi, bias and mask, and who sees whom.  Scores lie as s[key][rows]. */

/* Where scores only get multiplied by a positive number, that number goes into the exponent (see softmax.h), and `s`
 * stays the bare product.  Otherwise they are scaled here; a factor of 0 or less must not meet -inf. */
static inline int scale_in_exponent(const sdpa_problem *p)
{
    return p->scale > 0 && p->softcap == 0 && !p->alibi_slopes && !p->bias.data;
}
static inline real exponent_factor(const sdpa_problem *p)
{
    return (real)(LOG2_E * (scale_in_exponent(p) ? p->scale : 1));
}

#define FOR_EACH_KEY(segment) for (int key = (segment).begin; key < (segment).end; ++key)

static inline real *scores_at(const sdpa_task *t, int key, int v) { return (real *)t->s + (ptrdiff_t)key * ROWS + v * VL; }

static void scale_and_cap(const sdpa_problem *p, sdpa_task *t, int v)
{
    const vf scale = vf_set1((real)p->scale);
    if (p->softcap == 0) {
        FOR_EACH_KEY(t->of_vector[v]) vf_store(scores_at(t, key, v), vf_mul(vf_load(scores_at(t, key, v)), scale));
        return;
    }
    const vf cap = vf_set1((real)p->softcap);
    FOR_EACH_KEY(t->of_vector[v])
    {
        real *s = scores_at(t, key, v);
        vf_store(s, vf_mul(cap, vf_tanh(vf_div(vf_mul(vf_load(s), scale), cap))));
    }
}

/* Of a row, in arrays of shape (B, H). */
static inline int64_t head_index(const sdpa_problem *p, const sdpa_task *t, int row)
{
    const int64_t group = p->heads / p->kv_heads;
    return t->batch * p->heads + t->kv_head * group + (t->first_row + row) % group;
}

/* s -= slope * |position - key|. */
static void add_alibi(const sdpa_problem *p, sdpa_task *t, int v)
{
    real slope[VL], position[VL]; /* counted from the first key of the block */
    for (int i = 0; i < VL; ++i) {
        const int row = v * VL + i < t->rows ? v * VL + i : t->rows - 1;
        slope[i] = (real)p->alibi_slopes[head_index(p, t, row)];
        position[i] = (real)((double)t->q_offset + (double)((t->first_row + row) / (p->heads / p->kv_heads) - t->key));
    }
    const vf slopes = vf_load(slope), positions = vf_load(position);
    FOR_EACH_KEY(t->of_vector[v])
    {
        real *s = scores_at(t, key, v);
        vf distance = vf_abs(vf_sub(positions, vf_set1((real)key)));
        vf_store(s, vf_fnma(slopes, distance, vf_load(s)));
    }
}

/* s += tile, and -inf wherever the tile is -inf, whatever s holds there (NaN and +inf included). */
static inline void add_tile(sdpa_task *t, int v, int key, int count, const vf *tile)
{
    const vf hidden = vf_set1(-(real)INFINITY);
    for (int i = 0; i < count; ++i) {
        real *s = scores_at(t, key + i, v);
        vf sum = vf_add(vf_load(s), tile[i]);
        vf_store(s, vf_select(vf_eq(tile[i], hidden), hidden, sum));
    }
}

/* A bias lies as [row][key]: VL x VL tiles of it are transposed on the way. */
static void add_bias(const sdpa_problem *p, sdpa_task *t, int v)
{
    const sdpa_array *bias = &p->bias;
    const sdpa_segment keys = t->of_vector[v];
    for (int key = keys.begin; key < keys.end; key += VL) {
        const int count = keys.end - key < VL ? keys.end - key : VL;
        const ptrdiff_t at = (t->key + key) * bias->column;
        vf tile[VL];
        read_transposed(tile, t->bias_row + v * VL, at, count, bias);
        add_tile(t, v, key, count, tile);
    }
}

static void add_mask(const sdpa_problem *p, sdpa_task *t, int v)
{
    const sdpa_array *mask = &p->mask;
    const sdpa_segment keys = t->of_vector[v];
    for (int key = keys.begin; key < keys.end; key += VL) {
        const int count = keys.end - key < VL ? keys.end - key : VL;
        const ptrdiff_t at = (t->key + key) * mask->column;
        vf tile[VL];
        UNROLL for (int lane = 0; lane < VL; ++lane)
            tile[lane] = read_mask_chunk(t->mask_row[v * VL + lane] + at, mask->column, count);
        vf_transpose(tile);
        add_tile(t, v, key, count, tile);
    }
}

/* -inf where geometry (causal, window, lengths) hides a key. */
static void hide(sdpa_task *t, int v)
{
    const sdpa_segment keys = t->of_vector[v];
    real first[VL], end[VL];
    int all_begin = keys.begin, all_end = keys.end; /* within these every row sees every key */
    for (int i = 0; i < VL; ++i) {
        const int row_begin = t->sees[v * VL + i].begin, row_end = t->sees[v * VL + i].end;
        first[i] = (real)row_begin;
        end[i] = (real)row_end;
        if (row_begin > all_begin) all_begin = row_begin;
        if (row_end < all_end) all_end = row_end;
    }
    if (all_begin >= all_end) all_begin = all_end = keys.end; /* no such keys */
    const vf firsts = vf_load(first), ends = vf_load(end), hidden = vf_set1(-(real)INFINITY);
    for (int key = keys.begin; key < keys.end; ++key) {
        if (key == all_begin) key = all_end;
        if (key >= keys.end) break;
        real *s = scores_at(t, key, v);
        const vf here = vf_set1((real)key);
        vm visible = vm_and(vf_lt(firsts, vf_set1((real)(key + 1))), vf_lt(here, ends));
        vf_store(s, vf_select(visible, vf_load(s), hidden));
    }
}

/* What follows the product, in the order of the contract. */
static void shape_scores(const sdpa_problem *p, sdpa_task *t)
{
    for (int v = 0; v < t->vectors; ++v) {
        if (!scale_in_exponent(p)) scale_and_cap(p, t, v);
        if (p->alibi_slopes) add_alibi(p, t, v);
        if (p->bias.data) add_bias(p, t, v);
        if (t->masked) add_mask(p, t, v);
        if (t->cut) hide(t, v);
    }
}

static void scores(const sdpa_problem *p, sdpa_task *t)
{
    ptrdiff_t stride;
    const real *keys = read_block(&p->key, block_address(&p->key, t), t->block, p->dim, t->key_copy, &stride);
    for (int i = 0; i < t->segments; ++i) {
        const sdpa_segment g = t->segment[i];
        score_segment(g.end_vector - g.first_vector, g.end - g.begin, p->dim, keys + g.begin * stride, stride,
                      (const real *)t->q + g.first_vector * VL, scores_at(t, g.begin, g.first_vector));
    }
    shape_scores(p, t);
}
