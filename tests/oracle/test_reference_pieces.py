"""The oracle's projections, feed-forward, norms, rotary tables and cache: hand-worked numbers, formulas and torch."""

import math

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.draw import float16, float32, float64, rng

import sdpa
from sdpa import reference
from sdpa.reference import FeedForward, KVCache, Linear, layer_norm, rms_norm, rotary

pytestmark = pytest.mark.filterwarnings("error")

FORMULAS = {
    None: lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
}
activations = pytest.mark.parametrize("activation", FORMULAS, ids=str)
halves = pytest.mark.parametrize("dtype", [float16, bfloat16])


def normal(*shape, seed=0):
    return rng(seed).standard_normal(shape)


# Activations and projections.


@activations
def test_activations_by_their_formulas(activation):
    x = np.concatenate([np.linspace(-6, 6, 97), [0.0, -0.0, 30.0, -30.0]])
    found = Linear(np.eye(1), activation=activation)(x[:, None])[:, 0]
    np.testing.assert_allclose(found, [FORMULAS[activation](one) for one in x], rtol=1e-13, atol=2e-16)


@pytest.mark.parametrize("activation, limit", [("relu", 0), ("gelu", 0), ("gelu_tanh", 0), ("silu", 0), (None, -1e6)])
def test_activations_far_out_are_their_limits(activation, limit):
    found = Linear(np.eye(1), activation=activation)(np.array([[-1e6], [1e6]]))
    np.testing.assert_array_equal(found, [[limit], [1e6]])


@activations
def test_activations_of_torch(activation):
    torch = pytest.importorskip("torch")
    functions = {
        None: lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }  # fmt: skip
    x, weight, bias, residual = normal(3, 5, 8), normal(6, 8, seed=1), normal(6, seed=2), normal(3, 5, 6, seed=3)
    x_, weight_, bias_, residual_ = map(torch.tensor, (x, weight, bias, residual))
    expected = functions[activation](torch.nn.functional.linear(x_, weight_, bias_)) + residual_
    found = Linear(weight, bias, activation=activation)(x, residual=residual)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-13)


def test_linear_writes_to_out():
    linear, x, out = Linear(np.array([[2.0], [3.0]])), np.array([[5.0]]), np.zeros((1, 2), float32)
    assert linear(x, out=out) is out
    assert out.tolist() == [[10, 15]]
    with pytest.raises(ValueError, match="out overlaps an input"):
        Linear(np.eye(1))(x, out=x)


@halves
def test_linear_rounds_inputs_and_the_result_once(dtype):
    x, weight, bias, residual = normal(4, 7), normal(5, 7, seed=1), normal(5, seed=2), normal(4, 5, seed=3)
    x_, weight_, bias_, residual_ = (array.astype(dtype).astype(float32) for array in (x, weight, bias, residual))
    expected = (np.maximum(x_ @ weight_.T + bias_, 0) + residual_).astype(dtype)
    found = Linear(weight, bias, activation="relu")(x, residual=residual, dtype=dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


def test_linear_names_what_is_wrong():
    linear = Linear(np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"activation is 'tanh': it must be None or one of relu, gelu"):
        Linear(np.ones((3, 2)), activation="tanh")
    with pytest.raises(ValueError, match=r"weight has shape \(3,\): it must have two axes"):
        Linear(np.ones(3))
    with pytest.raises(ValueError, match=r"bias has shape \(2,\): it must be \(3,\)"):
        Linear(np.ones((3, 2)), np.ones(2))
    with pytest.raises(ValueError, match=r"x has shape \(1, 3\): its last axis must have the 2 of weight"):
        linear(np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"residual has shape \(3,\): it must be .* \(1, 3\)"):
        linear(np.ones((1, 2)), residual=np.ones(3))
    with pytest.raises(TypeError, match="x has dtype int64"):
        linear(np.ones((1, 2), np.int64))


# The feed-forward block.


@activations
def test_feed_forward_is_its_formula(activation):
    x, up, down, gate = normal(2, 3, 4), normal(6, 4, seed=1), normal(5, 6, seed=2), normal(6, 4, seed=3)
    up_bias, gate_bias, down_bias = normal(6, seed=4), normal(6, seed=5), normal(5, seed=6)
    residual = normal(2, 3, 5, seed=7)
    act = np.vectorize(FORMULAS[activation])
    plain = FeedForward(up, down, up_bias=up_bias, down_bias=down_bias, activation=activation)
    expected = act(x @ up.T + up_bias) @ down.T + down_bias
    np.testing.assert_allclose(plain(x), expected, atol=1e-12)
    np.testing.assert_allclose(plain(x, residual=residual), expected + residual, atol=1e-12)
    gated = FeedForward(
        up, down, gate_weight=gate, up_bias=up_bias, gate_bias=gate_bias, down_bias=down_bias, activation=activation
    )
    expected = (act(x @ gate.T + gate_bias) * (x @ up.T + up_bias)) @ down.T + down_bias
    np.testing.assert_allclose(gated(x), expected, atol=1e-12)
    np.testing.assert_allclose(FeedForward(up, down, activation=activation)(x), act(x @ up.T) @ down.T, atol=1e-12)


@halves
def test_feed_forward_rounds_what_is_between(dtype):
    """1 + 2**-12 is 1 in both half types."""
    block = FeedForward(np.array([[1.0]]), np.array([[2.0**12]]), up_bias=np.array([2.0**-12]), activation=None)
    assert block(np.array([[1.0]]))[0, 0] == 2**12 + 1
    assert block(np.array([[1.0]]), dtype=dtype)[0, 0] == 2**12


def test_feed_forward_names_what_is_wrong():
    with pytest.raises(ValueError, match="gate_bias is given and gate_weight is None"):
        FeedForward(np.ones((3, 2)), np.ones((2, 3)), gate_bias=np.ones(3))
    with pytest.raises(ValueError, match=r"gate_weight has shape \(2, 2\): with up_weight it must be \(3, 2\)"):
        FeedForward(np.ones((3, 2)), np.ones((2, 3)), gate_weight=np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"down_weight has shape \(3, 2\): with up_weight it must be \(3, 3\)"):
        FeedForward(np.ones((3, 2)), np.ones((3, 2)))


# Norms.


def test_norms_of_torch():
    torch = pytest.importorskip("torch")
    x, weight, bias = normal(3, 5, 8), normal(8, seed=1), normal(8, seed=2)
    expected = torch.nn.functional.layer_norm(*map(torch.tensor, (x,)), (8,), torch.tensor(weight), torch.tensor(bias))
    np.testing.assert_allclose(layer_norm(x, weight, bias), expected.numpy(), atol=1e-13)
    expected = torch.nn.functional.rms_norm(torch.tensor(x), (8,), torch.tensor(weight), 1e-6)
    np.testing.assert_allclose(rms_norm(x, weight), expected.numpy(), atol=1e-13)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_a_residual_is_added_before(norm):
    x, residual, weight = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8, seed=2)
    found, both = norm(x, weight, residual=residual)
    np.testing.assert_array_equal(both, x + residual)
    np.testing.assert_array_equal(found, norm(x + residual, weight))


def test_layer_norm_by_hand():
    x = np.array([1e8, 1e8 + 2])  # the mean is taken off first: the variance is 1
    np.testing.assert_allclose(layer_norm(x, eps=0), [-1, 1])
    np.testing.assert_allclose(layer_norm(x, eps=3), [-0.5, 0.5])
    np.testing.assert_array_equal(layer_norm(np.full((2, 4), 7.0)), np.zeros((2, 4)))
    np.testing.assert_array_equal(layer_norm(np.full(3, 7.0), bias=np.arange(3.0)), np.arange(3.0))


@halves
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_norms_of_half_types_are_rounded_once(norm, dtype):
    x, weight = normal(4, 16).astype(dtype), normal(16, seed=1).astype(dtype)
    expected = norm(x.astype(float32), weight.astype(float32), dtype=float32).astype(dtype)
    assert norm(x, weight, dtype=dtype).dtype == dtype
    np.testing.assert_array_equal(norm(x, weight, dtype=dtype), expected)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_norms_name_what_is_wrong(norm):
    with pytest.raises(ValueError, match=r"weight has shape \(2,\)"):
        norm(np.ones((3, 4)), np.ones(2))
    with pytest.raises(ValueError, match=r"residual has shape \(4,\)"):
        norm(np.ones((3, 4)), residual=np.ones(4))
    assert norm(np.ones((0, 4))).shape == (0, 4)


# Rotary embedding with frequencies and tables.


@pytest.mark.parametrize("interleaved", [False, True])
def test_frequencies_of_a_base_are_that_base(interleaved):
    x = normal(2, 3, 5, 16)
    frequencies = 100.0 ** (-np.arange(0, 12, 2) / 12)
    found = rotary(x, 7, frequencies=frequencies, interleaved=interleaved)
    np.testing.assert_allclose(found, rotary(x, 7, base=100, dim=12, interleaved=interleaved), atol=1e-14)


@pytest.mark.parametrize("positions", [3, np.arange(5.0), np.arange(10).reshape(2, 5), np.arange(30).reshape(2, 3, 5)])
def test_tables_are_cosines_and_sines(positions):
    x = normal(2, 3, 5, 8)
    expected = rotary(x, positions)
    places = np.arange(3, 8) if np.ndim(positions) == 0 else positions
    angle = np.asarray(places)[..., None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rotary(x, None, cos=np.cos(angle), sin=np.sin(angle)), expected, atol=1e-14)
    if np.asarray(places).dtype.kind == "i":
        angle = np.arange(40)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        np.testing.assert_allclose(rotary(x, positions, cos=np.cos(angle), sin=np.sin(angle)), expected, atol=1e-14)


def test_a_position_for_each_pair():
    """Those of one axis are turned as if that were the position of all."""
    x, time, height = normal(2, 3, 5, 8), np.arange(10).reshape(2, 5), np.arange(5) * 11
    positions = np.stack([time, time, np.broadcast_to(height, (2, 5)), time], axis=-1)[:, None]
    found = rotary(x, positions)
    by_time, by_height = rotary(x, time), rotary(x, height)
    for pair in range(4):
        expected = (by_height if pair == 2 else by_time)[..., [pair, pair + 4]]
        np.testing.assert_array_equal(found[..., [pair, pair + 4]], expected)
    angle = np.arange(60)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rotary(x, positions, cos=np.cos(angle), sin=np.sin(angle)), found, atol=1e-14)
    flat = rotary(x[0, 0], positions[0, 0])
    np.testing.assert_array_equal(flat, found[0, 0])


def test_tables_need_not_be_rotations():
    x = np.array([[1.0, 2.0, 5.0]])
    found = rotary(x, None, cos=np.array([[3.0]]), sin=np.array([[10.0]]))
    np.testing.assert_array_equal(found, [[3 - 20, 6 + 10, 5]])


def test_rotary_names_what_is_wrong():
    x, table = np.ones((5, 8)), np.ones((5, 4))
    for message, options in {
        "one of cos and sin is given": dict(cos=table),
        "frequencies and the tables": dict(cos=table, sin=table, frequencies=np.ones(4)),
        "dim is 6, and there are frequencies or tables for 8": dict(frequencies=np.ones(4), dim=6),
        "from 0 to the 8 features": dict(frequencies=np.ones(5)),
        "frequencies are .* finite": dict(frequencies=[np.inf]),
        "with positions a table must have two axes": dict(cos=table[None], sin=table[None]),
        "from 0 to below the 5 rows of cos": dict(cos=table, sin=table),
    }.items():
        with pytest.raises(ValueError, match=message):
            rotary(x, np.arange(1, 6), **options)
    with pytest.raises(ValueError, match="positions is None"):
        rotary(x, None)
    with pytest.raises(ValueError, match=r"cos has shape \(4, 4\)"):
        rotary(x, None, cos=table[1:], sin=table)


# The cache.


@pytest.mark.parametrize("options", [{}, dict(window=3), dict(window=2, keep=1)], ids=str)
def test_cache_is_that_of_the_library(options):
    query, key, value = normal(2, 4, 12, 8), normal(2, 2, 12, 8, seed=1), normal(2, 2, 12, 6, seed=2)
    caches = [of.KVCache(2, 2, 8, value_dim=6, dtype=float64, **options) for of in (sdpa, reference)]
    for begin, end, lengths in ((0, 5, [5, 3]), (5, 6, None), (6, 12, [0, 6])):
        rows, found = slice(begin, end), []
        for cache in caches:
            cache.append(key[:, :, rows], value[:, :, rows], lengths)
            found.append(cache.attend(query[:, :, rows]))
        for b, length in enumerate([end - begin] * 2 if lengths is None else lengths):
            np.testing.assert_allclose(found[0][b, :, :length], found[1][b, :, :length], atol=1e-13)
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist()
    found = []
    for cache in caches:
        cache.truncate([5, 8])
        cache.append(key[:, :, :1], value[:, :, :1])
        found.append(cache.attend(query[:, :, :1]))
        assert cache.lengths.tolist() == [6, 9] and len(cache) == 9
    np.testing.assert_allclose(*found, atol=1e-13)


def test_cache_rounds_to_its_dtype():
    cache = KVCache(1, 1, 2, dtype=float16)
    cache.append(np.full((1, 1, 1, 2), 1 + 2**-12), np.full((1, 1, 1, 2), 3 + 2**-12))
    assert cache.attend(np.ones((1, 1, 1, 2))).tolist() == [[[[3, 3]]]]
    with pytest.raises(TypeError, match="int8"):
        KVCache(1, 1, 2, dtype=np.int8)
