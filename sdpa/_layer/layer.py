"""Multi-head attention with its weights: projections in, attention, and the projection out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .. import _core
from .._cache.kv import KVCache
from .._cache.paged import PagedKVCache
from .._checks import flag, whole_number
from .._options import WORDS, InputOptions, takes
from .._runtime import threads as _threads
from . import convert
from .call import attend, check_positions, heads, inputs, residual_rows, turn_heads
from .keys import keys_for
from .linear import Linear
from .parts import Norm, extra_keys, input_weights, row_norm, turns, vector_or_none, weight_array

if TYPE_CHECKING:
    from typing_extensions import Unpack

Rotary: TypeAlias = "bool | float | dict[str, Any] | None"
QKNorm: TypeAlias = "bool | Sequence[ArrayLike] | dict[str, Any] | None"
RowNorm: TypeAlias = "bool | dict[str, Any] | None"

OF_LAYER = WORDS | {
    "threads": "that of the layer, else ",
    "offset": "in self-attention the queries stand where their keys do; else the last query stands at the last key",
}
CALL = takes("MultiHeadAttention.__call__", InputOptions, OF_LAYER, causal=None)


class MultiHeadAttention:
    """Multi-head attention: query heads from x, key and value heads from x or a context, and a projection of all heads.

    In detail::

        query   Wq x + bq         num_heads heads of head_dim
        key     Wk context + bk   kv_heads heads of head_dim; query head h uses head h // (num_heads / kv_heads)
        value   Wv context + bv   kv_heads heads of value_dim
        result  Wo (the results of attention for all heads, one after the other) + bo

    Weights have the layout of PyTorch, (out, in), and any float dtype.  The layer avoids copying the weights, so they
    must not change afterwards.  `from_torch`, `from_keras` and `from_flax` take the weights of trained layers.

    Parameters
    ----------
    embed_dim, num_heads
        The size of x, and the number of query heads.
    kv_heads
        The number of key and value heads, a divisor of num_heads.  Default: num_heads.
    head_dim, value_dim
        The sizes of a key and of a value.  Default: embed_dim / num_heads, and head_dim.
    kdim, vdim
        The sizes of the contexts that keys and values come from.  Default: embed_dim.
    in_proj_weight
        Wq, Wk and Wv on top of one another, (num_heads * head_dim + kv_heads * (head_dim + value_dim), embed_dim).
    q_proj_weight, k_proj_weight, v_proj_weight
        Wq, Wk and Wv as three arrays, needed for other kdim or vdim.
    in_proj_bias
        bq, bk and bv in one array, or None.
    out_proj_weight
        Wo, (out_dim, num_heads * value_dim).
    out_proj_bias
        bo, (out_dim), or None.
    bias_k, bias_v : (kv_heads * head_dim) and (kv_heads * value_dim)
        One more key and value, which every query sees, whatever masks, lengths and windows say.  This key has no
        position, is not normed, and is not kept in caches.
    add_zero_attn
        If True, one more such key and value, of zeros.
    rotary
        Rotary embedding of queries and keys: True, a base, or a dict with any of the arguments base, frequencies,
        interleaved and dim of `rotary`.
    qk_norm
        Norm of each query and key by its root mean square, before the rotary embedding: True, a pair of weights
        (head_dim) for queries and keys, or a dict with any of query, key, eps (default 1e-6) and center. center=True
        subtracts the mean first, as LayerNorm does.  Weights of 1 / sqrt(head_dim) give unit length (L2).
    pre_norm
        Norm of the rows of x before all else, by the root of their mean square: True, or a dict with any of weight
        (embed_dim), bias (embed_dim), eps (default 1e-6) and center. center=True makes it LayerNorm.
    post_norm
        Norm of the rows of the result (out_dim), after the residual of a call was added.
    batch_first
        If False, arrays are (M, B, size) instead of (B, M, size).
    threads
        The default of the option `threads` of calls.

    Notes
    -----
    All of these can be read as attributes.  Weights are read-only there, and in_proj_weight is None if embed_dim, kdim
    and vdim differ.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> rng = np.random.default_rng(0)
    >>> layer = sdpa.MultiHeadAttention(
    ...     64, 4, kv_heads=2, rotary=True, in_proj_weight=rng.standard_normal((128, 64), np.float32) / 8,
    ...     out_proj_weight=rng.standard_normal((64, 64), np.float32) / 8)
    >>> layer
    <sdpa.MultiHeadAttention 64 to 64, 4 heads of 16 on 2, float32, rotary>
    >>> x = rng.standard_normal((2, 10, 64), np.float32)
    >>> whole = layer(x, causal=True)
    >>> cache = layer.new_cache(batch=2)
    >>> steps = [layer(x[:, i : i + 1], cache=cache) for i in range(10)]      # token by token
    >>> bool(abs(np.concatenate(steps, axis=1) - whole).max() < 1e-5)
    True
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, kdim: int | None = None, vdim: int | None = None,
        in_proj_weight: ArrayLike | None = None, q_proj_weight: ArrayLike | None = None,
        k_proj_weight: ArrayLike | None = None, v_proj_weight: ArrayLike | None = None,
        in_proj_bias: ArrayLike | None = None, out_proj_weight: ArrayLike, out_proj_bias: ArrayLike | None = None,
        bias_k: ArrayLike | None = None, bias_v: ArrayLike | None = None, add_zero_attn: bool = False,
        rotary: Rotary = None, qk_norm: QKNorm = None, pre_norm: RowNorm = None, post_norm: RowNorm = None,
        batch_first: bool = True, threads: int | None = None,
    ) -> None:  # fmt: skip
        self._take_sizes(embed_dim, num_heads, kv_heads, head_dim, value_dim, kdim, vdim)
        rows = self.num_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        self.in_proj_weight, separate = input_weights(
            in_proj_weight, (q_proj_weight, k_proj_weight, v_proj_weight), rows, (self.embed_dim, self.kdim, self.vdim)
        )
        self.q_proj_weight, self.k_proj_weight, self.v_proj_weight = separate
        self._ends = np.cumsum([0, *rows]).tolist()
        counts, sizes = (self.num_heads, self.kv_heads, self.kv_heads), (self.head_dim, self.head_dim, self.value_dim)
        self._heads = list(zip(self._ends, counts, sizes))  # where those of queries, keys and values begin
        self.in_proj_bias = vector_or_none("in_proj_bias", in_proj_bias, sum(rows), "as many as in_proj has rows")
        heads = self.num_heads * self.value_dim
        axes = "(out_dim, num_heads * value_dim)"
        self.out_proj_weight = weight_array("out_proj_weight", out_proj_weight, (None, heads), axes)
        self.out_dim = len(self.out_proj_weight)
        axes = "as many as out_proj_weight has rows"
        self.out_proj_bias = vector_or_none("out_proj_bias", out_proj_bias, self.out_dim, axes)
        self.bias_k = vector_or_none("bias_k", bias_k, rows[1], "(kv_heads * head_dim,)")
        self.bias_v = vector_or_none("bias_v", bias_v, rows[2], "(kv_heads * value_dim,)")
        self.add_zero_attn = flag("add_zero_attn", add_zero_attn)
        self._extra = extra_keys(self)
        self.rotary, self._turns = rotary, turns(rotary, self.head_dim)
        self.qk_norm, self._norm = qk_norm, None if qk_norm is None else Norm(qk_norm, self.head_dim)
        self.pre_norm, self._before = pre_norm, row_norm("pre_norm", pre_norm, self.embed_dim)
        self.post_norm, self._after = post_norm, row_norm("post_norm", post_norm, self.out_dim)
        self.batch_first = flag("batch_first", batch_first)
        _threads.count(threads)
        self.threads = threads
        self._out = Linear(self.out_proj_weight, self.out_proj_bias)
        # By (first, last): one projection for those of query, key and value (0, 1, 2) that come from the same rows.
        self._in: dict[tuple[int, int], Linear] = {}

    def _take_sizes(self, embed_dim, num_heads, kv_heads, head_dim, value_dim, kdim, vdim):
        self.embed_dim = whole_number("embed_dim", embed_dim)
        self.num_heads = whole_number("num_heads", num_heads)
        self.kv_heads = self.num_heads if kv_heads is None else whole_number("kv_heads", kv_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads is {num_heads} and kv_heads {kv_heads}: num_heads must be a multiple of kv_heads"
            )
        if head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim} and num_heads {num_heads}: embed_dim must be a multiple of num_heads, "
                "or head_dim given"
            )
        self.head_dim = self.embed_dim // self.num_heads if head_dim is None else whole_number("head_dim", head_dim)
        self.value_dim = self.head_dim if value_dim is None else whole_number("value_dim", value_dim)
        self.kdim = self.embed_dim if kdim is None else whole_number("kdim", kdim)
        self.vdim = self.embed_dim if vdim is None else whole_number("vdim", vdim)

    @classmethod
    def from_torch(
        cls, module: Any, *, num_heads: int | None = None, prefix: str = "", batch_first: bool | None = None,
        add_zero_attn: bool | None = None, rotary: Rotary = None, qk_norm: QKNorm = None, pre_norm: RowNorm = None,
        post_norm: RowNorm = None, threads: int | None = None,
    ) -> MultiHeadAttention:  # fmt: skip
        """The layer with the weights of a torch.nn.MultiheadAttention, or of its state dict (tensors or NumPy arrays).

        Parameters
        ----------
        module
            The module, or the dict.
        num_heads
            Must be given with a state dict.
        prefix
            What the names begin with in the state dict of a whole model, such as "encoder.layers.0.self_attn.".
        batch_first, add_zero_attn
            Default: those of the module; with a state dict, True and False.
        rotary, qk_norm, pre_norm, post_norm, threads
            As for MultiHeadAttention.

        Notes
        -----
        Results are those of the module in eval mode, without dropout.  You may need to invert masks: True means *may
        attend* here, and *may not attend* in that module.
        """
        options = convert.of_torch(module, num_heads, prefix, batch_first, add_zero_attn)
        return cls(**options, rotary=rotary, qk_norm=qk_norm, pre_norm=pre_norm, post_norm=post_norm, threads=threads)

    @classmethod
    def from_keras(
        cls, layer: Any, *, prefix: str = "", rotary: Rotary = None, qk_norm: QKNorm = None, pre_norm: RowNorm = None,
        post_norm: RowNorm = None, threads: int | None = None,
    ) -> MultiHeadAttention:  # fmt: skip
        """The layer with the weights of a keras.layers.MultiHeadAttention or GroupQueryAttention.

        Parameters
        ----------
        layer
            The Keras layer; or the list that its get_weights() returns; or a dict of "query/kernel", "query/bias",
            "key/kernel", ..., "attention_output/bias", which may be nested.
        prefix
            What the names begin with in the dict of a whole model, such as "decoder/self_attention/".
        rotary, qk_norm, pre_norm, post_norm, threads
            As for MultiHeadAttention.

        Notes
        -----
        Keras layers are called with (query, value, key), this one with (x, context, value_context), which is query, key
        and value.  A layer with a sliding_window is refused: pass its get_weights(), and the window in each call.
        """
        options = convert.of_keras(layer, prefix)
        return cls(**options, rotary=rotary, qk_norm=qk_norm, pre_norm=pre_norm, post_norm=post_norm, threads=threads)

    @classmethod
    def from_flax(
        cls, params: Any, *, rotary: Rotary = None, qk_norm: QKNorm = None, pre_norm: RowNorm = None,
        post_norm: RowNorm = None, threads: int | None = None,
    ) -> MultiHeadAttention:  # fmt: skip
        """The layer with the weights of a flax.linen.MultiHeadDotProductAttention or flax.nnx.MultiHeadAttention.

        Parameters
        ----------
        params
            The parameters of the linen module, or the nnx.Param state of the nnx module: {"query": {"kernel", "bias"},
            "key": ..., "value": ..., "out": ...}, which may be nested in "params". query_ln and key_ln, if present,
            become qk_norm.
        rotary, qk_norm, pre_norm, post_norm, threads
            As for MultiHeadAttention.
        """
        options = convert.of_flax(params)
        if qk_norm is not None:
            if "qk_norm" in options:
                raise ValueError(f"qk_norm is {qk_norm!r} and params have query_ln and key_ln: qk_norm must be None")
            options["qk_norm"] = qk_norm
        return cls(**options, rotary=rotary, pre_norm=pre_norm, post_norm=post_norm, threads=threads)

    def new_cache(self, batch: int = 1, **options: Any) -> KVCache:
        """An empty KVCache for the keys and values of this layer.

        Parameters
        ----------
        batch : int
            The number of batches, B.
        options
            Arguments of KVCache, such as dtype, capacity and window. dtype is float32 by default.  If x has a half
            type, give that type, or int8.
        """
        return KVCache(batch, self.kv_heads, self.head_dim, value_dim=self.value_dim, **options)

    @CALL
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = None, *, value_context: ArrayLike | None = None,
        cache: KVCache | PagedKVCache | None = None, sequences: int | Sequence[int] | None = None,
        cu_seqlens: ArrayLike | None = None, positions: ArrayLike | None = None, residual: ArrayLike | None = None,
        return_weights: bool = False, **options: Unpack[InputOptions],
    ) -> Any:  # fmt: skip
        """The layer's result (B, M, out_dim) for x (B, M, embed_dim).  Both may come without the axis B.

        The dtype of x is float16, bfloat16 (of ml_dtypes), float32 or float64.  The result, queries, keys and values
        have the same dtype; sums are float32 at least.

        Parameters
        ----------
        x : array (B, M, embed_dim)
            What queries come from.
        context
            What keys come from, (B, N, kdim).  All batches may share one context, (1, N, kdim) or (N, kdim).  Default:
            x, which is self-attention.
        value_context
            What values come from, (B, N, vdim).  Default: context.
        cache
            A KVCache, such as `new_cache` returns, whose batch is B.  The call appends its keys and values, and its
            queries attend to all tokens of the cache.  If the context is in the cache already, give a context of no
            rows.  Or a PagedKVCache: see sequences.  A call that fails appends nothing.
        sequences, cu_seqlens
            With a PagedKVCache, the sequence, or the list of sequences, to which the rows of x (T, embed_dim) belong.
            Sequence b has the rows from cu_seqlens[b] to cu_seqlens[b + 1], by default one.
        positions
            The positions of the rows of x, for the rotary embedding alone, as for `rotary`: a number, (M) or (B, M).
            Default: the positions that masks use.
        residual
            An array like the result, which is added to the result before that is rounded.  With pre_norm or post_norm,
            layer(x, residual=x) is the attention block of a transformer.
        return_weights
            Also return the weights (B, H, M, N), H = num_heads.  N includes the tokens of the cache, and the keys of
            bias_k and add_zero_attn come last.  Caches with a window, with int8 or with pages have no weights to
            return.
        {options}

        Notes
        -----
        The default of causal is True in self-attention with a cache, else False.  N and kv_lengths count the rows of
        the context, or of x in self-attention; rows at and past the length are not appended to a cache either.  With a
        cache, row i of x comes after the tokens that were there before.
        """
        CALL.check(options)
        x, context, value_context, batched = inputs(self, x, context, value_context, cache)
        check_positions(self, positions, x)
        residual = residual_rows(self, residual, x, batched)
        return_weights = flag("return_weights", return_weights)
        kv_lengths, q_offset, threads = options.pop("kv_lengths", None), options.get("q_offset"), options.get("threads")
        if threads is None and self.threads is not None:
            threads = options["threads"] = self.threads
        place = keys_for(cache, sequences, cu_seqlens, x=x, context=context, kv_lengths=kv_lengths, layer=self)
        if options.get("causal") is None:
            options["causal"] = place.causal
        if return_weights:
            place.check_weights()
        query, key, value = heads(self, self._before(x, threads), context, value_context, threads)
        if self._norm is not None:
            self._norm.apply(query, key, threads)
        if self._turns is not None:
            key = turn_heads(self, query, key, place, context is None, positions, q_offset, threads)
        place.append(key, value)
        try:
            out, weights = attend(query, place, self._extra, return_weights, options)
            out = self._out.apply(_core.join_heads(out), threads, residual=residual)
            out = self._after(out, threads)
        except BaseException:
            place.undo()
            raise
        if not batched:
            out, weights = out[0], None if weights is None else weights[0]
        elif not self.batch_first:
            out = out.swapaxes(0, 1)
        return (out, weights) if return_weights else out

    def __getstate__(self):
        """Without the weights as kernels read them: that layout belongs to one version of the library alone."""
        return self.__dict__ | {"_in": {}, "_out": Linear(self.out_proj_weight, self.out_proj_bias)}

    def __repr__(self):
        heads = f"{self.num_heads} heads of {self.head_dim}"
        if self.value_dim != self.head_dim:
            heads += f" and {self.value_dim}"
        if self.kv_heads != self.num_heads:
            heads += f" on {self.kv_heads}"
        parts = [f"{self.embed_dim} to {self.out_dim}", heads]
        if (self.kdim, self.vdim) != (self.embed_dim, self.embed_dim):
            parts.append(f"contexts of {self.kdim} and {self.vdim}")
        parts.append(self.q_proj_weight.dtype.name)
        named = dict(
            rotary=self._turns,
            qk_norm=self._norm,
            pre_norm=self.pre_norm,
            post_norm=self.post_norm,
            bias_kv=self.bias_k,
        )  # fmt: skip
        parts += [name for name, there in named.items() if there is not None]
        parts += ["add_zero_attn"] * bool(self.add_zero_attn) + ["batch second"] * (not self.batch_first)
        return f"<sdpa.MultiHeadAttention {', '.join(parts)}>"
