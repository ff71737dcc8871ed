"""Additive attention: the oracle against numbers worked out by hand, loops and differences, the library against the
oracle on every kernel."""

import itertools
import math
import re

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import arithmetic, assert_same_bits, judge
from support.draw import DTYPES, HALF, WIDE, float16, float32, float64, inf, nan, rng
from support.kernels import on_kernels
from support.layouts import LAYOUTS
from support.options import OPTIONS, options_for

import sdpa
from sdpa import reference

LOG2, LOG3 = math.log(2), math.log(3)
EACH = on_kernels(WIDE, HALF, {"float64 over float16": (float64, float16)}, half="best")


def draw(B=2, H=4, G=2, M=37, N=133, D=9, K=6, E=12, A=7, dtype=float32, of_query=False, of_key=False, seed=0):
    """Query, key and value; w_query, w_key and v, with one for each head where that is wanted, in the arithmetic's
    dtype, so that none is rounded."""
    normal = rng(seed).standard_normal
    query, others = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    shapes = ((B, H, M, D), query), ((B, G, N, K), others), ((B, G, N, E), others)
    weights = normal((*[H] * of_query, A, D)) / 3, normal((*[G] * of_key, A, K)) / 3, normal((*[H] * of_query, A))
    arrays = [normal(shape).astype(of) for shape, of in shapes]
    return arrays, [weight.astype(arithmetic(query)) for weight in weights]


def both(arrays, weights, **options):
    return sdpa.additive_attention(*arrays, *weights, return_lse=True, **options)


def check(arrays, weights, factor=2, floor=4, **options):
    def oracle(*arrays, **more):
        return reference.additive_attention(*arrays, *weights, **more)

    judge(*both(arrays, weights, **options), *arrays, oracle=oracle, factor=factor, floor=floor, **options)


# ---- The oracle.


def by_hand():
    """Projections of the query log(2) / 2 and log(2), those of key 0 are 0 and log(3) / 2 - log(2), those of key 1 are
    -log(2) / 2 and 0; tanh(log(2) / 2) = 1 / 3, tanh(log(3) / 2) = 1 / 2, tanh(log(2)) = 3 / 5."""
    query, value = np.array([[LOG2]]), np.array([[8.0], [4.0]])
    key = np.array([[0.0, LOG3 / 2 - LOG2], [-LOG2 / 2, 0.0]])
    return (query, key, value), (np.array([[0.5], [1.0]]), np.eye(2), np.array([3.0, 10.0]))


@pytest.mark.parametrize("module", [reference, sdpa])
def test_by_hand(module):
    """Scores 3 / 3 + 10 / 2 = 6 and 3 * 0 + 10 * 3 / 5 = 6, made log(3) and 0 by a bias."""
    arrays, weights = by_hand()
    out, lse = module.additive_attention(*arrays, *weights, bias=np.array([LOG3 - 6, -6]), return_lse=True)
    np.testing.assert_allclose(out, [[7.0]], rtol=1e-14)
    np.testing.assert_allclose(lse, [math.log(4)], rtol=1e-13)
    lse = module.additive_attention(*arrays, *weights, scale=0.25, softcap=2, return_lse=True)[1]
    np.testing.assert_allclose(lse, [LOG2 + 2 * math.tanh(0.75)], rtol=1e-14)


def test_gradients_by_hand():
    """One feature: tanh 1 / 3 and 0, scores log(3) and 0, weights 3 / 4 and 1 / 4, result 7; the gradients by the
    products are +-scale * 3 / 4, those by the sums in tanh these times v (1 - tanh^2)."""
    scale, one = 1.5 * LOG3, np.ones((1, 1))
    inputs = np.array([[LOG2 / 2]]), np.array([[0.0], [-LOG2 / 2]]), np.array([[8.0], [4.0]]), one, one, np.array([2.0])
    out, lse = reference.additive_attention(*inputs, scale=scale, return_lse=True)
    grads = reference.additive_attention_backward(one, *inputs, out, lse, scale=scale)
    np.testing.assert_allclose(out, [[7]])
    np.testing.assert_allclose(grads.key, [[scale * 4 / 3], [-scale * 3 / 2]])
    np.testing.assert_allclose(grads.query, [[-scale / 6]])
    np.testing.assert_allclose(grads.value, [[0.75], [0.25]])
    np.testing.assert_allclose(grads.w_query, [[-scale / 6 * LOG2 / 2]])
    np.testing.assert_allclose(grads.w_key, [[scale * 3 / 4 * LOG2]])
    np.testing.assert_allclose(grads.v, [scale / 4])
    assert grads.bias is None and grads.sinks is None


def test_the_oracle_as_by_loops():
    arrays, weights = draw(M=3, N=5, D=3, K=2, E=2, A=4, dtype=float64, of_query=True)
    query, key, value = arrays
    w_query, w_key, v = weights
    expected = np.zeros((2, 4, 3, 2))
    for b, h, i in itertools.product(range(2), range(4), range(3)):
        g = h // 2
        scores = []
        for j in range(5):
            features = zip(v[h], w_query[h] @ query[b, h, i], w_key @ key[b, g, j])
            scores.append(0.7 * sum(each * math.tanh(x + y) for each, x, y in features))
        exps = [math.exp(score) for score in scores]
        expected[b, h, i] = sum(e * value[b, g, j] for j, e in enumerate(exps)) / sum(exps)
    np.testing.assert_allclose(reference.additive_attention(*arrays, *weights, scale=0.7), expected, rtol=1e-12)


STEP = 2e-3


def by_differences(inputs, name, total):
    """Exact up to the fourth derivative."""
    array = np.asarray(inputs[name], float64)
    slopes = np.zeros(array.shape)
    for index in np.ndindex(array.shape):
        for steps, factor in (2, -1 / 12), (1, 8 / 12), (-1, -8 / 12), (-2, 1 / 12):
            moved = array.copy()
            moved[index] += steps * STEP
            slopes[index] += total(inputs | {name: moved}) * factor / STEP
    return slopes


GRADIENTS = {
    "nothing": ((), {}),
    "weights by head": ((), dict(of_query=True, of_key=True)),
    "causal": (("causal",), {}),
    "lengths": (("lengths with 0",), {}),
    "mask": (("mask",), {}),
    "bias that hides": (("bias that hides", "scale"), {}),
    "everything": (("bias", "mask", "window", "softcap", "sinks", "alibi", "scale below 0"), dict(of_query=True)),
}


@pytest.mark.parametrize("names, sizes", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_the_oracle(names, sizes):
    arrays, weights = draw(M=3, N=4, D=3, K=2, E=2, A=3, dtype=float64, **sizes)
    inputs = dict(zip(["query", "key", "value", "w_query", "w_key", "v"], arrays + weights))
    inputs |= options_for(*arrays[:2], *names)
    out, lse = reference.additive_attention(**inputs, return_lse=True)
    grad_out, grad_lse = rng(1).standard_normal(out.shape), rng(2).standard_normal(lse.shape)

    def total(inputs):
        out, lse = reference.additive_attention(**inputs, return_lse=True)
        return (out * grad_out).sum() + (np.where(np.isneginf(lse), 0, lse) * grad_lse).sum()

    grads = reference.additive_attention_backward(grad_out, **inputs, out=out, lse=lse, grad_lse=grad_lse)
    for name, grad in grads._asdict().items():
        if name in inputs and np.isfinite(inputs[name]).all():
            expected = by_differences(inputs, name, total)
            np.testing.assert_allclose(grad, expected, rtol=0, atol=2e-10 * (1 + abs(expected).max()), err_msg=name)


def test_gradients_ignore_what_nobody_sees():
    arrays, weights = draw(M=3, N=5, dtype=float64)
    mask = np.array([True, True, False, True, False])
    query, key, value = (x.copy() for x in arrays)
    key[:, :, 2], value[:, :, 4], query[:, :, 1] = nan, inf, nan
    rows = np.array([True, False, True])[:, None]

    def gradients(*arrays):
        out, lse = reference.additive_attention(*arrays, *weights, mask=mask & rows, return_lse=True)
        return reference.additive_attention_backward(out, *arrays, *weights, out, lse, mask=mask & rows)

    for actual, expected in zip(gradients(query, key, value)[:6], gradients(*arrays)[:6]):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


# ---- The library against the oracle.


@EACH
@pytest.mark.parametrize("sizes", [(37, 133), (3, 300)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(kernel, name, sizes, dtype):
    arrays, weights = draw(M=sizes[0], N=sizes[1], dtype=dtype, of_query=True)
    check(arrays, weights, **options_for(*arrays[:2], name))


@EACH
def test_everything_at_once(kernel, dtype):
    arrays, weights = draw(M=70, N=150, A=24, dtype=dtype, of_key=True)
    names = "mask", "bias", "window", "offset per batch", "lengths", "scale", "softcap", "sinks", "alibi"
    check(arrays, weights, **options_for(*arrays[:2], *names))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes(dtype):
    arrays, weights = draw(dtype=dtype)
    check(arrays, weights, causal=True)


@on_kernels(WIDE)
@pytest.mark.parametrize("A", [1, 2, 3, 4, 5, 8, 31, 64, 65, 130, 300])
def test_features(kernel, A, dtype):
    arrays, weights = draw(B=1, H=2, G=1, M=35, N=70, A=A, dtype=dtype)
    weights[2] /= math.sqrt(A)
    check(arrays, weights)
    check(arrays, [*weights[:2], abs(weights[2])])  # what is summed grows to the end


SHAPES = {
    "one of each": dict(B=1, H=1, G=1, M=1, N=1, D=1, K=1, E=1, A=1),
    "many rows of one head": dict(B=1, H=1, G=1, M=200, N=9),
    "many keys": dict(B=1, H=1, G=1, M=2, N=1500),
    "one key head for 71": dict(B=1, H=71, G=1, M=3, N=20),
    "groups of 3": dict(B=2, H=6, G=2, M=11, N=33),
    "keys of another size": dict(D=3, K=40),
    "sizes of 0": dict(D=0, K=0),
}


@on_kernels(WIDE)
@pytest.mark.parametrize("by_head", [False, True], ids=["shared weights", "weights by head"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(kernel, shape, by_head, dtype):
    check(*draw(**shape, dtype=dtype, of_query=by_head, of_key=by_head))


def test_fewer_and_more_axes(kernel):
    arrays, weights = draw(B=6)
    expected, expected_lse = both(arrays, weights)
    three, two = [x[1] for x in arrays], [x[1, 0] for x in arrays]
    for given, part in (three, np.s_[1]), (two, np.s_[1, 0]):
        out, lse = both(given, weights)
        assert_same_bits(out, expected[part])
        assert_same_bits(lse, expected_lse[part])
    five = [x.reshape(2, 3, *x.shape[1:]) for x in arrays]
    assert_same_bits(both(five, weights)[0], expected.reshape(2, 3, *expected.shape[1:]))
    shared = [five[0], five[1][:1], five[2][:1, :1]]
    check(shared, weights)


def test_one_head_absent_with_weights_by_head(kernel):
    (query, key, value), weights = draw(B=1, H=1, G=1)
    expected = sdpa.additive_attention(query, key, value, *weights)
    by_head = [weight[None] for weight in weights]
    assert_same_bits(sdpa.additive_attention(query[0, 0], key[0, 0], value[0, 0], *by_head), expected[0, 0])


# ---- Sums of projections that are large, cancel, or are not finite.


def of_projections(x, y, dtype):
    """Arrays and weights for projections x (M, A) and y (N, A) without an error: the weights are 0 and 1."""
    features = np.shape(x)[-1]
    weights = np.eye(features, dtype=dtype), np.eye(features, dtype=dtype), rng(1).standard_normal(features)
    value = rng(2).standard_normal((len(y), 5)).astype(dtype)
    return (np.asarray(x, dtype), np.asarray(y, dtype), value), [weight.astype(dtype) for weight in weights]


SIZES = [0, 5, 12, 20, 30, 33, 34, 35, 40, 43, 44, 45, 60, 88, 100, 1e3, 1e6]


@on_kernels(WIDE)
@pytest.mark.parametrize("size", [*SIZES, 333, 354.9, 355, 360, 709, 710, 1e30])
def test_large_projections_that_cancel(kernel, size, dtype):
    """x + y is of order 1 wherever their signs differ."""
    signs = rng(3).choice([-1.0, 1.0], (2, 70, 6))
    x, y = signs * size + rng(4).standard_normal((2, 70, 6))
    check(*of_projections(x, y, dtype))


@on_kernels(WIDE)
@pytest.mark.parametrize("size", [50.0, 400.0])
def test_large_projections_among_small_ones(kernel, size, dtype):
    x, y = rng(5).standard_normal((2, 90, 9))
    x[::7, 2], x[3::11, 5] = size, -size
    y[::5, 2], y[::3, 5] = -size, size
    arrays, weights = of_projections(x, y, dtype)
    check(arrays, weights)
    check(arrays, weights, causal=True, bias=rng(6).standard_normal((90, 90)))
    for row in 0, 1, 3, 14:  # bits do not depend on what the others hold
        alone = both((arrays[0][row : row + 1], *arrays[1:]), weights)
        for actual, expected in zip(alone, both(arrays, weights)):
            assert_same_bits(actual, expected[row : row + 1])


@on_kernels(WIDE)
def test_the_largest_score_is_that_of_large_projections_that_cancel(kernel, dtype):
    """Their scores are 0.  What the exponentials say of them, tanh = -1 and a score of 1000, must leave no trace."""
    one = np.ones((1, 1), dtype)
    query, key, value = np.array([[500]], dtype), np.array([[-500], [-500]], dtype), np.array([[1], [3]], dtype)
    out, lse = sdpa.additive_attention(query, key, value, one, one, -1000 * one[0], return_lse=True)
    assert out.tolist() == [[2]] and lse == pytest.approx([LOG2])


@on_kernels(WIDE)
def test_projections_that_are_not_finite_as_in_the_oracle(kernel, dtype):
    """NaN, and inf where it cancels, make NaN of a score; inf alone is the limit of tanh."""
    numbers = np.array([0, 0.5, -3, 50, -50, 400, -400, 1e30, -1e30, inf, -inf, nan], dtype)[:, None]
    ones, v = np.ones((5, 1), dtype), np.array([0.5, -1, 0.25, 2, 1], dtype)
    for number in numbers:
        value = rng(0).standard_normal((2, 3)).astype(dtype)
        arrays = numbers, np.array([[0.25], number], dtype), value
        with np.errstate(invalid="ignore"):
            expected = reference.additive_attention(*arrays, ones, ones, v, dtype=float64)
        actual = sdpa.additive_attention(*arrays, ones, ones, v)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@on_kernels(WIDE)
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_numbers_of_v_of_any_size(kernel, size, dtype):
    arrays, weights = draw(B=1, dtype=dtype)
    weights[2] *= dtype(size)
    check(arrays, weights, scale=1 / size)


def test_v_of_zeros(kernel):
    """All keys match alike."""
    (query, key, value), (w_query, w_key, v) = draw()
    out = sdpa.additive_attention(query, key, value, w_query, w_key, 0 * v)
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(-2, keepdims=True).repeat(2, 1), out.shape), atol=1e-5)


@on_kernels(WIDE, HALF, half="best")
@pytest.mark.parametrize("garbage", [nan, inf])
def test_hidden_keys_may_hold_anything(kernel, garbage, dtype):
    (query, key, value), weights = draw(dtype=dtype)
    mask = rng(1).random(133) < 0.7
    expected = both((query, key, value), weights, mask=mask, causal=True)
    key, value = key.copy(), value.copy()
    key[:, :, ~mask] = value[:, :, ~mask] = garbage
    for actual, clean in zip(both((query, key, value), weights, mask=mask, causal=True), expected):
        assert_same_bits(actual, clean)


# ---- Empty axes.


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("axis", list("MNEBA"))
def test_empty_axes(kernel, axis, dtype):
    arrays, weights = draw(**{axis: 0}, dtype=dtype)
    out, lse = both(arrays, weights, causal=True)
    expected, expected_lse = reference.additive_attention(*arrays, *weights, causal=True, return_lse=True)
    assert out.shape == expected.shape and out.dtype == dtype and lse.shape == expected_lse.shape
    if axis in "NA":
        assert (out == 0).all() and np.isneginf(lse).all()


def test_no_heads(kernel):
    arrays, weights = draw(H=0, G=0)
    assert sdpa.additive_attention(*arrays, *weights).shape == (2, 0, 37, 12)
    arrays, weights = draw(H=0, G=0, of_query=True, of_key=True)
    assert sdpa.additive_attention(*arrays, *weights).shape == (2, 0, 37, 12)


# ---- Bits, layouts, results.


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("name", ["nothing", "causal", "mask", "lengths", "alibi"])
def test_threads_change_no_bit(kernel, name, dtype):
    for sizes in dict(B=1, H=1, G=1, M=200, N=300), dict(M=70, N=513), dict(M=1, N=1000, A=40):
        arrays, weights = draw(**sizes, dtype=dtype, of_query=True)
        options = {} if sizes.get("B") == 1 else options_for(*arrays[:2], name)
        expected = both(arrays, weights, threads=1, **options)
        for threads in 2, 3, 5:
            for actual, one in zip(both(arrays, weights, threads=threads, **options), expected):
                assert_same_bits(actual, one)


def test_other_rows_batches_and_heads_change_no_bit(kernel):
    (query, key, value), weights = draw(M=150, of_query=True)
    expected = sdpa.additive_attention(query, key, value, *weights)
    for rows in np.s_[:1], np.s_[40:57], np.s_[149:]:
        alone = sdpa.additive_attention(query[:, :, rows], key, value, *weights)
        assert_same_bits(alone, expected[:, :, rows])
    of_head = [weights[0][3], weights[1], weights[2][3]]
    assert_same_bits(sdpa.additive_attention(query[1, 3], key[1, 1], value[1, 1], *of_head), expected[1, 3])


@pytest.mark.parametrize("layout", LAYOUTS)
@on_kernels({"float32": float32}, HALF, half="best")
def test_layouts_change_no_bit(kernel, layout, dtype):
    arrays, weights = draw(dtype=dtype, of_query=True, of_key=True)
    views = [LAYOUTS[layout](x) for x in arrays]
    weight_views = [LAYOUTS[layout](x) for x in weights]
    plain = [[np.ascontiguousarray(x) for x in given] for given in (views, weight_views)]
    for actual, expected in zip(both(views, weight_views, causal=True), both(*plain, causal=True)):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("one ") and name != "read-only"])
@on_kernels({"float32": float32}, HALF, half="best")
def test_out_is_filled_and_returned(kernel, layout, dtype):
    arrays, weights = draw(dtype=dtype)
    expected = sdpa.additive_attention(*arrays, *weights)
    out = LAYOUTS[layout](np.full(expected.shape, nan, dtype))
    assert sdpa.additive_attention(*arrays, *weights, out=out) is out
    assert_same_bits(out, expected)
    result, lse = both(arrays, weights, out=out)
    assert result is out and lse.shape == expected.shape[:-1] and lse.dtype == float32


def test_inputs_are_never_written(kernel):
    arrays, weights = draw()
    for array in arrays + weights:
        array.flags.writeable = False
    before = [array.copy() for array in arrays + weights]
    sdpa.additive_attention(*arrays, *weights)
    for array, copy in zip(arrays + weights, before):
        assert_same_bits(array, copy)


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64])
@pytest.mark.parametrize("of_weights", [float16, bfloat16, float32, float64])
def test_weights_may_have_another_dtype(dtype, of_weights):
    """They are rounded to that of the arithmetic."""
    arrays, weights = draw(dtype=dtype)
    weights = [weight.astype(of_weights) for weight in weights]
    out = sdpa.additive_attention(*arrays, *weights)
    rounded = [weight.astype(arithmetic(dtype)) for weight in weights]
    assert_same_bits(out, sdpa.additive_attention(*arrays, *rounded))


def test_lists_are_arrays():
    x, w = [[1.0, 2.0], [3.0, 4.0]], [[0.5, -0.5]]
    expected = reference.additive_attention(x, x, x, w, w, [1.5])
    np.testing.assert_allclose(sdpa.additive_attention(x, x, x, w, w, [1.5]), expected, rtol=1e-13)


# ---- Errors.


def ones(*shape, dtype=float32):
    return np.ones(shape, dtype)


WRONG = {
    "w_query of integers": (TypeError, dict(w_query=ones(7, 9, dtype=np.int64)), ["w_query", "int64", "float32"]),
    "w_key of integers": (TypeError, dict(w_key=ones(7, 6, dtype=np.int64)), ["w_key", "int64", "float32"]),
    "v of booleans": (TypeError, dict(v=ones(7, dtype=bool)), ["v", "bool", "float32"]),
    "masked v": (TypeError, dict(v=np.ma.ones(7)), ["v", "masked array"]),
    "masked w_key": (TypeError, dict(w_key=np.ma.ones((7, 6))), ["w_key", "masked array"]),
    "w_query of another size": (ValueError, dict(w_query=ones(7, 6)), ["w_query", "(7, 6)", "(7, 9)", "(A, D)"]),
    "w_query of other features": (ValueError, dict(w_query=ones(8, 9)), ["w_query", "(8, 9)", "(7, 9)"]),
    "w_query of key heads": (ValueError, dict(w_query=ones(2, 7, 9)), ["w_query", "(2, 7, 9)", "(4, 7, 9)", "H, A, D"]),
    "w_query of one axis": (ValueError, dict(w_query=ones(9)), ["w_query", "(9,)", "(7, 9)"]),
    "w_key of another size": (ValueError, dict(w_key=ones(7, 9)), ["w_key", "(7, 9)", "(7, 6)", "(A, K)"]),
    "w_key of query heads": (ValueError, dict(w_key=ones(4, 7, 6)), ["w_key", "(4, 7, 6)", "(2, 7, 6)", "(G, A, K)"]),
    "v of no axis": (ValueError, dict(v=np.float32(1)), ["v", "()", "(A)"]),
    "v of key heads": (ValueError, dict(v=ones(2, 7)), ["v", "(2, 7)", "(4, any)", "(H, A)"]),
    "v NaN": (ValueError, dict(v=ones(7) * nan), ["v", "nan", "finite"]),
    "v inf": (ValueError, dict(v=ones(7) * inf), ["v", "inf", "finite"]),
    "query of one axis": (ValueError, dict(query=ones(9)), ["query", "(9,)", "two axes"]),
    "key wider than query": (TypeError, dict(key=ones(2, 2, 133, 6, dtype=float64)), ["key", "float64", "wider"]),
    "heads": (ValueError, dict(query=ones(2, 3, 37, 9)), ["3 heads", "2", "multiple"]),
    "keys of value": (ValueError, dict(value=ones(2, 2, 9, 12)), ["key", "value", "(2, 2, 9, 12)"]),
    "mask of floats": (TypeError, dict(mask=ones(37, 133)), ["mask", "float32", "boolean"]),
    "mask shape": (ValueError, dict(mask=ones(36, 133, dtype=bool)), ["mask", "(36, 133)", "broadcast"]),
    "scale": (ValueError, dict(scale=nan), ["scale", "nan", "finite"]),
    "softcap": (ValueError, dict(softcap=-1), ["softcap", "-1", "above 0"]),
    "threads": (ValueError, dict(threads=0), ["threads", "0", "1 or more"]),
}


@pytest.mark.parametrize("error, changes, parts", WRONG.values(), ids=WRONG)
def test_errors(error, changes, parts):
    """Before any work: nothing is written."""
    arrays, weights = draw()
    given = dict(zip(["query", "key", "value", "w_query", "w_key", "v"], arrays + weights))
    out = np.full((2, given["query"].shape[-3] if given["query"].ndim > 2 else 4, 37, 12), 77, float32)
    with pytest.raises(error, match=".*".join(map(re.escape, parts))):
        sdpa.additive_attention(**given | changes, out=out)
    assert (out == 77).all()


@pytest.mark.parametrize("name", ["query", "key", "value", "w_query", "w_key", "v"])
def test_out_that_overlaps_an_input(name):
    memory = np.ones((4, 8, 8))
    shapes = dict(query=(4, 8, 8), key=(2, 8, 8), value=(2, 8, 8), w_query=(8, 8), w_key=(8, 8), v=(8,))
    given = {n: np.ones(shape) for n, shape in shapes.items()}
    given[name] = memory.reshape(-1)[: given[name].size].reshape(shapes[name])
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        sdpa.additive_attention(**given, out=memory)
    assert (memory == 1).all()


WRONG_OF_ORACLE = {
    "w_query": dict(w_query=np.ones((7, 6))),
    "w_key": dict(w_key=np.ones((4, 7, 6))),
    "v": dict(v=np.ones(6)),
}


@pytest.mark.parametrize("name", WRONG_OF_ORACLE)
def test_errors_of_the_oracle(name):
    arrays, weights = draw()
    given = dict(zip(["query", "key", "value", "w_query", "w_key", "v"], arrays + weights))
    with pytest.raises(ValueError, match=f"{name} "):
        reference.additive_attention(**given | WRONG_OF_ORACLE[name])
