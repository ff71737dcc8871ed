/* Which rows a task holds, and where they lie. */
#include "plan/plan.h"

char *sdpa_first_row(const sdpa_input *in, const sdpa_array *array, int64_t batch, int64_t kv_head)
{
    if (!array->data) return NULL;
    const ptrdiff_t head = kv_head * array->head;
    if (in->pages) return array->data + head;
    return head + (in->k_starts ? array->data + in->k_starts[batch] * array->row : sdpa_batch(array, batch));
}

/* Row 0 of a key/value head in an array that has a row for each query. */
static char *first_query(const sdpa_input *in, const sdpa_array *array, int64_t batch, int64_t kv_head)
{
    char *at = in->q_starts ? array->data + in->q_starts[batch] * array->row : sdpa_batch(array, batch);
    return at + kv_head * sdpa_group(in) * array->head;
}

/* Fills `address` with where each of the rows lies in `array`, and those of the lanes past the last like that. */
static void locate_rows(const sdpa_input *in, const sdpa_array *array, const sdpa_rows *rows, int lanes, char **address)
{
    if (!array->data) return;
    const int64_t group = sdpa_group(in);
    const int64_t query = rows->first / group, in_group = rows->first % group;
    char *at = first_query(in, array, rows->batch, rows->kv_head) + in_group * array->head + query * array->row;
    if (group == 1) {
        for (int row = 0; row < rows->count; ++row) address[row] = at + row * array->row;
    } else {
        int64_t left_in_group = group - in_group;
        for (int row = 0; row < rows->count; ++row) {
            address[row] = at;
            at += array->head;
            if (--left_in_group == 0) {
                left_in_group = group;
                at += array->row - group * array->head;
            }
        }
    }
    for (int row = rows->count; row < rows->vectors * lanes; ++row) address[row] = address[rows->count - 1];
}

/* Of a task, or behind that of the task after it. */
static int64_t first_row(const sdpa_schedule *s, const sdpa_unit *unit, int64_t q_len, int64_t index)
{
    const int64_t tasks = unit->cut.tasks, vectors = vectors_per_head(s->input, q_len, s->kernel->lanes);
    return (tasks - 1 - index) * vectors / tasks * s->kernel->lanes;
}

/* Tasks are numbered from the last rows to the first, so that with causal attention the longest come first and the
 * threads end together. */
void sdpa_enter_task(const sdpa_schedule *s, const sdpa_unit *unit, int64_t index, sdpa_rows *rows)
{
    const sdpa_input *in = s->input;
    const int lanes = s->kernel->lanes;
    rows->batch = unit->batch;
    rows->kv_head = unit->kv_head;
    rows->q_len = queries(in, rows->batch);
    rows->kv_len = in->kv_lengths ? in->kv_lengths[rows->batch] : in->kv_len;
    rows->far = s->far;
    rows->ahead = s->ahead;
    rows->next_query = rows->next_keys = rows->next_values = NULL;

    rows->first = first_row(s, unit, rows->q_len, index);
    rows->vectors = (int)((first_row(s, unit, rows->q_len, index - 1) - rows->first) / lanes);
    rows->count = (int)min64(rows->vectors * lanes, rows->q_len * sdpa_group(in) - rows->first);
    rows->keys_at = sdpa_first_row(in, &in->key, rows->batch, rows->kv_head);
    rows->values_at = sdpa_first_row(in, &in->value, rows->batch, rows->kv_head);
    rows->key_scales_at = sdpa_first_row(in, &in->key_scale, rows->batch, rows->kv_head);
    rows->value_scales_at = sdpa_first_row(in, &in->value_scale, rows->batch, rows->kv_head);

    /* Both ends of what a row sees grow with the row. */
    const int64_t first_query = rows->first / sdpa_group(in);
    const int64_t last_query = (rows->first + rows->count - 1) / sdpa_group(in);
    const sdpa_span first = sdpa_visible(in, rows->batch, rows->kv_len, first_query);
    const sdpa_span last = sdpa_visible(in, rows->batch, rows->kv_len, last_query);
    rows->keys = (sdpa_span){first.begin, last.end};
    rows->shared = (sdpa_span){last.begin, first.end};
    locate_rows(in, &in->query, rows, lanes, rows->query);
    locate_rows(in, &in->mask, rows, lanes, rows->mask);
    locate_rows(in, &in->bias, rows, lanes, rows->bias);
    locate_rows(in, in->weights.data ? &in->weights : &in->out, rows, lanes, rows->out);
    locate_rows(in, &in->lse, rows, lanes, rows->lse);
}

/* The rows before those of a task follow it; or, most likely, the next head does. */
void sdpa_look_ahead(const sdpa_schedule *s, const sdpa_unit *unit, int64_t index, sdpa_rows *rows)
{
    const sdpa_input *in = s->input;
    if (in->q_starts || in->pages) return;
    const int alone = sdpa_group(in) == 1;
    if (index + 1 < unit->cut.tasks) {
        /* Where a bundle goes through blocks together, its queries are read at once; asking for them brought nothing. */
        if (!s->at_once || !alone) return;
        rows->next_queries = rows->first - first_row(s, unit, rows->q_len, index + 1);
        rows->next_query = rows->query[0] - rows->next_queries * in->query.row;
        return;
    }
    int64_t batch = rows->batch, kv_head = rows->kv_head + 1;
    if (kv_head == in->kv_heads) kv_head = 0, ++batch;
    if (batch == in->batches) return;
    if (alone) rows->next_query = first_query(in, &in->query, batch, kv_head), rows->next_queries = in->q_len;
    rows->next_keys = sdpa_first_row(in, &in->key, batch, kv_head);
    rows->next_values = sdpa_first_row(in, &in->value, batch, kv_head);
}

void sdpa_enter_backward(const sdpa_schedule *s, const sdpa_backward_input *in, const sdpa_unit *unit, int64_t index,
                         sdpa_backward_task *t)
{
    const int lanes = s->kernel->lanes;
    const sdpa_rows *rows = &t->task.rows;
    sdpa_enter_task(s, unit, index, &t->task.rows);
    locate_rows(&in->forward, &in->grad_out, rows, lanes, t->rows.grad_out);
    locate_rows(&in->forward, &in->grad_query, rows, lanes, t->rows.grad_query);
    locate_rows(&in->forward, &in->grad_bias, rows, lanes, t->rows.grad_bias);
    locate_rows(&in->forward, &in->grad_lse, rows, lanes, t->rows.grad_lse);
    locate_rows(&in->forward, &in->delta, rows, lanes, t->rows.delta);
}
