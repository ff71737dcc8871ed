/* How the work is cut: rows into tasks, these into bundles, keys into parts; and the units that threads take at once. */
#include "plan/plan.h"

/* Tasks of one key/value head: as few as its rows allow, more where the threads would otherwise run short of work.
 * Where causality or a window cuts them they last from nothing to the longest, so those come in larger numbers. */
static int64_t cut_into_tasks(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t q_len)
{
    const int64_t vectors = vectors_per_head(p, q_len, kernel->lanes), most = kernel->rows / kernel->lanes;
    const int64_t heads = p->batches * p->kv_heads;
    const int64_t wanted = p->threads == 1 ? 1 : (p->end_shift || p->begin_shift ? 4 : 1) * (int64_t)p->threads;
    const int64_t fewest = (vectors + most - 1) / most;
    return min64(vectors, max64(fewest, (wanted + heads - 1) / heads));
}

/* A thread takes a bundle of tasks of one head, and takes them through each block together: the block comes from afar
 * once for all of them, and where K or V must be converted, it is converted once.  So many that this costs little, yet
 * few enough that their scratch stays in the second-level cache and that no thread runs short of work. */
static int64_t cut_into_bundles(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t tasks)
{
    enum { CACHE = 512 << 10, PER_THREAD = 4 };
    if (tasks <= 1) return tasks;
    const int64_t bytes = (p->dim + p->value_dim + 1) * kernel->rows * kernel->real_bytes;
    const int64_t most = clip64(CACHE / bytes, 1, SDPA_MAX_BUNDLE), heads = p->batches * p->kv_heads;
    const int64_t wanted = p->threads == 1 ? 1 : (PER_THREAD * p->threads + heads - 1) / heads;
    return min64(tasks, max64((tasks + most - 1) / most, wanted));
}

/* Few rows: parts of the keys, which are summed on their own and then joined in their order.  Their number depends on
 * the number of keys alone, and so do the bits, whoever computes them; it is bounded, as is then the memory for their
 * sums.  attention_weights goes through the keys twice, and takes them whole. */
static int64_t cut_into_parts(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t kv_len)
{
    enum { KEYS = 1024, MOST = 64 };
    return kernel->join && !p->weights.data ? clip64(kv_len / KEYS, 1, MOST) : 1;
}

/* Where batches are elements of an axis, all are cut alike, as if each had all keys. */
static sdpa_cut cut_head(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t batch)
{
    const int64_t q_len = queries(p, batch), rows = q_len * sdpa_group(p);
    if (rows < p->fewest_rows || rows > p->most_rows || rows == 0) return (sdpa_cut){0, 0, 0};
    const int64_t tasks = cut_into_tasks(p, kernel, q_len);
    const int64_t kv_len = p->q_starts ? p->kv_lengths[batch] : p->kv_len;
    return (sdpa_cut){tasks, cut_into_bundles(p, kernel, tasks), cut_into_parts(p, kernel, kv_len)};
}

static int64_t units_of_head(const sdpa_problem *p, sdpa_cut cut) { return p->split ? cut.parts : cut.bundles; }

/* All units of the call for this kernel.  Where heads are too few for the threads, parts of the keys become units. */
int64_t sdpa_count_units(sdpa_problem *p, const sdpa_kernel *kernel)
{
    if (p->batches == 0 || p->kv_heads == 0) return 0;
    p->split = 0;
    if (!p->q_starts) {
        const sdpa_cut cut = cut_head(p, kernel, 0);
        const int64_t heads = p->batches * p->kv_heads;
        p->split = cut.parts > 1 && p->threads > 1 && heads < 4 * p->threads;
        return heads * units_of_head(p, cut);
    }
    int64_t heads = 0, parts = 0, units = 0;
    for (int64_t b = 0; b < p->batches; ++b) {
        const sdpa_cut cut = cut_head(p, kernel, b);
        heads += cut.tasks ? p->kv_heads : 0;
        parts = max64(parts, cut.parts);
    }
    p->split = parts > 1 && p->threads > 1 && heads < 4 * p->threads;
    for (int64_t b = 0; b < p->batches; ++b) {
        p->unit_starts[b] = units;
        units += p->kv_heads * units_of_head(p, cut_head(p, kernel, b));
    }
    p->unit_starts[p->batches] = units;
    return units;
}

int sdpa_largest_bundle(const sdpa_problem *p, const sdpa_kernel *kernel)
{
    int64_t largest = 1;
    if (p->kv_heads == 0) return 1;
    for (int64_t b = 0; b < (p->q_starts ? p->batches : min64(p->batches, 1)); ++b) {
        const sdpa_cut cut = cut_head(p, kernel, b);
        if (cut.bundles) largest = max64(largest, (cut.tasks + cut.bundles - 1) / cut.bundles);
    }
    return (int)largest;
}

/* Units are numbered head by head, so that its keys stay in the cache. */
sdpa_unit sdpa_find_unit(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t unit)
{
    sdpa_unit found = {0};
    if (p->q_starts) { /* the last sequence that starts at or before it and is not empty */
        int64_t end = p->batches;
        while (end - found.batch > 1) {
            const int64_t middle = (found.batch + end) / 2;
            if (p->unit_starts[middle] <= unit)
                found.batch = middle;
            else
                end = middle;
        }
        unit -= p->unit_starts[found.batch];
    }
    found.cut = cut_head(p, kernel, found.batch);
    const int64_t per_head = units_of_head(p, found.cut), head = unit / per_head;
    found.index = unit % per_head;
    if (!p->q_starts) found.batch = head / p->kv_heads;
    if (p->kv_lengths) found.cut.parts = cut_into_parts(p, kernel, p->kv_lengths[found.batch]); /* its own, not more */
    found.kv_head = head % p->kv_heads;
    return found;
}
/* The keys of the task in one part: whole blocks, so that these do not depend on the parts. */
sdpa_span sdpa_part(const sdpa_problem *p, const sdpa_unit *unit, int64_t part, const sdpa_task *t)
{
    const int64_t block = p->block_keys, parts = unit->cut.parts;
    const int64_t keys = (t->kv_len + parts * block - 1) / (parts * block) * block;
    return (sdpa_span){max64(t->keys.begin, part * keys), min64(t->keys.end, (part + 1) * keys)};
}

/* A head as gradients take it.  Its tasks depend on nothing but its rows: those of key and value are sums over them. */
sdpa_unit sdpa_backward_head(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t head)
{
    sdpa_unit unit = {.batch = head / p->kv_heads, .kv_head = head % p->kv_heads};
    const int64_t rows = queries(p, unit.batch) * sdpa_group(p);
    unit.cut.tasks = (rows + kernel->rows - 1) / kernel->rows;
    return unit;
}
