"""Projections, y = x W^T + bias, by the kernels of this library.

NumPy's BLAS could compute them in float32 and float64, but its idle threads go on spinning and take the cores from our
threads (csrc/README.md has the numbers), and it has no half types.
"""

import numpy as np

from .. import _core
from .._runtime import kernels


class Linear:
    """A projection by W (outs, ins) and bias (outs) or None, which must not change afterwards.

    The dtype of x is float16, bfloat16, float32 or float64, which the caller has checked.  The first call with a result
    of some dtype rounds W to that dtype and lays it out for the kernel.  Sums are float32, or float64 for float64, and
    are rounded once.
    """

    def __init__(self, weight, bias=None):
        self.weight, self.bias = weight, bias
        self._packed = {}  # (kernel, dtype): W and bias as the kernel reads them

    def __call__(self, x, threads=None, dtype=None):
        """The projection (..., outs) of x (..., ins), in the dtype of x, or in a wider `dtype`."""
        kernel = kernels.default
        dtype = x.dtype if dtype is None else dtype
        packed = self._packed.get((kernel, dtype))
        if packed is None:
            packed = self._packed[kernel, dtype] = self._pack(kernel, dtype)
        return _core.linear(kernel, x, *packed, len(self.weight), dtype, threads)

    def _pack(self, kernel, dtype):
        if self.weight.dtype == dtype and self.bias is None:
            return _core.pack_weights(kernel, self.weight, None)
        with np.errstate(all="ignore"):
            return _core.pack_weights(kernel, self.weight.astype(dtype, copy=False), self.bias)
