"""A call of a layer: checks of its inputs, heads, rotary embedding, and attention with the extra keys."""

import numpy as np

from .. import _core
from .._attention.forward import attention, attention_weights, merge
from .._cache.paged import PagedKVCache
from .._options import ANYWHERE
from .linear import Linear
from .parts import joined, residual_or_none
from .rotary import LIMIT, turn


def inputs(layer, x, context, value_context, cache):
    """x, context and value_context as (B, rows, size), or None if not given; and whether x had the axis B."""
    if value_context is not None and context is None:
        raise ValueError("value_context is given and context is None: it must be given too")
    x = _rows("x", x, layer.embed_dim)
    batched = x.ndim == 3
    if batched and isinstance(cache, PagedKVCache):
        raise ValueError(f"x has shape {x.shape}: with a PagedKVCache it must be (rows, {layer.embed_dim})")
    turned = batched and not layer.batch_first
    if context is None:
        _widths_match(layer, "context", layer.embed_dim, layer.kdim, layer.vdim)
        return x.swapaxes(0, 1) if turned else x if batched else x[None], None, None, batched
    given = [x, _rows("context", context, layer.kdim)]
    if value_context is None:
        _widths_match(layer, "value_context", layer.kdim, layer.vdim)
    else:
        given.append(_rows("value_context", value_context, layer.vdim))
    x, *others = (
        rows[None] if rows.ndim == 2 else rows if layer.batch_first else rows.swapaxes(0, 1) for rows in given
    )
    for name, rows in zip(("context", "value_context"), others):
        if rows.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {rows.dtype} and x {x.dtype}: they must be equal")
        if len(rows) not in (1, len(x)):
            raise ValueError(f"{name} has a batch of {len(rows)} and x one of {len(x)}: it must be the same, or 1")
    if others[0].shape[:2] != others[-1].shape[:2]:
        (batch, count), (value_batch, value_count) = (rows.shape[:2] for rows in others)
        raise ValueError(
            f"context has {count} rows in a batch of {batch} and value_context {value_count} in one of {value_batch}: "
            "they must be equal"
        )
    return x, others[0], others[1] if len(others) == 2 else None, batched


def _rows(name, given, size):
    rows = _core.float_array(name, given, 0)
    if rows.ndim not in (2, 3) or rows.shape[-1] != size:
        raise ValueError(f"{name} has shape {rows.shape}: it must have two or three axes, the last one of {size}")
    return rows


def _widths_match(layer, name, *widths):
    if any(width != widths[0] for width in widths):
        raise ValueError(
            f"{name} is None, and embed_dim, kdim and vdim are {layer.embed_dim}, {layer.kdim}, {layer.vdim}: "
            "it must be given"
        )


def check_positions(layer, positions, x):
    if positions is None:
        return
    if layer._turns is None:
        raise ValueError(f"positions is {positions!r}: without rotary it must be None")
    shape, (batch, count, _) = np.shape(positions), x.shape
    if shape not in ((), (count,), (1, count), (batch, count)):
        raise ValueError(
            f"positions has shape {shape}: it must be a number, or have shape ({count},) or ({batch}, {count})"
        )


def residual_rows(layer, given, x, batched):
    """What is added to the result, (B, M, out_dim), or None."""
    batch, count, _ = x.shape
    shape = (count, layer.out_dim) if not batched else (batch, count, layer.out_dim)
    if batched and not layer.batch_first:
        shape = (count, batch, layer.out_dim)
    rows = residual_or_none(given, shape)
    if rows is None or (batched and layer.batch_first):
        return rows
    return rows.swapaxes(0, 1) if batched else rows[None]


def heads(layer, x, context, value_context, threads):
    """Query (B, H, M, D), key (B, G, N, D) and value (B, G, N, E), as views of the results of the projections."""
    if context is None:
        return _project(layer, 0, 3, x, threads)
    query = _project(layer, 0, 1, x, threads)
    if value_context is None:
        return query + _project(layer, 1, 3, context, threads)
    return query + _project(layer, 1, 2, context, threads) + _project(layer, 2, 3, value_context, threads)


def _project(layer, first, last, rows, threads):
    """Projections of `rows`, (B, heads, rows, size): those of query, key and value (0, 1, 2) from `first` to `last`."""
    linear = layer._in.get((first, last))
    if linear is None:
        linear = layer._in[first, last] = _linear(layer, first, last)
    result = linear.apply(rows, threads)
    begin = layer._ends[first]
    return [_core.split_heads(result, at - begin, count, size) for at, count, size in layer._heads[first:last]]


def _linear(layer, first, last):
    rows = slice(layer._ends[first], layer._ends[last])
    if layer.in_proj_weight is not None:
        weight = layer.in_proj_weight[rows]
    else:
        weight = joined([layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight][first:last])
    return Linear(weight, None if layer.in_proj_bias is None else layer.in_proj_bias[rows])


def turn_heads(layer, query, key, place, own, positions, q_offset, threads):
    """Rotary embedding in place.  `own` is True in self-attention.  Returns the keys: if all batches share a context
    but not its positions, these are more keys than before."""
    count, key_count = query.shape[2], key.shape[2]
    at_key = place.places(place.before, key_count)
    if positions is not None:
        at = positions
        at_key = positions if own else at_key
    elif q_offset is not None:
        at = place.places(q_offset, count)
        if np.min(at, initial=0) <= -LIMIT or np.max(at, initial=0) >= LIMIT - count:
            raise ValueError(f"q_offset is {q_offset}: with rotary it must be above -2**53 and below 2**53 - {count}")
    else:
        at = at_key if own else place.places(place.total(key_count) - count, count)
    if np.ndim(at_key) == 2 and len(key) < len(at_key):  # its keys have other positions in each batch
        key = np.repeat(key, len(at_key), axis=0)
    turn(query, at, *layer._turns, threads)
    return turn(key, at_key, *layer._turns, threads)


def attend(query, place, extra, return_weights, options):
    """The result (B, H, M, E), and the weights (B, H, M, N) or None."""
    if extra is None:
        out = place.attend(query, options)
        return out, place.weights(query, options) if return_weights else None
    # The extra keys are a part of their own, to which no mask applies.  Its rows always see keys: it takes the sinks.
    with np.errstate(all="ignore"):
        key, value = (rows.astype(query.dtype) for rows in extra)
    of_extra = {name: given for name, given in options.items() if name in ANYWHERE}
    options = {name: given for name, given in options.items() if name != "sinks"}
    out, lse = place.attend(query, options | {"return_lse": True})
    extra_out, extra_lse = attention(query, key, value, return_lse=True, **of_extra)
    weights = None
    merged, both = merge([out, extra_out], [lse, extra_lse])
    if return_weights:
        parts = (place.weights(query, options), lse), (attention_weights(query, key, **of_extra), extra_lse)
        weights = np.concatenate([_share(*part, both) for part in parts], axis=-1)
    return merged, weights


def _share(weights, lse, both):
    with np.errstate(all="ignore"):
        share = np.where(np.isneginf(lse), 0, np.exp(lse - both))  # both may be -inf
        return (weights * share[..., None]).astype(weights.dtype)
