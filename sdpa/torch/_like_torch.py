"""torch.nn.functional.scaled_dot_product_attention by this library."""

from __future__ import annotations

import threading
import warnings

import torch
from torch import Tensor

from .._attention.forward import AS_TORCH as LIKE_TORCH
from ._attention import attend
from ._eager import ATTENTION
from ._tensors import check_dense
from ._watched import watched

TORCH = torch.nn.functional.scaled_dot_product_attention
# Whose messages call an option what it is called here.
AS_TORCH = ATTENTION._replace(options=ATTENTION.options._replace(said=LIKE_TORCH.said))
_warned = threading.Event()


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`attention` with the signature and the meaning of torch.nn.functional.scaled_dot_product_attention.

    Parameters
    ----------
    query, key, value
        As for `attention`.  They must have equally many heads, or one head, unless enable_gqa is True.
    attn_mask
        Boolean (True: the query may attend to the key) or floating (it is added to the scores, and may have a
        gradient), broadcast to (B, H, M, N).  It must be None if is_causal is True.
    dropout_p
        With anything but 0 torch computes the call itself, and a warning says so, once.
    is_causal
        Query i sees the keys up to i, so that the mask is aligned at the top left.
    scale
        Factor of the scores.  Default: 1 / sqrt(D).
    enable_gqa
        Key and value may have fewer heads than query, which must be a multiple of them.

    Examples
    --------
    >>> import torch, sdpa.torch
    >>> x = torch.eye(2)[None]
    >>> sdpa.torch.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0]
    tensor([1., 0.])
    """
    if dropout_p:
        if not _warned.is_set():
            _warned.set()
            warnings.warn(
                f"dropout_p is {dropout_p}: this library has no random numbers, so torch computes calls with dropout",
                stacklevel=2,
            )
        return TORCH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    try:
        query, key, value, options = as_options(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        return attend(AS_TORCH, query, key, value, (), options)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        if not watched():
            check_dense(query=query, key=key, value=value, **{} if attn_mask is None else {"attn_mask": attn_mask})
        raise


def as_options(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    """The arguments of torch's function as those of `attention`."""
    if not enable_gqa and not query.shape[-3:-2] == key.shape[-3:-2] == value.shape[-3:-2]:
        query, key, value = of_equal_heads(query, key, value)
    options = {} if scale is None else {"scale": scale}
    if is_causal:
        if attn_mask is not None:
            raise ValueError("is_causal is True and attn_mask is given: only one of them may be")
        options["causal"], options["q_offset"] = True, 0
    elif attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            options["mask"] = attn_mask
        elif attn_mask.is_floating_point():
            options["bias"] = attn_mask
        else:
            raise TypeError(f"attn_mask has dtype {attn_mask.dtype}: it must be boolean, or floating to be added")
    return query, key, value, options


def of_equal_heads(query, key, value):
    """Heads broadcast as the axes before them do: one serves all."""
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value)]
    most = max(heads) if all(heads) else 0
    if any(count not in (1, most) for count in heads):
        raise ValueError(f"query, key and value have {heads} heads: they must be equal unless enable_gqa is True")
    return [
        x if count == most else x.expand(*x.shape[:-3], most, *x.shape[-2:])
        for x, count in zip((query, key, value), heads)
    ]
