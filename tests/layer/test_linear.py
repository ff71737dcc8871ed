"""Projections: every kernel against NumPy in float64."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import eps
from support.draw import HALF, WIDE, float16, float32, float64, inf, nan
from support.kernels import on_kernels

from sdpa._layer.linear import Linear

# (rows, ins, outs): sizes around a tile (6), a panel (64 and less), a block of rows (120), a sum (128 steps)
SHAPES = [
    (1, 1, 1), (2, 3, 5), (5, 128, 64), (6, 129, 65), (7, 77, 130), (121, 64, 16), (240, 300, 100), (1, 768, 192),
    (37, 20, 7),
]  # fmt: skip


def draw(rows, ins, outs, dtype, seed=0):
    """x, W and bias."""
    normal = np.random.default_rng(seed).standard_normal
    return [normal(shape).astype(dtype) for shape in ((rows, ins), (outs, ins), (outs,))]


def exact(x, weight, bias):
    x, weight, bias = (array.astype(float64) for array in (x, weight, bias))
    return x @ weight.T + bias


def assert_accurate(y, x, weight, bias):
    """Within two roundings of the dtype for the result, and those of the sums: one for each of the parts of 128 terms,
    and their square root for each part."""
    size = exact(*map(np.abs, (x, weight, bias)))
    sums = float(np.finfo(float64 if x.dtype == float64 else float32).eps)
    terms = 12 + x.shape[1] / 128
    expected = exact(x, weight, bias)
    assert y.dtype == x.dtype
    assert (np.abs(y.astype(float64) - expected) <= eps(x.dtype) * np.abs(expected) + terms * sums * size).all()


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_numpy(kernel, dtype, shape, threads):
    x, weight, bias = draw(*shape, dtype)
    assert_accurate(Linear(weight, bias)(x, threads), x, weight, bias)


@on_kernels(WIDE, HALF)
def test_without_bias(kernel, dtype):
    x, weight, bias = draw(9, 33, 70, dtype)
    assert_accurate(Linear(weight)(x), x, weight, 0 * bias)


@on_kernels(WIDE, HALF)
def test_small_numbers_by_hand(kernel, dtype):
    """They and their sums are exact in all dtypes."""
    x = np.array([[1, 2], [0, -1]], dtype)
    layer = Linear(np.array([[1, 0], [3, 4], [0.5, -2]], dtype), np.array([0, 1, 10], dtype))
    np.testing.assert_array_equal(layer(x).astype(float64), [[1, 12, 6.5], [0, -3, 12]])


@on_kernels(WIDE, HALF)
def test_strides_change_no_bit(kernel, dtype):
    x, weight, bias = draw(130, 96, 80, dtype)
    expected = Linear(weight, bias)(x)
    wide = np.zeros((130, 2 * 96 + 1), dtype)
    wide[:, 1::2] = x
    views = (wide[:, 1::2], np.asfortranarray(x), x[::-1].copy()[::-1], wide[:, 1::2].copy())
    for view in views:
        np.testing.assert_array_equal(Linear(np.asfortranarray(weight), bias[::-1].copy()[::-1])(view), expected)


@on_kernels(WIDE, HALF)
def test_other_rows_and_threads_change_no_bit(kernel, dtype):
    x, weight, bias = draw(250, 200, 150, dtype)
    layer = Linear(weight, bias)
    expected = layer(x, 1)
    np.testing.assert_array_equal(layer(x, 3), expected)
    for rows in (slice(0, 1), slice(3, 10), slice(119, 250)):
        np.testing.assert_array_equal(layer(x[rows], 2), expected[rows])


@on_kernels(WIDE, HALF)
def test_leading_axes(kernel, dtype):
    x, weight, bias = draw(24, 10, 12, dtype)
    layer = Linear(weight, bias)
    np.testing.assert_array_equal(layer(x.reshape(2, 3, 4, 10)), layer(x).reshape(2, 3, 4, 12))
    np.testing.assert_array_equal(layer(x[0]), layer(x)[0])


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)], ids=str)
def test_empty(kernel, dtype, shape):
    x, weight, bias = draw(*shape, dtype)
    y = Linear(weight, bias)(x)
    assert y.shape == (shape[0], shape[2])
    if shape[1] == 0:
        np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("what", [nan, inf])
def test_what_is_not_finite_stays_in_its_row(kernel, dtype, what):
    x, weight, bias = draw(14, 65, 66, dtype)
    expected = Linear(weight, bias)(x)
    x[3, 64] = what
    y = Linear(weight, bias)(x)
    assert not np.isfinite(y[3].astype(float64)).any()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(expected, 3, 0))


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64])
def test_weights_take_the_dtype_of_x(dtype):
    x, weight, bias = draw(5, 40, 30, float64)
    layer = Linear(weight, bias)
    y = layer(x.astype(dtype))
    np.testing.assert_array_equal(y, Linear(weight.astype(dtype), bias)(x.astype(dtype)))
    assert y.dtype == dtype
    assert_accurate(layer(x), x, weight, bias)  # and have not changed by that


def test_inputs_may_be_read_only():
    x, weight, bias = draw(5, 40, 30, float32)
    for array in (x, weight, bias):
        array.flags.writeable = False
    assert_accurate(Linear(weight, bias)(x), x, weight, bias)
