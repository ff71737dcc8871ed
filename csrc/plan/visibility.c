/* Who sees whom.  Causal, window, q_offset, kv_lengths, grouped heads and the summary of a boolean mask live here and
 * nowhere else. */
#include "plan/plan.h"

/* Keys that a query may see. */
sdpa_span sdpa_visible(const sdpa_input *in, int64_t batch, int64_t kv_len, int64_t query)
{
    const ptrdiff_t at = batch * in->shift_stride;
    sdpa_span keys = {0, kv_len};
    if (in->begin_shift) keys.begin = clip64(query + in->begin_shift[at], 0, kv_len);
    if (in->end_shift) keys.end = clip64(query + in->end_shift[at], 0, kv_len);
    return keys;
}

/* Whether the mask shows any, and all, of the block's keys to the rows of the task. */
void sdpa_summarise_mask(const sdpa_input *in, const sdpa_rows *rows, const sdpa_block *block, int *any, int *all)
{
    const ptrdiff_t stride = in->mask.column;
    unsigned char some = 0, hidden = 0;
    for (int row = 0; row < rows->count && !(some && hidden); ++row) {
        if (row && rows->mask[row] == rows->mask[row - 1]) continue; /* broadcast over rows */
        const char *at = rows->mask[row] + block->first * stride;
        if (stride == 1)
            for (int key = 0; key < block->count; ++key) some |= (unsigned char)at[key], hidden |= at[key] == 0;
        else
            for (int key = 0; key < block->count; ++key)
                some |= (unsigned char)at[key * stride], hidden |= at[key * stride] == 0;
    }
    *any = some != 0;
    *all = !hidden;
}

static sdpa_range within_block(const sdpa_block *block, sdpa_span keys)
{
    return (sdpa_range){(int)clip64(keys.begin - block->first, 0, block->count),
                        (int)clip64(keys.end - block->first, 0, block->count)};
}

/* What `sdpa_visible` says of the queries of a task without groups, from `query` on, at once for all: with numbers small
 * enough for the compiler to do several together. */
static void find_seen_at_once(const sdpa_input *in, const sdpa_rows *rows, int64_t query, sdpa_block *block)
{
    const ptrdiff_t at = rows->batch * in->shift_stride;
    const int keys = (int)min64(block->count, rows->kv_len - block->first), far = 2 * SDPA_MAX_ROWS;
    const int begin =
        in->begin_shift ? (int)clip64(query + in->begin_shift[at] - block->first, -far, keys + far) : -far;
    const int end =
        in->end_shift ? (int)clip64(query + in->end_shift[at] - block->first, -far, keys + far) : keys + far;
    for (int row = 0; row < rows->count; ++row) {
        const int first = begin + (in->begin_shift ? row : 0), last = end + (in->end_shift ? row : 0);
        block->sees[row].begin = first < 0 ? 0 : first > keys ? keys : first;
        block->sees[row].end = last < 0 ? 0 : last > keys ? keys : last;
    }
}

/* Which keys of the block each row sees, and which all rows of a vector see. */
void sdpa_find_seen(const sdpa_input *in, const sdpa_rows *rows, int lanes, sdpa_block *block)
{
    const int64_t group = sdpa_group(in);
    int64_t in_group = rows->first % group, query = rows->first / group;
    if (group == 1) find_seen_at_once(in, rows, query, block);
    for (int row = 0; group > 1 && row < rows->count; ++row) {
        if (row == 0 || in_group == 0)
            block->sees[row] = within_block(block, sdpa_visible(in, rows->batch, rows->kv_len, query));
        else
            block->sees[row] = block->sees[row - 1];
        if (++in_group == group) in_group = 0, ++query;
    }
    for (int row = rows->count; row < rows->vectors * lanes; ++row) block->sees[row] = block->sees[rows->count - 1];
    for (int v = 0; v < rows->vectors; ++v) { /* both ends grow with the row */
        const sdpa_range first = block->sees[v * lanes], last = block->sees[(v + 1) * lanes - 1];
        block->whole[v] = (sdpa_range){last.begin, first.end};
    }
}
