# The algorithm of attention.  Part of _core.pyx.
#
# A task is up to 64 query rows of one key/value head.  It walks over the blocks of keys that any of its rows may see,
# and keeps for each row the largest score so far, the sum of the weights and the weighted sum of the values (the online
# softmax of Milakov and Gimelshein; FlashAttention).  A unit, which one thread takes at once, is a bundle of tasks that
# share what they read; or, with few rows, a part of the keys.
from libc.stdint cimport int64_t


cdef void attend_block(
    const sdpa_problem *p, const sdpa_kernel *kernel, int64_t key, sdpa_task *t, sdpa_step accumulate
) noexcept nogil:
    """One step of softmax(Q K^T) V, over the keys of the block that starts at `key`."""
    if t.keys.begin < key + p.block_keys and key < t.keys.end and sdpa_enter_block(p, kernel, key, t):
        kernel.scores(p, t)
        kernel.softmax_step(p, t)
        accumulate(p, t)


cdef inline int64_t block_products(const sdpa_problem *p, const sdpa_task *t) noexcept nogil:
    """Multiply-adds of a task in a block, with those that softmax is worth."""
    return t.rows * p.block_keys * (p.dim + p.value_dim + 16)


cdef void attend_blocks(
    const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *tasks, int count, sdpa_step accumulate
) noexcept nogil:
    """softmax(Q K^T) V for the rows of the tasks, without the division by the sum."""
    cdef int i
    cdef int64_t key = tasks[0].keys.begin, end = tasks[0].keys.end
    for i in range(count):
        kernel.begin(p, &tasks[i])
        key = min(key, tasks[i].keys.begin)
        end = max(end, tasks[i].keys.end)
    key = key // p.block_keys * p.block_keys
    while key < end and not stopped(p.watch, count * block_products(p, tasks)):
        for i in range(count):
            attend_block(p, kernel, key, &tasks[i], accumulate)
        key += p.block_keys


cdef void write_weights(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t) noexcept nogil:
    """The probabilities themselves: the scores once more, now that the sums over all keys are known."""
    cdef int64_t key = t.keys.begin // p.block_keys * p.block_keys
    while key < t.keys.end and not stopped(p.watch, block_products(p, t)):
        if sdpa_enter_block(p, kernel, key, t):
            kernel.scores(p, t)
            kernel.write_weights(p, t)
        key += p.block_keys


cdef void attend_carefully(
    const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *tasks, int count
) noexcept nogil:
    """Where NaN or inf came out of the sums, again with care: a hidden key weighs 0, but 0 * NaN is NaN; and where the
    sums themselves are too large, once more with all weights of a row divided by what they sum to."""
    cdef int i
    attend_blocks(p, kernel, tasks, count, kernel.accumulate)
    for i in range(count):
        if not kernel.finite(p, &tasks[i]):
            attend_blocks(p, kernel, &tasks[i], 1, kernel.accumulate_seen)
            if kernel.lift(p, &tasks[i]):
                attend_blocks(p, kernel, &tasks[i], 1, kernel.accumulate_seen)
            kernel.add_poison(p, &tasks[i])


cdef void finish_task(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t) noexcept nogil:
    if p.watch.stop:
        return  # rows of the result are right, or not written
    kernel.close_sums(p, t)
    if p.weights.data != NULL:
        write_weights(p, kernel, t)
    else:
        kernel.write_out(p, t)


cdef void run_bundle(
    const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, char *scratch
) noexcept nogil:
    cdef sdpa_task tasks[SDPA_MAX_BUNDLE]
    cdef int64_t first = unit.index * unit.cut.tasks // unit.cut.bundles
    cdef int i, count = <int>((unit.index + 1) * unit.cut.tasks // unit.cut.bundles - first)
    sdpa_lay_out_scratch(p, kernel, scratch, tasks, count)
    for i in range(count):
        sdpa_enter_task(p, kernel, unit, first + i, &tasks[i])
    attend_carefully(p, kernel, tasks, count)
    for i in range(count):
        finish_task(p, kernel, &tasks[i])


cdef void attend_part(
    const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, int64_t part, sdpa_task *t
) noexcept nogil:
    """The sums over one part of the keys."""
    sdpa_enter_task(p, kernel, unit, 0, t)
    t.keys = sdpa_part(p, unit, part, t)
    attend_carefully(p, kernel, t, 1)
    kernel.start(p, t)


cdef void join_parts(
    const sdpa_problem *p, const sdpa_kernel *kernel, const sdpa_unit *unit, sdpa_task *t, char *scratch, char *sums,
    size_t sums_bytes
) noexcept nogil:
    """A task whose keys are cut into parts, from the first part's sums in `t` on: the others lie in `sums`, or are
    computed here where that is NULL.  Either way they join in their order, and so give the same bits."""
    cdef sdpa_task other[2]
    cdef int64_t part
    sdpa_lay_out_scratch(p, kernel, scratch, other, 2)
    for part in range(1, unit.cut.parts):
        if sums != NULL:
            sdpa_lay_out_sums(p, kernel, sums + part * sums_bytes, &other[1])
        else:
            attend_part(p, kernel, unit, part, &other[1])
        kernel.join(p, t, &other[1])
    sdpa_enter_task(p, kernel, unit, 0, t)  # all keys again
    finish_task(p, kernel, t)


cdef struct attention_call:
    const sdpa_problem *p
    const sdpa_kernel *kernel
    char *sums
    size_t sums_bytes


cdef void run_unit(const void *of, int64_t index, char *scratch) noexcept nogil:
    cdef const attention_call *call = <const attention_call *>of
    cdef const sdpa_problem *p = call.p
    cdef const sdpa_kernel *kernel = call.kernel
    cdef sdpa_unit unit = sdpa_find_unit(p, kernel, index)
    cdef sdpa_task tasks[2]
    if p.split:
        sdpa_lay_out_scratch(p, kernel, scratch, tasks, 1)
        sdpa_lay_out_sums(p, kernel, call.sums + index * call.sums_bytes, tasks)
        if unit.index < unit.cut.parts:
            attend_part(p, kernel, &unit, unit.index, tasks)
    elif unit.cut.parts > 1:
        sdpa_lay_out_scratch(p, kernel, scratch, tasks, 2)
        attend_part(p, kernel, &unit, 0, tasks)
        join_parts(p, kernel, &unit, tasks, scratch, NULL, 0)
    else:
        run_bundle(p, kernel, &unit, scratch)


cdef void finish_unit(const attention_call *call, int64_t index, char *scratch) noexcept nogil:
    """Where parts were units: the first part of a head joins its others."""
    cdef const sdpa_problem *p = call.p
    cdef const sdpa_kernel *kernel = call.kernel
    cdef char *sums = call.sums + index * call.sums_bytes
    cdef sdpa_unit unit = sdpa_find_unit(p, kernel, index)
    cdef sdpa_task t
    if unit.index == 0:
        sdpa_lay_out_scratch(p, kernel, scratch, &t, 1)
        sdpa_lay_out_sums(p, kernel, sums, &t)
        sdpa_enter_task(p, kernel, &unit, 0, &t)
        t.started = 1
        join_parts(p, kernel, &unit, &t, scratch, sums, call.sums_bytes)


cdef int64_t cut_into_units(sdpa_problem *p, const sdpa_kernel *kernel, int *threads, int *chunk) noexcept:
    """The number of units; no more threads than that; and how many a thread takes at once: those of one head, so that
    it finds K and V in its own cache, or of several that follow each other in memory, but few enough that the last one
    to finish is not waited for."""
    cdef int64_t units
    p.block_keys = kernel.block_keys
    p.threads = threads[0]
    p.far = is_far(p, MOST_IN_SECOND_LEVEL if kernel.join else MOST_IN_THIRD_LEVEL)
    units = sdpa_count_units(p, kernel)
    threads[0] = <int>max(1, min(<int64_t>threads[0], units))
    chunk[0] = <int>max(1, units // (16 * threads[0]))
    return units


# K and V of more bytes than this are not expected in these caches.  Few rows read faster from memory and from the
# third-level cache if they prefetch, many rows from memory only: bert +2 %, clip-77 +4 % from the third level.
cdef double MOST_IN_SECOND_LEVEL = 2 << 20, MOST_IN_THIRD_LEVEL = 16 << 20


cdef bint is_far(const sdpa_problem *p, double most) noexcept:
    cdef double keys = <double>p.batches * p.kv_heads * p.kv_len
    return keys * (p.dim * p.key.itemsize + p.value_dim * p.value.itemsize) > most


cdef size_t scratch_bytes(const sdpa_problem *p, const sdpa_kernel *kernel) noexcept:
    """Of one thread.  It does not depend on the number of keys."""
    cdef sdpa_task sizes[SDPA_MAX_BUNDLE]
    return sdpa_lay_out_scratch(p, kernel, NULL, sizes, max(2 if kernel.join else 1, sdpa_largest_bundle(p, kernel)))


cdef size_t sums_bytes(const sdpa_problem *p, const sdpa_kernel *kernel) noexcept:
    """Of one unit, where parts are units."""
    cdef sdpa_task sizes
    return sdpa_lay_out_sums(p, kernel, NULL, &sizes) if p.split else 0


cdef bint alike_and_near(const sdpa_problem *p, const sdpa_kernel *kernel) noexcept nogil:
    """Whether units of few rows last equally long, and the second-level caches hold K and V."""
    return kernel.join != NULL and not p.far and p.kv_lengths == NULL and p.q_starts == NULL


cdef int run(sdpa_problem *p, const sdpa_kernel *kernel, int threads) except -1:
    """All units, on `threads` threads."""
    cdef crew c
    cdef attention_call call
    cdef int chunk
    cdef int64_t unit, units = cut_into_units(p, kernel, &threads, &chunk)
    # Where units are alike each thread takes the same heads in the next call, and finds them in its own cache.
    cdef sharing how = EQUALLY if alike_and_near(p, kernel) else BY_CHUNKS
    call.p, call.kernel, call.sums_bytes = p, kernel, sums_bytes(p, kernel)
    hire(&c, threads, scratch_bytes(p, kernel), units * call.sums_bytes)
    call.sums, p.watch = c.beside, &c.watch
    with nogil:
        share(&c, run_unit, &call, units, how, chunk, kernel.rows * (p.dim + p.value_dim + 16))
        if p.split and not c.watch.stop:
            for unit in range(units):
                finish_unit(&call, unit, c.scratch)
    return dismiss(&c)


cdef int run_all(sdpa_problem *p, Kernel kernel, int threads) except -1:
    """On the engines that fit: where sequences have lengths of their own, the short ones and then the long ones."""
    cdef const sdpa_kernel *longest = kernel.table(p)
    cdef const sdpa_kernel *few = kernel.isa.kernel[purpose_of(p)][1]
    p.fewest_rows, p.most_rows = 0, most_rows(p)
    if p.q_starts != NULL and longest != few:
        p.most_rows = most_of_few(kernel.isa, p)
        run(p, few, threads)
        p.fewest_rows, p.most_rows = p.most_rows + 1, most_rows(p)
    return run(p, longest, threads)


# Below this many multiply-adds a call runs on the caller's thread: waking the others costs more than they save.
cdef int64_t SMALL = 1 << 20


cdef bint few_products(double batches, double heads, double q_len, double kv_len, double features) noexcept:
    return batches * heads * q_len * kv_len * features < SMALL  # as doubles: the product may not fit into 64 bits
