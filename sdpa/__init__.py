"""Scaled dot-product attention for NumPy on CPUs: softmax(Q K^T / sqrt(d)) V."""

from . import reference
from ._explain import Explanation, explain
from ._forward import attention, attention_weights, merge, scaled_dot_product_attention
from ._kernels import build_info, kernels

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "attention",
    "attention_weights",
    "build_info",
    "explain",
    "kernels",
    "merge",
    "reference",
    "scaled_dot_product_attention",
]
