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

cdef void attend_blocks(
    const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t, sdpa_step accumulate
) noexcept nogil:
    """softmax(Q K^T) V for the rows of one task, without the division by the sum."""
    cdef int64_t key = t.keys.begin // p.block_keys * p.block_keys
    kernel.begin(p, t)
    while key < t.keys.end:
        if sdpa_enter_block(p, kernel, key, t):
            kernel.scores(p, t)
            kernel.softmax_step(p, t)
            accumulate(p, t)
        key += p.block_keys


cdef void write_weights(const sdpa_problem *p, const sdpa_kernel *kernel, sdpa_task *t) noexcept nogil:
    """The probabilities themselves: the scores once more, now that the sums over all keys are known."""
    cdef int64_t key = t.keys.begin // p.block_keys * p.block_keys
    while key < t.keys.end:
        if sdpa_enter_block(p, kernel, key, t):
            kernel.scores(p, t)
            kernel.write_weights(p, t)
        key += p.block_keys


cdef void run_task(const sdpa_problem *p, const sdpa_kernel *kernel, int64_t index, char *scratch) noexcept nogil:
    cdef sdpa_task t
    sdpa_lay_out_scratch(p, kernel, scratch, &t)
    sdpa_enter_task(p, kernel, index, &t)
    attend_blocks(p, kernel, &t, kernel.accumulate)
    # A hidden key weighs 0, but 0 * NaN is NaN: where NaN or inf came out and anything was hidden, again with care.
    if t.hidden and not kernel.finite(p, &t):
        attend_blocks(p, kernel, &t, kernel.accumulate_seen)
    kernel.close_sums(p, &t)
    if p.weights.data != NULL:
        write_weights(p, kernel, &t)
    else:
        kernel.write_out(p, &t)


cdef int64_t cut_into_tasks(sdpa_problem *p, const sdpa_kernel *kernel, int *threads, int *chunk) noexcept:
    """The number of tasks; no more threads than that; and how many tasks a thread takes at once: those of one head, so
    that it finds K and V in its own cache, but few enough that the last one to finish is not waited for."""
    cdef int64_t tasks
    if p.batches == 0 or p.heads == 0 or p.q_len == 0:
        threads[0] = chunk[0] = 1
        return 0
    p.block_keys = kernel.block_keys
    p.tasks_per_head = sdpa_tasks_per_head(p, kernel, threads[0])
    tasks = p.batches * p.kv_heads * p.tasks_per_head
    threads[0] = <int>min(<int64_t>threads[0], tasks)
    chunk[0] = <int>max(1, min(p.tasks_per_head, tasks // (16 * threads[0])))
    return tasks


cdef int run(sdpa_problem *p, const sdpa_kernel *kernel, int threads) except -1:
    """All tasks, on `threads` threads.  The scratch of a thread does not depend on the number of keys."""
    cdef sdpa_task sizes
    cdef int chunk
    cdef int64_t task, tasks = cut_into_tasks(p, kernel, &threads, &chunk)
    cdef size_t bytes_each = sdpa_lay_out_scratch(p, kernel, NULL, &sizes)
    cdef char *memory = <char *>PyMem_RawMalloc(threads * bytes_each + 64)
    cdef char *scratch = <char *>((<uintptr_t>memory + 63) & ~<uintptr_t>63)
    if memory == NULL:
        raise MemoryError(f"{threads * bytes_each} bytes of scratch for {threads} threads")
    with nogil:
        if threads == 1:
            for task in range(tasks):
                run_task(p, kernel, task, scratch)
        else:
            for task in prange(tasks, schedule="dynamic", chunksize=chunk, num_threads=threads):
                run_task(p, kernel, task, scratch + threadid() * bytes_each)
    PyMem_RawFree(memory)
    return 0


# ------------------------------------------------------------------------------------------------------ the kernels

cdef class Kernel:
    """The arithmetic for one instruction set: for float32 and float64, each for many rows and for few."""
    cdef const sdpa_isa *isa

    def __init__(self):
        raise TypeError("kernels() lists the kernels there are")

    @property
    def name(self):
        return self.isa.name.decode()

    cdef const sdpa_kernel *table(self, const sdpa_problem *p) noexcept:
        cdef const sdpa_kernel *const *engines = self.isa.kernel[1 if p.query.dtype == SDPA_FLOAT64 else 0]
        cdef int64_t rows = p.q_len * (p.heads // p.kv_heads) if p.kv_heads else 0
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
    return SDPA_FLOAT64 if type_num == cnp.NPY_DOUBLE else SDPA_FLOAT32


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
    Kernel kernel not None, dtype, int64_t batches, int64_t heads, int64_t kv_heads, int64_t q_len, int64_t kv_len,
    int64_t dim, int64_t value_dim, bint bounded, int threads,
):
    """How a problem of these sizes would be cut: (whether few rows, lanes, most rows and rows of a task, keys of a
    block, tasks, threads, bytes of scratch)."""
    cdef sdpa_problem p
    cdef sdpa_task sizes
    cdef int chunk
    cdef const sdpa_kernel *table
    memset(&p, 0, sizeof(p))
    p.query.dtype = code_of(dtype.num)
    p.batches, p.heads, p.kv_heads, p.q_len, p.kv_len, p.dim, p.value_dim = (
        batches, heads, kv_heads, q_len, kv_len, dim, value_dim)
    p.begin_shift = &p.q_len if bounded else NULL  # what it holds is not looked at
    table = kernel.table(&p)
    tasks = cut_into_tasks(&p, table, &threads, &chunk)
    all_rows = q_len * (heads // max(kv_heads, 1))
    vectors = (all_rows + table.lanes - 1) // table.lanes
    per_task = (vectors + p.tasks_per_head - 1) // p.tasks_per_head if tasks else 0
    rows = min(all_rows, per_task * table.lanes)
    few = table == kernel.isa.kernel[0][1] or table == kernel.isa.kernel[1][1]
    return (few, table.lanes, table.rows, rows, table.block_keys, tasks, threads,
            threads * sdpa_lay_out_scratch(&p, table, NULL, &sizes))


cdef bint is_plain(cnp.ndarray query, cnp.ndarray key, cnp.ndarray value) noexcept:
    """Equal ranks of 2 to 4, one native dtype of ours, sizes that fit without broadcasting, query in C order."""
    cdef int n = cnp.PyArray_NDIM(query), axis
    cdef int type_num = cnp.PyArray_TYPE(query)
    if n < 2 or n > 4 or cnp.PyArray_NDIM(key) != n or cnp.PyArray_NDIM(value) != n:
        return False
    if type_num != cnp.NPY_FLOAT and type_num != cnp.NPY_DOUBLE:
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
