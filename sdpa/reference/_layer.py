"""Multi-head attention with its weights."""

import numpy as np

from ._arrays import arithmetic, cast, rounded, to_float
from ._attention import compare, softmax, weighted_sum
from ._norms import layer_norm, rms_norm
from ._rotary import rotary as turned


class MultiHeadAttention:
    """The layer, without caches: each head on its own, from its own rows of the weights.

    Query head h is projected by the rows from h * head_dim of the query's part of in_proj_weight, and attends to
    key/value head h // (num_heads / kv_heads). out_proj_weight has columns for each head, and the result is the sum of
    the products of all heads with their columns. Arguments are those of sdpa.MultiHeadAttention; calls take `dtype` as
    the other functions here do.

    >>> import numpy as np
    >>> in_weight, out_weight = np.array([[0.0], [0.0], [1.0]]), np.array([[1.0]])  # query and key 0, value x
    >>> layer = MultiHeadAttention(1, 1, in_proj_weight=in_weight, out_proj_weight=out_weight)
    >>> layer(np.array([[8.0], [4.0]]), causal=True)
    array([[8.],
           [6.]])
    """

    def __init__(
        self, embed_dim, num_heads, *, kv_heads=None, head_dim=None, value_dim=None, kdim=None, vdim=None,
        in_proj_weight=None, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, in_proj_bias=None,
        out_proj_weight, out_proj_bias=None, bias_k=None, bias_v=None, add_zero_attn=False, rotary=None, qk_norm=None,
        pre_norm=None, post_norm=None, batch_first=True, threads=None,
    ):  # fmt: skip
        self.num_heads, self.kv_heads = num_heads, num_heads if kv_heads is None else kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        key_rows = self.kv_heads * self.head_dim
        begins = np.cumsum([num_heads * self.head_dim, key_rows])
        if in_proj_weight is not None:
            self.projections = np.split(np.asarray(in_proj_weight), begins)
        else:
            self.projections = [np.asarray(weight) for weight in (q_proj_weight, k_proj_weight, v_proj_weight)]
        total = sum(len(weight) for weight in self.projections)
        if total != begins[-1] + self.kv_heads * self.value_dim:
            raise ValueError(f"the weights have {total} rows: that is not what the heads and their sizes need")
        self.biases = np.split(np.zeros(total) if in_proj_bias is None else np.asarray(in_proj_bias), begins)
        self.out_weight = np.asarray(out_proj_weight)
        self.out_bias = np.zeros(len(self.out_weight)) if out_proj_bias is None else np.asarray(out_proj_bias)
        keys = [] if bias_k is None else [np.reshape(bias_k, (self.kv_heads, self.head_dim))]
        values = [] if bias_v is None else [np.reshape(bias_v, (self.kv_heads, self.value_dim))]
        if add_zero_attn:
            keys.append(np.zeros((self.kv_heads, self.head_dim)))
            values.append(np.zeros((self.kv_heads, self.value_dim)))
        self.extra = keys, values
        if rotary is True:
            rotary = {}
        elif rotary is not None and not isinstance(rotary, dict):
            rotary = {"base": rotary}
        if qk_norm is True:
            qk_norm = {}
        elif isinstance(qk_norm, (tuple, list)):
            qk_norm = dict(zip(("query", "key"), qk_norm))
        self.rotary, self.qk_norm, self.batch_first = rotary, qk_norm, batch_first
        self.pre_norm, self.post_norm = ({} if norm is True else norm for norm in (pre_norm, post_norm))

    def __call__(
        self, x, context=None, *, value_context=None, positions=None, residual=None, return_weights=False, mask=None,
        bias=None, causal=None, window=None, q_offset=None, kv_lengths=None, scale=None, softcap=None, sinks=None,
        alibi_slopes=None, threads=None, dtype=None,
    ):  # fmt: skip
        """The result, or (result, weights). Inputs, weights, heads and results are rounded to `dtype`."""
        own = context is None
        context = x if own else context
        value_context = context if value_context is None else value_context
        inputs = [to_float("x", rows, dtype) for rows in (x, context, value_context)]
        batched = inputs[0].ndim == 3
        if not self.batch_first:
            inputs = [rows.swapaxes(0, 1) if rows.ndim == 3 else rows for rows in inputs]
        x, context, value_context = (rows if rows.ndim == 3 else rows[None] for rows in inputs)
        batch, count, keys = len(x), x.shape[1], context.shape[1]
        if q_offset is None:
            last = keys if kv_lengths is None or own else np.asarray(kv_lengths)
            q_offset = last - count
        offsets = np.broadcast_to(q_offset, (batch,))
        at = offsets[:, None] + np.arange(count) if positions is None else positions
        key_at = np.arange(keys) if positions is None or not own else positions

        rows = rows_normed(self.pre_norm, x, dtype)
        if own:
            context, value_context = rows, rows
        query = self.heads(0, rows, self.head_dim, dtype)
        key = self.heads(1, context, self.head_dim, dtype)
        value = self.heads(2, value_context, self.value_dim, dtype)
        if self.qk_norm is not None:
            query, key = self.normed(query, "query", dtype), self.normed(key, "key", dtype)
        if self.rotary is not None:
            query = rounded(turned(query, at, dtype=dtype, **self.rotary), dtype)
            key = rounded(turned(key, key_at, dtype=dtype, **self.rotary), dtype)

        options = dict(mask=mask, bias=bias, window=window, kv_lengths=kv_lengths, alibi_slopes=alibi_slopes)
        options |= dict(causal=bool(causal), q_offset=q_offset)
        found, weights = self.attend(query, key, value, options, dict(scale=scale, softcap=softcap), sinks, dtype)
        out = to_float("out_proj_bias", self.out_bias, dtype)
        for h in range(self.num_heads):
            columns = self.out_weight[:, h * self.value_dim : (h + 1) * self.value_dim]
            out = out + rounded(found[:, h], dtype) @ to_float("out_proj_weight", columns, dtype).T
        if residual is not None:
            more = to_float("residual", residual, dtype)
            more = more if more.ndim == 3 else more[None]
            out = out + (more if self.batch_first or not batched else more.swapaxes(0, 1))
        out = cast(rows_normed(self.post_norm, rounded(out, dtype), dtype), dtype)
        if not batched:
            out, weights = out[0], weights[0]
        elif not self.batch_first:
            out = out.swapaxes(0, 1)
        return (out, cast(weights, dtype)) if return_weights else out

    def heads(self, part, rows, size, dtype):
        """The heads of query, key or value (`part` 0, 1 or 2), (B, heads, rows, size)."""
        weight, bias = (to_float("weight", x[part], dtype) for x in (self.projections, self.biases))
        parts = [slice(begin, begin + size) for begin in range(0, len(weight), size)]
        with np.errstate(invalid="ignore", over="ignore"):
            return rounded(np.stack([rows @ weight[part].T + bias[part] for part in parts], axis=1), dtype)

    def normed(self, heads, name, dtype):
        """Each row divided by the root of its mean square, and multiplied by the weights."""
        if self.qk_norm.get("center", False):
            heads = heads - heads.mean(axis=-1, keepdims=True)
        square = np.mean(heads * heads, axis=-1, keepdims=True)
        weight = self.qk_norm.get(name)
        weight = 1 if weight is None else cast(np.asarray(weight), arithmetic(dtype))
        return rounded(heads / np.sqrt(square + self.qk_norm.get("eps", 1e-6)) * weight, dtype)

    def attend(self, query, key, value, options, scores, sinks, dtype):
        """Softmax over the keys and the extra keys, which no mask hides and no bias changes: (out, weights)."""
        shared = self.num_heads // self.kv_heads
        key, value = np.repeat(key, shared, axis=1), np.repeat(value, shared, axis=1)
        seen, score, _, sink = compare(query, key, (len(query),), dtype, **options, **scores, sinks=sinks)
        value = np.broadcast_to(value, (len(query), *value.shape[1:]))
        nothing = dict.fromkeys([*options, "sinks"]) | dict(causal=False)
        for extra_key, extra_value in zip(*self.extra):
            extra_key = np.repeat(to_float("bias_k", extra_key, dtype), shared, axis=0)[None, :, None]
            extra_value = np.repeat(to_float("bias_v", extra_value, dtype), shared, axis=0)[None, :, None]
            more, added, _, _ = compare(query, extra_key, (len(query),), dtype, **nothing, **scores)
            seen, score = np.concatenate([seen, more], axis=-1), np.concatenate([score, added], axis=-1)
            value = np.concatenate([value, np.broadcast_to(extra_value, (len(query), *extra_value.shape[1:]))], axis=-2)
        weights = rounded(softmax(score, seen, sink)[0], dtype)
        return weighted_sum(weights, value, seen), weights


def rows_normed(norm, rows, dtype):
    """The norm of each row, rounded; `norm` as pre_norm and post_norm of the layer."""
    if norm is None:
        return rows
    options = dict(weight=norm.get("weight"), eps=norm.get("eps", 1e-6), dtype=arithmetic(dtype))
    if norm.get("center", False):
        return rounded(layer_norm(rows, bias=norm.get("bias"), **options), dtype)
    bias = norm.get("bias")
    return rounded(rms_norm(rows, **options) + (0 if bias is None else to_float("bias", bias, dtype)), dtype)
