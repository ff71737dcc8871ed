"""Additive attention: the checks of its weights, its projections, and the call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._checks import plain_array, sum_dtype
from .._layer.linear import Linear
from .._layer.parts import weight_array
from .._options import WORDS, AttentionOptions, takes
from .._runtime import kernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


ADDITIVE_ATTENTION = takes("additive_attention", AttentionOptions, WORDS | {"scale": "1"})


@ADDITIVE_ATTENTION
def additive_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, w_query: ArrayLike, w_key: ArrayLike, v: ArrayLike,
    **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """`attention` with a small network in place of the product of query and key (Bahdanau, Cho and Bengio)::

        score = scale * sum over a of v[a] * tanh((w_query @ query)[a] + (w_key @ key)[a])

    The axes are those of `attention`.  The network has A features, and K, the size of a key, may differ from D, the
    size of a query::

        query : (B, H, M, D)    key : (B, G, N, K)    value : (B, G, N, E)    out : (B, H, M, E)

    Parameters
    ----------
    query, key, value : array
        With the axes above.
    w_query : (A, D), or one for each head, (H, A, D)
    w_key : (A, K), or one for each key/value head, (G, A, K)
    v : (A), or one for each head, (H, A)
        Its numbers must be finite.
    {options}

    Notes
    -----
    The weights w_query, w_key and v are float16, bfloat16, float32 or float64.  They are rounded to the dtype of the
    sums, which is float64 for a float64 query and float32 for all others.  The projections have that dtype too, and
    take A numbers for each query and each key.  Dtypes and results are those of `attention`.  If A is 0, no query sees
    a key.

    In this example the score of key 0 is scale * 2 * tanh(log(2) / 2) = log(3).  Key 1 cancels the query, so that its
    score is 0, and the weights are as 3 to 1.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key, value = np.array([[np.log(2) / 2]]), np.array([[0.0], [-np.log(2) / 2]]), np.array([[8.0], [4.0]])
    >>> one, scale = np.ones((1, 1)), 3 / 2 * np.log(3)
    >>> sdpa.additive_attention(query, key, value, one, one, np.array([2.0]), scale=scale).round(12)
    array([[7.]])
    """
    given = plain_array("v", v)
    features = given.shape[-1] if given.ndim else 0
    if options.get("scale") is None:
        options["scale"] = 1.0
    call = _core.additive_call(
        kernels.default, query, key, value, features, options, ADDITIVE_ATTENTION
    )  # fmt: skip
    weights = _weight("v", given, (call.heads, None), "A", "H, A")
    w_query = _weight("w_query", w_query, (call.heads, features, call.query.shape[-1]), "A, D", "H, A, D")
    w_key = _weight("w_key", w_key, (call.kv_heads, features, call.key.shape[-1]), "A, K", "G, A, K")
    if not np.isfinite(weights).all():
        raise ValueError(f"v is {given}: it must be finite")
    call.beside = {"w_query": w_query, "w_key": w_key, "v": weights}
    dtype = sum_dtype(call.query.dtype)
    scale, below_2 = _normalised(call.scale, np.broadcast_to(weights, (call.heads, features)))
    projected_query = _project(call.query, w_query, call.threads, dtype)
    call.project(projected_query, _project(call.key, w_key, call.threads, dtype), scale, below_2)
    return call.attend()


def _project(array, weight, threads, dtype):
    """(..., heads, rows, A) of (..., heads, rows, D)."""
    if weight.ndim == 2:
        return Linear(weight).apply(array, threads, dtype)
    array = array[(None,) * (3 - array.ndim)]
    each = [Linear(w).apply(array[..., head, :, :], threads, dtype) for head, w in enumerate(weight)]
    return np.stack(each, axis=-3) if each else np.empty((*array.shape[:-1], weight.shape[-2]), dtype)


def _weight(name, given, shape, axes, axes_by_head):
    """Of `shape`, or without its first axis, the heads."""
    array = plain_array(name, given)
    if array.ndim == len(shape):
        return weight_array(name, array, shape, f"({axes_by_head})")
    return weight_array(name, array, shape[1:], f"({axes}), or ({axes_by_head}) with one for each of {shape[0]} heads")


def _normalised(scale, v):
    """A scale and a v below 2 that give the same scores, so that no product with v overflows."""
    v = v.astype(np.float64)
    largest = np.abs(v).max(initial=0)
    power = math.frexp(largest)[1] - 1
    return scale * 2.0**power, np.ascontiguousarray(np.ldexp(v, -power))
