"""The unit in which errors are measured, and how large they may be."""

import ml_dtypes
import numpy as np
from ml_dtypes import bfloat16

import sdpa
from sdpa import reference
from support.draw import float32, float64, inf


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def unit_of(numbers, dtype):
    """One rounding of each: what is denormal is rounded as the smallest normal number is."""
    return eps(dtype) * np.maximum(np.abs(numbers), float(ml_dtypes.finfo(dtype).tiny))


def units(actual, exact, scale, dtype):
    """Largest error in roundings of `scale`, which is what the same weights give for |value|: the size of what was
    summed, element by element."""
    return float((np.abs(actual - exact) / unit_of(scale, dtype)).max(initial=0))


def arithmetic(dtype):
    """The dtype of scores and sums, and of lse."""
    return float64 if dtype == float64 else float32


def exactly(dtype):
    """A dtype in which the oracle's own error does not count."""
    return np.longdouble if dtype == float64 else float64


def plainly(dtype):
    """The dtype in which the oracle shows how large NumPy's own errors are, in roundings of that dtype: that of the
    arithmetic, or float32 in the place of float64 where long double is no wider, as on Windows and on Apple silicon."""
    wide = arithmetic(dtype)
    return wide if eps(wide) > float(np.finfo(exactly(dtype)).eps) else float32


def rounds_weights(query, key, value, **options):
    """Whether the current kernel rounds the weights to bfloat16."""
    if not query.dtype == key.dtype == value.dtype == bfloat16:
        return False
    return "pairs of bfloat16 are multiplied" in str(sdpa.explain(query, key, value, **options))


def allowed(naive, dtype, rounded_weights=False, factor=2, floor=4):
    """Largest error of a result, in `units` of its dtype, where NumPy has an error of `naive`, in those of the
    arithmetic: a multiple of that plus a rounding floor.  For a half type also one rounding of the result, which is
    half a unit, and where weights are rounded one of each of them and one of their sum."""
    wide = arithmetic(dtype)
    sums = (factor * naive + floor) * eps(wide) / eps(dtype)
    return sums if dtype == wide else sums + 0.5 + (0.5 + 0.5) * rounded_weights


def judge(out, lse, query, key, value, *, oracle=reference.attention, factor=2, floor=4, **options):
    """`out` and `lse` are as accurate as NumPy in the dtype of the arithmetic."""
    dtype, wide, plain = query.dtype.type, arithmetic(query.dtype), plainly(query.dtype)
    exact, exact_lse = oracle(query, key, value, return_lse=True, dtype=exactly(dtype), **options)
    naive, naive_lse = oracle(query, key, value, return_lse=True, dtype=plain, **options)
    scale = oracle(query, key, np.abs(value), dtype=exactly(dtype), **options)
    assert out.dtype == dtype and lse.dtype == wide and out.shape == exact.shape and lse.shape == exact_lse.shape
    products = oracle is reference.attention  # only these are of pairs
    rounded = dtype == bfloat16 and products and rounds_weights(query, key, value, **options)
    most = allowed(units(naive, exact, scale, plain), dtype, rounded, factor, floor)
    assert units(out, exact, scale, dtype) <= most
    blind = np.isneginf(exact_lse)
    assert (np.isneginf(lse) == blind).all() and (out[blind] == 0).all()
    seen = [np.where(blind, 0, x) for x in (lse, exact_lse, naive_lse)]
    size = 1 + np.abs(seen[1])
    assert units(seen[0], seen[1], size, wide) <= factor * units(seen[2], seen[1], size, plain) + floor


def assert_same_bits(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = f"u{actual.dtype.itemsize}"
    actual, expected = (np.ascontiguousarray(x).view(bits) for x in (actual, expected))
    np.testing.assert_array_equal(actual, expected)


def blind_lse(lse, options):
    """What the lse (..., H, M) of rows that see no key is: the sinks, or -inf."""
    sinks = options.get("sinks")
    return np.broadcast_to(-inf if sinks is None else np.asarray(sinks)[..., None], lse.shape).astype(lse.dtype)
