/* Where a task keeps its numbers: the scratch of a thread, handed out array by array. */
#include "plan/plan.h"

#include <string.h>

/* Memory that is handed out from its begin on.  Where there is none yet, what it comes to is measured. */
typedef struct {
    char *at; /* or NULL */
    size_t used;
} supply;

/* Each array begins on a cache line. */
static void *take(supply *memory, int64_t elements, int bytes)
{
    char *taken = memory->at ? memory->at + memory->used : NULL;
    memory->used += (size_t)((elements * bytes + 63) / 64 * 64);
    return taken;
}

/* Rows in scratch may be filled up to whole vectors, or to two of them. */
static int64_t room_for(int64_t width, const sdpa_kernel *kernel)
{
    const int64_t whole = 2 * kernel->lanes;
    return (width + whole - 1) / whole * whole;
}

/* Keys of a block; where there are fewer, those and one, or of pairs those of whole copies (pairs.h). */
static int64_t most_keys(const sdpa_input *in, const sdpa_kernel *kernel)
{
    return min64(kernel->block_keys, kernel->step == 2 ? room_for(in->kv_len, kernel) : in->kv_len + 1);
}

/* What the tasks of a bundle share: they come one after the other in each block. */
static void take_shared(const sdpa_input *in, const sdpa_kernel *kernel, supply *memory, sdpa_scratch *s)
{
    const int64_t rows = kernel->rows, keys = most_keys(in, kernel);
    const int64_t dim = room_for(in->dim, kernel), value_dim = room_for(in->value_dim, kernel);
    const int bytes = kernel->real_bytes;
    s->copied = take(memory, SDPA_COPIES, sizeof *s->copied);
    s->s = take(memory, keys * rows, bytes);
    s->visible = take(memory, keys * rows, bytes);
    s->high = take(memory, rows, bytes);
    s->block_o = kernel->few_rows || kernel->step == 2 ? take(memory, value_dim * rows, bytes) : NULL;
    s->poison = take(memory, value_dim * rows, bytes);
    /* Few rows have no use for K once they have its scores, and their blocks are long: V takes its place. */
    s->key_copy = take(memory, keys * (kernel->few_rows ? max64(dim, value_dim) : dim), bytes);
    s->value_copy = kernel->few_rows ? s->key_copy : take(memory, keys * value_dim, bytes);
    s->cap_slope = NULL;
}

/* What outlives a block: each task has it for itself. */
static void take_own(const sdpa_input *in, const sdpa_kernel *kernel, supply *memory, sdpa_scratch *s)
{
    const int64_t rows = kernel->rows;
    const int bytes = kernel->real_bytes;
    s->shrink = take(memory, rows, bytes);
    s->q = take(memory, room_for(in->dim, kernel) * rows, bytes);
    s->feature_weights = in->v ? take(memory, (in->dim + 3) / 4 * 5 * rows, bytes) : NULL;
    s->o = take(memory, room_for(in->value_dim, kernel) * rows, bytes);
    s->max = take(memory, rows, bytes);
    s->sum = take(memory, rows, bytes);
    s->kept = take(memory, rows, bytes);
    s->lift = take(memory, rows, bytes);
}

/* Of one thread, for a bundle of `tasks`.  It does not depend on the number of keys. */
size_t sdpa_scratch_bytes(const sdpa_schedule *schedule, int tasks)
{
    supply shared = {NULL, 0}, own = {NULL, 0};
    sdpa_scratch unused;
    take_shared(schedule->input, schedule->kernel, &shared, &unused);
    take_own(schedule->input, schedule->kernel, &own, &unused);
    return shared.used + (size_t)tasks * own.used;
}

void sdpa_lay_out_scratch(const sdpa_schedule *schedule, char *memory, sdpa_task *t, int tasks)
{
    supply rest = {memory, 0};
    take_shared(schedule->input, schedule->kernel, &rest, &t->scratch);
    for (int i = 0; i < tasks; ++i) {
        if (i) t[i].scratch = t->scratch;
        t[i].scratch.leads = i == 0;
        t[i].scratch.has_queries = 0;
        take_own(schedule->input, schedule->kernel, &rest, &t[i].scratch);
    }
}

/* The sums over one part of the keys, which a task may keep elsewhere. */
static void take_sums(const sdpa_schedule *schedule, supply *memory, sdpa_scratch *s)
{
    const sdpa_kernel *kernel = schedule->kernel;
    const int64_t rows = kernel->rows;
    const int bytes = kernel->real_bytes;
    s->o = take(memory, room_for(schedule->input->value_dim, kernel) * rows, bytes);
    s->max = take(memory, rows, bytes);
    s->sum = take(memory, rows, bytes);
    s->kept = take(memory, rows, bytes);
    s->lift = take(memory, rows, bytes);
}

size_t sdpa_sums_bytes(const sdpa_schedule *schedule)
{
    supply memory = {NULL, 0};
    sdpa_scratch unused;
    take_sums(schedule, &memory, &unused);
    return memory.used;
}

void sdpa_lay_out_sums(const sdpa_schedule *schedule, char *memory, sdpa_scratch *s)
{
    supply rest = {memory, 0};
    take_sums(schedule, &rest, s);
}

/* ---- gradients */

/* Whether gradients can be summed where they are wanted, in whole vectors.  Pairs end with a factor. */
static int sums_in_place(const sdpa_kernel *kernel, const sdpa_array *result, int64_t width)
{
    return kernel->step == 1 && result->dtype == (kernel->real_bytes == 4 ? SDPA_FLOAT32 : SDPA_FLOAT64) &&
           result->column == result->itemsize && result->row % result->itemsize == 0 && width % kernel->lanes == 0;
}

static int64_t blocks(const sdpa_kernel *kernel, int64_t keys)
{
    return (keys + kernel->block_keys - 1) / kernel->block_keys;
}

/* As in the forward pass; the sums of `keys` keys are among it. */
static void take_shared_backward(const sdpa_kernel *kernel, const sdpa_backward_input *in, int64_t keys, supply *memory,
                                 sdpa_scratch *s, sdpa_backward_scratch *b)
{
    const int64_t rows = kernel->rows, block = most_keys(&in->forward, kernel);
    const int64_t dim = room_for(in->forward.dim, kernel), value_dim = room_for(in->forward.value_dim, kernel);
    const int bytes = kernel->real_bytes;
    memset(s, 0, sizeof *s);
    memset(b, 0, sizeof *b);
    s->copied = take(memory, SDPA_COPIES, sizeof *s->copied);
    s->s = take(memory, block * rows, bytes);
    b->slope = s->visible = take(memory, block * rows, bytes);
    b->key_slope = kernel->step == 1 ? b->slope : take(memory, (block + 1) / 2 * rows, bytes);
    if (in->forward.softcap != 0) s->cap_slope = take(memory, block * rows, bytes);
    s->high = take(memory, rows, bytes);
    s->key_copy = take(memory, block * dim, bytes);
    s->value_copy = take(memory, block * value_dim, bytes);
    if (kernel->step == 2) b->key_pairs = take(memory, (block + 1) / 2 * dim, bytes);
    b->summed = take(memory, blocks(kernel, keys), 1);
    if (keys && !sums_in_place(kernel, &in->grad_key, in->forward.dim))
        b->key_sums.at = take(memory, keys * dim, bytes);
    if (keys && !sums_in_place(kernel, &in->grad_value, in->forward.value_dim))
        b->value_sums.at = take(memory, keys * value_dim, bytes);
}

static void take_own_backward(const sdpa_kernel *kernel, const sdpa_input *in, supply *memory, sdpa_scratch *s,
                              sdpa_backward_scratch *b)
{
    const int64_t rows = kernel->rows, dim = room_for(in->dim, kernel), value_dim = room_for(in->value_dim, kernel);
    const int bytes = kernel->real_bytes;
    s->q = take(memory, dim * rows, bytes);
    b->g = take(memory, value_dim * rows, bytes);
    b->query_rows = take(memory, dim * rows, bytes);
    b->grad_rows = take(memory, value_dim * rows, bytes);
    s->o = take(memory, dim * rows, bytes);
    s->shrink = take(memory, rows, bytes);
    b->lse = take(memory, rows, bytes);
    b->delta = take(memory, rows, bytes);
}

size_t sdpa_backward_bytes(const sdpa_kernel *kernel, const sdpa_backward_input *in, int tasks, int64_t keys)
{
    supply shared = {NULL, 0}, own = {NULL, 0};
    sdpa_scratch s;
    sdpa_backward_scratch b;
    take_shared_backward(kernel, in, keys, &shared, &s, &b);
    take_own_backward(kernel, &in->forward, &own, &s, &b);
    return shared.used + (size_t)tasks * own.used;
}

void sdpa_lay_out_backward(const sdpa_kernel *kernel, const sdpa_backward_input *in, char *memory,
                           sdpa_backward_task *t, int tasks, int64_t keys)
{
    supply rest = {memory, 0};
    sdpa_scratch s;
    sdpa_backward_scratch b;
    take_shared_backward(kernel, in, keys, &rest, &s, &b);
    for (int i = 0; i < tasks; ++i) {
        t[i].task.scratch = s, t[i].scratch = b;
        take_own_backward(kernel, &in->forward, &rest, &t[i].task.scratch, &t[i].scratch);
    }
}

static void begin_sums(const sdpa_kernel *kernel, const sdpa_input *in, const sdpa_unit *unit, sdpa_span keys,
                       const sdpa_array *result, int64_t width, sdpa_sums *sums)
{
    sums->keys = keys;
    sums->width = width;
    sums->result = sdpa_first_row(in, result, unit->batch, unit->kv_head);
    sums->stride = room_for(width, kernel);
    if (sums_in_place(kernel, result, width)) {
        sums->at = sums->result + keys.begin * result->row;
        sums->stride = result->row / kernel->real_bytes;
    }
}

/* Nothing is summed yet for `keys`; for the tasks of a bundle. */
void sdpa_begin_sums(const sdpa_kernel *kernel, const sdpa_backward_input *in, const sdpa_unit *unit, sdpa_span keys,
                     sdpa_backward_task *t, int tasks)
{
    sdpa_backward_scratch *first = &t->scratch;
    begin_sums(kernel, &in->forward, unit, keys, &in->grad_key, in->forward.dim, &first->key_sums);
    begin_sums(kernel, &in->forward, unit, keys, &in->grad_value, in->forward.value_dim, &first->value_sums);
    memset(first->summed, 0, (size_t)blocks(kernel, keys.end - keys.begin));
    for (int i = 1; i < tasks; ++i)
        t[i].scratch.key_sums = first->key_sums, t[i].scratch.value_sums = first->value_sums;
}
