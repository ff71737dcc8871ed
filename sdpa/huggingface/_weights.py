"""Attention by torch's own functions, where the weights are wanted, or changed, as by dropout."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, head_mask: Tensor | None,
    window: tuple[int | None, int] | None, scale: float | None, softcap: float | None, sinks: Tensor | None,
    mask: Tensor | None = None, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result (B, M, H, E) and the weights (B, H, M, N).  `window` counts from the first key on."""
    groups, sums = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    per_group = query.unflatten(1, (groups, -1))  # (B, G, H / G, M, D)
    scores = (per_group @ key.unsqueeze(2).mT).flatten(1, 2).to(sums) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
        shown = bias > -torch.inf
        mask = shown if mask is None else mask & shown
    if window is not None:
        left, right = window
        within = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(right)
        within = within if left is None else within.triu(-left)
        mask = within if mask is None else mask & within
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        logit = sinks.to(sums)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, logit], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    if mask is not None:  # a query that sees no key has weights of 0
        weights = weights * mask
    weights = torch.nn.functional.dropout(weights.to(query.dtype), dropout)
    if head_mask is not None:
        weights = weights * head_mask
    out = weights.unflatten(1, (groups, -1)) @ value.unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2).contiguous(), weights
