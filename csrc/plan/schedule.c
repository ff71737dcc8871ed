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

/* The longest of so many pieces, of the mean: the rows of an uneven head see ever more keys, up to twice the mean. */
static double longest(double uneven, int64_t pieces) { return 1 + uneven * (1 - 1 / (double)pieces); }

/* The same where each of `heads` is cut into `pieces`, the largest of `largest` of its `of_head`.  In `uneven` heads, as
 * causality makes them, the last piece has up to twice the work of the mean; but it comes first, and two threads make up
 * for it with those that are shorter. */
static double busy(int threads, int64_t heads, double uneven, int64_t pieces, int64_t largest, int64_t of_head)
{
    const double units = (double)(heads * pieces);
    const double more = threads > 2 || units < 8 ? longest(uneven, pieces) : 1;
    return sdpa_busy(threads, units, more * (double)largest, (double)(heads * of_head));
}

/* Into how many pieces each head is cut: as few as pieces of at most `most` allow, more where threads would otherwise
 * run short of work. */
int64_t sdpa_cut_evenly(int threads, int64_t heads, double uneven, int64_t of_head, int64_t most)
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

/* Tiles of rows of a projection that are done together: a panel is read from far once for so many, which costs nothing
 * then.  22 are the 128 rows that calls often have; 20 to 32 take as long.  Rows of more bytes than LINEAR_ROWS leave
 * the second-level cache before the next panel; fewer tiles than LINEAR_FEWEST would wait for panels. */
enum { LINEAR_TILES = 22, LINEAR_FEWEST = 4, LINEAR_ROWS = 3 << 18, CACHE_LINE = 64 };

/* Of all panels, those of features of the result and of their gates. */
int64_t sdpa_linear_vectors(const sdpa_linear *l, const sdpa_kernel *kernel)
{
    return up(l->outs, kernel->lanes) * sdpa_vectors_apart(l);
}

/* Blocks of rows times panels, the number of which it returns.  The blocks are as equal as whole tiles allow, as by
 * their number threads share them; more where the panels alone would leave threads without work, but no more than that:
 * each reads the weights once.  Where that does not suffice, panels are cut between vectors, too, into whole cache lines:
 * these lie apart then, and a row is multiplied by fewer numbers at once. */
int64_t sdpa_cut_linear(sdpa_linear *l, const sdpa_kernel *kernel, int threads)
{
    const int64_t tile = kernel->linear_tile, row_bytes = max64(1, l->ins * kernel->real_bytes / kernel->step);
    const int64_t most = clip64(LINEAR_ROWS / (tile * row_bytes), LINEAR_FEWEST, LINEAR_TILES);
    const int64_t tiles = up(l->rows, tile), vectors = sdpa_linear_vectors(l, kernel);
    int64_t units = 0;
    double share = 0;
    l->block_rows = l->vectors = 0;
    if (tiles * vectors == 0) return 0;
    const int64_t in_line = up(CACHE_LINE, kernel->lanes * kernel->real_bytes);
    int each = kernel->rows / kernel->lanes;
    do {
        const int64_t pieces = up(vectors, each);
        const int64_t of_block = up(tiles, sdpa_cut_evenly(threads, pieces, 0, tiles, min64(most, tiles)));
        const int64_t cut = pieces * up(tiles, of_block);
        const double found = sdpa_busy(threads, (double)cut, (double)(of_block * each), (double)(tiles * vectors));
        /* Blocks of one tile are as equal as rows allow, larger ones as tiles allow. */
        const int64_t rows = of_block == 1 ? up(l->rows, tiles) : of_block * tile;
        if (found > share) share = found, units = cut, l->block_rows = (int)rows, l->vectors = each;
        each /= 2;
    } while (share < EVENLY && each >= max64(in_line, sdpa_vectors_apart(l)));
    return units;
}

static int64_t heads_of_all(const sdpa_input *in) { return in->batches * in->kv_heads; }

static int64_t keys_seen(const sdpa_input *in, int64_t batch, int64_t query)
{
    const sdpa_span seen = sdpa_visible(in, batch, in->kv_lengths ? in->kv_lengths[batch] : in->kv_len, query);
    return max64(0, seen.end - seen.begin);
}

/* By how much, of the mean, the query that sees most sees more: 1 where none sees a key more than the one before it, 0
 * where few stand behind many keys. */
static double unevenness(const sdpa_input *in, int64_t batch)
{
    const int64_t last = queries(in, batch) - 1;
    if (last < 1 || !(in->end_shift || in->begin_shift)) return 0;
    const int64_t of_first = keys_seen(in, batch, 0), of_middle = keys_seen(in, batch, last / 2),
                  of_last = keys_seen(in, batch, last), most = max64(max64(of_first, of_last), of_middle);
    return most ? 4 * (double)most / (double)(of_first + 2 * of_middle + of_last) - 1 : 0;
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

/* The parts that hold the keys; where there are none, one. */
sdpa_span sdpa_parts_of(const sdpa_cut *cut, sdpa_span keys)
{
    if (cut->last_part == 0) return (sdpa_span){0, 1};
    const int64_t first = min64(keys.begin / cut->part_keys, cut->last_part);
    const int64_t last = min64((keys.end - 1) / cut->part_keys, cut->last_part);
    return keys.begin < keys.end ? (sdpa_span){first, last + 1} : (sdpa_span){0, 1};
}

/* ---- Cutting a head */

/* A thread takes a bundle of tasks of one head, and takes them through each block together: the block comes from afar
 * once for all of them, and where K or V must be converted, it is converted once.  So many that this costs little, yet
 * few enough that their scratch stays in the second-level cache and that no thread runs short of work, of which there
 * are `heads`. */
static int64_t cut_into_bundles(const sdpa_schedule *s, int64_t heads, double uneven, int64_t tasks)
{
    const sdpa_input *in = s->input;
    enum { CACHE = 512 << 10, PER_THREAD = 4 };
    if (tasks <= 1) return tasks;
    const int64_t bytes = (in->dim + in->value_dim + 1) * s->kernel->rows * s->kernel->real_bytes;
    const int64_t most = clip64(CACHE / bytes, 1, SDPA_MAX_BUNDLE);
    const int64_t wanted = s->threads == 1 ? 1 : up(PER_THREAD * s->threads, heads);
    int64_t bundles = min64(tasks, max64(up(tasks, most), wanted)), each = up(tasks, bundles);
    while (s->threads > 1 && each > 1 && busy(s->threads, heads, uneven, bundles, each, tasks) < EVENLY)
        bundles = up(tasks, --each);
    return bundles;
}

/* Parts of the keys, which are summed on their own and then joined.  Part i begins with key i * part_keys, and how long
 * it is depends on the number of keys, their sizes and the engine alone: so do the bits, whoever computes them.  As short
 * as can be without the joins being noticed (measured on one thread: half as long, one token of 4096 keys takes 2 to 6 %
 * longer; many rows of bfloat16 with D = 128 take 4 % longer with parts of 512 keys, 1 % with 1024), but so many at most
 * that the sums for each level of their tree, of all rows of a bundle, stay small.  The last one takes what is left, half
 * of a part or more.  What no row sees is left out.  attention_weights goes through the keys twice, and takes them
 * whole. */
static void cut_into_parts(const sdpa_schedule *s, int64_t batch, sdpa_cut *cut)
{
    const sdpa_input *in = s->input;
    enum { KEYS = 1024, NUMBERS = 1 << 17, MOST_OF_FEW = 1024, MOST_OF_MANY = 16, TIMES_OF_MANY = 2 };
    const int64_t q_len = queries(in, batch), kv_len = in->kv_lengths ? in->kv_lengths[batch] : in->kv_len;
    cut->part_keys = KEYS;
    cut->parts = (sdpa_span){0, 1};
    if (in->weights.data || q_len == 0) return;
    while (cut->part_keys > s->kernel->block_keys && cut->part_keys * (in->dim + in->value_dim) > NUMBERS)
        cut->part_keys /= 2;
    if (!s->kernel->few_rows) cut->part_keys *= TIMES_OF_MANY;
    while (cut->part_keys * (s->kernel->few_rows ? MOST_OF_FEW : MOST_OF_MANY) < kv_len) cut->part_keys *= 2;
    const int64_t last = (kv_len + cut->part_keys / 2) / cut->part_keys - 1;
    if (last < 1) return;
    cut->last_part = last;
    cut->parts = sdpa_parts_of(
        cut, (sdpa_span){sdpa_visible(in, batch, kv_len, 0).begin, sdpa_visible(in, batch, kv_len, q_len - 1).end});
}

/* Vectors of a whole task. */
static int64_t whole_task(const sdpa_schedule *s) { return s->kernel->rows / s->kernel->lanes; }

/* Whether threads may share the parts of tasks, as there are too few of these: parts need room for their sums. */
static int shares_parts(const sdpa_schedule *s)
{
    enum { FEWEST = 2 };
    const sdpa_input *in = s->input;
    int64_t tasks = 0;
    if (s->kernel->few_rows) return s->threads > 1;
    for (int64_t b = 0; b < (in->q_starts ? in->batches : 1); ++b)
        tasks += up(vectors_per_head(in, queries(in, b), s->kernel->lanes), whole_task(s));
    return s->threads > 1 && tasks * (in->q_starts ? in->kv_heads : heads_of_all(in)) < FEWEST * (int64_t)s->threads;
}

/* Where threads share parts, rows are cut finer only where the parts do not suffice: a vector of rows reads as many keys
 * as a task. */
static sdpa_cut cut_head(const sdpa_schedule *s, int64_t batch)
{
    const sdpa_input *in = s->input;
    const int64_t q_len = queries(in, batch), rows = q_len * sdpa_group(in);
    sdpa_cut cut = {0};
    if (rows < s->fewest_rows || rows > s->most_rows || rows == 0) return cut;
    cut_into_parts(s, batch, &cut);
    const double uneven = unevenness(in, batch);
    const int64_t heads = heads_of_all(in) * (s->shares_parts ? nodes(&cut, 0) : 1);
    cut.tasks =
        sdpa_cut_evenly(s->threads, heads, uneven, vectors_per_head(in, q_len, s->kernel->lanes), whole_task(s));
    cut.bundles = cut_into_bundles(s, heads, uneven, cut.tasks);
    return cut;
}

/* ---- Units */

/* What there is to share: the heads, bundles and parts of these of all of them, and the highest of the trees. */
typedef struct {
    int64_t heads, bundles, parts;
    int height, alike;
} amount;

/* How many batches differ in how they are cut: all, or none from the first. */
static int64_t different_batches(const sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    const int keys_differ = in->kv_lengths || (in->shift_stride && (in->begin_shift || in->end_shift));
    return in->q_starts || keys_differ ? in->batches : 1;
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
        all.bundles += times * cut.bundles;
        all.parts += times * cut.bundles * nodes(&cut, 0);
        if (sdpa_height(&cut) > all.height) all.height = sdpa_height(&cut);
    }
    return all;
}

/* Whether threads end nearly together with units that are the nodes of a level: alike, but for the last of a head, and
 * nearly a multiple of the threads, or so many that their differences do not count.  Few rows wait for memory, which
 * serves the threads unevenly. */
static int share_evenly(const sdpa_schedule *s, const amount *all, int level)
{
    enum { OF_FEW = 4, MANY = 10 };
    const int64_t threads = s->threads, fewest = s->kernel->few_rows ? OF_FEW : 1;
    if (!all->alike) return (level < all->height ? all->parts >> level : all->bundles) >= MANY * threads;
    const sdpa_cut *cut = &s->cut;
    const int64_t parts = nodes(cut, 0), units = all->bundles * nodes(cut, level),
                  largest = up(cut->tasks, cut->bundles) * min64(parts, INT64_C(1) << level);
    const double more = longest(unevenness(s->input, 0), cut->bundles);
    return units >= fewest * threads && sdpa_busy(s->threads, (double)units, more * (double)largest,
                                                  (double)(all->heads * cut->tasks * parts)) >= EVENLY;
}

static int64_t units_of_head(const sdpa_schedule *s, sdpa_cut cut)
{
    return !cut.tasks ? 0 : cut.bundles * (s->split ? nodes(&cut, s->level) : 1);
}

/* All units of the call for this kernel: bundles; or where these are few and do not keep the threads busy to the end,
 * nodes of the trees of their parts, as large as will do. */
int64_t sdpa_count_units(sdpa_schedule *s)
{
    const sdpa_input *in = s->input;
    s->split = 0, s->level = 0, s->most_units = 0, s->largest_bundle = 1, s->most_parts = 1;
    if (in->batches == 0 || in->kv_heads == 0) return 0;
    s->shares_parts = shares_parts(s);
    s->cut = cut_head(s, 0);
    const amount all = measure(s);
    s->level = all.height;
    while (s->shares_parts && s->level > 0 && !share_evenly(s, &all, s->level)) --s->level;
    s->split = s->level < all.height;
    int64_t units = 0;
    for (int64_t b = 0; b < different_batches(s); ++b) {
        if (in->q_starts) s->unit_starts[b] = units;
        const sdpa_cut cut = cut_of(s, b);
        const int64_t each = units_of_head(s, cut);
        units += in->kv_heads * each;
        s->most_units = max64(s->most_units, each);
        if (!each) continue;
        s->largest_bundle = (int)max64(s->largest_bundle, up(cut.tasks, cut.bundles));
        s->most_parts = max64(s->most_parts, nodes(&cut, 0));
    }
    if (in->q_starts) return s->unit_starts[in->batches] = units;
    return in->batches * in->kv_heads * s->most_units;
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
    found.first = unit;
    int64_t bundle = unit - first - found.kv_head * per_head;
    if (s->split && found.cut.tasks) {
        const int64_t of_bundle = nodes(&found.cut, s->level), node = bundle % of_bundle;
        bundle /= of_bundle;
        found.first = unit - node;
        found.node = node + (found.cut.parts.begin >> s->level);
    }
    if (bundle < found.cut.bundles) {
        found.first_task = bundle * found.cut.tasks / found.cut.bundles;
        found.end_task = (bundle + 1) * found.cut.tasks / found.cut.bundles;
    }
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
