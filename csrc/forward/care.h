/* NaN and inf in V, and sums that overflow: what is done again, with care, where NaN or inf came out.
 *
 * A hidden key has weight 0, but 0 * NaN is NaN.  So the sums take 0 for such values, and a second product counts those
 * that the row of each sum sees: of 1 where a key is visible and of marks that say what a value is.  What they come to
 * is added at the end.
 *
 * What overflows although V is finite are sums of weights up to 1 with values close to the largest number.  They are
 * formed once more, of weights that sum to less than 1: from the highest score on, which is known by then, and divided
 * by `lift`, a power of 2 that is a property of the row alone.  Then the result is no larger than the values. */
#ifndef SDPA_FORWARD_CARE_H
#define SDPA_FORWARD_CARE_H

#include "forward/output.h"

#include <math.h>

/* Counts of a block and what was found before it do not reach the next mark. */
enum { INF_MARK = 1, MINUS_INF_MARK = 1 << 10, NAN_MARK = 1 << 20 };

/* Lanes of 1 where x is finite, else of 0. */
static inline vm is_finite(vf x) { return vf_eq(vf_sub(x, x), vf_set1(0)); }

/* ---- V in two parts: what is finite, and what is not */

#if !PAIRS
static inline vf mark_of(vf x)
{
    const vf inf = vf_set1((real)INFINITY), mark = vf_select(vf_eq(x, inf), vf_set1(INF_MARK), vf_set1(NAN_MARK));
    return vf_select(vf_eq(x, vf_sub(vf_set1(0), inf)), vf_set1(MINUS_INF_MARK), mark);
}

/* The values of the block with 0 for NaN and inf; or marks for these and 0 for all others. */
static operand part_of_values(const sdpa_input *in, sdpa_task *t, int marks)
{
    const operand values = copy_values(in, t);
    const vf zero = vf_set1(0);
    vf poison = zero;
    real *copy = t->scratch.value_copy;
    for (int64_t i = 0; i < t->block.count * whole_vectors(in->value_dim); i += VL) {
        const vf x = vf_load(copy + i);
        poison = vf_fma(x, zero, poison);
        vf_store(copy + i, marks ? vf_select(is_finite(x), zero, mark_of(x)) : vf_select(is_finite(x), x, zero));
    }
    t->scratch.odd_values = is_zero(poison) ? 0 : NOT_FINITE;
    if (t->scratch.odd_values) t->scratch.copied[1].rows = 0; /* of no use to others */
    return values;
}

/* `visible` becomes 1 where a key is visible, and 0 where it is hidden.  Where it is visible and weighs 0, inf is to
 * become NaN. */
static void mark_visible(const sdpa_task *t)
{
    const vf hidden = vf_set1(-(real)INFINITY), zero = vf_set1(0), one = vf_set1(1), none = vf_set1(NAN_MARK);
    real *visible = t->scratch.visible;
    for (ptrdiff_t i = 0; i < score_index(t, t->block.count, 0); i += VL) {
        const vf seen = vf_select(vf_eq(vf_load((real *)t->scratch.s + i), zero), none, one);
        vf_store(visible + i, vf_select(vf_eq(vf_load(visible + i), hidden), zero, seen));
    }
}
#else
static inline uint16_t mark_of(uint16_t bits)
{
    enum { ONE = 0x3f80, EXPONENT = 7 }; /* powers of 2 */
    return bits == 0x7f80 ? ONE : bits == 0xff80 ? ONE + (10 << EXPONENT) : ONE + (20 << EXPONENT);
}

static operand part_of_values(const sdpa_input *in, sdpa_task *t, int marks)
{
    const operand values = copy_values(in, t);
    char *copy = t->scratch.value_copy;
    if (!(t->scratch.odd_values & NOT_FINITE)) return values;
    for (int64_t i = 0; i < copied_numbers(in, t); ++i) {
        const uint16_t bits = read_bits(copy + 2 * i), odd = (bits & 0x7fff) >= INFINITE ? 0xffff : 0;
        write_bits(copy + 2 * i, marks ? mark_of(bits) & odd : bits & (uint16_t)~odd);
    }
    t->scratch.copied[1].rows = 0;
    return values;
}

#if SDPA_FEW_ROWS
/* In pairs of keys, number by number.  What is written was read. */
static void mark_visible(const sdpa_task *t)
{
    const int places = t->scratch.places, end = t->block.count;
    const real *visible = t->scratch.visible;
    for (int key = 0; key < end; key += 2)
        for (int row = 0; row < places; ++row) {
            uint16_t seen[2] = {0}, weight[2];
            memcpy(weight, (real *)t->scratch.s + key / 2 * places + row, sizeof weight);
            for (int i = 0; i < 2 && key + i < end; ++i)
                if (visible[(key + i) * places + row] != -(real)INFINITY)
                    seen[i] = (weight[i] & 0x7fff) == 0 ? mark_of(0x7fc0) : mark_of(INFINITE);
            memcpy((real *)t->scratch.visible + key / 2 * places + row, seen, sizeof seen);
        }
}
#else
/* In pairs of keys.  What is written was read. */
static void mark_visible(const sdpa_task *t)
{
    const vf hidden = vf_set1(-(real)INFINITY), zero = vf_set1(0), one = vf_set1(1), none = vf_set1(NAN_MARK);
    real *visible = t->scratch.visible;
    for (int key = 0; key < t->block.count; key += 2)
        for (int v = 0; v < t->rows.vectors; ++v) {
            const vf pair = vf_load(pair_at(t, key, v)), weight[2] = {vf_first(pair), vf_second(pair)};
            vf seen[2] = {zero, zero};
            for (int i = 0; i < 2 && key + i < t->block.count; ++i) {
                seen[i] = vf_select(vf_eq(weight[i], zero), none, one);
                seen[i] = vf_select(vf_eq(vf_load(visible + score_index(t, key + i, v)), hidden), zero, seen[i]);
            }
            vf_store(visible + (ptrdiff_t)key / 2 * ROWS + v * VL, vf_round_pairs(seen[0], seen[1]));
        }
#if TILES
    for (int v = 0; v < t->rows.vectors; ++v) fill_up_pairs(t, v, visible);
#endif
}
#endif
#endif

/* visible[key][rows] of the block: -inf where a key is hidden, by whichever option.  What hides scores is asked to hide
 * zeros. */
static void find_visible(const sdpa_input *in, const sdpa_task *t)
{
    memset(t->scratch.visible, 0, (size_t)t->block.count * ROWS * sizeof(real));
    for (int v = 0; v < t->rows.vectors; ++v)
        shape(in, t, t->scratch.visible, v, t->block.of_vector[v].begin, t->block.of_vector[v].end,
              changes_of(in, t) & (BIAS | MASK | CUT));
}

/* ---- what was seen of it */

/* One mark at most of each kind. */
static inline vf without_counts(vf marks)
{
    const real round = (real)MINUS_INF_MARK * (real)(1.5 * ((real_bits)1 << REAL_MANTISSA_BITS)); /* to whole ones */
    const vf zero = vf_set1(0), minus_inf = vf_sub(vf_add(marks, vf_set1(round)), vf_set1(round));
    const vf both = vf_add(vf_select(vf_lt(zero, minus_inf), vf_set1(MINUS_INF_MARK), zero),
                           vf_select(vf_lt(zero, vf_sub(marks, minus_inf)), vf_set1(INF_MARK), zero));
    return vf_select(vf_lt(marks, vf_set1(NAN_MARK)), both, vf_set1(NAN_MARK));
}

/* What they come to in a sum. */
static inline vf marked_number(vf marks)
{
    const vf inf = vf_set1((real)INFINITY), nan = vf_set1((real)NAN);
    const vf of_minus_inf = vf_select(vf_eq(marks, vf_set1(MINUS_INF_MARK)), vf_sub(vf_set1(0), inf), nan);
    return vf_select(vf_eq(marks, vf_set1(INF_MARK)), inf, of_minus_inf);
}

static void find_poison(const sdpa_input *in, sdpa_task *t, operand marks)
{
    real ones[ROWS];
    for (int row = 0; row < ROWS; ++row) ones[row] = 1;
    output_block(in, t, marks, t->scratch.visible, t->scratch.poison, t->scratch.poisonous ? ones : NULL);
    t->scratch.poisonous = 1;
    FOR_OUTPUT (in, t, line, v) {
        real *at = (real *)t->scratch.poison + output_offset(in, line, v);
        vf_store(at, without_counts(vf_load(at)));
    }
}

/* Like accumulate. */
static void accumulate_seen(const sdpa_input *in, sdpa_task *t)
{
    const operand values = part_of_values(in, t, 0);
    const int poisonous = t->scratch.odd_values & NOT_FINITE;
    if (poisonous) {
        find_visible(in, t);
        mark_visible(t);
    }
    if (t->scratch.lifted) lower_weights(t);
    add_values(in, t, values);
    if (poisonous) find_poison(in, t, part_of_values(in, t, 1));
}

static void add_poison(const sdpa_input *in, sdpa_task *t)
{
    if (!t->scratch.poisonous) return;
    FOR_OUTPUT (in, t, line, v) {
        real *at = (real *)t->scratch.o + output_offset(in, line, v);
        const vf x = vf_load(at), marks = vf_load((real *)t->scratch.poison + output_offset(in, line, v));
        vf_store(at, vf_select(vf_eq(marks, vf_set1(0)), x, vf_add(x, marked_number(marks)))); /* -0 stays */
    }
}

/* ---- sums that overflow */

/* Of each row: whether its sums are not finite though its scores are; one of NaN is NaN with care, too. */
static int find_unsettled(const sdpa_input *in, const sdpa_task *t, int *unsettled)
{
    const real *sum = t->scratch.sum;
    real poison[ROWS] = {0};
    int any = 0;
    if (!t->scratch.started) return 0;
    FOR_OUTPUT (in, t, line, v)
        add_to_rows(vf_mul(vf_load((real *)t->scratch.o + output_offset(in, line, v)), vf_set1(0)), poison, line, v);
    for (int row = 0; row < t->rows.vectors * VL; ++row) {
        unsettled[row] = poison[row] != 0 && sum[row] == sum[row];
        any |= unsettled[row];
    }
    return any;
}

static int settled(const sdpa_input *in, const sdpa_task *t)
{
    int unsettled[ROWS];
    return !t->scratch.started || finite_sums(t, in->value_dim) || !find_unsettled(in, t, unsettled);
}

/* Once V is known to be finite where it was summed. */
static int lift(const sdpa_input *in, sdpa_task *t)
{
    int unsettled[ROWS], exponent;
    real *factor = t->scratch.lift;
    t->scratch.lifted = find_unsettled(in, t, unsettled);
    for (int row = 0; row < t->rows.vectors * VL; ++row) {
        if (!unsettled[row]) continue;
        frexp(((real *)t->scratch.sum)[row], &exponent);
        factor[row] = (real)ldexp(1, exponent + 1); /* at least twice the sum of the weights */
    }
    return t->scratch.lifted;
}

#endif
