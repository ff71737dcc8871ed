"""Keys and values that lie in a KVCache, and attention to them where they lie."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._cache import kv
from .._cache.attend import attend
from ..torch._tensors import array_of, tensor_of, without_tensors
from ..torch._watched import without_gradients
from ._lazy import Lazy, plain
from ._masks import seen_by

ATTEND = kv.ATTEND._replace(most=torch.get_num_threads)


REFUSED = (
    "a gradient was asked for through sdpa.huggingface.Cache, which keeps numbers only: train with use_cache=False, or "
    "with transformers' DynamicCache"
)


class Rows(NamedTuple):
    """The tokens from `begin` up to `end` of a cache.  `learned` requires a gradient if any that came to it did."""

    cache: kv.KVCache
    begin: int
    end: int
    learned: Tensor | None = None

    def still_there(self) -> bool:
        return len(self.cache) == self.end

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Lazy keys and values."""
        cache, shape = self.cache, (self.cache.batch, self.cache.kv_heads, self.end - self.begin)
        return tuple(
            Lazy((*shape, size), dtype, self, partial(self._made, name, dtype))
            for name, size in (("keys", cache.head_dim), ("values", cache.value_dim))
        )  # type: ignore[return-value]

    def _made(self, name: str, dtype: torch.dtype) -> Tensor:
        made = tensor_of(kv.tokens(self.cache, name, self.begin, self.end)).to(dtype)
        return without_gradients(REFUSED, made, self.learned)


@torch.compiler.disable
def attend_rows(
    query: Tensor, rows: Rows, mask: Tensor | None, unmasked: dict[str, Any], position_bias: Tensor | None,
    scores: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The result (B, M, H, E) of attention to the tokens of a cache, which are not copied."""
    cache = rows.cache
    # Without a mask the last query sees the last key: unlike those of a static cache, all keys are there.
    options = {name: given for name, given in unmasked.items() if name != "q_offset"}
    bias = position_bias
    seen = seen_by(mask)
    if seen is not None and seen.bounded():
        options = dict(seen.options(0))
    elif mask is not None:
        pairs = plain(mask)
        if pairs.dtype is torch.bool:
            options = {"mask": before(pairs, rows, True, False)}
        else:
            options, bias = {}, pairs if bias is None else bias + pairs
    if bias is not None:
        options["bias"] = before(bias, rows, 0.0, float("-inf"))
    if cache.window is not None:  # it hides what is out of the window, and what is ahead
        ours = options.pop("window", None)
        if ours is not None and ours[0] is not None and ours[0] < cache.window - 1:
            options["window"] = ours
    options["causal"] = False  # what is, is a window
    options |= {name: given for name, given in scores.items() if given is not None}
    if options.get("q_offset") == rows.end - query.shape[2]:
        del options["q_offset"]
    out = tensor_of(attend(cache._store, array_of("query", query), without_tensors(options), ATTEND))
    out = without_gradients(REFUSED, out, query, rows.learned, position_bias, scores["sinks"])
    return out.transpose(1, 2).contiguous()


def before(pairs: Tensor, rows: Rows, shown, hidden) -> Tensor:
    """Pairs with the keys from `begin` on as pairs with all keys.  No query sees those before, unless the cache, which
    hides the others itself, keeps the first ones."""
    pairs = pairs[..., : rows.end - rows.begin].detach()
    if not rows.begin or pairs.shape[-1] == 1:
        return pairs
    return torch.nn.functional.pad(pairs, (rows.begin, 0), value=hidden if rows.cache.window is None else shown)
