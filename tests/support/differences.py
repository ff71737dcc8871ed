"""Gradients by differences."""

import numpy as np

from sdpa.reference import attention
from support.draw import float64, rng


def upstream(out, lse, seed=9):
    """What flows in: grad_out and grad_lse."""
    normal = rng(seed).standard_normal
    return normal(out.shape), normal(lse.shape)


STEP = 2e-3
STENCIL = np.array([[2, -1 / 12], [1, 8 / 12], [-1, -8 / 12], [-2, 1 / 12]]).T * [[STEP], [1 / STEP]]


def moves(array):
    """Along a new first axis: `array` with each of its elements moved by each step."""
    array = np.asarray(array, float64)
    units = np.eye(array.size).reshape(1, -1, *array.shape)
    return (array + np.multiply.outer(STENCIL[0], units[0])).reshape(-1, *array.shape)


def slopes(totals, array):
    return (STENCIL[1] @ np.reshape(totals, (4, -1))).reshape(np.shape(array))


def total(out, lse, grad_out, grad_lse):
    """Over all axes but the first."""
    seen = np.where(np.isneginf(lse), 0, lse)
    return (out * grad_out).reshape(len(out), -1).sum(axis=1) + (seen * grad_lse).reshape(len(out), -1).sum(axis=1)


def by_differences(name, inputs, forward=attention):
    """The gradient by inputs[name]; all moves are one call, along one more leading axis."""
    axes = max(4, *(np.ndim(inputs[x]) for x in ("query", "key", "value")))
    moved = moves(inputs[name])
    missing = axes - (2 if name == "sinks" else 0) - np.ndim(inputs[name])
    moved = moved.reshape(len(moved), *(1,) * missing, *np.shape(inputs[name]))
    query = inputs["query"].reshape((1,) * (axes - inputs["query"].ndim) + inputs["query"].shape)
    query = np.broadcast_to(query, (len(moved), *query.shape))  # so that the result has that axis
    out, lse = forward(**inputs | dict(query=query) | {name: moved}, return_lse=True)
    return slopes(total(out, lse, *upstream(out[0], lse[0])), inputs[name])


BROADCASTS = {  # leading axes and heads of query, key, value
    "two axes": ((), (), ()),
    "three axes": ((4,), (2,), (2,)),
    "key and value of batch 1": ((2, 4), (1, 2), (1, 2)),
    "key and value without batch": ((2, 4), (2,), (2,)),
    "key and value of two axes": ((2, 4), (), ()),
    "query without batch": ((4,), (2, 2), (2, 2)),
    "query of two axes": ((), (2, 1), (2, 1)),
    "only value has a batch": ((4,), (2,), (3, 2)),
    "five axes": ((3, 2, 4), (3, 2, 2), (3, 2, 2)),
    "five axes that broadcast": ((3, 1, 4), (2, 2), (1, 1, 2)),
}
