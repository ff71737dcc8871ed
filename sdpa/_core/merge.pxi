# Partial results over disjoint keys, joined into one.  Part of _core.pyx.
#
# Of each row, with the sums in float32, or in float64 for float64:
#
#     lse = log(sum of exp(lse[p])),    out = sum of exp(lse[p] - lse) out[p]     over the parts p
cimport numpy as cnp
from libc.math cimport INFINITY, copysign, exp, isfinite, log
from libc.stdint cimport int64_t, uint16_t, uintptr_t
from libc.string cimport memcpy, memset

cdef extern from "simd/half.h" nogil:
    float float_of_bfloat16(uint16_t)
    float float_of_float16(uint16_t)
    uint16_t bfloat16_of_float(float)
    uint16_t float16_of_float(float)

cdef extern from "float.h":
    float FLT_MAX
    double DBL_MAX

# The type of sums.  Two are enough, and a function for each would be the same lines twice.
ctypedef fused real:
    float
    double

cdef struct merge_array:
    char *data
    ptrdiff_t steps[MOST_LEADING + 2]  # along the axes of rows
    ptrdiff_t column
    int dtype

cdef struct merge_call:
    int axes
    cnp.npy_intp shape[MOST_LEADING + 2]  # of the rows
    int64_t parts, rows, columns, unit_rows
    bint wide  # sums are float64
    merge_array out, lse
    merge_array *outs
    merge_array *lses

cdef enum: MERGE_COLUMNS = 512  # of a row at a time: their sums stay in the first-level cache
# A unit has so many multiply-adds, 30 µs.  Below MERGE_SMALL of them a call runs on the caller's thread.
cdef int64_t MERGE_AT_ONCE = 1 << 17, MERGE_SMALL = 1 << 19
cdef int64_t MERGE_ROW = 64  # multiply-adds that exponentials and logarithm of a row are worth


def merge(outs, lses, out):
    """(out, lse) of the parts; see merge of _attention/forward.py."""
    cdef list values = parts_of("outs", outs), sums = parts_of("lses", lses)
    cdef merge_call call
    cdef cnp.ndarray first, result, lse
    cdef int last
    check_parts(values, sums)
    first = values[0]
    result = PyArray_NewLikeArray(first, cnp.NPY_KEEPORDER, NULL, 0) if out is None else merged_out(out, values, sums)
    last = cnp.PyArray_NDIM(first) - 1
    lse = cnp.PyArray_EMPTY(last, cnp.PyArray_DIMS(first), sum_type(first), 0)
    call.axes, call.parts, call.columns = last, len(values), cnp.PyArray_DIM(first, last)
    call.wide = sum_type(first) == cnp.NPY_DOUBLE
    call.rows = cnp.PyArray_SIZE(lse)
    memcpy(call.shape, cnp.PyArray_DIMS(first), last * sizeof(cnp.npy_intp))
    call.out, call.lse = merge_array_of(result, last), merge_array_of(lse, last)
    run_merge(&call, values, sums, None)
    return result, lse if last else (<object>lse)[()]


def merge_into(cnp.ndarray out not None, cnp.ndarray lse not None, part, part_lse, threads):
    """Joins one more part to the sums `out` and `lse`, in place: a row is read before it is written."""
    cdef merge_call call
    cdef int last = cnp.PyArray_NDIM(out) - 1
    cdef list values = [out, floats("part", part, 0)], sums = [lse, floats("part_lse", part_lse, 0)]
    check_parts(values, sums)
    call.axes, call.parts, call.columns = last, 2, cnp.PyArray_DIM(out, last)
    call.wide = sum_type(out) == cnp.NPY_DOUBLE
    call.rows = cnp.PyArray_SIZE(lse)
    memcpy(call.shape, cnp.PyArray_DIMS(out), last * sizeof(cnp.npy_intp))
    call.out, call.lse = merge_array_of(out, last), merge_array_of(lse, last)
    run_merge(&call, values, sums, threads)


cdef list parts_of(str name, given):
    cdef list parts
    try:
        parts = list(given)
    except TypeError:
        raise TypeError(f"{name} is {given!r}: it must be a sequence of arrays, one for each part") from None
    return [floats(name, part, 0) for part in parts]


cdef int check_parts(list outs, list lses) except -1:
    cdef cnp.ndarray first, part
    cdef bint alike = True
    cdef int last
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}: they must be as many, and at least one")
    first = outs[0]
    last = cnp.PyArray_NDIM(first) - 1
    for part in outs:
        alike = alike and last >= 0 and cnp.PyArray_NDIM(part) == last + 1 and begins_alike(first, part, last + 1)
    for part in lses:
        alike = alike and cnp.PyArray_NDIM(part) == last and begins_alike(first, part, last)
    if not alike:
        raise ValueError(
            f"outs have shapes {[x.shape for x in outs]} and lses {[x.shape for x in lses]}: "
            f"all outs must be alike, and lses the same without the last axis"
        )
    return 0


cdef bint begins_alike(cnp.ndarray a, cnp.ndarray b, int axes) noexcept:
    """Whether the first axes of both have the same sizes."""
    cdef int axis
    for axis in range(axes):
        if cnp.PyArray_DIM(a, axis) != cnp.PyArray_DIM(b, axis):
            return False
    return True


cdef cnp.ndarray merged_out(given, list outs, list lses):
    inputs = {f"outs[{i}]": part for i, part in enumerate(outs)}
    return checked_out(given, outs[0].shape, outs[0], inputs | {f"lses[{i}]": part for i, part in enumerate(lses)})


cdef merge_array merge_array_of(cnp.ndarray array, int axes) except *:
    cdef merge_array a
    cdef int axis
    a.data, a.dtype = cnp.PyArray_BYTES(array), code_of(cnp.PyArray_TYPE(array))
    for axis in range(axes):
        a.steps[axis] = cnp.PyArray_STRIDE(array, axis)
    a.column = cnp.PyArray_STRIDE(array, axes) if cnp.PyArray_NDIM(array) > axes else 0
    return a


cdef int run_merge(merge_call *call, list outs, list lses, given) except -1:
    cdef crew c
    cdef int64_t part, row = call.parts * (call.columns + MERGE_ROW), units
    cdef int threads = 1 if call.rows * row < MERGE_SMALL else threads_of(given)
    # Weights and places of the parts, sums, numbers converted.
    cdef size_t scratch = call.parts * (sizeof(double) + sizeof(char *)) + 2 * MERGE_COLUMNS * sizeof(double)
    call.unit_rows = max(1, MERGE_AT_ONCE // row)
    units = (call.rows + call.unit_rows - 1) // call.unit_rows
    hire(&c, <int>max(1, min(<int64_t>threads, units)), LONG, scratch, 2 * call.parts * sizeof(merge_array))
    call.outs = <merge_array *>c.beside
    call.lses = call.outs + call.parts
    for part in range(call.parts):
        call.outs[part] = merge_array_of(outs[part], call.axes)
        call.lses[part] = merge_array_of(lses[part], call.axes)
    with nogil:
        share(&c, merge_unit, call, units, BY_CHUNKS, 1, call.unit_rows * row)
    return dismiss(&c)


cdef void merge_unit(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef const merge_call *call = <const merge_call *>of
    cdef int64_t row = unit * call.unit_rows, end = min(call.rows, row + call.unit_rows), rest = row
    cdef int64_t index[MOST_LEADING + 2]
    cdef int axis
    for axis in range(call.axes - 1, -1, -1):
        index[axis] = rest % call.shape[axis]
        rest = rest // call.shape[axis]
    for row in range(row, end):
        merge_row(call, index, scratch)
        axis = call.axes - 1
        while axis >= 0:  # on to the next row
            index[axis] += 1
            if index[axis] < call.shape[axis]:
                break
            index[axis] = 0
            axis -= 1


cdef inline char *row_of(const merge_array *array, const merge_call *call, const int64_t *index) noexcept nogil:
    cdef char *at = array.data
    cdef int axis
    for axis in range(call.axes):
        at += index[axis] * array.steps[axis]
    return at


cdef void merge_row(const merge_call *call, const int64_t *index, char *scratch) noexcept nogil:
    cdef double *weights = <double *>scratch
    cdef char **places = <char **>(weights + call.parts)  # NULL of a part that saw nothing
    cdef char *rest = <char *>(places + call.parts)
    cdef char *out = row_of(&call.out, call, index)
    cdef double high = -INFINITY, total = 0, lse
    cdef int64_t part, column = 0
    for part in range(call.parts):
        lse = read_number(row_of(&call.lses[part], call, index), call.lses[part].dtype)
        weights[part] = lse
        places[part] = NULL if lse == -INFINITY else row_of(&call.outs[part], call, index)
        if lse > high or lse != lse:  # a NaN stays
            high = lse
    if high == -INFINITY:
        high = 0
    for part in range(call.parts):
        weights[part] = exp(weights[part] - high)
        total += weights[part]
    write_number(row_of(&call.lse, call, index), call.lse.dtype, high + log(total))
    for part in range(call.parts):
        weights[part] /= total
    while column < call.columns:
        if call.wide:
            merge_columns[double](call, column, weights, places, out, <double *>rest)
        else:
            merge_columns[float](call, column, weights, places, out, <float *>rest)
        column += MERGE_COLUMNS


cdef void merge_columns(
    const merge_call *call, int64_t column, const double *weights, char **places, char *out, real *sums
) noexcept nogil:
    """The weighted sums of up to MERGE_COLUMNS columns."""
    cdef int64_t part, i, count = min(<int64_t>MERGE_COLUMNS, call.columns - column)
    cdef real *converted = sums + MERGE_COLUMNS
    cdef const real *x
    cdef real weight
    cdef int odd = 0
    memset(sums, 0, count * sizeof(real))
    for part in range(call.parts):
        if places[part] != NULL:
            x = as_real(&call.outs[part], places[part] + column * call.outs[part].column, count, converted)
            weight = <real>weights[part]
            for i in range(count):
                sums[i] += x[i] * weight
    for i in range(count):
        odd |= sums[i] - sums[i] != 0
    if odd:
        for i in range(count):
            limit_sum(call, column + i, places, &sums[i])
    out += column * call.out.column
    if is_plain(&call.out, out, sums):
        memcpy(out, sums, count * sizeof(real))
    else:
        for i in range(count):
            write_number(out + i * call.out.column, call.out.dtype, sums[i])


cdef inline bint is_plain(const merge_array *array, const char *at, const real *like) noexcept nogil:
    """Whether its rows, as that from there on, are as the sums are."""
    cdef int own = SDPA_FLOAT32 if real is float else SDPA_FLOAT64
    return array.dtype == own and array.column == sizeof(real) and <uintptr_t>at % sizeof(real) == 0


cdef const real *as_real(const merge_array *array, const char *at, int64_t count, real *converted) noexcept nogil:
    """`count` numbers of a row, where they are or `converted`."""
    cdef int64_t i
    if is_plain(array, at, converted):
        return <const real *>at
    for i in range(count):
        converted[i] = <real>read_number(at + i * array.column, array.dtype)
    return converted


cdef void limit_sum(const merge_call *call, int64_t column, char **places, real *sum) noexcept nogil:
    """The largest number for what the rounding of the weights made larger than all parts."""
    cdef int64_t part
    if sum[0] != INFINITY and sum[0] != -INFINITY:
        return
    for part in range(call.parts):
        if places[part] != NULL and not isfinite(
                read_number(places[part] + column * call.outs[part].column, call.outs[part].dtype)):
            return
    sum[0] = <real>copysign(FLT_MAX if real is float else DBL_MAX, sum[0])


cdef inline double read_number(const char *at, int dtype) noexcept nogil:
    """Exactly, of any of our dtypes."""
    cdef uint16_t half
    cdef float single
    cdef double number
    if dtype == SDPA_FLOAT32:
        memcpy(&single, at, sizeof(single))
        return single
    if dtype == SDPA_FLOAT64:
        memcpy(&number, at, sizeof(number))
        return number
    memcpy(&half, at, sizeof(half))
    return float_of_bfloat16(half) if dtype == SDPA_BFLOAT16 else float_of_float16(half)


cdef inline void write_number(char *at, int dtype, double number) noexcept nogil:
    """Rounded to nearest; to a half type only what is a float."""
    cdef uint16_t half
    cdef float single = <float>number
    if dtype == SDPA_FLOAT32:
        memcpy(at, &single, sizeof(single))
    elif dtype == SDPA_FLOAT64:
        memcpy(at, &number, sizeof(number))
    else:
        half = bfloat16_of_float(single) if dtype == SDPA_BFLOAT16 else float16_of_float(single)
        memcpy(at, &half, sizeof(half))
