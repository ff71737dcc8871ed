# Single arguments: a quick answer for what is as the kernels take it, that of _checks.py for the rest.  Part of
# _core.pyx.
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.stdlib cimport getenv
from libc.string cimport strncmp, strncpy

cdef object count_threads = None  # of _runtime/threads.py, which imports this module
# What it last said of a call that asks for no number of threads, which takes 3 us to find out; for how long that holds,
# as the affinity may change; and what the variables were that it depends on.
cdef int usual_threads = 0
cdef int64_t USUAL_NS = 10_000_000, usual_until = 0
cdef enum: VALUE = 16  # of a longer one the end is missing: it never equals what it was
cdef char usual_own[VALUE]
cdef char usual_shared[VALUE]

cdef int64_t LONGEST = <int64_t>1 << 40  # size of a key or a value: sizes of scratch must not overflow


cdef bint holds_our_floats(cnp.ndarray array) noexcept:
    """Whether its dtype is one that can be computed with, and is known already."""
    cdef int type_num = cnp.PyArray_TYPE(array)
    if type_num == cnp.NPY_FLOAT or type_num == cnp.NPY_DOUBLE or type_num == cnp.NPY_FLOAT16:
        return cnp.PyArray_ISNOTSWAPPED(array)
    return type_num == bfloat16_number


cdef int threads_of(given, bint as_others=False) except -1:
    """`as_others`: so many threads has another library in its teams."""
    global count_threads, least_in_team, most_in_team
    if count_threads is None:
        from ._runtime.threads import count as count_threads
    most_in_team = ask_usual_threads() if given is None else count_threads(given)
    least_in_team = most_in_team if as_others else 1
    return most_in_team


cdef int ask_usual_threads() except -1:
    """count_threads(None)"""
    global usual_threads, usual_until
    cdef int64_t now = <int64_t>monotonic_ns()
    cdef bint own = is_unchanged(b"SDPA_NUM_THREADS", usual_own)
    cdef bint shared = is_unchanged(b"OMP_NUM_THREADS", usual_shared)
    if not own or not shared or now >= usual_until or is_rehearsed():
        usual_until = 0
        usual_threads = count_threads(None)
        usual_until = 0 if in_child else now + USUAL_NS  # in a child threads differ in their number
    return usual_threads


cdef bint is_unchanged(const char *name, char *before) noexcept:
    """Whether the variable still is what it was, which it is from now on."""
    cdef const char *value = getenv(name)
    if value == NULL:
        value = b""
    if strncmp(value, before, VALUE) == 0:
        return True
    strncpy(before, value, VALUE - 1)
    return False


cdef int threads_if_worth(given, bint small) except -1:
    """`threads_of`; but small work is done by one thread whatever is given, which is checked."""
    cdef int count = 1 if given is None and small else threads_of(given)
    return 1 if small else count


cdef cnp.ndarray floats(str name, given, int fewest_axes=2):
    if (type(given) is cnp.ndarray and holds_our_floats(given)
            and fewest_axes <= cnp.PyArray_NDIM(given) <= MOST_LEADING + 3):
        return given
    return _checks.float_array(name, given, fewest_axes)


def float_array(str name, given, int fewest_axes=2):
    """`given` as an array that can be computed with."""
    return floats(name, given, fewest_axes)


cdef object as_given(cnp.ndarray grad, cnp.ndarray given, bint unrounded):
    """The gradient of `given`, from that of what it was broadcast to, in its dtype unless `unrounded`."""
    cdef int axis
    cdef bint alike = unrounded or cnp.PyArray_TYPE(grad) == cnp.PyArray_TYPE(given)
    alike = alike and cnp.PyArray_NDIM(grad) == cnp.PyArray_NDIM(given)
    if alike:
        for axis in range(cnp.PyArray_NDIM(given)):
            alike = alike and cnp.PyArray_DIM(grad, axis) == cnp.PyArray_DIM(given, axis)
    return grad if alike else gradients.summed(grad, given, grad.dtype if unrounded else given.dtype)


cdef cnp.ndarray packed_rows(str name, given):
    cdef cnp.ndarray array = floats(name, given)
    return array if cnp.PyArray_NDIM(array) == 3 else _checks.packed_rows(name, array)


cdef int sum_type(cnp.ndarray query) noexcept:
    """Of sums, softmax and lse: no narrower than float32."""
    return cnp.NPY_DOUBLE if cnp.PyArray_TYPE(query) == cnp.NPY_DOUBLE else cnp.NPY_FLOAT


cdef tuple shape_of(cnp.ndarray array):
    return (<object>array).shape


cdef cnp.npy_intp size_at(cnp.ndarray array, int from_end) noexcept:
    """1: of the last axis.  An axis that is not there has size 1."""
    cdef int axis = cnp.PyArray_NDIM(array) - from_end
    return cnp.PyArray_DIM(array, axis) if axis >= 0 else 1


cdef ptrdiff_t step_of(cnp.ndarray array, int axis, cnp.npy_intp size, bint *fits) noexcept:
    """The stride along an axis that is to have `size`; 0 where there is no such axis, or it is repeated."""
    if axis < 0 or cnp.PyArray_DIM(array, axis) == 1:
        return 0
    if cnp.PyArray_DIM(array, axis) != size:
        fits[0] = False
    return cnp.PyArray_STRIDE(array, axis)


cdef double number(str name, given) except? -1:
    cdef double x
    cdef int64_t whole
    if type(given) is float:
        x = given
        if isfinite(x):
            return x
    if is_near(given, &whole):
        return whole
    return _checks.number(name, given)


cdef bint is_near(given, int64_t *number) noexcept:
    """Whether it is an int, and far from what 64 bits hold; then also `number`."""
    cdef int overflow
    if type(given) is not int:
        return False
    number[0] = PyLong_AsLongLongAndOverflow(given, &overflow)
    return not overflow and -FAR < number[0] < FAR


cdef object window_sides(window):
    if type(window) is tuple and len(window) == 2:
        left, right = window
        if (left is None or type(left) is int) and (right is None or type(right) is int):
            return window
    return _checks.sides(window)


cdef int64_t shift_within(int64_t limit, int64_t offset, number) except? -1:
    """offset + number, no farther than the limit, exact whatever their size."""
    cdef int64_t near
    if -FAR < offset < FAR and is_near(number, &near):
        return max(-limit, min(limit, offset + near))
    exact = <object>offset + number
    return max(-limit, min(limit, exact))


cpdef cnp.ndarray checked_out(given, tuple shape, cnp.ndarray like, dict inputs, bint wider=True):
    """`given`, if it can take a result of that shape and of the dtype of `like`, or a wider one, without touching the
    inputs, which are arrays or None."""
    cdef bint apart = (
        type(given) is cnp.ndarray and cnp.PyArray_ISCARRAY(given) and shape_of(given) == shape
        and cnp.PyArray_TYPE(given) == cnp.PyArray_TYPE(like)
    )
    for array in inputs.values():
        apart = apart and (array is None or are_apart(given, array))
    if not apart:
        _checks.check_out(given, shape, like.dtype, inputs, wider)
    return given


cdef bint are_apart(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether no byte from the first to the last of one lies among those of the other."""
    cdef char *first[2]
    cdef char *end[2]
    reach(a, &first[0], &end[0])
    reach(b, &first[1], &end[1])
    return end[0] <= first[1] or end[1] <= first[0]


cdef void reach(cnp.ndarray array, char **first, char **end) noexcept:
    cdef int axis
    cdef ptrdiff_t last
    first[0] = end[0] = cnp.PyArray_BYTES(array)
    if cnp.PyArray_SIZE(array) == 0:
        return
    end[0] += cnp.PyArray_ITEMSIZE(array)
    for axis in range(cnp.PyArray_NDIM(array)):
        last = (cnp.PyArray_DIM(array, axis) - 1) * cnp.PyArray_STRIDE(array, axis)
        if last < 0:
            first[0] += last
        else:
            end[0] += last
