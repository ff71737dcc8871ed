# Projections, y = x W^T + bias (csrc/layer/linear.h).  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy
import numpy as np

# Tiles of rows that are done together: a panel is read from far once for so many, which costs nothing then.
cdef int64_t LINEAR_TILES = 20
# Below this many multiply-adds, with those of LINEAR_READING rows for reading the weights, one thread does the work.
cdef double LINEAR_SMALL = 1 << 20, LINEAR_READING = 8


cdef const sdpa_kernel *linear_kernel(Kernel kernel, int dtype) noexcept:
    cdef int purpose = SDPA_FOR_FLOAT
    if dtype == SDPA_FLOAT64:
        purpose = SDPA_FOR_DOUBLE
    elif dtype == SDPA_BFLOAT16:
        purpose = SDPA_FOR_BFLOAT16
    return kernel.isa.kernel[purpose][0]


cdef int64_t panels_of(const sdpa_kernel *kernel, int64_t outs) noexcept nogil:
    return (outs + kernel.rows - 1) // kernel.rows


cdef int64_t panel_bytes(const sdpa_kernel *kernel, int64_t ins) noexcept nogil:
    return kernel.rows * ((ins + kernel.step - 1) // kernel.step) * kernel.real_bytes


cdef struct pack_call:
    sdpa_array weight
    const sdpa_kernel *kernel
    int64_t outs, ins
    char *to


cdef void pack_panel(const void *of, int64_t panel, char *scratch) noexcept nogil:
    cdef const pack_call *call = <const pack_call *>of
    cdef int64_t first = panel * call.kernel.rows
    cdef sdpa_array weight = place(&call.weight, 0, 0, first)
    call.kernel.pack_weights(&weight, min(<int64_t>call.kernel.rows, call.outs - first), call.ins,
                             call.to + panel * panel_bytes(call.kernel, call.ins))


def pack_weights(Kernel kernel not None, cnp.ndarray weight not None, bias):
    """`weight` (outs, ins), of a dtype of ours, and `bias` (outs) or None as `linear` of this kernel reads them, for a
    result of that dtype."""
    cdef sdpa_array array = array_of(weight)
    cdef const sdpa_kernel *table = linear_kernel(kernel, array.dtype)
    cdef int64_t outs = cnp.PyArray_DIM(weight, 0), ins = cnp.PyArray_DIM(weight, 1)
    cdef cnp.ndarray packed = aligned_bytes(panels_of(table, outs) * panel_bytes(table, ins))
    cdef crew c
    cdef pack_call call
    call.weight, call.kernel, call.outs, call.ins, call.to = array, table, outs, ins, cnp.PyArray_BYTES(packed)
    hire(&c, 1, 0, 0)
    with nogil:
        share(&c, pack_panel, &call, panels_of(table, outs), EQUALLY, 1, 16 * table.rows * ins)
    dismiss(&c)
    if bias is None:
        return packed, None
    filled = np.zeros(panels_of(table, outs) * table.rows, np.float64 if table.real_bytes == 8 else np.float32)
    filled[:outs] = bias
    return packed, filled


cdef cnp.ndarray aligned_bytes(int64_t size):
    """`size` bytes that begin with a cache line."""
    room = np.empty(size + 63, np.uint8)
    begin = -<int64_t><uintptr_t>cnp.PyArray_DATA(room) & 63
    return room[begin : begin + size]


cdef struct linear_call:
    sdpa_linear sizes
    const sdpa_kernel *kernel
    int64_t panels


def linear(
    Kernel kernel not None, cnp.ndarray x not None, cnp.ndarray packed not None, cnp.ndarray bias, int64_t outs, dtype,
    threads,
):
    """x (..., ins) W^T + bias, (..., outs) of `dtype`, which is that of x or a wider one.  W is packed for it; `bias`
    is what pack_weights gave.  `threads` as the caller of the library gave it."""
    cdef crew c
    cdef linear_call call
    cdef sdpa_linear *sizes = &call.sizes
    cdef cnp.npy_intp shape[MOST_LEADING + 3]
    cdef int last = cnp.PyArray_NDIM(x) - 1, count = 1
    cdef cnp.ndarray rows, out
    cdef const sdpa_kernel *table
    cdef int64_t units
    memcpy(shape, cnp.PyArray_DIMS(x), last * sizeof(cnp.npy_intp))
    shape[last] = outs
    out = cnp.PyArray_EMPTY(last + 1, shape, dtype.num, 0)
    sizes.ins, sizes.outs = cnp.PyArray_DIM(x, last), outs
    sizes.rows = cnp.PyArray_SIZE(out) // outs if outs else 0
    rows = x if last == 1 or cnp.PyArray_IS_C_CONTIGUOUS(x) else x.reshape(sizes.rows, sizes.ins)
    sizes.x, sizes.out = rows_of_all(rows), rows_of_all(out)
    table = linear_kernel(kernel, sizes.out.dtype)
    call.kernel, call.panels = table, panels_of(table, outs)
    sizes.weights = cnp.PyArray_DATA(packed)
    sizes.bias = NULL if bias is None else cnp.PyArray_DATA(bias)
    if threads is not None or <double>sizes.ins * outs * (sizes.rows + LINEAR_READING) >= LINEAR_SMALL:
        count = threads_of(threads)
    if <double>sizes.ins * outs * (sizes.rows + LINEAR_READING) < LINEAR_SMALL:
        count = 1
    units = cut_rows(sizes, table.linear_tile) * call.panels
    # A cache line that says what is copied; the sums of a block; its rows converted.
    hire(&c, count, 64 + <size_t>sizes.block_rows * (table.rows + (sizes.ins + 63) // 64 * 64) * table.real_bytes, 0)
    with nogil:
        # Neighbours go to one thread, which finds the rows in its cache.  Two that write neighbouring panels take cache
        # lines from each other.
        share(&c, run_linear, &call, units, NEIGHBOURS, 1, sizes.block_rows * table.rows * sizes.ins)
    dismiss(&c)
    return out


cdef sdpa_array rows_of_all(cnp.ndarray array) except *:
    """(rows, columns), in C order if there are more axes than these."""
    cdef sdpa_array a
    cdef int last = cnp.PyArray_NDIM(array) - 1
    a.data, a.dtype = cnp.PyArray_BYTES(array), code_of(cnp.PyArray_TYPE(array))
    a.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    a.batch, a.head, a.batches = 0, 0, NULL
    a.column = cnp.PyArray_STRIDE(array, last)
    a.row = cnp.PyArray_STRIDE(array, 0) if last == 1 else cnp.PyArray_DIM(array, last) * a.itemsize
    return a


cdef int64_t cut_rows(sdpa_linear *l, int64_t tile) noexcept:
    """The number of blocks, as equal as whole tiles allow: by their number threads share them."""
    cdef int64_t blocks = (l.rows + LINEAR_TILES * tile - 1) // (LINEAR_TILES * tile)
    cdef int64_t tiles = (l.rows + blocks * tile - 1) // (blocks * tile) if blocks else 0
    l.block_rows = <int>(tiles * tile)
    return blocks


cdef void run_linear(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef const linear_call *call = <const linear_call *>of
    cdef const sdpa_linear *sizes = &call.sizes
    cdef int64_t row = unit // call.panels * sizes.block_rows
    cdef int rows = <int>min(<int64_t>sizes.block_rows, sizes.rows - row)
    call.kernel.linear(sizes, row, rows, unit % call.panels, scratch + 64, <int64_t *>scratch)
