/* Who sees whom.  Causal, window, q_offset, kv_lengths, grouped heads and the summary of a boolean mask live here and
 * nowhere else. */
#include "plan/plan.h"

/* Keys that a query may see. */
sdpa_span sdpa_visible(const sdpa_problem *p, const sdpa_task *t, int64_t query)
{
    const ptrdiff_t at = t->batch * p->shift_step;
    sdpa_span keys = {0, t->kv_len};
    if (p->begin_shift) keys.begin = clip64(query + p->begin_shift[at], 0, t->kv_len);
    if (p->end_shift) keys.end = clip64(query + p->end_shift[at], 0, t->kv_len);
    return keys;
}

/* Whether the mask shows any, and all, of the block's keys to the rows of the task. */
void sdpa_summarise_mask(const sdpa_problem *p, const sdpa_task *t, int *any, int *all)
{
    const ptrdiff_t step = p->mask.column;
    unsigned char some = 0, hidden = 0;
    for (int row = 0; row < t->rows && !(some && hidden); ++row) {
        if (row && t->mask_row[row] == t->mask_row[row - 1]) continue; /* broadcast over rows */
        const char *at = t->mask_row[row] + t->key * step;
        if (step == 1)
            for (int key = 0; key < t->block; ++key) some |= (unsigned char)at[key], hidden |= at[key] == 0;
        else
            for (int key = 0; key < t->block; ++key)
                some |= (unsigned char)at[key * step], hidden |= at[key * step] == 0;
    }
    *any = some != 0;
    *all = !hidden;
}

static sdpa_range within_block(const sdpa_task *t, sdpa_span keys)
{
    return (sdpa_range){(int)clip64(keys.begin - t->key, 0, t->block), (int)clip64(keys.end - t->key, 0, t->block)};
}

/* What `sdpa_visible` says of the queries of a task without groups, from `query` on, at once for all: with numbers small
 * enough for the compiler to do several together. */
static void place_queries(const sdpa_problem *p, const sdpa_task *t, int64_t query, sdpa_range *sees)
{
    const ptrdiff_t at = t->batch * p->shift_step;
    const int block = (int)min64(t->block, t->kv_len - t->key), far = 2 * SDPA_MAX_ROWS;
    const int begin = p->begin_shift ? (int)clip64(query + p->begin_shift[at] - t->key, -far, block + far) : -far;
    const int end = p->end_shift ? (int)clip64(query + p->end_shift[at] - t->key, -far, block + far) : block + far;
    for (int row = 0; row < t->rows; ++row) {
        const int first = begin + (p->begin_shift ? row : 0), last = end + (p->end_shift ? row : 0);
        sees[row].begin = first < 0 ? 0 : first > block ? block : first;
        sees[row].end = last < 0 ? 0 : last > block ? block : last;
    }
}

/* Which keys of the block each row sees, and which all rows of a vector see. */
void sdpa_place_rows(const sdpa_problem *p, sdpa_task *t, int lanes)
{
    const int64_t group = sdpa_group(p);
    int64_t in_group = t->first_row % group, query = t->first_row / group;
    if (group == 1) place_queries(p, t, query, t->sees);
    for (int row = 0; group > 1 && row < t->rows; ++row) {
        if (row == 0 || in_group == 0)
            t->sees[row] = within_block(t, sdpa_visible(p, t, query));
        else
            t->sees[row] = t->sees[row - 1];
        if (++in_group == group) in_group = 0, ++query;
    }
    for (int row = t->rows; row < t->vectors * lanes; ++row) t->sees[row] = t->sees[t->rows - 1];
    for (int v = 0; v < t->vectors; ++v) { /* both ends grow with the row */
        const sdpa_range first = t->sees[v * lanes], last = t->sees[(v + 1) * lanes - 1];
        t->whole[v] = (sdpa_range){last.begin, first.end};
    }
}
