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


cdef void attend_part(const sdpa_schedule *s, const sdpa_unit *unit, int64_t part, sdpa_task *t) noexcept nogil:
    """The sums over one part of the keys."""
    sdpa_enter_task(s, unit, 0, &t.rows)
    t.rows.keys = sdpa_part(s, unit, part, &t.rows)
    attend_carefully(s, t, 1)
    s.kernel.start(s.input, t)


cdef void join_parts(
    const sdpa_schedule *s, const sdpa_unit *unit, sdpa_task *t, char *scratch, char *sums, size_t sums_bytes
) noexcept nogil:
    """A task whose keys are cut into parts, from the first part's sums in `t` on: the others lie in `sums`, or are
    computed here where that is NULL.  Either way they join in their order, and so give the same bits."""
    cdef sdpa_task other[2]
    cdef int64_t part
    sdpa_lay_out_scratch(s, scratch, other, 2)
    for part in range(1, unit.cut.parts):
        if sums != NULL:
            sdpa_lay_out_sums(s, sums + part * sums_bytes, &other[1].scratch)
        else:
            attend_part(s, unit, part, &other[1])
        s.kernel.join(s.input, t, &other[1])
    sdpa_enter_task(s, unit, 0, &t.rows)  # all keys again
    finish_task(s, t)


cdef struct attention_call:
    const sdpa_schedule *schedule
    char *sums  # where parts are units: of each
    size_t sums_bytes


cdef void run_unit(const void *of, int64_t index, char *scratch) noexcept nogil:
    cdef const attention_call *call = <const attention_call *>of
    cdef const sdpa_schedule *s = call.schedule
    cdef sdpa_unit unit = sdpa_find_unit(s, index)
    cdef sdpa_task tasks[2]
    if s.split:
        sdpa_lay_out_scratch(s, scratch, tasks, 1)
        sdpa_lay_out_sums(s, call.sums + index * call.sums_bytes, &tasks.scratch)
        if unit.index < unit.cut.parts:
            attend_part(s, &unit, unit.index, tasks)
    elif unit.cut.parts > 1:
        sdpa_lay_out_scratch(s, scratch, tasks, 2)
        attend_part(s, &unit, 0, tasks)
        join_parts(s, &unit, tasks, scratch, NULL, 0)
    else:
        run_bundle(s, &unit, scratch)


cdef void finish_unit(const attention_call *call, int64_t index, char *scratch) noexcept nogil:
    """Where parts were units: the first part of a head joins its others."""
    cdef const sdpa_schedule *s = call.schedule
    cdef char *sums = call.sums + index * call.sums_bytes
    cdef sdpa_unit unit = sdpa_find_unit(s, index)
    cdef sdpa_task t
    if unit.index == 0:
        sdpa_lay_out_scratch(s, scratch, &t, 1)
        sdpa_lay_out_sums(s, sums, &t.scratch)
        sdpa_enter_task(s, &unit, 0, &t.rows)
        t.scratch.started = 1
        join_parts(s, &unit, &t, scratch, sums, call.sums_bytes)


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


cdef double row_bytes(const sdpa_input *p) noexcept:
    """Of Q and the result."""
    cdef double rows = <double>p.batches * p.heads * p.q_len
    return rows * (p.dim * p.query.itemsize + p.value_dim * p.out.itemsize)


cdef int distance_of(const sdpa_input *p) noexcept:
    """Where K and V are expected."""
    cdef double bytes = key_bytes(p)
    if bytes <= MOST_IN_SECOND_LEVEL:
        return SDPA_NEAR
    return SDPA_THIRD_LEVEL if bytes <= MOST_IN_THIRD_LEVEL else SDPA_MEMORY


cdef size_t scratch_bytes(const sdpa_schedule *s) noexcept:
    """Of one thread.  It does not depend on the number of keys."""
    return sdpa_scratch_bytes(s, max(2 if s.kernel.join else 1, sdpa_largest_bundle(s)))


cdef bint alike_and_near(const sdpa_schedule *s) noexcept nogil:
    """Whether units of few rows last equally long, and the second-level caches hold K and V."""
    return s.kernel.join != NULL and s.far == SDPA_NEAR and s.input.kv_lengths == NULL and s.input.q_starts == NULL


cdef int run(sdpa_schedule *s) except -1:
    """All units."""
    cdef crew c
    cdef attention_call call
    cdef int threads, chunk
    cdef int64_t unit, units = cut_into_units(s, &threads, &chunk)
    # Where units are alike each thread takes the same heads in the next call, and finds them in its own cache.
    cdef sharing how = EQUALLY if alike_and_near(s) else BY_CHUNKS
    call.schedule, call.sums_bytes = s, sdpa_sums_bytes(s) if s.split else 0
    hire(&c, threads, scratch_bytes(s), units * call.sums_bytes)
    call.sums, s.watch = c.beside, &c.watch
    with nogil:
        share(&c, run_unit, &call, units, how, chunk, s.kernel.rows * (s.input.dim + s.input.value_dim + 16))
        if s.split and not sdpa_stops(&c.watch):
            for unit in range(units):
                finish_unit(&call, unit, c.scratch)
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
    s.input, s.kernel, s.threads, s.unit_starts, s.watch = p, kernel, threads, unit_starts, NULL
    s.fewest_rows, s.most_rows, s.split, s.far, s.ahead, s.at_once = 0, most_rows(p), 0, SDPA_NEAR, 0, 0
    return s


# Below this many multiply-adds a call runs on the caller's thread: waking the others costs more than they save.
cdef int64_t SMALL = 1 << 20


cdef bint few_products(double batches, double heads, double q_len, double kv_len, double features) noexcept:
    return batches * heads * q_len * kv_len * features < SMALL  # as doubles: the product may not fit into 64 bits
