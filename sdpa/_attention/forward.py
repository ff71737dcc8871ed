"""Attention on arrays: the result, the weights, partial results merged, and the function with PyTorch's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._checks import flag, float_array, is_float, plain_array
from .._options import AttentionOptions, InputOptions, takes
from .._runtime import kernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Unpack


ATTENTION = takes("attention", AttentionOptions)


@ATTENTION
def attention(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[AttentionOptions]) -> Any:
    """Softmax-weighted mean of `value`, weighted by how well `query` matches `key`.

    Axes: B batch, H query heads, G key/value heads (H a multiple of G), M queries, N keys, D and E sizes of a key and
    of a value.  Query head h uses key/value head h // (H / G)::

        query : (B, H, M, D)    key : (B, G, N, D)    value : (B, G, N, E)    out : (B, H, M, E)

    Arrays of 3 axes have no B, arrays of 2 axes have neither B nor H.  More leading axes, up to 32 axes in all, are
    batches, and leading axes broadcast.  The dtypes are float16, ml_dtypes.bfloat16, float32 and float64.  Key and
    value may have a narrower dtype than query, but float16 and bfloat16 must not meet in one call.  Sums and softmax
    are float32 at least.  The result has the dtype and the memory layout of query.

    Scores are `scale * (query . key)`, then `softcap * tanh(score / softcap)`, then `+ bias`, then
    `- alibi_slope * |distance|`, then masks.  By default the last query stands at the last key, so that with
    causal=True, M = 2 and N = 4 the queries see these keys::

        1 1 1 0
        1 1 1 1

    Parameters
    ----------
    query, key, value : array
        With the axes above.
    {options}

    Returns
    -------
    out, or (out, lse)
        A query that sees no key gets zeros, and its lse is the sink of its head, or -inf without sinks.  Whatever a
        hidden key holds, NaN included, has no influence.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> key = np.array([[0.0], [np.log(3.0)]])          # weights 1 and 3
    >>> sdpa.attention(np.array([[1.0]]), key, np.array([[8.0], [4.0]]))
    array([[5.]])
    """
    return _core.attention(kernels.default, query, key, value, options, ATTENTION)


ATTENTION_WEIGHTS = takes("attention_weights", InputOptions)


@ATTENTION_WEIGHTS
def attention_weights(query: ArrayLike, key: ArrayLike, **options: Unpack[InputOptions]) -> NDArray[Any]:
    """The probabilities (B, H, M, N) with which `attention` weighs the values.

    These are B * H * M * N numbers, which `attention` itself never holds.  With sinks, a row sums to less than 1.  The
    row of a query that sees no key is 0.

    Parameters
    ----------
    query, key : array
        As for `attention`.
    {options}

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> sdpa.attention_weights(np.array([[1.0]]), np.array([[0.0], [np.log(3.0)]]))
    array([[0.25, 0.75]])
    """
    return _core.attention_weights(kernels.default, query, key, options, ATTENTION_WEIGHTS)


def merge(outs, lses, *, out=None):
    """Join partial results over disjoint keys into the result over all of them.

    Parameters
    ----------
    outs : sequence of arrays (..., M, E)
        The results of the parts.
    lses : sequence of arrays (..., M)
        The log-sum-exp of each part.
    out
        The array to fill and return.  If its dtype is wider than that of the parts, the result is not rounded.

    Returns
    -------
    (out, lse), which can be merged again
        A part that saw no key and has no sink, so that its lse is -inf, has no influence.  Give sinks to one of the
        parts only, no matter to which.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> q, k, v = np.ones((2, 4)), np.ones((6, 4)), np.arange(6.0)[:, None]
    >>> parts = [sdpa.attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 2), slice(2, 6))]
    >>> sdpa.merge(*zip(*parts))[0].round(6).tolist()
    [[2.5], [2.5]]
    """
    return _core.merge(outs, lses, out)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """`attention` with the signature and the meaning of torch.nn.functional.scaled_dot_product_attention.

    Parameters
    ----------
    query, key, value
        NumPy arrays, as for `attention`.
    attn_mask : boolean or floating
        Boolean: where it is True, the query may attend to the key.  Floating: it is added to the scores.  It must be
        None if is_causal is True.
    dropout_p
        Must be 0: this library has no random numbers.
    is_causal
        Query i sees the keys up to i, so that the mask is aligned at the top left.  With M = 2 and N = 4::

            1 0 0 0
            1 1 0 0

    scale
        Factor of the scores.  Default: 1 / sqrt(D).
    enable_gqa
        Must be True where query has more heads than key and value.
    """
    if (type(dropout_p) is not float and np.ndim(dropout_p)) or dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}: dropout is not offered, it must be 0")
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal is True and attn_mask is given: only one of them may be")
    arrays = [
        x if type(x) is np.ndarray else float_array(name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    ]
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in arrays]
    if not heads[0] == heads[1] == heads[2] and not enable_gqa:
        raise ValueError(f"query, key and value have {heads} heads: they must be equal unless enable_gqa is True")
    options = {"scale": scale}
    if is_causal:
        options |= {"causal": True, "q_offset": 0}
    if attn_mask is not None:
        attn_mask = plain_array("attn_mask", attn_mask)
        if attn_mask.dtype != np.bool_ and not is_float(attn_mask.dtype):
            raise TypeError(f"attn_mask has dtype {attn_mask.dtype}: it must be boolean, or floating to be added")
        options["mask" if attn_mask.dtype == np.bool_ else "bias"] = attn_mask
    return _core.attention(kernels.default, *arrays, options, AS_TORCH)


AS_TORCH = ATTENTION._replace(said={"mask": "attn_mask", "bias": "attn_mask"})
