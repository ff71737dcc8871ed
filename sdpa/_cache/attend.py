"""Attention to the tokens of a KVCache, which lie in its store."""

import numpy as np

from .. import _core
from .._checks import (
    bias_array,
    broadcast,
    flag,
    mask_array,
    per_head,
    sum_dtype,
    whole_numbers,
    window_and_causal,
)
from .._options import ANYWHERE
from .._runtime import kernels

MASK_ELEMENTS = 2**22  # the most elements of a mask that is made here, for some of the queries at a time


# Options whose meaning does not depend on where a token stands.
ALIKE = ANYWHERE | {"causal"}


def attend(store, query, options, known):
    """Attention of `query` to all tokens of `cache`."""
    now = store._now
    count = query.shape[-2] if type(query) is np.ndarray and query.ndim > 1 else -1
    if store.window is None:
        offset = now.aligned[1] if now.aligned is not None and now.aligned[0] == count else None
        return attend_rows(store, query, len(store), now.lengths, offset, options, known)
    seen = store.seen_by_one() if count == 1 and options.keys() <= ALIKE else None
    if seen is not None:
        return attend_rows(store, query, *seen, None, options, known)
    known.check(options)
    return attend_window(store, _core.cached_query(kernels.default, store, query), options, known)


def attend_rows(store, query, rows, lengths, q_offset, options, known):
    """Attention to the first `rows` rows of the arrays, of batch b to lengths[b]."""
    return _core.attend_cache(kernels.default, store, query, rows, lengths, q_offset, options, known)


def attend_window(store, query, options, known):
    """Attention within the window, where slots need not be positions.  It hides tokens ahead of a query in any case."""
    lengths, floors = store.state()
    q_len, window, keep = query.shape[-2], store.window, store.keep
    first, q_offset = placed(q_len, options, lengths, floors, store._now.aligned, window, keep)
    rows = min(len(store), store.bound())
    positions_matter = any(options.get(name) is not None for name in ("mask", "bias", "window", "alibi_slopes"))
    straight = (floors <= keep).all()  # slots are positions
    left, right = window_and_causal(options.pop("window", None), options.pop("causal", True))
    right = 0 if right is None else min(right, 0)
    options["causal"] = False
    if q_len == 1 and not positions_matter and (first == lengths - 1).all():
        seen = store.seen_by_one()
        if seen is not None:
            return attend_rows(store, query, *seen, None, options, known)
    if straight and keep == 0:
        left = window - 1 if left is None else min(left, window - 1)
        options["window"] = left, right
        return attend_rows(store, query, rows, None if store._now.length >= 0 else lengths, q_offset, options, known)
    return attend_masked(store, query, first, rows, left, right, options, known)


def placed(q_len, options, lengths, floors, aligned, window, keep):
    """The position of the first query in each batch; and that if it is not after the last tokens, else None.  It takes
    q_offset from the options."""
    q_offset = options.pop("q_offset", None)
    if q_offset is not None:
        q_offset = whole_numbers("q_offset", q_offset, lengths.shape)
    elif aligned is not None and aligned[0] == q_len:
        q_offset = aligned[1]
    first = lengths - q_len if q_offset is None else q_offset
    missing = (floors > keep) & (np.minimum(first, lengths) - (window or 0) + 1 < floors)
    if q_len and missing.any():
        batch = int(np.argmax(missing))
        raise ValueError(
            f"query has {q_len} rows, the first at position {first[batch]}: the window of {window} begins before "
            f"token {floors[batch]}, which is the oldest that was not dropped; attend right after append"
        )
    return first, q_offset


def attend_masked(store, query, first, rows, left, right, options, known, tokens=None):
    """Attention within the window by a mask of the slots that each query sees, made for some queries at a time.

    tokens : says where the tokens in the slots stand, and which of them a query may see, as a Store does: it has their
        number, the window, `keep`, and `positions`.  Default: the store.
    """
    tokens = store if tokens is None else tokens
    heads, q_len = query.shape[-3] if query.ndim > 2 else 1, query.shape[-2]
    pairs = (store.batch, heads, q_len, len(tokens))
    mask, bias, slopes = (options.pop(name, None) for name in ("mask", "bias", "alibi_slopes"))
    if mask is not None:
        mask = mask_array("mask", mask)
        broadcast("mask", mask, pairs)
    if bias is not None:
        bias = bias_array("bias", bias)
        broadcast("bias", bias, pairs)
    if slopes is not None:
        slopes = per_head("alibi_slopes", slopes, (store.batch,), heads)[..., None, None]
    out, return_lse = options.pop("out", None), flag("return_lse", options.pop("return_lse", False))
    shape = (*query.shape[:-1], store.value_dim)
    inputs = {"query": query, "mask": mask, "bias": bias}
    if out is not None:
        _core.checked_out(out, shape, query, inputs | store._now.memory.arrays)
    else:
        out = np.empty_like(query, shape=shape, subok=False)
    lse = np.empty(query.shape[:-1], sum_dtype(query.dtype))
    position = tokens.positions(rows)[:, None, None, :]  # (B or 1, 1, 1, slots)
    if store._now.length >= 0 and (first == first[0]).all():
        first = first[:1]
    step = max(1, MASK_ELEMENTS // max(1, rows * store.batch * (1 if slopes is None and bias is None else heads)))
    for begin in range(0, q_len, step):
        part = slice(begin, min(begin + step, q_len))
        at = first[:, None, None, None] + np.arange(begin, part.stop)[:, None]  # (B or 1, 1, queries, 1)
        seen = seen_from(at, position, left, right, tokens)
        if mask is not None:
            seen = seen & at_slots(mask, part, position)
        added = None if bias is None else at_slots(bias, part, position)
        if slopes is not None:
            slope = (-slopes * abs(at - position)).astype(lse.dtype)
            added = slope if added is None else slope + added
        of_part = dict(mask=seen, bias=added, return_lse=True, out=out[..., part, :])
        _, lse[..., part] = attend_rows(store, query[..., part, :], rows, None, 0, options | of_part, known)
    return (out, lse) if return_lse else out


def seen_from(at, position, left, right, tokens):
    """Whether a query at position `at` sees the token at `position`, -1 where there is none."""
    seen = position >= 0
    if right is not None:
        seen = seen & (position <= at + right)
    if left is not None:
        seen = seen & (position >= at - left)
    if tokens.window is not None:
        seen = seen & ((position < tokens.keep) | (position > at - tokens.window))
    return seen


def at_slots(array, queries, position):
    """The part of `array`, which broadcasts to (B, H, M, N), for these queries and for the tokens in the slots."""
    array = array[(None,) * (4 - array.ndim)]
    if array.shape[2] != 1:
        array = array[:, :, queries]
    if array.shape[3] == 1:
        return array
    position = np.maximum(position, 0)
    if len(position) == 1:
        return array[..., position[0, 0, 0]]
    array = np.broadcast_to(array, (len(position), *array.shape[1:]))
    return np.take_along_axis(array, position, axis=3)
