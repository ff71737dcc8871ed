"""The pieces of layers, of any sizes: projections, feed-forward blocks, norms, and the rotary embedding."""

import numpy as np
import test_linear
import test_norms
import test_rotary
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import finfo
from support.accuracy import assert_same_bits, eps
from support.draw import float64, rng
from support.problems import ANY_DTYPE, LAYOUT, PROPERTY, examples

import sdpa
from sdpa import reference

ROWS = st.integers(0, 20) | st.sampled_from([31, 32, 33, 64, 119, 120, 121, 200, 300])
WIDTHS = st.integers(0, 70) | st.sampled_from([96, 127, 128, 129, 130, 256, 300, 520])
THREADS = st.none() | st.integers(1, 5)
ACTIVATION = st.sampled_from(test_linear.ACTIVATIONS)


@settings(PROPERTY, max_examples=examples(400))
@given(st.data(), ROWS, WIDTHS, WIDTHS, ANY_DTYPE, ACTIVATION, THREADS)
def linear(data, rows, ins, outs, dtype, activation, threads):
    x, weight, bias = test_linear.draw(rows, ins, outs, dtype, data.draw(st.integers(0, 99)))
    x, weight = data.draw(LAYOUT)(x), data.draw(LAYOUT)(weight)
    residual = (
        data.draw(LAYOUT)(rng(3).standard_normal((rows, outs)).astype(dtype)) if data.draw(st.booleans()) else None
    )
    layer = sdpa.Linear(weight, bias, activation=activation)
    y = layer(x, residual=residual, threads=threads)
    exact = reference.Linear(weight, bias, activation=activation)(x, residual=residual)
    size = test_linear.exact_size(x, weight, bias) + (0 if residual is None else np.abs(residual.astype(float64)))
    # Half a rounding for each of 128 terms in a part: those of a repeated column are all in the same direction.
    test_linear.assert_close(y, exact, size, dtype, terms=80)
    if rows:
        at = data.draw(st.integers(0, rows - 1))
        alone = layer(x[at : at + 1], residual=None if residual is None else residual[at : at + 1], threads=1)
        assert_same_bits(alone[0], y[at])
    np.testing.assert_array_equal(layer.weight, weight)


@settings(PROPERTY, max_examples=examples(200))
@given(st.data(), ROWS, *[WIDTHS] * 3, ANY_DTYPE, ACTIVATION, st.booleans(), THREADS)
def feed_forward(data, rows, ins, hidden, outs, dtype, activation, gated, threads):
    number = data.draw(st.integers(0, 99))
    x, up, up_bias = test_linear.draw(rows, ins, hidden, dtype, number)
    _, gate, gate_bias = test_linear.draw(0, ins, hidden, dtype, number + 1)
    _, down, down_bias = test_linear.draw(0, hidden, outs, dtype, number + 2)
    residual = rng(3).standard_normal((rows, outs)).astype(dtype) if data.draw(st.booleans()) else None
    size = np.sqrt(max(ins, 1)), np.sqrt(max(hidden, 1))
    up, gate, down = ((w / s).astype(dtype) for w, s in zip((up, gate, down), (size[0], size[0], size[1])))
    options = dict(up_bias=up_bias, down_bias=down_bias, activation=activation)
    options |= dict(gate_weight=gate, gate_bias=gate_bias) if gated else {}
    x = data.draw(LAYOUT)(x)
    y = sdpa.FeedForward(up, down, **options)(x, residual=residual, threads=threads)
    test_linear.judge_feed_forward(y, x, up, down, residual, options)


@settings(PROPERTY, max_examples=examples(400))
@given(
    st.data(), st.sampled_from(list(test_norms.NORMS)), ROWS,
    st.integers(2, 70) | st.sampled_from([127, 128, 300, 1100]),
    ANY_DTYPE, st.booleans(), THREADS,
)  # fmt: skip
def norms(data, name, rows, size, dtype, with_residual, threads):
    arrays = test_norms.draw((rows, size), dtype, data.draw(st.integers(0, 99)))
    x, weight, bias, residual = (data.draw(LAYOUT)(array) for array in arrays)
    more = dict(residual=residual) if with_residual else {}
    norm, oracle = test_norms.NORMS[name]
    found = test_norms.call(norm, x, weight, bias, threads=threads, **more)
    expected = test_norms.call(oracle, x, weight, bias, **more)
    normal = test_norms.call(oracle, x, **more)
    if with_residual:
        (found, total), (expected, exact_total), normal = found, expected, normal[0]
        np.testing.assert_array_equal(total, exact_total.astype(dtype))
    # A row of numbers that are nearly the same has a variance that is nearly nothing: its roundings are magnified.
    y = x.astype(float64) + (residual.astype(float64) if with_residual else 0)
    spread = y.std(axis=-1, keepdims=True) if name == "layer_norm" else np.ones((rows, 1))
    far = (spread > 0.1).all(axis=-1)
    summed = np.abs(normal * weight) + (
        np.abs(bias) if name == "layer_norm" else 0
    )  # the bias may cancel what it meets
    test_norms.assert_as_exact(found[far], expected[far], dtype, roundings=64, summed=summed[far])


@settings(PROPERTY, max_examples=examples(400))
@given(st.data(), st.integers(2, 4), st.integers(0, 40), st.integers(1, 40), ANY_DTYPE, st.booleans(), THREADS)
def rotary(data, rank, rows, pairs, dtype, interleaved, threads):
    lead = [data.draw(st.integers(0, 3)) for _ in range(rank - 2)]
    more = data.draw(st.integers(0, 5))
    x = data.draw(LAYOUT)(
        rng(data.draw(st.integers(0, 99))).standard_normal((*lead, rows, 2 * pairs + more)).astype(dtype)
    )
    options = dict(interleaved=interleaved, dim=2 * pairs)
    at = data.draw(st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6) | st.none())
    if at is None:
        at = rng(2).integers(-1000, 1000, data.draw(st.sampled_from([(rows,), (*lead, rows)])))
        if at.ndim == 2 and rank == 4:
            at = at[0] if len(at) else at
    turns = data.draw(st.sampled_from(["base", "frequencies", "tables"]))
    if turns == "base":
        options |= dict(base=data.draw(st.sampled_from([2.0, 10.0, 500.0, 10000.0, 1e6])))
    elif turns == "frequencies":
        options |= dict(frequencies=rng(4).standard_normal(pairs))
    else:  # of any numbers, from which positions take rows
        length = data.draw(st.integers(1, 50))
        options |= dict(zip(("cos", "sin"), rng(4).standard_normal((2, length, pairs)).astype(dtype)))
        at = np.asarray(rng(2).integers(0, length, (rows,)))
    expected = sdpa.rotary(x, at, threads=1, **options)
    if turns == "tables":
        judge_tables(expected, np.ascontiguousarray(x), at, **options)
    elif np.abs(np.asarray(at, float64)).max(initial=0) < 2**20:
        test_rotary.judge(expected, np.ascontiguousarray(x), at, **options)
    assert_same_bits(sdpa.rotary(x, at, threads=threads, **options), expected)
    own = x.copy()
    assert sdpa.rotary(own, at, threads=threads, out=own, **options) is own
    assert_same_bits(own, expected)


def judge_tables(found, x, at, *, cos, sin, **options):
    """Two products and a sum, rounded in the arithmetic, and then to the dtype."""
    exact, size = (
        reference.rotary(of(x).astype(float64), at, cos=of(cos).astype(float64), sin=by * of(sin), **options)
        for of, by in ((np.asarray, 1.0), (np.abs, -1.0))
    )
    turned = reference.rotary(np.abs(x).astype(float64), at, cos=np.abs(cos), sin=np.abs(sin), **options)
    most = 4 * eps(x.dtype) * np.maximum(np.abs(size), np.abs(turned)) + float(finfo(x.dtype).tiny)
    assert (np.abs(found.astype(float64) - exact) <= most).all()


PROPERTIES = {"linear": linear, "feed-forward": feed_forward, "norms": norms, "rotary": rotary}
