# The options of a call, checked and as the kernels take them.  Part of _core.pyx.
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItemWithError
from cpython.ref cimport PyObject
from libc.math cimport sqrt
from libc.stdint cimport int64_t
from libc.string cimport memcpy
import numpy as np


cdef class Options(PackedInputs):
    """And the options, which are looked at when the arrays are there."""

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
