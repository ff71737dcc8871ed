/* Which rows a task holds, and where they lie. */
#include "plan/plan.h"

/* Where the rows of K or V begin. */
char *sdpa_first_row(const sdpa_problem *p, const sdpa_array *array, const sdpa_task *t)
{
    if (!array->data) return NULL;
    const ptrdiff_t head = t->kv_head * array->head;
    if (p->pages) return array->data + head;
    return head + (p->k_starts ? array->data + p->k_starts[t->batch] * array->row : sdpa_batch(array, t->batch));
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
    t->keys_at = sdpa_first_row(p, &p->key, t);
    t->values_at = sdpa_first_row(p, &p->value, t);
    t->key_scales_at = sdpa_first_row(p, &p->key_scale, t);
    t->value_scales_at = sdpa_first_row(p, &p->value_scale, t);

    /* Both ends of what a row sees grow with the row. */
    const sdpa_span first = sdpa_visible(p, t, first_row / sdpa_group(p));
    const sdpa_span last = sdpa_visible(p, t, (first_row + t->rows - 1) / sdpa_group(p));
    t->keys = (sdpa_span){first.begin, last.end};
    t->shared = (sdpa_span){last.begin, first.end};
    locate_rows(p, &p->query, t, first_row, padded, t->query_row);
    locate_rows(p, &p->mask, t, first_row, padded, t->mask_row);
    locate_rows(p, &p->bias, t, first_row, padded, t->bias_row);
    locate_rows(p, p->weights.data ? &p->weights : &p->out, t, first_row, padded, t->out_row);
    locate_rows(p, &p->lse, t, first_row, padded, t->lse_row);
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
