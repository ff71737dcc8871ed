# The algorithm of attention.  Part of _core.pyx.
#
# A task is up to 64 query rows of one key/value head.  It walks over the blocks of keys that any of its rows may see,
# and keeps for each row the largest score so far, the sum of the weights and the weighted sum of the values (the online
# softmax of Milakov and Gimelshein; FlashAttention).  A unit, which one thread takes at once, is a bundle of tasks that
# share what they read; or, with few rows, a part of the keys.
from libc.stdint cimport int64_t


cdef bint attend_block(const sdpa_schedule *s, int64_t key, sdpa_task *t, sdpa_stage accumulate) noexcept nogil:
    """softmax(Q K^T) V of what was seen so far becomes that with the keys of the block that starts at `key`.  Returns
    whether any row sees it."""
    if (key + s.kernel.block_keys <= t.rows.keys.begin or t.rows.keys.end <= key
            or not sdpa_enter_block(s, &t.rows, key, &t.block)):
        return False
    s.kernel.scores(s.input, t)
    s.kernel.softmax_block(s.input, t)
    accumulate(s.input, t)
    return True


cdef inline int64_t block_products(const sdpa_schedule *s, const sdpa_rows *rows) noexcept nogil:
    """Multiply-adds of a task in a block, with those that softmax is worth."""
    return rows.count * s.kernel.block_keys * (s.input.dim + s.input.value_dim + 16)


cdef void attend_blocks(const sdpa_schedule *s, sdpa_task *tasks, int count, sdpa_stage accumulate) noexcept nogil:
    """softmax(Q K^T) V for the rows of the tasks, without the division by the sum."""
    cdef int i
    cdef bint led
    cdef int64_t key = tasks[0].rows.keys.begin, end = tasks[0].rows.keys.end
    for i in range(count):
        s.kernel.begin_forward(s.input, &tasks[i])
        key = min(key, tasks[i].rows.keys.begin)
        end = max(end, tasks[i].rows.keys.end)
    key = key // s.kernel.block_keys * s.kernel.block_keys
    while key < end and not stopped(s.watch, count * block_products(s, &tasks.rows)):
        led = False
        for i in range(count):
            tasks[i].scratch.leads = not led
            led |= attend_block(s, key, &tasks[i], accumulate)
        key += s.kernel.block_keys


cdef void write_weights(const sdpa_schedule *s, sdpa_task *t) noexcept nogil:
    """The probabilities themselves: the scores once more, now that the sums over all keys are known."""
    cdef int64_t key = t.rows.keys.begin // s.kernel.block_keys * s.kernel.block_keys
    while key < t.rows.keys.end and not stopped(s.watch, block_products(s, &t.rows)):
        if sdpa_enter_block(s, &t.rows, key, &t.block):
            s.kernel.scores(s.input, t)
            s.kernel.write_weights(s.input, t)
        key += s.kernel.block_keys


cdef void attend_carefully(const sdpa_schedule *s, sdpa_task *tasks, int count) noexcept nogil:
    """Where NaN or inf came out of the sums, again with care: a hidden key weighs 0, but 0 * NaN is NaN; and where the
    sums themselves are too large, once more with all weights of a row divided by what they sum to."""
    cdef int i
    for i in range(count):
        tasks[i].scratch.lifted = 0
    attend_blocks(s, tasks, count, s.kernel.accumulate)
    for i in range(count):
        if not s.kernel.finite(s.input, &tasks[i]):
            attend_blocks(s, &tasks[i], 1, s.kernel.accumulate_seen)
            if s.kernel.lift(s.input, &tasks[i]):
                attend_blocks(s, &tasks[i], 1, s.kernel.accumulate_seen)
            s.kernel.add_poison(s.input, &tasks[i])


cdef void finish_task(const sdpa_schedule *s, sdpa_task *t) noexcept nogil:
    if sdpa_stops(s.watch):
        return  # rows of the result are right, or not written
    s.kernel.close_sums(s.input, t)
    if s.input.weights.data != NULL:
        write_weights(s, t)
    else:
        s.kernel.write_out(s.input, t)


cdef bint attend_at_once(const sdpa_schedule *s, sdpa_task *t) noexcept nogil:
    """softmax(Q K^T) V where one block holds all keys: weights are divided by their sum before they meet V, so that
    results leave as they are summed.  False where nothing is seen, or something is unusual: then all is to be done
    step by step."""
    t.scratch.lifted = 0
    s.kernel.begin_forward(s.input, t)
    if t.rows.keys.begin >= t.rows.keys.end or not sdpa_enter_block(s, &t.rows, 0, &t.block):
        return False
    s.kernel.scores(s.input, t)
    s.kernel.softmax_block(s.input, t)
    s.kernel.close_sums(s.input, t)
    return s.kernel.write_at_once(s.input, t)


cdef void run_bundle(const sdpa_schedule *s, const sdpa_unit *unit, char *scratch) noexcept nogil:
    cdef sdpa_task tasks[SDPA_MAX_BUNDLE]
    cdef int64_t first = unit.index * unit.cut.tasks // unit.cut.bundles
    cdef int i, count = <int>((unit.index + 1) * unit.cut.tasks // unit.cut.bundles - first)
    sdpa_lay_out_scratch(s, scratch, tasks, count)
    for i in range(count):
        sdpa_enter_task(s, unit, first + i, &tasks[i].rows)
        if s.ahead:
            sdpa_look_ahead(s, unit, first + i, &tasks[i].rows)
    if s.at_once:
        for i in range(count):
            if stopped(s.watch, block_products(s, &tasks[i].rows)):
                return
            if not attend_at_once(s, &tasks[i]):
                attend_carefully(s, &tasks[i], 1)
                finish_task(s, &tasks[i])
        return
    attend_carefully(s, tasks, count)
    for i in range(count):
        finish_task(s, &tasks[i])


cdef struct attention_call:
    const sdpa_schedule *schedule
    size_t sums_bytes
    char *sums  # where nodes are units: of each, and
    int *gates  # of each but the first of a head, of the node that it is the right half of: whether one half is ready


cdef struct few_rows:
    # One task, whose keys are summed part by part.
    const attention_call *call
    sdpa_unit unit
    sdpa_task task
    sdpa_span keys  # all that its rows see
    char *scratch  # behind that of the task


cdef void enter_few_rows(
    const attention_call *call, const sdpa_unit *unit, char *scratch, few_rows *few
) noexcept nogil:
    few.call, few.unit = call, unit[0]
    few.scratch = scratch + sdpa_scratch_bytes(call.schedule, 1)
    sdpa_lay_out_scratch(call.schedule, scratch, &few.task, 1)
    sdpa_enter_task(call.schedule, unit, 0, &few.task.rows)
    few.keys = few.task.rows.keys


cdef void sum_part(few_rows *few, int64_t part, char *to) noexcept nogil:
    cdef const sdpa_schedule *s = few.call.schedule
    sdpa_lay_out_sums(s, to, &few.task.scratch)
    few.task.rows.keys = sdpa_node_keys(&few.unit.cut, 0, part, few.keys)
    attend_carefully(s, &few.task, 1)
    s.kernel.start(s.input, &few.task)


cdef void join_sums(few_rows *few, char *left, char *right) noexcept nogil:
    """Those of both, in place of the left ones."""
    cdef const sdpa_schedule *s = few.call.schedule
    cdef sdpa_task other
    sdpa_lay_out_sums(s, left, &few.task.scratch)
    sdpa_lay_out_sums(s, right, &other.scratch)
    s.kernel.join(s.input, &few.task, &other)


cdef void sum_node(few_rows *few, int level, int64_t node, char *to, char *spare) noexcept nogil:
    """The sums over a node of the tree of parts, from left to right.  `spare` has room for one on each level below."""
    cdef int below = level - 1
    if level == 0:
        sum_part(few, node, to)
    elif not sdpa_has_node(&few.unit.cut, below, 2 * node):
        sum_node(few, below, 2 * node + 1, to, spare)
    elif not sdpa_has_node(&few.unit.cut, below, 2 * node + 1):
        sum_node(few, below, 2 * node, to, spare)
    else:
        sum_node(few, below, 2 * node, to, spare)
        sum_node(few, below, 2 * node + 1, spare, spare + few.call.sums_bytes)
        join_sums(few, to, spare)


cdef void finish_few_rows(few_rows *few, char *sums) noexcept nogil:
    sdpa_lay_out_sums(few.call.schedule, sums, &few.task.scratch)
    few.task.scratch.started = 1
    few.task.rows.keys = few.keys
    finish_task(few.call.schedule, &few.task)


cdef inline int64_t unit_of_node(const few_rows *few, int level, int64_t node) noexcept nogil:
    """The first unit in it, where its sums are."""
    cdef int unit_level = few.call.schedule.level
    cdef int64_t first = few.unit.cut.parts.begin >> unit_level
    return few.unit.first + max(first, node << (level - unit_level)) - first


cdef void join_upwards(few_rows *few) noexcept nogil:
    """The unit's sums are ready.  Whoever comes second joins both halves of a node, and goes on to the one above."""
    cdef const attention_call *call = few.call
    cdef const sdpa_cut *cut = &few.unit.cut
    cdef int level = call.schedule.level, height = sdpa_height(cut)
    cdef int64_t node = few.unit.index, left, right
    while level < height:
        if sdpa_has_node(cut, level, node & ~1) and sdpa_has_node(cut, level, node | 1):
            left, right = unit_of_node(few, level, node & ~1), unit_of_node(few, level, node | 1)
            if not sdpa_comes_second(&call.gates[right]):
                return
            join_sums(few, call.sums + left * call.sums_bytes, call.sums + right * call.sums_bytes)
        node >>= 1
        level += 1
    finish_few_rows(few, call.sums + few.unit.first * call.sums_bytes)


cdef void run_few_rows(const attention_call *call, const sdpa_unit *unit, int64_t index, char *scratch) noexcept nogil:
    cdef const sdpa_schedule *s = call.schedule
    cdef few_rows few
    cdef int height
    enter_few_rows(call, unit, scratch, &few)
    if not s.split:
        height = sdpa_height(&unit.cut)
        sum_node(&few, height, unit.cut.parts.begin >> height, few.scratch, few.scratch + call.sums_bytes)
        finish_few_rows(&few, few.scratch)
    elif sdpa_has_node(&unit.cut, s.level, unit.index):  # others have more
        sum_node(&few, s.level, unit.index, call.sums + index * call.sums_bytes, few.scratch)
        if not sdpa_stops(s.watch):
            join_upwards(&few)


cdef void run_unit(const void *of, int64_t index, char *scratch) noexcept nogil:
    cdef const attention_call *call = <const attention_call *>of
    cdef sdpa_unit unit = sdpa_find_unit(call.schedule, index)
    if call.schedule.split or unit.cut.parts.end - unit.cut.parts.begin > 1:
        run_few_rows(call, &unit, index, scratch)
    else:
        run_bundle(call.schedule, &unit, scratch)


cdef double pairs_seen(const sdpa_input *p, const sdpa_rows *rows, sdpa_span keys) noexcept nogil:
    """Of the rows of a task and these keys."""
    cdef int64_t row, pairs = 0
    cdef sdpa_span seen
    for row in range(rows.first, rows.first + rows.count):
        seen = sdpa_visible(p, rows.batch, rows.kv_len, row // sdpa_group(p))
        pairs += max(0, min(seen.end, keys.end) - max(seen.begin, keys.begin))
    return pairs


cdef double weigh_unit(const void *of, int64_t index) noexcept nogil:
    cdef const sdpa_schedule *s = (<const attention_call *>of).schedule
    cdef sdpa_unit unit = sdpa_find_unit(s, index)
    cdef sdpa_rows rows
    cdef sdpa_span keys
    cdef double pairs = 0
    cdef int64_t task = unit.index * unit.cut.tasks // unit.cut.bundles
    cdef int64_t end = (unit.index + 1) * unit.cut.tasks // unit.cut.bundles
    if s.split:
        task, end = 0, unit.cut.tasks if sdpa_has_node(&unit.cut, s.level, unit.index) else 0
    while task < end:
        sdpa_enter_task(s, &unit, task, &rows)
        keys.begin, keys.end = 0, rows.kv_len
        if s.split:
            keys = sdpa_node_keys(&unit.cut, s.level, unit.index, keys)
        pairs += pairs_seen(s.input, &rows, keys)
        task += 1
    return pairs * (s.input.dim + s.input.value_dim + 16)


cdef int64_t cut_into_units(sdpa_schedule *s, int *threads, int *chunk) noexcept:
    """The number of units; threads for them, no more than that; and how many a thread takes at once: those of one head,
    so that it finds K and V in its own cache, or of several that follow each other in memory, but few enough that the
    last one to finish is not waited for."""
    cdef int64_t units
    s.far = distance_of(s.input)
    s.at_once = (s.kernel.write_at_once != NULL and s.input.kv_len <= s.kernel.block_keys
                 and s.kernel.stores_rows(s.input))
    s.ahead = key_bytes(s.input) + row_bytes(s.input) > MOST_IN_THIRD_LEVEL
    units = sdpa_count_units(s)
    threads[0] = <int>max(1, min(<int64_t>s.threads, units))
    chunk[0] = <int>max(1, units // (16 * threads[0]))
    return units


# K and V of more bytes than this are not expected in these caches.
cdef double MOST_IN_SECOND_LEVEL = 2 << 20, MOST_IN_THIRD_LEVEL = 16 << 20


cdef double key_bytes(const sdpa_input *p) noexcept:
    """Of K and V."""
    cdef double keys = <double>p.batches * p.kv_heads * p.kv_len
    return keys * (p.dim * p.key.itemsize + p.value_dim * p.value.itemsize)


cdef double rows_of_head(const sdpa_input *p) noexcept:
    """Of a head of queries, in all batches."""
    return <double>p.q_starts[p.batches] if p.q_starts != NULL else <double>p.batches * p.q_len


cdef double row_bytes(const sdpa_input *p) noexcept:
    """Of Q and the result."""
    cdef double rows = p.heads * rows_of_head(p)
    return rows * (p.dim * p.query.itemsize + p.value_dim * p.out.itemsize)


cdef int distance_of(const sdpa_input *p) noexcept:
    """Where K and V are expected."""
    cdef double bytes = key_bytes(p)
    if bytes <= MOST_IN_SECOND_LEVEL:
        return SDPA_NEAR
    return SDPA_THIRD_LEVEL if bytes <= MOST_IN_THIRD_LEVEL else SDPA_MEMORY


cdef size_t scratch_bytes(const sdpa_schedule *s) noexcept:
    """Of one thread.  It does not depend on the number of keys, but for one set of sums for each level of the tree of
    parts: ten at most."""
    cdef size_t sums = (s.level + 1) * sdpa_sums_bytes(s) if s.level or s.split else 0
    return sdpa_scratch_bytes(s, sdpa_largest_bundle(s)) + sums


cdef size_t shared_bytes(const sdpa_schedule *s, int64_t units) noexcept:
    """Of what threads hand to each other: the sums of units, of which there are no more than the threads ask for."""
    return units * (sdpa_sums_bytes(s) + sizeof(int)) if s.split else 0


cdef bint alike_and_near(const sdpa_schedule *s) noexcept nogil:
    """Whether units of few rows last equally long, and the second-level caches hold K and V."""
    return s.kernel.join != NULL and s.far == SDPA_NEAR and s.input.kv_lengths == NULL and s.input.q_starts == NULL


cdef int run(sdpa_schedule *s) except -1:
    """All units."""
    cdef const sdpa_input *p = s.input
    cdef crew c
    cdef attention_call call
    cdef int threads, chunk
    cdef int64_t units = cut_into_units(s, &threads, &chunk)
    # Where units are alike each thread takes the same heads in the next call, and finds them in its own cache.
    cdef sharing how = EQUALLY if alike_and_near(s) else BY_CHUNKS
    hire(&c, threads, work_of(p, rows_of_head(p), p.dim + p.value_dim) / WORK_OF_US, scratch_bytes(s),
         shared_bytes(s, units))
    s.watch = &c.watch
    call.schedule, call.sums_bytes, call.sums = s, sdpa_sums_bytes(s), c.beside
    call.gates = <int *>(c.beside + units * call.sums_bytes)
    if s.split:
        memset(call.gates, 0, units * sizeof(int))
    c.weigh = weigh_unit
    with nogil:
        share(&c, run_unit, &call, units, how, chunk, s.kernel.rows * (s.input.dim + s.input.value_dim + 16))
    return dismiss(&c)


cdef int run_all(const sdpa_input *p, int64_t *unit_starts, Kernel kernel, int threads) except -1:
    """On the engines that fit: where sequences have lengths of their own, the short ones and then the long ones."""
    cdef sdpa_schedule s = schedule_of(p, unit_starts, kernel.table(p), threads), few
    if p.q_starts != NULL:
        few = s
        few.kernel = kernel.isa.kernel[purpose_of(p)][1]
        if few.kernel != s.kernel:
            few.most_rows = most_of_few(kernel.isa, p)
            s.fewest_rows = few.most_rows + 1
            run(&few)
    return run(&s)


cdef sdpa_schedule schedule_of(
    const sdpa_input *p, int64_t *unit_starts, const sdpa_kernel *kernel, int threads
) noexcept:
    """Of all rows, not yet cut into units."""
    cdef sdpa_schedule s
    memset(&s, 0, sizeof(sdpa_schedule))
    s.input, s.kernel, s.threads, s.unit_starts, s.most_rows = p, kernel, threads, unit_starts, most_rows(p)
    return s


# A thread is asked for so much work, 1 to 2 us of one: multiply-adds, and bytes of K and V, which count for as much
# where rows are few.  Measured on two threads: 5.0 us of one become 3.6.
cdef double WORTH_A_THREAD = 1 << 17, WORK_OF_US = 80_000


cdef double work_of(const sdpa_input *p, double rows, double products_of_pair) noexcept:
    """Of so many rows of each head, in all batches.  As a double: the products may not fit into 64 bits."""
    return p.heads * rows * p.kv_len * products_of_pair + key_bytes(p)
