"""Attention to the tokens of a KVCache."""

import numpy as np

from . import _kernels
from ._cache_files import ARRAYS
from ._forward import attention
from ._problem import (
    Problem,
    _four_axes,
    _per_head,
    _window,
    broadcast_bias,
    broadcast_mask,
    check_out,
    flag,
    sum_dtype,
)

MASK_ELEMENTS = 2**22  # of a mask made here for some of the queries at a time


def attend_rows(cache, query, rows, kv_lengths, q_offset, options):
    """Attention to the first `rows` rows of the arrays."""
    index = (0,) * (4 - query.ndim)
    arrays = [array[:, :, :rows][index] for array in cache._now.arrays]
    if kv_lengths is not None:
        options["kv_lengths"] = kv_lengths
    if len(arrays) == 4:
        return attend_int8(query, *arrays, cache.group, q_offset=q_offset, **options)
    return attention(query, *arrays, q_offset=q_offset, **options)


def attend_window(cache, query, q_offset, options):
    """Attention within the window, where slots need not be positions; it hides what is ahead in any case."""
    lengths, floors = cache.state()
    q_len, window, keep = query.shape[-2], cache.window, cache.keep
    first = lengths - q_len if q_offset is None else q_offset
    missing = (floors > keep) & (np.minimum(first, lengths) - window + 1 < floors)
    if q_len and missing.any():
        batch = int(np.argmax(missing))
        raise ValueError(
            f"query has {q_len} rows, the first at position {first[batch]}: the window of {window} begins before "
            f"token {floors[batch]}, which is the oldest that was not dropped; attend right after append"
        )
    rows = min(len(cache), cache.bound())
    positions_matter = any(options[name] is not None for name in ("mask", "bias", "window", "alibi_slopes"))
    straight = (floors <= keep).all()  # slots are positions
    left, right = _window(options["window"], options["causal"])
    options["window"], options["causal"] = None, False
    if q_len == 1 and not positions_matter and (first == lengths - 1).all():
        level = (lengths <= keep + window) & (floors <= keep)
        full = (lengths - floors == cache._now.ring) & (cache._now.ring == window)
        if (level | full).all():  # the query sees all that is there
            there = None if cache._now.length >= 0 else np.minimum(lengths, rows)
            return attend_rows(cache, query, rows, there, None, options)
    if straight and keep == 0:
        left = window - 1 if left is None else min(left, window - 1)
        options["window"] = left, 0 if right is None else min(right, 0)
        return attend_rows(cache, query, rows, None if cache._now.length >= 0 else lengths, q_offset, options)
    return attend_masked(cache, query, first, rows, left, right, options)


def attend_masked(cache, query, first, rows, left, right, options):
    """The same with a mask that says which slot each query sees, made for some queries at a time."""
    heads, q_len = query.shape[-3] if query.ndim > 2 else 1, query.shape[-2]
    pairs = (cache.batch, heads, q_len, len(cache))
    mask, bias, slopes = (options.pop(name) for name in ("mask", "bias", "alibi_slopes"))
    if mask is not None:
        mask, _ = broadcast_mask(mask, pairs)
    if bias is not None:
        bias, _ = broadcast_bias(bias, pairs)
    if slopes is not None:
        slopes = _per_head("alibi_slopes", slopes, (cache.batch,), heads)[..., None, None]
    out, return_lse = options.pop("out"), flag("return_lse", options.pop("return_lse"))
    shape = (*query.shape[:-1], cache.value_dim)
    inputs = {"query": query, "mask": mask, "bias": bias}
    if out is not None:
        check_out(out, shape, query.dtype, inputs | dict(zip(ARRAYS, cache._now.arrays)))
    else:
        out = np.empty_like(query, shape=shape, subok=False)
    lse = np.empty(query.shape[:-1], sum_dtype(query.dtype))
    position = cache.positions(rows)[:, None, None, :]  # (B or 1, 1, 1, slots)
    if cache._now.length >= 0 and (first == first[0]).all():
        first = first[:1]
    step = max(1, MASK_ELEMENTS // max(1, rows * cache.batch * (1 if slopes is None and bias is None else heads)))
    for begin in range(0, q_len, step):
        part = slice(begin, min(begin + step, q_len))
        at = first[:, None, None, None] + np.arange(begin, part.stop)[:, None]  # (B or 1, 1, queries, 1)
        seen = (position >= 0) & (position <= at) & ((position < cache.keep) | (position > at - cache.window))
        if left is not None:
            seen &= position >= at - left
        if right is not None:
            seen &= position <= at + right
        if mask is not None:
            seen = seen & at_slots(mask, part, position)
        added = None if bias is None else at_slots(bias, part, position)
        if slopes is not None:
            slope = (-slopes * abs(at - position)).astype(lse.dtype)
            added = slope if added is None else slope + added
        of_part = dict(mask=seen, bias=added, return_lse=True, out=out[..., part, :])
        _, lse[..., part] = attend_rows(cache, query[..., part, :], rows, None, 0, options | of_part)
    return (out, lse) if return_lse else out


def attend_int8(query, key, value, key_scales, value_scales, group, *, out, return_lse, **options):
    """Attention to keys and values in int8, which the kernels multiply by their scales as they read them."""
    zero = np.zeros((), query.dtype)  # all checks are as if they had the dtype of query
    problem = Problem(query, np.broadcast_to(zero, key.shape), np.broadcast_to(zero, value.shape), **options)
    problem.key, problem.value, key_scales, value_scales = map(_four_axes, (key, value, key_scales, value_scales))
    return problem.result(
        _kernels.default, out, return_lse, key_scale=key_scales, value_scale=value_scales, group=group
    )


def at_slots(array, queries, position):
    """What `array`, which broadcasts to (B, H, M, N), has for these queries and for the tokens of the slots."""
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
