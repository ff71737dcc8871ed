/* What the files of this folder share.  They are geometry only: no arithmetic on the arrays, so they are compiled once. */
#ifndef SDPA_PLAN_H
#define SDPA_PLAN_H

#include "sdpa.h"

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t clip64(int64_t x, int64_t low, int64_t high) { return max64(low, min64(x, high)); }

/* Queries of a batch. */
static inline int64_t queries(const sdpa_input *in, int64_t batch)
{
    return in->q_starts ? in->q_starts[batch + 1] - in->q_starts[batch] : in->q_len;
}

static inline int64_t vectors_per_head(const sdpa_input *in, int64_t q_len, int lanes)
{
    return (q_len * sdpa_group(in) + lanes - 1) / lanes;
}

/* rows.c: where the rows of K or V begin. */
char *sdpa_first_row(const sdpa_input *, const sdpa_array *, int64_t batch, int64_t kv_head);

/* visibility.c */
void sdpa_summarise_mask(const sdpa_input *, const sdpa_rows *, const sdpa_block *, int *any, int *all);
void sdpa_find_seen(const sdpa_input *, const sdpa_rows *, int lanes, sdpa_block *);

#endif
