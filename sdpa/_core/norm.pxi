# Layer norm and root-mean-square norm (csrc/layer/norm.h).  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t
import numpy as np

# Below this many numbers one thread does the work; a unit is so many.
cdef int64_t NORM_SMALL = 1 << 15, NORM_AT_ONCE = 1 << 13
cdef double NORM_OF_US = 6_000


cdef struct norm_call:
    sdpa_norm sizes
    const sdpa_kernel *table
    int64_t unit_rows


cdef void run_norm(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef const norm_call *call = <const norm_call *>of
    cdef int64_t row = unit * call.unit_rows
    call.table.norm(&call.sizes, row, min(call.unit_rows, call.sizes.rows - row), scratch)


def norm(
    cnp.ndarray x not None, weight, bias, double eps, bint centred, cnp.ndarray residual, cnp.ndarray out,
    cnp.ndarray total, Kernel kernel not None, threads,
):
    """The norm of each row of x (..., size), in `out`; or of x + residual, and that sum, in `total`.  Arguments are
    checked."""
    cdef crew c
    cdef norm_call call
    cdef sdpa_norm *n = &call.sizes
    cdef cnp.ndarray wide_weight, wide_bias
    if (out is not None and not has_even_rows(out)) or (total is not None and not has_even_rows(total)):
        found = norm(x, weight, bias, eps, centred, residual, None, None, kernel, threads)
        return filled(out, found) if residual is None else (filled(out, found[0]), filled(total, found[1]))
    x = with_even_rows(x)
    if out is None:
        out = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(x), cnp.PyArray_DIMS(x), cnp.PyArray_TYPE(x), 0)
    n.size = size_at(x, 1)
    n.rows = cnp.PyArray_SIZE(x) // n.size if n.size else 0
    n.x, n.out, n.residual.data, n.sum.data = rows_of_all(x), rows_of_all(out), NULL, NULL
    if residual is not None:
        residual = with_even_rows(residual)
        if total is None:
            total = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(x), cnp.PyArray_DIMS(x), cnp.PyArray_TYPE(x), 0)
        n.residual, n.sum = rows_of_all(residual), rows_of_all(total)
    call.table = kernel.isa.kernel[SDPA_FOR_DOUBLE if n.x.dtype == SDPA_FLOAT64 else SDPA_FOR_FLOAT][0]
    wide_weight, wide_bias = widened(weight, call.table), widened(bias, call.table)
    n.weight = NULL if weight is None else cnp.PyArray_DATA(wide_weight)
    n.bias = NULL if bias is None else cnp.PyArray_DATA(wide_bias)
    n.eps, n.centred = eps, centred
    call.unit_rows = max(1, NORM_AT_ONCE // max(1, n.size))
    hire(&c, threads_if_worth(threads, n.rows * n.size < NORM_SMALL), n.rows * n.size / NORM_OF_US,
         max(SDPA_NORM_TOGETHER, (n.size + 15) // 16 * 16) * call.table.real_bytes, 0)
    with nogil:
        share(&c, run_norm, &call, (n.rows + call.unit_rows - 1) // call.unit_rows, EQUALLY, 1, 4 * NORM_AT_ONCE)
    dismiss(&c)
    return out if residual is None else (out, total)


cdef cnp.ndarray filled(cnp.ndarray out, cnp.ndarray found):
    """`out` with what was found, or that."""
    if out is None:
        return found
    (<object>out)[...] = found
    return out


cdef cnp.ndarray widened(cnp.ndarray given, const sdpa_kernel *table):
    """Numbers for each column in the compute type, filled up to whole vectors: a copy, unless that is what they are."""
    cdef cnp.npy_intp size[1]
    cdef cnp.ndarray wide
    cdef int wanted = cnp.NPY_DOUBLE if table.real_bytes == 8 else cnp.NPY_FLOAT
    if given is None:
        return None
    size[0] = (cnp.PyArray_SIZE(given) + 15) // 16 * 16
    if cnp.PyArray_TYPE(given) == wanted and size[0] == cnp.PyArray_SIZE(given) and cnp.PyArray_ISCARRAY_RO(given):
        return given
    wide = cnp.PyArray_ZEROS(1, size, wanted, 0)
    with np.errstate(all="ignore"):
        wide[:cnp.PyArray_SIZE(given)] = given
    return wide
