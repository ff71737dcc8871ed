/* Few rows: the tiles of both products, number by number.  The same interface as few_pairs.h. */
#ifndef SDPA_FORWARD_FEW_SINGLES_H
#define SDPA_FORWARD_FEW_SINGLES_H

#include "memory/write.h"
#include "forward/runs.h"
#include "forward/singles.h"

/* So many values go through all rows while they are in the first-level cache. */
enum { VALUES_IN_CACHE = 32 };

/* VL numbers from `at` on, where row `key` of the run has its column d; times their scale if they have one. */
static inline ALWAYS_INLINE vf read_scaled(const char *at, row_run run, int key, int64_t d, const int dtype)
{
    const vf x = read_adjacent(at, dtype);
    if (dtype != SDPA_INT8) return x;
    float scale;
    memcpy(&scale, run.scales + key * run.scale_stride + (d >> run.group_shift) * 4, sizeof scale);
    return vf_mul(x, vf_set1(scale));
}

/* Expands `call(dtype)` with a constant: what the rows of K or V hold. */
#define WITH_DTYPE(dtype, call)                                                                                        \
    do {                                                                                                               \
        if ((dtype) == SDPA_FLOAT16)                                                                                   \
            call(SDPA_FLOAT16);                                                                                        \
        else if ((dtype) == SDPA_BFLOAT16)                                                                             \
            call(SDPA_BFLOAT16);                                                                                       \
        else if ((dtype) == SDPA_INT8)                                                                                 \
            call(SDPA_INT8);                                                                                           \
        else if ((dtype) == SDPA_FLOAT32)                                                                              \
            call(SDPA_FLOAT32);                                                                                        \
        else if (sizeof(real) == sizeof(double))                                                                       \
            call(SDPA_FLOAT64);                                                                                        \
    } while (0)

/* sums[key * rows + row] = K[key] . q[row] over the features from `d` to `end`, for keys * rows <= VL pairs. */
static inline ALWAYS_INLINE vf dot_stretch(const int keys, const int rows, const int dtype, int64_t d, int64_t end,
                                           int64_t stride, row_run run, int first, const real *q)
{
    const char *at[GROUPS];
    lines_ahead ahead = keys_ahead(run, first, keys, d * size_of(dtype));
    vf sum[VL];
    UNROLL_FOR (int i = 0; i < VL; ++i) sum[i] = vf_set1(0);
    find_groups(at, run, first, keys, d * size_of(dtype));
    for (; d < end; d += VL) {
        vf query[VL];
        UNROLL_FOR (int row = 0; row < rows; ++row) query[row] = vf_load(q + row * stride + d);
        UNROLL_FOR (int key = 0; key < keys; ++key) {
            const char *from = at[key / GROUP_ROWS] + key % GROUP_ROWS * run.stride;
            const vf feature = read_scaled(from, run, first + key, d, dtype);
            UNROLL_FOR (int row = 0; row < rows; ++row)
                sum[key * rows + row] = vf_fma(feature, query[row], sum[key * rows + row]);
        }
        fetch_keys(&ahead, keys, d, dtype);
        move_groups(at, keys, VL * size_of(dtype));
    }
    return vf_sums(sum);
}

/* ---- Q */

static inline int64_t query_stride(const sdpa_input *in) { return whole_vectors(in->dim); }
static inline int64_t summed_features(const sdpa_input *in) { return whole_vectors(in->dim); }

static void load_query(const sdpa_input *in, sdpa_task *t, int row)
{
    read_row(t->rows.query[row], &in->query, in->dim, (real *)t->scratch.q + row * query_stride(in));
}
static void find_odd_queries(const sdpa_input *in, sdpa_task *t) { (void)in, (void)t; }
static void score_odd_queries(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    (void)in, (void)t, (void)g, (void)keys;
}

/* ---- the result */

/* Of a row of o. */
static inline int64_t output_width(int64_t value_dim) { return whole_vectors(value_dim); }

static inline const real *weights_at(const sdpa_task *t, const real *weights, int key)
{
    return weights + score_index(t, key, 0);
}

/* sum[row][features] += s[key][row] * V[key][features] for the keys of a run and `width` vectors of features from `e`
 * on. */
static inline ALWAYS_INLINE void output_tile(const int rows, const int width, const int dtype, int keys, row_run run,
                                             int64_t e, const real *s, int places, real *sums, ptrdiff_t stride)
{
    const int bytes = width * VL * size_of(dtype);
    const char *at = run.at + e * size_of(dtype);
    lines_ahead ahead = values_ahead(run, keys, e * size_of(dtype), bytes);
    vf sum[6][8];
    UNROLL_FOR (int row = 0; row < rows; ++row)
        UNROLL_FOR (int i = 0; i < width; ++i) sum[row][i] = vf_load(sums + row * stride + e + i * VL);
    for (; keys > 0; --keys) {
        vf value[8];
        UNROLL_FOR (int i = 0; i < width; ++i)
            value[i] = read_scaled(at + i * VL * size_of(dtype), run, 0, e + i * VL, dtype);
        fetch_values(&ahead, bytes);
        UNROLL_FOR (int row = 0; row < rows; ++row) {
            const vf weight = vf_set1(s[row]);
            UNROLL_FOR (int i = 0; i < width; ++i) sum[row][i] = vf_fma(weight, value[i], sum[row][i]);
        }
        at += run.stride;
        if (dtype == SDPA_INT8) run.scales += run.scale_stride;
        s += places;
    }
    UNROLL_FOR (int row = 0; row < rows; ++row)
        UNROLL_FOR (int i = 0; i < width; ++i) vf_store(sums + row * stride + e + i * VL, sum[row][i]);
}

/* Sums of a tile: so many that loads of values and additions overlap, and that registers suffice. */
enum { FEW_SUMS = TILE >= 24 ? 16 : TILE >= 12 ? 8 : 4 };

static inline ALWAYS_INLINE void output_tiles(const int rows, const int dtype, int keys, row_run run, int64_t value_dim,
                                              const real *s, int places, real *sums, int64_t end)
{
    (void)value_dim;
    const int width = rows > 4 ? 4 : FEW_SUMS / rows < 8 ? FEW_SUMS / rows : 8;
    int64_t e = 0;
    for (; e + width * VL <= end; e += width * VL) output_tile(rows, width, dtype, keys, run, e, s, places, sums, end);
    /* One or two rows of one vector would wait for each addition. */
    for (; width > 4 && e + 4 * VL <= end; e += 4 * VL) output_tile(rows, 4, dtype, keys, run, e, s, places, sums, end);
    for (; width > 4 && e + 2 * VL <= end; e += 2 * VL) output_tile(rows, 2, dtype, keys, run, e, s, places, sums, end);
    for (; e < end; e += VL) output_tile(rows, 1, dtype, keys, run, e, s, places, sums, end);
}

/* The weights of the block, divided by the lift of their rows. */
static void lower_weights(const sdpa_task *t)
{
    const sdpa_segment keys = t->block.of_vector[0];
    real lane[VL], *s = scores_at(t, keys.begin, 0);
    for (int i = 0; i < VL; ++i) lane[i] = 1 / ((real *)t->scratch.lift)[i % t->scratch.places];
    const vf factor = vf_load(lane);
    for (int i = 0; i < (keys.end - keys.begin) * t->scratch.places; i += VL)
        vf_store(s + i, vf_mul(vf_load(s + i), factor));
}

/* The weights of the block stay what they are. */
static inline ALWAYS_INLINE vf keep_block(const int places, const sdpa_task *t, sdpa_segment keys)
{
    (void)places, (void)t, (void)keys;
    return vf_set1(0);
}
static void mend_small_sums(const sdpa_input *in, const sdpa_task *t, operand values, const real *weights, real *sums)
{
    (void)in, (void)t, (void)values, (void)weights, (void)sums;
}

#endif
