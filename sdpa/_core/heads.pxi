# Heads that lie side by side in rows, as projections give and take them.  Part of _core.pyx.
cimport numpy as cnp
from cpython.ref cimport Py_INCREF, PyObject, PyTypeObject
from libc.stdint cimport int64_t

cdef extern from "numpy/arrayobject.h":
    PyTypeObject PyArray_Type
    cnp.ndarray PyArray_NewFromDescr(
        PyTypeObject *, cnp.dtype, int, cnp.npy_intp *, cnp.npy_intp *, void *, int, object)


def split_heads(cnp.ndarray rows not None, int64_t first, int64_t heads, int64_t size):
    """(B, heads, M, size), a view of the columns from number `first` on of (B, M, columns)."""
    cdef cnp.npy_intp shape[4]
    cdef cnp.npy_intp steps[4]
    cdef cnp.npy_intp column = cnp.PyArray_STRIDE(rows, 2)
    shape[0], shape[1], shape[2], shape[3] = cnp.PyArray_DIM(rows, 0), heads, cnp.PyArray_DIM(rows, 1), size
    steps[0], steps[1], steps[2], steps[3] = (
        cnp.PyArray_STRIDE(rows, 0), size * column, cnp.PyArray_STRIDE(rows, 1), column)
    return view_of(rows, cnp.PyArray_BYTES(rows) + first * column, 4, shape, steps)


def join_heads(cnp.ndarray heads not None):
    """(B, M, H * size) of (B, H, M, size): a view where they lie side by side."""
    cdef cnp.npy_intp shape[3]
    cdef cnp.npy_intp steps[3]
    cdef cnp.npy_intp size = cnp.PyArray_DIM(heads, 3), column = cnp.PyArray_STRIDE(heads, 3)
    shape[0], shape[1] = cnp.PyArray_DIM(heads, 0), cnp.PyArray_DIM(heads, 2)
    shape[2] = cnp.PyArray_DIM(heads, 1) * size
    if cnp.PyArray_STRIDE(heads, 1) != size * column and cnp.PyArray_DIM(heads, 1) != 1:
        return heads.swapaxes(1, 2).reshape(shape[0], shape[1], shape[2])
    steps[0], steps[1], steps[2] = cnp.PyArray_STRIDE(heads, 0), cnp.PyArray_STRIDE(heads, 2), column
    return view_of(heads, cnp.PyArray_BYTES(heads), 3, shape, steps)


cdef cnp.ndarray view_of(cnp.ndarray array, char *data, int axes, cnp.npy_intp *shape, cnp.npy_intp *steps):
    cdef cnp.dtype dtype = <cnp.dtype><PyObject *>cnp.PyArray_DESCR(array)
    cdef cnp.ndarray view
    Py_INCREF(dtype)  # which the next call takes
    view = PyArray_NewFromDescr(
        &PyArray_Type, dtype, axes, shape, steps, data, cnp.PyArray_FLAGS(array) & cnp.NPY_ARRAY_WRITEABLE, None)
    cnp.set_array_base(view, array)
    return view
