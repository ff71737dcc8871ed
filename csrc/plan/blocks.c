/* The current block of keys of a task: whether any row sees it, and where it is cut. */
#include "plan/plan.h"

/* The keys that any row of vector v sees, widened to whole steps of `lanes` so that segments do not get shorter than a
 * tile; what is computed in vain there is hidden again in scores.h. */
static sdpa_segment seen_by_vector(const sdpa_task *t, int lanes, int v)
{
    const sdpa_range first = t->sees[v * lanes], last = t->sees[(v + 1) * lanes - 1]; /* both ends grow with the row */
    if (first.begin >= last.end) return (sdpa_segment){0, 0, v, v};
    const int end = (int)min64(t->block, (last.end + lanes - 1) / lanes * lanes);
    return (sdpa_segment){first.begin / lanes * lanes, end, v, v + 1};
}

/* Cuts the block where the set of vectors that see something changes.  Positions grow with the row, so a vector that
 * starts to see keys later also stops later, and the vectors of a segment are neighbours. */
static void cut_into_segments(sdpa_task *t)
{
    t->segments = 0;
    for (int begin = 0; begin < t->block;) {
        int end = t->block, first = t->vectors, last = -1;
        for (int v = 0; v < t->vectors; ++v) {
            const sdpa_segment seen = t->of_vector[v];
            if (seen.begin > begin && seen.begin < end) end = seen.begin;
            if (seen.end > begin && seen.end < end) end = seen.end;
            if (seen.begin <= begin && begin < seen.end) {
                if (first == t->vectors) first = v;
                last = v;
            }
        }
        if (last >= 0) t->segment[t->segments++] = (sdpa_segment){begin, end, first, last + 1};
        begin = end;
    }
}

/* Makes the block that starts at `key` (a multiple of block_keys) the current one; 0 if no row sees any key of it. */
int sdpa_enter_block(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t key, sdpa_task *t)
{
    t->key = key;
    t->block = (int)min64(p->block_keys, t->keys.end - key);
    t->masked = 0;
    if (p->mask.data) {
        int any, all;
        sdpa_summarise_mask(p, t, &any, &all);
        if (!any) return 0;
        t->masked = !all;
    }
    t->cut = key < t->shared.begin || key + t->block > t->shared.end;
    if (t->cut) {
        sdpa_place_rows(p, t, kernel->lanes);
        for (int v = 0; v < t->vectors; ++v) t->of_vector[v] = seen_by_vector(t, kernel->lanes, v);
        cut_into_segments(t);
    } else {
        for (int v = 0; v < t->vectors; ++v) t->of_vector[v] = (sdpa_segment){0, t->block, v, v + 1};
        t->segment[0] = (sdpa_segment){0, t->block, 0, t->vectors};
        t->segments = 1;
    }
    return t->segments > 0;
}
