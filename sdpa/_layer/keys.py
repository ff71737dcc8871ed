"""The keys and values that a layer attends to: those of the call alone, or a cache to which the call appends.

Each of the three classes has

    causal                 the default of that option
    before                 how many tokens there were before the call: an int, or one for each batch
    total(count)           how many there are with the `count` rows of the call: an int, or one for each batch
    places(first, count)   the positions of `count` rows, the first at `first`, as `rotary` takes them
    undo()                 takes back what `append` did, for a call that fails
"""

import numpy as np

from .._attention.forward import attention, attention_weights
from .._cache import kv, paged
from .._cache.kv import KVCache
from .._cache.paged import PagedKVCache
from .._checks import lengths_of, may_attend, rows_of, whole_numbers


def keys_for(cache, sequences, cu_seqlens, *, x, context, kv_lengths, layer):
    """The keys that the arguments of a call mean.  x is (B, M, embed_dim); context is (B, N, kdim), or None in
    self-attention."""
    if not isinstance(cache, PagedKVCache):
        for name, given in ("sequences", sequences), ("cu_seqlens", cu_seqlens):
            if given is not None:
                raise ValueError(f"{name} is {given!r}: without a PagedKVCache as cache it must be None")
    own = context is None
    if kv_lengths is not None and not isinstance(cache, PagedKVCache):
        kv_lengths = lengths_of(kv_lengths, (len(x),), (x if own else context).shape[1])
    if cache is None:
        return CallKeys(own, kv_lengths, len(x))
    if not isinstance(cache, (KVCache, PagedKVCache)):
        raise TypeError(f"cache is of type {type(cache).__name__}: it must be a KVCache or PagedKVCache, or None")
    sizes = cache.kv_heads, cache.head_dim, cache.value_dim
    wanted = layer.kv_heads, layer.head_dim, layer.value_dim
    if sizes != wanted:
        raise ValueError(
            f"cache has kv_heads, head_dim and value_dim {sizes}: they must be those of the layer, {wanted}"
        )
    if not may_attend(x.dtype, cache.dtype):
        raise TypeError(f"cache has dtype {cache.dtype} and x {x.dtype}: it must be that of x, or a narrower one")
    if isinstance(cache, PagedKVCache):
        return PagedKeys(cache, sequences, cu_seqlens, x.shape[1], own, kv_lengths)
    if len(x) != cache.batch:
        raise ValueError(f"x has a batch of {len(x)} and cache one of {cache.batch}: they must be equal")
    return CachedKeys(cache, own, kv_lengths)


def _places(first, count, batch):
    """Positions of `count` rows: the position of the first row if all batches share it, else (B, count)."""
    if type(first) is int:
        return first
    first = whole_numbers("q_offset", first, (batch,))
    if not first.size or (first == first[0]).all():
        return int(first[0]) if first.size else 0
    return first[:, None] + np.arange(count)


class CallKeys:
    """The keys of the call alone."""

    causal, before = False, 0

    def __init__(self, own, kv_lengths, batch):
        self.own, self.kv_lengths, self.batch = own, kv_lengths, batch

    def places(self, first, count):
        return _places(first, count, self.batch)

    def append(self, key, value):
        self.key, self.value = key, value

    def undo(self):
        pass

    def total(self, count):
        return count if self.kv_lengths is None else self.kv_lengths

    def attend(self, query, options):
        return attention(query, self.key, self.value, **self._placed(options))

    def check_weights(self):
        pass

    def weights(self, query, options):
        return attention_weights(query, self.key, **self._placed(options))

    def _placed(self, options):
        if self.kv_lengths is None:
            return options
        if self.own and options.get("q_offset") is None:
            options = options | {"q_offset": 0}  # row i of x is query i and key i, whatever the padding
        return options | {"kv_lengths": self.kv_lengths}


class CachedKeys:
    """The keys in a KVCache, to which the call appends its own."""

    def __init__(self, cache, own, kv_lengths):
        self.cache, self.own, self.kv_lengths = cache, own, kv_lengths
        self.causal = own
        self.before = kv.next_position(cache)

    def places(self, first, count):
        return _places(first, count, self.cache.batch)

    def append(self, key, value):
        if len(key) != self.cache.batch or len(value) != self.cache.batch:
            key, value = (np.broadcast_to(x, (self.cache.batch, *x.shape[1:])) for x in (key, value))
        count = key.shape[2] if self.kv_lengths is None else int(self.kv_lengths.max())
        self.snapshot = kv.snapshot(self.cache, count)
        self.cache.append(key, value, self.kv_lengths)

    def undo(self):
        kv.restore(self.cache, self.snapshot)

    def total(self, count):
        return self.before + (count if self.kv_lengths is None else self.kv_lengths)

    def attend(self, query, options):
        return self.cache.attend(query, **self._placed(query, options))

    def check_weights(self):
        if self.cache.window is not None or self.cache.dtype == np.int8:
            raise ValueError(f"return_weights is True and cache {self.cache}: it must have no window and not be int8")

    def weights(self, query, options):
        options = {"q_offset": self.cache.lengths - query.shape[-2]} | self._placed(query, options)
        return attention_weights(query, self.cache.keys, **options, kv_lengths=self.cache.lengths)

    def _placed(self, query, options):
        if self.kv_lengths is None or options.get("q_offset") is not None:
            return options
        return options | {"q_offset": self.before if self.own else self.cache.lengths - query.shape[-2]}


class PagedKeys:
    """The keys of sequences in a PagedKVCache, to which the call appends; rows are packed, (1, heads, T, D)."""

    causal = True

    def __init__(self, cache, sequences, cu_seqlens, rows, own, kv_lengths):
        if sequences is None:
            raise ValueError(
                "sequences is None: with a PagedKVCache it must be one of its sequences, or a list of them"
            )
        if not own:
            raise ValueError("context is given: with a PagedKVCache it must be None")
        if kv_lengths is not None:
            raise ValueError(f"kv_lengths is {kv_lengths}: with a PagedKVCache it must be None")
        self.cache = cache
        one, self.sequences, states = paged.find_all(cache, sequences)
        begins = rows_of("cu_seqlens", cu_seqlens, "x", rows, len(states), one)
        self.counts = np.diff(begins)
        self.within = np.arange(rows) - np.repeat(begins[:-1], self.counts)
        self.begins = None if (self.counts == 1).all() else begins  # the default, which has a shorter way
        self.states = states
        self.before = np.array([state.length for state in states], np.int64)

    def places(self, first, count):
        return np.repeat(whole_numbers("q_offset", first, self.before.shape), self.counts) + self.within

    def append(self, key, value):
        self.snapshot = paged.snapshot(self.cache, self.states)
        self.cache.append(self.sequences, key[0].swapaxes(0, 1), value[0].swapaxes(0, 1), self.begins)

    def undo(self):
        paged.restore(self.cache, self.states, self.snapshot)

    def attend(self, query, options):
        result = self.cache.attend(query[0].swapaxes(0, 1), self.sequences, cu_seqlens_q=self.begins, **options)
        if "return_lse" in options:
            return result[0].swapaxes(0, 1)[None], result[1].T[None]
        return result.swapaxes(0, 1)[None]

    def check_weights(self):
        raise ValueError("return_weights is True and cache a PagedKVCache: with that it must be False")
