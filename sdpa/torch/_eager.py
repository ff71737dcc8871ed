"""Calls while nothing but autograd watches: directly from tensors to the compiled part, and the gradients of that.

A call through torch's dispatcher takes several microseconds, as long as a small call itself (_operators.py has those).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _core
from .._options import PACKED, WORDS, AttentionOptions, InputOptions, takes
from .._options.signatures import Keywords
from .._runtime import kernels
from ._tensors import array_of, check_plain, tensor_of, without_tensors, written

OWN_WORDS = {"array": "tensor", "most": "torch.get_num_threads()"}
DIFFERENTIABLE = ("bias", "sinks")  # of the options


class Function(NamedTuple):
    """A function of the compiled part and its gradients.  Their last positional arguments are where sequences begin."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    options: Keywords
    backward_options: Keywords


def function(name: str, words) -> Function:
    def options(name, kind):
        return takes(name, kind, words | OWN_WORDS)._replace(most=torch.get_num_threads)

    backward = f"{name}_backward"
    return Function(
        getattr(_core, name), getattr(_core, backward), options(name, AttentionOptions), options(backward, InputOptions)
    )


ATTENTION = function("attention", WORDS)
ATTENTION_VARLEN = function("attention_varlen", PACKED)


def attend(function: Function, query, key, value, starts, options):
    """What a public function returns."""
    if not type(query) is type(key) is type(value) is Tensor:
        check_plain(query=query, key=key, value=value)
    if torch.is_grad_enabled() and wants_gradients(query, key, value, options):
        return _with_gradients(function, query, key, value, starts, options)
    return compute(function, query, key, value, starts, options)


def compute(function: Function, query, key, value, starts, options):
    """The same without gradients."""
    arrays = without_tensors(options) if options else options
    result = function.forward(
        kernels.default, array_of("query", query), array_of("key", key), array_of("value", value), *starts, arrays,
        function.options,
    )  # fmt: skip
    if not options:
        return tensor_of(result)
    out, lse = result if type(result) is tuple else (result, None)
    given = options.get("out")
    out = tensor_of(out) if given is None else written(given)
    return out if lse is None else (out, tensor_of(lse))


def wants_gradients(query, key, value, options) -> bool:
    wanted = query.requires_grad or key.requires_grad or value.requires_grad
    for name, given in options.items():
        if isinstance(given, Tensor) and given.requires_grad:
            if name not in DIFFERENTIABLE:
                raise ValueError(
                    f"{name} requires a gradient: only query, key, value, {' and '.join(DIFFERENTIABLE)} have one"
                )
            wanted = True
    return wanted


class Call(NamedTuple):
    """What is no tensor.  `own` are the options that follow query, key and value."""

    function: Function
    starts: tuple[Any, ...]
    options: dict[str, Any]
    own: tuple[str, ...]
    return_lse: bool

    def with_own(self, tensors) -> dict[str, Any]:
        if not self.own:
            return self.options
        return self.options | {name: array_of(name, x) for name, x in zip(self.own, tensors)}


def _with_gradients(function, query, key, value, starts, options):
    if not options and not starts:
        return _apply(Call(function, (), options, (), False), query, key, value)
    own, return_lse = {}, False
    if options:
        if options.get("out") is not None:
            raise ValueError("out is given and an input requires a gradient: it must be None, or torch.no_grad() be on")
        own = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        return_lse = options.get("return_lse", False)
        options = {name: x for name, x in options.items() if name not in (*own, "return_lse", "out")}
    starts = tuple(x.copy() if isinstance(x, np.ndarray) else x for x in starts)  # as they are until the gradients
    return _apply(Call(function, starts, options, tuple(own), return_lse), query, key, value, *own.values())


def wide_out(query, key, value, starts):
    """An array for a result that is not rounded to a half type, or None where none would be: gradients are differences,
    in which rounding shows."""
    if query.dtype.itemsize > 2:
        return None
    lead = () if starts else np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    rows = query.shape[-3:-1] if max(query.ndim, key.ndim, value.ndim) < 3 or query.ndim > 2 else (1, query.shape[0])
    shape = (*lead, *rows, value.shape[-1])
    if len(shape) != query.ndim:
        return np.empty(shape, np.float32)
    return np.empty_like(query, np.float32, shape=shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, query, key, value, *own):
        q, k, v = array_of("query", query), array_of("key", key), array_of("value", value)
        options = call.with_own(own) | WITH_LSE if call.options or own else WITH_LSE
        if q.itemsize == 2:
            options = options | {"out": wide_out(q, k, v, call.starts)}
        out, lse = call.function.forward(kernels.default, q, k, v, *call.starts, options, call.function.options)
        out = rounded = torch.from_numpy(out)  # which is wide enough for that
        if q.itemsize == 2:
            rounded = out.to(query.dtype)
        ctx.call = call
        if not call.return_lse:  # an array can stay one where nobody else has it
            ctx.lse = lse
            ctx.save_for_backward(query, key, value, out, *own)
            return rounded
        lse = torch.from_numpy(lse)
        ctx.lse = None
        ctx.save_for_backward(query, key, value, out, *own, lse)
        ctx.set_materialize_grads(False)
        return rounded, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        query, key, value, out, *own = ctx.saved_tensors
        lse = own.pop() if ctx.lse is None else ctx.lse
        differentiate = _Gradients.apply if torch.is_grad_enabled() else gradients
        return None, *differentiate(ctx.call, grad_out, grad_lse, query, key, value, out, lse, *own)


WITH_LSE = {"return_lse": True}


# Without what Function.apply does for torch.func, whose calls never come here.
_apply = super(torch.autograd.Function, _Attention).apply


class _Gradients(torch.autograd.Function):
    """Where somebody may ask for second derivatives: an error is raised once they do."""

    @staticmethod
    def forward(ctx, *given):
        return gradients(*given)

    @staticmethod
    def backward(ctx, *grads):
        refuse(ctx, *grads)


def refuse(ctx, *grads):
    raise NotImplementedError(
        "a second derivative of sdpa.torch's attention was asked for: there are first derivatives only"
    )


def gradients(call: Call, grad_out, grad_lse, query, key, value, out, lse, *own):
    """The gradients of query, key, value, and of the own options of the call."""
    if grad_out is None:
        grad_out = torch.zeros_like(out, dtype=query.dtype)
    function = call.function
    found = function.backward(
        kernels.default, array_of("grad_out", grad_out), array_of("query", query), array_of("key", key),
        array_of("value", value), array_of("out", out), lse if type(lse) is np.ndarray else array_of("lse", lse),
        *call.starts,
        None if grad_lse is None else array_of("grad_lse", grad_lse), call.with_own(own), function.backward_options,
    )  # fmt: skip
    grads = tensor_of(found[0]), tensor_of(found[1]), tensor_of(found[2])
    if not call.own:
        return grads
    return grads + tuple(tensor_of(getattr(found, name)) if name in DIFFERENTIABLE else None for name in call.own)
