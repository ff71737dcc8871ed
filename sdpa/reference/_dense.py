"""Projections, activations and the feed-forward block."""

import math

import numpy as np

from ._arrays import cast, deliver, rounded, to_float

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _relu(x):
    return np.where(x < 0, x.dtype.type(0), x)


def _gelu(x):
    return x * (_erfc(-x.astype(np.float64) / math.sqrt(2)) / 2).astype(x.dtype)  # Phi(x) = erfc(-x / sqrt(2)) / 2


def _gelu_tanh(x):
    return _silu_of(x, 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))


def _silu(x):
    return _silu_of(x, x)


def _silu_of(x, y):
    """x times the logistic function of y."""
    return x / (1 + np.exp(-y))


ACTIVATIONS = {None: lambda x: x, "relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}


def activated(x, name):
    with np.errstate(over="ignore", invalid="ignore"):
        return ACTIVATIONS[name](x)


def check_activation(name):
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}: it must be None or one of {', '.join(filter(None, ACTIVATIONS))}")
    return name


class Linear:
    """activation(x W^T + bias) + residual, with the weight W (out, in) and a bias (out) or None.

    Parameters
    ----------
    activation
        None, "relu", "gelu" (x Phi(x), where Phi is the normal distribution), "gelu_tanh" (its approximation by tanh)
        or "silu" (x / (1 + exp(-x))).

    Examples
    --------
    >>> import numpy as np
    >>> linear = Linear(np.array([[1.0, 2.0], [-1.0, 0.0]]), np.array([0.5, 0.0]), activation="relu")
    >>> linear(np.array([[3.0, 1.0]]), residual=np.array([[10.0, 10.0]]))
    array([[15.5, 10. ]])
    """

    def __init__(self, weight, bias=None, *, activation=None, threads=None):
        self.weight, self.bias = np.asarray(weight), None if bias is None else np.asarray(bias)
        if self.weight.ndim != 2:
            raise ValueError(f"weight has shape {self.weight.shape}: it must have two axes, (out, in)")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"bias has shape {self.bias.shape}: it must be {self.weight.shape[:1]}, as weight has rows"
            )
        self.activation = check_activation(activation)

    def __call__(self, x, *, residual=None, out=None, threads=None, dtype=None):
        """Return (..., out) for x (..., in).  A half `dtype` rounds the inputs and the result, but nothing between."""
        y = activated(self.sums(to_float("x", x, dtype), dtype), self.activation)
        if residual is not None:
            y = y + same_shape("residual", residual, y.shape, dtype)
        return deliver(cast(y, dtype) if out is None else y, dtype, out, x, residual)

    def sums(self, x, dtype):
        """x W^T + bias, before the activation, in the dtype of the sums."""
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"x has shape {x.shape}: its last axis must have the {self.weight.shape[1]} of weight")
        with np.errstate(over="ignore", invalid="ignore"):
            y = x @ to_float("weight", self.weight, dtype).T
            return y if self.bias is None else y + to_float("bias", self.bias, dtype)


class FeedForward:
    """down(act(up x)), or with a gate down(act(gate x) * up x), where up, gate and down are projections.

    Parameters
    ----------
    up_weight, gate_weight : (inner, in)
    down_weight : (out, inner)

    Examples
    --------
    >>> import numpy as np
    >>> block = FeedForward(np.array([[1.0], [-1.0]]), np.array([[1.0, 10.0]]), activation="relu")
    >>> block(np.array([[2.0], [-3.0]]))        # 1 * 2 + 10 * 0,  1 * 0 + 10 * 3
    array([[ 2.],
           [30.]])
    """

    def __init__(
        self, up_weight, down_weight, *, gate_weight=None, up_bias=None, gate_bias=None, down_bias=None,
        activation="gelu", threads=None,
    ):  # fmt: skip
        if gate_weight is None and gate_bias is not None:
            raise ValueError("gate_bias is given and gate_weight is None: it must be given too")
        self.activation = check_activation(activation)
        self.up, self.down = Linear(up_weight, up_bias), Linear(down_weight, down_bias)
        self.gate = None if gate_weight is None else Linear(gate_weight, gate_bias)
        for name, given, wanted in (
            ("gate_weight", self.up if self.gate is None else self.gate, self.up.weight.shape),
            ("down_weight", self.down, (len(self.down.weight), len(self.up.weight))),
        ):
            if given.weight.shape != wanted:
                raise ValueError(f"{name} has shape {given.weight.shape}: with up_weight it must be {wanted}")

    def __call__(self, x, *, residual=None, threads=None, dtype=None):
        """Return (..., out) for x (..., in).  A half `dtype` also rounds what the last projection takes."""
        rows = to_float("x", x, dtype)
        if self.gate is None:
            inner = activated(self.up.sums(rows, dtype), self.activation)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                inner = activated(self.gate.sums(rows, dtype), self.activation) * self.up.sums(rows, dtype)
        y = self.down.sums(rounded(inner, dtype), dtype)
        if residual is not None:
            y = y + same_shape("residual", residual, y.shape, dtype)
        return cast(y, dtype)


def same_shape(name, array, shape, dtype):
    array = to_float(name, array, dtype)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: it must be that of what it is added to, {shape}")
    return array
