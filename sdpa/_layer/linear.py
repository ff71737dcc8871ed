"""Projections, y = x W^T + bias, by kernels of this library.

NumPy's BLAS would do that for float32 and float64, but its idle threads go on spinning and take the cores from ours
(csrc/README.md has the numbers), and it knows no half types.
"""

import numpy as np

from .. import _core
from .._runtime import kernels


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
