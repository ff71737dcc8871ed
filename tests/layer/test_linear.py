"""Projections, with all that is applied to their sums, and feed-forward blocks: every kernel against the oracle."""

import copy
import pickle

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import eps
from support.draw import HALF, WIDE, float16, float32, float64, inf, nan
from support.kernels import on_kernels

from sdpa import FeedForward, Linear, reference
from sdpa._layer.linear import GatedLinear

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
    assert_accurate(Linear(weight, bias)(x, threads=threads), x, weight, bias)


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
    expected = layer(x, threads=1)
    np.testing.assert_array_equal(layer(x, threads=3), expected)
    for rows in (slice(0, 1), slice(3, 10), slice(119, 250)):
        np.testing.assert_array_equal(layer(x[rows], threads=2), expected[rows])


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


# Activations, residuals, gates.

ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]


def sum_eps(dtype):
    return float(np.finfo(float64 if dtype == float64 else float32).eps)


def assert_close(y, exact, size, dtype, terms=16):
    """Within a rounding of the result, and some of sums whose terms have that size altogether."""
    assert y.dtype == dtype and y.shape == exact.shape
    error = np.abs(y.astype(float64) - exact)
    assert (error <= eps(dtype) * np.abs(exact) + terms * sum_eps(dtype) * size).all()


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_single_numbers(kernel, dtype, activation):
    """Within two roundings of the argument, far out, too; the kernels compute with vectors of up to 16."""
    x = np.concatenate([np.linspace(-12, 12, 999), [-100, -1e-3, 0, 1e-3, 100, 1e4]]).astype(dtype)[:, None]
    exact = reference.Linear(np.ones((1, 1)), activation=activation)(x)
    y = Linear(np.ones((1, 1), dtype), activation=activation)(x)
    error = np.abs(y.astype(float64) - exact)
    assert (error <= eps(dtype) * np.abs(exact) + 2 * sum_eps(dtype) * np.abs(x.astype(float64))).all()
    assert not np.signbit(y[x.astype(float64) > 0]).any()


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_what_is_no_number(kernel, dtype, activation):
    x = np.array([[nan], [inf]], dtype)
    y = Linear(np.ones((1, 1), dtype), activation=activation)(x)
    assert np.isnan(y[0, 0]) and y[1, 0] == inf
    if activation in (None, "relu"):
        assert Linear(np.ones((1, 1), dtype), activation=activation)(-x)[1, 0] == (-inf if activation is None else 0)


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 3, 5), (7, 33, 130), (121, 64, 16)], ids=str)
def test_with_bias_activation_and_residual(kernel, dtype, activation, shape):
    x, weight, bias = draw(*shape, dtype)
    residual = np.random.default_rng(3).standard_normal((shape[0], shape[2])).astype(dtype)
    y = Linear(weight, bias, activation=activation)(x, residual=residual, threads=2)
    exact = reference.Linear(weight, bias, activation=activation)(x, residual=residual)
    size = exact_size(x, weight, bias) + np.abs(residual.astype(float64))
    assert_close(y, exact, size, dtype)


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows, outs", [(1, 64), (1, 500), (7, 43), (16, 129)])
def test_threads_that_share_panels_change_no_bit(kernel, dtype, activation, gated, rows, outs):
    """With as many threads panels are cut between vectors."""
    x, weight, bias = draw(rows, 150, outs, dtype)
    residual, gate, gate_bias = draw(rows, 150, outs, dtype, seed=1)[0][:, :1] + weight[:, :rows].T, -weight, bias / 2
    layer = (
        GatedLinear(weight, bias, gate, gate_bias, activation, None)
        if gated
        else Linear(weight, bias, activation=activation)
    )
    for out in np.empty((rows, outs), dtype), np.empty((rows, 2 * outs), dtype)[:, ::2]:
        expected = layer(x, residual=residual, threads=1)
        for threads in 2, 13, 64:
            np.testing.assert_array_equal(layer(x, residual=residual, out=out, threads=threads), expected)


def exact_size(x, weight, bias):
    return exact(*map(np.abs, (x, weight, bias)))


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hidden", [1, 31, 32, 100])
def test_feed_forward(kernel, dtype, activation, gated, hidden):
    x, up, up_bias = draw(9, 24, hidden, dtype)
    _, gate, gate_bias = draw(9, 24, hidden, dtype, seed=1)
    _, down, down_bias = draw(1, hidden, 40, dtype, seed=2)
    residual = draw(9, 40, 1, dtype, seed=3)[0]
    gates = dict(gate_weight=gate / 8, gate_bias=gate_bias) if gated else {}
    options = dict(up_bias=up_bias, down_bias=down_bias, activation=activation) | gates
    judge_feed_forward(
        FeedForward(up / 8, down / 8, **options)(x, residual=residual), x, up / 8, down / 8, residual, options
    )


def judge_feed_forward(y, x, up, down, residual, options):
    """`y` is about as accurate as NumPy, altogether; what is summed may be much larger than its sum."""
    dtype = x.dtype.type
    sizes = {name: np.abs(w.astype(float64)) for name, w in options.items() if isinstance(w, np.ndarray)}
    sizes["activation"] = None
    summed = reference.FeedForward(np.abs(up.astype(float64)), np.abs(down.astype(float64)), **sizes)(
        np.abs(x.astype(float64))
    ).max(initial=0)
    exactly, naive = (
        reference.FeedForward(up, down, **options)(x, residual=residual, dtype=of)
        for of in (None, dtype)
    )  # fmt: skip
    floor = 2 * sum_eps(dtype) * summed + 20 * eps(dtype) / 8 * np.abs(exactly).max(initial=0)
    assert y.dtype == dtype and y.shape == exactly.shape
    errors = [np.abs(of.astype(float64) - exactly).max(initial=0) for of in (y, naive)]
    assert errors[0] <= 2 * errors[1] + floor


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_blocks_of_rows_are_carried_through(monkeypatch, layout):
    """The result is that of all rows at once, and no more is held between the products than is said."""
    x, up, _ = draw(24, 20, 33, float32)
    down, residual = draw(24, 33, 20, float32)[1], draw(24, 20, 1, float32, seed=3)[0]
    x, residual = (rows.reshape(4, 6, 20) for rows in (x, residual))
    if layout == "strided":
        x, residual = (rows.swapaxes(0, 1)[:, ::-1] for rows in (x, residual))
    feed_forward = FeedForward(up, down)
    whole, plain = feed_forward(x, residual=residual), feed_forward(x)
    counts, layer = [], feed_forward._up
    monkeypatch.setattr("sdpa._layer.linear.CARRIED", 7 * 33 * 4)
    monkeypatch.setattr(feed_forward, "_up", lambda rows, threads: counts.append(len(rows)) or layer(rows))
    np.testing.assert_array_equal(feed_forward(x, residual=residual), whole)
    assert counts == [6, 6, 6, 6]
    np.testing.assert_array_equal(feed_forward(x), plain)
    assert feed_forward(x[:0]).shape == (0, *x.shape[1:])


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_strides_and_leading_axes(dtype):
    x, weight, bias = draw(24, 20, 33, dtype)
    linear = Linear(weight, bias, activation="silu")
    residual = np.random.default_rng(1).standard_normal((24, 33)).astype(dtype)
    whole = linear(x, residual=residual)
    many, more = x.reshape(2, 3, 4, 20), residual.reshape(2, 3, 4, 33)
    turned = np.ascontiguousarray(many.transpose(1, 3, 0, 2)).transpose(2, 0, 3, 1)
    out = np.empty((4, 3, 2, 66), dtype).transpose(2, 1, 0, 3)[..., ::-2]
    assert linear(turned, residual=np.asfortranarray(more), out=out) is out
    np.testing.assert_array_equal(out, whole.reshape(2, 3, 4, 33))
    np.testing.assert_array_equal(linear(x[5], residual=residual[5]), whole[5])
    np.testing.assert_array_equal(linear(x[::-1], residual=residual[::-1]), whole[::-1])
    assert linear(x[:0]).shape == (0, 33) and Linear(weight[:0])(x).shape == (24, 0)
    np.testing.assert_array_equal(Linear(weight[:, :0], bias)(x[:, :0]), np.broadcast_to(bias, (24, 33)))


def test_out_may_be_the_residual_and_wider():
    x, weight, bias = draw(7, 20, 33, bfloat16)
    linear = Linear(weight, bias)
    residual = np.random.default_rng(1).standard_normal((7, 33)).astype(bfloat16)
    expected = linear(x, residual=residual)
    assert linear(x, residual=residual, out=residual) is residual
    np.testing.assert_array_equal(residual, expected)
    wide = linear(x, out=np.empty((7, 33), float32))
    np.testing.assert_array_equal(wide.astype(bfloat16), linear(x))
    assert np.abs(wide - exact(x, weight, bias)).max() < 1e-4
    assert len(linear._packed) == 1  # weights stay in the dtype of x


@on_kernels(WIDE, HALF)
def test_a_wider_out_takes_the_sums_unrounded(kernel, dtype):
    x, weight, bias = draw(7, 20, 133, dtype)
    out = Linear(weight, bias, activation="relu")(x, out=np.empty((7, 133), float64))
    error = np.abs(out - np.maximum(exact(x, weight, bias), 0))
    assert (error <= 30 * sum_eps(dtype) * exact_size(x, weight, bias)).all()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)], ids=str)
def test_empty_weights_can_be_read_once_they_are_packed(kernel, shape):
    linear = Linear(np.ones(shape, float32))
    assert linear(np.ones((2, shape[1]), float32)).shape == (2, shape[0])
    assert linear.weight.shape == shape


def test_given_weights_are_not_kept_once_they_are_packed():
    x, weight, bias = draw(7, 20, 33, float32)
    linear = Linear(weight, bias)
    assert linear.weight is weight and linear.nbytes == weight.nbytes + bias.nbytes
    expected = linear(x)
    assert not np.shares_memory(linear.weight, weight) and linear._weights is None
    np.testing.assert_array_equal(linear.weight, weight)
    assert weight.nbytes <= linear.nbytes <= 4 * weight.nbytes  # panels of whole vectors
    of_half = linear(x.astype(bfloat16))
    np.testing.assert_array_equal(of_half, Linear(weight, bias)(x.astype(bfloat16)))
    for twin in (copy.copy(linear), copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        np.testing.assert_array_equal(twin(x), expected)
        np.testing.assert_array_equal(twin(x.astype(bfloat16)), of_half)


@pytest.mark.parametrize("dtype", [*WIDE.values(), *HALF.values()], ids=[*WIDE, *HALF])
def test_packed_weights_can_be_read(kernel, dtype):
    x, weight, bias = draw(2, 37, 133, dtype)
    gate = -weight[::-1]
    gated = GatedLinear(weight, bias, gate, None, "silu", None)
    gated(x)
    assert gated._weights is None
    for read, given in zip(gated._sources(), (weight, gate)):
        np.testing.assert_array_equal(read, given)


LAYER = dict(weight=np.ones((3, 2), float32))
WRONG = [
    (lambda: Linear(np.ones(3)), ValueError, "weight has shape"),
    (lambda: Linear(np.ones((3, 2), int)), TypeError, "weight has dtype int64"),
    (lambda: Linear(np.ones((3, 2)), np.ones(2)), ValueError, r"bias has shape \(2,\): it must be \(3,\)"),
    (lambda: Linear(np.ones((3, 2)), activation="tanh"), ValueError, "activation is 'tanh'"),
    (lambda: Linear(np.ones((3, 2)), threads=0), ValueError, "threads"),
    (lambda: Linear(**LAYER)(np.ones((4, 3), float32)), ValueError, "x has shape"),
    (lambda: Linear(**LAYER)(np.ones((4, 2), int)), TypeError, "x has dtype int64"),
    (lambda: Linear(**LAYER)(np.float32(1)), ValueError, "x has shape|x has 0|must have at least"),
    (lambda: Linear(**LAYER)(np.ones((4, 2)), residual=np.ones((4, 2))), ValueError, "residual has shape"),
    (lambda: Linear(**LAYER)(np.ones((4, 2)), out=np.ones((4, 2))), ValueError, "out has shape"),
    (lambda: Linear(**LAYER)(np.ones((4, 2)), out=np.ones((4, 3), float32)), ValueError, "out has shape"),
    (lambda: FeedForward(np.ones((3, 2)), np.ones((2, 2))), ValueError, "down_weight"),
    (lambda: FeedForward(np.ones((3, 2)), np.ones((2, 3)), gate_bias=np.ones(3)), ValueError, "gate_bias is given"),
    (lambda: FeedForward(np.ones((3, 2)), np.ones((2, 3)), gate_weight=np.ones((2, 2))), ValueError, "gate_weight"),
    (lambda: FeedForward(np.ones((3, 2)), np.ones((2, 3)), up_bias=np.ones(2)), ValueError, "up_bias has shape"),
    (lambda: FeedForward(np.ones((3, 2)), np.ones((2, 3)))(np.ones((4, 2)), residual=np.ones((4, 3))),
     ValueError, "residual has shape"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_wrong_arguments(call, kind, said):
    with pytest.raises(kind, match=said):
        call()


def test_out_that_overlaps_x():
    x = np.ones((4, 3), float32)
    with pytest.raises(ValueError, match="out overlaps x"):
        Linear(np.ones((3, 3), float32))(x, out=x)


def test_weights_are_read_from_what_lost_nothing():
    """Also where the first call was with x of a narrower dtype."""
    x, weight, bias = draw(7, 20, 33, float32)
    linear = Linear(weight, bias)
    of_half = linear(x.astype(bfloat16))
    assert linear.weight is weight
    linear(x)
    np.testing.assert_array_equal(linear.weight, weight)
    twin = pickle.loads(pickle.dumps(linear))
    np.testing.assert_array_equal(twin(x), linear(x))
    np.testing.assert_array_equal(twin(x.astype(bfloat16)), of_half)
