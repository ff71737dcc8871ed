/* From products to scores: scale, softcap, ALiBi, bias, mask, and who sees whom.  Scores lie as s[key][rows], of few
 * rows as s[key][places]. */
#ifndef SDPA_FORWARD_SCORES_H
#define SDPA_FORWARD_SCORES_H

#if SDPA_FEW_ROWS
#include "forward/few.h"
#else
#include "forward/product.h"
#endif
#if ADDITIVE
#include "forward/additive.h"
#endif

/* Where scores only get multiplied by a positive number, that number goes into the exponent (see softmax.h), and `s`
 * stays the bare product.  Otherwise they are scaled here; a factor of 0 or less must not meet -inf. */
static inline int scale_in_exponent(const sdpa_input *in)
{
    return in->scale > 4 * REAL_BIAS / (double)REAL_MAX && in->softcap == 0 && !in->alibi_slopes && !in->bias.data;
}
static inline real exponent_factor(const sdpa_input *in)
{
    return narrowed(LOG2_E * (scale_in_exponent(in) ? in->scale : 1));
}

/* What is done to products, in this order. */
enum { SCALE = 1, CAP = 2, ALIBI = 4, BIAS = 8, MASK = 16, CUT = 32 };

static inline int changes_of(const sdpa_input *in, const sdpa_task *t)
{
    return (scale_in_exponent(in) ? 0 : SCALE) | (in->softcap != 0 ? CAP : 0) | (in->alibi_slopes ? ALIBI : 0) |
           (in->bias.data ? BIAS : 0) | (t->block.masked ? MASK : 0) | (t->block.cut ? CUT : 0);
}

/* What differs from row to row of a vector. */
typedef struct {
    vf slope, position; /* for ALiBi; positions are counted from the first key of the block */
    vf first, last;     /* keys of the block that geometry (causal, window, lengths) leaves visible */
} row_constants;

/* Where a row finds its number in arrays of shape (B, H). */
static inline int64_t head_index(const sdpa_input *in, const sdpa_rows *of, int row)
{
    return of->batch * in->heads + of->kv_head * sdpa_group(in) + (of->first + row) % sdpa_group(in);
}

static row_constants constants_of(const sdpa_input *in, const sdpa_task *t, int v, int changes)
{
    const double offset = in->q_offset ? (double)in->q_offset[t->rows.batch] : (double)(t->rows.kv_len - t->rows.q_len);
    real slope[VL] = {0}, position[VL] = {0}, first[VL] = {0}, last[VL] = {0};
    for (int i = 0; i < VL; ++i) {
        const int lane = v * VL + i, row = lane < t->rows.count ? lane : t->rows.count - 1;
        if (changes & ALIBI) {
            slope[i] = (real)in->alibi_slopes[head_index(in, &t->rows, row)];
            position[i] = (real)(offset + (double)((t->rows.first + row) / sdpa_group(in) - t->block.first));
        }
        if (changes & CUT) {
            first[i] = (real)t->block.sees[lane].begin; /* small whole numbers: exact */
            last[i] = (real)(t->block.sees[lane].end - 1);
        }
    }
    return (row_constants){vf_load(slope), vf_load(position), vf_load(first), vf_load(last)};
}

/* s + bias, but -inf wherever the bias is -inf, whatever s holds there (NaN and +inf included). */
static inline vf add_bias(vf s, vf bias)
{
    const vf hidden = vf_set1(-(real)INFINITY);
    return vf_select(vf_eq(bias, hidden), hidden, vf_add(s, bias));
}

/* cap * tanh(s / cap); where gradients are wanted its derivative is kept. */
static inline vf capped(const sdpa_task *t, int key, int v, vf s, vf cap)
{
    const vf part = vf_tanh(vf_div(s, cap));
    if (t->scratch.cap_slope)
        vf_store((real *)t->scratch.cap_slope + (ptrdiff_t)key * ROWS + v * VL, vf_fnma(part, part, vf_set1(1)));
    return vf_mul(cap, part);
}

/* Takes `scores`, for the keys begin..end of the block and the rows of vector v, through `changes`, VL keys at a time,
 * in registers, and raises `high` to the largest.  Bias and mask lie as [row][key], so VL x VL tiles of them are
 * transposed on the way. */
static inline ALWAYS_INLINE void shape_by(const sdpa_input *in, const sdpa_task *t, real *scores, int v, int begin,
                                          int end, const int changes)
{
    const vf hidden = vf_set1(-(real)INFINITY), scale = vf_set1(narrowed(in->scale));
    const vf cap = vf_set1(in->softcap > REAL_MIN ? narrowed(in->softcap) : REAL_MIN);
    const row_constants row = constants_of(in, t, v, changes);
    vf high[2] = {vf_load((real *)t->scratch.high + v * VL), hidden}; /* two chains: one would wait for each maximum */
    for (int key = begin; key < end; key += VL) {
        const int count = end - key < VL ? end - key : VL;
        vf s[VL], tile[VL];
        vm seen[VL];
        /* Of few rows a vector may reach into the keys behind it: stored in order, only the last one does harm. */
        const int reaches = SDPA_FEW_ROWS && t->scratch.places < VL;
        const vf behind = reaches ? vf_load(scores + score_index(t, key + count, v)) : hidden;
        UNROLL_FOR (int i = 0; i < VL; ++i) s[i] = i < count ? vf_load(scores + score_index(t, key + i, v)) : hidden;
        if (changes & SCALE)
            UNROLL_FOR (int i = 0; i < VL; ++i) s[i] = vf_mul(s[i], scale);
        if (changes & CAP)
            for (int i = 0; i < count; ++i) s[i] = capped(t, key + i, v, s[i], cap);
        if (changes & ALIBI)
            UNROLL_FOR (int i = 0; i < VL; ++i)
                s[i] = vf_fnma(row.slope, vf_abs(vf_sub(row.position, vf_set1((real)(key + i)))), s[i]);
        if (changes & BIAS) {
            const ptrdiff_t offset = (t->block.first + key) * in->bias.column;
            if (count < VL && t->block.first + key + count >= VL)
                read_last_transposed(tile, t->rows.bias + v * VL, offset, count, &in->bias);
            else
                read_transposed(tile, t->rows.bias + v * VL, offset, count, &in->bias);
            UNROLL_FOR (int i = 0; i < VL; ++i) s[i] = add_bias(s[i], tile[i]);
        }
        if (changes & MASK) {
            read_mask(seen, t->rows.mask + v * VL, (t->block.first + key) * in->mask.column, count, &in->mask);
            UNROLL_FOR (int i = 0; i < VL; ++i) s[i] = vf_select(seen[i], s[i], hidden);
        }
        if (changes & CUT)
            UNROLL_FOR (int i = 0; i < VL; ++i) {
                const vf here = vf_set1((real)(key + i));
                s[i] = vf_select(vf_lt(here, row.first), hidden, vf_select(vf_lt(row.last, here), hidden, s[i]));
            }
        UNROLL_FOR (int i = 0; i < VL; ++i) {
            if (i < count) {
                high[i % 2] = vf_max(s[i], high[i % 2]);
                vf_store(scores + score_index(t, key + i, v), s[i]);
            }
        }
        if (reaches) vf_store(scores + score_index(t, key + count, v), behind);
    }
    vf_store((real *)t->scratch.high + v * VL, vf_max(high[0], high[1]));
}

/* Common combinations get a loop of their own, in which the scores stay in registers from one to the next. */
static void shape(const sdpa_input *in, const sdpa_task *t, real *scores, int v, int begin, int end, int changes)
{
    switch (changes) {
    case CUT: shape_by(in, t, scores, v, begin, end, CUT); break;
    case MASK: shape_by(in, t, scores, v, begin, end, MASK); break;
    case SCALE | BIAS: shape_by(in, t, scores, v, begin, end, SCALE | BIAS); break;
    case SCALE | ALIBI: shape_by(in, t, scores, v, begin, end, SCALE | ALIBI); break;
    default: shape_by(in, t, scores, v, begin, end, changes);
    }
}

#if PAIRS && !SDPA_FEW_ROWS
/* s += products / DENORMAL_FACTOR in the odd rows; `high` of these is found again from `before`.  What is not finite is
 * so in s, too; what changes no weight is left out, as scores that are denormal take long. */
static void add_to_odd_rows(const sdpa_task *t, sdpa_segment g, const real *products, const real *before)
{
    const vf zero = vf_set1(0), unit = vf_set1(1 / DENORMAL_FACTOR), least = vf_set1(LEAST_PRODUCT);
    for (int v = g.first_vector; v < g.end_vector; ++v) {
        real lane[VL], *high = (real *)t->scratch.high + v * VL;
        for (int i = 0; i < VL; ++i) lane[i] = (real)(t->scratch.odd_rows >> (v * VL + i) & 1);
        const vm odd = vf_lt(zero, vf_load(lane));
        vf highest = vf_select(odd, vf_load(before + v * VL), vf_load(high));
        for (int key = g.begin; key < g.end; ++key) {
            const vf s = vf_load(scores_at(t, key, v)), more = vf_load(products + score_index(t, key, v));
            const vf added = vf_select(vf_lt(vf_abs(more), least), zero, more);
            const vm adds = vf_eq(vf_sub(more, more), zero);
            const vf sum = vf_select(odd, vf_select(adds, vf_fma(added, unit, s), s), s);
            vf_store(scores_at(t, key, v), sum);
            highest = vf_max(sum, highest);
        }
        vf_store(high, highest);
    }
}

/* What the products took for 0 (see pairs.h): those of denormals, which were made larger, with all numbers. */
static void score_odd_rows(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys, const real *before)
{
    real unused[ROWS] = {0};
    segment_products(g, keys, in->dim, denormal_queries(in, t), t->scratch.visible, unused, NULL, NULL);
    add_to_odd_rows(t, g, t->scratch.visible, before);
    const operand denormals = denormal_keys(in, t, keys);
    if (!denormals.at) return;
    segment_products(g, denormals, in->dim, t->scratch.q, t->scratch.visible, unused, NULL, NULL);
    add_to_odd_rows(t, g, t->scratch.visible, before);
}
#endif

#if ADDITIVE
static operand keys_to_match(const sdpa_input *in, const sdpa_task *t)
{
    return in->v ? exponential_keys(in, t) : read_keys(in, t);
}
static void match_keys(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    if (in->v)
        additive_products(in, t, g, keys);
    else
        score_products(in, t, g, keys);
}
#else
#define keys_to_match read_keys
#define match_keys score_products
#endif

/* The scores of a segment.  `high` of bare products comes with them; where they are shaped (on the edges of what
 * geometry shows, or everywhere) it is found again. */
static void score_segment(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    const int changes = changes_of(in, t);
    real *high = t->scratch.high, before[ROWS];
    memcpy(before, high, sizeof before);
    match_keys(in, t, g, keys);
#if PAIRS && !SDPA_FEW_ROWS
    if (t->scratch.odd_rows) score_odd_rows(in, t, g, keys, before);
#endif
    for (int v = g.first_vector; (changes || TILES) && v < g.end_vector; ++v) {
        const int whole = t->block.cut && t->block.whole[v].begin <= g.begin && g.end <= t->block.whole[v].end;
        const int left = whole ? changes & ~CUT : changes;
#if TILES
        if (!left) raise_high(g, v, t->scratch.s, high);
#endif
        if (!left) continue;
        vf_store(high + v * VL, vf_load(before + v * VL));
        shape(in, t, t->scratch.s, v, g.begin, g.end, left);
    }
}

/* s and high of the block. */
static void scores(const sdpa_input *in, sdpa_task *t)
{
    const operand keys = keys_to_match(in, t);
    for (int v = 0; v < t->rows.vectors; ++v) vf_store((real *)t->scratch.high + v * VL, vf_set1(-(real)INFINITY));
    for (int i = 0; i < t->block.segments; ++i) score_segment(in, t, t->block.segment[i], keys);
}

#endif
