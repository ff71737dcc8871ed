# What callers give, checked and as the kernels take it.  Part of _core.pyx.
#
# An argument that is as the kernels take it is recognised here; anything else goes to a function of _checks.py, which
# brings it into that form or raises.  So there is one path for all calls, and a small call does not wait for Python.
cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItemWithError
from cpython.ref cimport PyObject
from libc.math cimport INFINITY, sqrt
from libc.stdint cimport int64_t
from libc.string cimport memcpy
import numpy as np

from . import _checks

cdef enum: FEW_NUMBERS = 32
cdef enum: MOST_LEADING = 29  # axes before the heads: with the other three, as many as NumPy 1 has
cdef int64_t FAR = <int64_t>1 << 61  # the sum of two such numbers fits into 64 bits


@cython.freelist(8)
cdef class Inputs:
    """The arrays and options of one call, in `p` as the kernels read them.

    Axes are (lead, H, M, D) and so on: `lead` are those before the heads, broadcast, none to 29 of them.  In packed
    calls the batches are sequences, and arrays have no leading axes.
    """
    cdef sdpa_input p
    cdef readonly cnp.ndarray query, key, value
    cdef readonly int threads
    cdef Kernel kernel
    cdef object known  # Keywords: what the public function takes
    cdef dict options
    cdef Py_ssize_t left  # options that were not looked at yet
    cdef int rank, leading  # axes of the result; of `lead`
    cdef cnp.npy_intp lead[MOST_LEADING]
    cdef int order[MOST_LEADING]  # in which they are counted, the last one fastest
    cdef bint in_order  # it is 0, 1, 2, ...
    cdef bint sequences  # the batches are: they have lengths of their own, and arrays hold one behind the other
    cdef bint rows_first  # arrays are (rows, heads, size)
    cdef int64_t rows  # of the query: M, or those of all sequences
    cdef const int64_t *counts  # keys of each sequence
    cdef int64_t *unit_starts  # room for those of a schedule
    cdef cnp.ndarray bias
    cdef bint for_gradients
    cdef bint cached  # the batches' lengths are those of a cache
    cdef object own_lengths, own_offset  # or None
    cdef double products_of_score  # that a score is worth
    cdef list kept  # arrays that p points into
    cdef int taken
    cdef int64_t numbers[FEW_NUMBERS]  # that p points into, as far as they suffice
    cdef public dict beside  # other arrays that were given, by name

    # ------------------------------------------------------------------------------------------------------- options

    cdef object option(self, str name):
        """What was given for it, or None."""
        cdef PyObject *given = self.find(name)
        return None if given == NULL else <object>given

    cdef PyObject *find(self, str name) noexcept:
        """The same, but NULL if nothing was given.  Each is asked for once; when all were found no one is sought."""
        cdef PyObject *given
        if not self.left:
            return NULL
        given = PyDict_GetItemWithError(self.options, name)  # which raises nothing for a str
        if given != NULL:
            self.left -= 1
        return given

    cdef str said(self, str name):
        """What messages call it."""
        return self.known.said.get(name, name)

    cdef bint flag(self, str name) except -1:
        """An option that is True or False, and False unless it was given."""
        cdef PyObject *given = self.find(name)
        if given == NULL or <object>given is False:
            return False
        return True if <object>given is True else _checks.flag(name, <object>given)

    cdef int all_taken(self) except -1:
        """Raises where there is an option that the function does not know."""
        if self.left:
            self.known.check(self.options)
        return 0

    cdef int take_options(self) except -1:
        """All of them but those that say what is returned, in the order of their description."""
        cdef sdpa_input *p = &self.p
        if not self.options:
            p.scale = 1 / sqrt(<double>p.dim) if p.dim else 1
            if self.known.causal or self.sequences or self.own_lengths is not None:
                self.bound_queries(None, self.known.causal, self.own_offset, self.own_lengths)
            return 0
        self.take_mask(self.option("mask"))
        self.take_bias(self.option("bias"))
        cdef PyObject *causal = self.find("causal")
        bounded = self.known.causal if causal == NULL else <object>causal
        window, q_offset = self.option("window"), self.option("q_offset")
        if q_offset is None:
            q_offset = self.own_offset
        self.bound_queries(window, bounded, q_offset, self.own_lengths if self.cached else self.option("kv_lengths"))
        scale, softcap = self.option("scale"), self.option("softcap")
        p.scale = (1 / sqrt(<double>p.dim) if p.dim else 1) if scale is None else number("scale", scale)
        p.softcap = 0
        if softcap is not None:
            p.softcap = number("softcap", softcap)
            if p.softcap <= 0:
                raise ValueError(f"softcap is {softcap}: it must be above 0, or None")
        p.sinks = self.per_head("sinks", self.option("sinks"))
        p.alibi_slopes = self.per_head("alibi_slopes", self.option("alibi_slopes"))
        return 0

    cdef int take_mask(self, given) except -1:
        if given is None:
            return 0
        cdef cnp.ndarray mask
        if type(given) is cnp.ndarray and cnp.PyArray_TYPE(given) == cnp.NPY_BOOL:
            mask = given
        else:
            mask = _checks.mask_array(self.said("mask"), given)
        return self.spread("mask", mask, &self.p.mask)

    cdef int take_bias(self, given) except -1:
        if given is None:
            return 0
        if type(given) is cnp.ndarray and holds_our_floats(given) and cnp.PyArray_NDIM(given) <= MOST_LEADING + 3:
            self.bias = given
        else:
            self.bias = _checks.bias_array(self.said("bias"), given)
        return self.spread("bias", self.bias, &self.p.bias)

    cdef int64_t batches_of_bias(self) noexcept:
        """How many batches have numbers of their own."""
        cdef int64_t batches = 1
        cdef int i, axis
        if self.bias is None:
            return 1
        for i in range(self.leading):
            axis = cnp.PyArray_NDIM(self.bias) - 3 - self.leading + i
            if axis >= 0 and cnp.PyArray_DIM(self.bias, axis) != 1:
                batches *= self.lead[i]
        return batches

    cdef int spread(self, str name, cnp.ndarray array, sdpa_array *to) except -1:
        """`array`, which must broadcast to (lead, H, M, N)."""
        self.keep(array)
        if not self.place(array, self.p.heads, self.rows, self.p.kv_len, to):
            _checks.broadcast(self.said(name), array, (*self.lead_shape(), self.p.heads, self.rows, self.p.kv_len))
        return 0

    cdef int bound_queries(self, window, causal, q_offset, kv_lengths) except -1:
        """Query i of batch b sees the keys from i + begin_shift[b] up to, not including, i + end_shift[b]."""
        cdef sdpa_input *p = &self.p
        cdef int64_t limit = p.q_len + p.kv_len + 1, b  # beyond it: nothing, or everything
        # What is added to the position: of any size, as q_offset is, so their sums are those of Python.
        begin, end = 0, 1
        cdef bint bounded_left = False, bounded_right = False, ahead = True
        cdef int64_t offset, count
        cdef int64_t *shifts
        if causal is not True and causal is not False:
            causal = _checks.flag("causal", causal)
        if window is not None:
            first, last = window_sides(window)
            bounded_left, bounded_right = first is not None, last is not None
            if bounded_left:
                begin = -first
            if bounded_right:
                end, ahead = last + 1, last >= 0
        if causal:
            bounded_right = True
            if ahead:
                end = 1
        if q_offset is not None:
            p.q_offset = self.whole_numbers("q_offset", q_offset)
        if kv_lengths is not None:
            p.kv_lengths = self.whole_numbers("kv_lengths", kv_lengths)
            self.check_lengths(kv_lengths)
        if p.q_len == 1 and ahead and p.q_offset == NULL:
            bounded_right = False  # the last token sees all of them
        if self.sequences:
            self.place_sequences()
        if not bounded_left and not bounded_right:
            return 0
        if p.q_offset == NULL and p.kv_lengths == NULL:  # one shift serves all batches
            p.shift_stride, count = 0, 1
        else:
            p.shift_stride, count = 1, p.batches
        shifts = self.new_numbers(2 * count)
        for b in range(count):
            offset = self.first_position(b)
            shifts[b], shifts[count + b] = shift_within(limit, offset, begin), shift_within(limit, offset, end)
        p.begin_shift = shifts if bounded_left else NULL
        p.end_shift = shifts + count if bounded_right else NULL
        return 0

    cdef int64_t first_position(self, int64_t b) noexcept:
        """Of the first query of batch b."""
        cdef sdpa_input *p = &self.p
        if p.q_offset != NULL:
            return p.q_offset[b]
        return (p.kv_len if p.kv_lengths == NULL else p.kv_lengths[b]) - p.q_len

    cdef int check_lengths(self, kv_lengths) except -1:
        cdef int64_t b
        for b in range(self.p.batches):
            if not 0 <= self.p.kv_lengths[b] <= (self.counts[b] if self.sequences else self.p.kv_len):
                if self.sequences:
                    there = np.array([self.counts[b] for b in range(self.p.batches)])
                else:
                    there = self.p.kv_len
                _checks.lengths_of(kv_lengths, self.batch_shape(), there)  # raises
        return 0

    cdef int place_sequences(self) except -1:
        """Sequences always have lengths, and positions."""
        cdef sdpa_input *p = &self.p
        cdef int64_t *offsets
        cdef int64_t b
        if p.kv_lengths == NULL:
            p.kv_lengths = self.counts
        if p.q_offset == NULL:
            offsets = self.new_numbers(p.batches)
            for b in range(p.batches):
                offsets[b] = p.kv_lengths[b] - (p.q_starts[b + 1] - p.q_starts[b])
            p.q_offset = offsets
        return 0

    cdef int64_t *new_numbers(self, int64_t count) except NULL:
        """Room for so many, as long as the call lives."""
        cdef cnp.npy_intp size = max(count, 1)
        cdef cnp.ndarray memory
        if count <= FEW_NUMBERS - self.taken:
            self.taken += <int>count
            return self.numbers + self.taken - count
        memory = self.keep(cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0))
        return <int64_t *>cnp.PyArray_DATA(memory)

    cdef tuple lead_shape(self):
        return tuple([self.lead[i] for i in range(self.leading)])

    cdef tuple batch_shape(self):
        """Of what there is one of for each batch."""
        return (self.p.batches,) if self.sequences or self.cached else self.lead_shape()

    cdef object keep(self, array):
        """`array`, alive as long as the call is."""
        if self.kept is None:
            self.kept = []
        self.kept.append(array)
        return array

    cdef const int64_t *whole_numbers(self, str name, given) except? NULL:
        """One for each batch."""
        cdef cnp.ndarray array
        cdef int64_t *numbers
        cdef int64_t b, number
        if is_near(given, &number):
            numbers = self.new_numbers(self.p.batches)
            for b in range(self.p.batches):
                numbers[b] = number
            return numbers
        if (type(given) is cnp.ndarray and cnp.PyArray_TYPE(given) == cnp.NPY_INT64
                and (self.leading == 1 or self.sequences or self.cached) and cnp.PyArray_NDIM(given) == 1
                and cnp.PyArray_DIM(given, 0) == self.p.batches and cnp.PyArray_ISCARRAY_RO(given)):
            array = given
        else:
            array = self.by_batch(_checks.whole_numbers(name, given, self.batch_shape()))
        self.keep(array)
        return <const int64_t *>cnp.PyArray_DATA(array)

    cdef const double *per_head(self, str name, given) except? NULL:
        """(B, H)."""
        cdef cnp.ndarray array
        cdef cnp.npy_intp shape[2]
        cdef int64_t b, h, heads = self.p.heads
        cdef double *to
        if given is None:
            return NULL
        if not (type(given) is cnp.ndarray and cnp.PyArray_NDIM(given) == 1 and cnp.PyArray_DIM(given, 0) == heads
                and cnp.PyArray_TYPE(given) == cnp.NPY_DOUBLE and cnp.PyArray_ISCARRAY_RO(given)):
            array = self.by_batch(_checks.per_head(name, given, self.batch_shape(), heads))
        elif self.p.batches == 1:
            array = given
        else:
            shape[0], shape[1] = self.p.batches, heads
            array = cnp.PyArray_EMPTY(2, shape, cnp.NPY_DOUBLE, 0)
            to = <double *>cnp.PyArray_DATA(array)
            for b in range(self.p.batches):
                memcpy(to + b * heads, cnp.PyArray_DATA(given), heads * sizeof(double))
        self.keep(array)
        return <const double *>cnp.PyArray_DATA(array)

    # -------------------------------------------------------------------------------------------------------- arrays

    cdef int take_arrays(self, query, key, value, bint matched=True, bint valued=True) except -1:
        """Of query, key and value (if any: `valued`) that dtypes and shapes agree.  `matched`: a query is multiplied by
        a key, so both have the same size."""
        cdef sdpa_input *p = &self.p
        self.query, self.key = floats("query", query), floats("key", key)
        self.value = floats("value", value) if valued else None
        cdef cnp.ndarray q = self.query, k = self.key, v = self.value if valued else k
        self.take_sizes(size_at(q, 3), size_at(q, 2), size_at(k, 3), size_at(k, 2))
        if matched and p.dim != size_at(k, 1):
            raise ValueError(f"query has shape {shape_of(q)} and key {shape_of(k)}: the last axes must be equal")
        if size_at(v, 3) != p.kv_heads or size_at(v, 2) != p.kv_len:
            raise ValueError(
                f"key has shape {shape_of(k)} and value {shape_of(v)}: they must have the same heads and the same keys"
            )
        self.check_heads()
        self.rank = max(cnp.PyArray_NDIM(q), cnp.PyArray_NDIM(k), cnp.PyArray_NDIM(v))
        self.broadcast_lead(q, k, v)
        self.rows = p.q_len
        self.place(q, p.heads, p.q_len, p.dim, &p.query)
        self.place(k, p.kv_heads, p.kv_len, size_at(k, 1), &p.key)
        if not valued:
            p.value = p.key  # of which no column counts
        else:
            self.place(v, p.kv_heads, p.kv_len, p.value_dim, &p.value)
        return 0

    cdef int take_sizes(self, int64_t heads, int64_t q_len, int64_t kv_heads, int64_t kv_len) except -1:
        """Those of the arrays, whose dtypes are checked."""
        cdef sdpa_input *p = &self.p
        cdef cnp.ndarray q = self.query, k = self.key, v = k if self.value is None else self.value
        cdef int q_type = cnp.PyArray_TYPE(q)
        cdef int k_type = cnp.PyArray_TYPE(k), v_type = cnp.PyArray_TYPE(v)
        cdef bint both_halves = is_half(k_type) and is_half(v_type) and k_type != v_type
        if not may_meet(q_type, k_type, False) or not may_meet(q_type, v_type, False) or both_halves:
            _checks.check_widths(self.query, self.key, self.value)
        p.heads, p.q_len, p.kv_heads, p.kv_len = heads, q_len, kv_heads, kv_len
        p.dim = size_at(q, 1)
        p.value_dim = 0 if self.value is None else size_at(v, 1)
        self.products_of_score = p.dim
        if max(p.dim, p.value_dim) > LONGEST:
            raise ValueError(f"query has shape {shape_of(q)}: the last axes must not be longer than {LONGEST}")
        return 0

    cdef int check_heads(self) except -1:
        if self.p.heads % self.p.kv_heads if self.p.kv_heads else self.p.heads:
            raise ValueError(
                f"query has {self.p.heads} heads and key has {self.p.kv_heads}: the heads of query must be a multiple "
                "of those of key"
            )
        return 0

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

    cdef int broadcast_lead(self, cnp.ndarray q, cnp.ndarray k, cnp.ndarray v) except -1:
        """The axes before the heads, and how many batches they are."""
        cdef int i
        self.leading = max(0, self.rank - 3)
        for i in range(self.leading):
            self.lead[i] = 1
        if not (self.widen_lead(q) and self.widen_lead(k) and self.widen_lead(v)):
            given = [("query", self.query), ("key", self.key), ("value", self.value)]
            shapes = ", ".join([f"{name} {x.shape}" for name, x in given if x is not None])
            raise ValueError(f"{shapes}: the axes before the heads must broadcast")
        self.p.batches = 1
        for i in range(self.leading):
            self.p.batches *= self.lead[i]
        return self.order_batches(q)

    cdef bint widen_lead(self, cnp.ndarray array) noexcept:
        """`lead` with the sizes of `array`; False where they do not broadcast."""
        cdef int i, extra = cnp.PyArray_NDIM(array) - 3
        cdef cnp.npy_intp size
        cdef cnp.npy_intp *lead = self.lead + self.leading - extra
        for i in range(extra):
            size = cnp.PyArray_DIM(array, i)
            if size != 1 and lead[i] != 1 and lead[i] != size:
                return False
            if size != 1:
                lead[i] = size
        return True

    cdef bint place(
        self, cnp.ndarray array, cnp.npy_intp heads, cnp.npy_intp rows, cnp.npy_intp columns, sdpa_array *to,
        bint rows_first=False,
    ) except -1:
        """Where its elements lie: `array` as (lead, heads, rows, columns), or without the last where that is -1.  False
        where it does not broadcast to that."""
        cdef int last = cnp.PyArray_NDIM(array) - 1, i
        cdef ptrdiff_t steps[MOST_LEADING]
        cdef bint fits = last < self.leading + (3 if columns >= 0 else 2) or self.cached  # that has an axis of batches
        to.data, to.itemsize = cnp.PyArray_BYTES(array), <int>cnp.PyArray_ITEMSIZE(array)
        to.dtype = code_of(cnp.PyArray_TYPE(array))
        to.column = 0
        if columns >= 0:
            to.column = step_of(array, last, columns, &fits)
            last -= 1
        if rows_first:
            to.row, to.head = step_of(array, last - 1, rows, &fits), step_of(array, last, heads, &fits)
        else:
            to.row, to.head = step_of(array, last, rows, &fits), step_of(array, last - 1, heads, &fits)
        for i in range(self.leading):
            steps[i] = step_of(array, last - 1 - self.leading + i, self.lead[i], &fits)
        self.fold(steps, to)
        return fits

    cdef int fold(self, const ptrdiff_t *steps, sdpa_array *to) except -1:
        """Batches from the leading axes, of these strides: one stride if that says where each begins, else a table."""
        cdef int i, axis
        cdef ptrdiff_t next_step = 0
        cdef bint first = True
        to.batch, to.batches = 0, NULL
        for i in range(self.leading - 1, -1, -1):
            axis = self.order[i]
            if self.lead[axis] == 1:
                continue
            if first:
                to.batch, first = steps[axis], False
            elif steps[axis] != next_step:
                to.batches = self.find_batches(steps)
                break
            next_step = steps[axis] * self.lead[axis]
        return 0

    cdef const ptrdiff_t *find_batches(self, const ptrdiff_t *steps) except? NULL:
        """Where each batch begins, in bytes."""
        cdef cnp.ndarray memory = self.keep(np.zeros(max(self.p.batches, 1), np.intp))
        cdef ptrdiff_t *table = <ptrdiff_t *>cnp.PyArray_DATA(memory)
        cdef int64_t count = 1, i, j
        cdef int k, axis
        for k in range(self.leading - 1, -1, -1):
            axis = self.order[k]
            for i in range(1, self.lead[axis]):
                for j in range(count):
                    table[i * count + j] = i * steps[axis] + table[j]
            count *= self.lead[axis]
        return table

    cdef int order_batches(self, cnp.ndarray q) except -1:
        """As they lie in the query: neighbours then share what is in the caches.  In gradients, axes along which the
        bias is shared come before the others.  Sorted by insertion, as NumPy does with strides."""
        cdef int i, j, ones = 0
        cdef double steps[MOST_LEADING]  # those of shared axes are infinite
        cdef bint fits
        bias_axes = np.shape(self.options.get("bias")) if self.for_gradients else None
        self.in_order = True
        for i in range(self.leading):  # axes of size 1 first: it does not matter where they stand
            if self.lead[i] == 1:
                self.order[ones] = i
                ones += 1
        j = ones
        for i in range(self.leading):
            if self.lead[i] == 1:
                continue
            steps[i] = abs(step_of(q, cnp.PyArray_NDIM(q) - 3 - self.leading + i, self.lead[i], &fits))
            if bias_axes is not None:
                at = len(bias_axes) - 3 - self.leading + i
                if at < 0 or bias_axes[at] == 1:
                    steps[i] = INFINITY
            self.insert_axis(i, ones, j, steps)
            j += 1
        return 0

    cdef void insert_axis(self, int axis, int first, int end, const double *steps) noexcept:
        """Into order[first] to order[end], behind those whose steps are not smaller."""
        while end > first and steps[axis] > steps[self.order[end - 1]]:
            self.order[end] = self.order[end - 1]
            self.in_order = False
            end -= 1
        self.order[end] = axis

    cdef object by_batch(self, array):
        """Numbers (lead, ...), in C order, for batches as they are counted."""
        if self.in_order:
            return array
        shape = self.lead_shape()
        order = [self.order[i] for i in range(self.leading)]
        rest = list(range(len(shape), len(shape) + array.ndim - 1))
        whole = array.reshape(*shape, *array.shape[1:]).transpose(order + rest)
        return np.ascontiguousarray(whole).reshape(array.shape)
