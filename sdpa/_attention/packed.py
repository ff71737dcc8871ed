"""Attention over sequences of different lengths that are packed one after the other, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from .._options import PACKED, AttentionOptions, takes
from .._runtime import kernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


ATTENTION_VARLEN = takes("attention_varlen", AttentionOptions, PACKED)


@ATTENTION_VARLEN
def attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None, **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """`attention` for S sequences of different lengths, whose rows are packed.  Each sequence attends to its own keys.

    The axes are::

        query : (T, H, D)    key : (U, G, D)    value : (U, G, E)    out : (T, H, E)    lse : (T, H)

    T and U are the numbers of queries and keys of all sequences together.  The result of sequence b is what `attention`
    gives for the queries from cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys from cu_seqlens_k[b] to
    cu_seqlens_k[b + 1].  Any sequence may be empty: queries without keys get zeros, and their lse is the sink of their
    head, or -inf.

    Parameters
    ----------
    query, key, value : array
        With the axes above.
    cu_seqlens_q : (S + 1), int
        Where the queries of the sequences begin and end: from 0, never falling, to T.
    cu_seqlens_k : (S + 1), int
        Where their keys begin and end: from 0, never falling, to U.  Default: cu_seqlens_q, so that each query has its
        key, as in prefill.
    {options}

    Notes
    -----
    Column j of mask and bias is key j of the row's sequence.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query = np.ones((3, 1, 1))                      # sequences of 2 and 1 tokens, 1 head, D = 1
    >>> value = np.array([2.0, 4.0, 7.0]).reshape(3, 1, 1)
    >>> sdpa.attention_varlen(query, query, value, cu_seqlens_q=[0, 2, 3], causal=True).ravel().tolist()
    [2.0, 3.0, 7.0]
    """
    return _core.attention_varlen(
        kernels.default, query, key, value, cu_seqlens_q, cu_seqlens_k, options, ATTENTION_VARLEN
    )
