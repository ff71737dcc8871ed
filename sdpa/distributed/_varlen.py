"""Packed sequences that lie across ranks: their attention, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._attention import backward, gradients, packed
from .._options import PACKED, AttentionOptions, InputOptions, takes
from .._runtime import kernels
from ._agreement import join
from ._attention import attend, check_result
from ._backward import differentiate, take_results
from ._calls import OVER_PAIRS, Dense
from ._layout import check_layout, within

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from .._attention.gradients import Gradients

ATTENTION_VARLEN = takes("attention_varlen", AttentionOptions, PACKED)
ATTENTION_VARLEN_BACKWARD = takes("attention_varlen_backward", InputOptions, PACKED)


@ATTENTION_VARLEN
def attention_varlen(
    comm: Any, query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None, layout: str = "contiguous", **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """`sdpa.attention_varlen` of sequences whose packed rows are spread over the ranks of a communicator.

    Each rank has a part of the T rows of query and of the U rows of key and value, which may begin and end within
    sequences, as `rows` says for T and U.  Each rank gets its rows of the result.

    Parameters
    ----------
    comm
        The communicator of mpi4py.  All its ranks call this.
    query, key, value
        The rows of this rank.
    cu_seqlens_q, cu_seqlens_k
        Where sequences begin and end among the rows of all ranks; the same on all ranks.
    layout
        As for `attention`.
    {options}

    Notes
    -----
    Mask and bias have the rows of this rank.  Column j is key j of the row's sequence, on whatever rank it lies.
    """
    group = join(comm)
    if group.size == 1:
        check_layout(layout)
        return packed.attention_varlen(
            query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options
        )
    call = Packed(
        group, query, key, value, options, ATTENTION_VARLEN, layout, (cu_seqlens_q, cu_seqlens_k),
        lambda call: check_result(call, options),
    )  # fmt: skip
    return attend(call, options)


@ATTENTION_VARLEN_BACKWARD
def attention_varlen_backward(
    comm: Any, grad_out: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike,
    *, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None, layout: str = "contiguous",
    grad_lse: ArrayLike | None = None, **options: Unpack[InputOptions],
) -> Gradients:  # fmt: skip
    """Gradients of `sdpa.distributed.attention_varlen`: each rank gets the gradients of its rows.

    Parameters
    ----------
    comm
        The communicator.  All its ranks call this.
    grad_out, query, key, value, out, lse, grad_lse
        The rows of this rank, as for `attention_backward`.
    cu_seqlens_q, cu_seqlens_k, layout
        The same as in the call of `attention_varlen`, and so are the options.
    {options}
    """
    group = join(comm)
    if group.size == 1:
        check_layout(layout)
        return backward.attention_varlen_backward(
            grad_out, query, key, value, out, lse, grad_lse=grad_lse, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, **options,
        )  # fmt: skip
    results = {"grad_out": grad_out, "out": out, "lse": lse, "grad_lse": grad_lse}
    call = Packed(
        group, query, key, value, options, ATTENTION_VARLEN_BACKWARD, layout, (cu_seqlens_q, cu_seqlens_k),
        lambda call: take_results(call, results), **{"whether grad_lse is given": grad_lse is not None},
    )  # fmt: skip
    return differentiate(call, results)


class Packed(Dense):
    """Arrays (rows, heads, size) of this rank, in which sequences follow one another, and options."""

    axis = 0  # of the rows

    def __init__(self, group, query, key, value, options, known, layout, cu_seqlens, prepare, **others):
        self.cu_seqlens = cu_seqlens
        super().__init__(group, query, key, value, options, known, layout, prepare, **others)

    def _check(self, query, key, value, options, known):
        own = [[0, np.shape(x)[0] if np.ndim(x) else 0] for x in (query, key)]
        call = _core.plan_packed(kernels.default, query, key, value, *own, {}, known)
        self.query, self.key, self.value = arrays = call.query, call.key, call.value
        whole = [self.of_all(x, rows) for x, rows in zip(arrays, (self.rows, self.keys, self.keys))]
        over_rows = {name: self._of_all_rows(name, options.get(name)) for name in OVER_PAIRS}
        return _core.plan_packed(kernels.default, *whole, *self.cu_seqlens, {**options, **over_rows}, known)

    def _of_all_rows(self, name, given):
        """A mask or bias with as many rows as all ranks have together, in no memory, for the checks."""
        array, rows = np.asarray(given), len(self.query)
        if given is None or array.ndim < 2 or array.shape[-2] == 1:
            return given
        if array.shape[-2] != rows:
            raise ValueError(f"{name} has shape {array.shape}: it must have 1 row or the {rows} rows of query")
        return np.broadcast_to(np.zeros((), array.dtype), (*array.shape[:-2], self.rows, array.shape[-1]))

    def _shape_of_result(self, call):
        return (*self.query.shape[:-1], self.value.shape[-1])

    def _place(self, options):
        q, k = (np.asarray(self.cu_seqlens[0 if x is None else i], np.int64) for i, x in enumerate(self.cu_seqlens))
        given = self._given_by_batch(options, (len(q) - 1,))
        self.lengths = np.diff(k) if given["kv_lengths"] is None else given["kv_lengths"]
        self.offset = self.lengths - np.diff(q) if given["q_offset"] is None else given["q_offset"]
        return self.offset, self.lengths, q[:-1], q[1:], k[:-1], k[1:]

    def _said(self, options):
        starts = {"cu_seqlens_q": self.sight.q_starts, "cu_seqlens_k": self.sight.k_starts}
        return super()._said(options) | starts

    def rows_of(self, array, chunk):
        return array[chunk.at : chunk.at + chunk.count]

    lse_of = rows_of

    def _keys_in(self, k):
        """Of each sequence: the first of its keys in the chunk, and how many."""
        return within(k, self.sight.k_starts, self.sight.k_ends)

    def blocks(self, array, q, k):
        """Column j is key j of the row's sequence, so a sequence that begins before these keys has its columns
        elsewhere than the others: it is a block of its own."""
        rows = slice(q.at, q.at + q.count) if array.shape[-2] != 1 else slice(None)
        first, count = self._keys_in(k)
        longest = slice(0, int(count.max(initial=0)))
        _, q_counts = self.sight.rows_in(q)
        if array.shape[-1] == 1:
            return [((..., rows, slice(None)), ...)]
        if not first[(q_counts > 0) & (count > 0)].any():
            return [((..., rows, longest), ...)]
        ends, found = np.cumsum(q_counts), []
        for b in np.flatnonzero((q_counts > 0) & (count > 0)):
            own = slice(int(ends[b] - q_counts[b]), int(ends[b]))
            there = slice(q.at + own.start, q.at + own.stop) if array.shape[-2] != 1 else slice(None)
            columns = slice(int(first[b]), int(first[b] + count[b]))
            found.append(((..., there, columns), (..., own, slice(0, int(count[b])))))
        return found

    def _over_pairs(self, array, q, k):
        blocks = self.blocks(array, q, k)
        if blocks[0][1] is ...:
            return array[blocks[0][0]]
        part = np.zeros((*array.shape[:-2], q.count, int(self._keys_in(k)[1].max())), array.dtype)
        for whole, pair in blocks:
            part[pair] = array[whole]
        return part

    def _by_batch(self, q, k):
        k_first, k_count = self._keys_in(k)
        return {
            "q_offset": self.offset + (self.sight.rows_in(q)[0] - k_first),
            "kv_lengths": np.clip(self.lengths - k_first, 0, k_count),
        }

    def _starts(self, q, k):
        counts = self.sight.rows_in(q)[1], self._keys_in(k)[1]
        return [np.concatenate([[0], np.cumsum(count)]) for count in counts]

    def _attend(self, q, k, options, *arrays):
        return _core.attention_varlen(kernels.default, *arrays, *self._starts(q, k), options, packed.ATTENTION_VARLEN)

    def _differentiate(self, q, k, options, into, *arrays):
        *arrays, grad_lse = arrays
        known = backward.ATTENTION_VARLEN_BACKWARD
        return _core.attention_varlen_backward(
            kernels.default, *arrays, *self._starts(q, k), grad_lse, options, known, into
        )

    def gradient_of_sinks(self, out, lse, delta, grad_lse):
        given, total = np.asarray(self.sinks, np.float64), 0.0
        for i in self.own_rows:
            chunk = self.q_chunks[i]
            starts = np.concatenate([[0], np.cumsum(self.sight.rows_in(chunk)[1])])
            of_rows = [None if x is None else self.rows_of(x, chunk) for x in (out, lse, delta, grad_lse)]
            total = total + gradients.of_sinks(given, self.sinks_by_head, *of_rows, starts)
        return np.broadcast_to(total, given.shape).copy()
