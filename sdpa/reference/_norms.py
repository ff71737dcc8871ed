"""Norms of rows: LayerNorm and RMSNorm."""

import numpy as np

from ._arrays import cast, deliver, to_float
from ._dense import same_shape


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, residual=None, out=None, threads=None, dtype=None):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis.

    Parameters
    ----------
    residual
        An array like x.  With it, the result is (the norm of x + residual, x + residual).

    Examples
    --------
    >>> import numpy as np
    >>> layer_norm(np.array([[1.0, 3.0]]), eps=0)
    array([[-1.,  1.]])
    >>> layer_norm(np.array([[1.0, 3.0]]), np.array([1.0, 2.0]), np.array([0.0, 5.0]), eps=0)
    array([[-1.,  7.]])
    """

    def norm(rows):
        rows = rows - rows.mean(axis=-1, keepdims=True)
        return rows / root_mean_square(rows, eps)

    return _normed(norm, x, weight, bias, residual, out, dtype)


def rms_norm(x, weight=None, *, eps=1e-6, residual=None, out=None, threads=None, dtype=None):
    """x / sqrt(mean of x^2 + eps) * weight, over the last axis; `residual` as in layer_norm.

    >>> import numpy as np
    >>> rms_norm(np.array([[1.0, 7.0]]), eps=0)         # the root of the mean square is 5
    array([[0.2, 1.4]])
    >>> rms_norm(np.array([[1.0, 3.0]]), residual=np.array([[0.0, 4.0]]), eps=0)
    (array([[0.2, 1.4]]), array([[1., 7.]]))
    """
    return _normed(lambda rows: rows / root_mean_square(rows, eps), x, weight, None, residual, out, dtype)


def root_mean_square(rows, eps):
    return np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + rows.dtype.type(eps))


def _normed(norm, x, weight, bias, residual, out, dtype):
    rows = to_float("x", x, dtype)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if residual is not None:
            rows = rows + same_shape("residual", residual, rows.shape, dtype)
        y = norm(rows) if rows.size else rows
        if weight is not None:
            y = y * same_shape("weight", weight, rows.shape[-1:], dtype)
        if bias is not None:
            y = y + same_shape("bias", bias, rows.shape[-1:], dtype)
    out, total = out if isinstance(out, tuple) else (out, None)
    y = deliver(cast(y, dtype) if out is None else y, dtype, out, x, residual)
    return y if residual is None else (y, deliver(cast(rows, dtype), dtype, total, x, residual))
