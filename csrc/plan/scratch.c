/* Where a task keeps its numbers: the scratch of a thread, handed out array by array. */
#include "plan/plan.h"

#include <string.h>

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
    sums->result = sdpa_first_row(p, result, t);
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
