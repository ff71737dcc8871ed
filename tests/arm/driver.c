/* One call of attention, or of its gradients, without Python: a problem on standard input, its results on standard
 * output.
 *
 *     driver ISA ENGINE THREADS < problem > results
 *
 * ENGINE is many or few, for the one that is meant for so many rows whatever their number here, or both: the one that a
 * call would take, for each sequence; or backward, for gradients; or linear, for a projection.  THREADS decides how the
 * work is cut into units; they run one after the other.  With more than one, K and V are taken to come from memory.
 * The problem is a `header` and the arrays it announces, in the order in which they are taken below; tests/test_arm.py
 * writes it.  Every array, the scratch of every run and the sums of all its parts are allocations of their own and of
 * the exact size, so that a sanitizer sees what reads or writes too far.  Nothing but scratch is freed. */
#include "sdpa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t dtype, kv_dtype;                          /* of query, bias and result, and of key and value */
    int64_t batches, heads, q_len, dim;               /* of the query */
    int64_t key_batches, kv_heads, kv_len, value_dim; /* of key and value; where paged: pages, and their size */
    int64_t columns;                                  /* of mask, bias and weights */
    int64_t group;                                    /* of numbers with one scale; 0: none have */
    int64_t sequences;                                /* packed; 0: each batch is one */
    int64_t page_columns;                             /* 0: not paged */
    int64_t weights, lse;                             /* wanted */
    int64_t mask, bias, begin_shift, end_shift, q_offset, kv_lengths, sinks, alibi_slopes; /* present */
    int64_t grad_lse, delta; /* for gradients: present; wanted */
    int64_t grad_bias[4];    /* which axes that of the bias has; along the others it is summed */
    double scale, softcap;
} header;

static void fail(const char *why)
{
    fprintf(stderr, "driver: %s\n", why);
    exit(1);
}

/* The next `bytes` of standard input; nothing is read, and NULL returned, where the array is absent. */
static void *take(int present, size_t bytes)
{
    if (!present) return NULL;
    void *data = malloc(bytes);
    if (!data || fread(data, 1, bytes, stdin) != bytes) fail("the problem is shorter than its header says");
    return data;
}

static int bytes_of(int64_t dtype)
{
    switch (dtype) {
    case SDPA_BOOL:
    case SDPA_INT8: return 1;
    case SDPA_FLOAT16:
    case SDPA_BFLOAT16: return 2;
    case SDPA_FLOAT32: return 4;
    case SDPA_FLOAT64: return 8;
    default: fail("no such dtype"); return 0;
    }
}

/* A contiguous (batches, heads, rows, columns), without its numbers. */
static sdpa_array array_of(int64_t dtype, int64_t heads, int64_t rows, int64_t columns)
{
    const int itemsize = bytes_of(dtype);
    return (sdpa_array){
        .batch = heads * rows * columns * itemsize,
        .head = rows * columns * itemsize,
        .row = columns * itemsize,
        .column = itemsize,
        .dtype = (int)dtype,
        .itemsize = itemsize,
    };
}

/* The next array of standard input. */
static sdpa_array take_array(int64_t present, int64_t dtype, int64_t batches, int64_t heads, int64_t rows,
                             int64_t columns)
{
    sdpa_array array = array_of(dtype, heads, rows, columns);
    array.data = take(present != 0, batches * array.batch);
    return array;
}

/* One for a result, with every byte `fill`; absent where it is not wanted. */
static sdpa_array new_array(int64_t wanted, int fill, int64_t dtype, int64_t batches, int64_t heads, int64_t rows,
                            int64_t columns)
{
    sdpa_array array = array_of(dtype, heads, rows, columns);
    if (!wanted) return array;
    array.data = malloc(batches * array.batch);
    if (!array.data) fail("out of memory");
    memset(array.data, fill, batches * array.batch);
    return array;
}

static void put(const sdpa_array *array, int64_t batches)
{
    if (array->data) fwrite(array->data, 1, batches * array->batch, stdout);
}

/* NaN wherever nothing was written. */
static void *new_memory(size_t bytes)
{
    void *memory; /* of any size, unlike that of aligned_alloc */
    if (posix_memalign(&memory, 64, bytes)) fail("out of memory");
    return memset(memory, 0xff, bytes);
}

/* What the scratch of a thread begins with says that nothing was copied yet. */
static char *new_scratch(size_t bytes) { return memset(new_memory(bytes), 0, SDPA_COPIES * sizeof(sdpa_copied)); }

#include "backward.h"
#include "linear.h"

/* From here to run_all: sdpa/_core.pyx in C. */
static void attend_blocks(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *tasks, int count,
                          sdpa_step accumulate)
{
    sdpa_span keys = tasks[0].keys;
    for (int i = 0; i < count; ++i) {
        kernel->begin(p, &tasks[i]);
        if (tasks[i].keys.begin < keys.begin) keys.begin = tasks[i].keys.begin;
        if (tasks[i].keys.end > keys.end) keys.end = tasks[i].keys.end;
    }
    for (int64_t key = keys.begin / p->block_keys * p->block_keys; key < keys.end; key += p->block_keys)
        for (int i = 0; i < count; ++i) {
            sdpa_task *t = &tasks[i];
            if (t->keys.begin < key + p->block_keys && key < t->keys.end && sdpa_enter_block(p, kernel, key, t)) {
                kernel->scores(p, t);
                kernel->softmax_step(p, t);
                accumulate(p, t);
            }
        }
}

static void attend_carefully(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *tasks, int count)
{
    attend_blocks(p, kernel, tasks, count, kernel->accumulate);
    for (int i = 0; i < count; ++i)
        if (!kernel->finite(p, &tasks[i])) {
            attend_blocks(p, kernel, &tasks[i], 1, kernel->accumulate_seen);
            if (kernel->lift(p, &tasks[i])) attend_blocks(p, kernel, &tasks[i], 1, kernel->accumulate_seen);
            kernel->add_poison(p, &tasks[i]);
        }
}

static void write_weights(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t)
{
    for (int64_t key = t->keys.begin / p->block_keys * p->block_keys; key < t->keys.end; key += p->block_keys)
        if (sdpa_enter_block(p, kernel, key, t)) {
            kernel->scores(p, t);
            kernel->write_weights(p, t);
        }
}

static void finish_task(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t)
{
    kernel->close_sums(p, t);
    if (p->weights.data)
        write_weights(p, kernel, t);
    else
        kernel->write_out(p, t);
}

static void run_bundle(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, char *scratch)
{
    sdpa_task tasks[SDPA_MAX_BUNDLE];
    const int64_t first = unit->index * unit->cut.tasks / unit->cut.bundles;
    const int count = (int)((unit->index + 1) * unit->cut.tasks / unit->cut.bundles - first);
    sdpa_lay_out_scratch(p, kernel, scratch, tasks, count);
    for (int i = 0; i < count; ++i) sdpa_enter_task(p, kernel, unit, first + i, &tasks[i]);
    attend_carefully(p, kernel, tasks, count);
    for (int i = 0; i < count; ++i) finish_task(p, kernel, &tasks[i]);
}

static void attend_part(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, int64_t part,
                        sdpa_task *t)
{
    sdpa_enter_task(p, kernel, unit, 0, t);
    t->keys = sdpa_part(p, unit, part, t);
    attend_carefully(p, kernel, t, 1);
    kernel->start(p, t);
}

static void join_parts(const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, sdpa_task *t,
                       char *scratch, char *sums, size_t sums_bytes)
{
    sdpa_task other[2];
    sdpa_lay_out_scratch(p, kernel, scratch, other, 2);
    for (int64_t part = 1; part < unit->cut.parts; ++part) {
        if (sums)
            sdpa_lay_out_sums(p, kernel, sums + part * sums_bytes, &other[1]);
        else
            attend_part(p, kernel, unit, part, &other[1]);
        kernel->join(p, t, &other[1]);
    }
    sdpa_enter_task(p, kernel, unit, 0, t);
    finish_task(p, kernel, t);
}

static void run_unit(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t index, char *scratch, char *sums,
                     size_t sums_bytes)
{
    const sdpa_unit unit = sdpa_find_unit(p, kernel, index);
    sdpa_task tasks[2];
    if (unit.cut.parts > 1 && unit.cut.tasks > 1) fail("too many rows for parts of the keys");
    if (p->split) {
        sdpa_lay_out_scratch(p, kernel, scratch, tasks, 1);
        sdpa_lay_out_sums(p, kernel, sums + index * sums_bytes, tasks);
        if (unit.index < unit.cut.parts) attend_part(p, kernel, &unit, unit.index, tasks);
    } else if (unit.cut.parts > 1) {
        sdpa_lay_out_scratch(p, kernel, scratch, tasks, 2);
        attend_part(p, kernel, &unit, 0, tasks);
        join_parts(p, kernel, &unit, tasks, scratch, NULL, 0);
    } else {
        run_bundle(p, kernel, &unit, scratch);
    }
}

static void finish_unit(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t index, char *scratch, char *sums,
                        size_t sums_bytes)
{
    const sdpa_unit unit = sdpa_find_unit(p, kernel, index);
    sdpa_task t;
    if (unit.index > 0) return;
    sdpa_lay_out_scratch(p, kernel, scratch, &t, 1);
    sdpa_lay_out_sums(p, kernel, sums + index * sums_bytes, &t);
    sdpa_enter_task(p, kernel, &unit, 0, &t);
    t.started = 1;
    join_parts(p, kernel, &unit, &t, scratch, sums + index * sums_bytes, sums_bytes);
}

/* All units share the scratch of one thread. */
static void run(sdpa_problem *p, const sdpa_kernel *kernel)
{
    sdpa_task tasks[SDPA_MAX_BUNDLE];
    p->block_keys = kernel->block_keys;
    const int64_t units = sdpa_count_units(p, kernel);
    const int fewest = kernel->join ? 2 : 1, largest = sdpa_largest_bundle(p, kernel);
    char *scratch = new_scratch(sdpa_lay_out_scratch(p, kernel, NULL, tasks, largest > fewest ? largest : fewest));
    const size_t sums_bytes = sdpa_lay_out_sums(p, kernel, NULL, tasks);
    char *sums = p->split ? new_memory(units * sums_bytes) : NULL;
    for (int64_t unit = 0; unit < units; ++unit) run_unit(p, kernel, unit, scratch, sums, sums_bytes);
    for (int64_t unit = 0; p->split && unit < units; ++unit) finish_unit(p, kernel, unit, scratch, sums, sums_bytes);
    free(scratch);
    free(sums);
}

static void run_all(sdpa_problem *p, const sdpa_kernel *const engines[2], const char *engine)
{
    const int64_t rows = p->q_len * sdpa_group(p), most = engines[1]->rows;
    const int both = !strcmp(engine, "both"), few = both ? rows <= most : !strcmp(engine, "few");
    p->fewest_rows = 0, p->most_rows = rows;
    if (!both || !p->q_starts || few) {
        run(p, engines[few]);
        return;
    }
    p->most_rows = most;
    run(p, engines[1]);
    p->fewest_rows = most + 1, p->most_rows = rows;
    run(p, engines[0]);
}

static int purpose_of(const header *h)
{
    if (h->dtype == SDPA_FLOAT64) return SDPA_FOR_DOUBLE;
    return h->dtype == SDPA_BFLOAT16 && h->kv_dtype == SDPA_BFLOAT16 ? SDPA_FOR_BFLOAT16 : SDPA_FOR_FLOAT;
}

static const sdpa_kernel *const *find(const char *isa, int purpose)
{
    for (int i = 0; sdpa_isas[i].name; ++i)
        if (!strcmp(sdpa_isas[i].name, isa) && sdpa_cpu_runs(isa)) return sdpa_isas[i].kernel[purpose];
    fail("no such kernel on this CPU");
    return NULL;
}

/* The lengths of packed sequences. */
static void set_sequences(sdpa_problem *p, int64_t sequences)
{
    p->batches = sequences;
    p->q_len = p->kv_len = 0;
    for (int64_t b = 0; b < sequences; ++b) {
        const int64_t q_len = p->q_starts[b + 1] - p->q_starts[b];
        if (q_len > p->q_len) p->q_len = q_len;
        if (p->kv_lengths[b] > p->kv_len) p->kv_len = p->kv_lengths[b];
    }
    p->unit_starts = malloc((sequences + 1) * sizeof(int64_t));
}

static int64_t sum_dtype(const header *h) { return h->dtype == SDPA_FLOAT64 ? SDPA_FLOAT64 : SDPA_FLOAT32; }

static sdpa_problem take_problem(const header *h, int threads)
{
    const int64_t number = sizeof(int64_t), sequences = h->sequences ? h->sequences : h->batches;
    const int64_t per_batch = sequences * number, per_head = sequences * h->heads * (int64_t)sizeof(double);
    const int64_t B = h->batches, H = h->heads, M = h->q_len, pages = h->key_batches, G = h->kv_heads, N = h->kv_len;
    sdpa_problem p = {
        .batches = B,
        .heads = H,
        .kv_heads = G,
        .q_len = M,
        .kv_len = N,
        .dim = h->dim,
        .value_dim = h->value_dim,
        .shift_step = 1,
        .scale = h->scale,
        .softcap = h->softcap,
        .threads = threads,
        .far = threads > 1,
    };
    p.query = take_array(1, h->dtype, B, H, M, h->dim);
    p.key = take_array(1, h->kv_dtype, pages, G, N, h->dim);
    p.value = take_array(!h->weights, h->kv_dtype, pages, G, N, h->value_dim);
    if (h->group) {
        p.key_scale = take_array(1, SDPA_FLOAT32, pages, G, N, divide_up(h->dim, h->group));
        p.value_scale = take_array(1, SDPA_FLOAT32, pages, G, N, divide_up(h->value_dim, h->group));
        while (1 << p.group_shift < h->group) ++p.group_shift;
    }
    p.mask = take_array(h->mask, SDPA_BOOL, B, H, M, h->columns);
    p.bias = take_array(h->bias, h->dtype, B, H, M, h->columns);
    p.begin_shift = take(h->begin_shift, per_batch);
    p.end_shift = take(h->end_shift, per_batch);
    p.q_offset = take(h->q_offset, per_batch);
    p.kv_lengths = take(h->kv_lengths, per_batch);
    p.sinks = take(h->sinks, per_head);
    p.alibi_slopes = take(h->alibi_slopes, per_head);
    if (h->sequences) {
        p.q_starts = take(1, per_batch + number);
        p.k_starts = take(!h->page_columns, per_batch);
        p.pages = take(h->page_columns > 0, per_batch * h->page_columns);
        p.page_columns = h->page_columns, p.page_size = N;
        set_sequences(&p, h->sequences);
    }
    return p;
}

static void attend(const header *h, sdpa_problem *p, const sdpa_kernel *const engines[2], const char *engine)
{
    const int64_t B = h->batches, H = h->heads, M = h->q_len;
    p->weights = new_array(h->weights, 0, h->dtype, B, H, M, h->columns);
    p->out = new_array(!h->weights, 0, h->dtype, B, H, M, h->value_dim);
    p->lse = new_array(h->lse, 0, sum_dtype(h), B, H, M, 1);
    run_all(p, engines, engine);
    put(&p->weights, B);
    put(&p->out, B);
    put(&p->lse, B);
}

/* Gradients begin with NaN where all of them are written: not of packed sequences, some of which may be empty. */
static void attend_backward(const header *h, sdpa_problem *p, const sdpa_kernel *kernel)
{
    const int64_t B = h->batches, H = h->heads, M = h->q_len, G = h->kv_heads, N = h->kv_len, *own = h->grad_bias;
    const int first = h->sequences ? 0 : 0xff;
    p->out = take_array(1, h->dtype, B, H, M, h->value_dim);
    p->lse = take_array(1, sum_dtype(h), B, H, M, 1);
    p->grad_out = take_array(1, h->dtype, B, H, M, h->value_dim);
    p->grad_lse = take_array(h->grad_lse, sum_dtype(h), B, H, M, 1);
    p->grad_query = new_array(1, first, h->dtype, B, H, M, h->dim);
    p->grad_key = new_array(1, first, h->kv_dtype, h->key_batches, G, N, h->dim);
    p->grad_value = new_array(1, first, h->kv_dtype, h->key_batches, G, N, h->value_dim);
    p->delta = new_array(h->delta, 0, sum_dtype(h), B, H, M, 1);
    const sdpa_array grad_bias =
        new_array(h->bias, 0, sum_dtype(h), own[0] ? B : 1, own[1] ? H : 1, own[2] ? M : 1, own[3] ? h->columns : 1);
    p->grad_bias = grad_bias;
    p->grad_bias.batch *= own[0], p->grad_bias.head *= own[1], p->grad_bias.row *= own[2],
        p->grad_bias.column *= own[3];
    run_backward(p, kernel);
    put(&p->grad_query, B);
    put(&p->grad_key, h->key_batches);
    put(&p->grad_value, h->key_batches);
    put(&grad_bias, own[0] ? B : 1);
    put(&p->delta, B);
}

int main(int argc, char **argv)
{
    header h;
    if (argc != 4) fail("usage: driver ISA ENGINE THREADS < problem > results");
    if (fread(&h, sizeof h, 1, stdin) != 1) fail("no header");
    sdpa_problem p = take_problem(&h, atoi(argv[3]));
    const sdpa_kernel *const *engines = find(argv[1], purpose_of(&h));
    if (!strcmp(argv[2], "linear"))
        project(&h, &p, engines[0]);
    else if (!strcmp(argv[2], "backward"))
        attend_backward(&h, &p, engines[0]);
    else
        attend(&h, &p, engines, argv[2]);
    return 0;
}
