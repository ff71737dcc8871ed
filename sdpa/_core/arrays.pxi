# NumPy's arrays as the kernels see them.  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t

# NumPy's number of the type bfloat16, once an array of it was seen: another package brings it (see _checks.py).
cdef int bfloat16_number = -1


def know_bfloat16(dtype):
    global bfloat16_number
    bfloat16_number = dtype.num


cdef int code_of(int type_num) except -1:
    """What the kernels call a type of NumPy's."""
    if type_num == cnp.NPY_BOOL:
        return SDPA_BOOL
    if type_num == cnp.NPY_INT8:
        return SDPA_INT8
    if type_num == cnp.NPY_FLOAT16:
        return SDPA_FLOAT16
    if type_num == cnp.NPY_DOUBLE:
        return SDPA_FLOAT64
    if type_num == cnp.NPY_FLOAT:
        return SDPA_FLOAT32
    if type_num == bfloat16_number:
        return SDPA_BFLOAT16
    raise TypeError(f"the kernels have no dtype for NumPy's type number {type_num}")


cdef sdpa_array array_of(cnp.ndarray array) except *:
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


cdef sdpa_array place(const sdpa_array *array, int64_t batch, int64_t head, int64_t row) noexcept nogil:
    """The same from there on."""
    cdef sdpa_array a = array[0]
    a.data += batch * a.batch + head * a.head + row * a.row
    return a
