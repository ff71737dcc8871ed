"""Norms of rows, as they stand between the parts of a layer."""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy.typing import ArrayLike, NDArray

from .. import _core
from .._checks import epsilon
from .._runtime import kernels
from .parts import residual_or_none

Out: TypeAlias = "NDArray[Any] | tuple[NDArray[Any], NDArray[Any]] | None"


def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *, eps: float = 1e-5,
    residual: ArrayLike | None = None, out: Out = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """(y - mean) / sqrt(variance + eps) * weight + bias for each row of y = x + residual, its last axis.

    Parameters
    ----------
    x : (..., size), float16, ml_dtypes.bfloat16, float32 or float64
    weight, bias : (size), or None
    eps
        0 or more.
    residual
        An array like x.  With it, the result is the pair (norm, x + residual).
    out
        The array for the norm: x or residual itself, or one that overlaps no input.  With a residual, it may be a pair
        of such arrays: for the norm, and for x + residual.
    threads
        Default: SDPA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs this process may use.

    Notes
    -----
    The result has the dtype of x.  Sums are float32 (float64 for float64), and are rounded once.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> sdpa.layer_norm(np.array([[1.0, 3.0]]), eps=0)
    array([[-1.,  1.]])
    """
    return _norm(x, weight, bias, eps, True, residual, out, threads)


def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, *, eps: float = 1e-6, residual: ArrayLike | None = None,
    out: Out = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """y / sqrt(mean of y**2 + eps) * weight for each row of y = x + residual, its last axis.  Arguments are those of
    `layer_norm`.

    >>> import numpy as np, sdpa
    >>> normed, total = sdpa.rms_norm(np.array([[1.0, 0.0]]), eps=0, residual=np.array([[6.0, 1.0]]))
    >>> normed.round(3), total
    (array([[1.4, 0.2]]), array([[7., 1.]]))
    """
    return _norm(x, weight, None, eps, False, residual, out, threads)


def _norm(x, weight, bias, eps, centred, residual, out, threads):
    x = _core.float_array("x", x, 1)
    eps = epsilon("eps", eps)
    weight, bias = _row("weight", weight, x), _row("bias", bias, x)
    residual = residual_or_none(residual, x.shape, "x")
    out, total = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    if total is not None and residual is None:
        raise ValueError("out is a pair and residual is None: there is no sum to put into the second array")
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    for given, other in ((out, None), (total, out)):
        if given is not None:
            apart = {name: array for name, array in inputs.items() if array is not given}
            _core.checked_out(given, x.shape, x, apart | {"the other array": other}, wider=False)
    return _core.norm(x, weight, bias, eps, centred, residual, out, total, kernels.default, threads)


def _row(name, given, x):
    if given is None:
        return None
    array = _core.float_array(name, given, 0)
    if array.shape != x.shape[-1:]:
        raise ValueError(f"{name} has shape {array.shape} and x {x.shape}: it must be {x.shape[-1:]}")
    return array
