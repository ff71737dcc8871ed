/* Few rows of bfloat16 where the CPU multiplies pairs: the same interface as few_singles.h.  Nothing is widened: K is
 * multiplied by pairs of features as it lies, and V by pairs of keys, rows of which are interleaved in registers.  So a
 * key of 128 features costs four rows 32 multiply-adds and 8 loads instead of 64 and 16 with as many conversions.
 *
 *     q[row][D/2]           pairs of features      K   as it lies
 *     s[keys/2][places]     pairs of weights,      V   rows 2j and 2j + 1, taken as (v00 v10) (v01 v11) ...
 *                           rounded to bfloat16
 *
 * The CPU takes denormals for 0.  Where that could be seen, rows are computed without pairs: those whose query holds
 * denormals or very large numbers (score_odd_queries), and those whose sums over a block are as small as what may have
 * been lost (mend_small_sums).  Both are properties of the row, so that its bits do not depend on other rows. */
#ifndef SDPA_FORWARD_FEW_PAIRS_H
#define SDPA_FORWARD_FEW_PAIRS_H

#include "forward/bfloat16.h"
#include "forward/runs.h"

#include <math.h>

enum { VALUES_IN_CACHE = 64, HALVES = 2 * VL }; /* numbers in a vector */

#define WITH_DTYPE(dtype, call) call(SDPA_BFLOAT16)

/* Numbers from `at` on, of which a row has `left`: 0 behind its end. */
static inline ALWAYS_INLINE halves some_halves(const char *at, int64_t left)
{
    return left >= HALVES ? halves_load(at) : halves_load_some(at, left > 0 ? left : 0);
}

/* ---- rows of K and V */

static int copies(const sdpa_input *in) { return in->key.column != 2 || (in->value.data && in->value.column != 2); }

/* Where they lie; in pages where `at` is NULL.  Numbers that are not side by side are copied, and so are values in
 * pages of an odd number of rows, which part pairs. */
static operand read_rows(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *rows_at,
                         int64_t width, int copied)
{
    enum { MORE = 32 };
    const int64_t left = t->rows.keys.end - t->block.first;
    const int wanted = left < t->block.count + MORE ? (int)left : t->block.count + MORE;
    int end = wanted;
    if (!copied) {
        const char *at = row_address(in, array, rows_at, t, 0, &end);
        return (operand){end < wanted ? NULL : at, array->row, SDPA_BFLOAT16};
    }
    char *copy = copied == 1 ? t->scratch.key_copy : t->scratch.value_copy;
    const ptrdiff_t stride = whole_vectors(steps(width)) * (ptrdiff_t)sizeof(real);
    if (must_copy(t, &t->scratch.copied[copied - 1]))
        for (int row = 0; row < t->block.count; ++row) {
            int alone = row + 1;
            copy_pair_row(row_address(in, array, rows_at, t, row, &alone), array, width, copy + row * stride);
        }
    return (operand){copy, stride, SDPA_BFLOAT16};
}
static operand read_keys(const sdpa_input *in, const sdpa_task *t)
{
    return read_rows(in, t, &in->key, t->rows.keys_at, in->dim, in->key.column != 2);
}
static operand copy_values(const sdpa_input *in, sdpa_task *t)
{
    const operand copy = read_rows(in, t, &in->value, t->rows.values_at, in->value_dim, 2);
    halves size = halves_zero();
    for (int64_t i = 0; i < t->block.count * copy.stride; i += HALVES * 2)
        size = halves_max_distance(size, halves_load(copy.at + i), 0);
    t->scratch.odd_values = halves_any_from(size, (uint16_t)(2 * INFINITE)) ? NOT_FINITE : 0;
    return copy;
}
static int64_t copied_numbers(const sdpa_input *in, const sdpa_task *t)
{
    return t->block.count * whole_vectors(steps(in->value_dim)) * 2;
}
static operand read_values(const sdpa_input *in, sdpa_task *t)
{
    const int parted = in->pages && in->page_size % 2;
    return read_rows(in, t, &in->value, t->rows.values_at, in->value_dim, in->value.column != 2 || parted ? 2 : 0);
}

/* ---- Q */

static inline int64_t query_stride(const sdpa_input *in) { return whole_vectors(steps(in->dim)); }
static inline int64_t summed_features(const sdpa_input *in) { return in->dim; }

static void load_query(const sdpa_input *in, sdpa_task *t, int row)
{
    copy_pair_row(t->rows.query[row], &in->query, in->dim, (char *)((real *)t->scratch.q + row * query_stride(in)));
}

/* Rows are looked at one by one only where the whole holds something unusual; 0 is, for this test. */
static void find_odd_queries(const sdpa_input *in, sdpa_task *t)
{
    const char *q = t->scratch.q;
    halves distance = halves_zero();
    for (int64_t i = 0; i < t->rows.count * query_stride(in); i += VL)
        distance = halves_max_distance(distance, halves_load(q + i * 4), SMALLEST_NORMAL);
    t->scratch.odd_rows = 0;
    if (!halves_any_from(distance, 2 * (LARGE_QUERY - SMALLEST_NORMAL))) return;
    for (int row = 0; row < t->rows.count; ++row)
        if (is_odd_query(in, t->rows.query[row])) t->scratch.odd_rows |= (uint64_t)1 << row;
}

/* ---- scores */

static inline ALWAYS_INLINE void dot_step(const int keys, const int rows, int64_t d, int64_t left, int64_t stride,
                                          const char **at, ptrdiff_t key_stride, const real *q, vf *sum)
{
    vf query[VL];
    UNROLL_FOR (int row = 0; row < rows; ++row) query[row] = vf_load(q + row * stride + d / 2);
    UNROLL_FOR (int key = 0; key < keys; ++key) {
        const vf features = halves_as_pairs(some_halves(at[key / GROUP_ROWS] + key % GROUP_ROWS * key_stride, left));
        UNROLL_FOR (int row = 0; row < rows; ++row)
            sum[key * rows + row] = vf_dot_pairs(features, query[row], sum[key * rows + row]);
    }
}

/* sums[key * rows + row] = K[key] . q[row] over the features from `d` to `end`, for keys * rows <= VL pairs. */
static inline ALWAYS_INLINE vf dot_stretch(const int keys, const int rows, const int dtype, int64_t d, int64_t end,
                                           int64_t stride, row_run run, int first, const real *q)
{
    const char *at[GROUPS];
    lines_ahead ahead = keys_ahead(run, first, keys, d * 2);
    vf sum[VL];
    UNROLL_FOR (int i = 0; i < VL; ++i) sum[i] = vf_set1(0);
    find_groups(at, run, first, keys, d * 2);
    for (; d + HALVES <= end; d += HALVES) {
        dot_step(keys, rows, d, HALVES, stride, at, run.stride, q, sum);
        fetch_keys(&ahead, keys, d, dtype);
        move_groups(at, keys, HALVES * 2);
    }
    if (d < end) {
        dot_step(keys, rows, d, end - d, stride, at, run.stride, q, sum);
        fetch_keys(&ahead, keys, d, dtype);
    }
    return vf_sums(sum);
}

/* One number of a row of K, V or Q, widened. */
static inline float number_at(const char *row, int64_t i)
{
    return float_of_bits((uint32_t)read_bits(row + 2 * i) << 16);
}

/* Without pairs: s[key][row] for the rows that may not be multiplied in pairs. */
static NOINLINE void score_odd_queries(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    for (int key = g.begin; key < g.end; ++key) {
        int alone = key + 1;
        const char *at = keys.at ? keys.at + key * keys.stride : key_address(in, t, key, &alone);
        for (int row = 0; row < t->rows.count; ++row) {
            const char *q = (const char *)((real *)t->scratch.q + row * query_stride(in));
            float sum[VL] = {0};
            if (!(t->scratch.odd_rows >> row & 1)) continue;
            for (int64_t d = 0; d < in->dim; ++d) sum[d % VL] = fmaf(number_at(at, d), number_at(q, d), sum[d % VL]);
            for (int i = 1; i < VL; ++i) sum[0] += sum[i];
            scores_at(t, key, 0)[row] = sum[0];
        }
    }
}

/* ---- weights */

static inline real *pairs_at(const sdpa_task *t, int key) { return (real *)t->scratch.s + key / 2 * t->scratch.places; }
static inline const real *weights_at(const sdpa_task *t, const real *weights, int key)
{
    return weights + key / 2 * t->scratch.places;
}

/* Where the numbers of pairs lie in two vectors of s[key][places]. */
static inline halves places_of_pairs(int places)
{
    uint16_t at[HALVES];
    for (uint16_t i = 0; i < HALVES; ++i) { /* places are a power of 2; written so that compilers vectorise it */
        const uint16_t pair = i / 2, row = (uint16_t)(pair & (places - 1));
        at[i] = (uint16_t)(2 * (pair - row) + row + (i & 1) * places);
    }
    return halves_load((const char *)at);
}

/* The weights of the block, s[key][places] from its even first key on, become pairs of keys, in their place.  Returns
 * the sums of what is left of them: VL sums, each over every VL-th pair, so that their bits do not depend on `places`.
 * Nor do they on where the block begins, a multiple of VL keys: half of the sums change places with the other half. */
static inline ALWAYS_INLINE vf keep_block(const int places, const sdpa_task *t, sdpa_segment keys)
{
    const int count = (keys.end - keys.begin) * places;
    real *s = scores_at(t, keys.begin, 0), *to = pairs_at(t, keys.begin);
    const halves at = places_of_pairs(places);
    const vf ones = vf_set1(float_of_bits(0x3f803f80));
    real part[VL * VL]; /* [pair % VL][places] */
    vf sum[VL];
    int i = 0;
    for (int end = (count + VL - 1) / VL * VL; end % (2 * VL); ++end) s[end] = 0;
    UNROLL_FOR (int j = 0; j < places; ++j) sum[j] = vf_set1(0);
    for (; i + 2 * VL * places <= count; i += 2 * VL * places)
        UNROLL_FOR (int j = 0; j < places; ++j) {
            const real *two = s + i + j * 2 * VL;
            const vf pairs = vf_round_and_pair(vf_load(two), vf_load(two + VL), at);
            vf_store(to + i / 2 + j * VL, pairs);
            sum[j] = vf_dot_pairs(pairs, ones, sum[j]);
        }
    UNROLL_FOR (int j = 0; j < places; ++j) vf_store(part + j * VL, sum[j]);
    for (real *last = part; i < count; i += 2 * VL, last += VL) {
        const vf pairs = vf_round_and_pair(vf_load(s + i), vf_load(s + i + VL), at);
        vf_store(to + i / 2, pairs);
        vf_store(last, vf_dot_pairs(pairs, ones, vf_load(last)));
    }
    add_halves(places, part);
    return vf_load(part);
}

/* The weights of the block, divided by the lift of their rows. */
static void lower_weights(const sdpa_task *t)
{
    const sdpa_segment keys = t->block.of_vector[0];
    real lane[VL], *s = pairs_at(t, keys.begin);
    for (int i = 0; i < VL; ++i) lane[i] = 1 / ((real *)t->scratch.lift)[i % t->scratch.places];
    const vf factor = vf_load(lane);
    for (int64_t i = 0; i < steps(keys.end - keys.begin) * t->scratch.places; i += VL) {
        const vf pair = vf_load(s + i);
        vf_store(s + i, vf_round_pairs(vf_mul(vf_first(pair), factor), vf_mul(vf_second(pair), factor)));
    }
}

/* ---- the result */

/* Of a row of o. */
static inline int64_t output_width(int64_t value_dim) { return (value_dim + HALVES - 1) / HALVES * HALVES; }

/* sum[row] += the pair of weights of each row times the rows of V from `at` and, if it is there, the next. */
static inline ALWAYS_INLINE void output_step(const int rows, const int width, const int both, const char *at,
                                             ptrdiff_t stride, int64_t left, const real *weights, vf sum[6][16])
{
    vf value[16];
    UNROLL_FOR (int i = 0; i < width; ++i) {
        halves low = some_halves(at + i * HALVES * 2, left - i * HALVES);
        halves high = both ? some_halves(at + stride + i * HALVES * 2, left - i * HALVES) : halves_zero();
        LOADED_ONCE(low);
        LOADED_ONCE(high);
        value[2 * i] = halves_pairs_low(low, high);
        value[2 * i + 1] = halves_pairs_high(low, high);
    }
    UNROLL_FOR (int row = 0; row < rows; ++row) {
        const vf weight = vf_set1(weights[row]);
        UNROLL_FOR (int i = 0; i < 2 * width; ++i) sum[row][i] = vf_dot_pairs(value[i], weight, sum[row][i]);
    }
}

/* sums[row][features] += weights[key][row] * V[key][features] for the keys of a run and `width` vectors of features
 * from `e` on, of which a row has `left`. */
static inline ALWAYS_INLINE void output_tile(const int rows, const int width, int keys, row_run run, int64_t e,
                                             int64_t left, const real *weights, int places, real *sums,
                                             ptrdiff_t stride)
{
    const int bytes = width * HALVES * 2;
    const char *at = run.at + e * 2;
    lines_ahead ahead = values_ahead(run, keys, e * 2, bytes);
    vf sum[6][16];
    UNROLL_FOR (int row = 0; row < rows; ++row)
        UNROLL_FOR (int i = 0; i < 2 * width; ++i) sum[row][i] = vf_set1(0);
    for (; keys >= 2; keys -= 2) {
        output_step(rows, width, 1, at, run.stride, left, weights, sum);
        fetch_values(&ahead, bytes);
        fetch_values(&ahead, bytes);
        at += 2 * run.stride;
        weights += places;
    }
    if (keys) output_step(rows, width, 0, at, run.stride, left, weights, sum);
    UNROLL_FOR (int row = 0; row < rows; ++row)
        UNROLL_FOR (int i = 0; i < 2 * width; i += 2) {
            real *to = sums + row * stride + e + i * VL;
            vf_in_order(&sum[row][i], &sum[row][i + 1]);
            vf_store(to, vf_add(vf_load(to), sum[row][i]));
            vf_store(to + VL, vf_add(vf_load(to + VL), sum[row][i + 1]));
        }
}

static inline ALWAYS_INLINE void output_tiles(const int rows, const int dtype, int keys, row_run run, int64_t value_dim,
                                              const real *weights, int places, real *sums, int64_t stride)
{
    enum { MOST = 8 }; /* vectors of sums to a tile, of two lines of features */
    const int width = rows > 4 ? 2 : MOST / rows;
    int64_t e = 0;
    (void)dtype;
    for (; e + width * HALVES <= value_dim; e += width * HALVES)
        output_tile(rows, width, keys, run, e, width * HALVES, weights, places, sums, stride);
    for (; width > 4 && e + 4 * HALVES <= value_dim; e += 4 * HALVES)
        output_tile(rows, 4, keys, run, e, 4 * HALVES, weights, places, sums, stride);
    for (; width > 2 && e + 2 * HALVES <= value_dim; e += 2 * HALVES)
        output_tile(rows, 2, keys, run, e, 2 * HALVES, weights, places, sums, stride);
    for (; e + HALVES <= value_dim; e += HALVES)
        output_tile(rows, 1, keys, run, e, HALVES, weights, places, sums, stride);
    if (e < value_dim) output_tile(rows, 1, keys, run, e, value_dim - e, weights, places, sums, stride);
}

/* ---- what pairs took for 0 */

/* Sums this small may lack values whose products are denormal: what lacks is below 2**-126 for each key. */
#define SMALL_SUM 0x1p-80f

static int has_small_sums(const sdpa_input *in, const sdpa_task *t, int row, const real *weights, const real *sums)
{
    const sdpa_segment g = t->block.segment[0];
    int small = 0, weighs = 0;
    for (int64_t e = 0; e < in->value_dim; ++e) small |= fabsf(sums[e]) < SMALL_SUM;
    if (!small) return 0;
    for (int key = g.begin; key < g.end; key += 2) weighs |= weights_at(t, weights, key)[row] != 0;
    return weighs;
}

static const char *value_row(const sdpa_input *in, const sdpa_task *t, operand values, int key)
{
    int alone = key + 1;
    return values.at ? values.at + key * values.stride : value_address(in, t, key, &alone);
}

static int has_small_values(const sdpa_input *in, const sdpa_task *t, operand values)
{
    const sdpa_segment g = t->block.segment[0];
    halves distance = halves_zero();
    for (int key = g.begin; key < g.end; ++key) {
        const char *at = value_row(in, t, values, key);
        for (int64_t e = 0; e < in->value_dim; e += HALVES)
            distance = halves_max_distance(distance, some_halves(at + 2 * e, in->value_dim - e), SMALL_VALUE);
    }
    return halves_any_from(distance, (uint16_t)(2 - 2 * SMALL_VALUE)); /* 0 itself is 2 below that */
}

static void sum_without_pairs(const sdpa_input *in, const sdpa_task *t, operand values, int row, const real *weights,
                              real *sums)
{
    const sdpa_segment g = t->block.segment[0];
    memset(sums, 0, (size_t)in->value_dim * sizeof(real));
    for (int key = g.begin; key < g.end; ++key) {
        const char *at = value_row(in, t, values, key);
        const float weight = number_at((const char *)&weights_at(t, weights, key)[row], key % 2);
        for (int64_t e = 0; e < in->value_dim; ++e) sums[e] = fmaf(weight, number_at(at, e), sums[e]);
    }
}

static NOINLINE void mend_small_sums(const sdpa_input *in, const sdpa_task *t, operand values, const real *weights,
                                     real *sums)
{
    const int64_t width = output_width(in->value_dim);
    int looked = 0;
    for (int row = 0; row < t->rows.count; ++row, sums += width) {
        if (!has_small_sums(in, t, row, weights, sums)) continue;
        if (!looked && !has_small_values(in, t, values)) return;
        looked = 1;
        sum_without_pairs(in, t, values, row, weights, sums);
    }
}

#endif
