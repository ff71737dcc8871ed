/* The current block of keys of a task: whether any row sees it, and where it is cut. */
#include "plan/plan.h"

/* The keys that any row of vector v sees, widened to multiples of `lanes` so that segments do not get shorter than a
 * tile; what is computed in vain there is hidden again in scores.h. */
static sdpa_segment seen_by_vector(const sdpa_block *block, int lanes, int v)
{
    const sdpa_range first = block->sees[v * lanes],
                     last = block->sees[(v + 1) * lanes - 1]; /* both ends grow with the row */
    if (first.begin >= last.end) return (sdpa_segment){0, 0, v, v};
    const int end = (int)min64(block->count, (last.end + lanes - 1) / lanes * lanes);
    return (sdpa_segment){first.begin / lanes * lanes, end, v, v + 1};
}

/* Cuts the block where the set of vectors that see something changes.  Positions grow with the row, so a vector that
 * starts to see keys later also stops later, and the vectors of a segment are neighbours. */
static void cut_into_segments(sdpa_block *block, int vectors)
{
    block->segments = 0;
    for (int begin = 0; begin < block->count;) {
        int end = block->count, first = vectors, last = -1;
        for (int v = 0; v < vectors; ++v) {
            const sdpa_segment seen = block->of_vector[v];
            if (seen.begin > begin && seen.begin < end) end = seen.begin;
            if (seen.end > begin && seen.end < end) end = seen.end;
            if (seen.begin <= begin && begin < seen.end) {
                if (first == vectors) first = v;
                last = v;
            }
        }
        if (last >= 0) block->segment[block->segments++] = (sdpa_segment){begin, end, first, last + 1};
        begin = end;
    }
}

/* Makes the block that starts at `key` (a multiple of block_keys) the current one; 0 if no row sees any key of it. */
int sdpa_enter_block(const sdpa_schedule *s, const sdpa_rows *rows, int64_t key, sdpa_block *block)
{
    const sdpa_input *in = s->input;
    const int lanes = s->kernel->lanes;
    block->first = key;
    block->count = (int)min64(s->kernel->block_keys, rows->keys.end - key);
    block->masked = 0;
    if (in->mask.data) {
        int any, all;
        sdpa_summarise_mask(in, rows, block, &any, &all);
        if (!any) return 0;
        block->masked = !all;
    }
    block->cut = key < rows->shared.begin || key + block->count > rows->shared.end;
    if (block->cut) {
        sdpa_find_seen(in, rows, lanes, block);
        for (int v = 0; v < rows->vectors; ++v) block->of_vector[v] = seen_by_vector(block, lanes, v);
        cut_into_segments(block, rows->vectors);
    } else {
        for (int v = 0; v < rows->vectors; ++v) block->of_vector[v] = (sdpa_segment){0, block->count, v, v + 1};
        block->segment[0] = (sdpa_segment){0, block->count, 0, rows->vectors};
        block->segments = 1;
    }
    return block->segments > 0;
}
