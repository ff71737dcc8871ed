"""Projections, by kernels of this library: a layer of weights, and a network of two of them.

NumPy's BLAS would do the products for float32 and float64, but its idle threads go on spinning and take the cores from
ours (csrc/README.md has the numbers), and it knows no half types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _core
from .._runtime import kernels
from .._runtime import threads as _threads
from .parts import residual_or_none, shaped

MATRIX = (None, None)  # of any size
# Bytes that a block of rows of a FeedForward has between its products, at most, such that the second one finds them in
# the third-level cache.  1024 rows of 768 to 3072 in float32: 5 % less time by the median than in one block of 12 MB.
CARRIED = 13 << 19


class Linear:
    """activation(x W^T + bias) + residual.

    The first call with an x of some dtype lays the weights out for the kernel in that dtype.  If the given weights have
    that dtype, they are no longer needed from then on.  Until then they must not change.

    Parameters
    ----------
    weight : (outs, ins), as in PyTorch; of any float dtype
        It is rounded to the dtype of x.
    bias : (outs), or None
    activation : None, "relu", "gelu" (by erf), "gelu_tanh" or "silu"
    threads
        The default of the option `threads` of calls.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> linear = sdpa.Linear(np.float32([[1, 0], [0, -1]]), bias=np.float32([0, 1]), activation="relu")
    >>> linear(np.float32([[3, 5]]), residual=np.float32([[10, 20]]))
    array([[13., 20.]], dtype=float32)
    """

    def __init__(
        self, weight: ArrayLike, bias: ArrayLike | None = None, *, activation: str | None = None,
        threads: int | None = None,
    ) -> None:  # fmt: skip
        self._begin([shaped("weight", weight, MATRIX, "(outs, ins)")], [("bias", bias)], activation, threads)

    def _begin(self, weights, biases, activation, threads):
        """`weights` are W, or W and its gate.  `biases` are pairs of a name and an array."""
        self.outs, self.ins = weights[0].shape
        self._weights, self._lossless = weights, None  # None, and Panels, once these hold them without a loss
        self._biases = [vector(name, bias, self.outs) for name, bias in biases]
        if activation is not None and activation not in _core.ACTIVATIONS:
            names = ", ".join(repr(name) for name in _core.ACTIVATIONS)
            raise ValueError(f"activation is {activation!r}: it must be one of {names}")
        self.activation, self._activation = activation, _core.ACTIVATIONS[activation]
        _threads.count(threads)
        self.threads = threads
        self._packed = {}  # Panels by (kernel, dtype)

    def __call__(
        self, x: ArrayLike, *, residual: ArrayLike | None = None, out: NDArray[Any] | None = None,
        threads: int | None = None,
    ) -> NDArray[Any]:  # fmt: skip
        """x (..., ins) gives (..., outs).

        Parameters
        ----------
        x : float16, bfloat16 (of ml_dtypes), float32 or float64, in any layout
            The result has the dtype of x.  Sums are float32 at least, and are rounded once, after everything was added
            to them.
        residual
            An array like the result, which is added to it.
        out
            The array to fill and return: `residual` itself, or an array that overlaps no input.  If its dtype is wider
            than that of x, the sums are not rounded.
        threads
            Default: that of the layer.
        """
        x = _core.float_array("x", x, 1)
        if x.shape[-1] != self.ins:
            raise ValueError(f"x has shape {x.shape}: the last axis must be {self.ins}, as weight has columns")
        shape = (*x.shape[:-1], self.outs)
        residual = residual_or_none(residual, shape)
        if out is not None:
            _core.checked_out(out, shape, x, {"x": x, "residual": None if out is residual else residual})
        return self.apply(x, self.threads if threads is None else threads, None, out, residual)

    def apply(self, x, threads, dtype=None, out=None, residual=None):
        """The call with checked arguments.  dtype : of the weights and of a new result: that of x, or a wider dtype."""
        panels = self._panels(x.dtype if dtype is None else dtype)
        return _core.linear(panels, x, out, residual, self._activation, threads)

    @property
    def weight(self) -> NDArray[Any]:
        """The weights (outs, ins): the given array, or a copy once that array is no longer needed."""
        return self._sources()[0]

    @property
    def bias(self) -> NDArray[Any] | None:
        """The argument `bias`: (outs), or None."""
        return self._biases[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the weights and biases, in all forms in which the layer keeps them."""
        kept = [*(self._weights or []), *(bias for bias in self._biases if bias is not None), *self._packed.values()]
        return sum(each.nbytes for each in kept)

    def _panels(self, dtype):
        kernel = kernels.default
        panels = self._packed.get((kernel, dtype))
        return self._pack(kernel, dtype) if panels is None else panels

    def _pack(self, kernel, dtype):
        sources = self._sources()
        (weight, gate), (bias, gate_bias) = [*sources, None][:2], [*self._biases, None][:2]
        panels = self._packed[kernel, dtype] = _core.Panels(kernel, dtype, weight, bias, gate, gate_bias)
        if all(source.dtype == dtype for source in sources):
            self._lossless, self._weights = panels, None
        return panels

    def _sources(self):
        weights = self._weights  # asked for once: another thread may set it to None
        if weights is not None:
            return weights
        panels = self._lossless
        return [panels.weight(), panels.weight(gate=True)] if panels.gated else [panels.weight()]

    def __getstate__(self):
        """For pickle and copy: weights as they were given, as kernels differ from machine to machine."""
        return self.__dict__ | {"_weights": self._sources(), "_lossless": None, "_packed": {}}

    def __repr__(self):
        parts = [f"{self.ins} to {self.outs}", *([] if self.activation is None else [self.activation])]
        return f"<sdpa.{type(self).__name__} {', '.join(parts)}>"


class GatedLinear(Linear):
    """activation(x G^T + gate_bias) * (x W^T + bias) + residual."""

    def __init__(self, weight, bias, gate_weight, gate_bias, activation, threads):
        weights = [
            shaped(name, given, MATRIX, "(hidden, ins)")
            for name, given in (("up_weight", weight), ("gate_weight", gate_weight))
        ]
        if weights[0].shape != weights[1].shape:
            given = " and ".join(str(array.shape) for array in weights)
            raise ValueError(f"up_weight and gate_weight have shapes {given}: they must be the same")
        self._begin(weights, [("up_bias", bias), ("gate_bias", gate_bias)], activation, threads)


class FeedForward:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)), each a projection with a bias.

    The gate and up are one product, whose result is rounded to the dtype of x.  Blocks of rows are carried through both
    products while they are in a cache.

    Parameters
    ----------
    up_weight, down_weight : (hidden, ins) and (outs, hidden), as in PyTorch
    gate_weight : (hidden, ins): SwiGLU with activation="silu", GeGLU with "gelu"
    up_bias, gate_bias, down_bias : (hidden), (hidden) and (outs), or None
    activation : None, "relu", "gelu" (by erf), "gelu_tanh" or "silu"
    threads
        The default of the option `threads` of calls.
    """

    def __init__(
        self, up_weight: ArrayLike, down_weight: ArrayLike, *, gate_weight: ArrayLike | None = None,
        up_bias: ArrayLike | None = None, gate_bias: ArrayLike | None = None, down_bias: ArrayLike | None = None,
        activation: str | None = "gelu", threads: int | None = None,
    ) -> None:  # fmt: skip
        up = shaped("up_weight", up_weight, MATRIX, "(hidden, ins)")
        down = shaped("down_weight", down_weight, MATRIX, "(outs, hidden)")
        if down.shape[1] != len(up):
            raise ValueError(
                f"up_weight has shape {up.shape} and down_weight {down.shape}: down_weight must have as many columns "
                "as up_weight has rows"
            )
        if gate_weight is None and gate_bias is not None:
            raise ValueError("gate_bias is given and gate_weight is not: there must be both, or none")
        if gate_weight is None:
            self._up = Linear(up, vector("up_bias", up_bias, len(up)), activation=activation, threads=threads)
        else:
            self._up = GatedLinear(up, up_bias, gate_weight, gate_bias, activation, threads)
        self._down = Linear(down, vector("down_bias", down_bias, len(down)), threads=threads)
        self.ins, self.hidden, self.outs = self._up.ins, self._up.outs, self._down.outs
        self.activation, self.threads = activation, threads

    def __call__(self, x: ArrayLike, *, residual: ArrayLike | None = None, threads: int | None = None) -> NDArray[Any]:
        """x (..., ins) gives (..., outs) in the dtype of x.  `residual`, an array like the result, is added."""
        x = _core.float_array("x", x, 1)
        shape = (*x.shape[:-1], self.outs)
        more = residual_or_none(residual, shape)
        threads = _threads.count(self.threads if threads is None else threads)
        count = x.size // max(1, self.ins)
        blocks = -(-count * self.hidden * x.itemsize // CARRIED)
        if blocks <= 1:
            return self._down(self._up(x, threads=threads), residual=more, threads=threads)
        rows, out = x.reshape(count, self.ins), np.empty((count, self.outs), x.dtype)
        more = None if more is None else more.reshape(out.shape)
        for block in range(blocks):
            part = slice(count * block // blocks, count * (block + 1) // blocks)
            hidden = self._up(rows[part], threads=threads)
            self._down(hidden, residual=None if more is None else more[part], out=out[part], threads=threads)
        return out.reshape(shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the weights and biases, in all forms in which the layer keeps them."""
        return self._up.nbytes + self._down.nbytes

    def __repr__(self):
        gate = ", gated" if isinstance(self._up, GatedLinear) else ""
        return f"<sdpa.FeedForward {self.ins} to {self.hidden} to {self.outs}, {self.activation}{gate}>"


def vector(name, given, size):
    return None if given is None else shaped(name, given, (size,), "as many as the weight has rows")
