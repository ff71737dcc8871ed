"""Scaled dot-product attention for NumPy on CPUs: softmax(Q K^T / sqrt(d)) V."""

import importlib
from typing import TYPE_CHECKING

from . import reference
from ._attention.additive import additive_attention
from ._attention.backward import attention_backward, attention_varlen_backward
from ._attention.explain import Explanation, explain
from ._attention.forward import attention, attention_weights, merge, scaled_dot_product_attention
from ._attention.gradients import Gradients
from ._attention.packed import attention_varlen
from ._cache.kv import KVCache
from ._cache.paged import PagedKVCache
from ._layer.layer import MultiHeadAttention
from ._layer.linear import FeedForward, Linear
from ._layer.norm import layer_norm, rms_norm
from ._layer.rotary import rotary
from ._runtime.kernels import build_info, kernels

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import lab as lab
    from . import models as models

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "FeedForward",
    "Gradients",
    "KVCache",
    "Linear",
    "MultiHeadAttention",
    "PagedKVCache",
    "additive_attention",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "build_info",
    "distributed",
    "explain",
    "kernels",
    "lab",
    "layer_norm",
    "merge",
    "models",
    "reference",
    "rms_norm",
    "rotary",
    "scaled_dot_product_attention",
]


def __getattr__(name):
    """The laboratory, the models and what needs MPI are imported when they are first asked for."""
    if name in ("distributed", "lab", "models"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
