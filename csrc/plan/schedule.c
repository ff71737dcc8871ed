/* How the work is cut: rows into tasks, these into bundles, keys into parts; and the units that threads take at once. */
#include "plan/plan.h"

#include <math.h>

/* The share of the time in which threads have work at least, if each takes one of `units` after the other: in all they
 * come to `all`, and none is larger than `largest`. */
double sdpa_busy(int threads, double units, double largest, double all)
{
    const double rounds = ceil(units / threads) * largest, last = (all - largest) / threads + largest;
    return all / (threads * (rounds < last ? rounds : last));
}

static const double EVENLY = 0.9; /* of that share: more units would cost more than the threads would gain */

static int64_t up(int64_t all, int64_t each) { return (all + each - 1) / each; }

/* The same where each of `heads` is cut into `pieces`, the largest of `largest` of its `of_head`.  In `uneven` heads, as
 * causality makes them, the last piece has twice the work of the mean, nearly; but it comes first, and two threads make
 * up for it with those that are shorter. */
static double busy(int threads, int64_t heads, int uneven, int64_t pieces, int64_t largest, int64_t of_head)
{
    const double units = (double)(heads * pieces);
    const double more = uneven && (threads > 2 || units < 8) ? 2 - 1 / (double)pieces : 1;
    return sdpa_busy(threads, units, more * (double)largest, (double)(heads * of_head));
}

/* Into how many pieces each head is cut: as few as pieces of at most `most` allow, more where threads would otherwise
 * run short of work. */
int64_t sdpa_cut_evenly(int threads, int64_t heads, int uneven, int64_t of_head, int64_t most)
{
    int64_t best = up(of_head, most);
    double share = 0;
    for (int64_t each = most; threads > 1 && share < EVENLY && each > 0; --each) {
        const int64_t pieces = up(of_head, each);
        const double found = busy(threads, heads, uneven, pieces, up(of_head, pieces), of_head);
        if (found > share) share = found, best = pieces;
    }
    return best;
}

static int64_t heads_of_all(const sdpa_input *in) { return in->batches * in->kv_heads; }

static int is_uneven(const sdpa_input *in) { return in->end_shift || in->begin_shift; }

/* A thread takes a bundle of tasks of one head, and takes them through each block together: the block comes from afar
 * once for all of them, and where K or V must be converted, it is converted once.  So many that this costs little, yet
 * few enough that their scratch stays in the second-level cache and that no thread runs short of work. */
static int64_t cut_into_bundles(const sdpa_schedule *s, int64_t tasks)
{
    const sdpa_input *in = s->input;
    enum { CACHE = 512 << 10, PER_THREAD = 4 };
    if (tasks <= 1) return tasks;
    const int64_t bytes = (in->dim + in->value_dim + 1) * s->kernel->rows * s->kernel->real_bytes;
    const int64_t most = clip64(CACHE / bytes, 1, SDPA_MAX_BUNDLE), heads = heads_of_all(in);
    const int64_t wanted = s->threads == 1 ? 1 : up(PER_THREAD * s->threads, heads);
    int64_t bundles = min64(tasks, max64(up(tasks, most), wanted)), each = up(tasks, bundles);
    while (s->threads > 1 && each > 1 && busy(s->threads, heads, is_uneven(in), bundles, each, tasks) < EVENLY)
        bundles = up(tasks, --each);
    return bundles;
}

/* Few rows: parts of the keys, which are summed on their own and then joined.  Part i begins with key i * part_keys, and
 * how long it is depends on the number of keys and their sizes alone: so do the bits, whoever computes them.  As short
 * as can be without the joins being noticed (measured: half as long, one token of 4096 keys takes 2 to 6 % longer on
 * one thread), but no more than MOST, as there are sums for each level of their tree.  The last one takes what is left,
 * half of a part or more.  What no row sees is left out.  attention_weights goes through the keys twice, and takes them
 * whole. */
static void cut_into_parts(const sdpa_schedule *s, int64_t batch, sdpa_cut *cut)
{
    const sdpa_input *in = s->input;
    enum { KEYS = 1024, NUMBERS = 1 << 17, MOST = 1024 };
    const int64_t q_len = queries(in, batch), kv_len = in->kv_lengths ? in->kv_lengths[batch] : in->kv_len;
    cut->part_keys = KEYS;
    cut->parts = (sdpa_span){0, 1};
    if (!s->kernel->join || in->weights.data || q_len == 0) return;
    while (cut->part_keys > s->kernel->block_keys && cut->part_keys * (in->dim + in->value_dim) > NUMBERS)
        cut->part_keys /= 2;
    while (cut->part_keys * MOST < kv_len) cut->part_keys *= 2;
    const int64_t last = (kv_len + cut->part_keys / 2) / cut->part_keys - 1;
    if (last < 1) return;
    cut->last_part = last;
    const int64_t begin = sdpa_visible(in, batch, kv_len, 0).begin,
                  end = sdpa_visible(in, batch, kv_len, q_len - 1).end;
    if (begin < end)
        cut->parts = (sdpa_span){min64(begin / cut->part_keys, last), min64((end - 1) / cut->part_keys, last) + 1};
}

static sdpa_cut cut_head(const sdpa_schedule *s, int64_t batch)
{
    const sdpa_input *in = s->input;
    const int64_t q_len = queries(in, batch), rows = q_len * sdpa_group(in);
    sdpa_cut cut = {0};
    if (rows < s->fewest_rows || rows > s->most_rows || rows == 0) return cut;
    cut.tasks = sdpa_cut_evenly(s->threads, heads_of_all(in), is_uneven(in),
                                vectors_per_head(in, q_len, s->kernel->lanes), s->kernel->rows / s->kernel->lanes);
    cut.bundles = cut_into_bundles(s, cut.tasks);
    cut_into_parts(s, batch, &cut);
    return cut;
}

/* ---- The tree of parts: node i of a level holds the nodes 2 i and 2 i + 1 of the level below; those of level 0 are the
 * parts.  A node that no row sees is left out, and a node of one node is that one. */

int sdpa_has_node(const sdpa_cut *cut, int level, int64_t node)
{
    return cut->parts.begin >> level <= node && node <= (cut->parts.end - 1) >> level;
}

static int64_t nodes(const sdpa_cut *cut, int level)
{
    return ((cut->parts.end - 1) >> level) - (cut->parts.begin >> level) + 1;
}

/* The lowest level with one node for all parts. */
int sdpa_height(const sdpa_cut *cut)
{
    int level = 0;
    while (nodes(cut, level) > 1) ++level;
    return level;
}

/* ---- Units */

/* What there is to share: the heads, parts of the keys of all of them, and the highest of their trees. */
typedef struct {
    int64_t heads, parts;
    int height, alike;
} amount;

/* How many batches differ in how they are cut: all, or none from the first. */
static int64_t different_batches(const sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    const int keys_differ = in->kv_lengths || (in->shift_stride && (in->begin_shift || in->end_shift));
    return in->q_starts || (s->kernel->join && keys_differ) ? in->batches : 1;
}

/* The first batch's is kept: where batches are alike it is that of all. */
static sdpa_cut cut_of(const sdpa_schedule *s, int64_t batch)
{
    return batch == 0 || different_batches(s) == 1 ? s->cut : cut_head(s, batch);
}

static amount measure(const sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    const int64_t batches = different_batches(s), times = in->kv_heads * (batches == 1 ? in->batches : 1);
    amount all = {.alike = batches == 1};
    for (int64_t b = 0; b < batches; ++b) {
        const sdpa_cut cut = cut_of(s, b);
        if (!cut.tasks) continue;
        all.heads += times;
        all.parts += times * nodes(&cut, 0);
        if (sdpa_height(&cut) > all.height) all.height = sdpa_height(&cut);
    }
    return all;
}

/* Whether threads end nearly together with units that are the nodes of a level: alike, but for the last of a head, and
 * nearly a multiple of the threads, or so many that their differences do not count. */
static int share_evenly(const sdpa_schedule *s, const amount *all, int level)
{
    enum { FEWEST = 4, MANY = 10 };
    if (!all->alike) return (level < all->height ? all->parts >> level : all->heads) >= MANY * (int64_t)s->threads;
    const int64_t units = all->heads * nodes(&s->cut, level);
    const double largest = (double)min64(nodes(&s->cut, 0), INT64_C(1) << level);
    return units >= FEWEST * (int64_t)s->threads &&
           sdpa_busy(s->threads, (double)units, largest, (double)all->parts) >= EVENLY;
}

static int64_t units_of_head(const sdpa_schedule *s, sdpa_cut cut)
{
    return !cut.tasks ? 0 : s->split ? nodes(&cut, s->level) : cut.bundles;
}

/* All units of the call for this kernel.  Few rows: where heads do not keep the threads busy to the end, units are nodes
 * of the trees of parts, as large as will do. */
int64_t sdpa_count_units(sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    s->split = 0, s->level = 0, s->most_units = 0;
    if (in->batches == 0 || in->kv_heads == 0) return 0;
    s->cut = cut_head(s, 0);
    if (s->kernel->join) {
        const amount all = measure(s);
        s->level = all.height;
        while (s->threads > 1 && s->level > 0 && !share_evenly(s, &all, s->level)) --s->level;
        s->split = s->level < all.height;
    }
    int64_t units = 0;
    for (int64_t b = 0; b < different_batches(s); ++b) {
        if (in->q_starts) s->unit_starts[b] = units;
        const int64_t each = units_of_head(s, cut_of(s, b));
        units += in->kv_heads * each;
        s->most_units = max64(s->most_units, each);
    }
    if (in->q_starts) return s->unit_starts[in->batches] = units;
    return in->batches * in->kv_heads * s->most_units;
}

int sdpa_largest_bundle(const sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    int64_t largest = 1;
    if (in->kv_heads == 0) return 1;
    for (int64_t b = 0; b < (in->q_starts ? in->batches : min64(in->batches, 1)); ++b) {
        const sdpa_cut cut = cut_of(s, b);
        if (cut.bundles) largest = max64(largest, up(cut.tasks, cut.bundles));
    }
    return (int)largest;
}

/* The last sequence that starts at or before a unit and is not empty. */
static int64_t find_sequence(const sdpa_schedule *s, int64_t unit)
{
    int64_t begin = 0, end = s->input->batches;
    while (end - begin > 1) {
        const int64_t middle = (begin + end) / 2;
        if (s->unit_starts[middle] <= unit)
            begin = middle;
        else
            end = middle;
    }
    return begin;
}

/* Units are numbered head by head, so that its keys stay in the cache.  Where batches are elements of an axis, all have
 * as many units as that which has most. */
sdpa_unit sdpa_find_unit(const sdpa_schedule *s, int64_t unit)
{
    const sdpa_input *in = s->input;
    const int64_t of_batch = in->kv_heads * s->most_units;
    sdpa_unit found = {.batch = in->q_starts ? find_sequence(s, unit) : unit / of_batch};
    const int64_t first = in->q_starts ? s->unit_starts[found.batch] : found.batch * of_batch;
    found.cut = cut_of(s, found.batch);
    const int64_t per_head = in->q_starts ? units_of_head(s, found.cut) : s->most_units;
    found.kv_head = (unit - first) / per_head;
    found.first = first + found.kv_head * per_head;
    found.index = unit - found.first + (s->split ? found.cut.parts.begin >> s->level : 0);
    return found;
}

/* Of the keys that are seen those in a node. */
sdpa_span sdpa_node_keys(const sdpa_cut *cut, int level, int64_t node, sdpa_span seen)
{
    const int64_t keys = cut->part_keys << level;
    const int last = node == cut->last_part >> level;
    return (sdpa_span){max64(seen.begin, node * keys), last ? seen.end : min64(seen.end, (node + 1) * keys)};
}

/* A head as gradients take it.  Its tasks depend on nothing but its rows: those of key and value are sums over them.
 * Where it is cut by rows, each is cut into `finer`, of whole vectors. */
sdpa_unit sdpa_backward_head(const sdpa_schedule *s, int64_t head, int64_t finer)
{
    const sdpa_input *in = s->input;
    sdpa_unit unit = {.batch = head / in->kv_heads, .kv_head = head % in->kv_heads};
    const int64_t q_len = queries(in, unit.batch);
    unit.cut.tasks =
        min64(finer * up(q_len * sdpa_group(in), s->kernel->rows), vectors_per_head(in, q_len, s->kernel->lanes));
    return unit;
}
