# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The algorithm of attention, over the kernels of csrc/.

A task is up to 64 query rows of one key/value head.  It walks over the blocks of keys that any of its rows may see and
keeps, per row, the largest score so far, the sum of the weights and the weighted sum of the values (the online softmax
of Milakov and Gimelshein; FlashAttention).  Tasks are shared among threads; nothing here knows an instruction set, and
nothing in csrc/ knows of threads or Python.  Arguments have been checked by _problem.py.
"""
cimport numpy as cnp
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cython.parallel cimport prange, threadid
from libc.math cimport sqrt
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memset

cnp.import_array()


# ---------------------------------------------------------------------------------------------------- the algorithm

cdef void attend_block(
    const sdpa_problem *p, const sdpa_kernel *kernel, int64_t key, sdpa_task *t, sdpa_step accumulate
) noexcept nogil:
    """One step of softmax(Q K^T) V, over the keys of the block that starts at `key`."""
    if t.keys.begin < key + p.block_keys and key < t.keys.end and sdpa_enter_block(p, kernel, key, t):
        kernel.scores(p, t)
        kernel.softmax_step(p, t)
        accumulate(p, t)


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
    while key < end:
        for i in range(count):
            attend_block(p, kernel, key, &tasks[i], accumulate)
        key += p.block_keys


cdef void write_weights(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t) noexcept nogil:
    """The probabilities themselves: the scores once more, now that the sums over all keys are known."""
    cdef int64_t key = t.keys.begin // p.block_keys * p.block_keys
    while key < t.keys.end:
        if sdpa_enter_block(p, kernel, key, t):
            kernel.scores(p, t)
            kernel.write_weights(p, t)
        key += p.block_keys


cdef void finish_task(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t) noexcept nogil:
    # A hidden key weighs 0, but 0 * NaN is NaN: where NaN or inf came out and anything was hidden, again with care.
    if t.hidden and not kernel.finite(p, t):
        attend_blocks(p, kernel, t, 1, kernel.accumulate_seen)
    kernel.close_sums(p, t)
    if p.weights.data != NULL:
        write_weights(p, kernel, t)
    else:
        kernel.write_out(p, t)


cdef void run_bundle(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t index, char *scratch) noexcept nogil:
    cdef sdpa_task tasks[8]  # SDPA_MAX_BUNDLE
    cdef int64_t head = index // p.bundles_per_head, part = index % p.bundles_per_head
    cdef int64_t first = part * p.tasks_per_head // p.bundles_per_head
    cdef int i, count = <int>((part + 1) * p.tasks_per_head // p.bundles_per_head - first)
    sdpa_lay_out_scratch(p, kernel, scratch, tasks, count)
    for i in range(count):
        sdpa_enter_task(p, kernel, head * p.tasks_per_head + first + i, &tasks[i])
    attend_blocks(p, kernel, tasks, count, kernel.accumulate)
    for i in range(count):
        finish_task(p, kernel, &tasks[i])


cdef int64_t cut_into_bundles(sdpa_problem *p, const sdpa_kernel *kernel, int *threads, int *chunk) noexcept:
    """The number of bundles of tasks; no more threads than that; and how many a thread takes at once: those of one
    head, so that it finds K and V in its own cache, but few enough that the last one to finish is not waited for."""
    cdef int64_t bundles
    p.block_keys = kernel.block_keys
    if p.batches == 0 or p.heads == 0 or p.q_len == 0:
        threads[0] = chunk[0] = 1
        p.tasks_per_head = p.bundles_per_head = 1
        return 0
    p.tasks_per_head = sdpa_tasks_per_head(p, kernel, threads[0])
    p.bundles_per_head = sdpa_bundles_per_head(p, kernel, threads[0])
    bundles = p.batches * p.kv_heads * p.bundles_per_head
    threads[0] = <int>min(<int64_t>threads[0], bundles)
    chunk[0] = <int>max(1, min(p.bundles_per_head, bundles // (16 * threads[0])))
    return bundles


cdef size_t scratch_bytes(const sdpa_problem *p, const sdpa_kernel *kernel) noexcept:
    """Of one thread.  It does not depend on the number of keys."""
    cdef sdpa_task sizes[8]  # SDPA_MAX_BUNDLE
    return sdpa_lay_out_scratch(p, kernel, NULL, sizes, sdpa_largest_bundle(p))


cdef int run(sdpa_problem *p, const sdpa_kernel *kernel, int threads) except -1:
    """All tasks, on `threads` threads."""
    cdef int chunk, thread
    cdef int64_t bundle, bundles = cut_into_bundles(p, kernel, &threads, &chunk)
    cdef size_t bytes_each = scratch_bytes(p, kernel)
    cdef char *memory = <char *>PyMem_RawMalloc(threads * bytes_each + 64)
    cdef char *scratch = <char *>((<uintptr_t>memory + 63) & ~<uintptr_t>63)
    if memory == NULL:
        raise MemoryError(f"{threads * bytes_each} bytes of scratch for {threads} threads")
    for thread in range(threads):
        memset(scratch + thread * bytes_each, 0, sizeof(sdpa_copied))  # its first part: nothing was copied yet
    with nogil:
        if threads == 1:
            for bundle in range(bundles):
                run_bundle(p, kernel, bundle, scratch)
        else:
            for bundle in prange(bundles, schedule="dynamic", chunksize=chunk, num_threads=threads):
                run_bundle(p, kernel, bundle, scratch + threadid() * bytes_each)
    PyMem_RawFree(memory)
    return 0


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
        cdef const sdpa_kernel *const *engines = self.isa.kernel[purpose_of(p)]
        cdef int64_t rows = p.q_len * sdpa_group(p) if p.kv_heads else 0
        return engines[1 if rows <= min(MOST_OF_FEW, engines[1].rows) else 0]

    def __repr__(self):
        return f"<sdpa kernel {self.name}>"


# Up to so many rows of a key/value head, and a vector of them, the engine for few rows is faster.  Measured: AVX-512
# and 8 heads of 2048 keys, D = 128: 8 rows 0.21 against 0.34 ms, 12 rows 0.27 against 0.33, 14 rows 0.34 against 0.33.
cdef int MOST_OF_FEW = 12


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
    a.dtype = code_of(cnp.PyArray_TYPE(array))
    a.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    return a


cdef void set_sizes(sdpa_problem *p, cnp.ndarray query, cnp.ndarray key) noexcept:
    cdef int n = cnp.PyArray_NDIM(query)
    p.batches = cnp.PyArray_DIM(query, n - 4) if n > 3 else 1
    p.heads = cnp.PyArray_DIM(query, n - 3) if n > 2 else 1
    p.kv_heads = cnp.PyArray_DIM(key, n - 3) if n > 2 else 1
    p.q_len = cnp.PyArray_DIM(query, n - 2)
    p.kv_len = cnp.PyArray_DIM(key, n - 2)
    p.dim = cnp.PyArray_DIM(query, n - 1)


def attend(
    Kernel kernel not None, cnp.ndarray query not None, cnp.ndarray key not None, *, cnp.ndarray value, cnp.ndarray out,
    cnp.ndarray weights, cnp.ndarray lse, cnp.ndarray mask, cnp.ndarray bias,
    const int64_t[::1] begin_shift, const int64_t[::1] end_shift,
    const int64_t[::1] q_offset, const int64_t[::1] kv_lengths,
    double scale, double softcap, const double[:, ::1] sinks, const double[:, ::1] alibi_slopes, int threads,
):
    """Checked arguments in, `out` (or `weights`) and `lse` filled.  Arrays are 4-D, lse (B, H, M, 1); None: absent."""
    cdef sdpa_problem p
    memset(&p, 0, sizeof(p))
    set_sizes(&p, query, key)
    p.query = array_of(query)
    p.key = array_of(key)
    if value is not None:
        p.value_dim = cnp.PyArray_DIM(value, 3)
        p.value = array_of(value)
    if out is not None:
        p.out = array_of(out)
    if weights is not None:
        p.weights = array_of(weights)
    if lse is not None:
        p.lse = array_of(lse)
    if mask is not None:
        p.mask = array_of(mask)
    if bias is not None:
        p.bias = array_of(bias)
    p.shift_step = 1
    if begin_shift is not None:
        p.begin_shift = &begin_shift[0]
    if end_shift is not None:
        p.end_shift = &end_shift[0]
    if q_offset is not None:
        p.q_offset = &q_offset[0]
    if kv_lengths is not None:
        p.kv_lengths = &kv_lengths[0]
    if sinks is not None:
        p.sinks = &sinks[0, 0]
    if alibi_slopes is not None:
        p.alibi_slopes = &alibi_slopes[0, 0]
    p.scale = scale
    p.softcap = softcap
    run(&p, kernel.table(&p), threads)


def plan(
    Kernel kernel not None, cnp.ndarray query not None, cnp.ndarray key not None, cnp.ndarray value not None, *,
    int64_t batches, double scale, bint bounded, int threads,
):
    """How a problem would be cut: (whether few rows, pairs, and conversion of K or V; lanes, most rows and rows of a
    task, keys of a block, tasks, tasks of a bundle, threads, bytes of scratch).  The arrays have at least four axes, of
    which the last three count."""
    cdef sdpa_problem p
    cdef int chunk
    cdef int64_t bundles, all_rows, vectors, per_task
    cdef const sdpa_kernel *table
    memset(&p, 0, sizeof(p))
    set_sizes(&p, query, key)
    p.batches, p.scale = batches, scale
    p.query, p.key, p.value = array_of(query), array_of(key), array_of(value)
    p.value_dim = cnp.PyArray_DIM(value, cnp.PyArray_NDIM(value) - 1)
    p.begin_shift = &p.q_len if bounded else NULL  # what it holds is not looked at
    table = kernel.table(&p)
    bundles = cut_into_bundles(&p, table, &threads, &chunk)
    all_rows = p.q_len * sdpa_group(&p) if p.kv_heads else 0
    vectors = (all_rows + table.lanes - 1) // table.lanes
    per_task = (vectors + p.tasks_per_head - 1) // p.tasks_per_head
    tasks = batches * p.kv_heads * p.tasks_per_head if bundles else 0
    pairs = table != kernel.isa.kernel[SDPA_FOR_FLOAT][0] and purpose_of(&p) == SDPA_FOR_BFLOAT16
    few = table == kernel.isa.kernel[purpose_of(&p)][1]
    return (few, pairs and not few, table.copies(&p), table.lanes, table.rows, min(all_rows, per_task * table.lanes),
            table.block_keys, tasks, sdpa_largest_bundle(&p), threads, threads * scratch_bytes(&p, table))


# NumPy's number of the type bfloat16, once an array of it was seen: another package brings it (see _problem.py).
cdef int bfloat16_number = -1


def know_bfloat16(dtype):
    global bfloat16_number
    bfloat16_number = dtype.num


cdef bint is_plain(cnp.ndarray query, cnp.ndarray key, cnp.ndarray value) noexcept:
    """Equal ranks of 2 to 4, one native dtype of ours, sizes that fit without broadcasting, query in C order."""
    cdef int n = cnp.PyArray_NDIM(query), axis
    cdef int type_num = cnp.PyArray_TYPE(query)
    if n < 2 or n > 4 or cnp.PyArray_NDIM(key) != n or cnp.PyArray_NDIM(value) != n:
        return False
    if type_num not in (cnp.NPY_FLOAT, cnp.NPY_DOUBLE, cnp.NPY_FLOAT16) and type_num != bfloat16_number:
        return False
    if cnp.PyArray_TYPE(key) != type_num or cnp.PyArray_TYPE(value) != type_num:
        return False
    if not (cnp.PyArray_ISCARRAY_RO(query) and cnp.PyArray_ISBEHAVED_RO(key) and cnp.PyArray_ISBEHAVED_RO(value)):
        return False
    for axis in range(n):
        if cnp.PyArray_DIM(query, axis) == 0 or cnp.PyArray_DIM(value, axis) == 0:
            return False
    for axis in range(n - 1):
        if cnp.PyArray_DIM(key, axis) != cnp.PyArray_DIM(value, axis):
            return False
    if cnp.PyArray_DIM(query, n - 1) != cnp.PyArray_DIM(key, n - 1):
        return False
    if n == 4 and cnp.PyArray_DIM(query, 0) != cnp.PyArray_DIM(key, 0):
        return False
    return n == 2 or cnp.PyArray_DIM(query, n - 3) % cnp.PyArray_DIM(key, n - 3) == 0


# Below this many multiply-adds a call runs on the caller's thread: waking the others costs more than they save.
cdef int64_t SMALL = 1 << 20


cdef bint few_products(double batches, double heads, double q_len, double kv_len, double features) noexcept:
    return batches * heads * q_len * kv_len * features < SMALL  # as doubles: the product may not fit into 64 bits


def is_small(batches, heads, q_len, kv_len, dim, value_dim):
    return few_products(batches, heads, q_len, kv_len, dim + value_dim)


def attend_plain(Kernel kernel not None, query, key, value, bint causal, threads_of):
    """The whole of `attention` for arrays that need no normalising and no option but `causal`: None where that is
    not so.  Nothing is checked here that _problem.py does not check too; this exists because a small call takes
    less time than the checks in Python."""
    cdef sdpa_problem p
    cdef cnp.ndarray out
    cdef cnp.npy_intp shape[4]
    cdef int n, axis, threads = 1
    cdef int64_t end_shift
    if type(query) is not cnp.ndarray or type(key) is not cnp.ndarray or type(value) is not cnp.ndarray:
        return None
    if not is_plain(query, key, value):
        return None
    memset(&p, 0, sizeof(p))
    n = cnp.PyArray_NDIM(query)
    set_sizes(&p, query, key)
    p.value_dim = cnp.PyArray_DIM(value, n - 1)
    for axis in range(n - 1):
        shape[axis] = cnp.PyArray_DIM(query, axis)
    shape[n - 1] = p.value_dim
    out = cnp.PyArray_EMPTY(n, shape, cnp.PyArray_TYPE(query), 0)
    p.query = array_of(query)
    p.key = array_of(key)
    p.value = array_of(value)
    p.out = array_of(out)
    if causal:
        end_shift = p.kv_len - p.q_len + 1
        p.end_shift = &end_shift
    p.scale = 1 / sqrt(<double>p.dim)
    if not few_products(p.batches, p.heads, p.q_len, p.kv_len, p.dim + p.value_dim):
        threads = threads_of(None)
    run(&p, kernel.table(&p), threads)
    return out
