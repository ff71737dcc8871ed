# Projections, y = x W^T + bias (csrc/linear.h).  Part of _core.pyx.

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


cdef int64_t panels_of(const sdpa_kernel *kernel, int64_t outs) noexcept:
    return (outs + kernel.rows - 1) // kernel.rows


def pack_weights(Kernel kernel not None, cnp.ndarray weight not None, bias):
    """`weight` (outs, ins), of a dtype of ours, and `bias` (outs) or None as `linear` of this kernel reads them, for a
    result of that dtype."""
    cdef sdpa_array array = array_of(weight)
    cdef const sdpa_kernel *table = linear_kernel(kernel, array.dtype)
    cdef int64_t outs = cnp.PyArray_DIM(weight, 0), ins = cnp.PyArray_DIM(weight, 1)
    cdef int64_t size = panels_of(table, outs) * table.rows * ((ins + table.step - 1) // table.step) * table.real_bytes
    cdef cnp.ndarray packed = aligned_bytes(size)
    cdef void *to = cnp.PyArray_DATA(packed)
    with nogil:
        table.pack_weights(&array, outs, ins, to)
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


def linear(
    Kernel kernel not None, cnp.ndarray x not None, cnp.ndarray packed not None, cnp.ndarray bias,
    cnp.ndarray out not None, int threads,
):
    """`out` (rows, outs) = x (rows, ins) W^T + bias, with any strides.  W is packed for the dtype of `out`, which is
    that of x or a wider one.  `bias` is what pack_weights gave."""
    cdef sdpa_linear l
    cdef const sdpa_kernel *table = linear_kernel(kernel, code_of(cnp.PyArray_TYPE(out)))
    cdef int64_t panels = panels_of(table, cnp.PyArray_DIM(out, 1)), blocks, unit
    cdef size_t bytes_each
    cdef char *scratch
    cdef int thread
    l.x, l.out = array_of(x), array_of(out)
    l.rows, l.ins, l.outs = cnp.PyArray_DIM(x, 0), cnp.PyArray_DIM(x, 1), cnp.PyArray_DIM(out, 1)
    l.weights = cnp.PyArray_DATA(packed)
    l.bias = NULL if bias is None else cnp.PyArray_DATA(bias)
    if <double>l.ins * l.outs * (l.rows + LINEAR_READING) < LINEAR_SMALL:
        threads = 1
    blocks = cut_rows(&l, table.linear_tile)
    # A cache line that says what is copied; the sums of a block; its rows converted.
    bytes_each = 64 + <size_t>l.block_rows * (table.rows + (l.ins + 63) // 64 * 64) * table.real_bytes
    scratch = <char *>PyMem_RawMalloc(threads * bytes_each + 64)
    if scratch == NULL:
        raise MemoryError(f"{threads * bytes_each} bytes of scratch for {threads} threads")
    for thread in range(threads):
        (<int64_t *>(aligned(scratch) + thread * bytes_each))[0] = -1
    with nogil:
        if threads == 1:
            for unit in range(blocks * panels):
                run_linear(&l, table, unit, panels, aligned(scratch))
        else:
            # Guided: neighbours go to one thread, which finds the rows in its cache.  Two that write neighbouring
            # panels take cache lines from each other.
            for unit in prange(blocks * panels, schedule="guided", num_threads=threads):
                run_linear(&l, table, unit, panels, aligned(scratch) + threadid() * bytes_each)
    PyMem_RawFree(scratch)


cdef int64_t cut_rows(sdpa_linear *l, int64_t tile) noexcept:
    """The number of blocks, as equal as whole tiles allow: by their number threads share them."""
    cdef int64_t blocks = (l.rows + LINEAR_TILES * tile - 1) // (LINEAR_TILES * tile)
    cdef int64_t tiles = (l.rows + blocks * tile - 1) // (blocks * tile) if blocks else 0
    l.block_rows = <int>(tiles * tile)
    return blocks


cdef char *aligned(char *memory) noexcept nogil:
    return memory + (-<int64_t><uintptr_t>memory & 63)


cdef void run_linear(
    const sdpa_linear *l, const sdpa_kernel *kernel, int64_t unit, int64_t panels, char *scratch
) noexcept nogil:
    cdef int64_t row = unit // panels * l.block_rows
    cdef int rows = <int>min(<int64_t>l.block_rows, l.rows - row)
    kernel.linear(l, row, rows, unit % panels, scratch + 64, <int64_t *>scratch)
