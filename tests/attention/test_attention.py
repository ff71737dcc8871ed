"""Accuracy: the compiled engine against the oracle, for named shapes and options."""

import itertools

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import exactly, judge
from support.draw import DTYPES, HALF, WIDE, draw, float32, float64, inf, rng
from support.kernels import on_kernels
from support.options import OPTIONS, options_for

import sdpa
from sdpa import reference

TAILS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257]
SIZES = [1, 2, 3, 7, 8, 16, 20, 40, 64, 65, 80, 128, 256]
SHAPES = (
    {f"{M} queries": dict(B=1, H=1, G=1, M=M, N=20, D=8, E=8) for M in TAILS}
    | {f"{N} keys": dict(B=1, H=1, G=1, M=5, N=N, D=8, E=8) for N in TAILS}
    | {f"{n} queries, {n} keys": dict(B=1, H=1, G=1, M=n, N=n, D=4, E=3) for n in TAILS}
    | {f"keys of size {D}": dict(B=1, H=1, G=1, M=19, N=37, D=D, E=9) for D in SIZES}
    | {f"values of size {E}": dict(B=1, H=1, G=1, M=19, N=37, D=9, E=E) for E in SIZES}
    | {f"sizes of {D}": dict(B=2, H=2, G=2, M=70, N=135, D=D, E=D) for D in (40, 64, 80, 128)}
    | {f"groups of {n}": dict(B=2, H=2 * n, G=2, M=11, N=33, D=8, E=5) for n in (2, 3, 4, 8)}
    | {f"one key head for {n}": dict(B=1, H=n, G=1, M=n + 7, N=130, D=16, E=16) for n in (2, 3, 4, 8, 71)}
    | {"more queries than keys": dict(B=1, H=2, G=1, M=90, N=40, D=8, E=8)}
)


def check(arrays, **options):
    out, lse = sdpa.attention(*arrays, return_lse=True, **options)
    judge(out, lse, *arrays, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@on_kernels(WIDE, HALF, {"float64 over float32": (float64, float32)}, half="best")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(kernel, shape, dtype, causal):
    check(draw(**shape, dtype=dtype), causal=causal)


@on_kernels(WIDE, HALF, {"float64 over float32": (float64, float32)}, half="best")
@pytest.mark.parametrize("sizes", [(37, 133), (150, 150), (3, 300), (70, 40)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(kernel, name, sizes, dtype):
    arrays = draw(M=sizes[0], N=sizes[1], dtype=dtype)
    check(arrays, **options_for(*arrays[:2], name))


def pairs():
    sample = draw(M=4, N=5)[:2]
    for first, second in itertools.combinations(OPTIONS, 2):
        if not options_for(*sample, first).keys() & options_for(*sample, second).keys():
            yield first, second


@on_kernels(WIDE, {"bfloat16": bfloat16}, half="best")
@pytest.mark.parametrize("first, second", list(pairs()))
def test_options_compose(kernel, first, second, dtype):
    arrays = draw(M=21, N=139, D=8, E=5, dtype=dtype)
    check(arrays, **options_for(*arrays[:2], first, second))


EVERYTHING = ["mask of keys", "bias", "window", "lengths", "scale", "softcap", "sinks", "alibi", "offset per batch"]


@on_kernels(DTYPES)
def test_everything_at_once(kernel, dtype):
    arrays = draw(M=65, N=257, dtype=dtype)
    check(arrays, causal=True, **options_for(*arrays[:2], *EVERYTHING))


@pytest.mark.parametrize("name", ["nothing", "causal", "window", "bias", "softcap", "sinks", "alibi"])
def test_within_the_tolerances_of_torch(kernel, name):
    arrays = draw(M=129, N=300, D=64, E=64)
    options = options_for(*arrays[:2], name)
    out = sdpa.attention(*arrays, **options)
    np.testing.assert_allclose(out, reference.attention(*arrays, **options), rtol=5e-6, atol=1e-5)


# Numbers that are large, small, or many.


@pytest.mark.parametrize("name", ["nothing", "causal", "bias", "softcap", "wide softcap", "sinks", "alibi"])
@on_kernels(WIDE, HALF, half="best")
def test_large_scores(kernel, dtype, name):
    query, key, value = draw(D=64, dtype=dtype)
    check([query * 30, key, value], **options_for(query, key, name))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@on_kernels(WIDE, HALF, half="best")
def test_long_rows(kernel, dtype, causal):
    check(draw(1, 2, 1, 18, 5000, 16, 8, dtype=dtype), causal=causal)


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_scores_that_rise_and_fall_over_blocks(kernel, order, dtype):
    """The running maximum changes in every block, or in the first only; early weights shrink to nothing."""
    key = np.linspace(-300, 300, 700)[:, None].astype(dtype)
    value = rng(0).standard_normal((700, 3)).astype(dtype)
    query = np.full((19, 1), 1 if order == "rising" else -1, dtype)
    check([query, key, value])


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_rows_hidden_by_a_large_finite_bias_are_uniform(kernel, dtype):
    query, key, value = draw(M=19, N=140, dtype=dtype)
    low = np.finfo(dtype).min
    bias = np.where(rng(0).random((19, 140)) < 0.5, low, 0).astype(dtype)
    bias[3] = bias[7] = low
    out, lse = sdpa.attention(query, key, value, bias=bias, return_lse=True)
    mean = value.mean(axis=-2, dtype=np.float64).repeat(2, axis=1)
    np.testing.assert_allclose(out[:, :, 3], mean, atol=50 * np.finfo(dtype).eps)
    np.testing.assert_allclose(out[:, :, 7], mean, atol=50 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse[:, :, 3], low)
    others = np.delete(np.arange(19), [3, 7])
    judge(out[:, :, others], lse[:, :, others], query[:, :, others], key, value, bias=bias[others])


def test_a_float64_bias_that_float32_cannot_hold_is_not_minus_inf(kernel):
    """Only -inf hides: a row of the lowest float64 is uniform, like one of the lowest float32."""
    query, key, value = draw(M=3, N=40)
    out = sdpa.attention(query, key, value, bias=np.full((3, 40), np.finfo(np.float64).min))
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(-2, keepdims=True).repeat(2, 1), out.shape), atol=1e-5)


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_a_large_bias_in_common_changes_nothing(kernel, size):
    arrays = draw(dtype=np.float64)
    out, lse = sdpa.attention(*arrays, bias=np.full((1, 1), size), return_lse=True)
    expected, expected_lse = sdpa.attention(*arrays, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-10)
    np.testing.assert_allclose(lse - size, expected_lse, atol=1e-10)


@pytest.mark.parametrize("scale", [0, -1e-30, 1e-30, -0.7, 3.0])
@pytest.mark.parametrize("name", ["nothing", "causal", "mask", "bias that hides", "softcap", "alibi"])
def test_scale(kernel, name, scale):
    arrays = draw()
    check(arrays, scale=scale, **options_for(*arrays[:2], name))


@pytest.mark.parametrize("softcap", [1e-6, 1e-2, 0.5, 30.0, 1e3, 1e8, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_softcap(kernel, dtype, softcap):
    check(draw(dtype=dtype), softcap=softcap)


@pytest.mark.parametrize("softcap", [1e-30, 1e-60, 1e-300])
def test_softcap_so_small_that_all_keys_weigh_the_same(kernel, softcap):
    query, key, value = draw()
    query[:, :, 0] = 0
    out = sdpa.attention(query, key, value, softcap=softcap)
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(-2, keepdims=True).repeat(2, 1), out.shape), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1e-3, 0.02, 0.3, 1, 5, 50])
def test_softcap_keeps_the_digits_of_small_scores(kernel, size, dtype):
    """One key: lse is its score."""
    query = (size * np.linspace(-1, 1, 33, dtype=dtype)).reshape(33, 1, 1)
    ones = np.ones((33, 1, 1), dtype)
    lse = sdpa.attention(query, ones, ones, softcap=1.0, return_lse=True)[1]
    expected = np.tanh(query[..., 0].astype(exactly(dtype)))
    np.testing.assert_allclose(lse, expected, rtol=8 * np.finfo(dtype).eps, atol=0)


def test_weights_that_underflow_are_zero(kernel):
    key = np.array([[0.0], [-100], [-1000], [-1e30]], np.float32)
    weights = sdpa.attention_weights(np.ones((1, 1), np.float32), key)
    assert weights.tolist()[0] == [1, 0, 0, 0]


@pytest.mark.parametrize("keys", [1, 2, 300])
def test_equal_values(kernel, keys):
    """Nothing cancels: partial sums are as large as they can be."""
    query, key, value = draw(M=65, N=keys)
    check([query, key, np.full_like(value, 3.25)])


def test_lse_is_that_of_all_scores(kernel):
    """Worked out by hand: scores 0 and log 3."""
    key = np.array([[0.0], [np.log(3)]])
    out, lse = sdpa.attention(np.ones((1, 1)), key, np.array([[8.0], [4.0]]), return_lse=True)
    np.testing.assert_allclose(out, [[5.0]], rtol=1e-15)
    np.testing.assert_allclose(lse, [np.log(4)], rtol=1e-15)
    assert sdpa.attention(np.ones((1, 1)), key, key, return_lse=True, bias=np.full(2, -inf))[1] == -inf


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("size", [513, 1024, 4096])
def test_long_features(kernel, size, dtype):
    """One sum over thousands of products would be less exact than NumPy's."""
    arrays = draw(1, 1, 1, M=40, N=100, D=size, dtype=dtype)
    check(arrays)
    check(arrays, causal=True, softcap=5.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("size", [0.01, 0.5, 2.0, 1e30])
def test_numbers_at_the_ends_of_the_range(kernel, name, size, dtype):
    """Finite, however small or large the scale and the cap."""
    query, key, value = draw(1, 1, 1, M=20, N=30, dtype=dtype)
    for number in float(np.finfo(dtype).tiny) * size, float(np.finfo(dtype).max) / size:
        if np.isfinite(number):
            out = sdpa.attention(query, key, value, **{name: number})
            assert np.isfinite(out).all() and (abs(out) <= abs(value).max() * 1.0001).all()
