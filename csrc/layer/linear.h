/* The projections of a layer: y[row][out] = act(sum over k of x[row][k] * w[out][k] + bias[out]) + residual[row][out].
 *
 * With the features of y in lanes, and w transposed once for all calls, this is the product of scores (product.h):
 * a row of x takes the place of a key, and a panel of w that of the queries.
 *
 *     x[row][k]                        as it lies, or a copy where it must be converted
 *     w[panel][k in steps][ROWS]       ROWS features of y to a panel, the last one filled up with 0;
 *                                      with gates, by turns a vector of gates and one of what they weigh
 *     s[row][ROWS]                     sums of one panel, or of some vectors of it; finished there, then written
 *
 * Parts of PART_STEPS of a panel (32 KB) stay in the first-level cache while the rows of a block go by.  After the last
 * part the sums of a tile are finished and written at once, so that writing spreads over the time of a panel. */
#ifndef SDPA_LAYER_LINEAR_H
#define SDPA_LAYER_LINEAR_H

#include "forward/product.h"
#include "memory/prefetch.h"
#include "layer/activations.h"

/* Some vectors of one panel for one block of rows. */
typedef struct {
    int64_t row;
    int rows, count;  /* of vectors */
    int64_t vector;   /* the first, of those of all panels */
    int64_t feature;  /* of the result: the first, */
    int64_t features; /* and how many */
} linear_piece;

static linear_piece piece_of(const sdpa_linear *l, int64_t row, int rows, int64_t vector)
{
    const int apart = sdpa_vectors_apart(l);
    linear_piece p = {.row = row, .rows = rows, .vector = vector, .feature = vector / apart * VL};
    const int64_t left = l->outs - p.feature, most = l->vectors / apart * VL;
    p.features = left < most ? left : most;
    p.count = (int)((p.features + VL - 1) / VL) * apart;
    return p;
}

static int is_whole(const linear_piece *p) { return p->count == VECTORS; }

/* Rows of w as lanes of a panel, from those of one of its vectors on, `apart` vectors from each other; the other lanes
 * stay as they are. */
static void pack_panel(const sdpa_array *weight, int64_t outs, int64_t ins, int vector, int apart, void *panel)
{
    for (int64_t out = 0; out < outs; ++out) {
        const char *from = weight->data + out * weight->row;
        const int64_t lane = (vector + out / VL * apart) * VL + out % VL;
        for (int64_t k = 0; k < ins; ++k)
            pack_one(from + k * weight->column, weight->dtype, (real *)panel + k / STEP * ROWS + lane, k % STEP);
    }
}

static inline vf with_bias(const real *s, const real *bias, int v)
{
    const vf x = vf_load(s + v * VL);
    return bias ? vf_add(x, vf_load(bias + v * VL)) : x;
}

/* to = act(s + bias) for `vectors` of each row, or of two by turns, act(gate + bias) * (s + bias), side by side; `to`
 * may be s. */
static inline ALWAYS_INLINE void activate_sums(int rows, const int vectors, const int gated, const int activation,
                                               const real *bias, const real *s, real *to)
{
    const int count = gated ? vectors / 2 : vectors, apart = gated ? 2 : 1;
    for (int row = 0; row < rows; ++row, s += ROWS, to += ROWS) {
        vf x[VECTORS];
        UNROLL_FOR (int v = 0; v < count; ++v) x[v] = with_bias(s, bias, v * apart);
        activate(x, count, activation);
        UNROLL_FOR (int v = 0; v < count; ++v)
            vf_store(to + v * VL, gated ? vf_mul(x[v], with_bias(s, bias, v * apart + 1)) : x[v]);
    }
}

static void finish_sums(const sdpa_linear *l, const linear_piece *p, const real *bias, real *s)
{
    const int apart = sdpa_vectors_apart(l), together = is_whole(p) ? VECTORS : apart;
#define SOME(vectors, gated, activation)                                                                               \
    activate_sums(p->rows, vectors, gated, activation, bias ? bias + v * VL : NULL, s + v * VL, s + v / apart * VL)
#define ACTIVATE(activation)                                                                                           \
    case activation:                                                                                                   \
        if (is_whole(p) && l->gated)                                                                                   \
            SOME(VECTORS, 1, activation);                                                                              \
        else if (is_whole(p))                                                                                          \
            SOME(VECTORS, 0, activation);                                                                              \
        else if (l->gated)                                                                                             \
            SOME(2, 1, activation);                                                                                    \
        else                                                                                                           \
            SOME(1, 0, activation);                                                                                    \
        break
    for (int v = 0; v < p->count; v += together) switch (l->activation) {
            ACTIVATE(SDPA_IDENTITY);
            ACTIVATE(SDPA_RELU);
            ACTIVATE(SDPA_GELU);
            ACTIVATE(SDPA_GELU_TANH);
            ACTIVATE(SDPA_SILU);
        }
#undef ACTIVATE
#undef SOME
}

/* out[row][feature ...] = s[row][:] + bias + residual[row][feature ...] */
static inline ALWAYS_INLINE void write_linear(const sdpa_linear *l, const linear_piece *p, const real *bias,
                                              const real *s)
{
    const sdpa_array *more = &l->residual;
    char *at = l->out.data + p->row * l->out.row + p->feature * l->out.column;
    const char *more_at = more->data ? more->data + p->row * more->row + p->feature * more->column : NULL;
    for (int i = 0; i < p->rows; ++i, at += l->out.row, s += ROWS) {
        for (int v = 0; v * VL < p->features; ++v) {
            const int count = p->features - v * VL < VL ? (int)(p->features - v * VL) : VL;
            vf y = vf_load(s + v * VL);
            if (bias) y = vf_add(y, vf_load(bias + v * VL));
            if (more_at) y = vf_add(y, read_chunk(more_at + v * VL * more->column, more->column, count, more));
            write_chunk(at + v * VL * l->out.column, l->out.column, count, &l->out, y);
        }
        if (more_at) more_at += more->row;
    }
}

/* The same where rows lie side by side and all features of a panel are wanted. */
static inline ALWAYS_INLINE void write_whole(const sdpa_linear *l, const linear_piece *p, const real *bias,
                                             const real *s, const int dtype, const int vectors)
{
    const ptrdiff_t size = l->out.column, more_size = l->residual.column;
    char *at = l->out.data + p->row * l->out.row + p->feature * size;
    const char *more_at =
        l->residual.data ? l->residual.data + p->row * l->residual.row + p->feature * more_size : NULL;
    for (int i = 0; i < p->rows; ++i, at += l->out.row, s += ROWS)
        UNROLL_FOR (int v = 0; v < vectors; ++v) {
            vf y = vf_load(s + v * VL);
            if (bias) y = vf_add(y, vf_load(bias + v * VL));
            if (more_at) y = vf_add(y, read_adjacent(more_at + i * l->residual.row + v * VL * more_size, dtype));
            write_adjacent(at + v * VL * size, dtype, y);
        }
}

/* What follows the sums: rows that are in the first-level cache. */
static void finish_rows(const sdpa_linear *l, const linear_piece *p, real *s)
{
    const real *bias = l->bias ? (const real *)l->bias + p->vector * VL : NULL;
    if (l->activation || l->gated) {
        finish_sums(l, p, bias, s);
        bias = NULL;
    }
    const sdpa_array *out = &l->out, *more = &l->residual;
    const int as_out = more->data == NULL || (more->dtype == out->dtype && more->column == out->column);
    const int full = is_whole(p) && p->features == VECTORS * VL / sdpa_vectors_apart(l);
#define WRITE(dtype)                                                                                                   \
    do {                                                                                                               \
        if (l->gated)                                                                                                  \
            write_whole(l, p, bias, s, dtype, VECTORS / 2);                                                            \
        else                                                                                                           \
            write_whole(l, p, bias, s, dtype, VECTORS);                                                                \
    } while (0)
    if (!full || !writes_adjacent(out, out->column) || !as_out)
        write_linear(l, p, bias, s);
    else if (out->dtype == SDPA_FLOAT16)
        WRITE(SDPA_FLOAT16);
    else if (out->dtype == SDPA_BFLOAT16)
        WRITE(SDPA_BFLOAT16);
    else
        WRITE(REAL_DTYPE);
#undef WRITE
}

/* Those of a piece that make one tile. */
static linear_piece rows_of(const linear_piece *p, int first, int rows)
{
    linear_piece some = *p;
    some.row += first, some.rows = rows;
    return some;
}

/* A panel that is read once is asked for so many bytes ahead.  From memory, 6 rows took 1.3 times as long with 4096, and
 * one row 1.2 times as long with 16384. */
enum { AHEAD = 12288 };

#if TILES
/* A tile of sums, of which four are in registers at once. */
enum { HIGHEST = 2 * SIDE };

/* Sums go on from part to part.  32 KB of a panel stay in the first-level cache while the rows of a block go by. */
enum { PART_STEPS = 128 };

/* s[row][ROWS] (+)= x[row][k] * w[k][ROWS] over the k of one part, for up to HIGHEST rows. */
static void sum_part(int rows, int vectors, int64_t count, const char *x, ptrdiff_t stride, const real *w, real *s,
                     int first, lines_soon soon)
{
    const matrix a = {x, stride, WHOLE_STEP * 2};
    if (rows <= SIDE && vectors == VECTORS) {
        const matrix b = {w, ROW_BYTES, SIDE * ROW_BYTES};
        multiply_tiles(1, 4, count / SIDE, a, b, s, ROW_BYTES, first, soon);
        return;
    }
    for (int v = 0; v < vectors; v += 2) {
        const matrix b = {w + v * VL, ROW_BYTES, SIDE * ROW_BYTES};
        multiply_some(rows, vectors - v, count / SIDE, a, b, s + v * VL, ROW_BYTES, first, soon);
        soon.at += count / SIDE * soon.lines * LINE;
    }
}

/* A piece for one block of rows.  *copied: the first row of the block that the thread had before, whose copy the scratch
 * holds.  Meanwhile what is needed of the panel next is asked for, if all of it is. */
static void linear(const sdpa_linear *l, int64_t row, int rows, int64_t vector, void *scratch, int64_t *copied)
{
    real *const s = scratch;
    const linear_piece piece = piece_of(l, row, rows, vector);
    const int64_t count = whole_vectors(steps(l->ins));
    const int vectors = piece.count, tiles = (rows + HIGHEST - 1) / HIGHEST;
    const operand x = read_linear(l, row, rows, s + l->block_rows * ROWS, *copied == row);
    const real *w = (const real *)l->weights + vector / VECTORS * count * ROWS + vector % VECTORS * VL;
    const int products = rows <= SIDE && is_whole(&piece) ? 1 : (vectors + 1) / 2, visits = tiles * products;
    int64_t k = 0, end;
    *copied = row;
    use_tiles();
    do {
        end = count - k < PART_STEPS ? count : k + PART_STEPS;
        lines_soon soon = {(const char *)(w + (tiles > 1 ? end : k) * ROWS) + (tiles > 1 ? 0 : AHEAD), 0};
        soon.lines = is_whole(&piece) ? (SIDE * ROW_BYTES / LINE + visits - 1) / visits : 0;
        for (int i = 0; i < rows; i += HIGHEST, soon.at += (end - k) / SIDE * products * soon.lines * LINE) {
            const linear_piece some = rows_of(&piece, i, rows - i < HIGHEST ? rows - i : HIGHEST);
            sum_part(rows - i, vectors, end - k, x.at + i * x.stride + k * 4, x.stride, w + k * ROWS, s + i * ROWS,
                     k == 0, soon);
            if (end == count) finish_rows(l, &some, s + i * ROWS);
        }
        k = end;
    } while (k < count);
    release_tiles();
}
#else
/* A tile holds the sums of so many rows, at most, and of all features of a panel. */
enum { HIGHEST = TILE / VECTORS };
_Static_assert(HIGHEST <= 6, "sum_rows must know all heights");

/* 32 KB of a panel stay in the first-level cache while the rows of a block go by.  Parts of twice the size are read from
 * the second: 1.3 % less time on Zen 5, and 4 % more on two cores of a Xeon of 2025. */
enum { PART_STEPS = LONGEST_SUM };

/* What a panel holds comes from far, and the first caches have room for some parts of it.  While one is in use the tiles
 * ask for the next one, each for its share; a single tile asks for what it is about to read itself. */
enum { STEP_BYTES = ROWS * SDPA_REAL_BYTES }; /* of a panel for one k */

/* s[row][ROWS] (+)= x[row][k] * w[k][ROWS] over the k of one part. */
typedef struct {
    int64_t count;
    const real *x, *w;
    ptrdiff_t stride; /* from row to row of x */
    int more;         /* whether s holds the sums of other parts */
    real *s;
    const char *soon; /* what is asked for, */
    ptrdiff_t pace;   /* and bytes from that of one k to that of the next */
} part_of_sums;

/* `sharers`: by how many tiles the lines of a step are shared, at least; those of some vectors alone by none. */
static inline ALWAYS_INLINE void sum_tile(const int height, const int vectors, const int sharers, const part_of_sums p)
{
    const int bytes = vectors * VL * SDPA_REAL_BYTES, lines = (bytes + sharers * LINE - 1) / (sharers * LINE);
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    for (int64_t k = 0; k < p.count; ++k) {
        UNROLL_FOR (int line = 0; line < lines; ++line) {
            const char *at = p.soon + k * p.pace + line * LINE;
            if (sharers == 1)
                PREFETCH(at, 3);
            else
                PREFETCH(at, 2);
        }
        multiply(height, 0, vectors, sum, 1, p.x + k, p.stride, 1, 0, p.w + k * ROWS, ROWS);
    }
    if (p.more)
        UNROLL_FOR (int i = 0; i < height; ++i)
            UNROLL_FOR (int v = 0; v < vectors; ++v) sum[i][v] = vf_add(vf_load(p.s + i * ROWS + v * VL), sum[i][v]);
    UNROLL_FOR (int i = 0; i < height; ++i)
        UNROLL_FOR (int v = 0; v < vectors; ++v) vf_store(p.s + i * ROWS + v * VL, sum[i][v]);
}

static inline ALWAYS_INLINE void sum_rows(int rows, const int vectors, const int sharers, const part_of_sums *p)
{
#define OF_HEIGHT(height)                                                                                              \
    case height:                                                                                                       \
        if (height <= HIGHEST) sum_tile(height <= HIGHEST ? height : 1, vectors, sharers, *p);                         \
        break
    switch (rows) {
        OF_HEIGHT(1);
        OF_HEIGHT(2);
        OF_HEIGHT(3);
        OF_HEIGHT(4);
        OF_HEIGHT(5);
        OF_HEIGHT(6);
    }
#undef OF_HEIGHT
}

static void sum_part(int rows, int vectors, int tiles, const part_of_sums *p)
{
#define SUM_ROWS(vectors) sum_rows(rows, vectors, 1, p)
    if (vectors < VECTORS)
        WITH_VECTORS(vectors, SUM_ROWS);
    else if (tiles >= 4)
        sum_rows(rows, VECTORS, 4, p);
    else if (tiles > 1)
        sum_rows(rows, VECTORS, 2, p);
    else
        sum_rows(rows, VECTORS, 1, p);
#undef SUM_ROWS
}

/* A piece for one block of rows.  *copied: the first row of the block that the thread had before, whose copy the scratch
 * holds, if there is one.  Other rows come from far: each tile asks for those of the next. */
static void linear(const sdpa_linear *l, int64_t row, int rows, int64_t vector, void *scratch, int64_t *copied)
{
    real *const s = scratch;
    const linear_piece piece = piece_of(l, row, rows, vector);
    const int64_t count = steps(l->ins);
    const int tiles = (rows + HIGHEST - 1) / HIGHEST, new_rows = *copied != row;
    const operand x = read_linear(l, row, rows, s + l->block_rows * ROWS, !new_rows);
    const real *w = (const real *)l->weights + vector / VECTORS * count * ROWS + vector % VECTORS * VL;
    part_of_sums part = {.stride = x.stride / (ptrdiff_t)sizeof(real), .pace = STEP_BYTES};
    if (is_whole(&piece)) part.pace = (STEP_BYTES + tiles - 1) / tiles;
    int64_t k = 0, end;
    *copied = row;
    do {
        end = count - k < PART_STEPS ? count : k + PART_STEPS;
        part.count = end - k, part.w = w + k * ROWS, part.more = k > 0;
        part.soon = tiles == 1 ? (const char *)part.w + AHEAD : (const char *)(w + end * ROWS);
        for (int tile = 0; tile < tiles; ++tile) {
            const int i = rows * tile / tiles, height = rows * (tile + 1) / tiles - i; /* as equal as can be */
            const linear_piece some = rows_of(&piece, i, height);
            part.x = (const real *)x.at + i * part.stride + k, part.s = s + i * ROWS;
            for (int next = height; new_rows && next < 2 * height && i + next < rows; ++next)
                fetch((const char *)(part.x + next * part.stride), part.count * (ptrdiff_t)sizeof(real), 0);
            sum_part(height, piece.count, tiles, &part);
            if (is_whole(&piece)) part.soon += part.count * part.pace;
            if (end == count) finish_rows(l, &some, part.s);
        }
        k = end;
    } while (k < count);
}
#endif

#endif
