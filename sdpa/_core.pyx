# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The algorithm of attention, over the kernels of csrc/.

A task is up to 64 query rows of one key/value head.  It walks over the blocks of keys that any of its rows may see and
keeps, per row, the largest score so far, the sum of the weights and the weighted sum of the values (the online softmax
of Milakov and Gimelshein; FlashAttention).  Tasks are shared among threads; nothing here knows an instruction set, and
nothing in csrc/ knows of threads or Python.  Arguments have been checked by _problem.py.
"""
cimport cython
cimport numpy as cnp
import numpy as np
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cython.parallel cimport prange, threadid
from libc.math cimport sqrt
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy, memset

cnp.import_array()

include "_core_units.pxi"


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


cdef sdpa_array with_batches(cnp.ndarray array, list tables):
    """The same, of any number of axes before the last three: together they are the batches.  Where no one stride leads
    from each batch to the next, a table does, which `tables` keeps."""
    cdef sdpa_array a = array_of(array)
    cdef int axis = cnp.PyArray_NDIM(array) - 3
    cdef int64_t batches = 1, size
    cdef ptrdiff_t stride
    while axis > 0:
        axis -= 1
        size, stride = cnp.PyArray_DIM(array, axis), cnp.PyArray_STRIDE(array, axis)
        if size == 1:  # its stride is never taken
            continue
        if batches == 1:
            a.batch = stride
        elif stride != batches * a.batch:
            a.batches = find_batches(array, tables)
            break
        batches *= size
    return a


cdef const ptrdiff_t *find_batches(cnp.ndarray array, list tables) except? NULL:
    """Where each batch begins, in bytes."""
    cdef int axis = cnp.PyArray_NDIM(array) - 3
    cdef int64_t batches = count_batches(array), count = 1, size, i, j
    cdef ptrdiff_t stride
    memory = np.zeros(max(1, batches), np.intp)
    cdef Py_ssize_t[::1] table = memory
    tables.append(memory)
    while axis > 0:
        axis -= 1
        size, stride = cnp.PyArray_DIM(array, axis), cnp.PyArray_STRIDE(array, axis)
        for i in range(1, size):
            for j in range(count):
                table[i * count + j] = i * stride + table[j]
        count *= size
    return <const ptrdiff_t *>&table[0]


cdef int64_t count_batches(cnp.ndarray array) noexcept:
    """The product of all axes but the last three."""
    cdef int64_t batches = 1
    cdef int axis
    for axis in range(cnp.PyArray_NDIM(array) - 3):
        batches *= cnp.PyArray_DIM(array, axis)
    return batches


cdef void set_sizes(sdpa_problem *p, cnp.ndarray query, cnp.ndarray key) noexcept:
    cdef int n = cnp.PyArray_NDIM(query)
    p.batches = count_batches(query)
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
    cnp.ndarray key_scale=None, cnp.ndarray value_scale=None, int group=0,
    const int64_t[::1] q_starts=None, const int64_t[::1] k_starts=None, const int64_t[:, ::1] pages=None,
    int64_t page_size=0, const double[:, ::1] v=None,
):
    """Checked arguments in, `out` (or `weights`) and `lse` filled.  Arrays are (B, H, ...), lse (B, H, M, 1); None:
    absent.  B stands for one axis or more, the same in all of them.

    key_scale, value_scale : (B, G, N, groups) float32, adjacent, where key and value are int8; `group` a power of 2,
        32 or more.
    q_starts : (S + 1).  Then query, out, mask, bias, lse are (1, H, T, ...), sequence after sequence; every other array
    of numbers has S, and kv_lengths, q_offset are given.  With k_starts (S) key and value are (1, G, T, ...), too; with
    `pages` (S, columns) key and value are pools (pages, G, page_size, ...).
    v : (H, A), numbers of (-2, 2). Then scores are additive, and query and key projections to A features.
    """
    cdef sdpa_problem p
    cdef int64_t[::1] unit_starts
    cdef list tables = []
    take_arguments(&p, tables, query, key, value, out, weights, lse, mask, bias, begin_shift, end_shift, q_offset,
                   kv_lengths, scale, softcap, alibi_slopes, q_starts, k_starts)
    if sinks is not None:
        p.sinks = &sinks[0, 0]
    if v is not None:
        p.v = &v[0, 0]
    if key_scale is not None:
        set_scales(&p, with_batches(key_scale, tables), with_batches(value_scale, tables), group)
    if pages is not None:
        p.pages, p.page_columns, p.page_size = &pages[0, 0], pages.shape[1], page_size
    if q_starts is not None:
        unit_starts = np.empty(q_starts.shape[0], np.int64)
        p.unit_starts = &unit_starts[0]
    run_all(&p, kernel, threads)


cdef sdpa_array array_if(cnp.ndarray array, list tables):
    cdef sdpa_array absent
    memset(&absent, 0, sizeof(absent))
    return absent if array is None else with_batches(array, tables)


cdef int take_arguments(
    sdpa_problem *p, list tables, cnp.ndarray query, cnp.ndarray key, cnp.ndarray value, cnp.ndarray out,
    cnp.ndarray weights, cnp.ndarray lse, cnp.ndarray mask, cnp.ndarray bias,
    const int64_t[::1] begin_shift, const int64_t[::1] end_shift,
    const int64_t[::1] q_offset, const int64_t[::1] kv_lengths, double scale, double softcap,
    const double[:, ::1] alibi_slopes, const int64_t[::1] q_starts, const int64_t[::1] k_starts,
) except -1:
    """What results and gradients have in common; see `attend`.  `tables` must live as long as `p`."""
    memset(p, 0, sizeof(p[0]))
    set_sizes(p, query, key)
    p.query, p.key, p.value = with_batches(query, tables), with_batches(key, tables), array_if(value, tables)
    p.value_dim = 0 if value is None else cnp.PyArray_DIM(value, cnp.PyArray_NDIM(value) - 1)
    p.out, p.weights, p.lse = array_if(out, tables), array_if(weights, tables), array_if(lse, tables)
    p.mask, p.bias = array_if(mask, tables), array_if(bias, tables)
    p.shift_step = 1
    if begin_shift is not None:
        p.begin_shift = &begin_shift[0]
    if end_shift is not None:
        p.end_shift = &end_shift[0]
    if q_offset is not None:
        p.q_offset = &q_offset[0]
    if kv_lengths is not None:
        p.kv_lengths = &kv_lengths[0]
    if alibi_slopes is not None:
        p.alibi_slopes = &alibi_slopes[0, 0]
    p.scale, p.softcap = scale, softcap
    if q_starts is not None:
        set_sequences(p, q_starts, kv_lengths)
    if k_starts is not None:
        p.k_starts = &k_starts[0]


cdef void set_scales(sdpa_problem *p, sdpa_array key_scale, sdpa_array value_scale, int group) noexcept:
    p.key_scale, p.value_scale = key_scale, value_scale
    while 1 << p.group_shift < group:
        p.group_shift += 1


cdef void set_sequences(sdpa_problem *p, const int64_t[::1] q_starts, const int64_t[::1] kv_lengths) noexcept:
    cdef int64_t b
    p.q_starts = &q_starts[0]
    p.batches = q_starts.shape[0] - 1
    p.q_len = p.kv_len = 0
    for b in range(p.batches):
        p.q_len = max(p.q_len, q_starts[b + 1] - q_starts[b])
        p.kv_len = max(p.kv_len, kv_lengths[b])


def plan(
    Kernel kernel not None, cnp.ndarray query not None, cnp.ndarray key not None, cnp.ndarray value not None, *,
    double scale, bint bounded, int threads,
):
    """How a problem would be cut: (whether few rows, pairs, and conversion of K or V; lanes, most rows and rows of a
    task, keys of a block, tasks, tasks of a bundle, parts of the keys and whether threads share them, threads, bytes of
    scratch).  The arrays have at least four axes, of
    which the last three count."""
    cdef sdpa_problem p
    cdef int chunk
    cdef int64_t units, all_rows, vectors, per_task
    cdef const sdpa_kernel *table
    cdef sdpa_cut cut
    memset(&p, 0, sizeof(p))
    set_sizes(&p, query, key)
    p.scale = scale
    p.query, p.key, p.value = array_of(query), array_of(key), array_of(value)
    p.value_dim = cnp.PyArray_DIM(value, cnp.PyArray_NDIM(value) - 1)
    p.begin_shift = &p.q_len if bounded else NULL  # what it holds is not looked at
    table = kernel.table(&p)
    all_rows = most_rows(&p)
    p.most_rows = all_rows
    units = cut_into_units(&p, table, &threads, &chunk)
    if units:
        cut = sdpa_find_unit(&p, table, 0).cut
    else:
        cut.tasks = cut.bundles = cut.parts = 1
    vectors = (all_rows + table.lanes - 1) // table.lanes
    per_task = (vectors + cut.tasks - 1) // cut.tasks
    tasks = p.batches * p.kv_heads * cut.tasks if units else 0
    pairs = table != kernel.isa.kernel[SDPA_FOR_FLOAT][0] and purpose_of(&p) == SDPA_FOR_BFLOAT16
    few = table == kernel.isa.kernel[purpose_of(&p)][1]
    return (few, pairs and not few, table.copies(&p), table.lanes, table.rows, min(all_rows, per_task * table.lanes),
            table.block_keys, tasks, sdpa_largest_bundle(&p, table), cut.parts, p.split, threads,
            threads * scratch_bytes(&p, table) + units * sums_bytes(&p, table))


# NumPy's number of the type bfloat16, once an array of it was seen: another package brings it (see _problem.py).
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


cdef bint is_plain(cnp.ndarray query, cnp.ndarray key, cnp.ndarray value, bint scaled) noexcept:
    """Equal ranks of 2 to 4, native dtypes of ours, sizes that fit without broadcasting, query in C order."""
    cdef int n = cnp.PyArray_NDIM(query), axis
    cdef int type_num = cnp.PyArray_TYPE(query)
    if n < 2 or n > 4 or cnp.PyArray_NDIM(key) != n or cnp.PyArray_NDIM(value) != n:
        return False
    if cnp.PyArray_TYPE(key) != cnp.PyArray_TYPE(value) or not may_meet(type_num, cnp.PyArray_TYPE(key), scaled):
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
    `scales` (see csrc/quantise.c).  False, and these are unfinished, where it met NaN or inf."""
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


def attend_plain(
    Kernel kernel not None, query, key, value, bint causal, threads_of,
    cnp.ndarray key_scale=None, cnp.ndarray value_scale=None, int group=0,
):
    """The whole of `attention` for arrays that need no normalising and no option but `causal`: None where that is
    not so.  Nothing is checked here that _problem.py does not check too; this exists because a small call takes
    less time than the checks in Python.  Scales are given with int8 (see `attend`), of as many axes."""
    cdef sdpa_problem p
    cdef cnp.ndarray out
    cdef cnp.npy_intp shape[4]
    cdef int n, axis, threads = 1
    cdef int64_t end_shift
    if type(query) is not cnp.ndarray or type(key) is not cnp.ndarray or type(value) is not cnp.ndarray:
        return None
    if not is_plain(query, key, value, key_scale is not None):
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
    if key_scale is not None:
        set_scales(&p, array_of(key_scale), array_of(value_scale), group)
    if not few_products(p.batches, p.heads, p.q_len, p.kv_len, p.dim + p.value_dim):
        threads = threads_of(None)
    run_all(&p, kernel, threads)
    return out


include "_core_backward.pxi"
include "_core_linear.pxi"
include "_core_pool.pxi"
include "_core_pages.pxi"
include "_core_rotary.pxi"
include "_core_cache.pxi"
