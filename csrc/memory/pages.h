/* Where the rows of K and V lie, which may be in pages. */
#ifndef SDPA_MEMORY_PAGES_H
#define SDPA_MEMORY_PAGES_H

#include "sdpa.h"

/* Where row `key` of the block lies; `rows_at` is row 0 of all (or of page 0).  *end is lowered to the last row
 * (counted from the block's first) that follows it in memory: in its page, or in pages that lie behind each other. */
static inline const char *row_address(const sdpa_input *in, const sdpa_array *array, const char *rows_at,
                                      const sdpa_task *t, int key, int *end)
{
    if (!in->pages) return rows_at + (t->block.first + key) * array->row;
    const int64_t number = (t->block.first + key) / in->page_size, row = (t->block.first + key) % in->page_size;
    const int64_t *page = in->pages + t->rows.batch * in->page_columns + number, first = *page;
    int64_t rows = in->page_size - row;
    while (*end - key > rows && page[1] == page[0] + 1 && array->batch == in->page_size * array->row)
        rows += in->page_size, ++page;
    if (*end - key > rows) *end = key + (int)rows;
    return rows_at + first * array->batch + row * array->row;
}
static inline const char *key_address(const sdpa_input *in, const sdpa_task *t, int key, int *end)
{
    return row_address(in, &in->key, t->rows.keys_at, t, key, end);
}
static inline const char *value_address(const sdpa_input *in, const sdpa_task *t, int key, int *end)
{
    return row_address(in, &in->value, t->rows.values_at, t, key, end);
}

#endif
