"""Tensors as arrays that share their memory, and arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _to_dlpack
from torch.nn import Parameter

from .. import _core
from .._checks import float_dtype

try:
    BFLOAT16 = float_dtype("bfloat16")
except ImportError:
    BFLOAT16 = None


def check_plain(**tensors) -> None:
    """Raise where a tensor is something else, or a subclass, whose memory may mean anything."""
    for name, tensor in tensors.items():
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            raise TypeError(f"{name} is of type {type(tensor).__name__}: it must be a plain torch.Tensor")


def array_of(name: str, tensor):
    """The memory of a tensor as an array."""
    if type(tensor) is not Tensor:
        check_plain(**{name: tensor})
    try:
        array = None if tensor.is_neg() else _core.tensor_memory(_to_dlpack(tensor))
    except (BufferError, RuntimeError):  # of a layout without strides, or a dtype of torch alone
        array = None
    return _unusual(name, tensor) if array is None else array


def _unusual(name, tensor):
    """The same for a tensor that the kernels cannot take as it is; mostly this raises."""
    check_dense(**{name: tensor})
    if tensor.dtype is torch.bfloat16:
        float_dtype("bfloat16")  # raises: ml_dtypes is missing
    try:
        if tensor.numel() and not tensor.data_ptr():
            raise RuntimeError("its memory was given up")
        return tensor.detach().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} of dtype {tensor.dtype} cannot be read: {error}") from error


def check_dense(**tensors) -> None:
    """Raise where one of them is no dense tensor on the CPU."""
    check_plain(**tensors)
    for name, tensor in tensors.items():
        why = obstacle(tensor)
        if why is not None:
            raise TypeError(f"{name} is {why}: it must be a dense tensor on the CPU")


def obstacle(tensor) -> str | None:
    """What keeps NumPy from the memory of a tensor, or None."""
    if tensor.is_nested:
        return "nested"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype})"
    return None


def tensor_of(array) -> Tensor:
    if array.itemsize == 2 and array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def written(tensor):
    """The tensor, of which autograd now knows that its memory changed."""
    if isinstance(tensor, Tensor):
        torch.autograd.graph.increment_version(tensor)
    return tensor


def as_tensor(given: Any) -> Tensor:
    """The tensor of whatever stands for an array.  A number may be unknown while a graph is made."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, (int, float, torch.SymInt)):
        return torch.full((), given)  # type: ignore[arg-type]
    return torch.as_tensor(given)


def without_tensors(options):
    """The options of a call, arrays where they are tensors."""
    return {name: array_of(name, given) if isinstance(given, Tensor) else given for name, given in options.items()}
