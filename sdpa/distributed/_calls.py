"""What one rank has of a call on all ranks, checked; and the call on its own that a pair of chunks is."""

import math

import numpy as np

from .. import _core
from .._attention import gradients
from .._attention.backward import ATTENTION_BACKWARD
from .._attention.forward import ATTENTION
from .._checks import sum_dtype, window_and_causal
from .._options import AttentionOptions, Distances
from .._options.signatures import described
from .._runtime import kernels, threads
from ._agreement import agree, gather_counts
from ._layout import FAR, Chunk, Sight, check_layout, cut, route

# The options by how they are given: over pairs of query and key, for each batch, for each head.
OVER_PAIRS, BY_BATCH, BY_HEAD = (
    [name for name, option in described(AttentionOptions).items() if kind in option.kind]
    for kind in ("{pairs}", "{batch}", "{heads}")
)
OWN = {"out", "return_lse", "threads"}  # which ranks need not have in common
NO_KEYS = Chunk(0, 0, 0, 0)


class Dense:
    """Arrays (..., heads, rows, size) of this rank, and options."""

    axis = -2  # of the rows

    def __init__(self, group, query, key, value, options, known, layout, prepare=None, **others):
        """All ranks call this; it raises on all of them, or on none.  `prepare` checks more, before they agree;
        `others` must be the same on all ranks, too."""
        self.group = group
        counts = gather_counts(group, query, key, axis=self.axis)
        self.rows, self.keys = map(sum, counts)

        def check():
            check_layout(layout)
            self._take(query, key, value, options, known)
            if prepare is not None:
                prepare(self)
            return None, {"the function": known.function, "layout": layout} | others | self._said(options)

        agree(group, check)
        self.q_chunks, self.k_chunks = (cut(each, layout) for each in counts)
        self.own_rows = [i for i, chunk in enumerate(self.q_chunks) if chunk.rank == group.rank and chunk.count]
        self.seen = self.sight.seen(self.q_chunks, self.k_chunks)
        self.route = route(self.q_chunks, self.k_chunks, self.seen, group.size)

    def _take(self, query, key, value, options, known):
        call = self._check(query, key, value, options, known)
        self.sums = sum_dtype(self.query.dtype)  # the dtype of partial results
        self.threads = threads.count(options.get("threads"), self.group.sharing)
        self.out_shape = self._shape_of_result(call)
        self.heads, self.kv_heads = call.heads, call.kv_heads
        self.rows_at_position = math.prod(self.out_shape[:-1]) // max(1, self.out_shape[self.axis])
        self.pairs = {name: np.atleast_2d(options[name]) for name in OVER_PAIRS if options.get(name) is not None}
        self.sinks, self.sinks_by_head = options.get("sinks"), call.sinks
        self.bias = None if options.get("bias") is None else np.asarray(options["bias"])
        apart = {*OWN, *OVER_PAIRS, *BY_BATCH, "sinks"}
        self.common = {name: given for name, given in options.items() if name not in apart and given is not None}
        self.common["threads"] = self.threads
        self.by_distance = any(options.get(name) is not None for name in described(Distances))
        left, right = window_and_causal(options.get("window"), options.get("causal", known.causal))
        self.sight = Sight(left, right, *(np.ravel(x) for x in self._place(options)))

    def _check(self, query, key, value, options, known):
        """The arrays of this rank; then the options, for its rows and the keys of all ranks."""
        call = _core.plan_call(kernels.default, query, key, value, {}, known)
        self.query, self.key, self.value = call.query, call.key, call.value
        key, value = self.of_all(call.key, self.keys), self.of_all(call.value, self.keys)
        return _core.plan_call(kernels.default, call.query, key, value, options, known)

    def _shape_of_result(self, call):
        return call.result_shape(self.value.shape[-1])

    def _place(self, options):
        """Where batches stand: see Sight."""
        lead = self.out_shape[:-3]
        given = self._given_by_batch(options, lead)
        self.lengths = given["kv_lengths"]
        lengths = np.broadcast_to(np.int64(self.keys), lead) if self.lengths is None else self.lengths
        self.offset = lengths - self.rows if given["q_offset"] is None else given["q_offset"]
        return self.offset, lengths, 0, self.rows, 0, self.keys

    def _given_by_batch(self, options, lead):
        """One number for each batch, or None; so far from 64 bits that a position can be added."""
        return {
            name: None
            if options.get(name) is None
            else np.broadcast_to(np.asarray(options[name], np.int64), lead).clip(-2 * FAR, 2 * FAR)
            for name in BY_BATCH
        }

    def _said(self, options):
        """{name: value} of what must be the same on all ranks."""
        said = {}
        for name, array in (("query", self.query), ("key", self.key), ("value", self.value), *self.pairs.items()):
            shape = list(array.shape)
            del shape[self.axis if name not in self.pairs else -2]
            said |= {f"the dtype of {name}": str(array.dtype), f"the shape of {name} without its rows": tuple(shape)}
        for name in described(AttentionOptions):
            given = options.get(name)
            if name in OVER_PAIRS:
                said[f"whether {name} is given"] = given is not None
            elif name not in OWN:
                said[name] = None if given is None else np.asarray(given, object)
        return said

    def of_all(self, array, rows):
        """What has the shape that `array` would have with so many rows, and takes no memory."""
        shape = list(array.shape)
        shape[self.axis] = rows
        return np.broadcast_to(np.zeros((), array.dtype), shape)

    # ------------------------------------------------------------------------------------------- one pair of chunks

    def sees_all(self, q, k):
        """Whether all rows of a chunk see all keys of another, and only positions decide which other keys they see."""
        other = self.lengths is not None or self.pairs or self.by_distance
        return not other and self.sight.sees_all(q, k)

    def rows_of(self, array, chunk):
        """The rows of a chunk in an array of this rank."""
        return array[..., chunk.at : chunk.at + chunk.count, :]

    def lse_of(self, lse, chunk):
        return lse[..., chunk.at : chunk.at + chunk.count]

    def blocks(self, array, q, k):
        """Where the pairs of these rows and keys are in an array over pairs of this rank: (indices there, indices in
        that of the two chunks)."""
        rows = slice(q.at, q.at + q.count) if array.shape[-2] != 1 else slice(None)
        columns = slice(k.first, k.first + k.count) if array.shape[-1] != 1 else slice(None)
        return [((..., rows, columns), ...)]

    def between(self, q, k, sinks):
        """The options for these rows and keys alone.  Sinks count once, so only one chunk of keys gets them."""
        options = self.common | self._by_batch(q, k)
        if k.count:
            options |= {name: self._over_pairs(array, q, k) for name, array in self.pairs.items()}
        if sinks and self.sinks is not None:
            options["sinks"] = self.sinks
        return options

    def _by_batch(self, q, k):
        found = {"q_offset": self.offset + (q.first - k.first)}
        if self.lengths is not None:
            found["kv_lengths"] = np.clip(self.lengths - k.first, 0, k.count)
        return found

    def _over_pairs(self, array, q, k):
        return array[self.blocks(array, q, k)[0][0]]

    def attend(self, q, k, key, value, sinks, out):
        """The lse of these rows for these keys, and their result into `out`."""
        options = self.between(q, k, sinks) | {"out": out, "return_lse": True}
        return self._attend(q, k, options, self.rows_of(self.query, q), key, value)[1]

    def _attend(self, q, k, options, *arrays):
        return _core.attention(kernels.default, *arrays, options, ATTENTION)

    def differentiate(self, q, k, key, value, into, grad_out, out, lse, grad_lse):
        """The gradients that these rows and keys have of each other, not rounded; without those of sinks.  Where an
        input was not broadcast, the array for it in `into` is filled and returned."""
        grad_out, query, out = (self.rows_of(x, q) for x in (grad_out, self.query, out))
        lse, grad_lse = (None if x is None else self.lse_of(x, q) for x in (lse, grad_lse))
        arrays = grad_out, query, key, value, out, lse, grad_lse
        return self._differentiate(q, k, self.between(q, k, False), into, *arrays)

    def _differentiate(self, q, k, options, into, *arrays):
        return _core.attention_backward(kernels.default, *arrays, options, ATTENTION_BACKWARD, into)

    def add_to_pairs(self, total, part, q, k):
        """Adds what there is of a gradient over pairs for these rows and keys."""
        for whole, pair in self.blocks(total, q, k):
            more = part[pair]
            total[whole] += more.sum(axis=-2, keepdims=True) if total.shape[-2] == 1 else more

    def gradient_of_sinks(self, out, lse, delta, grad_lse):
        """Of the rows of this rank, float64."""
        given = np.asarray(self.sinks, np.float64)
        return gradients.of_sinks(given, self.sinks_by_head, out, lse, delta, grad_lse, None)
