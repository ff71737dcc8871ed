/* How the work is cut: rows into tasks, these into bundles, keys into parts; and the units that threads take at once. */
#include "plan/plan.h"

/* Tasks of one key/value head: as few as its rows allow, more where the threads would otherwise run short of work.
 * Where causality or a window cuts them they last from nothing to the longest, so those come in larger numbers. */
static int64_t cut_into_tasks(const sdpa_schedule *s, int64_t q_len)
{
    const sdpa_input *in = s->input;
    const int64_t vectors = vectors_per_head(in, q_len, s->kernel->lanes), most = s->kernel->rows / s->kernel->lanes;
    const int64_t heads = in->batches * in->kv_heads;
    const int64_t wanted = s->threads == 1 ? 1 : (in->end_shift || in->begin_shift ? 4 : 1) * (int64_t)s->threads;
    const int64_t fewest = (vectors + most - 1) / most;
    return min64(vectors, max64(fewest, (wanted + heads - 1) / heads));
}

/* A thread takes a bundle of tasks of one head, and takes them through each block together: the block comes from afar
 * once for all of them, and where K or V must be converted, it is converted once.  So many that this costs little, yet
 * few enough that their scratch stays in the second-level cache and that no thread runs short of work. */
static int64_t cut_into_bundles(const sdpa_schedule *s, int64_t tasks)
{
    const sdpa_input *in = s->input;
    enum { CACHE = 512 << 10, PER_THREAD = 4 };
    if (tasks <= 1) return tasks;
    const int64_t bytes = (in->dim + in->value_dim + 1) * s->kernel->rows * s->kernel->real_bytes;
    const int64_t most = clip64(CACHE / bytes, 1, SDPA_MAX_BUNDLE), heads = in->batches * in->kv_heads;
    const int64_t wanted = s->threads == 1 ? 1 : (PER_THREAD * s->threads + heads - 1) / heads;
    return min64(tasks, max64((tasks + most - 1) / most, wanted));
}

/* Few rows: parts of the keys, which are summed on their own and then joined in their order.  Their number depends on
 * the number of keys alone, and so do the bits, whoever computes them; it is bounded, as is then the memory for their
 * sums.  attention_weights goes through the keys twice, and takes them whole. */
static int64_t cut_into_parts(const sdpa_schedule *s, int64_t kv_len)
{
    const sdpa_input *in = s->input;
    enum { KEYS = 1024, MOST = 64 };
    return s->kernel->join && !in->weights.data ? clip64(kv_len / KEYS, 1, MOST) : 1;
}

/* Where batches are elements of an axis, all are cut alike, as if each had all keys. */
static sdpa_cut cut_head(const sdpa_schedule *s, int64_t batch)
{
    const sdpa_input *in = s->input;
    const int64_t q_len = queries(in, batch), rows = q_len * sdpa_group(in);
    if (rows < s->fewest_rows || rows > s->most_rows || rows == 0) return (sdpa_cut){0, 0, 0};
    const int64_t tasks = cut_into_tasks(s, q_len);
    const int64_t kv_len = in->q_starts ? in->kv_lengths[batch] : in->kv_len;
    return (sdpa_cut){tasks, cut_into_bundles(s, tasks), cut_into_parts(s, kv_len)};
}

static int64_t units_of_head(const sdpa_schedule *s, sdpa_cut cut) { return s->split ? cut.parts : cut.bundles; }

/* All units of the call for this kernel.  Where heads are too few for the threads, parts of the keys become units. */
int64_t sdpa_count_units(sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    if (in->batches == 0 || in->kv_heads == 0) return 0;
    s->split = 0;
    if (!in->q_starts) {
        const sdpa_cut cut = cut_head(s, 0);
        const int64_t heads = in->batches * in->kv_heads;
        s->split = cut.parts > 1 && s->threads > 1 && heads < 4 * s->threads;
        return heads * units_of_head(s, cut);
    }
    int64_t heads = 0, parts = 0, units = 0;
    for (int64_t b = 0; b < in->batches; ++b) {
        const sdpa_cut cut = cut_head(s, b);
        heads += cut.tasks ? in->kv_heads : 0;
        parts = max64(parts, cut.parts);
    }
    s->split = parts > 1 && s->threads > 1 && heads < 4 * s->threads;
    for (int64_t b = 0; b < in->batches; ++b) {
        s->unit_starts[b] = units;
        units += in->kv_heads * units_of_head(s, cut_head(s, b));
    }
    s->unit_starts[in->batches] = units;
    return units;
}

int sdpa_largest_bundle(const sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    int64_t largest = 1;
    if (in->kv_heads == 0) return 1;
    for (int64_t b = 0; b < (in->q_starts ? in->batches : min64(in->batches, 1)); ++b) {
        const sdpa_cut cut = cut_head(s, b);
        if (cut.bundles) largest = max64(largest, (cut.tasks + cut.bundles - 1) / cut.bundles);
    }
    return (int)largest;
}

/* Units are numbered head by head, so that its keys stay in the cache. */
sdpa_unit sdpa_find_unit(const sdpa_schedule *s, int64_t unit)
{
    const sdpa_input *in = s->input;
    sdpa_unit found = {0};
    if (in->q_starts) { /* the last sequence that starts at or before it and is not empty */
        int64_t end = in->batches;
        while (end - found.batch > 1) {
            const int64_t middle = (found.batch + end) / 2;
            if (s->unit_starts[middle] <= unit)
                found.batch = middle;
            else
                end = middle;
        }
        unit -= s->unit_starts[found.batch];
    }
    found.cut = cut_head(s, found.batch);
    const int64_t per_head = units_of_head(s, found.cut), head = unit / per_head;
    found.index = unit % per_head;
    if (!in->q_starts) found.batch = head / in->kv_heads;
    if (in->kv_lengths) found.cut.parts = cut_into_parts(s, in->kv_lengths[found.batch]); /* its own, not more */
    found.kv_head = head % in->kv_heads;
    return found;
}

/* The keys of the task in one part: whole blocks, so that these do not depend on the parts. */
sdpa_span sdpa_part(const sdpa_schedule *s, const sdpa_unit *unit, int64_t part, const sdpa_rows *rows)
{
    const int64_t block = s->kernel->block_keys, parts = unit->cut.parts;
    const int64_t keys = (rows->kv_len + parts * block - 1) / (parts * block) * block;
    return (sdpa_span){max64(rows->keys.begin, part * keys), min64(rows->keys.end, (part + 1) * keys)};
}

/* A head as gradients take it.  Its tasks depend on nothing but its rows: those of key and value are sums over them. */
sdpa_unit sdpa_backward_head(const sdpa_schedule *s, int64_t head)
{
    const sdpa_input *in = s->input;
    sdpa_unit unit = {.batch = head / in->kv_heads, .kv_head = head % in->kv_heads};
    const int64_t rows = queries(in, unit.batch) * sdpa_group(in);
    unit.cut.tasks = (rows + s->kernel->rows - 1) / s->kernel->rows;
    return unit;
}
