/* Asking for memory before it is read. */
#ifndef SDPA_MEMORY_PREFETCH_H
#define SDPA_MEMORY_PREFETCH_H

#include "variant.h"

enum { LINE = 64 }; /* bytes of a cache line */

/* Asks for `bytes` from `at` on, into all caches or, where `near` is 0, the second level only. */
static inline ALWAYS_INLINE void fetch(const char *at, ptrdiff_t bytes, const int near)
{
    const char *line = at - (uintptr_t)at % LINE;
    for (; line < at + bytes; line += LINE)
        if (near)
            PREFETCH(line, 3);
        else
            PREFETCH(line, 2);
}

/* The same without the line that `at` is in, unless it begins there: rows that follow each other share it. */
static inline ALWAYS_INLINE void fetch_rest(const char *at, ptrdiff_t bytes)
{
    const char *line = at + (LINE - (uintptr_t)at % LINE) % LINE;
    for (; line < at + bytes; line += LINE) PREFETCH(line, 3);
}

/* Asks for `width` elements of each row of a vector of rows, before they are read column by column of vectors: each of
 * these would wait for its own lines. */
static inline void fetch_rows(const sdpa_array *array, char *const *row_at, int64_t width)
{
    if (array->column != array->itemsize) return;
    for (int row = 0; row < VL; ++row) fetch(row_at[row], width * array->itemsize, 1);
}

#endif
