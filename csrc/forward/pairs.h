/* What the products multiply, where Q, K and V are bfloat16 and the CPU multiplies pairs of them: the same interface as
 * singles.h.  A `real` of 32 bits in `q`, in K and V and in the weights is a pair of neighbours along the sum: of
 * features in q . k, of keys in weight . v.  So half as many multiply-adds, and the tiles of product.h stay.
 *
 *     q[D/2][rows]     pairs of features        K       as it lies: two features are the 32 bits to broadcast
 *     s[keys/2][rows]  pairs of weights,        V       rows interleaved by twos, once per block:
 *                      rounded to bfloat16              value_copy[keys/2][E]
 *
 * Where matrices are multiplied (tiles.h), rows of K that do not fill a tile are copied, and the copy of V is transposed:
 * value_copy[E][keys/2].
 *
 * The CPU takes denormals for 0.  What that could falsify is rare, and found here; multiples of these numbers, by a
 * power of 2, then go through the same product on their own:
 *   - denormals in rows of Q, and in K where such a row holds a large number (`odd_rows`, scores.h);
 *   - values so small that they, or their products, are denormal (`odd_values`, output.h).  The copy has 0 for them.
 * What remains: a product of weight and value below 2**-126 counts as 0, and a denormal times inf is NaN in scores. */
#ifndef SDPA_FORWARD_PAIRS_H
#define SDPA_FORWARD_PAIRS_H

#include "memory/pages.h"
#include "forward/bfloat16.h"

static inline vf vf_product(vf a, vf b, vf c) { return vf_dot_pairs(a, b, c); }

#define SMALL_VALUE_FACTOR 0x1p96f
#define DENORMAL_FACTOR 0x1p64f /* what becomes of denormals, times any number, does not overflow */
#define LEAST_PRODUCT 0x1p-36f  /* of such: the scale is below 2**20, so a score of 2**-80 */

/* ---- Q */

/* What is unusual about rows that were loaded: see find_odd_rows. */
typedef halves extremes;
static inline extremes no_extremes(void) { return halves_zero(); }

/* The lanes of a tile for rows of any layout, of which `count` features are left. */
static NOINLINE void read_any_pairs(vf *tile, char *const *row_at, ptrdiff_t offset, int count, const sdpa_array *array)
{
    for (int lane = 0; lane < VL; ++lane) {
        uint16_t part[2 * VL] = {0};
        for (int i = 0; i < count; ++i) part[i] = read_bits(row_at[lane] + offset + i * array->column);
        memcpy(&tile[lane], part, sizeof part);
    }
}

/* tile[pair] lane row, for VL rows and VL pairs from number `pair` on; features past `width` are 0. */
static inline ALWAYS_INLINE void read_columns(vf *tile, char *const *row_at, int64_t pair, int pairs, int64_t width,
                                              const sdpa_array *array, extremes *found)
{
    (void)pairs;
    const int64_t d = 2 * pair;
    const int count = width - d < 2 * VL ? (int)(width - d) : 2 * VL;
    const ptrdiff_t offset = d * array->column;
    vf any[VL]; /* in memory, where `tile` can stay in registers */
    if (count == 2 * VL && array->column == 2) {
        UNROLL_FOR (int lane = 0; lane < VL; ++lane) tile[lane] = vf_load((const real *)(row_at[lane] + offset));
    } else {
        read_any_pairs(any, row_at, offset, count, array);
        UNROLL_FOR (int lane = 0; lane < VL; ++lane) tile[lane] = any[lane];
    }
    UNROLL_FOR (int lane = 0; lane < VL; ++lane)
        *found = halves_max_distance(*found, pairs_as_halves(tile[lane]), SMALLEST_NORMAL);
    vf_transpose(tile);
}

/* Denormals times DENORMAL_FACTOR, and 0 for all other numbers.  Returns whether there were any. */
static int enlarge_denormals(const char *from, char *to, int64_t count)
{
    uint16_t any = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t bits = read_bits(from + 2 * i), size = bits & 0x7fff;
        const uint16_t is_denormal = size < SMALLEST_NORMAL ? 0xffff : 0;
        const float larger = (float)(int32_t)size * (DENORMAL_FACTOR * 0x1p-133f);
        write_bits(to + 2 * i, (uint16_t)((bits & 0x8000) | bits_of_float(larger) >> 16) & is_denormal);
        any |= size & is_denormal;
    }
    return any != 0;
}

/* Behind the queries, which take no more than half of their room. */
static real *denormal_queries(const sdpa_input *in, const sdpa_task *t)
{
    return (real *)t->scratch.q + whole_vectors(steps(in->dim)) * ROWS;
}

/* Moves them there: where they are left, some CPUs take three times as long for a product. */
static void part_denormal_queries(const sdpa_input *in, const sdpa_task *t)
{
    const int64_t count = (TILES ? whole_vectors(steps(in->dim)) : steps(in->dim)) * ROWS * 2;
    char *q = t->scratch.q;
    if (!enlarge_denormals(q, (char *)denormal_queries(in, t), count)) return;
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t bits = read_bits(q + 2 * i);
        write_bits(q + 2 * i, (bits & 0x7fff) < SMALLEST_NORMAL ? 0 : bits);
    }
}

/* Rows are looked at one by one only where the whole holds something unusual; 0 is, for this test. */
static void find_odd_rows(const sdpa_input *in, sdpa_task *t, extremes found)
{
    t->scratch.odd_rows = 0;
    if (!halves_any_from(found, 2 * (LARGE_QUERY - SMALLEST_NORMAL))) return;
    for (int row = 0; row < t->rows.count; ++row)
        if (is_odd_query(in, t->rows.query[row])) t->scratch.odd_rows |= (uint64_t)1 << row;
    if (t->scratch.odd_rows) part_denormal_queries(in, t);
}

/* ---- K */

static int pairs_in_place(const sdpa_array *array, const char *at, int64_t width)
{
    return array->column == 2 && width % 2 == 0 && array->row % 4 == 0 && (uintptr_t)at % 4 == 0;
}

static void copy_pairs(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *rows_at,
                       int64_t width, char *copy)
{
    for (int row = 0; row < t->block.count; ++row, copy += whole_vectors(steps(width)) * 4) {
        int end = row + 1;
        copy_pair_row(row_address(in, array, rows_at, t, row, &end), array, width, copy);
    }
}

/* Rows of K, or of V, in pairs of features: as they lie, where that can be. */
static operand read_rows_across(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *rows_at,
                                int64_t width, sdpa_copied *copied, void *copy)
{
    int end = t->block.count;
    const char *at = row_address(in, array, rows_at, t, 0, &end);
    const int whole = !TILES || (width % (2 * VL) == 0 && t->block.count % VL == 0);
    if (whole && end == t->block.count && pairs_in_place(array, at, width))
        return (operand){at, array->row, SDPA_BFLOAT16};
    if (must_copy(t, copied)) copy_pairs(in, t, array, rows_at, width, copy);
    return (operand){copy, whole_vectors(steps(width)) * 4, SDPA_BFLOAT16};
}
static operand read_keys(const sdpa_input *in, const sdpa_task *t)
{
    return read_rows_across(in, t, &in->key, t->rows.keys_at, in->dim, &t->scratch.copied[0], t->scratch.key_copy);
}

/* So many keys have room in a copy. */
static inline int64_t copied_keys(const sdpa_input *in)
{
    return BLOCK_KEYS < in->kv_len ? BLOCK_KEYS : (in->kv_len + 2 * VL - 1) / (2 * VL) * (2 * VL);
}

/* Behind the copies of keys, which take no more than half of their room; nowhere where there are none. */
static operand denormal_keys(const sdpa_input *in, const sdpa_task *t, operand keys)
{
    const int64_t stride = whole_vectors(steps(in->dim)) * 4;
    char *copy = (char *)t->scratch.key_copy + copied_keys(in) * stride;
    int any = 0;
    for (int key = 0; key < t->block.count; ++key)
        any |= enlarge_denormals(keys.at + key * keys.stride, copy + key * stride,
                                 TILES ? stride / 2 : 2 * steps(in->dim));
    return (operand){any ? copy : NULL, stride, SDPA_BFLOAT16};
}

/* ---- rows and weights of linear.h.  Where they hold denormals these count as 0. */

/* Tiles are always read from a copy: of whole tiles, and of rows an odd number of cache lines apart, so that those of a
 * tile do not share sets of the first-level cache. */
static operand read_linear(const sdpa_linear *l, int64_t row, int rows, real *copy, int copied)
{
    const char *at = l->x.data + row * l->x.row;
    if (!TILES && pairs_in_place(&l->x, at, l->ins)) return (operand){at, l->x.row, SDPA_BFLOAT16};
    const int64_t size = TILES ? whole_vectors(steps(l->ins)) | VL : whole_vectors(steps(l->ins));
    for (int i = 0; i < rows && !copied; ++i)
        copy_pair_row(at + i * l->x.row, &l->x, l->ins, (char *)(copy + i * size));
    return (operand){(const char *)copy, size * 4, SDPA_BFLOAT16};
}
static inline void pack_one(const char *at, int dtype, real *to, int64_t half)
{
    (void)dtype;
    write_bits((char *)to + 2 * half, read_bits(at));
}

/* ---- V */

/* Rows that are interleaved are written 2 VL pairs at a time. */
static inline int64_t interleaved_width(int64_t width) { return (width + 2 * VL - 1) / (2 * VL) * (2 * VL); }

/* 32 values side by side; 0 past `count`. */
static inline halves read_halves(const char *at, ptrdiff_t column, int64_t count)
{
    uint16_t part[2 * VL] = {0};
    if (count >= 2 * VL && column == 2) return halves_load(at);
    for (int i = 0; i < count && i < 2 * VL; ++i) part[i] = read_bits(at + i * column);
    return halves_load((const char *)part);
}

/* What is unusual about rows that were copied. */
typedef struct {
    halves distance, size; /* of the smallest number that is not 0, and of the largest */
} seen_numbers;

static inline ALWAYS_INLINE void look_at(seen_numbers *seen, halves x)
{
    seen->distance = halves_max_distance(seen->distance, x, SMALL_VALUE);
    seen->size = halves_max_distance(seen->size, x, 0);
}

#if TILES
/* copy[feature][keys/2], for rows of `width` features of the block; 0 for keys behind it. */
static inline ptrdiff_t copied_stride(const sdpa_input *in, int64_t width)
{
    (void)width;
    return copied_keys(in) / 2;
}
static inline int64_t copied_pairs(const sdpa_input *in, int64_t width)
{
    return interleaved_width(width) * (copied_keys(in) / 2);
}

/* 2 VL features of 2 VL rows. */
static inline ALWAYS_INLINE void transpose_pairs(char *const *row_at, ptrdiff_t offset, ptrdiff_t column, int64_t left,
                                                 real *to, ptrdiff_t stride, seen_numbers *seen)
{
    vf first[VL], second[VL];
    UNROLL_FOR (int i = 0; i < VL; ++i) {
        real both[2 * VL];
        const halves low = row_at[2 * i] ? read_halves(row_at[2 * i] + offset, column, left) : halves_zero();
        const halves high = row_at[2 * i + 1] ? read_halves(row_at[2 * i + 1] + offset, column, left) : halves_zero();
        look_at(seen, low);
        look_at(seen, high);
        halves_interleave(both, low, high);
        first[i] = vf_load(both), second[i] = vf_load(both + VL);
    }
    vf_transpose(first);
    vf_transpose(second);
    UNROLL_FOR (int i = 0; i < VL; ++i) vf_store(to + i * stride, first[i]);
    UNROLL_FOR (int i = 0; i < VL; ++i) vf_store(to + (VL + i) * stride, second[i]);
}

static seen_numbers copy_rows_by_twos(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array,
                                      const char *rows_at, int64_t width, real *copy)
{
    seen_numbers seen = {halves_zero(), halves_zero()};
    const ptrdiff_t stride = copied_stride(in, width);
    for (int key = 0; key < t->block.count; key += 2 * VL) {
        char *row_at[2 * VL] = {0};
        for (int i = 0, end; i < 2 * VL && key + i < t->block.count; ++i)
            end = key + i + 1, row_at[i] = (char *)row_address(in, array, rows_at, t, key + i, &end);
        for (int64_t e = 0; e < width; e += 2 * VL)
            transpose_pairs(row_at, e * array->column, array->column, width - e, copy + e * stride + key / 2, stride,
                            &seen);
    }
    return seen;
}
#else
/* copy[keys/2][features], for rows of `width` features of the block; 0 for a key behind it. */
static inline ptrdiff_t copied_stride(const sdpa_input *in, int64_t width)
{
    (void)in;
    return interleaved_width(width);
}
static inline int64_t copied_pairs(const sdpa_input *in, int64_t width)
{
    return copied_keys(in) / 2 * interleaved_width(width);
}

static seen_numbers copy_rows_by_twos(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array,
                                      const char *rows_at, int64_t width, real *copy)
{
    seen_numbers seen = {halves_zero(), halves_zero()};
    for (int key = 0; key < t->block.count; key += 2, copy += interleaved_width(width)) {
        int end = key + 2 < t->block.count ? key + 2 : t->block.count, alone = end; /* pages are not asked for more */
        const char *first = row_address(in, array, rows_at, t, key, &end), *second = first + array->row;
        if (end < key + 2 && key + 1 < t->block.count) second = row_address(in, array, rows_at, t, key + 1, &alone);
        for (int64_t e = 0; e < width; e += 2 * VL) {
            const ptrdiff_t at = e * array->column;
            const halves low = read_halves(first + at, array->column, width - e);
            const halves high =
                key + 1 < t->block.count ? read_halves(second + at, array->column, width - e) : halves_zero();
            look_at(&seen, low);
            look_at(&seen, high);
            halves_interleave(copy + e, low, high);
        }
    }
    return seen;
}
#endif

/* Behind the copy, which takes no more than half of its room: its small values times a power of 2 that makes normal
 * numbers of them, also of their products with weights; 0 for all others. */
static operand small_values(const sdpa_input *in, const sdpa_task *t)
{
    return (operand){(const char *)((real *)t->scratch.value_copy + copied_pairs(in, in->value_dim)),
                     copied_stride(in, in->value_dim) * 4, SDPA_BFLOAT16};
}

/* `bits` times 2**SMALL_VALUE_EXPONENT, for a number below SMALL_VALUE. */
static inline uint16_t enlarged(uint16_t bits)
{
    const uint32_t size = bits & 0x7fff;
    const float of_denormal = (float)(int32_t)size * (SMALL_VALUE_FACTOR * 0x1p-133f);
    const uint32_t larger =
        size < SMALLEST_NORMAL ? bits_of_float(of_denormal) >> 16 : size + (SMALL_VALUE_EXPONENT << 7);
    return (uint16_t)((bits & 0x8000) | larger);
}

/* Moves them there. */
static void part_small_values(const sdpa_input *in, const sdpa_task *t)
{
    char *copy = t->scratch.value_copy, *small = (char *)small_values(in, t).at;
    for (int64_t i = 0; i < 2 * copied_pairs(in, in->value_dim); ++i) {
        const uint16_t bits = read_bits(copy + 2 * i), is_small = is_small_value(bits) ? 0xffff : 0;
        write_bits(small + 2 * i, enlarged(bits) & is_small);
        write_bits(copy + 2 * i, bits & (uint16_t)~is_small);
    }
}

static int copies(const sdpa_input *in)
{
    (void)in;
    return 1;
}

/* Of the copy. */
static int64_t copied_numbers(const sdpa_input *in, const sdpa_task *t)
{
    (void)t;
    return 2 * copied_pairs(in, in->value_dim);
}

static operand copy_values(const sdpa_input *in, sdpa_task *t)
{
    sdpa_copied *copied = &t->scratch.copied[1];
    if (must_copy(t, copied)) {
        const seen_numbers seen =
            copy_rows_by_twos(in, t, &in->value, t->rows.values_at, in->value_dim, t->scratch.value_copy);
        const uint16_t below = (uint16_t)(2 - 2 * SMALL_VALUE); /* 0 itself is 2 below that */
        copied->odd = (halves_any_from(seen.distance, below) ? SMALL : 0) |
                      (halves_any_from(seen.size, 2 * INFINITE) ? NOT_FINITE : 0);
        if (copied->odd & SMALL) part_small_values(in, t);
    }
    t->scratch.odd_values = copied->odd;
    return (operand){t->scratch.value_copy, copied_stride(in, in->value_dim) * 4, SDPA_BFLOAT16};
}
static operand read_values(const sdpa_input *in, sdpa_task *t) { return copy_values(in, t); }

/* ---- weights */

static inline real *pair_at(const sdpa_task *t, int key, int v)
{
    return (real *)t->scratch.s + key / 2 * ROWS + v * VL;
}

/* The weights of `count` keys from the even `key` on take the place of the scores, those of earlier keys.  What is kept
 * of them is added to `kept`. */
static inline ALWAYS_INLINE vf keep_weights(const sdpa_task *t, int key, int v, const vf *weight, const int count,
                                            vf kept)
{
    const vf ones = vf_set1(float_of_bits(0x3f803f80));
    UNROLL_FOR (int i = 0; i < count; i += 2) {
        const vf pair = vf_round_pairs(weight[i], weight[i + 1]);
        vf_store(pair_at(t, key + i, v), pair);
        kept = vf_dot_pairs(pair, ones, kept);
    }
    return kept;
}
/* The weights of the block, divided by the lift of their rows. */
static void lower_weights(const sdpa_task *t)
{
    for (int v = 0; v < t->rows.vectors; ++v) {
        const vf factor = vf_div(vf_set1(1), vf_load((real *)t->scratch.lift + v * VL));
        for (int key = t->block.of_vector[v].begin; key < t->block.of_vector[v].end; key += 2) {
            const vf pair = vf_load(pair_at(t, key, v));
            vf_store(pair_at(t, key, v),
                     vf_round_pairs(vf_mul(vf_first(pair), factor), vf_mul(vf_second(pair), factor)));
        }
    }
}

/* ---- the result */

/* out = o * shrink, rounded, two features to a lane: half as much to transpose, and whole cache lines to store.
 * Returns 0, with the work undone, where a row is too short for that or a denormal would become 0. */
static int store_pairs(const sdpa_array *out, const sdpa_task *t, int64_t value_dim)
{
    if (out->column != 2 || value_dim < 2 * VL) return 0;
    for (int v = 0; v < t->rows.vectors; ++v) {
        const int rows = t->rows.count - v * VL < VL ? t->rows.count - v * VL : VL;
        const vf factor = vf_load((real *)t->scratch.shrink + v * VL);
        for (int64_t column = 0; column < value_dim; column += 2 * VL) {
            const int64_t e = column + 2 * VL > value_dim ? value_dim - 2 * VL : column; /* the last one overlaps */
            const real *from = (real *)t->scratch.o + e * ROWS + v * VL;
            vf tile[VL];
            int denormal = 0;
            UNROLL_FOR (int i = 0; i < VL; ++i) {
                const vf low = vf_mul(vf_load(from + 2 * i * ROWS), factor);
                const vf high = vf_mul(vf_load(from + (2 * i + 1) * ROWS), factor);
                denormal |= vf_any_denormal(low, high);
                tile[i] = vf_round_pairs(low, high);
            }
            if (denormal) return 0;
            vf_transpose(tile);
            UNROLL_FOR (int lane = 0; lane < VL; ++lane)
                if (lane < rows) vf_store((real *)(t->rows.out[v * VL + lane] + e * 2), tile[lane]);
        }
    }
    return 1;
}

#endif
