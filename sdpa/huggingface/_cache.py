"""past_key_values on KVCache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache
from transformers.configuration_utils import PretrainedConfig

from .._cache import kv
from ..torch._tensors import array_of
from ._cached import Rows
from ._lazy import plain

OPTIONS = frozenset({"dtype", "capacity", "window", "keep", "group"})


class Cache(DynamicCache):
    """`past_key_values` that holds the keys and values of each layer in an `sdpa.KVCache`.

    Parameters
    ----------
    config
        The config of the model.  It says which layers have a sliding window; of those only the window is kept.
    dtype
        The dtype to which keys and values are rounded: "float32", "bfloat16", "float16" or "int8", as a string or a
        dtype of NumPy or torch.  Default: that of the model.
    capacity
        The most tokens; appending more is an error.  Default: no limit.
    window, keep, group
        As in `sdpa.KVCache`.  The window holds for all layers that have no window or a larger one.

    Notes
    -----
    A new token is written after the tokens of the cache, where other caches copy all tokens.  The attention that
    `register` registers reads keys and values where they lie.  Other implementations get tensors: views, or copies
    where int8 or a window asks for them.  Beam search, assisted generation, `crop` and copies (`copy.deepcopy`, in
    which memory is shared until one of the two changes) work as with DynamicCache.  There are no gradients through the
    cache.

    Examples
    --------
    >>> import torch, transformers, sdpa.huggingface
    >>> sdpa.huggingface.register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="cpu_attention")
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> cache = sdpa.huggingface.Cache(config, dtype="int8")
    >>> tokens = model.generate(torch.tensor([[5, 3, 8]]), past_key_values=cache, max_new_tokens=4, min_new_tokens=4)
    >>> tokens.shape, cache.get_seq_length()
    (torch.Size([1, 7]), 6)
    """

    def __init__(self, config, **options: Any):
        if config is not None and not isinstance(config, PretrainedConfig):
            raise TypeError(f"config is of type {type(config).__name__}: it must be that of a model of transformers")
        unknown = options.keys() - OPTIONS
        if unknown:
            raise TypeError(f"Cache does not take {', '.join(sorted(unknown))}, but {', '.join(sorted(OPTIONS))}")
        if isinstance(options.get("dtype"), torch.dtype):
            options["dtype"] = str(options["dtype"]).removeprefix("torch.")
        kv.KVCache(1, 1, 1, **options)  # raises what is wrong with the options, before any token comes
        super().__init__(config=config)
        made: Any = self  # the types of its attributes are known only where transformers is installed
        if made.layer_class_to_replicate is not None:
            made.layer_class_to_replicate = partial(Layer, None, options)
        made.layers = [ours(layer, options) for layer in made.layers]

    def activate_past_recording(self) -> None:
        """Keep all tokens from now on, also those that no window shows any more, so that `crop` may take back any."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):  # transformers 4 has no such thing
                layer.activate_past_recording()


def ours(layer, options):
    """The layer that takes the place of one of a DynamicCache.  What is not attention, or has more than keys and
    values, stays."""
    if type(layer) is cache_utils.DynamicLayer:
        return Layer(None, options)
    if type(layer) is cache_utils.DynamicSlidingWindowLayer:
        return Layer(layer.sliding_window, options)
    return layer


class Layer(CacheLayerMixin):
    """The keys and values of one layer."""

    is_croppable = True

    def __init__(self, sliding_window: int | None, options: dict[str, Any]):
        windows = [window for window in (sliding_window, options.get("window")) if window is not None]
        self.sliding_window = min(windows, default=None)
        self.options, self.record_past = options, False
        self.kv: kv.KVCache | None = None
        self.learned: Tensor | None = None  # requires a gradient if any key or value did

    # ------------------------------------------------------------------------------------- what transformers asks for

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    @property
    def is_initialized(self) -> bool:
        return self.kv is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        options = self.options | {"window": None if self.record_past else self.sliding_window}
        if options["window"] is None:
            options.pop("keep", None)
        options.setdefault("dtype", array_of("key", key_states[:0]).dtype)
        batch, heads, _, size = key_states.shape
        self.kv = kv.KVCache(batch, heads, size, value_dim=value_states.shape[-1], **options)

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return the tokens that the new tokens may see, as lazy tensors."""
        if self.kv is None:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        first = self.get_mask_sizes(count)[1]
        cache: kv.KVCache = self.kv  # type: ignore[assignment]
        cache.append(array_of("key", key_states), array_of("value", value_states))
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self.learned = torch.zeros(0, requires_grad=True)
        return Rows(cache, first, len(cache), self.learned).tensors(self.dtype)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.kv is None else self._kept()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.kv is None else self._kept()[1]

    def _kept(self):
        return Rows(self.kv, self.get_mask_sizes(0)[1], len(self.kv), self.learned).tensors(self.dtype)

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self.kv is None else len(self.kv)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """How many keys the new queries are given, and the position of the first."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]  # positions, in 4.57
        length = self.get_seq_length()
        first = 0 if self.sliding_window is None else max(0, length - self.sliding_window + 1)
        return length - first + count, first

    def get_max_length(self) -> int:
        if self.sliding_window is not None:
            return self.sliding_window
        return -1 if self.options.get("capacity") is None else self.options["capacity"]

    get_max_cache_shape = get_max_length  # its name in 4.57

    def reset(self) -> None:
        self.kv = self.learned = None

    def crop(self, tokens: int) -> None:
        """Forget as many of the last tokens as a negative number says, or all but as many of the first as a positive
        number says."""
        if self.kv is not None and tokens:
            length = len(self.kv)
            self.kv.truncate(max(0, length + tokens) if tokens < 0 else min(length, tokens))

    def activate_past_recording(self) -> None:
        """Keep tokens that the window has left behind, as long as none is missing yet."""
        self.record_past = True
        if self.kv is not None and self.kv.window is not None and len(self.kv) <= self.kv.window:
            keys, values = map(plain, Rows(self.kv, 0, len(self.kv)).tensors(self.dtype))
            self.kv = None
            self.update(keys, values)

    # ---------------------------------------------------------------------------------------------------- of batches

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self._select(torch.arange(self.kv.batch)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self._select(torch.arange(self.kv.batch).repeat_interleave(repeats))

    def _select(self, batches: Tensor) -> None:
        if self.kv is not None and (chosen := batches.tolist()) != list(range(self.kv.batch)):
            self.kv = kv.select(self.kv, chosen)

    def offload(self) -> None:
        """It is on the CPU."""

    prefetch = offload
