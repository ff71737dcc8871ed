/* Additive scores, with rows in lanes: s[key][rows] = sum over a of v[a] tanh(x[a] + y[a]), where x is the projection
 * of a row and y that of a key.
 *
 * The exponentials are those of rows and keys, not of pairs: with X = exp(2x) and Y = exp(2y)
 *
 *     tanh(x + y) = 1 - 2 / t,  t = X Y + 1
 *
 * and four features share one division:
 *
 *     a/t0 + b/t1 + c/t2 + d/t3 = ((a t1 + b t0) t2 t3 + (c t3 + d t2) t0 t1) / (t0 t1 t2 t3)
 *
 * A group of four adds its v to its quotient before it joins the sum, so that what is summed is as small as in the
 * definition.  Features are filled up to whole groups with X = 0, Y = 1 and a weight of 0.
 *
 *     q[a][ROWS]              X, in the place of the queries
 *     key_copy[key][a]        Y, in the place of the copied keys
 *     feature_weights[group][5][ROWS]   a = -2 v of each of the four features, and the sum of their v
 *
 * t is held below 2**LARGEST, where tanh is 1 up to the rounding, so that the product of four is finite (with |v| < 2
 * the numerator, too).  X and Y end at 2**WIDEST, and are 0 below the smallest normal number.  That does no harm unless
 * x and y cancel, which takes both of them beyond 2**SAFE or 2**-SAFE: rows that hold such an x are marked as odd, and
 * their scores for keys that hold such a y are computed again, with tanh itself. */
#ifndef SDPA_FORWARD_ADDITIVE_H
#define SDPA_FORWARD_ADDITIVE_H

#include "forward/product.h"

/* Powers of 2: of the largest t, of the largest X and Y, and of those that cannot cancel the largest. */
enum { LARGEST = REAL_MANTISSA_BITS + 5, WIDEST = REAL_BIAS - 1, SAFE = WIDEST - LARGEST };

enum { GROUP = 4, WEIGHTS = GROUP + 1, GROUPS_OF_SUM = LONGEST_SUM / GROUP, KEYS_OF_TILE = 4 };
static inline int64_t groups_of(const sdpa_input *in) { return (in->dim + GROUP - 1) / GROUP; }

#define EXPONENT_FACTOR ((real)(2 * LOG2_E))

/* exp(2x), no larger than 2**WIDEST; 0 for the smallest; NaN for NaN. */
static inline vf exponential(vf x)
{
    const vf widest = vf_set1(WIDEST / EXPONENT_FACTOR);
    return vf_exp(vf_min(widest, x), vf_set1(EXPONENT_FACTOR), vf_set1(lowest(EXPONENT_FACTOR)));
}

/* Lanes of 1 where |x| is so large that a sum with another such x may cancel, else 0. */
static inline vf is_unsafe(vf x)
{
    return vf_select(vf_lt(vf_set1(SAFE / EXPONENT_FACTOR), vf_abs(x)), vf_set1(1), vf_set1(0));
}

/* ---- once for each row */

/* q becomes X; its rows that hold a large x are marked. */
static void begin_rows(const sdpa_input *in, sdpa_task *t)
{
    t->scratch.odd_rows = 0;
    for (int v = 0; v < t->rows.vectors; ++v) {
        vf unsafe = vf_set1(0);
        real lane[VL], *q = (real *)t->scratch.q + v * VL;
        for (int64_t a = 0; a < in->dim; ++a) {
            const vf x = vf_load(q + a * ROWS);
            unsafe = vf_max(unsafe, is_unsafe(x));
            vf_store(q + a * ROWS, exponential(x));
        }
        for (int64_t a = in->dim; a < groups_of(in) * GROUP; ++a) vf_store(q + a * ROWS, vf_set1(0));
        vf_store(lane, unsafe);
        for (int i = 0; i < VL; ++i) t->scratch.odd_rows |= (uint64_t)(lane[i] > 0) << (v * VL + i);
    }
}

/* The weights of each row: heads that share keys may have their own. */
static void load_feature_weights(const sdpa_input *in, const sdpa_task *t)
{
    const int64_t group = sdpa_group(in);
    real *weights = t->scratch.feature_weights;
    for (int64_t g = 0; g < groups_of(in); ++g, weights += WEIGHTS * ROWS)
        for (int row = 0; row < t->rows.vectors * VL; ++row) {
            const double *v = in->v + (t->rows.kv_head * group + (t->rows.first + row) % group) * in->dim;
            real sum = 0;
            for (int i = 0; i < GROUP; ++i) {
                const real each = g * GROUP + i < in->dim ? (real)v[g * GROUP + i] : 0;
                weights[i * ROWS + row] = -2 * each;
                sum += each;
            }
            weights[GROUP * ROWS + row] = sum;
        }
}

static void begin_additive(const sdpa_input *in, sdpa_task *t)
{
    begin_rows(in, t);
    load_feature_weights(in, t);
}

/* ---- once for each block and bundle of tasks */

/* Y of the keys of the block, in rows of whole groups. */
static operand exponential_keys(const sdpa_input *in, const sdpa_task *t)
{
    const int64_t width = whole_vectors(groups_of(in) * GROUP);
    if (must_copy(t, &t->scratch.copied[0]))
        for (int key = 0; key < t->block.count; ++key) {
            int alone = key + 1;
            const char *at = key_address(in, t, key, &alone);
            real *copy = (real *)t->scratch.key_copy + key * width;
            for (int64_t a = 0; a < width; a += VL) {
                const int64_t left = in->dim - a;
                const int count = left < 0 ? 0 : left < VL ? (int)left : VL;
                vf_store(copy + a, exponential(read_chunk(at + a * in->key.column, in->key.column, count, &in->key)));
            }
        }
    return (operand){t->scratch.key_copy, width * (ptrdiff_t)sizeof(real), REAL_DTYPE};
}

/* ---- for each pair */

/* sum over a group of v tanh, for a vector of rows and a key. */
static inline ALWAYS_INLINE vf group_of_tanh(const vf *x, const vf *weights, const real *y)
{
    const vf one = vf_set1(1), largest = vf_set1((real)((uint64_t)1 << LARGEST));
    vf t[GROUP];
    UNROLL_FOR (int i = 0; i < GROUP; ++i) t[i] = vf_min(largest, vf_fma(x[i], vf_set1(y[i]), one)); /* keeps NaN */
    const vf ab = vf_fma(weights[0], t[1], vf_mul(weights[1], t[0])), t01 = vf_mul(t[0], t[1]);
    const vf cd = vf_fma(weights[2], t[3], vf_mul(weights[3], t[2])), t23 = vf_mul(t[2], t[3]);
    return vf_add(vf_div(vf_fma(ab, t23, vf_mul(cd, t01)), vf_mul(t01, t23)), weights[GROUP]);
}

/* Scores of a vector of rows for `height` keys.  Many features are summed in parts (see LONGEST_SUM). */
static inline ALWAYS_INLINE void additive_tile(const int height, int64_t groups, const real *y, ptrdiff_t stride,
                                               const real *q, const real *weights, real *s, real *high)
{
    vf sum[KEYS_OF_TILE], highest = vf_load(high);
    UNROLL_FOR (int i = 0; i < height; ++i) sum[i] = vf_set1(0);
    for (int64_t first = 0; first < groups; first += GROUPS_OF_SUM) {
        const int64_t end = groups - first < GROUPS_OF_SUM ? groups : first + GROUPS_OF_SUM;
        vf part[KEYS_OF_TILE];
        UNROLL_FOR (int i = 0; i < height; ++i) part[i] = vf_set1(0);
        for (int64_t g = first; g < end; ++g) {
            vf x[GROUP], w[WEIGHTS];
            UNROLL_FOR (int a = 0; a < GROUP; ++a) x[a] = vf_load(q + (g * GROUP + a) * ROWS);
            UNROLL_FOR (int a = 0; a < WEIGHTS; ++a) w[a] = vf_load(weights + (g * WEIGHTS + a) * ROWS);
            UNROLL_FOR (int i = 0; i < height; ++i)
                part[i] = vf_add(part[i], group_of_tanh(x, w, y + i * stride + g * GROUP));
        }
        UNROLL_FOR (int i = 0; i < height; ++i) sum[i] = vf_add(sum[i], part[i]);
    }
    UNROLL_FOR (int i = 0; i < height; ++i) {
        highest = vf_max(sum[i], highest);
        vf_store(s + i * ROWS, sum[i]);
    }
    vf_store(high, highest);
}

static inline int any_unsafe(const sdpa_input *in, const char *key_row)
{
    vf unsafe = vf_set1(0);
    for (int64_t a = 0; a < in->dim; a += VL) {
        const int count = in->dim - a < VL ? (int)(in->dim - a) : VL;
        unsafe = vf_max(unsafe, is_unsafe(read_chunk(key_row + a * in->key.column, in->key.column, count, &in->key)));
    }
    return !is_zero(unsafe);
}

/* sum of v tanh(x + y) as it stands. */
static vf plain_tanh(const sdpa_input *in, const sdpa_task *t, int v, const char *key_row)
{
    const real *weights = (const real *)t->scratch.feature_weights + v * VL;
    vf sum = vf_set1(0), x[VL];
    for (int64_t first = 0; first < in->dim; first += VL) {
        const int count = in->dim - first < VL ? (int)(in->dim - first) : VL;
        read_transposed(x, t->rows.query + v * VL, first * in->query.column, count, &in->query);
        for (int i = 0; i < count; ++i) {
            const int64_t a = first + i;
            const vf y = vf_set1(read_one(key_row + a * in->key.column, in->key.dtype));
            sum = vf_fma(vf_load(weights + (a / GROUP * WEIGHTS + a % GROUP) * ROWS), vf_tanh(vf_add(x[i], y)), sum);
        }
    }
    return vf_mul(vf_set1((real)-0.5), sum);
}

/* The scores of odd rows for odd keys again; `high` is found again from `before`. */
static void correct_odd_rows(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, int v, vf before)
{
    real odd[VL], *high = (real *)t->scratch.high + v * VL;
    vf highest = before;
    for (int i = 0; i < VL; ++i) odd[i] = (real)(t->scratch.odd_rows >> (v * VL + i) & 1);
    for (int key = g.begin; key < g.end; ++key) {
        int alone = key + 1;
        const char *key_row = key_address(in, t, key, &alone);
        real *s = scores_at(t, key, v);
        if (any_unsafe(in, key_row))
            vf_store(s, vf_select(vf_lt(vf_set1(0), vf_load(odd)), plain_tanh(in, t, v, key_row), vf_load(s)));
        highest = vf_max(vf_load(s), highest);
    }
    vf_store(high, highest);
}

/* s[key][rows] and high in a segment, as score_products. */
static void additive_products(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    const ptrdiff_t stride = keys.stride / (ptrdiff_t)sizeof(real);
    const real *y = (const real *)keys.at;
    for (int v = g.first_vector; v < g.end_vector; ++v) {
        const real *q = (const real *)t->scratch.q + v * VL,
                   *weights = (const real *)t->scratch.feature_weights + v * VL;
        real *high = (real *)t->scratch.high + v * VL;
        const vf before = vf_load(high);
        int key = g.begin;
#define TILE_OF(height)                                                                                                \
    additive_tile(height, groups_of(in), y + key * stride, stride, q, weights, scores_at(t, key, v), high)
        for (; key + KEYS_OF_TILE <= g.end; key += KEYS_OF_TILE) TILE_OF(KEYS_OF_TILE);
        for (; key < g.end; ++key) TILE_OF(1);
#undef TILE_OF
        if (t->scratch.odd_rows >> (v * VL) << (64 - VL)) correct_odd_rows(in, t, g, v, before);
    }
}

#endif
