"""vmap: how an operator of this package is computed for each of a batch of arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from .._options import InputOptions
from .._options.signatures import described

# How many axes fewer than (..., H, M, D) an argument may have, by what its description says of its shape.
FEWER = {"{pairs}": 0, "{heads}": 2, "{batch}": 3}
ARRAYS = {"query": 0, "key": 0, "value": 0, "out": 0, "grad_out": 0, "lse": 1, "grad_lse": 1}
MISSING = ARRAYS | {
    name: fewer
    for name, option in described(InputOptions).items()
    for word, fewer in FEWER.items()
    if word in option.kind
}


def at_once(operator):
    """The rule for attention: the batch becomes one more leading axis of all arrays."""
    names = [argument.name for argument in operator.default._schema.arguments]

    def rule(info, in_dims, *args):
        size = info.batch_size
        given = {name: front(x, dim, size) for name, x, dim in zip(names, args, in_dims) if isinstance(x, Tensor)}
        axes = max(given[name].ndim for name in ("query", "key", "value"))  # with that of the batch
        spread = []
        for name, x in zip(names, args):
            if name in given:
                x = given[name]
                missing = max(axes, 4) - MISSING[name] - x.ndim
                x = x.reshape(size, *[1] * missing, *x.shape[1:])
            spread.append(x)
        found = operator(*spread)
        if len(found) == 2:  # out and lse; without an axis of heads if none had it
            return tuple(x[:, 0] if axes == 3 else x for x in found), (0, 0)
        shapes = [given[name].shape if name in given else None for name in ("query", "key", "value", "bias", "sinks")]
        grads = tuple(grad if shape is None else grad.reshape(shape) for grad, shape in zip(found, shapes))
        return grads, tuple(None if shape is None else 0 for shape in shapes)

    return rule


def front(x, dim, size):
    """With the axis of the batch first."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def one_after_another(operator):
    """The rule for what has no more leading axes."""

    def rule(info, in_dims, *args):
        found = [
            operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)))
            for i in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(torch.stack(parts) for parts in zip(*found)), (0,) * len(found[0])

    return rule
