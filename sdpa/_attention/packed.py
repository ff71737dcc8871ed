"""Attention over sequences of different lengths, packed one behind the other: without padding, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from .._options import AttentionOptions, takes
from .._runtime import kernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


ATTENTION_VARLEN = takes("attention_varlen", AttentionOptions)


@ATTENTION_VARLEN
def attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None, **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """`attention` for S sequences of different lengths, each over its own keys; their rows are packed.

        query : (T, H, D)    key : (U, G, D)    value : (U, G, E)    out : (T, H, E)    lse : (T, H)

    T and U are the queries and the keys of all sequences together.  Sequence b is what `attention` gives for the
    queries from cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys from cu_seqlens_k[b] to cu_seqlens_k[b + 1].
    Any of them may be empty: queries without keys get zeros, and as lse their sink, or -inf.

    Parameters
    ----------
    cu_seqlens_q : (S + 1), int.  Where sequences begin and end: from 0, never falling, to T.
    cu_seqlens_k : likewise, to U.  Default cu_seqlens_q: each query has its key, as in prefill.
    mask, bias : broadcast to (H, T, L), L the keys of the longest sequence.  Column j is key j of the row's sequence.
    q_offset : int or (S).  Position of the first query of a sequence among its keys.  Default: keys - queries of the
        sequence, so that its last query sees its last key.
    kv_lengths : int or (S).  Keys of a sequence at and past the length do not exist.
    sinks, alibi_slopes : (H) or (S, H).

    The other options are those of `attention`.

    >>> import numpy as np, sdpa
    >>> query = np.ones((3, 1, 1))                      # sequences of 2 and 1 tokens, 1 head, D = 1
    >>> value = np.array([2.0, 4.0, 7.0]).reshape(3, 1, 1)
    >>> sdpa.attention_varlen(query, query, value, cu_seqlens_q=[0, 2, 3], causal=True).ravel().tolist()
    [2.0, 3.0, 7.0]
    """

    return _core.attention_varlen(
        kernels.default, query, key, value, cu_seqlens_q, cu_seqlens_k, options, ATTENTION_VARLEN
    )
