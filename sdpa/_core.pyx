# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The algorithm of attention, over the kernels of csrc/.

A task is up to 64 query rows of one key/value head.  It walks over the blocks of keys that any of its rows may see and
keeps, per row, the largest score so far, the sum of the weights and the weighted sum of the values (the online softmax
of Milakov and Gimelshein; FlashAttention).  Tasks are shared among threads; nothing here knows an instruction set, and
nothing in csrc/ knows of threads or Python.  _core/inputs.pxi checks arguments.
"""
cimport cython
cimport numpy as cnp
import numpy as np
from cpython.dict cimport PyDict_GetItem
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cython.parallel cimport prange, threadid
from cpython.ref cimport PyObject
from libc.math cimport INFINITY, isfinite, sqrt
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy, memset

cnp.import_array()

include "_core/csrc.pxi"
include "_core/threads.pxi"


# ---------------------------------------------------------------------------------------------------- the algorithm

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


# ------------------------------------------------------------------------------------------------------ the kernels

cdef int purpose_of(const sdpa_problem *p) noexcept:
    if p.query.dtype == SDPA_FLOAT64:
        return SDPA_FOR_DOUBLE
    # Without a value (attention_weights) only Q and K meet.  A scale this large would show what was lost below the
    # smallest normal number, which the products of pairs take for 0.
    if (p.query.dtype == SDPA_BFLOAT16 and p.key.dtype == SDPA_BFLOAT16
            and (p.value.data == NULL or p.value.dtype == SDPA_BFLOAT16) and -LARGE_SCALE < p.scale < LARGE_SCALE):
        return SDPA_FOR_BFLOAT16
    return SDPA_FOR_FLOAT


cdef double LARGE_SCALE = 2.0 ** 20


cdef class Kernel:
    """The arithmetic for one instruction set: for float32, float64 and bfloat16, each for many rows and for few."""
    cdef const sdpa_isa *isa

    def __init__(self):
        raise TypeError("kernels() lists the kernels there are")

    @property
    def name(self):
        return self.isa.name.decode()

    cdef const sdpa_kernel *table(self, const sdpa_problem *p) noexcept:
        """For the batch with the most rows."""
        cdef const sdpa_kernel *const *engines = self.isa.kernel[purpose_of(p)]
        return engines[1 if p.v == NULL and most_rows(p) <= most_of_few(self.isa, p) else 0]

    def __repr__(self):
        return f"<sdpa kernel {self.name}>"


# Up to so many rows of a key/value head, and a vector of them, the engine for few rows is faster.  Measured with
# AVX-512, 8 heads, D = 128, few against many, in ms.  float32, 2048 keys: 12 rows 0.26 and 0.31, 16 rows 0.34 and 0.31;
# 8192 keys, 16 rows 1.51 and 2.32; 32768 keys, 16 rows 6.4 and 12.6.  float16: 0.34 and 0.39, 5.6 and 8.5 (16 rows).
cdef int MOST_OF_FEW = 16
# The same where many rows multiply pairs of bfloat16.  2048 keys: 8 rows 0.19 and 0.21, 10 rows 0.23 and 0.21, 12 rows
# 0.27 and 0.21; 8192 keys: 12 rows 1.08 and 0.87; 32768 keys, from memory: 8 rows 3.0 and 7.3, 12 rows 4.3 and 7.2.
cdef int MOST_BESIDE_PAIRS = 10


cdef int64_t most_of_few(const sdpa_isa *isa, const sdpa_problem *p) noexcept:
    cdef const sdpa_kernel *const *engines = isa.kernel[purpose_of(p)]
    cdef bint pairs = purpose_of(p) == SDPA_FOR_BFLOAT16 and engines[0] != isa.kernel[SDPA_FOR_FLOAT][0]
    return min(MOST_BESIDE_PAIRS if pairs else MOST_OF_FEW, engines[1].rows)


cdef int64_t most_rows(const sdpa_problem *p) noexcept:
    """Of a key/value head, in the longest batch."""
    return p.q_len * sdpa_group(p) if p.kv_heads else 0


def kernels():
    """The kernels that this build has and this CPU runs, best first."""
    cdef Kernel kernel
    cdef int i = 0
    found = []
    while sdpa_isas[i].name != NULL:
        if sdpa_cpu_runs(sdpa_isas[i].name):
            kernel = Kernel.__new__(Kernel)
            kernel.isa = &sdpa_isas[i]
            found.append(kernel)
        i += 1
    return found


cdef extern from *:
    """
    #ifdef _OPENMP
    enum { SDPA_OPENMP = 1 };
    #else
    enum { SDPA_OPENMP = 0 };
    #endif
    #ifdef __VERSION__
    #define SDPA_COMPILER __VERSION__
    #else
    #define SDPA_COMPILER "unknown"
    #endif
    """
    int SDPA_OPENMP
    const char *SDPA_COMPILER

OPENMP = bool(SDPA_OPENMP)
COMPILER = SDPA_COMPILER.decode()


# -------------------------------------------------------------------------------------------------------- arguments

cdef int code_of(int type_num) noexcept:
    if type_num == cnp.NPY_BOOL:
        return SDPA_BOOL
    if type_num == cnp.NPY_INT8:
        return SDPA_INT8
    if type_num == cnp.NPY_FLOAT16:
        return SDPA_FLOAT16
    if type_num == cnp.NPY_DOUBLE:
        return SDPA_FLOAT64
    return SDPA_FLOAT32 if type_num == cnp.NPY_FLOAT else SDPA_BFLOAT16


cdef sdpa_array array_of(cnp.ndarray array):
    """An array of 2 to 4 dimensions, the last ones of (batch, head, row, column)."""
    cdef sdpa_array a
    cdef int n = cnp.PyArray_NDIM(array)
    a.data = cnp.PyArray_BYTES(array)
    a.batch = cnp.PyArray_STRIDE(array, n - 4) if n > 3 else 0
    a.head = cnp.PyArray_STRIDE(array, n - 3) if n > 2 else 0
    a.row = cnp.PyArray_STRIDE(array, n - 2)
    a.column = cnp.PyArray_STRIDE(array, n - 1)
    a.batches = NULL
    a.dtype = code_of(cnp.PyArray_TYPE(array))
    a.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    return a


# NumPy's number of the type bfloat16, once an array of it was seen: another package brings it (see _checks.py).
cdef int bfloat16_number = -1


def know_bfloat16(dtype):
    global bfloat16_number
    bfloat16_number = dtype.num


cdef bint is_half(int type_num) noexcept:
    return type_num == cnp.NPY_FLOAT16 or type_num == bfloat16_number


cdef bint may_meet(int query, int key, bint scaled) noexcept:
    """Whether a key of one type number may serve a query of the other."""
    if query != cnp.NPY_FLOAT and query != cnp.NPY_DOUBLE and not is_half(query):
        return False
    if scaled:
        return key == cnp.NPY_INT8
    if query == key:
        return True
    return query == cnp.NPY_DOUBLE and key == cnp.NPY_FLOAT or not is_half(query) and is_half(key)


# Below this many multiply-adds a call runs on the caller's thread: waking the others costs more than they save.
cdef int64_t SMALL = 1 << 20


cdef bint few_products(double batches, double heads, double q_len, double kv_len, double features) noexcept:
    return batches * heads * q_len * kv_len * features < SMALL  # as doubles: the product may not fit into 64 bits


cdef struct quantise_call:
    sdpa_array source, out, scales
    int64_t heads, rows, dim, group
    int64_t parts, part_rows  # of a head
    int64_t unit_batches, unit_heads  # more than one where a unit is all
    bint finite


cdef int64_t QUANTISE_AT_ONCE = 1 << 18  # numbers


cdef void quantise_part(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef quantise_call *call = <quantise_call *>of
    cdef int64_t row = unit % call.parts * call.part_rows, rows = min(call.part_rows, call.rows - row)
    cdef int64_t batch = unit // call.parts // call.heads, head = unit // call.parts % call.heads
    cdef sdpa_array source = place(&call.source, batch, head, row)
    cdef sdpa_array out = place(&call.out, batch, head, row), scales = place(&call.scales, batch, head, row)
    if call.finite:
        call.finite = sdpa_quantise_rows(
            &source, call.unit_batches, call.unit_heads, rows, call.dim, call.group, &out, &scales)


cdef sdpa_array place(const sdpa_array *array, int64_t batch, int64_t head, int64_t row) noexcept nogil:
    """The same from there on."""
    cdef sdpa_array a = array[0]
    a.data += batch * a.batch + head * a.head + row * a.row
    return a


def quantise(
    cnp.ndarray source not None, cnp.ndarray out not None, cnp.ndarray scales not None, int64_t group
):
    """A 4-D array of floats as int8, with a float32 scale for each `group` of neighbours in a row, into `out` and
    `scales` (see csrc/memory/quantise.c).  False, and these are unfinished, where it met NaN or inf."""
    cdef crew c
    cdef quantise_call call
    cdef int64_t units, batches = cnp.PyArray_DIM(source, 0)
    call.source, call.out, call.scales = array_of(source), array_of(out), array_of(scales)
    call.heads, call.rows, call.dim = (
        cnp.PyArray_DIM(source, 1), cnp.PyArray_DIM(source, 2), cnp.PyArray_DIM(source, 3))
    call.group, call.finite = group, True
    call.part_rows = max(1, QUANTISE_AT_ONCE // max(1, call.dim))
    call.parts = (call.rows + call.part_rows - 1) // call.part_rows
    call.unit_batches = call.unit_heads = 1
    units = batches * call.heads * call.parts
    if call.rows and batches * call.heads <= call.part_rows // call.rows:
        call.unit_batches, call.unit_heads, units = batches, call.heads, 1
    hire(&c, 1, 0, 0)
    with nogil:
        share(&c, quantise_part, &call, units, EQUALLY, 1, 8 * QUANTISE_AT_ONCE)
    dismiss(&c)
    return call.finite


include "_core/backward.pxi"
include "_core/linear.pxi"
include "_core/pages.pxi"
include "_core/rotary.pxi"
include "_core/cache.pxi"
include "_core/arguments.pxi"
include "_core/inputs.pxi"
include "_core/call.pxi"
