/* How numbers lie in the scratch of a task, and what was copied there. */
#ifndef SDPA_FORWARD_SCRATCH_H
#define SDPA_FORWARD_SCRATCH_H

#include "variant.h"

static inline int64_t whole_vectors(int64_t width) { return (width + VL - 1) / VL * VL; }

/* Scores lie as s[key][rows]; of few rows without gaps between those of one key and the next. */
static inline ptrdiff_t score_index(const sdpa_task *t, int key, int v)
{
    return (ptrdiff_t)key * (SDPA_FEW_ROWS ? t->scratch.places : ROWS) + v * VL;
}
static inline real *scores_at(const sdpa_task *t, int key, int v)
{
    return (real *)t->scratch.s + score_index(t, key, v);
}

/* The vectors of o, which each engine has in lines of its own. */
#define FOR_OUTPUT(in, t, line, v)                                                                                     \
    for (int64_t line = 0; line < output_lines(in, t); ++line)                                                         \
        for (int v = 0; v < output_vectors(in, t); ++v)

/* Rows of K or V as a product reads them: elements of `dtype` side by side, rows `stride` bytes apart.  Where `at` is
 * NULL rows lie in pages, and are asked for one by one. */
typedef struct {
    const char *at;
    ptrdiff_t stride;
    int dtype;
} operand;

/* What is unusual about the values of a block (odd_values). */
enum { SMALL = 1, NOT_FINITE = 2 };

/* Whether a copy lacks rows of the block; it is said to hold them from now on. */
static inline int must_copy(const sdpa_task *t, sdpa_copied *copied)
{
    const int same =
        copied->batch == t->rows.batch && copied->kv_head == t->rows.kv_head && copied->key == t->block.first;
    /* With an odd number the second half of the last pair is 0, and not a row (pairs.h). */
    if (same && copied->rows >= t->block.count && (copied->rows == t->block.count || t->block.count % STEP == 0))
        return 0;
    if (SDPA_FEW_ROWS) t->scratch.copied[0].rows = t->scratch.copied[1].rows = 0; /* they share their place */
    *copied = (sdpa_copied){t->rows.batch, t->rows.kv_head, t->block.first, t->block.count, 0};
    return 1;
}

#endif
