# Part of _core.pyx: the algorithm of the gradients.
#
# A head, one key/value head of one batch, is taken task by task through the blocks of keys.  A thread that takes a
# whole head makes all five products of each block (see csrc/backward/backward.h), and sums the gradients of K and V in
# the result, or, where that cannot hold the sums, in its scratch.  Where heads do not suffice for the threads, a head
# is cut twice: by tasks for the gradient of Q, and by keys for those of K and V, which takes seven products.  Either
# way the same numbers are summed in the same order, so the bits are the same.
from libc.stdint cimport int64_t

cdef struct stretch:
    # Of one head: its tasks, or some; its keys, or some; and which gradients are wanted.
    sdpa_unit head
    int64_t first, end  # tasks
    sdpa_span keys
    bint queries, sums


cdef struct backward_plan:
    int64_t whole, heads  # heads that are taken whole; all
    # Of a head that is cut: units of its rows and of its keys.  No row's gradient depends on others, so that its tasks
    # may be finer there.
    int64_t row_units, key_units, tasks, finer
    int64_t unit_tasks, unit_keys
    int bundle


cdef struct bias_plan:
    # What the bias differs by: its gradient is summed over what it does not, in one place.
    int64_t batches, heads, parts
    bint by_task
    int64_t unit_keys


cdef struct backward_call:
    const sdpa_backward_input *input
    const sdpa_schedule *schedule
    backward_plan plan
    bias_plan biases
    bint bias_with_queries  # no two pairs share a number of the bias: its gradient comes with that of queries


# Tasks that a thread takes through each block together.  Measured with 1, 2, 4 and 8: bwd-gqa-1024-causal float32 22.4,
# 22.0, 21.6, 21.6 ms without the forward pass, bwd-bert 2.35, 2.31, 2.27, 2.30.
cdef int BACKWARD_BUNDLE = 4
# Where threads are many the keys of a head are cut that finely: still whole vectors.  For each stretch of them queries
# and their gradients are laid out anew, which takes as long as 20 keys (measured: 16 heads on 4, 1024 causal queries,
# D = 128, in stretches of 128, 64, 32 and 16 keys: 91, 98, 108 and 132 ms of all CPUs).
cdef int64_t FEWEST_KEYS = 16
# So much of the time all threads shall have work, few and many of them.  For few a finer cut costs more than it gives:
# on two, one head of 512 causal keys in units of 32 took 1.4 times as long as in units of 128.
cdef double FEW_BUSY = 0.75, MANY_BUSY = 0.9
cdef int FEW_THREADS = 8
# So much scratch may a thread take, in which the sums of K and V are that are not formed in the result.  Longer heads
# are cut, and then so much may those of a part take.
cdef int64_t MOST_SCRATCH = 64 << 20, MOST_PART_SUMS = 4 << 20


cdef inline int64_t task_products(const sdpa_schedule *s) noexcept nogil:
    """What it costs to begin a task, in multiply-adds."""
    return 4 * s.kernel.rows * (s.input.dim + s.input.value_dim + 16)


cdef void differentiate_block(
    const backward_call *call, int64_t key, sdpa_backward_task *t, bint queries
) noexcept nogil:
    cdef const sdpa_kernel *kernel = call.schedule.kernel
    cdef const sdpa_rows *rows = &t.task.rows
    if (rows.keys.begin < key + kernel.block_keys and key < rows.keys.end
            and sdpa_enter_block(call.schedule, rows, key, &t.task.block)):
        kernel.scores(call.schedule.input, &t.task)
        kernel.score_gradients(call.input, t)
        if queries and call.bias_with_queries and not t.scratch.careful:
            kernel.add_slopes(call.input, t)
        if queries:
            kernel.query_gradient(call.input, t)
        if t.scratch.key_sums.at != NULL:
            kernel.key_gradients(call.input, t)


cdef void differentiate_blocks(
    const backward_call *call, sdpa_backward_task *tasks, int count, sdpa_span keys, bint queries
) noexcept nogil:
    cdef const sdpa_schedule *s = call.schedule
    cdef int i
    cdef int64_t key = keys.end, end = keys.begin
    for i in range(count):
        s.kernel.begin_backward(call.input, &tasks[i])
        key = min(key, max(keys.begin, tasks[i].task.rows.keys.begin))
        end = max(end, min(keys.end, tasks[i].task.rows.keys.end))
    # Blocks are counted from where the sums begin, which may be within a block: no key's sums depend on others.
    key = keys.begin + (key - keys.begin) // s.kernel.block_keys * s.kernel.block_keys
    while key < end and not stopped(s.watch, 3 * count * block_products(s, &tasks.task.rows)):
        for i in range(count):
            differentiate_block(call, key, &tasks[i], queries)
        key += s.kernel.block_keys


cdef void finish_queries(const backward_call *call, sdpa_backward_task *t, sdpa_span keys) noexcept nogil:
    """A hidden key has slope 0, but 0 * NaN is NaN: where that may have been, again with care."""
    cdef const sdpa_schedule *s = call.schedule
    cdef void *sums = t.scratch.key_sums.at
    if s.kernel.needs_care(s.input, &t.task):
        t.scratch.careful, t.scratch.key_sums.at = 1, NULL
        differentiate_blocks(call, t, 1, keys, True)
        t.scratch.careful, t.scratch.key_sums.at = 0, sums
    s.kernel.write_query_gradient(call.input, t)


cdef bint enter_backward(
    const backward_call *call, const stretch *work, int64_t index, sdpa_backward_task *t
) noexcept nogil:
    """Whether there is anything to do for the task: a stretch of keys leaves out those that see none of them."""
    cdef sdpa_span *keys = &t.task.rows.keys
    sdpa_enter_backward(call.schedule, call.input, &work.head, index, t)
    keys.end = min(keys.end, work.keys.end)
    return work.queries or max(keys.begin, work.keys.begin) < keys.end


cdef void differentiate(const backward_call *call, const stretch *work, char *scratch) noexcept nogil:
    cdef const sdpa_schedule *s = call.schedule
    cdef sdpa_backward_task tasks[SDPA_MAX_BUNDLE]
    cdef int64_t keys = work.keys.end - work.keys.begin if work.sums else 0
    cdef int64_t index = work.first
    cdef int i, count, bundle = call.plan.bundle
    sdpa_lay_out_backward(s.kernel, call.input, scratch, tasks, bundle, keys)
    if work.sums:
        sdpa_begin_sums(s.kernel, call.input, &work.head, work.keys, tasks, bundle)
    while index < work.end and not stopped(s.watch, bundle * task_products(s)):
        count = 0
        while count < bundle and index < work.end:
            count += enter_backward(call, work, index, &tasks[count])
            index += 1
        differentiate_blocks(call, tasks, count, work.keys, work.queries)
        if work.queries:
            for i in range(count):
                finish_queries(call, &tasks[i], work.keys)
    if work.sums and work.end > work.first:
        s.kernel.write_key_gradients(call.input, tasks)


cdef backward_plan cut_backward(const sdpa_backward_input *b, const sdpa_kernel *kernel, int threads) noexcept:
    """As many heads as there are threads, or a multiple, are taken whole; those that are left over are cut."""
    cdef const sdpa_input *p = &b.forward
    cdef backward_plan plan
    cdef bint fits
    cdef int64_t row_bytes = (p.dim + p.value_dim) * kernel.real_bytes, left, parts
    cdef int64_t blocks = (p.kv_len + kernel.block_keys - 1) // kernel.block_keys
    cdef int64_t tasks = (most_rows(p) + kernel.rows - 1) // kernel.rows
    plan.heads = p.batches * p.kv_heads
    plan.bundle = BACKWARD_BUNDLE
    fits = sdpa_backward_bytes(kernel, b, plan.bundle, p.kv_len) <= <size_t>MOST_SCRATCH
    plan.whole = plan.heads // threads * threads if fits else 0
    left = max(1, plan.heads - plan.whole)
    parts = (4 * threads + left - 1) // left  # of a head, so that threads end together
    plan.unit_tasks = max(BACKWARD_BUNDLE, (tasks + parts - 1) // parts)
    plan.tasks, plan.finer = tasks, 1
    plan.unit_keys = max(1, min((blocks + parts - 1) // parts, MOST_PART_SUMS // (row_bytes * kernel.block_keys)))
    plan.unit_keys *= kernel.block_keys
    count_stretches(p, &plan)
    while plan.whole < plan.heads and threads > 1 and cut_finer(p, kernel, threads, &plan):
        count_stretches(p, &plan)
    return plan


cdef void count_stretches(const sdpa_input *p, backward_plan *plan) noexcept:
    plan.row_units = (plan.tasks * plan.finer + plan.unit_tasks - 1) // plan.unit_tasks
    plan.key_units = (p.kv_len + plan.unit_keys - 1) // plan.unit_keys


cdef double busy_share(const sdpa_input *p, int threads, double units, double largest, double all) noexcept:
    """Of the time of the threads, at least or, where units differ, about: the longest of these come first, and there
    are short ones to fill up with.  With causality the longest are as long as without."""
    if p.begin_shift == NULL and p.end_shift == NULL:
        return sdpa_busy(threads, units, largest, all)
    cdef double mean = all / 2 / threads
    return mean / max(largest + mean / 3, mean + all / 2 / units)


cdef bint cut_finer(const sdpa_input *p, const sdpa_kernel *kernel, int threads, backward_plan *plan) noexcept:
    """Halves the larger of both kinds of units, if threads would wait for the last ones otherwise."""
    cdef int64_t left = plan.heads - plan.whole
    cdef double of_rows = 3.0 * plan.unit_tasks / plan.finer * p.kv_len  # products of keys and tasks
    cdef double of_keys = 4.0 * min(plan.unit_keys, p.kv_len) * plan.tasks
    cdef double all = 7.0 * left * plan.tasks * p.kv_len
    cdef bint rows_go = plan.unit_tasks > 1 or plan.finer < kernel.rows // kernel.lanes
    cdef bint keys_go = plan.unit_keys > FEWEST_KEYS
    if busy_share(p, threads, left * (plan.row_units + plan.key_units), max(of_rows, of_keys), all) >= (
            FEW_BUSY if threads <= FEW_THREADS else MANY_BUSY):
        return False
    if rows_go and (of_rows >= of_keys or not keys_go):
        if plan.unit_tasks > 1:
            plan.unit_tasks = (plan.unit_tasks + 1) // 2
        else:
            plan.finer *= 2
    elif keys_go:
        plan.unit_keys //= 2
        if plan.unit_keys > kernel.block_keys:
            plan.unit_keys = (plan.unit_keys + kernel.block_keys - 1) // kernel.block_keys * kernel.block_keys
    return rows_go or keys_go


cdef int64_t sum_keys(const sdpa_input *p, const backward_plan *plan) noexcept nogil:
    """The longest stretch of keys whose gradients a thread sums."""
    return p.kv_len if plan.whole else min(p.kv_len, plan.unit_keys)


cdef stretch find_stretch(const sdpa_schedule *s, const backward_plan *plan, int64_t unit) noexcept nogil:
    cdef const sdpa_input *p = s.input
    cdef stretch work
    cdef int64_t left = plan.heads - plan.whole, part = unit - plan.whole, index, of_rows = left * plan.row_units
    cdef bint cut = part >= 0, of_keys = part >= of_rows
    if of_keys:  # those of rows come first, for they last longer
        part -= of_rows
    # The first units of all heads come first: with causality they are the longest.
    work.head = sdpa_backward_head(
        s, plan.whole + part % left if cut else unit, plan.finer if cut and not of_keys else 1)
    work.first, work.end = 0, work.head.cut.tasks
    work.keys.begin, work.keys.end = 0, p.kv_lengths[work.head.batch] if p.q_starts != NULL else p.kv_len
    work.queries = work.sums = True
    if cut:
        index = part // left
        work.queries, work.sums = not of_keys, of_keys
        if work.queries:
            work.first = min(work.end, index * plan.unit_tasks)
            work.end = min(work.end, work.first + plan.unit_tasks)
        else:
            work.keys.begin = min(work.keys.end, index * plan.unit_keys)
            work.keys.end = min(work.keys.end, work.keys.begin + plan.unit_keys)
            if work.keys.begin == work.keys.end:  # of a sequence that is shorter than others
                work.end = work.first
    return work


cdef void differentiate_unit(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef const backward_call *call = <const backward_call *>of
    cdef stretch work = find_stretch(call.schedule, &call.plan, unit)
    differentiate(call, &work, scratch)


cdef double weigh_stretch(const void *of, int64_t unit) noexcept nogil:
    """Of the scores and their gradients, and the products that are wanted."""
    cdef const backward_call *call = <const backward_call *>of
    cdef const sdpa_schedule *s = call.schedule
    cdef const sdpa_input *p = s.input
    cdef stretch work = find_stretch(s, &call.plan, unit)
    cdef sdpa_rows rows
    cdef double pairs = 0
    cdef int64_t task, each = p.dim + p.value_dim + 16
    if work.queries:
        each += p.dim
    if work.sums:
        each += p.dim + p.value_dim
    for task in range(work.first, work.end):
        sdpa_enter_task(s, &work.head, task, &rows)
        pairs += pairs_seen(p, &rows, work.keys)
    return pairs * each


cdef bint has_own_bias(const sdpa_backward_input *b, int64_t batches) noexcept:
    """Whether no two pairs share a number of the bias, which differs by so many batches."""
    cdef const sdpa_input *p = &b.forward
    cdef const sdpa_array *bias = &b.grad_bias
    if bias.data == NULL:
        return False
    return ((batches == p.batches or p.q_starts != NULL) and (bias.head != 0 or p.heads == 1)
            and bias.row != 0 and bias.column != 0)


cdef bias_plan cut_bias(const sdpa_backward_input *b, const sdpa_kernel *kernel, int64_t batches) noexcept:
    """Batches that share their numbers are so many apart."""
    cdef const sdpa_input *p = &b.forward
    cdef const sdpa_array *bias = &b.grad_bias
    cdef bias_plan plan
    cdef int64_t tasks = (most_rows(p) + kernel.rows - 1) // kernel.rows
    plan.batches = batches if p.q_starts == NULL else p.batches if bias.row else 1
    plan.heads = p.kv_heads if bias.head else 1
    # Where heads of a group share the bias, a task may begin with a position that the one before ends with.
    plan.by_task = bias.row != 0 and (bias.head != 0 or sdpa_group(p) == 1)
    plan.unit_keys = max(1, p.kv_len) if plan.by_task or not bias.column else 4 * kernel.block_keys
    plan.parts = tasks if plan.by_task else (p.kv_len + plan.unit_keys - 1) // plan.unit_keys
    return plan


cdef void differentiate_bias(const void *of, int64_t unit, char *scratch) noexcept nogil:
    """All that adds to one part of the gradient of the bias: the tasks, the heads and the batches that share it."""
    cdef const backward_call *call = <const backward_call *>of
    cdef const sdpa_schedule *s = call.schedule
    cdef const sdpa_input *p = s.input
    cdef const bias_plan *plan = &call.biases
    cdef sdpa_backward_task t
    cdef sdpa_task *task = &t.task
    cdef sdpa_unit head
    cdef sdpa_span keys
    cdef int64_t part = unit % plan.parts, first_head = unit // plan.parts % plan.heads, index, key
    cdef int64_t batch = unit // plan.parts // plan.heads, kv_head
    sdpa_lay_out_backward(s.kernel, call.input, scratch, &t, 1, 0)
    task.scratch.cap_slope = NULL  # the bias comes after the cap
    while batch < p.batches:
        kv_head = first_head
        while kv_head < p.kv_heads:
            head = sdpa_backward_head(s, batch * p.kv_heads + kv_head, 1)
            keys.begin, keys.end = 0 if plan.by_task else part * plan.unit_keys, p.kv_len
            keys.end = min(keys.end, keys.begin + plan.unit_keys)
            index = part if plan.by_task else 0
            while index < head.cut.tasks and not stopped(s.watch, task_products(s)):
                sdpa_enter_backward(s, call.input, &head, index, &t)
                s.kernel.begin_backward(call.input, &t)
                key = max(keys.begin, task.rows.keys.begin) // s.kernel.block_keys * s.kernel.block_keys
                while key < min(keys.end, task.rows.keys.end) and not stopped(s.watch, block_products(s, &task.rows)):
                    if sdpa_enter_block(s, &task.rows, key, &task.block):
                        s.kernel.scores(p, task)
                        s.kernel.bias_gradient(call.input, &t)
                    key += s.kernel.block_keys
                index += plan.parts if plan.by_task else 1
            kv_head += plan.heads
        batch += plan.batches


cdef int run_backward(
    const sdpa_backward_input *b, const sdpa_kernel *kernel, int64_t bias_batches, int threads
) except -1:
    cdef const sdpa_input *p = &b.forward
    cdef sdpa_schedule s = schedule_of(p, NULL, kernel, threads)
    cdef crew c
    cdef backward_call call
    cdef const backward_plan *plan = &call.plan
    cdef int64_t units, bias_units = 0
    cdef int chunk
    call.input, call.schedule, call.plan = b, &s, cut_backward(b, kernel, threads)
    units = plan.whole + (plan.heads - plan.whole) * (plan.row_units + plan.key_units)
    call.bias_with_queries = kernel.add_slopes != NULL and p.softcap == 0 and has_own_bias(b, bias_batches)
    if b.grad_bias.data != NULL and not call.bias_with_queries:
        call.biases = cut_bias(b, kernel, bias_batches)
        bias_units = call.biases.batches * call.biases.heads * call.biases.parts
    # Heads that follow each other are read in one go: -6 % where there are many.  Cut ones are few.
    chunk = <int>max(1, plan.whole // (8 * threads)) if plan.whole == plan.heads else 1
    hire(&c, threads, 4 * work_of(p, rows_of_head(p), p.dim + p.value_dim) / WORK_OF_US,
         sdpa_backward_bytes(kernel, b, plan.bundle, sum_keys(p, plan)), 0)
    s.watch, c.weigh = &c.watch, weigh_stretch
    with nogil:
        share(&c, differentiate_unit, &call, units, BY_CHUNKS, chunk, 0)
        c.weigh = NULL
        if bias_units:
            share(&c, differentiate_bias, &call, bias_units, BY_CHUNKS, 1, 0)
    return dismiss(&c)
