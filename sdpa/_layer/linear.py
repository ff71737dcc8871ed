"""Projections, y = x W^T + bias, by kernels of this library.

NumPy's BLAS would do that for float32 and float64, but its idle threads go on spinning and take the cores from ours
(csrc/README.md has the numbers), and it knows no half types.
"""

import math

import numpy as np

from .. import _core
from .._runtime import kernels
from .._runtime import threads as _threads


class Linear:
    """W (outs, ins) and bias (outs) or None, which are not to be changed any more.

    x has float16, bfloat16, float32 or float64, which its caller has checked.  W is rounded to the dtype of the result,
    and laid out for the kernel, at the first call with a result of that dtype; sums are float32, or float64 for
    float64, and rounded once.
    """

    def __init__(self, weight, bias=None):
        self.weight, self.bias = weight, bias
        self._packed = {}  # (kernel, dtype): W and bias as the kernel reads them

    def __call__(self, x, threads=None, dtype=None):
        """(..., ins) to (..., outs), of the same dtype, or a wider `dtype`."""
        outs, ins = self.weight.shape
        rows = math.prod(x.shape[:-1])
        out = np.empty((rows, outs), x.dtype if dtype is None else dtype)
        kernel = kernels.default
        _core.linear(kernel, x.reshape(rows, ins), *self._pack(kernel, out.dtype), out, _threads.count(threads))
        return out.reshape(*x.shape[:-1], outs)

    def _pack(self, kernel, dtype):
        key = kernel.name, dtype
        if key not in self._packed:
            with np.errstate(all="ignore"):
                weight = self.weight.astype(dtype, copy=False)
                self._packed[key] = _core.pack_weights(kernel, weight, self.bias)
        return self._packed[key]
