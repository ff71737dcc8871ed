# Projections, y = x W^T + bias (csrc/layer/linear.h).  Part of _core.pyx.
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy
import numpy as np

# Below this many multiply-adds, with those of LINEAR_READING rows for reading the weights, one thread does the work.
cdef double LINEAR_SMALL = 1 << 20, LINEAR_READING = 8, LINEAR_OF_US = 300_000


cdef const sdpa_kernel *linear_kernel(Kernel kernel, int dtype) noexcept:
    cdef int purpose = SDPA_FOR_FLOAT
    if dtype == SDPA_FLOAT64:
        purpose = SDPA_FOR_DOUBLE
    elif dtype == SDPA_BFLOAT16:
        purpose = SDPA_FOR_BFLOAT16
    return kernel.isa.kernel[purpose][0]


cdef struct pack_call:
    sdpa_array weight
    const sdpa_kernel *table
    int64_t outs, ins, panel_bytes
    int vector, apart, width
    char *to


cdef void pack_panel(const void *of, int64_t panel, char *scratch) noexcept nogil:
    cdef const pack_call *call = <const pack_call *>of
    cdef int64_t first = panel * call.width
    cdef sdpa_array weight = place(&call.weight, 0, 0, first)
    call.table.pack_panel(&weight, min(<int64_t>call.width, call.outs - first), call.ins,
                          call.vector, call.apart, call.to + panel * call.panel_bytes)


@cython.final
cdef class Panels:
    """W (outs, ins) and its bias, for results of one dtype, as the kernel reads them: see csrc/layer/linear.h.  Where
    there is a gate, which is another W of that shape, a panel holds as many features of both, by turns a vector of
    each."""
    cdef readonly Kernel kernel
    cdef readonly object dtype
    cdef readonly int64_t outs, ins
    cdef readonly bint gated
    cdef const sdpa_kernel *table
    cdef cnp.ndarray numbers  # [panels][bytes of one]
    cdef cnp.ndarray bias  # [panels][lanes], or None
    cdef int width, apart  # features in a panel; and how many vectors from each other
    cdef int64_t count

    def __init__(self, Kernel kernel not None, dtype, cnp.ndarray weight not None, bias, cnp.ndarray gate, gate_bias):
        """Of `dtype`, which is one of ours, and so are the weights."""
        cdef int64_t panel_bytes
        self.kernel, self.dtype, self.gated = kernel, dtype, gate is not None
        self.outs, self.ins = cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
        self.table = linear_kernel(kernel, code_of(dtype.num))
        self.apart = 2 if self.gated else 1
        self.width = self.table.rows // self.apart
        self.count = (self.outs + self.width - 1) // self.width
        panel_bytes = self.table.rows * (whole_sum(self.table, self.ins) // self.table.step) * self.table.real_bytes
        self.numbers = aligned_bytes(self.count, panel_bytes)
        self.pack(weight, self.apart - 1)
        if self.gated:
            self.pack(gate, 0)
        if bias is not None or gate_bias is not None:
            self.bias = np.zeros((self.count, self.table.rows), self.real())
            self.put_bias(bias, self.apart - 1)
            self.put_bias(gate_bias, 0)

    cdef int pack(self, cnp.ndarray weight, int vector) except -1:
        cdef crew c
        cdef pack_call call
        with np.errstate(all="ignore"):
            rounded = weight.astype(self.dtype, copy=False)
        call.weight, call.table, call.outs, call.ins = array_of(rounded), self.table, self.outs, self.ins
        call.vector, call.apart, call.width = vector, self.apart, self.width
        call.to = cnp.PyArray_BYTES(self.numbers)
        call.panel_bytes = cnp.PyArray_DIM(self.numbers, 1)
        # By all threads, as all will read them: on a machine with several sockets each holds a part in its memory.
        hire(&c, threads_if_worth(None, <double>self.outs * self.ins < LINEAR_SMALL), LONG, 0, 0)
        with nogil:
            share(&c, pack_panel, &call, self.count, EQUALLY, 1, 16 * self.width * self.ins)
        return dismiss(&c)

    cdef int put_bias(self, bias, int vector) except -1:
        if bias is not None:
            padded = np.zeros(self.count * self.width, self.bias.dtype)
            with np.errstate(all="ignore"):
                padded[:self.outs] = bias
            of_all = self.bias.reshape(self.count, self.vectors(), self.table.lanes)
            own = of_all[:, vector :: self.apart]
            own[...] = padded.reshape(own.shape)
        return 0

    cdef int vectors(self):
        """In a panel."""
        return self.table.rows // self.table.lanes

    cdef object real(self):
        """The compute type."""
        return np.float64 if self.table.real_bytes == 8 else np.float32

    @property
    def nbytes(self):
        return self.numbers.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def weight(self, bint gate=False):
        """W, or the gate, as it was packed."""
        cdef int vector = 0 if gate else self.apart - 1
        step, columns = self.table.step, whole_sum(self.table, self.ins)
        numbers = self.numbers.view(self.dtype if step > 1 else self.real())
        of_all = numbers.reshape(self.count, columns // step, self.vectors(), self.table.lanes, step)
        rows = of_all[:, :, vector :: self.apart].transpose(0, 2, 3, 1, 4).reshape(self.count * self.width, columns)
        return np.ascontiguousarray(rows[:self.outs, :self.ins], self.dtype)


cdef int64_t whole_sum(const sdpa_kernel *table, int64_t ins) noexcept:
    return (ins + table.whole_sum - 1) // table.whole_sum * table.whole_sum


cdef cnp.ndarray aligned_bytes(int64_t count, int64_t size):
    """`count` times `size` bytes of 0 that begin with a cache line."""
    room = np.zeros(count * size + 63, np.uint8)
    begin = -<int64_t><uintptr_t>cnp.PyArray_DATA(room) & 63
    return room[begin : begin + count * size].reshape(count, size)


cdef struct linear_call:
    sdpa_linear sizes
    const sdpa_kernel *table
    int64_t pieces  # of all panels, each of sizes.vectors


ACTIVATIONS = {
    None: SDPA_IDENTITY, "relu": SDPA_RELU, "gelu": SDPA_GELU, "gelu_tanh": SDPA_GELU_TANH, "silu": SDPA_SILU,
}


def linear(
    Panels panels not None, cnp.ndarray x not None, cnp.ndarray out, cnp.ndarray residual, int activation, threads
):
    """act(x W^T + bias) + residual, or act(gate x) * (W x + bias) + residual; x (..., ins) gives (..., outs), of the
    dtype that the panels are for, which is that of x or a wider one.  `out` and `residual` have the shape of the
    result.  `threads` as the caller of the library gave it."""
    cdef crew c
    cdef linear_call call
    cdef sdpa_linear *sizes = &call.sizes
    cdef const sdpa_kernel *table = panels.table
    cdef cnp.npy_intp shape[MOST_LEADING + 3]
    cdef int last = cnp.PyArray_NDIM(x) - 1
    cdef int64_t units
    cdef int count
    cdef double products
    if out is not None and not has_even_rows(out):
        (<object>out)[...] = linear(panels, x, None, residual, activation, threads)
        return out
    if out is None:
        memcpy(shape, cnp.PyArray_DIMS(x), last * sizeof(cnp.npy_intp))
        shape[last] = panels.outs
        out = cnp.PyArray_EMPTY(last + 1, shape, panels.dtype.num, 0)
    sizes.ins, sizes.outs = panels.ins, panels.outs
    sizes.rows = cnp.PyArray_SIZE(out) // sizes.outs if sizes.outs else 0
    x = with_even_rows(x)
    sizes.x, sizes.out, sizes.residual.data = rows_of_all(x), rows_of_all(out), NULL
    if residual is not None:
        residual = with_even_rows(residual)
        sizes.residual = rows_of_all(residual)
    sizes.weights = cnp.PyArray_DATA(panels.numbers)
    sizes.bias = NULL if panels.bias is None else cnp.PyArray_DATA(panels.bias)
    sizes.activation, sizes.gated = activation, panels.gated
    call.table = table
    products = <double>sizes.ins * sizes.outs * (sizes.rows + LINEAR_READING) * (2 if panels.gated else 1)
    count = threads_if_worth(threads, products < LINEAR_SMALL)
    units = sdpa_cut_linear(sizes, table, count)
    call.pieces = (sdpa_linear_vectors(sizes, table) + sizes.vectors - 1) // sizes.vectors if units else 0
    # A cache line that says what is copied; the sums of a block; its rows converted.
    hire(&c, count, products / LINEAR_OF_US,
         64 + <size_t>sizes.block_rows * (table.rows + (sizes.ins + 63) // 64 * 64) * table.real_bytes, 0)
    c.weigh = weigh_linear
    with nogil:
        # Neighbours go to one thread, which finds the rows in its cache.  Two that write neighbouring panels take cache
        # lines from each other.
        share(&c, run_linear, &call, units, NEIGHBOURS, 1, sizes.block_rows * table.lanes * sizes.vectors * sizes.ins)
    dismiss(&c)
    return out


cdef bint has_even_rows(cnp.ndarray array) noexcept:
    """Whether one stride leads from each row (the last axis) to the next."""
    cdef int axis
    cdef ptrdiff_t step = 0
    cdef bint first = True
    for axis in range(cnp.PyArray_NDIM(array) - 2, -1, -1):
        if cnp.PyArray_DIM(array, axis) == 1:
            continue
        if not first and cnp.PyArray_STRIDE(array, axis) != step:
            return False
        step, first = cnp.PyArray_STRIDE(array, axis) * cnp.PyArray_DIM(array, axis), False
    return True


cdef cnp.ndarray with_even_rows(cnp.ndarray array):
    return array if has_even_rows(array) else array.copy()


cdef sdpa_array rows_of_all(cnp.ndarray array) except *:
    """(rows, columns)."""
    cdef sdpa_array a
    cdef int axis = cnp.PyArray_NDIM(array) - 1
    a.data, a.dtype = cnp.PyArray_BYTES(array), code_of(cnp.PyArray_TYPE(array))
    a.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    a.batch, a.head, a.batches, a.row = 0, 0, NULL, 0
    a.column = cnp.PyArray_STRIDE(array, axis)
    while axis > 0:
        axis -= 1
        if cnp.PyArray_DIM(array, axis) != 1:
            a.row = cnp.PyArray_STRIDE(array, axis)
            break
    return a


cdef double weigh_linear(const void *of, int64_t unit) noexcept nogil:
    cdef const linear_call *call = <const linear_call *>of
    cdef const sdpa_linear *sizes = &call.sizes
    cdef int64_t rows = min(<int64_t>sizes.block_rows, sizes.rows - unit // call.pieces * sizes.block_rows)
    cdef int64_t left = sdpa_linear_vectors(sizes, call.table) - unit % call.pieces * sizes.vectors
    return <double>rows * min(left, <int64_t>sizes.vectors) * call.table.lanes * sizes.ins


cdef void run_linear(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef const linear_call *call = <const linear_call *>of
    cdef const sdpa_linear *sizes = &call.sizes
    cdef int64_t row = unit // call.pieces * sizes.block_rows
    cdef int rows = <int>min(<int64_t>sizes.block_rows, sizes.rows - row)
    call.table.linear(sizes, row, rows, unit % call.pieces * sizes.vectors, scratch + 64, <int64_t *>scratch)
