/* The engine for few rows (decoding): memory is the limit, so K and V are read once, row by row as they lie, with
 * features in lanes.
 *
 * Scores lie as s[key][places]: `places` are the rows rounded up to a power of two, so that a vector holds several keys
 * of 1, 2, 4 or 8 rows.  What shapes scores (scores.h) takes one key after the other, as in the other engine, where
 * max, sum and shrink of the rows are one vector, as here.
 *
 * Queries lie as q[row][features] and sums as o[row][features], padded with 0 to whole vectors.  What the tiles of both
 * products multiply is in few_singles.h (numbers, which are widened as they are loaded; rows of K and V that do not end on
 * a whole vector are copied to such) and in few_pairs.h (pairs of bfloat16).  `dtype` is a constant in each tile.  The
 * order of the sums of a row does not depend on other rows. */
#ifndef SDPA_FORWARD_FEW_H
#define SDPA_FORWARD_FEW_H

#include "simd/vmath.h"
#include "memory/write.h"
#if PAIRS
#include "forward/few_pairs.h"
#else
#include "forward/few_singles.h"
#endif

/* The error of one sum over thousands of features would exceed twice that of NumPy: of WIDE rows, stretches are summed on
 * their own, and so are stretches of stretches.  Vectors are short in plain C, and long sums are long there. */
enum { STRETCH = 256, STRETCHES = 16 };
enum { NARROW, WIDE };

/* s[key][row] = products[key * rows + row] */
static inline ALWAYS_INLINE void spread_products(vf products, const int keys, const int rows, real *s, int places)
{
    real lane[VL];
    vf_store(lane, products);
    UNROLL_FOR (int key = 0; key < keys; ++key) {
        memcpy(s, lane + key * rows, rows * sizeof(real));
        s += places;
        NOT_DERIVED(s); /* or all addresses would be computed before, and kept, whether they are needed or not */
    }
}

/* s[key][row] = K[key] . q[row] */
static inline ALWAYS_INLINE void dot_tile(const int keys, const int rows, const int dtype, const int how_wide,
                                          int64_t dim, row_run run, int first, const real *q, int64_t stride, real *s,
                                          int places)
{
    vf products = vf_set1(0), longer = vf_set1(0);
    if (how_wide == NARROW) products = dot_stretch(keys, rows, dtype, 0, dim, stride, run, first, q);
    for (int64_t d = 0; how_wide == WIDE && d < dim; d += STRETCH) {
        const int64_t end = dim - d < STRETCH ? dim : d + STRETCH;
        if (d && d % (STRETCH * STRETCHES) == 0) longer = vf_add(longer, products), products = vf_set1(0);
        products = vf_add(products, dot_stretch(keys, rows, dtype, d, end, stride, run, first, q));
    }
    if (how_wide == WIDE) products = vf_add(longer, products);
    if (keys * rows == VL && rows == places)
        vf_store(s, products);
    else
        spread_products(products, keys, rows, s, places);
}

/* As many keys at once as VL sums allow, then one by one. */
static inline ALWAYS_INLINE void dot_tiles(const int rows, const int dtype, const int how_wide, int keys, int64_t dim,
                                           row_run run, const real *q, int64_t stride, real *s, int places)
{
    const int at_once = VL / rows;
    int key = 0;
    for (; key + at_once <= keys; key += at_once)
        dot_tile(at_once, rows, dtype, how_wide, dim, run, key, q, stride, s + key * places, places);
    for (; key < keys; ++key) dot_tile(1, rows, dtype, how_wide, dim, run, key, q, stride, s + key * places, places);
}

/* Five or six rows are taken together where there are registers for so many sums: four and one, or two, would read K and V
 * twice.  Measured, 40 heads on 8 of 3000 keys: bfloat16 -8 %, float16 -6 %.  Not so scores of float32, which are not
 * widened: +2 to +8 %, as five rows leave room for three keys only; the result then -5 to -8 %. */
enum { TOGETHER = TILE >= 24 ? 6 : 4 };
static inline int most_together(const int dtype) { return dtype == REAL_DTYPE ? 4 : TOGETHER; }

/* Rows are taken by fours, and the last ones together, up to `most`: `call(rows, first)` with a constant number. */
#define FOR_ROWS(count, most, call)                                                                                    \
    do {                                                                                                               \
        int first = 0;                                                                                                 \
        for (; VL >= 4 && ((count) - first == 4 || (count) - first > (most)); first += 4) call(4, first);              \
        if ((most) == 6 && (count) - first == 6) call((VL < 6 ? 1 : 6), first);                                        \
        if ((most) == 6 && (count) - first == 5) call((VL < 6 ? 1 : 5), first);                                        \
        if ((most) == 6 && (count) - first > 4) break;                                                                 \
        for (; first + 2 <= (count); first += 2) call(2, first);                                                       \
        for (; first < (count); ++first) call(1, first);                                                               \
    } while (0)

/* Three rows are taken for four: two and one would read K and V twice. */
static inline int taken_rows(const sdpa_task *t) { return t->rows.count + (t->rows.count % 4 == 3); }

/* Those of rows that are not there hold numbers, whatever they are. */
static void choose_places(const sdpa_input *in, sdpa_task *t)
{
    const int64_t keys = BLOCK_KEYS < in->kv_len ? BLOCK_KEYS : in->kv_len;
    t->scratch.places = in->weights.data ? ROWS : 1; /* weights are written from s[key][ROWS] */
    while (t->scratch.places < t->rows.count) t->scratch.places *= 2;
    if (t->scratch.places > t->rows.count) memset(t->scratch.s, 0, (size_t)(keys * t->scratch.places) * sizeof(real));
}

static void load_queries(const sdpa_input *in, sdpa_task *t)
{
    const int64_t stride = query_stride(in);
    for (int row = 0; row < t->rows.count; ++row) load_query(in, t, row);
    for (int row = t->rows.count; row < taken_rows(t); ++row)
        memset((real *)t->scratch.q + row * stride, 0, (size_t)stride * sizeof(real));
    find_odd_queries(in, t);
    choose_places(in, t);
}

static inline ALWAYS_INLINE void score_keys(const int dtype, const int how_wide, const sdpa_input *in,
                                            const sdpa_task *t, sdpa_segment g, const source *keys)
{
    const real *q = t->scratch.q;
    const int64_t dim = summed_features(in), stride = query_stride(in);
    const int most = taken_rows(t) > most_together(dtype) ? KEYS_IN_CACHE : BLOCK_KEYS;
    for (int key = g.begin, end; key < g.end; key = end) {
        end = g.end - key < most ? g.end : key + most;
        const row_run run = run_of(in, t, keys, key, &end, dtype);
        real *s = scores_at(t, key, 0);
#define DOT_TILES(rows, first)                                                                                         \
    dot_tiles(rows, dtype, how_wide, end - key, dim, run, q + (first) * stride, stride, s + (first), t->scratch.places)
        FOR_ROWS(taken_rows(t), most_together(dtype), DOT_TILES);
#undef DOT_TILES
    }
}

static inline real larger(real a, real b) { return a > b ? a : b; } /* b where a is NaN, as vf_max */

/* `high` is raised to the largest score of each row. */
static void raise_high(const sdpa_task *t, sdpa_segment g)
{
    const real *s = t->scratch.s;
    const int last = t->scratch.places - 1; /* places are a power of two */
    const ptrdiff_t end = score_index(t, g.end, 0);
    ptrdiff_t at = score_index(t, g.begin, 0);
    real lane[VL], *high = t->scratch.high;
    vf most[2] = {vf_set1(-(real)INFINITY), vf_set1(-(real)INFINITY)}; /* two chains: one would wait for each maximum */
    for (; at + 2 * VL <= end; at += 2 * VL)
        UNROLL_FOR (int i = 0; i < 2; ++i) most[i] = vf_max(vf_load(s + at + i * VL), most[i]);
    vf_store(lane, vf_max(most[0], most[1]));
    for (; at < end; ++at) lane[at & last] = larger(s[at], lane[at & last]);
    for (int half = VL / 2; half > last; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = larger(lane[i + half], lane[i]);
    for (int i = 0; i <= last; ++i) high[i] = larger(lane[i], high[i]);
}

/* Functions of their own: with the code of wide rows beside theirs, narrow ones take 4 to 8 % longer. */
static NOINLINE void score_narrow(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    const source s = source_of_keys(in, t, keys);
#define SCORE_KEYS(dtype) score_keys(dtype, NARROW, in, t, g, &s)
    WITH_DTYPE(keys.dtype, SCORE_KEYS);
#undef SCORE_KEYS
}
static NOINLINE void score_wide(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    const source s = source_of_keys(in, t, keys);
#define SCORE_KEYS(dtype) score_keys(dtype, WIDE, in, t, g, &s)
    WITH_DTYPE(keys.dtype, SCORE_KEYS);
#undef SCORE_KEYS
}

/* The products of a segment. */
static void score_products(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, operand keys)
{
    (in->dim <= STRETCH ? score_narrow : score_wide)(in, t, g, keys);
    if (t->scratch.odd_rows) score_odd_queries(in, t, g, keys);
    /* Garbage behind the last key goes through what shapes that key (scores.h), and denormals would take long there. */
    if (t->scratch.places < VL) memset(scores_at(t, g.end, 0), 0, VL * sizeof(real));
    raise_high(t, g);
}

/* s = exp(s - from) for `count` scores.  The sum of a row is that of VL sums, each over every VL-th key, whatever
 * `places` is: so its bits do not depend on the number of rows.  part[key % VL][places] are these sums. */
static inline ALWAYS_INLINE void exponentiate_vectors(const int places, real *s, int count, vf from, vf factors,
                                                      vf floor, real *part)
{
    enum { AT_ONCE = 4 };
    const int round = places > AT_ONCE ? places : AT_ONCE;
    vf sum[VL];
    int at = 0;
    UNROLL_FOR (int i = 0; i < places; ++i) sum[i] = vf_set1(0);
    for (; at + round * VL <= count; at += round * VL)
        UNROLL_FOR (int first = 0; first < round; first += AT_ONCE) {
            vf weight[AT_ONCE];
            real *from_here = s + at + first * VL;
            UNROLL_FOR (int i = 0; i < AT_ONCE; ++i) weight[i] = vf_sub(vf_load(from_here + i * VL), from);
            exp_all(weight, AT_ONCE, factors, floor);
            UNROLL_FOR (int i = 0; i < AT_ONCE; ++i) {
                vf_store(from_here + i * VL, weight[i]);
                sum[(first + i) % places] = vf_add(sum[(first + i) % places], weight[i]);
            }
        }
    UNROLL_FOR (int i = 0; i < places; ++i) vf_store(part + i * VL, sum[i]);
    for (int i = count; i % VL; ++i) s[i] = -(real)INFINITY;
    for (; at < count; at += VL) {
        const vf weight = vf_exp(vf_sub(vf_load(s + at), from), factors, floor);
        real *to = part + at % (places * VL);
        vf_store(s + at, weight);
        vf_store(to, vf_add(vf_load(to), weight));
    }
    add_halves(places, part);
}

/* s = exp(s - from); returns the sums of the rows. */
static inline vf exponentiate_scores(const sdpa_task *t, int v, vf from, vf factors, vf floor, vf *kept)
{
    const sdpa_segment keys = t->block.of_vector[0];
    const int count = (keys.end - keys.begin) * t->scratch.places;
    real *s = scores_at(t, keys.begin, 0), part[VL * VL], row[VL], lane[VL];
    (void)v;
    vf_store(row, from);
    for (int i = 0; i < VL; ++i) lane[i] = row[i & (t->scratch.places - 1)]; /* places are a power of two */
    from = vf_load(lane);
#define EXPONENTIATE(places)                                                                                           \
    exponentiate_vectors(places, s, count, from, factors, floor, part);                                                \
    *kept = keep_block(places, t, keys)
    switch (t->scratch.places) {
    case 1: EXPONENTIATE(1); break;
    case 2: EXPONENTIATE(2); break;
    case 4: EXPONENTIATE((VL < 4 ? VL : 4)); break;
    case 8: EXPONENTIATE((VL < 8 ? VL : 8)); break;
    default: EXPONENTIATE(VL);
    }
#undef EXPONENTIATE
    return vf_load(part);
}

static inline ALWAYS_INLINE void output_rows(const int dtype, const sdpa_input *in, const sdpa_task *t,
                                             const source *values, const real *weights, real *sums)
{
    const sdpa_segment g = t->block.segment[0]; /* there is one vector of rows, hence one segment */
    const int64_t width = output_width(in->value_dim);
    for (int key = g.begin, end; key < g.end; key = end) {
        end = g.end - key < VALUES_IN_CACHE ? g.end : key + VALUES_IN_CACHE;
        const row_run run = run_of(in, t, values, key, &end, dtype);
        const real *s = weights_at(t, weights, key);
#define OUTPUT_TILES(rows, first)                                                                                      \
    output_tiles(rows, dtype, end - key, run, in->value_dim, s + (first), t->scratch.places, sums + (first) * width,   \
                 width)
        FOR_ROWS(taken_rows(t), TOGETHER, OUTPUT_TILES);
#undef OUTPUT_TILES
    }
}

/* o = o * shrink + the sums over the block, which are formed on their own (see product.h); `shrink` NULL: o is 0. */
static void output_block(const sdpa_input *in, const sdpa_task *t, operand values, const real *s, real *o,
                         const real *shrink)
{
    const int64_t width = output_width(in->value_dim);
    real *sums = shrink ? t->scratch.block_o : o;
    memset(sums, 0, (size_t)(taken_rows(t) * width) * sizeof(real));
    const source from = source_of_values(in, t, values);
#define OUTPUT_ROWS(dtype) output_rows(dtype, in, t, &from, s, sums)
    WITH_DTYPE(values.dtype, OUTPUT_ROWS);
#undef OUTPUT_ROWS
    mend_small_sums(in, t, values, s, sums);
    for (int row = 0; shrink && row < t->rows.count; ++row)
        for (int64_t e = row * width; e < (row + 1) * width; e += VL)
            vf_store(o + e, vf_fma(vf_load(o + e), vf_set1(shrink[row]), vf_load(sums + e)));
}

/* The vectors of o: a line of them for each row; where they lie, and what belongs to their rows. */
static inline int64_t output_lines(const sdpa_input *in, const sdpa_task *t)
{
    (void)in;
    return t->rows.count;
}
static inline int output_vectors(const sdpa_input *in, const sdpa_task *t)
{
    (void)t;
    return (int)(output_width(in->value_dim) / VL);
}
static inline ptrdiff_t output_offset(const sdpa_input *in, int64_t line, int v)
{
    return line * output_width(in->value_dim) + v * VL;
}
static inline vf of_rows(const real *per_row, int64_t line, int v)
{
    (void)v;
    return vf_set1(per_row[line]);
}
static inline void add_to_rows(vf x, real *per_row, int64_t line, int v)
{
    (void)v;
    real lane[VL];
    vf_store(lane, x);
    for (int j = 0; j < VL; ++j) per_row[line] += lane[j];
}

/* No NaN and no inf in o: x * 0 is 0 exactly then. */
static int finite_sums(const sdpa_task *t, int64_t width)
{
    enum { CHAINS = 4 }; /* one would wait for each fma */
    const int64_t end = t->scratch.started ? t->rows.count * output_width(width) : 0;
    const real *o = t->scratch.o;
    vf poison[CHAINS];
    int64_t i = 0;
    UNROLL_FOR (int chain = 0; chain < CHAINS; ++chain) poison[chain] = vf_set1(0);
    for (; i + CHAINS * VL <= end; i += CHAINS * VL)
        UNROLL_FOR (int chain = 0; chain < CHAINS; ++chain)
            poison[chain] = vf_fma(vf_load(o + i + chain * VL), vf_set1(0), poison[chain]);
    for (; i < end; i += VL) poison[0] = vf_fma(vf_load(o + i), vf_set1(0), poison[0]);
    UNROLL_FOR (int chain = 1; chain < CHAINS; ++chain) poison[0] = vf_add(poison[0], poison[chain]);
    return is_zero(poison[0]);
}

/* out = o * shrink. */
static void store_output(const sdpa_input *in, const sdpa_task *t)
{
    const sdpa_array *out = &in->out;
    for (int row = 0; row < t->rows.count; ++row) {
        const vf factor = vf_set1(((real *)t->scratch.shrink)[row]);
        for (int64_t e = 0; e < in->value_dim; e += VL) {
            const int count = in->value_dim - e < VL ? (int)(in->value_dim - e) : VL;
            write_chunk(t->rows.out[row] + e * out->column, out->column, count, out,
                        vf_mul(vf_load((real *)t->scratch.o + row * output_width(in->value_dim) + e), factor));
        }
    }
}

#endif
