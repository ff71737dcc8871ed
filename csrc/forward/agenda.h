/* What is asked for while a product goes on: rows of K, V and the bias that the next ones need. */
#ifndef SDPA_FORWARD_AGENDA_H
#define SDPA_FORWARD_AGENDA_H

#include "memory/pages.h"
#include "memory/prefetch.h"
#include "forward/scratch.h"

/* Rows that are needed soon and may come from memory: some are asked for with each tile, as more at once would be
 * waited for. */
typedef struct {
    const sdpa_input *in;
    const sdpa_task *t;
    const sdpa_array *array;
    char *const *row_at; /* where each row begins, or NULL: rows are keys, from row 0 of the block at `keys_at` on */
    const char *keys_at;
    int row, end, with_each; /* the next one, that behind the last, and so many with each tile */
    ptrdiff_t first_byte, end_byte;
} pending;

/* Those of a product: of some arrays, or none; NULL is none, too. */
typedef struct {
    int count;
    pending rows[4];
} agenda;

static void fetch_pending(pending *rows)
{
    const int end = rows->end - rows->row < rows->with_each ? rows->end : rows->row + rows->with_each;
    const ptrdiff_t bytes = rows->end_byte - rows->first_byte;
    for (; rows->row < end; ++rows->row) {
        int alone = rows->row + 1;
        /* Rows of a bias that lie a multiple of 4096 bytes apart share one set of the first-level cache. */
        if (rows->row_at)
            fetch(rows->row_at[rows->row] + rows->first_byte, bytes, 0);
        else if (rows->array->row == bytes && !rows->in->pages)
            fetch_rest(rows->keys_at + (rows->t->block.first + rows->row) * bytes, bytes);
        else
            fetch(row_address(rows->in, rows->array, rows->keys_at, rows->t, rows->row, &alone), bytes, 1);
    }
}
static inline ALWAYS_INLINE void fetch_some(agenda *soon)
{
    for (int i = 0; soon && i < soon->count; ++i)
        if (soon->rows[i].row < soon->rows[i].end) fetch_pending(&soon->rows[i]);
}

/* Those are asked for while a product of so many keys or features goes on, for so many vectors of rows. */
static void add_pending(agenda *soon, pending rows, int64_t count, int vectors)
{
    if (count == 0) return;
#if TILES
    const int64_t tiles = (count + 2 * SIDE - 1) / (2 * SIDE) * ((vectors + 1) / 2);
#else
    const int64_t height = TILE / vectors, tiles = (count + height - 1) / height;
#endif
    rows.with_each = (int)((rows.end - rows.row + tiles - 1) / tiles);
    soon->rows[soon->count++] = rows;
}

/* Whether rows of K or V are to be asked for: they come from memory, or each lies in a page of its own, where the
 * hardware, which looks ahead within a page, does not find the next. */
static int fetched(const sdpa_task *t, const sdpa_array *array)
{
    enum { PAGE = 4096 };
    return array->data && t->scratch.leads && (t->rows.far == SDPA_MEMORY || array->row >= PAGE) &&
           array->column == array->itemsize;
}

/* Keys begin..end of the block, or behind it, of K or V.  The first task of a bundle does that for all. */
static void add_pending_keys(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *keys_at,
                             int64_t width, int begin, int end, int64_t count, int vectors, agenda *soon)
{
    const int64_t left = t->rows.keys.end - t->block.first;
    if (end > left) end = (int)left;
    if (begin >= end || !fetched(t, array)) return;
    const pending rows = {.in = in,
                          .t = t,
                          .array = array,
                          .keys_at = keys_at,
                          .row = begin,
                          .end = end,
                          .end_byte = width * array->itemsize};
    add_pending(soon, rows, count, vectors);
}

/* The first rows of the next head, in Q, K or V. */
static void add_pending_next(const sdpa_input *in, const sdpa_task *t, const sdpa_array *array, const char *rows_at,
                             int64_t rows, int64_t width, int64_t count, int vectors, agenda *soon)
{
    if (!rows_at || array->column != array->itemsize) return;
    const pending next = {.in = in,
                          .t = t,
                          .array = array,
                          .keys_at = rows_at,
                          .end = rows < BLOCK_KEYS ? (int)rows : BLOCK_KEYS,
                          .end_byte = width * array->itemsize};
    add_pending(soon, next, count, vectors);
}

/* The rows of the result: a cache has to have a line before it can be written to. */
static void add_pending_results(const sdpa_input *in, const sdpa_task *t, int64_t count, int vectors, agenda *soon)
{
    const pending rows = {
        .array = &in->out, .row_at = t->rows.out, .end = t->rows.count, .end_byte = in->value_dim * in->out.itemsize};
    add_pending(soon, rows, count, vectors);
}

/* What the scores of a segment meet in the bias.  One row for all stays in a cache; one that is not adjacent is read
 * element by element. */
static void add_pending_bias(const sdpa_input *in, const sdpa_task *t, sdpa_segment g, agenda *soon)
{
    const sdpa_array *bias = &in->bias;
    if (!bias->data || bias->row == 0 || bias->column != bias->itemsize) return;
    const pending rows = {.array = bias,
                          .row_at = t->rows.bias,
                          .row = g.first_vector * VL,
                          .end = g.end_vector * VL < t->rows.count ? g.end_vector * VL : t->rows.count,
                          .first_byte = (t->block.first + g.begin) * bias->itemsize,
                          .end_byte = (t->block.first + g.end) * bias->itemsize};
    add_pending(soon, rows, g.end - g.begin, g.end_vector - g.first_vector);
}

#endif
