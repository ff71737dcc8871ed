/* Few rows: where the rows of K and V are read, and what is fetched ahead of them. */
#ifndef SDPA_FORWARD_RUNS_H
#define SDPA_FORWARD_RUNS_H

#include "memory/pages.h"
#include "memory/prefetch.h"
#include "memory/read.h"
#include "forward/scratch.h"

/* So many keys go through all rows while they are in the first-level cache: memory is read in its order. */
enum { KEYS_IN_CACHE = 16 };

/* Rows of K or V that follow each other in memory, from one key on.  `ahead` is the like of it that will be read some
 * rows later; `compact`: without gaps between rows. */
typedef struct {
    const char *at, *ahead;
    ptrdiff_t stride;
    int compact;
    const char *scales; /* for int8: of the first key */
    ptrdiff_t scale_stride;
    int group_shift;
} row_run;

/* So many bytes, by where K and V are expected.  Measured on Zen 5 with 1 to 5 rows of all dtypes: from the third-level
 * cache 4 to 8 KB are alike, 2 KB take up to 5 % longer, 12 KB up to 4 %; from memory 4 KB take 8 to 25 % more than
 * 12 KB, 8 KB up to 12 %, 20 KB 2 to 4 %, 32 KB 3 to 12 %. */
static inline ptrdiff_t bytes_ahead(int from) { return from == SDPA_MEMORY ? 12288 : 6144; }

/* Tiles read several rows side by side, or parts of them, but what comes ahead of them is fetched in the order of
 * memory, a line with each vector that is read.  Measured, decode-32k float32: 77 GB/s; in the order in which it is
 * read 65; all lines of a tile at once, before it, 56. */
typedef struct {
    const char *at;       /* the next line */
    ptrdiff_t step, turn; /* to that of the next key, and from the last key to the next line of the first */
} lines_ahead;

/* Of a tile of keys, from the byte `from` of each on. */
static inline ALWAYS_INLINE lines_ahead keys_ahead(row_run run, int first, const int keys, ptrdiff_t from)
{
    const char *at = run.ahead + first * run.stride;
    if (run.compact) return (lines_ahead){at + from * keys, LINE, 0};
    return (lines_ahead){at + from, run.stride, LINE - keys * run.stride};
}

/* With column d of all keys of the tile. */
static inline ALWAYS_INLINE void fetch_keys(lines_ahead *ahead, const int keys, int64_t d, const int dtype)
{
    if (d * size_of(dtype) % LINE) return;
    UNROLL_FOR (int key = 0; key < keys; ++key) {
        PREFETCH(ahead->at, 3);
        ahead->at += ahead->step;
    }
    ahead->at += ahead->turn;
}

/* The keys of a tile, by groups. */
enum { GROUPS = (VL + GROUP_ROWS - 1) / GROUP_ROWS };

static inline ALWAYS_INLINE void find_groups(const char **at, row_run run, int first, const int keys, ptrdiff_t from)
{
    UNROLL_FOR (int i = 0; i < keys; i += GROUP_ROWS) {
        at[i / GROUP_ROWS] = run.at + (first + i) * run.stride + from;
        NOT_DERIVED(at[i / GROUP_ROWS]);
    }
}
static inline ALWAYS_INLINE void move_groups(const char **at, const int keys, ptrdiff_t bytes)
{
    UNROLL_FOR (int i = 0; i < keys; i += GROUP_ROWS) {
        at[i / GROUP_ROWS] += bytes;
        NOT_DERIVED(at[i / GROUP_ROWS]);
    }
}

/* Of a tile of `bytes` of each key, from the byte `from` on. */
static inline ALWAYS_INLINE lines_ahead values_ahead(row_run run, int keys, ptrdiff_t from, const int bytes)
{
    return (lines_ahead){run.ahead + from * (run.compact ? keys : 1), run.compact ? bytes : run.stride, 0};
}

/* With one key. */
static inline ALWAYS_INLINE void fetch_values(lines_ahead *ahead, const int bytes)
{
    UNROLL_FOR (int line = 0; line < bytes; line += LINE) PREFETCH(ahead->at + line, 3);
    ahead->at += ahead->step;
}

/* K or V, and how it is read. */
typedef struct {
    operand rows;
    const sdpa_array *array, *scale;
    const char *rows_at, *scales_at; /* see row_address */
    int compact;
    int rows_ahead; /* that are fetched meanwhile, in whole pieces, as runs are read */
    ptrdiff_t ahead;
} source;

static source source_of(operand rows, int far, int64_t width, const sdpa_array *array, const char *rows_at,
                        const sdpa_array *scale, const char *scales_at)
{
    source s = {rows, array, scale, rows_at, scales_at, 0, KEYS_IN_CACHE, bytes_ahead(far)};
    const int64_t bytes = width * size_of(rows.dtype);
    s.compact = rows.stride == bytes;
    while (bytes && s.rows_ahead * bytes < s.ahead) s.rows_ahead += KEYS_IN_CACHE;
    return s;
}
static source source_of_keys(const sdpa_input *in, const sdpa_task *t, operand keys)
{
    return source_of(keys, t->rows.far, in->dim, &in->key, t->rows.keys_at, &in->key_scale, t->rows.key_scales_at);
}
static source source_of_values(const sdpa_input *in, const sdpa_task *t, operand values)
{
    return source_of(values, t->rows.far, in->value_dim, &in->value, t->rows.values_at, &in->value_scale,
                     t->rows.value_scales_at);
}

static void enter_page(const sdpa_input *in, const sdpa_task *t, const source *s, int key, int *end, row_run *run)
{
    const int later = key + s->rows_ahead;
    int unused = key + 1;
    /* Pieces so short have their like in one page, too, in pages of a multiple of so many rows. */
    if (*end - key > KEYS_IN_CACHE) *end = key + KEYS_IN_CACHE;
    run->at = run->ahead = row_address(in, s->array, s->rows_at, t, key, end);
    if (t->block.first + later < t->rows.kv_len) /* maybe in the next part, which mostly comes next */
        run->ahead = row_address(in, s->array, s->rows_at, t, later, &unused);
}

/* The run from `key` of the block on; it ends before key *end. */
static inline ALWAYS_INLINE row_run run_of(const sdpa_input *in, const sdpa_task *t, const source *s, int key, int *end,
                                           const int dtype)
{
    row_run run = {.stride = s->rows.stride, .compact = s->compact, .group_shift = in->group_shift};
    int unused = key + 1;
    if (!s->rows.at) {
        enter_page(in, t, s, key, end, &run);
    } else {
        run.at = s->rows.at + key * run.stride;
        run.ahead = run.at + (s->compact ? s->ahead : s->rows_ahead * run.stride);
    }
    if (dtype != SDPA_INT8) return run;
    run.scales = row_address(in, s->scale, s->scales_at, t, key, &unused);
    run.scale_stride = s->scale->row;
    return run;
}

/* part[0][places] += all other part[VL][places]: halves meet first, and so on. */
static inline ALWAYS_INLINE void add_halves(const int places, real *part)
{
    UNROLL_FOR (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half * places; ++i) part[i] += part[i + half * places];
}

#endif
