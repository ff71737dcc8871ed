# A plain call of PagedKVCache: single tokens, or rows of one sequence.  Part of _core.pyx.

def attend_pages(Kernel kernel not None, query, key, value, list sequences, bint one, bint causal, threads_of):
    """The whole of PagedKVCache.attend where it needs no checks and no option but `causal`: None where that is not so.

    key, value : pools (pages, G, page_size, ...).    sequences : of type Sequence.
    query : `one` (H, M, D), of a single sequence; or a row for each, (S, H, D).
    """
    cdef sdpa_problem p
    cdef int64_t count = len(sequences), i, length, columns = 0
    cdef int64_t[::1] numbers
    cdef Sequence sequence
    cdef cnp.ndarray out
    cdef cnp.npy_intp shape[3]
    cdef int threads = 1
    if type(query) is not cnp.ndarray or not fits_pages(query, key, value, count, one):
        return None
    memset(&p, 0, sizeof(p))
    p.query, p.key, p.value = array_of(query), array_of(key), array_of(value)
    p.kv_heads, p.page_size = cnp.PyArray_DIM(key, 1), cnp.PyArray_DIM(key, 2)
    p.batches, p.dim, p.value_dim = count, cnp.PyArray_DIM(key, 3), cnp.PyArray_DIM(value, 3)
    p.heads, p.q_len = cnp.PyArray_DIM(query, 0 if one else 1), cnp.PyArray_DIM(query, 1) if one else 1
    shape[0], shape[1], shape[2] = cnp.PyArray_DIM(query, 0), cnp.PyArray_DIM(query, 1), p.value_dim
    out = cnp.PyArray_EMPTY(3, shape, cnp.PyArray_TYPE(query), 0)
    p.out = array_of(out)
    if not one:
        p.query.row, p.query.head = p.query.head, p.query.row
        p.out.row, p.out.head = p.out.head, p.out.row
    for i in range(count):
        sequence = sequences[i]
        p.kv_len, columns = max(p.kv_len, sequence.length), max(columns, sequence.count)
    if p.kv_len == 0:
        return None
    numbers = np.empty(5 * count + 2 + count * columns, np.int64)
    for i in range(count):
        sequence = sequences[i]
        length = sequence.length
        numbers[i] = i * p.q_len
        numbers[count + 1 + i] = length
        numbers[2 * count + 1 + i] = length - p.q_len  # position of the first query
        numbers[3 * count + 1 + i] = length - p.q_len + 1  # keys that it sees
        memcpy(&numbers[5 * count + 2 + i * columns], sequence.page(0), sequence.count * sizeof(int64_t))
    numbers[count] = count * p.q_len
    p.q_starts, p.kv_lengths, p.q_offset = &numbers[0], &numbers[count + 1], &numbers[2 * count + 1]
    if causal and p.q_len > 1:
        p.end_shift, p.shift_step = &numbers[3 * count + 1], 1
    p.unit_starts = &numbers[4 * count + 1]
    p.pages, p.page_columns = &numbers[5 * count + 2], columns
    p.scale = 1 / sqrt(<double>p.dim)
    if not few_products(count, p.heads, p.q_len, p.kv_len, p.dim + p.value_dim):
        threads = threads_of(None)
    run_all(&p, kernel, threads)
    return out


cdef bint fits_pages(cnp.ndarray query, cnp.ndarray key, cnp.ndarray value, int64_t sequences, bint one) noexcept:
    """Native dtypes of ours, query in C order, sizes that fit."""
    cdef int axis
    if cnp.PyArray_NDIM(query) != 3 or not cnp.PyArray_ISCARRAY_RO(query) or not sequences:
        return False
    if not may_meet(cnp.PyArray_TYPE(query), cnp.PyArray_TYPE(key), False):
        return False
    for axis in range(3):
        if cnp.PyArray_DIM(query, axis) == 0:
            return False
    if cnp.PyArray_DIM(query, 2) != cnp.PyArray_DIM(key, 3) or not one and cnp.PyArray_DIM(query, 0) != sequences:
        return False
    return cnp.PyArray_DIM(query, 0 if one else 1) % cnp.PyArray_DIM(key, 1) == 0
