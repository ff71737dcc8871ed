/* What the products multiply, number by number: the same interface as pairs.h. */

enum { STEP = 1 }; /* so many features, or keys, in one multiply-add of a lane */
static inline int64_t steps(int64_t count) { return count; }
static inline vf vf_product(vf a, vf b, vf c) { return vf_fma(a, b, c); }

/* Whether the products can read K or V where it lies: the engine for few rows widens what it loads. */
static inline int in_place(const sdpa_array *array, const char *at, int64_t width)
{
    if (!is_adjacent(array, at)) return 0;
    return SDPA_FEW_ROWS ? width % VL == 0 : array->dtype == REAL_DTYPE;
}

static inline ALWAYS_INLINE void widen_rows(const sdpa_array *array, const char *at, int64_t rows, int64_t width,
                                            real *copy, const int dtype)
{
    for (int64_t row = 0; row < rows; ++row, at += array->row, copy += padded(width)) {
        int64_t i = 0;
        for (; i + VL <= width; i += VL) vf_store(copy + i, read_adjacent(at + i * array->itemsize, dtype));
        if (i < width)
            vf_store(copy + i, read_chunk(at + i * array->itemsize, array->itemsize, (int)(width - i), array));
    }
}

/* Rows of the block as `real` rows, padded with 0 to whole vectors. */
static void copy_rows(const sdpa_array *array, const char *at, int64_t rows, int64_t width, real *copy)
{
    const int adjacent = array->column == array->itemsize;
    if (adjacent && array->dtype == SDPA_FLOAT16)
        widen_rows(array, at, rows, width, copy, SDPA_FLOAT16);
    else if (adjacent && array->dtype == SDPA_BFLOAT16)
        widen_rows(array, at, rows, width, copy, SDPA_BFLOAT16);
    else
        for (int64_t row = 0; row < rows; ++row)
            read_row(at + row * array->row, array, width, copy + row * padded(width));
}

static inline operand copied_rows(const real *copy, int64_t width)
{
    return (operand){(const char *)copy, padded(width) * (ptrdiff_t)sizeof(real), REAL_DTYPE};
}

static int copies(const sdpa_problem *p)
{
    return !in_place(&p->key, p->key.data, p->dim) ||
           (p->value.data && !in_place(&p->value, p->value.data, p->value_dim));
}

static operand read_keys(const sdpa_problem *p, sdpa_task *t)
{
    const char *at = block_address(&p->key, t);
    if (in_place(&p->key, at, p->dim)) return (operand){at, p->key.row, p->key.dtype};
    if (t->copied->key != at || t->copied->keys < t->block) {
        copy_rows(&p->key, at, t->block, p->dim, t->key_copy);
        t->copied->key = at, t->copied->keys = t->block;
    }
    return copied_rows(t->key_copy, p->dim);
}

static operand copy_values(const sdpa_problem *p, sdpa_task *t)
{
    const char *at = block_address(&p->value, t);
    if (t->copied->value != at || t->copied->values < t->block) {
        copy_rows(&p->value, at, t->block, p->value_dim, t->value_copy);
        t->copied->value = at, t->copied->values = t->block;
    }
    return copied_rows(t->value_copy, p->value_dim);
}
static operand read_values(const sdpa_problem *p, sdpa_task *t)
{
    const char *at = block_address(&p->value, t);
    if (in_place(&p->value, at, p->value_dim)) return (operand){at, p->value.row, p->value.dtype};
    return copy_values(p, t);
}

/* In the copy, which is of no use to others then. */
static inline void clear_value(const sdpa_problem *p, sdpa_task *t, int key, int64_t feature)
{
    ((real *)t->value_copy)[key * padded(p->value_dim) + feature] = 0;
    t->copied->value = NULL;
}

/* The weights of `count` keys from `key` on take the place of the scores.  Where they were rounded, `kept` would sum
 * them. */
static inline ALWAYS_INLINE vf keep_weights(const sdpa_task *t, int key, int v, const vf *weight, const int count,
                                            vf kept)
{
    UNROLL_FOR (int i = 0; i < count; ++i) vf_store(scores_at(t, key + i, v), weight[i]);
    return kept;
}
static inline real weight_at(const sdpa_task *t, int key, int row) { return scores_at(t, key, 0)[row]; }
