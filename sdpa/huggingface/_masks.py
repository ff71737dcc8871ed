"""Masks as transformers asks for them, without their numbers: who sees whom as lengths, windows and offsets."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import masking_utils

from ._lazy import Lazy
from ._patterns import Pattern, least, pattern_of


def mask(
    batch_size: int, q_length: int = 0, kv_length: int = 0, q_offset=0, kv_offset=0, *,
    cache_position: Tensor | None = None, mask_function=masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None, allow_is_bidirectional_skip: bool = False, **kwargs,
) -> Tensor | None:  # fmt: skip
    """The mask function that transformers calls once for each kind of layers: it returns a lazy mask where lengths,
    windows and offsets say the same, and else the boolean mask of transformers."""
    given: dict[str, Any] = dict(
        batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask,
    )  # fmt: skip
    if cache_position is not None:  # until transformers 5.2
        given["cache_position"] = cache_position
        q_length = cache_position.shape[0]
    else:
        given |= dict(q_length=q_length, q_offset=q_offset)
    skips = dict(allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs)
    boolean = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    pattern = None if traced(attention_mask) else pattern_of(mask_function)
    if pattern is None:
        return boolean(**given, **skips)
    # A static cache counts in a tensor, which changes before the mask is read.
    first = q_offset if cache_position is None else cache_position[0] if q_length else 0
    if cache_position is None:
        given["q_offset"] = first = int(first)
    else:
        given["cache_position"] = torch.arange(first := int(first), first + q_length)
    seen = Seen(batch_size, q_length, kv_length, first, int(kv_offset), pattern, attention_mask)
    if allow_is_bidirectional_skip and seen.everything():
        return None
    make = partial(boolean, **given, **skips | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))
    if q_length == 1 and not kwargs.get("allow_is_causal_skip", True):  # for one token of a cache made for compiling,
        row = make()  # and a graph takes plain tensors only
        row._seen_keys = seen
        return row
    return Lazy((batch_size, 1, q_length, kv_length), torch.bool, seen, make)


def seen_by(mask: Tensor | None) -> Seen | None:
    """What a mask that was made here is about."""
    if mask is None or torch.compiler.is_compiling():
        return None
    return mask.about if type(mask) is Lazy else getattr(mask, "_seen_keys", None)


def traced(padding: Tensor | None) -> bool:
    """Whether a graph is being recorded, in which numbers are not known; or they are not at hand."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return padding is not None and (
        isinstance(padding, FakeTensor) or padding.device.type != "cpu" or padding.ndim != 2
    )


class Seen:
    """Which of the keys, from position `first_key` on, the queries, from position `first_query` on, see: those of the
    pattern that are not padding."""

    __slots__ = ("_options", "batch", "first_key", "first_query", "keys", "padding", "pattern", "queries")

    def __init__(self, batch, queries, keys, first_query, first_key, pattern: Pattern, padding: Tensor | None):
        self.batch, self.queries, self.keys, self.pattern = batch, queries, keys, pattern
        self.first_query, self.first_key = first_query, first_key
        self._options: dict[int, dict[str, Any]] = {}
        self.padding = None if padding is None else self._without_what_none_sees(padding.numpy())

    def _without_what_none_sees(self, real):
        """Whether each token up to the last that a query sees is one, (B, ...), or None where all of them are."""
        stop = self.first_key + self.keys
        if self.pattern.right is not None:
            stop = min(stop, self.first_query + self.queries + self.pattern.right)
        if real.shape[1] < stop:
            real = np.pad(real, ((0, 0), (0, stop - real.shape[1])))
        real = real[:, :stop].astype(bool, copy=False)
        return None if real.all() else real

    def everything(self) -> bool:
        return self.padding is None and self.pattern == Pattern()

    def window(self) -> dict[str, Any]:
        """The option of the pattern within a chunk or a sequence."""
        return {"window": (self.pattern.left, self.pattern.right)}

    def bounded(self) -> bool:
        """Whether the pattern follows from one offset for all queries: not where sequences are packed, and where
        queries are in different chunks."""
        if self.pattern.packed is not None:
            return False
        if self.pattern.chunk is None:
            return True
        size, padding = self.pattern.chunk
        last = self.first_query + self.queries - 1
        return bool(((self.first_query - padding) // size == (last - padding) // size).all())

    def options(self, origin: int | None = None) -> dict[str, Any]:
        """The options of `attention` to keys from position `origin` on, by default those of the mask, if the pattern is
        bounded."""
        origin = self.first_key if origin is None else origin
        if origin not in self._options:
            self._options[origin] = self._options_from(origin)
        return self._options[origin]

    def _options_from(self, origin):
        left, real = self.pattern.left, self.padding
        keys = self.first_key + self.keys - origin
        if self.pattern.chunk is not None:
            size, padding = self.pattern.chunk
            start = ((self.first_query - padding) // size * size + padding).numpy()
            if (start <= origin).all():
                pass
            elif self.queries == 1 and (start == start[0]).all():
                left = least(left, self.first_query - int(start[0]))
            else:
                ours = np.arange(origin + keys) >= start[:, None]
                real = ours if real is None else ours[:, : real.shape[1]] & real
        options = {"window": (left, self.pattern.right), "q_offset": self.first_query - origin}
        real = None if real is None else real[:, origin:]
        if real is None or real.all():
            return options
        lengths = real.sum(1)
        if (real == (np.arange(real.shape[1]) < lengths[:, None])).all():
            if len(lengths) != self.batch:
                lengths = np.repeat(lengths, self.batch)
            return options | {"kv_lengths": lengths}
        return options | {"mask": np.pad(real, ((0, 0), (0, keys - real.shape[1])))[:, None, None, :]}

    def sequences(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Where the queries and the keys of sequences that see nothing of one another begin and end, if all batches are
        packed into one; None if padding is between them."""
        if self.pattern.packed is not None:
            return self._packed()
        return self._chunks()

    def _packed(self):
        if self.padding is not None or self.queries != self.keys:
            return None
        number = self.pattern.packed.expand(self.batch, -1).numpy()
        begins = np.ones(number.shape, bool)
        begins[:, 1:] = number[:, 1:] != number[:, :-1]
        starts = np.append(np.flatnonzero(begins), number.size)
        return starts, starts

    def _chunks(self):
        size, padding = self.pattern.chunk
        padding = np.broadcast_to(padding.numpy(), (self.batch,))
        if self.padding is not None:
            at = np.arange(self.padding.shape[1])
            end = at.size - self.padding[:, ::-1].argmax(1)[:, None]  # only padding sees padding on the right
            if (self.padding != ((at >= padding[:, None]) & (at < end))).any():
                return None
        first, last = self.first_query, self.first_query + self.queries - 1
        query_starts, key_starts = [0], [0]
        for batch, shift in enumerate(padding.tolist()):
            begin = (first - shift) // size * size + shift
            starts = np.arange(begin, last + 1, size)
            # Before and after the keys of these chunks come some that no query sees.
            at_query = np.concatenate([np.maximum(starts - first, 0), [self.queries, self.queries]])
            at_key = np.concatenate([np.maximum(starts, self.first_key), [last + 1, self.first_key + self.keys]])
            query_starts.append(batch * self.queries + at_query)
            key_starts.append(batch * self.keys + at_key - self.first_key)
        return np.hstack(query_starts), np.hstack(key_starts)
