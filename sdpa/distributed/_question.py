"""Attention to the tokens that one rank has of a cache that is spread over the ranks."""

import numpy as np

from .. import _core
from .._cache import kv
from .._cache.attend import ALIKE, attend_masked, attend_rows, placed
from .._checks import check_out, flag, float_array, sum_dtype, window_and_causal
from .._options import CacheOptions
from .._options.signatures import described
from .._runtime import kernels
from ._calls import OVER_PAIRS, OWN
from ._layout import FAR
from ._together import Parts, digest_of

SHARED = [name for name in described(CacheOptions) if name not in OWN]  # the options that all ranks give alike
FEW = OWN | {"causal"}  # options with which one query after the last token sees all, and that say nothing else


class Question:
    """One call of `attend`, on one rank."""

    def __init__(self, cache, query, options):
        kv.ATTEND.check(options)
        self.cache, self.given, self.out = cache, options, options.get("out")
        self.query = query = float_array("query", query)
        self.lse_is_asked = flag("return_lse", options.get("return_lse", False))
        self.shape = (*query.shape[:-1], cache.value_dim)
        if self.out is not None:
            inputs = {"query": query} | {name: options.get(name) for name in OVER_PAIRS}
            check_out(self.out, self.shape, query.dtype, inputs | cache._local._store._now.memory.arrays)
        self.parts, sums = cache._parts, sum_dtype(query.dtype)
        if self.parts is None or self.parts.shape != self.shape or self.parts.dtype != sums:
            self.parts = Parts(cache._group, self.shape, sums)
            cache._parts = self.parts if self.parts.small else None

        self.digest = self._digest()

    def _digest(self):
        """The numbers of what `said` has: their hash is the same in all processes."""
        if self.given.keys() <= FEW and self.cache._alike:
            causal = flag("causal", self.given.get("causal", True))
            return hash((*self.query.shape, ord(self.query.dtype.char), int(self.cache._lengths[0]), causal))
        return digest_of(self.said())

    def said(self):
        """{name: value} of what all ranks must give alike.  Of large arrays, this is the shape and the dtype."""
        said = {
            "the function": "attend", "lengths so far": self.cache._lengths.tolist(),
            "the shape of query": self.query.shape, "the dtype of query": self.query.dtype.name,
        }  # fmt: skip
        for name in SHARED:
            given = self.given.get(name)
            if name in OVER_PAIRS and given is not None:
                said[f"the shape and dtype of {name}"] = np.shape(given), np.asarray(given).dtype.name
            elif name not in OVER_PAIRS:
                said[name] = given if given is None else np.asarray(given)
        return said

    def ask(self):
        """Attend to the tokens of this rank."""
        options = self.given | dict(out=self.parts.out, return_lse=True)
        if options.get("threads") is None:
            options["threads"] = self.cache._threads
        if self.cache._group.rank:
            options.pop("sinks", None)  # they count once
        _, self.parts.lse[...] = self._attend(options)

    def answer(self, out, lse):
        """What the call returns for what all ranks have found together."""
        result = self.out
        if result is None and out.dtype == self.query.dtype and self.query.flags.c_contiguous:
            result = out
        else:
            result = np.empty_like(self.query, shape=self.shape, subok=False) if result is None else result
            with np.errstate(over="ignore", invalid="ignore"):
                result[...] = out
        return (result, lse) if self.lse_is_asked else result

    def _attend(self, options):
        cache, query, store = self.cache, self.query, self.cache._local._store
        lengths, q_len, window = cache._lengths, query.shape[-2], cache.window
        slots = min(len(store), store.bound())
        if q_len == 1 and options.keys() <= ALIKE and (window is None or len(cache) <= window):
            options["causal"] = flag("causal", options.get("causal", True)) and False
            return attend_rows(store, query, slots, store._now.lengths, None, options, kv.ATTEND)
        query = _core.cached_query(kernels.default, store, query)
        first, _ = placed(q_len, options, lengths, cache._floors, cache._aligned, window, cache.keep)
        first = first.clip(-FAR, FAR)
        left, right = window_and_causal(options.pop("window", None), options.pop("causal", True))
        if window is not None:
            right = 0 if right is None else min(right, 0)
        left, right = (None if side is None else min(max(side, -FAR), FAR) for side in (left, right))
        options["causal"] = False
        by_position = any(options.get(name) is not None for name in ("mask", "bias", "alibi_slopes"))
        all_seen = left is None and (right is None or (first + right >= lengths - 1).all())
        if window is not None:
            all_seen = all_seen and (first + q_len <= window).all()
        if all_seen and not by_position:
            return attend_rows(store, query, slots, store._now.lengths, None, options, kv.ATTEND)
        return attend_masked(store, query, first, slots, left, right, options, kv.ATTEND, Places(cache))


class Places:
    """Where the tokens in the slots of a rank stand among those of all ranks, for `attend_masked`."""

    def __init__(self, cache):
        self.cache, self.window, self.keep = cache, cache.window, cache.keep

    def __len__(self):
        return len(self.cache)

    def positions(self, rows):
        place = self.cache._local._store.positions(rows)
        return np.where(place < 0, -1, self.cache._blocks.position(place))
