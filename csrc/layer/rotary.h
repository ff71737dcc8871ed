/* Rotary embedding: what Cython fills in, and what rotary.c works on.
 *
 * A position turns each pair of features by an angle of its own, position * frequency.  Cosine and sine are computed
 * once for a block of positions, and used for all heads that share it; or they come from tables. */
#ifndef SDPA_ROTARY_H
#define SDPA_ROTARY_H

#include "sdpa.h"

enum { SDPA_MAX_AXES = 64 }; /* as in NumPy */

/* Some of the axes before the rows.  Strides are in bytes, those of the positions or tables in numbers. */
typedef struct {
    int count;
    int64_t total; /* product of the sizes */
    int64_t size[SDPA_MAX_AXES];
    ptrdiff_t x[SDPA_MAX_AXES], out[SDPA_MAX_AXES], positions[SDPA_MAX_AXES];
} sdpa_axes;

typedef struct {
    char *x, *out;
    ptrdiff_t x_row, x_column, out_row, out_column;
    int dtype, itemsize;
    int interleaved;  /* a pair is two neighbours; else features i and i + pairs */
    int in_place;     /* out is x */
    int heads_inside; /* the rows of x lie farther apart than its heads */
    int64_t rows, pairs, dim;
    sdpa_axes own;           /* axes along which positions differ, */
    sdpa_axes shared;        /* and the others: heads */
    const double *positions; /* NULL: first_position, first_position + 1, ... */
    int each_pair;           /* each pair has its own: (rows, pairs) numbers in place of (rows) */
    double first_position;
    const double *frequency;   /* (pairs) */
    double largest_frequency;  /* without sign */
    const void *cosine, *sine; /* tables of (rows, pairs) numbers in place of positions and frequencies, or NULL */
    /* A task is `task_rows` rows from one of `blocks`, for one index of `own` and one of `parts` of the heads. */
    int64_t task_rows, blocks, parts;
} sdpa_rotary;

/* rotary.c, for float and for double.  Scratch holds 2 * task_rows * pairs numbers. */
void sdpa_rotate_4(const sdpa_rotary *, int64_t task, void *scratch);
void sdpa_rotate_8(const sdpa_rotary *, int64_t task, void *scratch);

#endif
