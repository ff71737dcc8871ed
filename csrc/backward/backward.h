/* Gradients.  With P = exp(S - lse), the weights, and the gradient G of the result, of one row
 *
 *     dV = P^T G      dP = G V^T      dS = P (dP - delta)      dQ = scale dS K      dK = scale dS^T Q
 *
 * where delta = sum of P dP over all keys = G . out: softmax takes the mean out of what it lets through.  A gradient
 * that comes in through the lse, whose derivative is P, is added to dS: it is taken from delta.
 *
 * Five products, of which S and dP are there a block at a time only.  S, dP and dQ have rows in lanes, as in the
 * forward pass: dP is made like S with V for K and G for Q, dQ like the result with K for V and dS for P.  dK and dV
 * are sums over rows, so lanes are features there:
 *
 *     slope[key][rows]   one number is broadcast              query_rows[row][features]   vectors
 *
 * Both P and dS are exactly 0 where a key is hidden, whatever it holds. */
#ifndef SDPA_BACKWARD_BACKWARD_H
#define SDPA_BACKWARD_BACKWARD_H

#include "forward/care.h"
#include "backward/gather.h"

/* s - lse is in the unit of s (see scores.h); a row that saw nothing gets weights 0 from inf. */
static void load_lse(const sdpa_input *in, const sdpa_backward_task *b)
{
    const sdpa_rows *rows = &b->task.rows;
    const vf unit = vf_set1(scale_in_exponent(in) ? narrowed(in->scale) : 1), inf = vf_set1((real)INFINITY);
    real *lse = b->scratch.lse;
    for (int row = 0; row < rows->vectors * VL; ++row) memcpy(&lse[row], rows->lse[row], sizeof(real));
    for (int row = 0; row < rows->vectors * VL; row += VL) {
        const vf x = vf_div(vf_load(lse + row), unit);
        vf_store(lse + row, vf_select(vf_eq(x, vf_sub(vf_set1(0), inf)), inf, x));
    }
}

/* grad_out . out of one row, as a vector whose lanes are still to be summed. */
static inline vf row_delta(const sdpa_backward_input *in, const sdpa_backward_task *b, int row)
{
    const sdpa_array *g = &in->grad_out, *o = &in->forward.out;
    vf sum = vf_set1(0);
    for (int64_t e = 0; e < in->forward.value_dim; e += VL) {
        const int count = in->forward.value_dim - e < VL ? (int)(in->forward.value_dim - e) : VL;
        sum = vf_fma(read_chunk(b->rows.grad_out[row] + e * g->column, g->column, count, g),
                     read_chunk(b->task.rows.out[row] + e * o->column, o->column, count, o), sum);
    }
    return sum;
}

static void load_delta(const sdpa_backward_input *in, const sdpa_backward_task *b)
{
    const sdpa_rows *rows = &b->task.rows;
    real *delta = b->scratch.delta;
    for (int v = 0; v < rows->vectors; ++v) {
        vf sum[VL];
        for (int i = 0; i < VL; ++i) sum[i] = row_delta(in, b, v * VL + i);
        vf_store(delta + v * VL, vf_sums(sum));
    }
    for (int row = 0; in->grad_lse.data && row < rows->vectors * VL; ++row)
        delta[row] -= read_one(b->rows.grad_lse[row], in->grad_lse.dtype);
    for (int row = 0; in->delta.data && row < rows->count; ++row)
        write_one(b->rows.delta[row], in->delta.dtype, delta[row]);
}

static void begin_backward(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    sdpa_task *t = &b->task;
    extremes unused = no_extremes();
    real *ones = t->scratch.shrink;
    load_queries(&in->forward, t);
    load_columns(&t->rows, &in->grad_out, b->rows.grad_out, in->forward.value_dim, b->scratch.g, &unused);
    if (b->scratch.key_sums.at) {
        copy_task_rows(&t->rows, &in->forward.query, t->rows.query, in->forward.dim, query_factor(&in->forward),
                       b->scratch.query_rows);
        b->scratch.poisoned =
            copy_task_rows(&t->rows, &in->grad_out, b->rows.grad_out, in->forward.value_dim, 1, b->scratch.grad_rows);
    }
    load_lse(&in->forward, b);
    load_delta(in, b);
    for (int row = 0; row < t->rows.vectors * VL; ++row) ones[row] = 1;
    t->scratch.started = 0;
}

/* ---- s = exp(s - lse), slope = s (V g - delta) */

static inline real *slopes_at(const sdpa_backward_task *b, int key, int v)
{
    return (real *)b->scratch.slope + (ptrdiff_t)key * ROWS + v * VL;
}

/* From scores and dP to weights and slopes, for `count` keys from `key` on; `capped`: slopes of the products, not of
 * the capped scores. */
static inline ALWAYS_INLINE void find_slopes(const sdpa_backward_task *b, int key, int v, const int count,
                                             const int capped, vf factors, vf floor, vf *weight, vf *slope)
{
    const vf lse = vf_load((real *)b->scratch.lse + v * VL), delta = vf_load((real *)b->scratch.delta + v * VL),
             zero = vf_set1(0);
    vm hidden[4];
    UNROLL_FOR (int i = 0; i < count; ++i) {
        const vf s = vf_load(scores_at(&b->task, key + i, v));
        hidden[i] = vf_eq(s, vf_set1(-(real)INFINITY));
        /* s - lse, but no more than 0, which the rounding of large scores may exceed; NaN stays. */
        weight[i] = vf_sub(zero, vf_max(zero, vf_sub(lse, s)));
    }
    exp_all(weight, count, factors, floor);
    UNROLL_FOR (int i = 0; i < count; ++i) {
        vf change = vf_sub(vf_load(slopes_at(b, key + i, v)), delta);
        if (capped)
            change = vf_mul(change, vf_load((real *)b->task.scratch.cap_slope + (ptrdiff_t)(key + i) * ROWS + v * VL));
        weight[i] = vf_select(hidden[i], zero, weight[i]); /* also beside NaN */
        slope[i] = vf_select(hidden[i], zero, vf_mul(weight[i], change));
    }
}

/* The weights and slopes of vector v. */
static inline ALWAYS_INLINE void slopes_of_vector(const sdpa_input *in, const sdpa_backward_task *b, int v,
                                                  const int capped)
{
    const real factor = exponent_factor(in);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    const sdpa_segment keys = b->task.block.of_vector[v];
    int key = keys.begin;
    for (; key + 4 <= keys.end; key += 4) {
        vf weight[4], slope[4];
        find_slopes(b, key, v, 4, capped, factors, floor, weight, slope);
        keep_slopes(b, key, v, weight, slope, 4);
    }
    for (; key < keys.end; key += STEP) { /* what is left; half a step is filled up with 0 */
        vf weight[STEP], slope[STEP];
        UNROLL_FOR (int i = 0; i < STEP; ++i) {
            weight[i] = slope[i] = vf_set1(0);
            if (key + i < keys.end) find_slopes(b, key + i, v, 1, capped, factors, floor, &weight[i], &slope[i]);
        }
        keep_slopes(b, key, v, weight, slope, STEP);
    }
}

static void value_products(const sdpa_input *in, sdpa_backward_task *b)
{
    sdpa_task *t = &b->task;
    const operand values = read_values_across(in, t);
    real unused[ROWS] = {0};
    for (int i = 0; i < t->block.segments; ++i)
        segment_products(t->block.segment[i], values, in->value_dim, b->scratch.g, b->scratch.slope, unused, NULL,
                         NULL);
}

static void score_gradients(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    value_products(&in->forward, b);
    for (int v = 0; v < b->task.rows.vectors; ++v) {
        if (b->task.scratch.cap_slope)
            slopes_of_vector(&in->forward, b, v, 1);
        else
            slopes_of_vector(&in->forward, b, v, 0);
    }
#if TILES
    fill_up_slopes(b);
#endif
}

/* ---- o = o + slope K */

static void query_gradient(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    sdpa_task *t = &b->task;
    weighted_sums(t, read_keys_along(&in->forward, b), in->forward.dim, b->scratch.key_slope, t->scratch.o,
                  t->scratch.started ? t->scratch.shrink : NULL, NULL);
    t->scratch.started = 1;
}

static void write_query_gradient(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    const sdpa_task *t = &b->task;
    const int64_t dim = in->forward.dim;
    const vf scale = vf_set1(narrowed(in->forward.scale));
    if (!t->scratch.started) memset(t->scratch.o, 0, (size_t)dim * ROWS * sizeof(real));
    for (int v = 0; v < t->rows.vectors; ++v) vf_store((real *)t->scratch.shrink + v * VL, scale);
    store_transposed(&in->grad_query, &t->rows, b->rows.grad_query, t->scratch.o, 0, dim, t->scratch.shrink);
    release_tiles();
}

/* ---- key_sums = key_sums + slope^T Q, value_sums = value_sums + s^T grad_out */

/* sums[key][features] += weight * x for VL `vectors` of features of one row, whose finite numbers are 0 in x. */
static inline ALWAYS_INLINE void add_poisoned_features(const int vectors, const sdpa_backward_task *b, int row,
                                                       const vf *x, real *sums, ptrdiff_t stride)
{
    const sdpa_segment keys = b->task.block.of_vector[row / VL];
    for (int key = keys.begin; key < keys.end; ++key) {
        if (row_slope_at(b, key, row) == 0) continue;
        const vf weight = vf_set1(row_weight_at(&b->task, key, row));
        UNROLL_FOR (int i = 0; i < vectors; ++i) {
            real *at = sums + key * stride + i * VL;
            const vf sum = vf_load(at);
            vf_store(at, vf_select(vf_eq(x[i], vf_set1(0)), sum, vf_fma(weight, x[i], sum)));
        }
    }
}

/* Where grad_out holds NaN or inf, the keys that see it get weight times it: those whose slope is not 0, which it is
 * where they are hidden, but not beside such a number. */
static void add_poisoned_rows(const sdpa_backward_input *in, const sdpa_backward_task *b)
{
    enum { AT_ONCE = 4 };
    const sdpa_array *grad = &in->grad_out;
    const sdpa_sums *to = &b->scratch.value_sums;
    for (int row = 0; row < b->task.rows.count; ++row) {
        if (!(b->scratch.poisoned >> row & 1)) continue;
        for (int64_t e = 0, count; e < in->forward.value_dim; e += count * VL) {
            vf x[AT_ONCE];
            for (count = 0; count < AT_ONCE && e + count * VL < in->forward.value_dim; ++count) {
                const int64_t from = e + count * VL, left = in->forward.value_dim - from;
                const vf all = read_chunk(b->rows.grad_out[row] + from * grad->column, grad->column,
                                          left < VL ? (int)left : VL, grad);
                x[count] = vf_select(is_finite(all), vf_set1(0), all);
            }
            real *sums = (real *)to->at + (b->task.block.first - to->keys.begin) * to->stride + e;
            if (count == AT_ONCE)
                add_poisoned_features(AT_ONCE, b, row, x, sums, to->stride);
            else
                for (int i = 0; i < count; ++i) add_poisoned_features(1, b, row, x + i, sums + i * VL, to->stride);
        }
    }
}

static void clear_sums(const sdpa_sums *sums, int64_t key, int64_t keys)
{
    real *at = (real *)sums->at + (key - sums->keys.begin) * sums->stride;
    for (; keys > 0; --keys, at += sums->stride) memset(at, 0, (size_t)whole_vectors(sums->width) * sizeof(real));
}

/* Where the sums of the block hold nothing: whether all of them are about to be written; else they become 0. */
static int is_first(const sdpa_block *block, const sdpa_backward_scratch *scratch)
{
    const sdpa_span keys = scratch->key_sums.keys;
    char *summed = scratch->summed + (block->first - keys.begin) / BLOCK_KEYS;
    const int64_t end = keys.end - block->first < BLOCK_KEYS ? keys.end : block->first + BLOCK_KEYS;
    if (*summed) return 0;
    *summed = 1;
    if (block->segments == 1 && block->segment[0].begin == 0 && block->first + block->segment[0].end == end) return 1;
    clear_sums(&scratch->key_sums, block->first, end - block->first);
    clear_sums(&scratch->value_sums, block->first, end - block->first);
    return 0;
}

static void key_gradients(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    const sdpa_task *t = &b->task;
    const int first = is_first(&t->block, &b->scratch);
    for (int i = 0; i < t->block.segments; ++i) {
        gather(t, t->block.segment[i], t->scratch.s, b->scratch.grad_rows, first, &b->scratch.value_sums);
        gather(t, t->block.segment[i], b->scratch.slope, b->scratch.query_rows, first, &b->scratch.key_sums);
    }
    if (b->scratch.poisoned) add_poisoned_rows(in, b);
}

/* Where they were not summed in the result itself. */
static void write_sums(const sdpa_array *result, const sdpa_sums *sums, double factor)
{
    const int64_t width = sums->width;
    const vf factors = vf_set1(narrowed(factor));
    const real *from = sums->at;
    char *at = sums->result + sums->keys.begin * result->row;
    if (at == sums->at) return;
    for (int64_t key = sums->keys.begin; key < sums->keys.end; ++key, at += result->row, from += sums->stride)
        for (int64_t i = 0; i < width; i += VL)
            write_chunk(at + i * result->column, result->column, width - i < VL ? (int)(width - i) : VL, result,
                        vf_mul(vf_load(from + i), factors));
}

static void write_key_gradients(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    const sdpa_span keys = b->scratch.key_sums.keys;
    sdpa_block unseen = {.first = keys.begin}; /* of which no segment is seen */
    for (; unseen.first < keys.end; unseen.first += BLOCK_KEYS) is_first(&unseen, &b->scratch);
    write_sums(&in->grad_key, &b->scratch.key_sums, key_factor(&in->forward));
    write_sums(&in->grad_value, &b->scratch.value_sums, 1);
    release_tiles();
}

/* ---- grad_bias = grad_bias + slope */

/* Of one row and `count` keys.  What the bias was broadcast along is summed here: the rows or columns are the same.
 * Where all keys share a number they are summed by vectors first: one long chain of equal weights drifts (35 roundings
 * for 127 keys). */
static inline void add_to_bias(const sdpa_array *bias, char *row_at, int64_t key, int count, vf slope)
{
    real *to = (real *)(row_at + key * bias->column), lane[VL];
    const ptrdiff_t stride = bias->column / (ptrdiff_t)sizeof(real);
    if (stride == 1 && count == VL) {
        vf_store(to, vf_add(vf_load(to), slope));
        return;
    }
    vf_store(lane, slope);
    if (stride == 0) {
        real sum = 0;
        for (int i = 0; i < count; ++i) sum += lane[i];
        *to += sum;
        return;
    }
    for (int i = 0; i < count; ++i) to[i * stride] += lane[i];
}

/* The slopes of the block, from [key][row] to [row][key]. */
static void add_slopes(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    const sdpa_task *t = &b->task;
    for (int v = 0; v < t->rows.vectors; ++v) {
        const int rows = t->rows.count - v * VL < VL ? t->rows.count - v * VL : VL;
        const sdpa_segment keys = t->block.of_vector[v];
        for (int key = keys.begin; key < keys.end; key += VL) {
            const int count = keys.end - key < VL ? keys.end - key : VL;
            vf slope[VL];
            for (int i = 0; i < VL; ++i) slope[i] = i < count ? vf_load(slopes_at(b, key + i, v)) : vf_set1(0);
            vf_transpose(slope);
            for (int row = 0; row < rows; ++row)
                add_to_bias(&in->grad_bias, b->rows.grad_bias[v * VL + row], t->block.first + key, count, slope[row]);
        }
    }
}

/* On its own, with slopes that are neither capped nor rounded. */
static void bias_gradient(const sdpa_backward_input *in, sdpa_backward_task *b)
{
    const sdpa_task *t = &b->task;
    const real factor = exponent_factor(&in->forward);
    const vf factors = vf_set1(factor), floor = vf_set1(lowest(factor));
    value_products(&in->forward, b);
    for (int v = 0; v < t->rows.vectors; ++v)
        for (int key = t->block.of_vector[v].begin; key < t->block.of_vector[v].end; ++key) {
            vf weight, slope;
            find_slopes(b, key, v, 1, 0, factors, floor, &weight, &slope);
            vf_store(slopes_at(b, key, v), slope);
        }
    add_slopes(in, b);
}

#endif
