# What callers give, checked and as the kernels take it.  Part of _core.pyx.
#
# An argument that is as the kernels take it is recognised here; anything else goes to a function of _checks.py, which
# brings it into that form or raises.  So there is one path for all calls, and a small call does not wait for Python.
cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
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
    cdef int64_t *unit_starts  # room for those of a schedule
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
    cdef cnp.ndarray bias
    cdef bint for_gradients
    cdef list unrounded  # arrays of the dtype of sums for the gradients, which are summed further; or None
    cdef bint cached  # the batches' lengths are those of a cache
    cdef object own_lengths, own_offset  # or None
    cdef double products_of_score  # that a score is worth
    cdef list kept  # arrays that p points into
    cdef int taken
    cdef int64_t numbers[FEW_NUMBERS]  # that p points into, as far as they suffice
    cdef public dict beside  # other arrays that were given, by name

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
        if self.p.batches == 0:  # of which the axes before an empty one have some
            return 0
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
        cdef cnp.ndarray memory = self.keep(np.zeros(self.p.batches, np.intp))
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
