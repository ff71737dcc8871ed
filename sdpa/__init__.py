"""Scaled dot-product attention for NumPy on CPUs: softmax(Q K^T / sqrt(d)) V."""

import importlib
from typing import TYPE_CHECKING

from . import reference
from ._additive import additive_attention
from ._backward import attention_backward, attention_varlen_backward
from ._cache import KVCache
from ._explain import Explanation, explain
from ._forward import attention, attention_weights, merge, scaled_dot_product_attention
from ._gradients import Gradients
from ._kernels import build_info, kernels
from ._layer import MultiHeadAttention
from ._paged import PagedKVCache
from ._rotary import rotary
from ._varlen import attention_varlen

if TYPE_CHECKING:
    from . import lab as lab

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Gradients",
    "KVCache",
    "MultiHeadAttention",
    "PagedKVCache",
    "additive_attention",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "build_info",
    "explain",
    "kernels",
    "lab",
    "merge",
    "reference",
    "rotary",
    "scaled_dot_product_attention",
]


def __getattr__(name):
    """The laboratory is imported when it is first asked for."""
    if name == "lab":
        return importlib.import_module(".lab", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
