# The algorithm of attention.  Part of _core.pyx.
#
# A task is up to 64 query rows of one key/value head.  It walks over the blocks of keys that any of its rows may see,
# and keeps for each row the largest score so far, the sum of the weights and the weighted sum of the values (the online
# softmax of Milakov and Gimelshein; FlashAttention).  Many keys are cut into parts, which are summed on their own and
# then joined.  A unit, which one thread takes at once, is a bundle of tasks that share what they read; or, where these
# are too few for the threads, some parts of their keys.
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


cdef void attend_and_finish(const sdpa_schedule *s, sdpa_task *tasks, int count) noexcept nogil:
    cdef int i
    attend_carefully(s, tasks, count)
    for i in range(count):
        finish_task(s, &tasks[i])


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


cdef struct attention_call:
    const sdpa_schedule *schedule
    size_t task_bytes, sums_bytes  # of the sums of a task, and of a bundle
    char *sums  # where nodes are units: of each, and
    int *gates  # of each but the first of a bundle, of the node that it is the right half of: whether one half is ready


cdef struct bundle:
    const attention_call *call
    sdpa_unit unit
    int count
    sdpa_task tasks[SDPA_MAX_BUNDLE]
    sdpa_span keys[SDPA_MAX_BUNDLE]  # all that their rows see; of a task those of the current part
    char *scratch


cdef bint enter_bundle(const attention_call *call, int64_t index, char *scratch, bundle *b) noexcept nogil:
    """Whether there is a unit of that index: other batches may have more."""
    cdef const sdpa_schedule *s = call.schedule
    cdef sdpa_unit unit = sdpa_find_unit(s, index)
    cdef sdpa_span seen
    cdef int i
    b.call, b.unit, b.scratch = call, unit, scratch
    b.count = <int>(unit.end_task - unit.first_task)
    if b.count == 0:
        return False
    sdpa_lay_out_scratch(s, scratch, b.tasks, b.count)
    for i in range(b.count):
        sdpa_enter_task(s, &unit, unit.first_task + i, &b.tasks[i].rows)
        b.keys[i] = b.tasks[i].rows.keys
        if s.ahead:
            sdpa_look_ahead(s, &unit, unit.first_task + i, &b.tasks[i].rows)
    if unit.cut.last_part and not s.split:  # those of the bundle: fewer than of the head with a window
        seen = b.keys[0]
        for i in range(1, b.count):
            seen.begin, seen.end = min(seen.begin, b.keys[i].begin), max(seen.end, b.keys[i].end)
        b.unit.cut.parts = sdpa_parts_of(&unit.cut, seen)
    return True


cdef void run_at_once(bundle *b) noexcept nogil:
    cdef const sdpa_schedule *s = b.call.schedule
    cdef int i
    for i in range(b.count):
        if stopped(s.watch, block_products(s, &b.tasks[i].rows)):
            return
        if not attend_at_once(s, &b.tasks[i]):
            attend_and_finish(s, &b.tasks[i], 1)


cdef char *behind_tasks(const bundle *b) noexcept nogil:
    """Where the scratch has room for sums."""
    return b.scratch + sdpa_scratch_bytes(b.call.schedule, b.count)


cdef void sum_part(bundle *b, int64_t part, char *to) noexcept nogil:
    cdef const sdpa_schedule *s = b.call.schedule
    cdef int i
    for i in range(b.count):
        sdpa_lay_out_sums(s, to + i * b.call.task_bytes, &b.tasks[i].scratch)
        b.tasks[i].rows.keys = sdpa_node_keys(&b.unit.cut, 0, part, b.keys[i])
        b.tasks[i].rows.ahead = s.ahead and b.tasks[i].rows.keys.end == b.keys[i].end
    attend_carefully(s, b.tasks, b.count)
    for i in range(b.count):
        s.kernel.start(s.input, &b.tasks[i])


cdef void join_sums(bundle *b, char *left, char *right) noexcept nogil:
    """Those of both, in place of the left ones."""
    cdef const sdpa_schedule *s = b.call.schedule
    cdef sdpa_task other
    cdef int i
    for i in range(b.count):
        sdpa_lay_out_sums(s, left + i * b.call.task_bytes, &b.tasks[i].scratch)
        sdpa_lay_out_sums(s, right + i * b.call.task_bytes, &other.scratch)
        s.kernel.join(s.input, &b.tasks[i], &other)


cdef void sum_node(bundle *b, int level, int64_t node, char *to, char *spare) noexcept nogil:
    """The sums over a node of the tree of parts, from left to right.  `spare` has room for one on each level below."""
    cdef int below = level - 1
    if level == 0:
        sum_part(b, node, to)
    elif not sdpa_has_node(&b.unit.cut, below, 2 * node):
        sum_node(b, below, 2 * node + 1, to, spare)
    elif not sdpa_has_node(&b.unit.cut, below, 2 * node + 1):
        sum_node(b, below, 2 * node, to, spare)
    else:
        sum_node(b, below, 2 * node, to, spare)
        sum_node(b, below, 2 * node + 1, spare, spare + b.call.sums_bytes)
        join_sums(b, to, spare)


cdef void finish_bundle(bundle *b, char *sums) noexcept nogil:
    cdef const sdpa_schedule *s = b.call.schedule
    cdef int i
    for i in range(b.count):
        sdpa_lay_out_sums(s, sums + i * b.call.task_bytes, &b.tasks[i].scratch)
        b.tasks[i].scratch.started = 1
        b.tasks[i].rows.keys = b.keys[i]
        finish_task(s, &b.tasks[i])


cdef inline int64_t unit_of_node(const bundle *b, int level, int64_t node) noexcept nogil:
    """The first unit in it, where its sums are."""
    cdef int unit_level = b.call.schedule.level
    cdef int64_t first = b.unit.cut.parts.begin >> unit_level
    return b.unit.first + max(first, node << (level - unit_level)) - first


cdef void join_upwards(bundle *b) noexcept nogil:
    """The unit's sums are ready.  Whoever comes second joins both halves of a node, and goes on to the one above."""
    cdef const attention_call *call = b.call
    cdef const sdpa_cut *cut = &b.unit.cut
    cdef int level = call.schedule.level, height = sdpa_height(cut)
    cdef int64_t node = b.unit.node, left, right
    while level < height:
        if sdpa_has_node(cut, level, node & ~1) and sdpa_has_node(cut, level, node | 1):
            left, right = unit_of_node(b, level, node & ~1), unit_of_node(b, level, node | 1)
            if not sdpa_comes_second(&call.gates[right]):
                return
            join_sums(b, call.sums + left * call.sums_bytes, call.sums + right * call.sums_bytes)
        node >>= 1
        level += 1
    finish_bundle(b, call.sums + b.unit.first * call.sums_bytes)


cdef void run_unit(const void *of, int64_t index, char *scratch) noexcept nogil:
    cdef const attention_call *call = <const attention_call *>of
    cdef const sdpa_schedule *s = call.schedule
    cdef const sdpa_span *parts
    cdef bundle b
    cdef char *sums
    cdef int height
    if not enter_bundle(call, index, scratch, &b):
        return
    parts = &b.unit.cut.parts
    if s.at_once:
        run_at_once(&b)
    elif s.split:
        sum_node(&b, s.level, b.unit.node, call.sums + index * call.sums_bytes, behind_tasks(&b))
        if not sdpa_stops(s.watch):
            join_upwards(&b)
    elif parts.end - parts.begin > 1:
        height, sums = sdpa_height(&b.unit.cut), behind_tasks(&b)
        sum_node(&b, height, parts.begin >> height, sums, sums + call.sums_bytes)
        finish_bundle(&b, sums)
    else:
        attend_and_finish(s, b.tasks, b.count)


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
    cdef int64_t task
    for task in range(unit.first_task, unit.end_task):
        sdpa_enter_task(s, &unit, task, &rows)
        keys.begin, keys.end = 0, rows.kv_len
        if s.split:
            keys = sdpa_node_keys(&unit.cut, s.level, unit.node, keys)
        pairs += pairs_seen(s.input, &rows, keys)
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


cdef size_t bundle_sums_bytes(const sdpa_schedule *s) noexcept:
    return s.largest_bundle * sdpa_sums_bytes(s)


cdef size_t scratch_bytes(const sdpa_schedule *s) noexcept:
    """Of one thread.  It does not depend on the number of keys, but for one set of sums for each level of the tree of
    parts: eleven at most."""
    cdef size_t sums = (s.level + 1) * bundle_sums_bytes(s) if s.level or s.split else 0
    return sdpa_scratch_bytes(s, s.largest_bundle) + sums


cdef size_t shared_bytes(const sdpa_schedule *s, int64_t units) noexcept:
    """Of what threads hand to each other: the sums of units, of which there are no more than the threads ask for."""
    return units * (bundle_sums_bytes(s) + sizeof(int)) if s.split else 0


cdef bint alike_and_near(const sdpa_schedule *s) noexcept nogil:
    """Whether units of few rows last equally long, and the second-level caches hold K and V."""
    return s.kernel.few_rows and s.far == SDPA_NEAR and s.input.kv_lengths == NULL and s.input.q_starts == NULL


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
    call.schedule, call.task_bytes, call.sums = s, sdpa_sums_bytes(s), c.beside
    call.sums_bytes = bundle_sums_bytes(s)
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
