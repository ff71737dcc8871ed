"""The functions of the library on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _eager, _operators
from ._eager import ATTENTION, ATTENTION_VARLEN
from ._tensors import without_tensors
from ._watched import autocast, forward_mode, refuse_tangents, watched

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import AttentionOptions


@ATTENTION.options
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Unpack[AttentionOptions]) -> Any:
    """`sdpa.attention` for tensors on the CPU, whose memory is read in place.

    The axes are::

        query : (B, H, M, D)    key : (B, G, N, D)    value : (B, G, N, E)    out : (B, H, M, E)

    Axes, dtypes, layout of the result and options are those of `sdpa.attention`.  Arrays there are tensors here.  The
    result has gradients with respect to query, key, value, bias and sinks, for which the scores are computed again
    instead of kept; there are no second derivatives.

    Parameters
    ----------
    query, key, value : tensor
        With the axes above.
    {options}

    Examples
    --------
    >>> import torch, sdpa.torch
    >>> query = torch.tensor([[1.0]], requires_grad=True)
    >>> key, value = torch.tensor([[0.0], [3.0]]).log1p(), torch.tensor([[8.0], [4.0]])      # weights 1 and 4
    >>> out = sdpa.torch.attention(query, key, value)
    >>> out.backward()
    >>> round(out.item(), 3), round(query.grad.item(), 3)
    (4.8, -0.887)
    """
    return attend(ATTENTION, query, key, value, (), options)


@ATTENTION_VARLEN.options
def attention_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens_q: Any, cu_seqlens_k: Any = None,
    **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """`sdpa.attention_varlen` for tensors on the CPU: packed sequences, each of which attends to its own keys.

    The axes are::

        query : (T, H, D)    key : (U, G, D)    value : (U, G, E)    out : (T, H, E)    lse : (T, H)

    Parameters
    ----------
    query, key, value : tensor
        With the axes above.
    cu_seqlens_q, cu_seqlens_k : (S + 1), int
        Where the queries and the keys of the sequences begin and end.  Default of cu_seqlens_k: cu_seqlens_q.
    {options}

    Notes
    -----
    The result has gradients, as the result of `attention` has.
    """
    return attend(ATTENTION_VARLEN, query, key, value, (cu_seqlens_q, cu_seqlens_k), options)


def attend(function, query, key, value, starts, options):
    """What a public function returns, whoever else takes part in the call."""
    if forward_mode():
        refuse_tangents(query=query, key=key, value=value, **options)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = autocast(query, key, value)
    if watched():
        return _operators.attend(function, query, key, value, starts, options)
    if starts:
        starts = tuple(without_tensors(dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts))).values())
    return _eager.attend(function, query, key, value, starts, options)
