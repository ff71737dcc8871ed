"""The attention function that transformers calls in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import attention as attend
from ..torch import attention_varlen
from ._cached import Rows, attend_rows
from ._lazy import Lazy, plain
from ._masks import seen_by
from ._weights import attend_with_weights

Options = dict[str, Any]  # of sdpa.torch.attention


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, *,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, head_mask: Tensor | None = None, output_attentions: bool | None = False,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of query (B, H, M, D) to key (B, G, N, D) and value (B, G, N, E): the result (B, M, H, E), and the
    weights (B, H, M, N) if `output_attentions`, else None."""
    scaling = scale_of(module, query) if scaling is None else scaling
    scores: Options = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    # A mask that is not given means what it means for transformers' own attention: causal from the first key on, if the
    # module is, and there is more than one query.
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else bool(is_causal))
    left = None if sliding_window is None else sliding_window - 1
    unmasked: Options = {"window": (left, 0), "q_offset": 0} if causal else {}
    seen = seen_by(attention_mask)
    if dropout or output_attentions or head_mask is not None:
        masked = seen_as_tensors(attention_mask, position_bias, key.shape[2])
        return attend_with_weights(
            query, plain(key), plain(value), dropout=dropout, head_mask=head_mask,
            window=unmasked.get("window") if attention_mask is None else None, **masked, **scores,
        )  # fmt: skip
    if cu_seq_lens_q is not None and (attention_mask is None or seen is not None):
        within = {"window": unmasked.get("window")} if seen is None else seen.window()
        starts = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return packed(query, plain(key), plain(value), starts, within | scores), None
    if type(key) is Lazy and isinstance(key.about, Rows) and key.about.still_there():
        return attend_rows(query, key.about, attention_mask, unmasked, position_bias, scores), None
    return attend_tensors(query, plain(key), plain(value), attention_mask, unmasked, position_bias, scores), None


def attend_tensors(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, unmasked: Options, position_bias: Tensor | None,
    scores: Options,
) -> Tensor:  # fmt: skip
    """The result (B, M, H, E)."""
    seen = seen_by(mask)
    if seen is not None and seen.bounded():
        pairs = seen.options() | seen_as_tensors(None, position_bias, key.shape[2])
        return whole(attend(query, key, value, **pairs, **scores))
    if seen is not None and position_bias is None:
        starts = seen.sequences()
        if starts is not None:
            return packed(query, key, value, starts, seen.window() | scores)
    pairs = seen_as_tensors(mask, position_bias, key.shape[2]) | (unmasked if mask is None else {})
    return whole(attend(query, key, value, **pairs, **scores))


def scale_of(module: Any, query: Tensor) -> float | None:
    """The scale if a module passes none.  GPT-2 leaves its own to its eager attention, until transformers 5."""
    if not hasattr(module, "scale_attn_by_inverse_layer_idx"):
        return None
    scale = query.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
    return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale


def whole(out: Tensor) -> Tensor:
    """The result (B, H, M, E) as transformers wants it, (B, M, H, E) without gaps.  It is laid out as query, which was
    projected in that order, so that this rarely copies."""
    return out.transpose(1, 2).contiguous()


def packed(query: Tensor, key: Tensor, value: Tensor, starts: tuple[Any, Any], options: Options) -> Tensor:
    """Attention within the sequences that all batches hold, one after another."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    rows = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    out = attention_varlen(*rows, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], **options)
    return out.reshape(*query.shape[:3], value.shape[3])


def cut(pairs: Tensor, keys: int) -> Tensor:
    """Some models make masks and biases for all keys that a static cache will ever hold."""
    return pairs if pairs.shape[-1] <= keys else pairs[..., :keys]


def seen_as_tensors(mask: Tensor | None, position_bias: Tensor | None, keys: int) -> Options:
    """The options `mask` and `bias`, whichever there is, of a mask that is boolean or added, and a bias."""
    options: Options = {}
    if mask is not None:
        mask = cut(plain(mask), keys)
        options["mask" if mask.dtype is torch.bool else "bias"] = mask
    if position_bias is not None:
        position_bias = cut(position_bias, keys)
        options["bias"] = position_bias + options["bias"] if "bias" in options else position_bias
    return options
