"""Attention over sequences of different lengths, packed one behind the other: without padding, in one call."""

import numpy as np

from . import _core, _kernels, _threads
from ._problem import (
    _float_array,
    _lengths,
    _per_head,
    _scale,
    _softcap,
    _sum_within,
    _whole_numbers,
    _window,
    broadcast_bias,
    broadcast_mask,
    check_heads,
    check_out,
    check_widths,
    flag,
    plain_array,
    sum_dtype,
)


def attention_varlen(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k=None,
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, return_lse=False, out=None, threads=None,
):  # fmt: skip
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
    query, key, value, q_starts, k_starts = packed_arrays(query, key, value, cu_seqlens_q, cu_seqlens_k)
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    out, lse = attend_packed(
        query, key, value, q_starts=q_starts, k_starts=k_starts[:-1], k_counts=np.diff(k_starts), mask=mask, bias=bias,
        causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths, scale=scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse, out=out, threads=threads, given=given,
    )  # fmt: skip
    return (out, lse) if return_lse else out


# What callers give: also that of PagedKVCache.


def packed_rows(name, array):
    array = _float_array(name, array)
    if array.ndim != 3:
        raise ValueError(f"{name} has shape {array.shape}: it must have three axes, (tokens, heads, size)")
    return array


def packed_arrays(query, key, value, cu_seqlens_q, cu_seqlens_k):
    """They fit together; and where sequences begin, in query and in key."""
    query, key, value = (packed_rows(*given) for given in (("query", query), ("key", key), ("value", value)))
    if key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"key has shape {key.shape} and value {value.shape}: they must have the same keys and the same heads"
        )
    heads, dim = query.shape[1:]
    if dim != key.shape[2]:
        raise ValueError(f"query has shape {query.shape} and key {key.shape}: the last axes must be equal")
    check_heads(heads, key.shape[1])
    q_starts = k_starts = starts("cu_seqlens_q", cu_seqlens_q, "query", len(query))
    if cu_seqlens_k is not None:
        k_starts = starts("cu_seqlens_k", cu_seqlens_k, "key", len(key))
        if len(k_starts) != len(q_starts):
            raise ValueError(
                f"cu_seqlens_q has {len(q_starts)} numbers and cu_seqlens_k {len(k_starts)}: they must be as many"
            )
    elif len(key) != len(query):
        raise ValueError(f"query has {len(query)} rows and key {len(key)}: without cu_seqlens_k they must be as many")
    return query, key, value, q_starts, k_starts


def starts(name, given, rows_name, rows):
    """Cumulative lengths, as int64."""
    numbers = plain_array(name, given)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"{name} has shape {numbers.shape}: it must have one axis, and one more number than sequences")
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must hold whole numbers")
    if numbers[0] != 0 or numbers[-1] != rows or (numbers[1:] < numbers[:-1]).any():
        raise ValueError(f"{name} is {given}: it must go from 0, never falling, to the {rows} rows of {rows_name}")
    return np.ascontiguousarray(numbers, np.int64)


def check_options(
    query, key, value, *, q_starts, k_counts, mask, bias, causal, window, q_offset, kv_lengths, scale, softcap, sinks,
    alibi_slopes, threads, given,
):  # fmt: skip
    """The options as `_attend_sequences` takes them; `given` gets the arrays among them, by name, as they came in."""
    check_widths({"query": query, "key": key, "value": value})
    tokens, heads, dim = query.shape
    q_counts = np.diff(q_starts)
    sequences = (len(q_counts),)
    longest = int(k_counts.max(initial=0))
    pairs = (heads, tokens, longest)
    if mask is not None:
        given["mask"], mask = broadcast_mask(mask, pairs)
    if bias is not None:
        given["bias"], bias = broadcast_bias(bias, pairs)
    given |= {"q_offset": q_offset, "kv_lengths": kv_lengths, "sinks": sinks, "alibi_slopes": alibi_slopes}
    lengths = np.ascontiguousarray(k_counts) if kv_lengths is None else _lengths(kv_lengths, sequences, k_counts)
    offsets = lengths - q_counts if q_offset is None else _whole_numbers("q_offset", q_offset, sequences)
    left, right = _window(window, causal)
    limit = int(q_counts.max(initial=0)) + longest + 1  # beyond it every query sees nothing, or everything
    scale, softcap = _scale(scale, dim), _softcap(softcap)
    sinks = None if sinks is None else _per_head("sinks", sinks, sequences, heads)
    alibi_slopes = None if alibi_slopes is None else _per_head("alibi_slopes", alibi_slopes, sequences, heads)
    if threads is not None:
        _threads.count(threads)
    return dict(
        q_starts=q_starts, kv_lengths=lengths, q_offset=offsets, mask=mask, bias=bias,
        begin_shift=None if left is None else _sum_within(limit, offsets, -left),
        end_shift=None if right is None else _sum_within(limit, offsets, right + 1),
        scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, threads=threads,
    )  # fmt: skip


def attend_packed(
    query, key, value, *, q_starts, k_starts=None, pages=None, page_size=1, k_counts, return_lse, out, given, **options
):
    """The checks of the options, and the result: (out, lse or None).

    The shapes of query, key and value were checked, not their dtypes.  k_counts (S): the keys of each sequence.
    given : what else the caller gave, by name, that `out` must not overlap.
    """
    return_lse = flag("return_lse", return_lse)
    options = check_options(query, key, value, q_starts=q_starts, k_counts=k_counts, given=given, **options)
    shape = (*query.shape[:2], value.shape[-1])
    if out is None:
        out = np.empty_like(query, shape=shape, subok=False)
    else:
        arrays = {name: array for name, array in given.items() if isinstance(array, np.ndarray)}
        check_out(out, shape, query.dtype, {"query": query, "key": key, "value": value, **arrays})
    lse = np.empty(shape[:2], sum_dtype(query.dtype)) if return_lse else None
    _attend_sequences(
        query, key, value, k_starts=k_starts, pages=pages, page_size=page_size, out=out, lse=lse, **options
    )
    return out, lse


def _attend_sequences(
    query, key, value, *, q_starts, kv_lengths, k_starts, pages, page_size, q_offset, begin_shift, end_shift,
    mask, bias, scale, softcap, sinks, alibi_slopes, out, lse, threads,
):  # fmt: skip
    """Fill `out` (T, H, E) and, if not None, `lse` (T, H); all arguments are checked.

    query (T, H, D); q_starts (S + 1), kv_lengths, q_offset (S): int64.  Sequence b has the queries q_starts[b] to
    q_starts[b + 1] and kv_lengths[b] keys:

        not paged   key (U, G, D), value (U, G, E): key j is row k_starts[b] + j; `pages` is None
        paged       key (P, G, page_size, D), value likewise: key j is row j % page_size of the page
                    pages[b, j // page_size]; pages (S, most pages) int64, 0 past those of b; k_starts is None

    Query i of a sequence stands at position i + q_offset[b] and sees the keys from i + begin_shift[b] up to, not
    including, i + end_shift[b]: (S) int64, or None for no bound.  mask and bias are None or views of shape (H, T, L)
    with L >= kv_lengths.max(); softcap 0 is none; sinks and alibi_slopes are None or (S, H) float64; threads may be
    None.  Sequences without queries or without keys are among them.
    """
    if not query.size or not kv_lengths.any():  # nothing to compare: every row sees nothing
        out[...] = 0
        if lse is not None:
            lse[...] = -np.inf if sinks is None else np.repeat(sinks, np.diff(q_starts), axis=0)
        return
    threads = thread_count(threads, query, value, kv_lengths)
    query, out = heads_first(query), heads_first(out)
    lse = None if lse is None else heads_first(lse[..., None])
    if pages is None:
        key, value = heads_first(key), heads_first(value)
    _core.attend(
        _kernels.default, query, key, value=value, out=out, weights=None, lse=lse,
        mask=one_batch(mask), bias=one_batch(bias),
        begin_shift=begin_shift, end_shift=end_shift, q_offset=q_offset, kv_lengths=kv_lengths, scale=scale,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, threads=threads, q_starts=q_starts,
        k_starts=k_starts, pages=pages, page_size=page_size,
    )  # fmt: skip


def thread_count(threads, query, value, kv_lengths):
    longest = int(kv_lengths.max())
    if threads is None and _core.is_small(1, query.shape[1], len(query), longest, query.shape[2], value.shape[-1]):
        return 1
    return _threads.count(threads)


def heads_first(array):
    """(T, H, E) as (1, H, T, E)."""
    return array.swapaxes(0, 1)[None]


def one_batch(array):
    return None if array is None else array[None]
