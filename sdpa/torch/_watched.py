"""Who else takes part in a call."""

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad


def watched() -> bool:
    """Whether more than autograd must see the call: a compiler, torch.func, a dispatch mode or a trace."""
    if torch.compiler.is_compiling():
        return True
    return peek_interpreter_stack() is not None or _len_torch_dispatch_stack() > 0 or _get_tracing_state() is not None


def autocast(*tensors):
    """In the dtype of torch.autocast, as torch's own attention: all floats but float64."""
    dtype = torch.get_autocast_dtype("cpu")
    return [x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors]


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, why, result, *inputs):
        ctx.why = why
        return result.new_empty(0).set_(result)  # the same memory, but no view, which must not be changed in place

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(ctx.why)


def without_gradients(why: str, result: Tensor, *inputs: Tensor | None) -> Tensor:
    """A result that was computed from these inputs: a gradient that is asked of it is an error, not wrong."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Refused.apply(why, result, *inputs)  # type: ignore[no-untyped-call, no-any-return]
    return result


def forward_mode() -> bool:
    """Whether anything is differentiated forward."""
    return forward_ad._current_level >= 0


def refuse_tangents(**tensors) -> None:
    """Raises where forward-mode differentiation follows one of these: its tangent would be lost."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent: there are gradients in reverse mode only")
