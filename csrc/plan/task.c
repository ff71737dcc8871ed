/* Which rows a task holds, which keys they see, and where the task keeps its numbers.  Geometry only: no arithmetic on
 * the arrays, so this file is compiled once.  Causal, window, q_offset, kv_lengths, grouped heads and the summary of a
 * boolean mask live here and nowhere else. */
#include "sdpa.h"

#include <string.h>

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t clip64(int64_t x, int64_t low, int64_t high) { return max64(low, min64(x, high)); }

/* Queries of a batch. */
static int64_t queries(const sdpa_problem *p, int64_t batch)
{
    return p->q_starts ? p->q_starts[batch + 1] - p->q_starts[batch] : p->q_len;
}

static int64_t vectors_per_head(const sdpa_problem *p, int64_t q_len, int lanes)
{
    return (q_len * sdpa_group(p) + lanes - 1) / lanes;
}

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

/* Where the rows of K or V begin. */
static char *first_row_of(const sdpa_problem *p, const sdpa_array *array, const sdpa_task *t)
{
    if (!array->data) return NULL;
    const ptrdiff_t head = t->kv_head * array->head;
    if (p->pages) return array->data + head;
    return head + (p->k_starts ? array->data + p->k_starts[t->batch] * array->row : sdpa_batch(array, t->batch));
}

/* Keys that a query may see. */
static sdpa_span visible(const sdpa_problem *p, const sdpa_task *t, int64_t query)
{
    const ptrdiff_t at = t->batch * p->shift_step;
    sdpa_span keys = {0, t->kv_len};
    if (p->begin_shift) keys.begin = clip64(query + p->begin_shift[at], 0, t->kv_len);
    if (p->end_shift) keys.end = clip64(query + p->end_shift[at], 0, t->kv_len);
    return keys;
}

/* Fills `address` with where each row of the task lies in `array`, the padding rows like the last. */
static void locate_rows(const sdpa_problem *p, const sdpa_array *array, const sdpa_task *t, int64_t first_row,
                        int padded, char **address)
{
    if (!array->data) return;
    const int64_t group = sdpa_group(p);
    const int64_t query = first_row / group, in_group = first_row % group;
    char *at = p->q_starts ? array->data + p->q_starts[t->batch] * array->row : sdpa_batch(array, t->batch);
    at += (t->kv_head * group + in_group) * array->head + query * array->row;
    if (group == 1) {
        for (int row = 0; row < t->rows; ++row) address[row] = at + row * array->row;
    } else {
        int64_t left_in_group = group - in_group;
        for (int row = 0; row < t->rows; ++row) {
            address[row] = at;
            at += array->head;
            if (--left_in_group == 0) {
                left_in_group = group;
                at += array->row - group * array->head;
            }
        }
    }
    for (int row = t->rows; row < padded; ++row) address[row] = address[t->rows - 1];
}

/* Tasks are numbered from the last rows to the first, so that with causal attention the longest come first and the
 * threads end together. */
void sdpa_enter_task(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, int64_t index,
                     sdpa_task *t)
{
    t->batch = unit->batch;
    t->kv_head = unit->kv_head;
    t->q_len = queries(p, t->batch);
    t->kv_len = p->kv_lengths ? p->kv_lengths[t->batch] : p->kv_len;

    const int64_t tasks = unit->cut.tasks, part = tasks - 1 - index;
    const int64_t vectors = vectors_per_head(p, t->q_len, kernel->lanes);
    const int64_t first_vector = part * vectors / tasks, end_vector = (part + 1) * vectors / tasks;
    const int64_t first_row = first_vector * kernel->lanes;
    t->vectors = (int)(end_vector - first_vector);
    const int padded = t->vectors * kernel->lanes;
    t->first_row = first_row;
    t->rows = (int)min64(padded, t->q_len * sdpa_group(p) - first_row);
    t->lifted = 0;
    t->keys_at = first_row_of(p, &p->key, t);
    t->values_at = first_row_of(p, &p->value, t);
    t->key_scales_at = first_row_of(p, &p->key_scale, t);
    t->value_scales_at = first_row_of(p, &p->value_scale, t);

    /* Both ends of what a row sees grow with the row. */
    const sdpa_span first = visible(p, t, first_row / sdpa_group(p));
    const sdpa_span last = visible(p, t, (first_row + t->rows - 1) / sdpa_group(p));
    t->keys = (sdpa_span){first.begin, last.end};
    t->shared = (sdpa_span){last.begin, first.end};
    locate_rows(p, &p->query, t, first_row, padded, t->query_row);
    locate_rows(p, &p->mask, t, first_row, padded, t->mask_row);
    locate_rows(p, &p->bias, t, first_row, padded, t->bias_row);
    locate_rows(p, p->weights.data ? &p->weights : &p->out, t, first_row, padded, t->out_row);
    locate_rows(p, &p->lse, t, first_row, padded, t->lse_row);
}

/* The keys of the task in one part: whole blocks, so that these do not depend on the parts. */
sdpa_span sdpa_part(const sdpa_problem *p, const sdpa_unit *unit, int64_t part, const sdpa_task *t)
{
    const int64_t block = p->block_keys, parts = unit->cut.parts;
    const int64_t keys = (t->kv_len + parts * block - 1) / (parts * block) * block;
    return (sdpa_span){max64(t->keys.begin, part * keys), min64(t->keys.end, (part + 1) * keys)};
}

/* Whether the mask shows any, and all, of the block's keys to the rows of the task. */
static void summarise_mask(const sdpa_problem *p, const sdpa_task *t, int *any, int *all)
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

/* What `visible` says of the queries of a task without groups, from `query` on, at once for all: with numbers small
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
static void place_rows(const sdpa_problem *p, sdpa_task *t, int lanes)
{
    const int64_t group = sdpa_group(p);
    int64_t in_group = t->first_row % group, query = t->first_row / group;
    if (group == 1) place_queries(p, t, query, t->sees);
    for (int row = 0; group > 1 && row < t->rows; ++row) {
        if (row == 0 || in_group == 0)
            t->sees[row] = within_block(t, visible(p, t, query));
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
        summarise_mask(p, t, &any, &all);
        if (!any) return 0;
        t->masked = !all;
    }
    t->cut = key < t->shared.begin || key + t->block > t->shared.end;
    if (t->cut) {
        place_rows(p, t, kernel->lanes);
        for (int v = 0; v < t->vectors; ++v) t->of_vector[v] = seen_by_vector(t, kernel->lanes, v);
        cut_into_segments(t);
    } else {
        for (int v = 0; v < t->vectors; ++v) t->of_vector[v] = (sdpa_segment){0, t->block, v, v + 1};
        t->segment[0] = (sdpa_segment){0, t->block, 0, t->vectors};
        t->segments = 1;
    }
    return t->segments > 0;
}

/* Rows in scratch may be filled up to whole vectors, or to two of them. */
static int64_t padded(int64_t width, const sdpa_kernel *kernel)
{
    const int64_t step = 2 * kernel->lanes;
    return (width + step - 1) / step * step;
}

/* The scratch of one thread: hands out the arrays of the task one after the other, each on a cache line. */
static void *take(char **at, int64_t elements, int bytes)
{
    char *taken = *at;
    *at += (elements * bytes + 63) / 64 * 64;
    return taken;
}

/* For the tasks of a bundle, which come one after the other in each block: what outlives a block each has for itself.
 * Returns the size. */
size_t sdpa_lay_out_scratch(const sdpa_problem *p, const sdpa_kernel *kernel, char *scratch, sdpa_task *t, int tasks)
{
    const int64_t rows = kernel->rows, bytes = kernel->real_bytes, keys = min64(p->block_keys, p->kv_len + 1);
    char *at = scratch;
    const int64_t dim = padded(p->dim, kernel), value_dim = padded(p->value_dim, kernel);
    sdpa_copied *copied = take(&at, SDPA_COPIES, sizeof *copied);
    void *s = take(&at, keys * rows, bytes), *visible = take(&at, keys * rows, bytes);
    void *high = take(&at, rows, bytes);
    void *block_o = kernel->join || kernel->step == 2 ? take(&at, value_dim * rows, bytes) : NULL;
    void *poison = take(&at, value_dim * rows, bytes);
    void *key_copy = take(&at, keys * dim, bytes), *value_copy = take(&at, keys * value_dim, bytes);
    for (int i = 0; i < tasks; ++i) {
        t[i].leads = i == 0;
        t[i].copied = copied;
        t[i].s = s, t[i].visible = visible;
        t[i].high = high;
        t[i].cap_slope = NULL;
        t[i].block_o = block_o;
        t[i].poison = poison;
        t[i].key_copy = key_copy, t[i].value_copy = value_copy;
        t[i].shrink = take(&at, rows, bytes);
        t[i].q = take(&at, dim * rows, bytes);
        t[i].weigh = p->v ? take(&at, (p->dim + 3) / 4 * 5 * rows, bytes) : NULL;
        t[i].o = take(&at, value_dim * rows, bytes);
        t[i].max = take(&at, rows, bytes);
        t[i].sum = take(&at, rows, bytes);
        t[i].kept = take(&at, rows, bytes);
        t[i].lift = take(&at, rows, bytes);
    }
    return (size_t)(at - scratch);
}

/* A head as gradients take it.  Its tasks depend on nothing but its rows: those of key and value are sums over them. */
sdpa_unit sdpa_backward_head(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t head)
{
    sdpa_unit unit = {.batch = head / p->kv_heads, .kv_head = head % p->kv_heads};
    const int64_t rows = queries(p, unit.batch) * sdpa_group(p);
    unit.cut.tasks = (rows + kernel->rows - 1) / kernel->rows;
    return unit;
}

void sdpa_enter_backward(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, int64_t index,
                         sdpa_task *t)
{
    sdpa_enter_task(p, kernel, unit, index, t);
    const int padded = t->vectors * kernel->lanes;
    locate_rows(p, &p->grad_out, t, t->first_row, padded, t->grad_out_row);
    locate_rows(p, &p->grad_query, t, t->first_row, padded, t->grad_query_row);
    locate_rows(p, &p->grad_bias, t, t->first_row, padded, t->grad_bias_row);
    locate_rows(p, &p->grad_lse, t, t->first_row, padded, t->grad_lse_row);
    locate_rows(p, &p->delta, t, t->first_row, padded, t->delta_row);
}

/* Whether gradients can be summed where they are wanted, in whole vectors.  Pairs end with a factor. */
static int sums_in_place(const sdpa_kernel *kernel, const sdpa_array *result, int64_t width)
{
    return kernel->step == 1 && result->dtype == (kernel->real_bytes == 4 ? SDPA_FLOAT32 : SDPA_FLOAT64) &&
           result->column == result->itemsize && result->row % result->itemsize == 0 && width % kernel->lanes == 0;
}

static int64_t blocks(const sdpa_problem *p, int64_t keys) { return (keys + p->block_keys - 1) / p->block_keys; }

/* The scratch of one thread for gradients, those of `keys` keys among them.  Returns the size. */
size_t sdpa_lay_out_backward(const sdpa_problem *p, const sdpa_kernel *kernel, char *scratch, sdpa_task *t, int tasks,
                             int64_t keys)
{
    const int64_t rows = kernel->rows, bytes = kernel->real_bytes, block = min64(p->block_keys, p->kv_len + 1);
    char *at = scratch;
    const int64_t dim = padded(p->dim, kernel), value_dim = padded(p->value_dim, kernel);
    sdpa_task shared = {.copied = take(&at, SDPA_COPIES, sizeof *shared.copied)};
    shared.s = take(&at, block * rows, bytes);
    shared.slope = shared.visible = take(&at, block * rows, bytes);
    shared.key_slope = kernel->step == 1 ? shared.slope : take(&at, (block + 1) / 2 * rows, bytes);
    shared.cap_slope = p->softcap != 0 ? take(&at, block * rows, bytes) : NULL;
    shared.high = take(&at, rows, bytes);
    shared.key_copy = take(&at, block * dim, bytes);
    shared.value_copy = take(&at, block * value_dim, bytes);
    shared.key_pairs = kernel->step == 1 ? NULL : take(&at, (block + 1) / 2 * dim, bytes);
    shared.summed = take(&at, blocks(p, keys), 1);
    if (keys && !sums_in_place(kernel, &p->grad_key, p->dim)) shared.key_sums.at = take(&at, keys * dim, bytes);
    if (keys && !sums_in_place(kernel, &p->grad_value, p->value_dim))
        shared.value_sums.at = take(&at, keys * value_dim, bytes);
    for (int i = 0; i < tasks; ++i) {
        t[i] = shared;
        t[i].q = take(&at, dim * rows, bytes);
        t[i].g = take(&at, value_dim * rows, bytes);
        t[i].query_rows = take(&at, dim * rows, bytes);
        t[i].grad_rows = take(&at, value_dim * rows, bytes);
        t[i].o = take(&at, dim * rows, bytes);
        t[i].shrink = take(&at, rows, bytes);
        t[i].lse = take(&at, rows, bytes);
        t[i].delta = take(&at, rows, bytes);
    }
    return (size_t)(at - scratch);
}

static void begin_sums(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_task *t, const sdpa_array *result,
                       int64_t width, sdpa_sums *sums)
{
    sums->result = first_row_of(p, result, t);
    sums->stride = padded(width, kernel);
    if (sums_in_place(kernel, result, width)) {
        sums->at = sums->result + sums->keys.begin * result->row;
        sums->stride = result->row / kernel->real_bytes;
    }
    sums->width = width;
}

/* Nothing is summed yet for `keys`; for the tasks of a bundle. */
void sdpa_begin_sums(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, sdpa_span keys,
                     sdpa_task *t, int tasks)
{
    t->batch = unit->batch;
    t->kv_head = unit->kv_head;
    t->key_sums.keys = t->value_sums.keys = keys;
    begin_sums(p, kernel, t, &p->grad_key, p->dim, &t->key_sums);
    begin_sums(p, kernel, t, &p->grad_value, p->value_dim, &t->value_sums);
    memset(t->summed, 0, (size_t)blocks(p, keys.end - keys.begin));
    for (int i = 1; i < tasks; ++i) t[i].key_sums = t->key_sums, t[i].value_sums = t->value_sums;
}

/* Memory for the sums of one part.  Returns its size. */
size_t sdpa_lay_out_sums(const sdpa_problem *p, const sdpa_kernel *kernel, char *memory, sdpa_task *t)
{
    const int64_t rows = kernel->rows, bytes = kernel->real_bytes;
    char *at = memory;
    t->o = take(&at, padded(p->value_dim, kernel) * rows, bytes);
    t->max = take(&at, rows, bytes);
    t->sum = take(&at, rows, bytes);
    t->lift = take(&at, rows, bytes);
    return (size_t)(at - memory);
}
