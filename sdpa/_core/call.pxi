# One call: what it returns, and its plan.  Part of _core.pyx.
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset
import numpy as np
from typing import NamedTuple

from ._attention import gradients

cdef extern from "numpy/arrayobject.h":
    cnp.ndarray PyArray_NewLikeArray(cnp.ndarray, cnp.NPY_ORDER, void *, int)


class Plan(NamedTuple):
    """How a call is cut for the threads."""

    few_rows: bool
    pairs: bool
    converted: bool
    lanes: int
    most_rows: int
    rows: int
    keys: int
    tasks: int
    bundle: int
    parts: int
    parts_shared: bool
    threads: int
    scratch_bytes: int


@cython.final
cdef class Call(Options):
    """Inputs, and what is done with them."""

    cdef int result_axes(self, cnp.npy_intp columns, cnp.npy_intp *shape) noexcept:
        """Fills `shape` with (lead, H, M, columns), without the axes that none of the inputs had, and without the last
        where `columns` is -1.  Returns the number of axes."""
        cdef int i, n = self.leading
        for i in range(n):
            shape[i] = self.lead[i]
        if self.rows_first:
            shape[n], shape[n + 1] = self.rows, self.p.heads
            n += 2
        else:
            if self.rank > 2:
                shape[n] = self.p.heads
                n += 1
            shape[n] = self.rows
            n += 1
        if columns >= 0:
            shape[n] = columns
            n += 1
        return n

    cpdef tuple result_shape(self, cnp.npy_intp columns):
        cdef cnp.npy_intp shape[MOST_LEADING + 3]
        cdef int i, n = self.result_axes(columns, shape)
        return tuple([shape[i] for i in range(n)])

    cdef cnp.ndarray new_result(self, cnp.npy_intp columns, int type_num, bint zero=False):
        """In C order; uninitialised, or 0 wherever a thread that writes there finds it: not touched before."""
        cdef cnp.npy_intp shape[MOST_LEADING + 3]
        cdef int n = self.result_axes(columns, shape)
        return cnp.PyArray_ZEROS(n, shape, type_num, 0) if zero else cnp.PyArray_EMPTY(n, shape, type_num, 0)

    cdef cnp.ndarray take_out(self, given):
        """The array for the result, in the layout of the query; or what was given for it, checked."""
        cdef cnp.ndarray out, query = self.query
        cdef int type_num = cnp.PyArray_TYPE(query), last = cnp.PyArray_NDIM(query) - 1
        if given is not None:
            out = checked_out(given, self.result_shape(self.p.value_dim), query, self.inputs())
        elif cnp.PyArray_IS_C_CONTIGUOUS(query) or last + 1 < self.rank:
            out = self.new_result(self.p.value_dim, type_num)
        elif cnp.PyArray_DIM(query, last) == self.p.value_dim and self.batches_of_query():
            out = PyArray_NewLikeArray(query, cnp.NPY_KEEPORDER, NULL, 0)
        else:
            out = np.empty_like(query, shape=self.result_shape(self.p.value_dim), subok=False)
        self.place(out, self.p.heads, self.rows, self.p.value_dim, &self.p.out, self.rows_first)
        return out

    cdef bint batches_of_query(self) noexcept:
        """Whether the query has all of them itself."""
        cdef int i
        for i in range(self.leading):
            if cnp.PyArray_DIM(self.query, i) != self.lead[i]:
                return False
        return True

    cdef dict inputs(self):
        """What `out` must not overlap, by name."""
        found = {"query": self.query, "key": self.key, "value": self.value} | self.beside
        for name, given in self.options.items():
            if name != "out" and isinstance(given, np.ndarray):
                found[name] = given
        return found

    # ----------------------------------------------------------------------------------------------------------- run

    cdef int choose_threads(self) except -1:
        """As many as are given; else no more than there is work for, which for a small call is the caller's alone."""
        cdef sdpa_input *p = &self.p
        cdef double worth
        if self.threads:
            return 0
        given = self.option("threads")
        if given is not None:
            self.threads = threads_of(given)
            return 0
        worth = work_of(
            p, self.rows * (1.0 if self.sequences else <double>p.batches), self.products_of_score + p.value_dim
        ) / WORTH_A_THREAD
        self.threads = 1
        if worth >= 2:
            others = self.known.most
            self.threads = <int>min(
                worth, <double>(threads_of(None) if others is None else threads_of(others(), as_others=True)))
        return 0

    cpdef object attend(self):
        """The result, or (result, lse)."""
        cdef sdpa_input *p = &self.p
        cdef cnp.ndarray out, lse = None
        cdef bint return_lse = self.flag("return_lse")
        given = self.option("out")
        self.choose_threads()
        self.all_taken()
        out = self.take_out(given)
        if return_lse:
            lse = self.new_result(-1, sum_type(self.query))
            self.place(lse, p.heads, self.rows, -1, &p.lse, self.rows_first)
        if self.compares():
            run_all(p, self.unit_starts, self.kernel, self.threads)
        else:
            out[...] = 0
            if return_lse:
                self.write_blind(lse)
        return (out, lse) if return_lse else out

    # ----------------------------------------------------------------------------------------------------- gradients

    cdef cnp.ndarray given_result(self, str name, given, cnp.npy_intp columns, int type_num, sdpa_array *to):
        """An array of the shape of the result, or of lse (columns -1), in the dtype that it must have."""
        cdef cnp.npy_intp shape[MOST_LEADING + 3]
        cdef int i, n = self.result_axes(columns, shape)
        cdef cnp.ndarray array = given if type(given) is cnp.ndarray else _checks.plain_array(name, given)
        if cnp.PyArray_TYPE(array) != type_num or not cnp.PyArray_ISNOTSWAPPED(array):
            wanted = self.query.dtype if columns >= 0 else _checks.sum_dtype(self.query.dtype)
            rule = f"it must be {wanted}{' or wider' if name == 'out' else ''}"
            if name != "out" or not _checks.may_hold(array.dtype, wanted):  # wider: unrounded
                raise TypeError(f"{name} has dtype {array.dtype}: for a query of {self.query.dtype} {rule}")
        for i in range(n):
            if cnp.PyArray_NDIM(array) != n or cnp.PyArray_DIM(array, i) != shape[i]:
                raise ValueError(
                    f"{name} has shape {shape_of(array)}: for these query, key and value it must be "
                    f"{self.result_shape(columns)}"
                )
        self.place(array, self.p.heads, self.rows, columns, to, self.rows_first)
        return array

    cdef cnp.ndarray new_gradient(
        self, int number, cnp.ndarray given, cnp.npy_intp heads, cnp.npy_intp rows, sdpa_array *to
    ):
        """An array for the gradient of `given`: like that; or, where it was broadcast and sums follow, of the whole
        shape and in the dtype of sums.  `unrounded` are arrays in that dtype, in place of the first."""
        cdef cnp.ndarray grad
        cdef cnp.npy_intp columns = size_at(given, 1)
        if (self.sequences or self.has_all_batches(given)) and self.unrounded is not None:
            grad = self.unrounded[number]
            if self.sequences:
                grad.fill(0)
        elif self.sequences and cnp.PyArray_IS_C_CONTIGUOUS(given):  # not all rows need be met by another
            grad = cnp.PyArray_ZEROS(cnp.PyArray_NDIM(given), cnp.PyArray_DIMS(given), cnp.PyArray_TYPE(given), 0)
        elif self.sequences:
            grad = PyArray_NewLikeArray(given, cnp.NPY_KEEPORDER, NULL, 0)
            memset(cnp.PyArray_DATA(grad), 0, cnp.PyArray_NBYTES(grad))
        elif self.has_all_batches(given):
            grad = PyArray_NewLikeArray(given, cnp.NPY_KEEPORDER, NULL, 0)
        else:
            grad = np.empty((*self.lead_shape(), heads, rows, columns), _checks.sum_dtype(self.query.dtype))
        self.place(grad, heads, rows, columns, to, self.rows_first)
        return grad

    cdef bint has_all_batches(self, cnp.ndarray array) noexcept:
        """Whether it was not broadcast along the leading axes."""
        cdef int i
        cdef int64_t batches = 1
        for i in range(cnp.PyArray_NDIM(array) - 3):
            batches *= cnp.PyArray_DIM(array, i)
        return batches == self.p.batches

    cdef object differentiate(self, grad_out, out, lse, grad_lse):
        """The gradients of query, key, value, bias and sinks; None of what the call had not."""
        cdef sdpa_input *p = &self.p
        cdef sdpa_backward_input backward
        cdef cnp.ndarray bias = None, grad_bias = None, delta = None
        cdef int wide = sum_type(self.query), type_num = cnp.PyArray_TYPE(self.query)
        cdef bint exact = self.unrounded is not None
        memset(&backward, 0, sizeof(sdpa_backward_input))
        grad_out = self.given_result("grad_out", grad_out, p.value_dim, type_num, &backward.grad_out)
        out = self.given_result("out", out, p.value_dim, type_num, &p.out)
        lse = self.given_result("lse", lse, -1, wide, &p.lse)
        if grad_lse is not None:
            grad_lse = self.given_result("grad_lse", grad_lse, -1, wide, &backward.grad_lse)
        grads = (
            self.new_gradient(0, self.query, p.heads, self.rows, &backward.grad_query),
            self.new_gradient(1, self.key, p.kv_heads, self.key_rows(), &backward.grad_key),
            self.new_gradient(2, self.value, p.kv_heads, self.key_rows(), &backward.grad_value),
        )
        if self.bias is not None:
            bias = self.bias
            grad_bias = cnp.PyArray_ZEROS(cnp.PyArray_NDIM(bias), cnp.PyArray_DIMS(bias), wide, 0)
            self.place(grad_bias, p.heads, self.rows, p.kv_len, &backward.grad_bias)
        if p.sinks != NULL:
            delta = self.new_result(-1, wide)
            delta.fill(0)
            self.place(delta, p.heads, self.rows, -1, &backward.delta, self.rows_first)
        if self.compares() and p.q_len and p.kv_len and p.heads:
            backward.forward = self.p
            run_backward(&backward, self.kernel.isa.kernel[purpose_of(p)][0], self.batches_of_bias(), self.threads)
        else:
            for grad in grads:
                grad.fill(0)
            if delta is not None and grad_lse is not None:
                np.negative(grad_lse, out=delta)
        return gradients.Gradients(
            *[as_given(grad, given, exact) for grad, given in zip(grads, (self.query, self.key, self.value))],
            None if bias is None else as_given(grad_bias, bias, exact),
            None if delta is None else gradients.of_sinks(
                self.options["sinks"], self.sinks, out, lse, delta, grad_lse, self.q_starts()),
        )

    cdef object q_starts(self):
        if not self.sequences:
            return None
        return np.array([self.p.q_starts[b] for b in range(self.p.batches + 1)])

    cdef int64_t key_rows(self):
        return cnp.PyArray_DIM(self.key, 0) if self.rows_first else self.p.kv_len

    cdef int write_blind(self, lse) except -1:
        """The lse of rows that see nothing: their sinks, or -inf."""
        sinks = self.sinks
        if sinks is None:
            lse[...] = -np.inf
        elif self.sequences:
            lse[...] = np.repeat(sinks, np.diff(self.q_starts()), axis=0)
        else:
            lse[...] = sinks.reshape(*lse.shape[: lse.ndim - 1], 1)
        return 0

    cdef bint compares(self) noexcept:
        """Whether there is anything to compare: without it every row sees nothing."""
        cdef int64_t b
        if not self.sequences:
            return self.p.dim != 0
        for b in range(self.p.batches):
            if self.p.kv_lengths[b]:
                return self.p.dim != 0 and self.p.heads != 0 and self.rows != 0
        return False

    # -------------------------------------------------------------------------------- for functions written in Python

    @property
    def heads(self):
        return self.p.heads

    @property
    def kv_heads(self):
        return self.p.kv_heads

    @property
    def scale(self):
        return self.p.scale

    @property
    def sinks(self):
        """(lead, H), or None."""
        if self.p.sinks == NULL:
            return None
        return self.numbers_of(self.p.sinks)

    cdef object numbers_of(self, const double *at):
        """(lead, H), of which `at` is that of the first head of the first batch."""
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = self.p.batches, self.p.heads
        cdef cnp.ndarray found = cnp.PyArray_EMPTY(2, shape, cnp.NPY_DOUBLE, 0)
        memcpy(cnp.PyArray_DATA(found), at, self.p.batches * self.p.heads * sizeof(double))
        if self.sequences:
            return found
        lead = self.lead_shape()
        order = [self.order[i] for i in range(self.leading)]
        found = found.reshape([lead[axis] for axis in order] + [self.p.heads])
        return found.transpose([order.index(axis) for axis in range(self.leading)] + [self.leading])

    def project(self, cnp.ndarray query not None, cnp.ndarray key not None, double scale, const double[:, ::1] v):
        """Scores become additive: of these projections (..., A) of query and key, and of v (H, A), below 2."""
        self.keep((query, key, v))
        self.p.dim, self.p.scale = v.shape[1], scale
        self.p.v = &v[0, 0] if v.shape[0] and v.shape[1] else NULL
        self.place(query, self.p.heads, self.p.q_len, self.p.dim, &self.p.query)
        self.place(key, self.p.kv_heads, self.p.kv_len, self.p.dim, &self.p.key)

    def visible_pairs(self):
        """Pairs of query and key, over all heads, that causal, window and lengths leave visible."""
        cdef sdpa_input *p = &self.p
        cdef int64_t b, query, begin, end, length, pairs = 0
        for b in range(p.batches):
            length = p.kv_len if p.kv_lengths == NULL else p.kv_lengths[b]
            for query in range(p.q_len):
                begin, end = 0, length
                if p.begin_shift != NULL:
                    begin = max(0, min(length, query + p.begin_shift[b * p.shift_stride]))
                if p.end_shift != NULL:
                    end = max(0, min(length, query + p.end_shift[b * p.shift_stride]))
                pairs += max(0, end - begin)
        return pairs * p.heads

    def plan(self):
        """How it is cut for the threads."""
        cdef const sdpa_kernel *kernel = self.kernel.table(&self.p)
        cdef sdpa_schedule s = schedule_of(&self.p, self.unit_starts, kernel, self.threads)
        cdef int chunk, threads
        cdef int64_t vectors, per_task, units = cut_into_units(&s, &threads, &chunk)
        cdef int purpose = purpose_of(&self.p)
        cdef sdpa_cut cut
        if units:
            cut = sdpa_find_unit(&s, 0).cut
        else:
            cut.tasks = 1
        vectors = (s.most_rows + kernel.lanes - 1) // kernel.lanes
        per_task = (vectors + cut.tasks - 1) // cut.tasks
        few = bool(kernel.few_rows)
        return Plan(
            few_rows=few,
            pairs=purpose == SDPA_FOR_BFLOAT16 and kernel != self.kernel.isa.kernel[SDPA_FOR_FLOAT][few],
            converted=bool(kernel.copies(&self.p)),
            lanes=kernel.lanes,
            most_rows=kernel.rows,
            rows=min(s.most_rows, per_task * kernel.lanes),
            keys=kernel.block_keys,
            tasks=self.p.batches * self.p.kv_heads * cut.tasks if units else 0,
            bundle=s.largest_bundle,
            parts=s.most_parts,
            parts_shared=bool(s.split),
            threads=threads,
            scratch_bytes=threads * scratch_bytes(&s) + shared_bytes(&s, units),
        )
