# Rotary embedding (csrc/layer/rotary.c).  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t


cdef void add_axis(sdpa_axes *axes, int64_t size, ptrdiff_t x, ptrdiff_t out, ptrdiff_t positions) noexcept:
    cdef int last = axes.count - 1
    axes.total *= size
    if (last >= 0 and axes.x[last] == size * x and axes.out[last] == size * out
            and axes.positions[last] == size * positions):  # one axis with that before
        axes.size[last] *= size
        axes.x[last], axes.out[last], axes.positions[last] = x, out, positions
        return
    axes.size[axes.count], axes.positions[axes.count] = size, positions
    axes.x[axes.count], axes.out[axes.count] = x, out
    axes.count += 1


cdef void share_axes(sdpa_rotary *r, cnp.ndarray x, cnp.ndarray out, cnp.ndarray positions, int given) noexcept:
    """The axes before the rows: those along which positions, or tables in their place, differ, and the others.  Without
    an axis of pairs they have `given` axes: none of heads where these are two less than those of x, and none but that
    of rows where it is one."""
    cdef int n = cnp.PyArray_NDIM(x), axis
    cdef ptrdiff_t step
    r.own.count = r.shared.count = 0
    r.own.total = r.shared.total = 1
    for axis in range(n - 2):
        step = 0
        if (given == n - 1 or given == n - 2 and axis < n - 3) and cnp.PyArray_DIM(positions, axis) > 1:
            step = cnp.PyArray_STRIDE(positions, axis) // cnp.PyArray_ITEMSIZE(positions)
        if cnp.PyArray_DIM(x, axis) > 1:
            add_axis(&r.own if step else &r.shared, cnp.PyArray_DIM(x, axis), cnp.PyArray_STRIDE(x, axis),
                     cnp.PyArray_STRIDE(out, axis), step)
    r.heads_inside = r.shared.count and abs(r.shared.x[r.shared.count - 1]) < abs(r.x_row)


# A task turns up to so many rows of each head; their cosines and sines stay in the second-level cache.  Measured with
# (1, 32, 4096, 128) in float32: 32 rows 4.2 ms, 128 rows 3.6 ms, as memory is read in longer runs.
cdef int64_t ROTARY_ROWS = 128, ROTARY_TABLE = 64 << 10  # bytes
# Computing cosine and sine of an angle takes as long as turning some pairs by it, hence not fewer heads for a task.
cdef int64_t ROTARY_HEADS = 16
# A task has no more elements, 10 ms: between tasks a call can be stopped.
cdef int64_t ROTARY_AT_ONCE = 1 << 24
# Below this many elements a call runs on the caller's thread.  Measured: 12,288 take 5.2 µs on one and 4.4 on two.
cdef int64_t ROTARY_SMALL = 1 << 14
cdef double ROTARY_OF_US = 3_000


cdef int64_t cut_rotary(sdpa_rotary *r, int real_bytes, int threads) noexcept:
    """The number of tasks."""
    cdef int64_t row_bytes = max(1, 2 * r.pairs * real_bytes), wanted = 1 if threads == 1 else 4 * threads
    cdef int64_t most = min(ROTARY_ROWS, max(1, ROTARY_TABLE // row_bytes))
    r.task_rows = min(most, max(1, r.rows * r.own.total // wanted))
    r.blocks = (r.rows + r.task_rows - 1) // r.task_rows
    r.parts = max(1, min((r.shared.total + ROTARY_HEADS - 1) // ROTARY_HEADS, wanted // (r.own.total * r.blocks)))
    r.parts = max(r.parts, r.shared.total // max(1, ROTARY_AT_ONCE // (r.task_rows * max(1, r.dim))))
    return r.own.total * r.blocks * r.parts


def rotate(
    cnp.ndarray x not None, cnp.ndarray out, cnp.ndarray positions, double first_position,
    cnp.ndarray frequency not None, double largest_frequency, bint interleaved, threads,
):
    """Checked arguments in, but for `threads`; `out` filled, which may be `x`, or a new array.  `positions`, if any,
    and `frequency` are double, in C order; positions with as many axes as x have an axis of pairs."""
    cdef sdpa_rotary r
    cdef int axes = 0 if positions is None else cnp.PyArray_NDIM(positions)
    r.cosine = r.sine = r.positions = NULL
    if positions is not None:
        r.positions = <const double *>cnp.PyArray_DATA(positions)
    r.each_pair = axes == cnp.PyArray_NDIM(x)
    r.first_position = first_position
    r.frequency, r.pairs = <const double *>cnp.PyArray_DATA(frequency), cnp.PyArray_DIM(frequency, 0)
    r.largest_frequency = largest_frequency
    return rotated(&r, x, out, positions, axes - r.each_pair, interleaved, threads)


def rotate_by_tables(
    cnp.ndarray x not None, cnp.ndarray out, cnp.ndarray cosine not None, cnp.ndarray sine not None, bint interleaved,
    threads,
):
    """The same with factors in place of positions: two arrays of one shape, in C order and of the dtype that x is
    computed in, with an axis of pairs."""
    cdef sdpa_rotary r
    cdef int axes = cnp.PyArray_NDIM(cosine)
    r.cosine, r.sine = cnp.PyArray_DATA(cosine), cnp.PyArray_DATA(sine)
    r.pairs = cnp.PyArray_DIM(cosine, axes - 1)
    return rotated(&r, x, out, cosine, axes - 1, interleaved, threads)


cdef object rotated(
    sdpa_rotary *r, cnp.ndarray x, cnp.ndarray out, cnp.ndarray positions, int axes, bint interleaved, threads,
):
    """`r` says how; `positions`, which may be tables, are for `share_axes`."""
    cdef int n = cnp.PyArray_NDIM(x), real_bytes, count = 1
    cdef crew c
    cdef int64_t tasks
    if threads is not None or not rotates_alone(x):
        count = threads_of(threads)
    if out is None:
        out = PyArray_NewLikeArray(x, cnp.NPY_KEEPORDER, NULL, 0)
    if cnp.PyArray_SIZE(x) == 0:
        return out
    r.x, r.out = cnp.PyArray_BYTES(x), cnp.PyArray_BYTES(out)
    r.x_row, r.x_column = cnp.PyArray_STRIDE(x, n - 2), cnp.PyArray_STRIDE(x, n - 1)
    r.out_row, r.out_column = cnp.PyArray_STRIDE(out, n - 2), cnp.PyArray_STRIDE(out, n - 1)
    r.dtype, r.itemsize = code_of(cnp.PyArray_TYPE(x)), <int>cnp.PyArray_ITEMSIZE(x)
    r.interleaved, r.in_place = interleaved, r.x == r.out
    r.rows, r.dim = cnp.PyArray_DIM(x, n - 2), cnp.PyArray_DIM(x, n - 1)
    share_axes(r, x, out, positions, axes)
    real_bytes = 8 if r.dtype == SDPA_FLOAT64 else 4
    tasks = cut_rotary(r, real_bytes, count)
    hire(&c, count, cnp.PyArray_SIZE(x) / ROTARY_OF_US, 2 * r.task_rows * r.pairs * real_bytes, 0)
    with nogil:
        share(&c, rotate_task, r, tasks, BY_CHUNKS, 1, 8 * cnp.PyArray_SIZE(x) // tasks)
    dismiss(&c)
    return out


cdef void rotate_task(const void *of, int64_t task, char *scratch) noexcept nogil:
    cdef const sdpa_rotary *r = <const sdpa_rotary *>of
    if r.dtype == SDPA_FLOAT64:
        sdpa_rotate_8(r, task, scratch)
    else:
        sdpa_rotate_4(r, task, scratch)


cpdef bint rotates_alone(cnp.ndarray x) noexcept:
    """Whether one thread is to rotate x, for being small."""
    return cnp.PyArray_SIZE(x) < ROTARY_SMALL


def takes_rotated(cnp.ndarray out not None, cnp.ndarray x not None, cnp.ndarray positions):
    """Whether `out` is x, or like x and apart from it: where all is in C order, a quicker yes than that of
    _checks.py."""
    cdef int axis
    if not cnp.PyArray_ISCARRAY(out) or not cnp.PyArray_IS_C_CONTIGUOUS(x):
        return False
    if positions is not None and not (cnp.PyArray_IS_C_CONTIGUOUS(positions) and are_apart(out, positions)):
        return False
    if out is x:
        return True
    if cnp.PyArray_TYPE(out) != cnp.PyArray_TYPE(x) or cnp.PyArray_NDIM(out) != cnp.PyArray_NDIM(x):
        return False
    for axis in range(cnp.PyArray_NDIM(x)):
        if cnp.PyArray_DIM(out, axis) != cnp.PyArray_DIM(x, axis):
            return False
    return are_apart(out, x)


def all_below(cnp.ndarray numbers not None, double limit):
    """Whether all are in (-limit, limit); NaN is not.  `numbers` are double, in C order."""
    cdef const double *number = <const double *>cnp.PyArray_DATA(numbers)
    cdef int64_t i
    for i in range(cnp.PyArray_SIZE(numbers)):
        if not -limit < number[i] < limit:
            return False
    return True
