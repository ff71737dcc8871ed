/* The projections of a layer: y[row][out] = act(sum over k of x[row][k] * w[out][k] + bias[out]) + residual[row][out].
 *
 * With the features of y in lanes, and w transposed once for all calls, this is the product of scores (product.h):
 * a row of x takes the place of a key, and a panel of w that of the queries.
 *
 *     x[row][k]                        as it lies, or a copy where it must be converted
 *     w[panel][k in steps][ROWS]       ROWS features of y to a panel, the last one filled up with 0;
 *                                      with gates, ROWS / 2 gates and then what they weigh
 *     s[row][ROWS]                     sums of one panel; finished there, then written
 *
 * Parts of PART_STEPS of a panel (32 KB) stay in the first-level cache while the rows of a block go by.  After the last
 * part the sums of a tile are finished and written at once, so that writing spreads over the time of a panel. */
#ifndef SDPA_LAYER_LINEAR_H
#define SDPA_LAYER_LINEAR_H

#include "forward/product.h"
#include "memory/prefetch.h"
#include "layer/activations.h"

/* Features of the result in a panel. */
static int panel_width(const sdpa_linear *l) { return l->gated ? ROWS / 2 : ROWS; }

/* Rows of w as lanes of a panel, from one of them on; the others stay as they are. */
static void pack_panel(const sdpa_array *weight, int64_t outs, int64_t ins, int lane, void *panel)
{
    for (int64_t out = 0; out < outs; ++out) {
        const char *from = weight->data + out * weight->row;
        for (int64_t k = 0; k < ins; ++k)
            pack_one(from + k * weight->column, weight->dtype, (real *)panel + k / STEP * ROWS + lane + out, k % STEP);
    }
}

/* s = act(s + bias), or in the last vectors, act(gate + bias) * (s + bias) of those before. */
static inline ALWAYS_INLINE void activate_sums(int rows, const int gated, const int activation, const real *bias,
                                               real *s)
{
    const int count = gated ? VECTORS / 2 : VECTORS;
    for (int row = 0; row < rows; ++row, s += ROWS) {
        vf x[VECTORS];
        UNROLL_FOR (int v = 0; v < VECTORS; ++v) {
            x[v] = vf_load(s + v * VL);
            if (bias) x[v] = vf_add(x[v], vf_load(bias + v * VL));
        }
        activate(x, count, activation);
        UNROLL_FOR (int v = 0; v < count; ++v) vf_store(s + v * VL, gated ? vf_mul(x[v], x[v + VECTORS / 2]) : x[v]);
    }
}

static void finish_sums(const sdpa_linear *l, int rows, const real *bias, real *s)
{
#define ACTIVATE(activation)                                                                                           \
    case activation:                                                                                                   \
        if (l->gated)                                                                                                  \
            activate_sums(rows, 1, activation, bias, s);                                                               \
        else                                                                                                           \
            activate_sums(rows, 0, activation, bias, s);                                                               \
        break
    switch (l->activation) {
        ACTIVATE(SDPA_IDENTITY);
        ACTIVATE(SDPA_RELU);
        ACTIVATE(SDPA_GELU);
        ACTIVATE(SDPA_GELU_TANH);
        ACTIVATE(SDPA_SILU);
    }
#undef ACTIVATE
}

/* out[row][first ...] = s[row][:] + bias + residual[row][first ...] */
static inline ALWAYS_INLINE void write_linear(const sdpa_linear *l, int64_t row, int rows, int64_t first,
                                              const real *bias, const real *s)
{
    const sdpa_array *more = &l->residual;
    const int64_t left = l->outs - first;
    const int width = panel_width(l);
    char *at = l->out.data + row * l->out.row + first * l->out.column;
    const char *more_at = more->data ? more->data + row * more->row + first * more->column : NULL;
    for (int i = 0; i < rows; ++i, at += l->out.row, s += ROWS) {
        for (int v = 0; v * VL < left && v * VL < width; ++v) {
            const int count = left - v * VL < VL ? (int)(left - v * VL) : VL;
            vf y = vf_load(s + v * VL);
            if (bias) y = vf_add(y, vf_load(bias + v * VL));
            if (more_at) y = vf_add(y, read_chunk(more_at + v * VL * more->column, more->column, count, more));
            write_chunk(at + v * VL * l->out.column, l->out.column, count, &l->out, y);
        }
        if (more_at) more_at += more->row;
    }
}

/* The same where rows lie side by side and all features of the panel are wanted. */
static inline ALWAYS_INLINE void write_whole(const sdpa_linear *l, int64_t row, int rows, int64_t first,
                                             const real *bias, const real *s, const int dtype, const int vectors)
{
    const ptrdiff_t size = l->out.column, more_size = l->residual.column;
    char *at = l->out.data + row * l->out.row + first * size;
    const char *more_at = l->residual.data ? l->residual.data + row * l->residual.row + first * more_size : NULL;
    for (int i = 0; i < rows; ++i, at += l->out.row, s += ROWS)
        UNROLL_FOR (int v = 0; v < vectors; ++v) {
            vf y = vf_load(s + v * VL);
            if (bias) y = vf_add(y, vf_load(bias + v * VL));
            if (more_at) y = vf_add(y, read_adjacent(more_at + i * l->residual.row + v * VL * more_size, dtype));
            write_adjacent(at + v * VL * size, dtype, y);
        }
}

/* What follows the sums: rows that are in the first-level cache. */
static void finish_rows(const sdpa_linear *l, int64_t row, int rows, int64_t panel, real *s)
{
    const int64_t first = panel * panel_width(l);
    const real *bias = l->bias ? (const real *)l->bias + panel * ROWS : NULL;
    if (l->activation || l->gated) {
        finish_sums(l, rows, bias, s);
        bias = NULL;
    }
    const sdpa_array *out = &l->out, *more = &l->residual;
    const int as_out = more->data == NULL || (more->dtype == out->dtype && more->column == out->column);
    const int whole = l->outs - first >= panel_width(l) && writes_adjacent(out, out->column) && as_out;
#define WRITE(dtype)                                                                                                   \
    do {                                                                                                               \
        if (l->gated)                                                                                                  \
            write_whole(l, row, rows, first, bias, s, dtype, VECTORS / 2);                                             \
        else                                                                                                           \
            write_whole(l, row, rows, first, bias, s, dtype, VECTORS);                                                 \
    } while (0)
    if (!whole)
        write_linear(l, row, rows, first, bias, s);
    else if (out->dtype == SDPA_FLOAT16)
        WRITE(SDPA_FLOAT16);
    else if (out->dtype == SDPA_BFLOAT16)
        WRITE(SDPA_BFLOAT16);
    else
        WRITE(REAL_DTYPE);
#undef WRITE
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

/* One panel for one block of rows.  *copied: the first row of the block that the thread had before, whose copy the
 * scratch holds.  Meanwhile what is needed of the panel next is asked for. */
static void linear(const sdpa_linear *l, int64_t row, int rows, int64_t panel, void *scratch, int64_t *copied)
{
    real *const s = scratch;
    const int64_t left = l->gated ? ROWS : l->outs - panel * panel_width(l), count = whole_vectors(steps(l->ins));
    const int vectors = left < ROWS ? (int)((left + VL - 1) / VL) : VECTORS, tiles = (rows + HIGHEST - 1) / HIGHEST;
    const operand x = read_linear(l, row, rows, s + l->block_rows * ROWS, *copied == row);
    const real *w = (const real *)l->weights + panel * count * ROWS;
    const int products = rows <= SIDE && vectors == VECTORS ? 1 : (vectors + 1) / 2, visits = tiles * products;
    int64_t k = 0, end;
    *copied = row;
    use_tiles();
    do {
        end = count - k < PART_STEPS ? count : k + PART_STEPS;
        lines_soon soon = {(const char *)(w + (tiles > 1 ? end : k) * ROWS) + (tiles > 1 ? 0 : AHEAD), 0};
        soon.lines = (SIDE * ROW_BYTES / LINE + visits - 1) / visits;
        for (int i = 0; i < rows; i += HIGHEST, soon.at += (end - k) / SIDE * products * soon.lines * LINE) {
            sum_part(rows - i, vectors, end - k, x.at + i * x.stride + k * 4, x.stride, w + k * ROWS, s + i * ROWS,
                     k == 0, soon);
            if (end == count) finish_rows(l, row + i, rows - i < HIGHEST ? rows - i : HIGHEST, panel, s + i * ROWS);
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
enum { STEP_BYTES = ROWS * SDPA_REAL_BYTES, STEP_LINES = (STEP_BYTES + LINE - 1) / LINE }; /* of a panel for one k */
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

/* `sharers`: by how many tiles the lines of a step are shared, at least. */
static inline ALWAYS_INLINE void sum_tile(const int height, const int vectors, const int sharers, const part_of_sums p)
{
    vf sum[TALLEST][SDPA_MAX_VECTORS];
    set_to_zero(height, vectors, sum);
    for (int64_t k = 0; k < p.count; ++k) {
        UNROLL_FOR (int line = 0; line < (STEP_LINES + sharers - 1) / sharers; ++line) {
            const char *at = p.soon + k * p.pace + line * LINE;
            if (sharers == 1)
                PREFETCH(at, 3);
            else
                PREFETCH(at, 2);
        }
        multiply(height, 0, vectors, sum, 1, p.x + k, p.stride, 1, p.w + k * ROWS, ROWS);
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
#define SUM_ROWS(vectors) sum_rows(rows, vectors, 4, p)
    if (vectors < VECTORS || tiles >= 4)
        WITH_VECTORS(vectors, SUM_ROWS);
    else if (tiles > 1)
        sum_rows(rows, VECTORS, 2, p);
    else
        sum_rows(rows, VECTORS, 1, p);
#undef SUM_ROWS
}

/* One panel for one block of rows.  *copied: the first row of the block that the thread had before, whose copy the
 * scratch holds, if there is one.  Other rows come from far: each tile asks for those of the next. */
static void linear(const sdpa_linear *l, int64_t row, int rows, int64_t panel, void *scratch, int64_t *copied)
{
    real *const s = scratch;
    const int64_t left = l->gated ? ROWS : l->outs - panel * panel_width(l), count = steps(l->ins);
    const int vectors = left < ROWS ? (int)((left + VL - 1) / VL) : VECTORS, tiles = (rows + HIGHEST - 1) / HIGHEST;
    const int new_rows = *copied != row;
    const operand x = read_linear(l, row, rows, s + l->block_rows * ROWS, !new_rows);
    const real *w = (const real *)l->weights + panel * count * ROWS;
    part_of_sums part = {.stride = x.stride / (ptrdiff_t)sizeof(real), .pace = (STEP_BYTES + tiles - 1) / tiles};
    int64_t k = 0, end;
    *copied = row;
    do {
        end = count - k < PART_STEPS ? count : k + PART_STEPS;
        part.count = end - k, part.w = w + k * ROWS, part.more = k > 0;
        part.soon = tiles == 1 ? (const char *)part.w + AHEAD : (const char *)(w + end * ROWS);
        for (int tile = 0; tile < tiles; ++tile) {
            const int i = rows * tile / tiles, height = rows * (tile + 1) / tiles - i; /* as equal as can be */
            part.x = (const real *)x.at + i * part.stride + k, part.s = s + i * ROWS;
            for (int next = height; new_rows && next < 2 * height && i + next < rows; ++next)
                fetch((const char *)(part.x + next * part.stride), part.count * (ptrdiff_t)sizeof(real), 0);
            sum_part(height, vectors, tiles, &part);
            part.soon += part.count * part.pace;
            if (end == count) finish_rows(l, row + i, height, panel, part.s);
        }
        k = end;
    } while (k < count);
}
#endif

#endif
