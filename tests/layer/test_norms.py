"""Layer norm and root-mean-square norm: every kernel against the oracle."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import unit_of
from support.draw import HALF, WIDE, float16, float32, float64, inf, nan
from support.kernels import on_kernels

import sdpa
from sdpa import layer_norm, reference, rms_norm

NORMS = {"layer_norm": (layer_norm, reference.layer_norm), "rms_norm": (rms_norm, reference.rms_norm)}
each_norm = pytest.mark.parametrize("norm", NORMS)


def draw(shape, dtype, seed=0):
    """x, weight, bias and residual; the mean is not 0."""
    rng = np.random.default_rng(seed)
    x, residual = (rng.standard_normal(shape) + 2 for _ in range(2))
    weight, bias = rng.standard_normal((2, shape[-1]))
    return [array.astype(dtype) for array in (x, weight, bias, residual)]


def call(norm, x, weight=None, bias=None, **options):
    return norm(x, weight, bias, **options) if "layer" in norm.__name__ else norm(x, weight, **options)


def assert_as_exact(y, expected, dtype, roundings=8, summed=None):
    """Within a rounding of the result, and some of the largest number by rows of it, or of what was summed."""
    wide = float64 if dtype == float64 else float32
    assert y.dtype == dtype and y.shape == expected.shape
    largest = np.abs(expected if summed is None else summed).max(axis=-1, keepdims=True, initial=0)
    error = np.abs(y.astype(float64) - expected)
    assert (error <= unit_of(expected, dtype) + roundings * float(np.finfo(wide).eps) * largest).all()


@on_kernels(WIDE, HALF)
@each_norm
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("size", [1, 5, 16, 37, 64, 768, 4097])
def test_against_the_oracle(kernel, dtype, norm, with_residual, size):
    x, weight, bias, residual = draw((3, 7, size), dtype)
    norms = NORMS[norm]
    more = dict(residual=residual) if with_residual else {}
    results, expected = (call(norm, x, weight, bias, **more) for norm in norms)
    if with_residual:
        results, total = results
        expected, exact_total = expected
        np.testing.assert_array_equal(total, exact_total.astype(dtype))
    if size > 1 or norm == "rms_norm":
        assert_as_exact(results, expected, dtype)


@on_kernels(WIDE, HALF)
@each_norm
def test_without_weights(kernel, dtype, norm):
    x, weight, bias, _ = draw((5, 40), dtype)
    for arguments in ({}, {"weight": weight}, {"bias": bias}):
        if norm == "layer_norm" or "bias" not in arguments:
            results, expected = (norm(x, **arguments) for norm in NORMS[norm])
            assert_as_exact(results, expected, dtype)


@on_kernels(WIDE)
def test_what_the_mean_hides(kernel, dtype):
    """A sum of squares less the square of the sum would have no digit left."""
    x = (np.arange(8.0) + (1e6 if dtype == float32 else 1e14)).astype(dtype)
    np.testing.assert_allclose(layer_norm(x, eps=0), reference.layer_norm(np.arange(8.0), eps=0), rtol=1e-6)


@on_kernels(WIDE, HALF)
@each_norm
def test_a_row_with_nan_is_nan_and_no_other(kernel, dtype, norm):
    x, *_ = draw((4, 33), dtype)
    x[1, 7], x[2, 3] = nan, inf
    y = NORMS[norm][0](x)
    assert np.isnan(y[1]).all() and np.isnan(y[2, 3]) and np.isfinite(y[[0, 3]].astype(float32)).all()


@each_norm
@pytest.mark.parametrize("dtype", [float32, float16, bfloat16])
def test_layouts(norm, dtype):
    x, weight, bias, residual = draw((2, 3, 4, 33), dtype)
    norm, _ = NORMS[norm]
    expected, total = call(norm, x, weight, bias, residual=residual)
    turned = np.ascontiguousarray(x.transpose(1, 3, 0, 2)).transpose(2, 0, 3, 1)
    out = np.empty((4, 3, 2, 66), dtype).transpose(2, 1, 0, 3)[..., ::-2]
    y, also = call(norm, turned, weight[::-1].copy()[::-1], bias, residual=np.asfortranarray(residual), out=out)
    assert y is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(also, total)
    for place in (x, residual):  # in place
        copies = {id(x): x.copy(), id(residual): residual.copy()}
        given = copies[id(x)], copies[id(residual)]
        into = copies[id(place)]
        np.testing.assert_array_equal(call(norm, given[0], weight, bias, residual=given[1], out=into)[0], expected)
    assert norm(x[:0]).shape == (0, 3, 4, 33) and norm(x[..., :0]).shape == (2, 3, 4, 0)
    np.testing.assert_array_equal(norm(x[0, 0, 0]), norm(x)[0, 0, 0])


@each_norm
def test_bits_do_not_depend_on_threads(norm):
    x, weight, bias, residual = draw((300, 700), float32)
    results = [call(NORMS[norm][0], x, weight, bias, residual=residual, threads=threads)[0] for threads in (1, 2, 5)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_a_weight_of_another_dtype():
    x, weight, *_ = draw((5, 40), float32)
    np.testing.assert_array_equal(rms_norm(x, weight.astype(float64)), rms_norm(x, weight))


X = np.ones((2, 3), float32)
WRONG = [
    (dict(x=np.ones((2, 3), int)), TypeError, "x has dtype int64"),
    (dict(x=np.float32(1)), ValueError, "x has shape"),
    (dict(x=X, weight=np.ones(2)), ValueError, "weight has shape"),
    (dict(x=X, weight=np.ones(3, int)), TypeError, "weight has dtype int64"),
    (dict(x=X, residual=np.ones((1, 3), float32)), ValueError, "residual has shape"),
    (dict(x=X, eps=-1), ValueError, "eps is -1"),
    (dict(x=X, eps="1"), TypeError, "eps is '1'"),
    (dict(x=X, eps=nan), ValueError, "eps is nan"),
    (dict(x=X, out=np.ones((2, 3))), ValueError, "out has shape"),
    (dict(x=X, out=np.ones((3, 3), float32)), ValueError, "out has shape"),
    (dict(x=X, threads=0), ValueError, "threads"),
]


@each_norm
@pytest.mark.parametrize(("arguments", "kind", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_wrong_arguments(norm, arguments, kind, said):
    with pytest.raises(kind, match=said):
        NORMS[norm][0](**arguments)


def test_out_that_overlaps():
    x = np.zeros((4, 4), float32)
    with pytest.raises(ValueError, match="out overlaps x"):
        sdpa.layer_norm(x[:2], out=x[1:3])


@on_kernels(WIDE, HALF)
@each_norm
@pytest.mark.parametrize("layout", ["new", "x and residual", "strided", "features apart"])
def test_out_may_be_a_pair(kernel, dtype, norm, layout):
    x, weight, bias, residual = draw((7, 5, 48), dtype)
    expected = call(NORMS[norm][0], x, weight, bias, residual=residual)
    out = {
        "new": lambda: (np.full_like(x, nan), np.full_like(x, nan)),
        "x and residual": lambda: (residual, x),
        "strided": lambda: (np.full_like(x, nan).swapaxes(0, 1).copy().swapaxes(0, 1), np.full_like(x, nan)),
        "features apart": lambda: tuple(np.full((2, 7, 5, 96), nan, dtype)[..., ::2]),
    }[layout]()
    results = call(NORMS[norm][0], x, weight, bias, residual=residual, out=out)
    for given, result, wanted in zip(out, results, expected):
        assert given is result
        np.testing.assert_array_equal(result, wanted)


def test_pairs_that_cannot_be_filled():
    x = np.zeros((4, 4), float32)
    y = np.zeros((8, 4), float32)
    with pytest.raises(ValueError, match="out is a pair and residual is None"):
        sdpa.layer_norm(x, out=(y[:4], y[4:]))
    with pytest.raises(ValueError, match="out overlaps the other array"):
        sdpa.layer_norm(x, residual=x, out=(y[:4], y[2:6]))
    with pytest.raises(ValueError, match="out overlaps the other array"):
        sdpa.layer_norm(x, residual=x + 1, out=(x, x))
    with pytest.raises(TypeError, match="out is of type tuple"):
        sdpa.layer_norm(x, residual=x, out=(y, y, y))
