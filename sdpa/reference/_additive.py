"""Additive attention: scores from a layer of tanh over the sum of the projected query and the projected key."""

from typing import Any, NamedTuple

import numpy as np

from .._fields import documented
from ._arrays import arithmetic, cast, deliver, rounded, to_float
from ._attention import align, compare, differentiate, like_results, over_groups, probabilities, reduced, weighted_sum


@documented
class AdditiveGradients(NamedTuple):
    """What `additive_attention_backward` returns: the gradient with respect to each input, in the input's shape.

    Attributes
    ----------
    query, key, value, w_query, w_key, v : array
        The gradient with respect to this input.
    bias, sinks : array, or None if the call had none
        The gradient with respect to this input.
    """

    query: Any
    key: Any
    value: Any
    w_query: Any
    w_key: Any
    v: Any
    bias: Any = None
    sinks: Any = None


def additive_attention(
    query, key, value, w_query, w_key, v, *, mask=None, bias=None, causal=False, window=None, q_offset=None,
    kv_lengths=None, scale=None, softcap=None, sinks=None, alibi_slopes=None,
    return_lse=False, out=None, threads=None, dtype=None,
):  # fmt: skip
    """`attention` with another match between query and key (Bahdanau, Cho and Bengio)::

        score = scale * sum over a of v[a] * tanh((w_query @ query)[a] + (w_key @ key)[a])

    query (B, H, M, D), key (B, G, N, K), value (B, G, N, E); w_query (A, D) or (H, A, D), w_key (A, K) or (G, A, K), v
    (A) or (H, A). scale : 1 by default. All else is as in `attention`. Without features (A = 0) no query sees a key.

    In this example key 0 matches by 2 * tanh(log(2) / 2) = 2 / 3. Key 1 cancels the query and matches by 0:

    >>> import numpy as np
    >>> query, keys, values = np.array([[np.log(2) / 2]]), np.array([[0.0], [-np.log(2) / 2]]), np.eye(2)
    >>> one = np.ones((1, 1))
    >>> additive_attention(query, keys, values, one, one, np.array([2.0]), scale=3 * np.log(3) / 2).round(12)
    array([[0.75, 0.25]])
    """
    x, y, v_heads = project(query, key, w_query, w_key, v, dtype)
    rank = max(map(np.ndim, (query, key, value)))
    x, y, values, leading, _ = align(x, y, to_float("value", value, dtype, axes=4), arithmetic(dtype))
    seen, weight, lse = probabilities(
        x, y, leading, dtype, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=1 if scale is None else scale, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, match=matcher(v_heads),
    )  # fmt: skip
    result = weighted_sum(weight, values, seen)
    inputs = query, key, value, w_query, w_key, v, mask, bias
    result = deliver(result.reshape(result.shape[-rank:]), dtype, out, *inputs)
    return (result, lse.reshape(result.shape[:-1])) if return_lse else result


def additive_attention_backward(
    grad_out, query, key, value, w_query, w_key, v, out, lse, *, grad_lse=None,
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None, dtype=None,
):  # fmt: skip
    """Gradients of `additive_attention`, with the arguments of `attention_backward`.

    Let Z = X + Y, with one number for each pair and feature, X = query w_query^T and Y = key w_key^T. Let dP be the
    gradient with respect to the product, which scores scale and cap::

        product = tanh(Z) v      dZ = dP v (1 - tanh(Z)^2)      dv = sum over the pairs of dP tanh(Z)
        dX = sum over keys of dZ            dquery = dX w_query            dw_query = dX^T query
        dY = sum over queries of dZ         dkey = dY w_key                dw_key = dY^T key

    >>> import numpy as np
    >>> query, keys, values, one = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[8.0], [4.0]]), np.ones((1, 1))
    >>> out, lse = additive_attention(query, keys, values, one, one, np.ones(1), return_lse=True)  # weights 1/2
    >>> additive_attention_backward(np.ones((1, 1)), query, keys, values, one, one, np.ones(1), out, lse).key
    array([[ 1.],
           [-1.]])
    """
    x, y, v_heads = project(query, key, w_query, w_key, v, dtype)
    rank = max(map(np.ndim, (query, key, value)))
    kv_shape = y.shape
    x, y, values, leading, _ = align(x, y, to_float("value", value, dtype, axes=4), arithmetic(dtype))
    shape = (*leading, *x.shape[-3:-1], values.shape[-1])
    grad_out, out, lse, grad_lse = like_results(grad_out, out, lse, grad_lse, shape, rank, dtype)
    compared = compare(
        x, y, leading, dtype, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=1 if scale is None else scale, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, match=matcher(v_heads),
    )  # fmt: skip
    seen, weight, grad_score, grad_product, grad_sink = differentiate(
        grad_out, out, lse, grad_lse, values, *compared, dtype=dtype
    )
    grad_value = weighted_sum(weight.swapaxes(-1, -2), grad_out, seen.swapaxes(-1, -2))

    with np.errstate(invalid="ignore", over="ignore"):
        bent = np.where(seen[..., None], np.tanh(summed(x, y)), 0)
        grad_v = (grad_product[..., None] * bent).sum(axis=(-3, -2))
        grad_z = np.where(seen[..., None], grad_product[..., None] * v_heads * (1 - bent * bent), 0)
    grad_x, grad_y = grad_z.sum(axis=-2), over_groups(grad_z.sum(axis=-3), kv_shape)
    seen_keys = over_groups(seen.any(axis=-2)[..., None], (*kv_shape[:-1], 1))[..., 0] > 0
    grad_query, grad_w_query = through(grad_x, seen.any(axis=-1), query, w_query, dtype)
    grad_key, grad_w_key = through(grad_y, seen_keys, key, w_key, dtype)
    return AdditiveGradients(
        grad_query,
        grad_key,
        cast(reduced(over_groups(grad_value, np.shape(value)), np.shape(value)), dtype),
        grad_w_query,
        grad_w_key,
        cast(reduced(grad_v, np.shape(v)), dtype),
        None if bias is None else cast(reduced(grad_score, np.shape(bias)), dtype),
        None if sinks is None else cast(reduced(grad_sink.sum(axis=(-2, -1)), np.shape(sinks)), dtype),
    )


def project(query, key, w_query, w_key, v, dtype):
    """The projections (..., H, M, A) and (..., G, N, A), and v as (1, 1, A) or (H, 1, 1, A)."""
    x, y = projected("query", query, w_query, dtype), projected("key", key, w_key, dtype)
    v = to_float("v", v, dtype)
    heads, features = x.shape[-3], x.shape[-1]
    if v.shape not in ((features,), (heads, features)) or y.shape[-1] != features:
        raise ValueError(
            f"w_query has shape {np.shape(w_query)}, w_key {np.shape(w_key)} and v {v.shape}: "
            f"they must be (A, D) or (H, A, D), (A, K) or (G, A, K), and (A) or (H, A)"
        )
    return x, y, v[..., None, None, :]


def projected(name, array, weight, dtype):
    array, weight = to_float(name, array, dtype, axes=4), to_float(f"w_{name}", weight, dtype)
    heads, size = array.shape[-3], array.shape[-1]
    if weight.ndim not in (2, 3) or weight.shape[-1] != size or (weight.ndim == 3 and len(weight) != heads):
        raise ValueError(
            f"w_{name} has shape {weight.shape} and {name} {array.shape}: "
            f"it must be (A, {size}), or with one for each head ({heads}, A, {size})"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        return array @ weight.swapaxes(-1, -2)


def summed(x, y):
    """The sum of every query and every key, (..., H, M, N, A)."""
    return x[..., :, None, :] + y[..., None, :, :]


def matcher(v):
    return lambda x, y: (np.tanh(summed(x, y)) * v).sum(axis=-1)


def through(grad, seen, array, weight, dtype):
    """The gradients with respect to `array` and its `weight`, from the gradient with respect to their product. Rows
    that are not `seen` may hold anything."""
    array_shape, weight_shape = np.shape(array), np.shape(weight)
    array, weight = to_float("", array, dtype, axes=4), to_float("", weight, dtype)
    grad = rounded(grad, arithmetic(dtype))
    by_array = np.where(seen[..., None], grad @ weight, 0)
    by_weight = weighted_sum(grad.swapaxes(-1, -2), array, seen[..., None, :])
    return cast(reduced(by_array, array_shape), dtype), cast(reduced(by_weight, weight_shape), dtype)
