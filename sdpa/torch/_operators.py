"""Calls that torch.compile, torch.export, torch.func, a dispatch mode or a trace watches: as operators of torch.

`torch.ops.sdpa.attention` and `attention_varlen`, and the gradients of both, take the options one by one: their schemas
follow from the description of the options.  Each has a rule for shapes and strides, for gradients and for vmap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .._options import InputOptions
from .._options.signatures import described
from .._runtime import kernels
from . import _batched
from ._eager import ATTENTION, ATTENTION_VARLEN, DIFFERENTIABLE, Call, Function, gradients, refuse, wants_gradients
from ._tensors import array_of, as_tensor, tensor_of

LIBRARY = torch.library.Library("sdpa", "DEF")
SIDES = Sequence[int | None] | None
SCHEMAS = {
    ArrayLike | None: "Tensor? {0}",
    SIDES: "SymInt? {0}_left, SymInt? {0}_right",
    bool: "bool {0}",
    float | None: "float? {0}",
    int | None: "SymInt? {0}",
}
KINDS = {name: kind for name, kind in get_type_hints(InputOptions).items() if name in described(InputOptions)}
OPTIONS = ", ".join(SCHEMAS[kind].format(name) for name, kind in KINDS.items())
# The arguments of an operator that are not options, and how many of them say where sequences begin.
ARGUMENTS = {
    "attention": ("Tensor query, Tensor key, Tensor value, bool unrounded", 0),
    "attention_varlen": (
        "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, bool unrounded", 2
    ),
}  # fmt: skip


def one_by_one(options) -> list[Any]:
    """The options as the operators take them: what is an array is a tensor, and a window is two numbers."""
    given: list[Any] = []
    for name, kind in KINDS.items():
        option = options.get(name)
        if kind == SIDES:
            given += (None, None) if option is None else option
        elif kind is bool:
            given.append(bool(option))
        elif kind == ArrayLike | None and option is not None:
            given.append(as_tensor(option))
        else:
            given.append(option)
    return given


def together(given) -> dict[str, Any]:
    """The options that `one_by_one` spread, with arrays for tensors."""
    options, rest = {}, iter(given)
    for name, kind in KINDS.items():
        option = next(rest)
        if kind == SIDES:
            options[name] = (option, next(rest))
        elif option is not None and option is not False:
            options[name] = array_of(name, option) if isinstance(option, Tensor) else option
    return options


def places() -> dict[str, int]:
    """Where the options with gradients stand among what `one_by_one` gives."""
    starts, at = {}, 0
    for name, kind in KINDS.items():
        starts[name] = at
        at += 2 if kind == SIDES else 1
    return {name: starts[name] for name in DIFFERENTIABLE}


PLACES = places()


def attend(function: Function, query, key, value, starts, options):
    """What the public function of that name returns, by its operator."""
    function.options.check(options)
    given = options.get("out")
    if torch.is_grad_enabled() and wants_gradients(query, key, value, options):
        if given is not None:
            raise ValueError("out is given and an input requires a gradient: it must be None, or torch.no_grad() be on")
        unrounded = query.dtype.itemsize < 4
    else:
        unrounded = given is not None and given.dtype != query.dtype
    starts = [None if x is None else as_tensor(x) for x in starts]
    name = function.options.function
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    operator = TRANSFORMABLE[name].apply if transformed else getattr(torch.ops.sdpa, name)
    out, lse = operator(query, key, value, *starts, unrounded, *one_by_one(options))
    out = out.to(query.dtype) if given is None else given.copy_(out)
    return (out, lse) if options.get("return_lse") else out


def like_query(query, key, value, packed: bool, unrounded: bool) -> Tensor:
    """An empty tensor for the result, laid out like the query; also when there is no memory behind the tensors."""
    axes = max(query.ndim, key.ndim, value.ndim)
    lead = [] if packed else torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    rows = [*([1] if axes > 2 and query.ndim < 3 else []), *query.shape[-3:-1]]
    shape = [*lead, *rows, value.shape[-1]]
    dtype = torch.float32 if unrounded and query.dtype.itemsize < 4 else query.dtype
    if list(query.shape) == shape:
        return torch.empty_like(query, dtype=dtype)
    if query.ndim != len(shape):
        return query.new_empty(shape, dtype=dtype)
    outer_first = sorted(range(len(shape)), key=lambda axis: -query.stride(axis))
    return torch.empty_permuted(shape, outer_first, dtype=dtype, device=query.device)


def empty_lse(query, out) -> Tensor:
    return query.new_empty(out.shape[:-1], dtype=torch.float64 if query.dtype is torch.float64 else torch.float32)


def define(function: Function) -> None:
    """The operator of that function, and that of its gradients."""
    name = function.options.function
    arguments, packed = ARGUMENTS[name]
    grads = "Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse"
    LIBRARY.define(f"{name}({arguments}, {OPTIONS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.define(
        f"{name}_backward({grads}, {arguments}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    operator, backward = f"sdpa::{name}", f"sdpa::{name}_backward"

    @torch.library.impl(LIBRARY, name, "CPU")
    def compute(query, key, value, *rest):
        out = like_query(query, key, value, bool(packed), rest[packed])
        arrays = [array_of(*named) for named in (("query", query), ("key", key), ("value", value), ("out", out))]
        starts = [None if x is None else array_of("cu_seqlens", x) for x in rest[:packed]]
        options = together(rest[packed + 1 :]) | {"out": arrays[3], "return_lse": True}
        _, lse = function.forward(kernels.default, *arrays[:3], *starts, options, function.options)
        return out, tensor_of(lse)

    @torch.library.register_fake(operator, lib=LIBRARY)
    def shapes(query, key, value, *rest):
        out = like_query(query, key, value, bool(packed), rest[packed])
        return out, empty_lse(query, out)

    @torch.library.impl(LIBRARY, f"{name}_backward", "CPU")
    def differentiate(grad_out, grad_lse, out, lse, query, key, value, *rest):
        starts = tuple(None if x is None else array_of("cu_seqlens", x) for x in rest[:packed])
        every = together(rest[packed + 1 :])
        own = [rest[packed + 1 + place] for place in PLACES.values()]
        names = tuple(name for name, x in zip(PLACES, own) if x is not None)
        call = Call(function, starts, {name: x for name, x in every.items() if name not in names}, names, True)
        given = [x for x in own if x is not None]
        found = gradients(call, grad_out, grad_lse, query, key, value, out, lse, *given)
        grads = iter(laid_out(grad, x) for grad, x in zip(found, (query, key, value, *given)))
        return tuple(query.new_empty(0) if x is None else next(grads) for x in (query, key, value, *own))

    @torch.library.register_fake(backward, lib=LIBRARY)
    def shapes_of_gradients(grad_out, grad_lse, out, lse, query, key, value, *rest):
        own = [rest[packed + 1 + place] for place in PLACES.values()]
        return tuple(query.new_empty(0) if x is None else torch.empty_like(x) for x in (query, key, value, *own))

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]

    def by(differentiate):
        def backpropagate(ctx, grad_out, grad_lse):
            out, lse, *saved = ctx.saved_tensors
            inputs = [x if other is None else other for x, other in zip(saved, ctx.others)]
            found = differentiate(grad_out.to(inputs[0].dtype), grad_lse, out, lse, *inputs)
            grads = [None] * len(inputs)
            for place, grad in zip((0, 1, 2, *(4 + packed + place for place in PLACES.values())), found):
                grads[place] = grad if isinstance(inputs[place], Tensor) else None
            return tuple(grads)

        return backpropagate

    forward_operator, backward_operator = getattr(torch.ops.sdpa, name), getattr(torch.ops.sdpa, f"{name}_backward")
    torch.library.register_autograd(operator, by(backward_operator), setup_context=keep, lib=LIBRARY)
    torch.library.register_autograd(backward, refuse, lib=LIBRARY)
    rule = _batched.one_after_another if packed else _batched.at_once
    for which, called in (operator, forward_operator), (backward, backward_operator):
        torch.library.register_vmap(which, rule(called), lib=LIBRARY)
    gradients_transformed = transformable(backward_operator, lambda ctx, inputs, output: None, refuse)
    TRANSFORMABLE[name] = transformable(forward_operator, keep, by(gradients_transformed.apply))


TRANSFORMABLE: dict[str, Any] = {}  # by the name of the function


def transformable(operator, keep, backpropagate):
    """An operator for torch.func, whose transformations do not go through the gradients registered with it."""

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *inputs: operator(*inputs))
        setup_context = staticmethod(keep)
        backward = staticmethod(backpropagate)

    return Transformable


def laid_out(grad, given) -> Tensor:
    """A gradient with the strides that were promised for it."""
    like = torch.empty_like(given)
    return grad if grad.stride() == like.stride() and grad.dtype is like.dtype else like.copy_(grad)


for each in (ATTENTION, ATTENTION_VARLEN):
    define(each)
