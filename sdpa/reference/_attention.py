"""Attention of query to key and value, dense and packed, and its gradients."""

import itertools
import operator

import numpy as np

from .._attention.gradients import Gradients
from ._arrays import arithmetic, cast, deliver, fit, per_batch, per_head, rounded, to_float


def attention(
    query, key, value, *, mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None,
    return_lse=False, out=None, threads=None, dtype=None,
):  # fmt: skip
    """Softmax-weighted mean of `value`, weighted by how well `query` matches `key`.

    Parameters
    ----------
    mask : boolean, True = may attend
    bias : floats, added to the scores; -inf hides a key
    q_offset
        Query i stands at position i + q_offset; an int or one per batch.  The default, N - M or kv_lengths - M, lets
        the last query see the last key.
    causal
        Keys j <= position.  With M = 2 and N = 4 the queries see::

            1 1 1 0
            1 1 1 1

    window : (left, right), None is unbounded
        Keys position - left <= j <= position + right; causal is right = 0.  With (1, 0) these queries see::

            0 1 1 0
            0 0 1 1

    kv_lengths : (B), from 0 to N; keys at and past the length do not exist
    scale
        1 / sqrt(D) by default.
    softcap : positive, bounds the scores before bias and masks
    sinks
        (H), one more logit in the denominator of each row, without a value; neither scaled nor capped.
    alibi_slopes : (H) or (B, H)
    return_lse
        Return (out, lse).  The lse is the natural logarithm of the sum of exp(score), exp(sink) included.  For a row
        that sees no key it is the sink, or -inf without a sink.
    out
        An array of any float dtype to write the result to; the result is then not rounded to `dtype`.

    Examples
    --------
    >>> import numpy as np
    >>> keys, values = np.array([[0.0], [np.log(3)]]), np.array([[8.0], [4.0]])
    >>> attention(np.array([[1.0]]), keys, values)
    array([[5.]])
    """
    q, k, v, leading, rank = align(query, key, value, dtype)
    seen, weight, lse = probabilities(
        q, k, leading, dtype, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    result = weighted_sum(weight, v, seen)
    result = deliver(result.reshape(result.shape[-rank:]), dtype, out, query, key, value, mask, bias)
    return (result, lse.reshape(result.shape[:-1])) if return_lse else result


def attention_varlen(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k=None,
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None,
    return_lse=False, out=None, threads=None, dtype=None,
):  # fmt: skip
    """`attention` for one sequence after the other, whose rows are packed.

    query (T, H, D), key (U, G, D), value (U, G, E); out (T, H, E), lse (T, H). Sequence b has the rows from
    cu_seqlens[b] to cu_seqlens[b + 1]. Without cu_seqlens_k, the keys have the same cu_seqlens as the queries.

    Parameters
    ----------
    mask, bias
        Broadcast to (H, T, L), L the keys of the longest sequence; column j is key j of the row's sequence.
    q_offset, kv_lengths
        One per sequence, or one for all.
    sinks, alibi_slopes : (H) or (S, H)
    """
    query, key, value = np.asarray(query), np.asarray(key), np.asarray(value)
    sequences = split(
        query, key, cu_seqlens_q, cu_seqlens_k, mask=mask, bias=bias, q_offset=q_offset, kv_lengths=kv_lengths,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    tokens, heads, _ = query.shape
    result = np.zeros((tokens, heads, value.shape[2]), arithmetic(dtype))
    lse = np.zeros((tokens, heads), arithmetic(dtype))
    for q, k, own in sequences:
        _, own_lse = attention(
            query[q].swapaxes(0, 1), key[k].swapaxes(0, 1), value[k].swapaxes(0, 1), causal=causal, window=window,
            scale=scale, softcap=softcap, return_lse=True, out=result[q].swapaxes(0, 1), dtype=dtype, **own,
        )  # fmt: skip
        lse[q] = own_lse.T
    result = deliver(result, dtype, out, query, key, value, mask, bias)
    return (result, lse) if return_lse else result


def attention_backward(
    grad_out, query, key, value, out, lse, *, grad_lse=None,
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None, dtype=None,
):  # fmt: skip
    """Gradients of a number L with respect to the inputs of `attention`, from its gradients with respect to the
    results.

    Parameters
    ----------
    grad_out, grad_lse
        dL/dout and dL/dlse, in the shapes of out and lse.  Without grad_lse, L does not depend on lse.
    out, lse
        What `attention` returned for these inputs and options.

    Notes
    -----
    S are the scores of the visible keys, P their weights; f scales and caps::

        S = f(Q K^T) + bias     dbias = dS               dQ = (dS f') K     dK = (dS f')^T Q
        P = exp(S - lse)        dS = P (dP - delta)      delta = dO . O - dlse, one number per row
        O = P V                 dP = dO V^T              dV = P^T dO

    The middle row holds because dP_k/dS_j = P_k ((j = k) - P_j): dS_j is P_j (dP_j - sum of P_k dP_k), and that sum is
    dO . (sum of P_k V_k). The derivative of lse with respect to S_j is P_j. A sink is a key whose value is 0, so its
    gradient is the sum over the rows of exp(sink - lse) (0 - delta). Gradients of broadcast inputs are summed over the
    broadcast axes, and the gradient of a key head over the query heads that share it.

    Gradients have the shapes of the inputs. Rows that see no key, and pairs that do not see each other, have gradients
    of 0, whatever grad_out, query, key, value or bias hold there. But the lse of a row that sees no key is its sink, so
    the gradient of that sink gets the row's grad_lse. A key whose score is -inf is not seen.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.array([[1.0]]), np.array([[0.0], [np.log(3)]]), np.array([[8.0], [4.0]])
    >>> out, lse = attention(query, key, value, return_lse=True)  # weights 1/4 and 3/4
    >>> attention_backward(np.array([[1.0]]), query, key, value, out, lse).value
    array([[0.25],
           [0.75]])
    """
    q, k, v, leading, rank = align(query, key, value, dtype)
    shape = (*leading, *q.shape[-3:-1], v.shape[-1])
    grad_out, out, lse, grad_lse = like_results(grad_out, out, lse, grad_lse, shape, rank, dtype)
    compared = compare(
        q, k, leading, dtype, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    seen, weight, grad_score, grad_product, grad_sink = differentiate(
        grad_out, out, lse, grad_lse, v, *compared, dtype=dtype
    )
    seen_by = seen.swapaxes(-1, -2)
    grad_query = weighted_sum(grad_product, k, seen)
    grad_key = weighted_sum(grad_product.swapaxes(-1, -2), q, seen_by)
    grad_value = weighted_sum(weight.swapaxes(-1, -2), grad_out, seen_by)
    return Gradients(
        cast(reduced(grad_query, np.shape(query)), dtype),
        cast(reduced(over_groups(grad_key, np.shape(key)), np.shape(key)), dtype),
        cast(reduced(over_groups(grad_value, np.shape(value)), np.shape(value)), dtype),
        None if bias is None else cast(reduced(grad_score, np.shape(bias)), dtype),
        None if sinks is None else cast(reduced(grad_sink.sum(axis=(-2, -1)), np.shape(sinks)), dtype),
    )


def attention_varlen_backward(
    grad_out, query, key, value, out, lse, *, cu_seqlens_q, cu_seqlens_k=None, grad_lse=None,
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None, dtype=None,
):  # fmt: skip
    """`attention_backward` for one sequence after the other, with the arrays and options of `attention_varlen`."""
    query, key, value = np.asarray(query), np.asarray(key), np.asarray(value)
    sequences = split(
        query, key, cu_seqlens_q, cu_seqlens_k, mask=mask, bias=bias, q_offset=q_offset, kv_lengths=kv_lengths,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    tokens, heads, _ = query.shape
    grad_out = like_result("grad_out", grad_out, (tokens, heads, value.shape[2]), 3, dtype)
    out = like_result("out", out, grad_out.shape, 3, arithmetic(dtype))
    lse = like_result("lse", lse, (tokens, heads), 2, arithmetic(dtype))
    grad_lse = None if grad_lse is None else like_result("grad_lse", grad_lse, lse.shape, 2, arithmetic(dtype))
    longest = max((k.stop - k.start for _, k, _ in sequences), default=0)
    shapes = query.shape, key.shape, value.shape, (heads, tokens, longest), (len(sequences), heads)
    grads = Gradients(*(np.zeros(shape, arithmetic(dtype)) for shape in shapes))
    for b, (q, k, own) in enumerate(sequences):
        of = attention_backward(
            *(x.swapaxes(0, 1) for x in (grad_out[q], query[q], key[k], value[k], out[q])), lse[q].T,
            grad_lse=None if grad_lse is None else grad_lse[q].T, causal=causal, window=window, scale=scale,
            softcap=softcap, dtype=dtype, **own,
        )  # fmt: skip
        grads.query[q], grads.key[k], grads.value[k] = (x.swapaxes(0, 1) for x in of[:3])
        if bias is not None:
            grads.bias[:, q, : k.stop - k.start] = of.bias
        if sinks is not None:
            grads.sinks[b] = of.sinks
    return Gradients(
        *(cast(x, dtype) for x in grads[:3]),
        None if bias is None else cast(reduced(grads.bias, np.shape(bias)), dtype),
        None if sinks is None else cast(reduced(grads.sinks, np.shape(sinks)), dtype),
    )


def attention_weights(
    query, key, *, mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None, dtype=None,
):  # fmt: skip
    """The probabilities (B, H, M, N) by which `attention` weighs the values, with the options of `attention`.

    >>> import numpy as np
    >>> attention_weights(np.array([[1.0]]), np.array([[0.0], [np.log(3)]]))
    array([[0.25, 0.75]])
    """
    q, k, _, leading, rank = align(query, key, key, dtype)
    _, weight, _ = probabilities(
        q, k, leading, dtype, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return cast(weight.reshape(weight.shape[-rank:]), dtype)


def merge(outs, lses, *, out=None, dtype=None):
    """Join partial results over disjoint keys: outs (..., M, E) and lses (..., M) of the parts give (out, lse).

    A part has the weight exp(lse), as a key has the weight exp(score). A part whose lse is -inf saw neither a key nor a
    sink and has no influence.
    """
    outs, lses = list(outs), list(lses)
    value = np.stack([to_float("outs", part, dtype) for part in outs], axis=-2)  # (..., M, parts, E)
    score = np.stack([to_float("lses", part, arithmetic(dtype)) for part in lses], axis=-1)  # (..., M, parts)
    if value.shape[:-1] != score.shape:
        raise ValueError(f"outs {np.shape(outs)} and lses {np.shape(lses)} must differ by the last axis only")
    seen = score != -np.inf
    weight, lse = softmax(score, seen)
    result = weighted_sum(weight[..., None, :], value, seen[..., None, :])[..., 0, :]
    return deliver(result, dtype, out, *outs, *lses), lse


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
    dtype=None,
):  # fmt: skip
    """`attention` with the meaning of torch.nn.functional.scaled_dot_product_attention.

    Parameters
    ----------
    attn_mask : boolean (True = may attend) or floats to add; not together with is_causal
    is_causal
        Keys j <= i, aligned at the top left.  With M = 2 and N = 4::

            1 0 0 0
            1 1 0 0

    enable_gqa
        Must be set if query has more heads than key and value.
    """
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}: dropout is not offered, so it must be 0")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask are both given: with is_causal, attn_mask must be None")
    heads = [np.shape(x)[-3] if np.ndim(x) > 2 else 1 for x in (query, key, value)]
    if len(set(heads)) > 1 and not enable_gqa:
        raise ValueError(f"query, key and value have {heads} heads: enable_gqa=True lets them differ")
    kind = "mask" if np.asarray(attn_mask).dtype == bool else "bias"
    options = {kind: attn_mask, "causal": is_causal, "q_offset": 0, "scale": scale, "dtype": dtype}
    return attention(query, key, value, **options)


# The definition, step by step. Arrays are aligned: query (..., H, M, D), key (..., H, N, D) and value
# (..., H, N, E); what is per pair (..., H, M, N), per head (..., H, 1, 1), per batch (..., 1, 1, 1).


def probabilities(query, key, leading, dtype, **options):
    """Who sees whom, how the keys weigh, and the log-sum-exp: (..., H, M, N) twice, and (..., H, M)."""
    seen, score, _, sinks = compare(query, key, leading, dtype, **options)
    weight, lse = softmax(score, seen, sinks)
    return seen, rounded(weight, dtype), lse


def dot(query, key):
    return query @ key.swapaxes(-1, -2)


def compare(
    query, key, leading, dtype, *, mask, bias, causal, window, q_offset, kv_lengths,
    scale, softcap, sinks, alibi_slopes, match=dot,
):  # fmt: skip
    """Who sees whom, the scores, their derivative by what `match` gives, all (..., H, M, N); and the sinks
    (..., H, 1, 1)."""
    heads = (*leading, query.shape[-3])
    q_len, kv_len = query.shape[-2], key.shape[-2]
    shape = (*heads, q_len, kv_len)
    if mask is not None:
        mask = fit("mask", mask, shape)
        if mask.dtype != bool:
            raise TypeError(f"mask has dtype {mask.dtype}: it must be boolean; floats are given as bias")
    if bias is not None:
        if np.asarray(bias).dtype == bool:
            raise TypeError("bias has dtype bool: it must be floats; who may attend is given as mask")
        bias = fit("bias", to_float("bias", bias, dtype), shape)
    kv_lengths = per_batch("kv_lengths", kv_len if kv_lengths is None else kv_lengths, leading)
    if ((kv_lengths < 0) | (kv_lengths > kv_len)).any():
        raise ValueError(f"kv_lengths are {kv_lengths.ravel()}: they must be from 0 to N = {kv_len}")
    q_offset = kv_lengths - q_len if q_offset is None else per_batch("q_offset", q_offset, leading)
    slopes = None if alibi_slopes is None else per_head("alibi_slopes", alibi_slopes, heads, dtype)
    sinks = -np.inf if sinks is None else per_head("sinks", sinks, heads, dtype)

    seen = visible(shape, q_offset, kv_lengths, mask=mask, bias=bias, causal=causal, window=window)
    seen &= query.shape[-1] > 0  # no features, nothing to match
    score, steepness = scores(query, key, q_offset, match, bias=bias, scale=scale, softcap=softcap, slopes=slopes)
    return seen, rounded(score, dtype), steepness, sinks


def visible(shape, q_offset, kv_lengths, *, mask=None, bias=None, causal=False, window=None):
    """Which query sees which key, as booleans of `shape` (..., H, M, N)."""
    q_len, kv_len = shape[-2:]
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)

    def position(shift):  # of query i, shifted; clipping what does not depend on i keeps it inside 64 bits
        return i + np.clip(q_offset.astype(object) + shift, -q_len, kv_len).astype(np.int64)

    seen = np.broadcast_to(j < kv_lengths, shape).copy()
    if left is not None:
        seen &= j >= position(-operator.index(left))
    if right is not None:
        seen &= j <= position(operator.index(right))
    if mask is not None:
        seen &= mask
    if bias is not None:
        seen &= bias != -np.inf
    return seen


def scores(query, key, q_offset, match, *, bias=None, scale=None, softcap=None, slopes=None):
    """How well each query matches each key, and the derivative of that score with respect to the result of `match`
    ("steepness"). Hidden pairs have scores too, where NaN and inf do not matter."""
    q_len, kv_len, dim = query.shape[-2], *key.shape[-2:]
    if scale is None:
        scale = 1 / max(dim, 1) ** 0.5
    if softcap is not None and not 0 < softcap < np.inf:
        raise ValueError(f"softcap is {softcap}: it must be positive and finite, or None")
    steepness = float(scale)
    with np.errstate(invalid="ignore", over="ignore"):
        score = match(query, key) * float(scale)
        if softcap is not None:
            share = np.tanh(score / float(softcap))
            score = float(softcap) * share
            steepness = steepness * (1 - share * share)
        if bias is not None:
            score = score + bias
        if slopes is not None:
            distance = abs(np.arange(q_len)[:, None] - np.arange(kv_len) + q_offset.astype(float))
            score = score - slopes * distance.astype(score.dtype)
    return score, steepness


def softmax(score, seen, sinks=-np.inf):
    """Weights (..., N) and log-sum-exp (...) of the scores that are seen.

    exp(score - high) cannot overflow. A score of +inf gives NaN, as inf - inf does. A key whose score is -inf is not
    seen.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        score = np.where(seen, score, -np.inf)
        seen = score != -np.inf
        high = np.maximum(score.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
        high = np.where(high == -np.inf, 0, high)
        weight = np.exp(score - high)
        total = weight.sum(axis=-1, keepdims=True) + np.exp(sinks - high)
        weight = np.where(seen, weight / np.where(total == 0, 1, total), 0)
        lse = np.where(seen.any(axis=-1, keepdims=True), high + np.log(total), sinks)
    return weight, lse[..., 0]


def weighted_sum(weight, value, seen):
    """weight @ value, where 0 * NaN is NaN for a visible key and adds nothing for a hidden key.

    The product leaves out values that are not finite. They are added key by key to the rows that see them.
    """
    finite = np.isfinite(value)
    with np.errstate(invalid="ignore", over="ignore"):
        total = weight @ np.where(finite, value, 0)
        for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):
            added = seen[..., j, None] & ~finite[..., None, j, :]
            total += np.where(added, weight[..., j, None] * value[..., None, j, :], 0)
    return total


def differentiate(grad_out, out, lse, grad_lse, value, seen, score, steepness, sink, *, dtype):
    """From the gradients with respect to the results to those with respect to scores and products, as
    `attention_backward` explains.

    Returns which query sees which key, the weights, and the gradients with respect to scores and products, all
    (..., H, M, N); and the gradient of each row with respect to its sink, (..., H, M, 1).
    """
    seen = seen & (score != -np.inf) & (lse != -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        weight = rounded(np.where(seen, np.exp(score - lse), 0), dtype)
        delta = np.where(seen.any(axis=-1, keepdims=True), (grad_out * out).sum(axis=-1, keepdims=True), 0) - grad_lse
        grad_score = np.where(seen, weight * (grad_out @ value.swapaxes(-1, -2) - delta), 0)
        grad_product = rounded(np.where(seen, grad_score * steepness, 0), dtype)
        grad_sink = np.where(lse == -np.inf, 0, np.exp(sink - lse) * -delta)
    return seen, weight, grad_score, grad_product, grad_sink


# From what callers give to aligned arrays, and back.


def align(query, key, value, dtype):
    """The arrays with four axes or more and H heads each; their broadcast leading axes; the result's rank."""
    rank = max(np.ndim(query), np.ndim(key), np.ndim(value))
    query = to_float("query", query, dtype, axes=4)
    key = to_float("key", key, dtype, axes=4)
    value = to_float("value", value, dtype, axes=4)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    whole_groups = heads % kv_heads == 0 if kv_heads else heads == 0
    if query.shape[-1] != key.shape[-1] or key.shape[-3:-1] != value.shape[-3:-1] or not whole_groups:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} must be "
            f"(B, H, M, D), (B, G, N, D) and (B, G, N, E), with H a multiple of G"
        )
    key, value = (np.repeat(x, heads // max(kv_heads, 1), axis=-3) for x in (key, value))
    return query, key, value, np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]), rank


def like_result(name, array, shape, rank, dtype):
    """`array`, which has the last `rank` axes of `shape`, reshaped to all axes."""
    array = to_float(name, array, dtype)
    if array.shape != shape[-rank:]:
        raise ValueError(f"{name} has shape {array.shape}: it must have that of the result, {shape[-rank:]}")
    return array.reshape(shape)


def like_results(grad_out, out, lse, grad_lse, shape, rank, dtype):
    """The four arrays with all axes: grad_out and out of `shape` (..., H, M, E), lse and grad_lse (..., H, M, 1)."""
    grad_lse = np.zeros(np.shape(lse)) if grad_lse is None else grad_lse
    grad_out = like_result("grad_out", grad_out, shape, rank, dtype)
    out = like_result("out", out, shape, rank, arithmetic(dtype))
    lse, grad_lse = (
        like_result(name, array, shape[:-1], rank - 1, arithmetic(dtype))[..., None]
        for name, array in (("lse", lse), ("grad_lse", grad_lse))
    )
    return grad_out, out, lse, grad_lse


def over_groups(grad, shape):
    """`grad` summed over the query heads of each key/value head; the key/value heads are an axis of `shape`."""
    kv_heads = (1, *shape)[-3]
    *leading, heads, kv_len, size = grad.shape
    return grad.reshape(*leading, kv_heads, heads // max(kv_heads, 1), kv_len, size).sum(axis=-3)


def reduced(grad, shape):
    """`grad` summed over the axes along which an array of `shape` was broadcast."""
    extra = grad.ndim - len(shape)
    repeated = [i for i, n in enumerate(shape, start=extra) if n == 1 != grad.shape[i]]
    return grad.sum(axis=(*range(extra), *repeated)).reshape(shape)


def split(query, key, cu_seqlens_q, cu_seqlens_k, **options):
    """For each sequence, the slices of its queries and of its keys, and its options."""
    ends = [np.asarray(x).tolist() for x in (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)]
    queries, keys = ([slice(*pair) for pair in itertools.pairwise(x)] for x in ends)
    heads, sequences = query.shape[1], len(queries)
    pairs = (heads, len(query), max((k.stop - k.start for k in keys), default=0))
    shapes = {"mask": pairs, "bias": pairs, "q_offset": (sequences,), "kv_lengths": (sequences,)}
    whole = {name: fit(name, x, shapes.get(name, (sequences, heads))) for name, x in options.items() if x is not None}

    def own(b, q, k):
        return {name: x[:, q, : k.stop - k.start] if name in ("mask", "bias") else x[b] for name, x in whole.items()}

    return [(q, k, own(b, q, k)) for b, (q, k) in enumerate(zip(queries, keys))]
