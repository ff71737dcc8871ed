"""Tensors whose numbers are made when something asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import tree_map_only

# What a lazy tensor answers without its numbers.
KNOWN = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda", "is_nested")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


class Lazy(Tensor):
    """A tensor that only has shape, dtype and device until a function of torch takes it: then it is `make()`.

    Models hand masks, and the keys and values of a cache, from where they are made to where attention is computed.
    This library's attention reads what the tensor is `about`, and needs no numbers.  Anything else that takes the
    tensor on its way, such as an index or another implementation of attention, finds a tensor like any other.
    """

    about: Any
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def __new__(cls, shape, dtype: torch.dtype, about: Any, make: Callable[[], Tensor]):
        self = Tensor._make_subclass(cls, torch.empty((), dtype=dtype).expand(shape))
        self.about, self._make, self._made = about, make, None
        return self

    def made(self) -> Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Lazy, Lazy.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        return self.made().clone()

    def __reduce_ex__(self, protocol):
        return self.made().__reduce_ex__(protocol)


# torch.compile records no graph of these tensors: it leaves a function that is given one to Python.
torch._dynamo.config.nontraceable_tensor_subclasses.add(Lazy)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or what it is when it is made."""
    return tensor.made() if type(tensor) is Lazy else tensor
