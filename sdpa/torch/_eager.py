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
from ._tensors import array_of, check_plain, tensor_of, without_tensors

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
    arrays = without_tensors(options) if options else options
    result = function.forward(
        kernels.default, array_of("query", query), array_of("key", key), array_of("value", value), *starts, arrays,
        function.options,
    )  # fmt: skip
    if not options:
        return tensor_of(result)
    out, lse = result if type(result) is tuple else (result, None)
    given = options.get("out")
    out = tensor_of(out) if given is None else given
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


def _with_gradients(function, query, key, value, starts, options):
    if options.get("out") is not None:
        raise ValueError("out is given and an input requires a gradient: it must be None, or torch.no_grad() be on")
    bias, sinks = (options.get(name) for name in DIFFERENTIABLE)
    if any(given is not None and not isinstance(given, Tensor) for given in (bias, sinks)):
        options = without_tensors(options)
        bias = sinks = None  # arrays have no gradients
    else:
        options = without_tensors({name: given for name, given in options.items() if name not in DIFFERENTIABLE})
    out, lse = _Attention.apply(function, starts, options, query, key, value, bias, sinks)
    return (out, lse) if options.get("return_lse") else out


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
    def forward(ctx, function, starts, options, query, key, value, bias, sinks):
        arrays = [array_of(*named) for named in (("query", query), ("key", key), ("value", value))]
        ctx.function, ctx.starts = function, starts
        ctx.options = {name: given for name, given in options.items() if name not in ("return_lse", "out")}
        given = without_tensors({name: x for name, x in zip(DIFFERENTIABLE, (bias, sinks)) if x is not None})
        out, lse = function.forward(
            kernels.default, *arrays, *starts,
            ctx.options | given | {"return_lse": True, "out": wide_out(*arrays, starts)}, function.options,
        )  # fmt: skip
        out, lse = tensor_of(out), tensor_of(lse)
        rounded = out if out.dtype is query.dtype else out.to(query.dtype)
        ctx.save_for_backward(query, key, value, bias, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return rounded, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        call = ctx.function, ctx.starts, ctx.options, grad_out, grad_lse
        if torch.is_grad_enabled():
            grads = _Gradients.apply(*call, *ctx.saved_tensors)
        else:
            grads = gradients(*call, *ctx.saved_tensors)
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *(grad if want else None for grad, want in zip(grads, wanted))


class _Gradients(torch.autograd.Function):
    """Where somebody may ask for second derivatives: an error is raised once they do."""

    @staticmethod
    def forward(ctx, *call):
        return gradients(*call)

    @staticmethod
    def backward(ctx, *grads):
        refuse(ctx, *grads)


def refuse(ctx, *grads):
    raise NotImplementedError(
        "a second derivative of sdpa.torch's attention was asked for: there are first derivatives only"
    )


def gradients(function, starts, options, grad_out, grad_lse, query, key, value, bias, sinks, out, lse):
    """The gradients of query, key, value, bias and sinks."""
    if grad_out is None:
        grad_out = torch.zeros_like(out, dtype=query.dtype)
    named = {"query": query, "key": key, "value": value, "out": out, "lse": lse}
    given = without_tensors({name: x for name, x in zip(DIFFERENTIABLE, (bias, sinks)) if x is not None})
    grads = function.backward(
        kernels.default, array_of("grad_out", grad_out), *(array_of(*each) for each in named.items()), *starts,
        None if grad_lse is None else array_of("grad_lse", grad_lse), options | given, function.backward_options,
    )  # fmt: skip
    return tuple(None if grad is None else tensor_of(grad) for grad in grads)
