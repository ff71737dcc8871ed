/* sdpa/_core_backward.pxi in C, for driver.c: the same steps under the same names.  Units run one after the other. */

enum { BACKWARD_BUNDLE = 2, MOST_SUMS = 64 << 20, MOST_PART_SUMS = 4 << 20 };

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

typedef struct {
    sdpa_unit head;
    int64_t first, end; /* tasks */
    sdpa_span keys;
    int queries, sums;
} stretch;

typedef struct {
    int64_t whole, heads, per_head, row_units, unit_tasks, unit_keys;
} backward_plan;

static void differentiate_block(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t key, sdpa_task *t,
                                int queries)
{
    if (t->keys.begin >= key + p->block_keys || key >= t->keys.end || !sdpa_enter_block(p, kernel, key, t)) return;
    kernel->scores(p, t);
    kernel->score_gradients(p, t);
    if (queries) kernel->query_gradient(p, t);
    if (t->key_sums.at) kernel->key_gradients(p, t);
}

static void differentiate_blocks(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *tasks, int count,
                                 sdpa_span keys, int queries)
{
    int64_t key = keys.end, end = keys.begin;
    for (int i = 0; i < count; ++i) {
        kernel->begin_backward(p, &tasks[i]);
        key = min64(key, max64(keys.begin, tasks[i].keys.begin));
        end = max64(end, min64(keys.end, tasks[i].keys.end));
    }
    for (key = key / p->block_keys * p->block_keys; key < end; key += p->block_keys)
        for (int i = 0; i < count; ++i) differentiate_block(p, kernel, key, &tasks[i], queries);
}

static void finish_queries(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t, sdpa_span keys)
{
    void *sums = t->key_sums.at;
    if (kernel->needs_care(p, t)) {
        t->careful = 1, t->key_sums.at = NULL;
        differentiate_blocks(p, kernel, t, 1, keys, 1);
        t->careful = 0, t->key_sums.at = sums;
    }
    kernel->write_query_gradient(p, t);
}

static void differentiate(const sdpa_problem *p, const sdpa_kernel *kernel, const stretch *work, char *scratch)
{
    sdpa_task tasks[BACKWARD_BUNDLE];
    const int64_t keys = work->sums ? work->keys.end - work->keys.begin : 0;
    sdpa_lay_out_backward(p, kernel, scratch, tasks, BACKWARD_BUNDLE, keys);
    if (work->sums) sdpa_begin_sums(p, kernel, &work->head, work->keys, tasks, BACKWARD_BUNDLE);
    for (int64_t index = work->first; index < work->end; index += BACKWARD_BUNDLE) {
        const int count = (int)min64(BACKWARD_BUNDLE, work->end - index);
        for (int i = 0; i < count; ++i) {
            sdpa_enter_backward(p, kernel, &work->head, index + i, &tasks[i]);
            tasks[i].careful = 0;
        }
        differentiate_blocks(p, kernel, tasks, count, work->keys, work->queries);
        for (int i = 0; work->queries && i < count; ++i) finish_queries(p, kernel, &tasks[i], work->keys);
    }
    if (work->sums && work->end > work->first) kernel->write_key_gradients(p, tasks);
}

static backward_plan cut_backward(const sdpa_problem *p, const sdpa_kernel *kernel)
{
    backward_plan plan = {.heads = p->batches * p->kv_heads};
    const int64_t row_bytes = (p->dim + p->value_dim) * kernel->real_bytes;
    const int64_t blocks = divide_up(p->kv_len, kernel->block_keys);
    const int64_t tasks = divide_up(p->q_len * sdpa_group(p), kernel->rows);
    plan.whole = p->kv_len * row_bytes <= MOST_SUMS ? plan.heads / p->threads * p->threads : 0;
    const int64_t left = max64(1, plan.heads - plan.whole), parts = divide_up(4 * p->threads, left);
    plan.unit_tasks = max64(BACKWARD_BUNDLE, divide_up(tasks, parts));
    plan.row_units = divide_up(tasks, plan.unit_tasks);
    plan.unit_keys = min64(divide_up(blocks, parts), MOST_PART_SUMS / (row_bytes * kernel->block_keys));
    plan.unit_keys = max64(1, plan.unit_keys) * kernel->block_keys;
    plan.per_head = plan.row_units + divide_up(p->kv_len, plan.unit_keys);
    return plan;
}

static stretch find_stretch(const sdpa_problem *p, const sdpa_kernel *kernel, const backward_plan *plan, int64_t unit)
{
    const int64_t part = unit - plan->whole, head = part < 0 ? unit : plan->whole + part / plan->per_head;
    stretch work = {.head = sdpa_backward_head(p, kernel, head), .queries = 1, .sums = 1};
    work.end = work.head.cut.tasks;
    work.keys.end = p->q_starts ? p->kv_lengths[work.head.batch] : p->kv_len;
    if (part < 0) return work;
    const int64_t index = part % plan->per_head, key_unit = index - plan->row_units;
    work.queries = key_unit < 0;
    work.sums = !work.queries;
    if (work.queries) {
        work.first = min64(work.end, index * plan->unit_tasks);
        work.end = min64(work.end, work.first + plan->unit_tasks);
    } else {
        work.keys.begin = min64(work.keys.end, key_unit * plan->unit_keys);
        work.keys.end = min64(work.keys.end, work.keys.begin + plan->unit_keys);
        if (work.keys.begin == work.keys.end) work.end = work.first; /* of a sequence that is shorter than others */
    }
    return work;
}

typedef struct {
    int64_t batches, heads, parts;
    int by_task;
    int64_t unit_keys;
} bias_plan;

static bias_plan cut_bias(const sdpa_problem *p, const sdpa_kernel *kernel)
{
    const sdpa_array *bias = &p->grad_bias;
    bias_plan plan = {.by_task = bias->row != 0};
    plan.batches = bias->batch || (p->q_starts && bias->row) ? p->batches : 1;
    plan.heads = bias->head ? p->kv_heads : 1;
    plan.unit_keys = plan.by_task || !bias->column ? max64(1, p->kv_len) : 4 * kernel->block_keys;
    plan.parts =
        plan.by_task ? divide_up(p->q_len * sdpa_group(p), kernel->rows) : divide_up(p->kv_len, plan.unit_keys);
    return plan;
}

static void add_task_to_bias(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_span keys, sdpa_task *t)
{
    t->careful = 0;
    kernel->begin_backward(p, t);
    int64_t key = max64(keys.begin, t->keys.begin) / p->block_keys * p->block_keys;
    for (; key < min64(keys.end, t->keys.end); key += p->block_keys)
        if (sdpa_enter_block(p, kernel, key, t)) {
            kernel->scores(p, t);
            kernel->bias_gradient(p, t);
        }
}

static void differentiate_bias(const sdpa_problem *p, const sdpa_kernel *kernel, const bias_plan *plan, int64_t unit,
                               char *scratch)
{
    const int64_t part = unit % plan->parts, first_head = unit / plan->parts % plan->heads;
    sdpa_span keys = {0, p->kv_len};
    sdpa_task t;
    if (!plan->by_task) keys = (sdpa_span){part * plan->unit_keys, min64(p->kv_len, (part + 1) * plan->unit_keys)};
    sdpa_lay_out_backward(p, kernel, scratch, &t, 1, 0);
    t.cap_slope = NULL; /* the bias comes after the cap */
    for (int64_t batch = unit / plan->parts / plan->heads; batch < p->batches; batch += plan->batches)
        for (int64_t kv_head = first_head; kv_head < p->kv_heads; kv_head += plan->heads) {
            const sdpa_unit head = sdpa_backward_head(p, kernel, batch * p->kv_heads + kv_head);
            int64_t task = plan->by_task ? part : 0;
            for (; task < head.cut.tasks; task += plan->by_task ? plan->parts : 1) {
                sdpa_enter_backward(p, kernel, &head, task, &t);
                add_task_to_bias(p, kernel, keys, &t);
            }
        }
}

static void run_backward(sdpa_problem *p, const sdpa_kernel *kernel)
{
    sdpa_task tasks[BACKWARD_BUNDLE];
    p->block_keys = kernel->block_keys;
    const backward_plan plan = cut_backward(p, kernel);
    const int64_t units = plan.whole + (plan.heads - plan.whole) * plan.per_head;
    const int64_t keys = plan.whole ? p->kv_len : min64(p->kv_len, plan.unit_keys);
    char *scratch = new_scratch(sdpa_lay_out_backward(p, kernel, NULL, tasks, BACKWARD_BUNDLE, keys));
    for (int64_t unit = 0; unit < units; ++unit) {
        const stretch work = find_stretch(p, kernel, &plan, unit);
        differentiate(p, kernel, &work, scratch);
    }
    if (p->grad_bias.data) {
        const bias_plan biases = cut_bias(p, kernel);
        const int64_t bias_units = biases.batches * biases.heads * biases.parts;
        for (int64_t unit = 0; unit < bias_units; ++unit) differentiate_bias(p, kernel, &biases, unit, scratch);
    }
    free(scratch);
}
