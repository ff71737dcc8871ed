/* The engine for few rows (decoding): memory is the limit, so K and V are read once, row by row as they lie, with
 * features in lanes.  Everything between the two products is that of the other engine: scores lie as s[key][rows], in
 * one vector of rows.
 *
 * Queries lie as q[row][features] and sums as o[row][features], padded with 0 to whole vectors; rows of K and V that do
 * not end on a whole vector are copied to such.  Numbers narrower than `real` are widened as they are loaded: `dtype`
 * is a constant in each tile.  The order of the sums of a row does not depend on other rows. */

static void load_queries(const sdpa_problem *p, sdpa_task *t)
{
    for (int row = 0; row < t->rows; ++row)
        read_row(t->query_row[row], &p->query, p->dim, (real *)t->q + row * padded(p->dim));
    const int64_t keys = p->block_keys < p->kv_len ? p->block_keys : p->kv_len;
    memset(t->s, 0, (size_t)keys * ROWS * sizeof(real)); /* the lanes of rows that are not there */
}

/* Sums over lanes of VL vectors at once: lane i of the result is that of sum[i]. */
static inline ALWAYS_INLINE vf sums_of_lanes(vf sum[VL])
{
    vf_transpose(sum);
    UNROLL_FOR (int half = VL / 2; half > 0; half /= 2)
        UNROLL_FOR (int i = 0; i < half; ++i) sum[i] = vf_add(sum[i], sum[i + half]);
    return sum[0];
}

/* s[key][row] = K[key] . q[row], for keys * rows <= VL pairs. */
static inline ALWAYS_INLINE void dot_tile(const int keys, const int rows, const int dtype, int64_t dim, const char *k,
                                          ptrdiff_t k_stride, const real *q, real *s)
{
    vf sum[VL];
    UNROLL_FOR (int i = 0; i < VL; ++i) sum[i] = vf_set1(0);
    for (int64_t d = 0; d < dim; d += VL) {
        vf query[VL];
        UNROLL_FOR (int row = 0; row < rows; ++row) query[row] = vf_load(q + row * dim + d);
        UNROLL_FOR (int key = 0; key < keys; ++key) {
            const vf feature = read_adjacent(k + key * k_stride + d * size_of(dtype), dtype);
            UNROLL_FOR (int row = 0; row < rows; ++row)
                sum[key * rows + row] = vf_fma(feature, query[row], sum[key * rows + row]);
        }
    }
    real lane[VL];
    vf_store(lane, sums_of_lanes(sum));
    UNROLL_FOR (int key = 0; key < keys; ++key)
        UNROLL_FOR (int row = 0; row < rows; ++row) s[key * ROWS + row] = lane[key * rows + row];
}

/* As many keys at once as VL sums allow, then one by one. */
static inline ALWAYS_INLINE void dot_tiles(const int rows, const int dtype, int64_t keys, int64_t dim, const char *k,
                                           ptrdiff_t k_stride, const real *q, real *s)
{
    const int at_once = VL / rows;
    int64_t key = 0;
    for (; key + at_once <= keys; key += at_once)
        dot_tile(at_once, rows, dtype, dim, k + key * k_stride, k_stride, q, s + key * ROWS);
    for (; key < keys; ++key) dot_tile(1, rows, dtype, dim, k + key * k_stride, k_stride, q, s + key * ROWS);
}

/* Rows are taken by fours, twos and ones: `call(rows, first)` with a constant number. */
#define FOR_ROWS(count, call)                                                                                          \
    do {                                                                                                               \
        int first = 0;                                                                                                 \
        for (; VL >= 4 && first + 4 <= (count); first += 4) call(4, first);                                            \
        for (; first + 2 <= (count); first += 2) call(2, first);                                                       \
        for (; first < (count); ++first) call(1, first);                                                               \
    } while (0)

/* Expands `call(dtype)` with what the rows of K or V hold, as a constant. */
#define WITH_DTYPE(dtype, call)                                                                                        \
    do {                                                                                                               \
        if ((dtype) == SDPA_FLOAT16)                                                                                   \
            call(SDPA_FLOAT16);                                                                                        \
        else if ((dtype) == SDPA_BFLOAT16)                                                                             \
            call(SDPA_BFLOAT16);                                                                                       \
        else if ((dtype) == SDPA_FLOAT32)                                                                              \
            call(SDPA_FLOAT32);                                                                                        \
        else if (sizeof(real) == sizeof(double))                                                                       \
            call(SDPA_FLOAT64);                                                                                        \
    } while (0)

/* Keys go through all rows while they are in the first-level cache. */
enum { KEYS_IN_CACHE = 16 };

static inline ALWAYS_INLINE void score_keys(const int dtype, const sdpa_task *t, int64_t keys, int64_t dim,
                                            const char *k, ptrdiff_t k_stride, real *s)
{
    const real *q = t->q;
    for (int64_t key = 0; key < keys; key += KEYS_IN_CACHE) {
        const int64_t count = keys - key < KEYS_IN_CACHE ? keys - key : KEYS_IN_CACHE;
#define DOT_TILES(rows, first)                                                                                         \
    dot_tiles(rows, dtype, count, padded(dim), k + key * k_stride, k_stride, q + (first) * padded(dim),                \
              s + key * ROWS + (first))
        FOR_ROWS(t->rows, DOT_TILES);
#undef DOT_TILES
    }
}

/* The products of a segment; `high` is raised to the largest of each row. */
static void score_products(const sdpa_problem *p, sdpa_task *t, sdpa_segment g, operand keys)
{
    const char *first = keys.at + g.begin * keys.stride;
#define SCORE_KEYS(dtype) score_keys(dtype, t, g.end - g.begin, p->dim, first, keys.stride, scores_at(t, g.begin, 0))
    WITH_DTYPE(keys.dtype, SCORE_KEYS);
#undef SCORE_KEYS
    vf high = vf_load(t->high);
    for (int key = g.begin; key < g.end; ++key) high = vf_max(vf_load(scores_at(t, key, 0)), high);
    vf_store(t->high, high);
}

/* o[row][features] = o * shrink + sum over keys of s[key][row] V[key][features], `width` vectors of features. */
static inline ALWAYS_INLINE void weigh_tile(const int rows, const int width, const int dtype, sdpa_segment g,
                                            const char *values, ptrdiff_t stride, const real *s, real *o,
                                            ptrdiff_t o_stride, const real *shrink)
{
    vf sum[4][8];
    UNROLL_FOR (int row = 0; row < rows; ++row)
        UNROLL_FOR (int i = 0; i < width; ++i) sum[row][i] = vf_set1(0);
    for (int key = g.begin; key < g.end; ++key) {
        vf value[8];
        UNROLL_FOR (int i = 0; i < width; ++i)
            value[i] = read_adjacent(values + key * stride + i * VL * size_of(dtype), dtype);
        UNROLL_FOR (int row = 0; row < rows; ++row) {
            const vf weight = vf_set1(s[key * ROWS + row]);
            UNROLL_FOR (int i = 0; i < width; ++i) sum[row][i] = vf_fma(weight, value[i], sum[row][i]);
        }
    }
    UNROLL_FOR (int row = 0; row < rows; ++row)
        UNROLL_FOR (int i = 0; i < width; ++i) {
            real *at = o + row * o_stride + i * VL;
            vf_store(at, shrink ? vf_fma(vf_load(at), vf_set1(shrink[row]), sum[row][i]) : sum[row][i]);
        }
}

/* Sums of a tile: so many that loads of values and additions overlap, and that registers suffice. */
enum { FEW_SUMS = TILE >= 24 ? 16 : TILE >= 12 ? 8 : 4 };

static inline ALWAYS_INLINE void weigh_tiles(const int rows, const int dtype, int64_t value_dim, sdpa_segment g,
                                             operand values, const real *s, real *o, const real *shrink)
{
    const int width = FEW_SUMS / rows < 8 ? FEW_SUMS / rows : 8;
    const int64_t end = padded(value_dim);
    int64_t e = 0;
    for (; e + width * VL <= end; e += width * VL)
        weigh_tile(rows, width, dtype, g, values.at + e * size_of(dtype), values.stride, s, o + e, end, shrink);
    for (; e < end; e += VL)
        weigh_tile(rows, 1, dtype, g, values.at + e * size_of(dtype), values.stride, s, o + e, end, shrink);
}

static inline ALWAYS_INLINE void weigh_rows(const int dtype, const sdpa_task *t, int64_t value_dim, operand values,
                                            const real *shrink)
{
    const real *s = t->s;
    real *o = t->o;
#define WEIGH_TILES(rows, first)                                                                                       \
    weigh_tiles(rows, dtype, value_dim, t->segment[0], values, s + (first), o + (first) * padded(value_dim),           \
                shrink ? shrink + (first) : NULL)
    FOR_ROWS(t->rows, WEIGH_TILES);
#undef WEIGH_TILES
}

/* `shrink` NULL: o is taken as 0.  There is one vector of rows, hence one segment. */
static void output_block(const sdpa_task *t, int64_t value_dim, operand values, const real *shrink)
{
#define WEIGH_ROWS(dtype) weigh_rows(dtype, t, value_dim, values, shrink)
    WITH_DTYPE(values.dtype, WEIGH_ROWS);
#undef WEIGH_ROWS
}

static inline real *output_at(const sdpa_problem *p, const sdpa_task *t, int row, int64_t feature)
{
    return (real *)t->o + row * padded(p->value_dim) + feature;
}

/* No NaN and no inf in o: x * 0 is 0 exactly then. */
static int finite(const sdpa_problem *p, const sdpa_task *t)
{
    vf poison = vf_set1(0);
    for (int64_t i = 0; t->started && i < t->rows * padded(p->value_dim); i += VL)
        poison = vf_fma(vf_load((real *)t->o + i), vf_set1(0), poison);
    return is_zero(poison);
}

/* out = o * shrink. */
static void store_output(const sdpa_problem *p, const sdpa_task *t)
{
    const sdpa_array *out = &p->out;
    for (int row = 0; row < t->rows; ++row) {
        const vf factor = vf_set1(((real *)t->shrink)[row]);
        for (int64_t e = 0; e < p->value_dim; e += VL) {
            const int count = p->value_dim - e < VL ? (int)(p->value_dim - e) : VL;
            write_chunk(t->out_row[row] + e * out->column, out->column, count, out,
                        vf_mul(vf_load(output_at(p, t, row, e)), factor));
        }
    }
}
