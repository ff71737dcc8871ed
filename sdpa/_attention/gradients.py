"""What `attention_backward` returns, in the library and in the oracle."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from .._fields import documented


@documented
class Gradients(NamedTuple):
    """What `attention_backward` returns: the gradient with respect to each input, in the input's shape.

    Attributes
    ----------
    query, key, value : array
        The gradient with respect to this input.
    bias, sinks : array, or None if the call had none
        The gradient with respect to this input.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None


def summed(grad, given, dtype):
    """`grad`, summed over the axes along which `given` was broadcast, in that dtype."""
    shape = (1,) * (grad.ndim - given.ndim) + given.shape
    axes = tuple(i for i, (size, whole) in enumerate(zip(shape, grad.shape)) if size == 1 != whole)
    with np.errstate(over="ignore", invalid="ignore"):
        grad = grad.sum(axis=axes, keepdims=True) if axes else grad
        return grad.reshape(given.shape).astype(dtype, copy=False)


def of_sinks(given, sinks, out, lse, delta, grad_lse, q_starts):
    """The gradient with respect to the sinks that were `given`.  `sinks` are the same numbers broadcast to (lead, H).
    With sequences, which begin at q_starts, `sinks` are (S, H), and rows come first in the other arrays."""
    with np.errstate(over="ignore", invalid="ignore"):
        if q_starts is None:
            slopes = sink_slopes(sinks.reshape(*lse.shape[:-1], 1), out, lse, delta, grad_lse)
            grad = slopes.sum(axis=-1).reshape(sinks.shape)
        else:
            slopes = sink_slopes(np.repeat(sinks, np.diff(q_starts), axis=0), out, lse, delta, grad_lse)
            grad = np.zeros(sinks.shape)
            for b, (first, end) in enumerate(itertools.pairwise(q_starts)):
                grad[b] = slopes[first:end].sum(axis=0)
    given = np.asarray(given)
    return summed(grad, given, np.float64 if given.dtype.kind in "iu" else given.dtype)


def sink_slopes(sinks, out, lse, delta, grad_lse):
    """The gradient of each row.  A sink is a key whose value is 0, so it is exp(sink - lse) (0 - delta).  The grad_out
    of a row that saw only the sink does not count, NaN included."""
    odd = ~np.isfinite(delta) & (lse == sinks.astype(lse.dtype))
    if odd.any():
        blind = odd & (out == 0).all(axis=-1)
        delta[blind] = 0 if grad_lse is None else -grad_lse[blind]
    return np.where(np.isneginf(lse), 0, np.exp(sinks - lse) * -delta.astype(np.float64))
