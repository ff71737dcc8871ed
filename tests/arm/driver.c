/* One call of attention without Python: a problem on standard input, its result on standard output.
 *
 *     driver ISA FEW THREADS < problem > result
 *
 * FEW is 1 for the engine that is meant for few rows, whatever their number here.  THREADS only decides how the rows are
 * cut into tasks; they run one after the other.  The problem is a `header` and the arrays it announces, in the order in
 * which main() takes them; tests/test_arm.py writes it.  Every array and the scratch of every bundle of tasks is an
 * allocation of its own and of the exact size, so that a sanitizer sees what reads or writes too far.  Nothing but
 * scratch is freed. */
#include "sdpa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t dtype, kv_dtype; /* of query, bias and result, and of key and value: sdpa_dtype */
    int64_t batches, heads, kv_heads, q_len, kv_len, dim, value_dim;
    int64_t weights, mask, bias, begin_shift, end_shift, q_offset, kv_lengths, sinks,
        alibi_slopes; /* wanted, or present */
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
    case SDPA_BOOL: return 1;
    case SDPA_FLOAT16:
    case SDPA_BFLOAT16: return 2;
    case SDPA_FLOAT32: return 4;
    case SDPA_FLOAT64: return 8;
    default: fail("no such dtype"); return 0;
    }
}

/* A contiguous (batch, heads, rows, columns). */
static sdpa_array array_of(void *data, int64_t dtype, int64_t heads, int64_t rows, int64_t columns)
{
    const int itemsize = bytes_of(dtype);
    return (sdpa_array){
        .data = data,
        .batch = heads * rows * columns * itemsize,
        .head = rows * columns * itemsize,
        .row = columns * itemsize,
        .column = itemsize,
        .dtype = (int)dtype,
        .itemsize = itemsize,
    };
}

/* From here to run: sdpa/_core.pyx in C. */
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
    if (t->hidden && !kernel->finite(p, t)) attend_blocks(p, kernel, t, 1, kernel->accumulate_seen);
    kernel->close_sums(p, t);
    if (p->weights.data)
        write_weights(p, kernel, t);
    else
        kernel->write_out(p, t);
}

static void run_bundle(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t index, char *scratch)
{
    sdpa_task tasks[SDPA_MAX_BUNDLE];
    const int64_t head = index / p->bundles_per_head, part = index % p->bundles_per_head;
    const int64_t first = part * p->tasks_per_head / p->bundles_per_head;
    const int count = (int)((part + 1) * p->tasks_per_head / p->bundles_per_head - first);
    sdpa_lay_out_scratch(p, kernel, scratch, tasks, count);
    for (int i = 0; i < count; ++i) sdpa_enter_task(p, kernel, head * p->tasks_per_head + first + i, &tasks[i]);
    attend_blocks(p, kernel, tasks, count, kernel->accumulate);
    for (int i = 0; i < count; ++i) finish_task(p, kernel, &tasks[i]);
}

/* All bundles share the scratch of one thread, which is NaN where nothing was written. */
static void run(sdpa_problem *p, const sdpa_kernel *kernel, int threads)
{
    sdpa_task tasks[SDPA_MAX_BUNDLE];
    p->block_keys = kernel->block_keys;
    p->tasks_per_head = sdpa_tasks_per_head(p, kernel, threads);
    p->bundles_per_head = sdpa_bundles_per_head(p, kernel, threads);
    const int largest = sdpa_largest_bundle(p);
    const size_t bytes = sdpa_lay_out_scratch(p, kernel, NULL, tasks, largest);
    char *scratch = aligned_alloc(64, bytes);
    if (!scratch) fail("out of memory");
    memset(scratch, 0xff, bytes);
    sdpa_lay_out_scratch(p, kernel, scratch, tasks, largest);
    memset(tasks[0].copied, 0, sizeof *tasks[0].copied);
    for (int64_t bundle = 0; bundle < p->batches * p->kv_heads * p->bundles_per_head; ++bundle)
        run_bundle(p, kernel, bundle, scratch);
    free(scratch);
}

static int purpose_of(const header *h)
{
    if (h->dtype == SDPA_FLOAT64) return SDPA_FOR_DOUBLE;
    return h->dtype == SDPA_BFLOAT16 && h->kv_dtype == SDPA_BFLOAT16 ? SDPA_FOR_BFLOAT16 : SDPA_FOR_FLOAT;
}

static const sdpa_kernel *find(const char *isa, int purpose, int few_rows)
{
    for (int i = 0; sdpa_isas[i].name; ++i)
        if (!strcmp(sdpa_isas[i].name, isa) && sdpa_cpu_runs(isa)) return sdpa_isas[i].kernel[purpose][few_rows != 0];
    fail("no such kernel on this CPU");
    return NULL;
}

int main(int argc, char **argv)
{
    header h;
    if (argc != 4) fail("usage: driver ISA FEW THREADS < problem > result");
    if (fread(&h, sizeof h, 1, stdin) != 1) fail("no header");
    const int64_t lse_dtype = h.dtype == SDPA_FLOAT64 ? SDPA_FLOAT64 : SDPA_FLOAT32;
    const int bytes = bytes_of(h.dtype), kv_bytes = bytes_of(h.kv_dtype);
    const int64_t rows = h.batches * h.heads * h.q_len, keys = h.batches * h.kv_heads * h.kv_len;
    const int64_t per_head = h.batches * h.heads * (int64_t)sizeof(double),
                  per_batch = h.batches * (int64_t)sizeof(int64_t);

    sdpa_problem p = {
        .batches = h.batches,
        .heads = h.heads,
        .kv_heads = h.kv_heads,
        .q_len = h.q_len,
        .kv_len = h.kv_len,
        .dim = h.dim,
        .value_dim = h.value_dim,
        .shift_step = 1,
        .scale = h.scale,
        .softcap = h.softcap,
    };
    p.query = array_of(take(1, rows * h.dim * bytes), h.dtype, h.heads, h.q_len, h.dim);
    p.key = array_of(take(1, keys * h.dim * kv_bytes), h.kv_dtype, h.kv_heads, h.kv_len, h.dim);
    p.value = array_of(take(1, keys * h.value_dim * kv_bytes), h.kv_dtype, h.kv_heads, h.kv_len, h.value_dim);
    p.mask = array_of(take(h.mask, rows * h.kv_len), SDPA_BOOL, h.heads, h.q_len, h.kv_len);
    p.bias = array_of(take(h.bias, rows * h.kv_len * bytes), h.dtype, h.heads, h.q_len, h.kv_len);
    p.begin_shift = take(h.begin_shift, per_batch);
    p.end_shift = take(h.end_shift, per_batch);
    p.q_offset = take(h.q_offset, per_batch);
    p.kv_lengths = take(h.kv_lengths, per_batch);
    p.sinks = take(h.sinks, per_head);
    p.alibi_slopes = take(h.alibi_slopes, per_head);

    const int64_t width = h.weights ? h.kv_len : h.value_dim;
    const sdpa_array result = array_of(calloc(rows * width, bytes), h.dtype, h.heads, h.q_len, width);
    if (h.weights)
        p.weights = result;
    else
        p.out = result;
    p.lse = array_of(calloc(rows, bytes_of(lse_dtype)), lse_dtype, h.heads, h.q_len, 1);
    run(&p, find(argv[1], purpose_of(&h), atoi(argv[2])), atoi(argv[3]));
    fwrite(result.data, bytes, rows * width, stdout);
    fwrite(p.lse.data, bytes_of(lse_dtype), rows, stdout);
    return 0;
}
