# Sequences of different lengths, and keys and values in caches.  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy
import numpy as np


cdef class PackedInputs(Inputs):
    """Also those whose rows are packed, or whose keys and values lie in a cache or in pages."""

    cdef int take_packed(self, query, key, value, cu_seqlens_q, cu_seqlens_k) except -1:
        """The same for sequences whose rows are packed: (rows, heads, size)."""
        cdef sdpa_input *p = &self.p
        cdef cnp.ndarray q, k, v, q_starts, k_starts
        cdef int64_t b
        cdef int64_t *counts
        q, k, v = packed_rows("query", query), packed_rows("key", key), packed_rows("value", value)
        self.query, self.key, self.value = q, k, v
        if cnp.PyArray_DIM(k, 0) != cnp.PyArray_DIM(v, 0) or cnp.PyArray_DIM(k, 1) != cnp.PyArray_DIM(v, 1):
            raise ValueError(
                f"key has shape {shape_of(k)} and value {shape_of(v)}: they must have the same keys and the same heads"
            )
        self.take_sizes(cnp.PyArray_DIM(q, 1), 0, cnp.PyArray_DIM(k, 1), 0)
        if p.dim != size_at(k, 1):
            raise ValueError(f"query has shape {shape_of(q)} and key {shape_of(k)}: the last axes must be equal")
        self.check_heads()
        q_starts = k_starts = _checks.starts("cu_seqlens_q", cu_seqlens_q, "query", len(q))
        if cu_seqlens_k is not None:
            k_starts = _checks.starts("cu_seqlens_k", cu_seqlens_k, "key", len(k))
            if len(k_starts) != len(q_starts):
                raise ValueError(
                    f"cu_seqlens_q has {len(q_starts)} numbers and cu_seqlens_k {len(k_starts)}: they must be as many"
                )
        elif len(k) != len(q):
            raise ValueError(f"query has {len(q)} rows and key {len(k)}: without cu_seqlens_k they must be as many")
        p.k_starts = <const int64_t *>cnp.PyArray_DATA(self.keep(k_starts))
        counts = self.new_numbers(len(q_starts) - 1)
        for b in range(len(q_starts) - 1):
            counts[b] = p.k_starts[b + 1] - p.k_starts[b]
        self.rows_first = True
        self.beside = {
            name: given
            for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
            if isinstance(given, np.ndarray)
        }
        self.keep(q_starts)
        self.cut_sequences(<const int64_t *>cnp.PyArray_DATA(q_starts), len(q_starts) - 1, counts)
        self.place(q, p.heads, self.rows, p.dim, &p.query, True)
        self.place(k, p.kv_heads, len(k), p.dim, &p.key, True)
        self.place(v, p.kv_heads, len(v), p.value_dim, &p.value, True)
        return 0

    cdef int take_cached(self, CacheBase cache, query, int64_t rows) except -1:
        """A query for the first `rows` rows of a cache."""
        cdef sdpa_input *p = &self.p
        cdef cnp.ndarray q = floats("query", query)
        cdef Operand keys = cache._now.keys, values = cache._now.values
        cdef bint scaled = keys.scales is not None
        self.query, self.key, self.value = q, keys.numbers, values.numbers
        self.rank = cnp.PyArray_NDIM(q)
        p.heads, p.q_len, p.dim = size_at(q, 3), size_at(q, 2), size_at(q, 1)
        p.kv_heads, p.kv_len, p.value_dim = cache.kv_heads, rows, cache.value_dim
        if (self.rank > 4 or size_at(q, 4) != cache.batch or p.dim != cache.head_dim or p.heads % p.kv_heads
                or self.rank == 2 and p.kv_heads > 1):
            raise ValueError(
                f"query has shape {shape_of(q)}: it must be ({cache.batch}, H, M, {cache.head_dim}) with H a multiple "
                f"of the {cache.kv_heads} heads of the cache"
                + (", or that without the first axis" if cache.batch == 1 else "")
            )
        if not may_meet(cnp.PyArray_TYPE(q), cnp.PyArray_TYPE(self.key), scaled):
            if cnp.PyArray_ITEMSIZE(q) < cnp.PyArray_ITEMSIZE(self.key):
                raise TypeError(f"query has dtype {q.dtype}: it must not be narrower than the cache, {cache.dtype}")
            raise TypeError(f"query has dtype {q.dtype} and the cache {cache.dtype}: they must not meet")
        self.leading, self.lead[0], self.in_order = max(0, self.rank - 3), cache.batch, True
        p.batches, self.rows, self.products_of_score, self.cached = cache.batch, p.q_len, p.dim, True
        self.place(q, p.heads, p.q_len, p.dim, &p.query)
        self.place(self.key, p.kv_heads, rows, p.dim, &p.key)
        self.place(self.value, p.kv_heads, rows, p.value_dim, &p.value)
        if scaled:
            self.place(keys.scales, p.kv_heads, rows, size_at(keys.scales, 1), &p.key_scale)
            self.place(values.scales, p.kv_heads, rows, size_at(values.scales, 1), &p.value_scale)
            while 1 << p.group_shift < keys.group:
                p.group_shift += 1
        return 0

    cdef int take_pages(
        self, query, cnp.ndarray keys, cnp.ndarray values, list sequences, bint one, cu_seqlens_q
    ) except -1:
        """Queries for sequences that lie in pages: of `one` (H, M, D), else packed, (T, H, D)."""
        cdef sdpa_input *p = &self.p
        cdef cnp.ndarray q = floats("query", query)
        cdef Sequence sequence
        cdef int64_t count = len(sequences), columns = 0, i
        cdef int64_t *lengths = self.new_numbers(count)
        cdef int64_t *pages
        if cnp.PyArray_NDIM(q) != 3:
            (_checks.one_sequence if one else _checks.packed_rows)("query", q)  # raises
        self.query, self.key, self.value, self.rows_first = q, keys, values, not one
        self.take_sizes(cnp.PyArray_DIM(q, 0 if one else 1), 0, cnp.PyArray_DIM(keys, 1), 0)
        if p.heads % p.kv_heads or p.dim != cnp.PyArray_DIM(keys, 3):
            raise ValueError(
                f"query has {p.heads} heads of size {p.dim}: the heads must be a multiple of the {p.kv_heads} of the "
                f"cache, and the size {cnp.PyArray_DIM(keys, 3)}"
            )
        for i in range(count):
            sequence = sequences[i]
            lengths[i], columns = sequence.length, max(columns, sequence.count)
        self.cut_sequences(
            self.starts_of_rows(cu_seqlens_q, cnp.PyArray_DIM(q, 1 if one else 0), count, one), count, lengths)
        pages = self.new_numbers(count * columns)
        for i in range(count):
            sequence = sequences[i]
            memcpy(pages + i * columns, sequence.page(0), sequence.count * sizeof(int64_t))
        p.pages, p.page_columns, p.page_size = pages, columns, cnp.PyArray_DIM(keys, 2)
        self.place(q, p.heads, self.rows, p.dim, &p.query, self.rows_first)
        p.key, p.value = array_of(keys), array_of(values)
        return 0

    cdef int cut_sequences(self, const int64_t *q_starts, int64_t count, const int64_t *counts) except -1:
        """Sequence b has the queries from q_starts[b] to q_starts[b + 1], and counts[b] keys."""
        cdef sdpa_input *p = &self.p
        cdef int64_t b
        self.sequences, self.in_order, self.counts, self.rank = True, True, counts, 3
        p.q_starts, p.batches, self.unit_starts = q_starts, count, self.new_numbers(count + 1)
        self.rows = q_starts[count]
        p.q_len = p.kv_len = 0
        for b in range(count):
            p.q_len = max(p.q_len, q_starts[b + 1] - q_starts[b])
            p.kv_len = max(p.kv_len, counts[b])
        return 0

    cdef const int64_t *starts_of_rows(self, given, int64_t rows, int64_t count, bint one) except NULL:
        """Where the rows of the query begin in each of so many sequences, and the end."""
        cdef int64_t *starts
        cdef int64_t b
        cdef cnp.ndarray array
        if given is None and (one or rows == count):  # all of them, or one each
            starts = self.new_numbers(count + 1)
            for b in range(count):
                starts[b] = b
            starts[count] = rows
            return starts
        array = self.keep(_checks.rows_of("cu_seqlens_q", given, "query", rows, count, one))
        return <const int64_t *>cnp.PyArray_DATA(array)
