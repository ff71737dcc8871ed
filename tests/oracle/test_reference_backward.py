"""The gradients of the oracle against differences of its results, numbers worked out by hand, and plain loops."""

import inspect
import itertools
import math

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import eps
from support.differences import BROADCASTS, by_differences, moves, slopes, total, upstream
from support.draw import draw, float16, float32, float64, inf, nan, rng
from support.options import OPTIONS, options_for

from sdpa.reference import Gradients, attention, attention_backward, attention_varlen, attention_varlen_backward

pytestmark = pytest.mark.filterwarnings("error")  # NumPy's warnings must not escape, whatever the inputs hold

LOG3, LOG4 = math.log(3), math.log(4)
SMALL = dict(M=3, N=5, D=3, E=2, dtype=float64)  # with B = 2, H = 4, G = 2


def backward(query, key, value, **options):
    out, lse = attention(query, key, value, return_lse=True, **options)
    grad_out, grad_lse = upstream(out, lse)
    return attention_backward(grad_out, query, key, value, out, lse, grad_lse=grad_lse, **options)


# Differences of the sum of grad_out * out + grad_lse * lse, exact up to the fourth derivative.


def assert_near(actual, expected, name=None):
    size = 1 + np.abs(expected).max(initial=0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-10 * size, err_msg=name or "")


def check(query, key, value, **options):
    inputs = dict(query=query, key=key, value=value, **options)
    grads = backward(**inputs)
    for name, grad in grads._asdict().items():
        assert (grad is None) == (inputs.get(name) is None)
        if grad is not None:
            assert grad.shape == np.shape(inputs[name]) and grad.dtype == float64
            assert_near(grad, by_differences(name, inputs), name)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name):
    arrays = draw(**SMALL)
    check(*arrays, **options_for(*arrays[:2], name))


def pairs():
    sample = draw(**SMALL)[:2]
    for first, second in itertools.combinations(OPTIONS, 2):
        if not options_for(*sample, first).keys() & options_for(*sample, second).keys():
            yield first, second


@pytest.mark.parametrize("first, second", list(pairs()))
def test_options_compose(first, second):
    arrays = draw(**SMALL)
    check(*arrays, **options_for(*arrays[:2], first, second))


EVERYTHING = ["mask", "bias that hides", "window", "lengths", "scale", "softcap", "sinks", "alibi", "offset per batch"]


def test_everything_at_once():
    arrays = draw(**SMALL | dict(N=9, M=4))
    options = options_for(*arrays[:2], *EVERYTHING) | dict(q_offset=np.array([5, 2]), sinks=rng(3).random((2, 4)))
    check(*arrays, **options)


@pytest.mark.parametrize(
    "sizes",
    [dict(H=1, G=1), dict(H=3, G=3), dict(H=6, G=2), dict(H=5, G=1), dict(B=1), dict(M=1), dict(N=1), dict(M=1, N=1),
     dict(M=6), dict(D=1, E=4), dict(D=5, E=1)],
    ids=str,
)  # fmt: skip
def test_shapes(sizes):
    sizes = SMALL | sizes
    check(*draw(**sizes), causal=True, sinks=np.linspace(-1, 1, sizes.get("H", 4)))


@pytest.mark.parametrize(
    "shape", [(), (1, 1), (5,), (3, 1), (1, 1, 1, 5), (4, 1, 5), (2, 1, 3, 5), (2, 4, 3, 5)], ids=str
)
@pytest.mark.parametrize("name", ["nothing", "causal", "mask", "softcap", "sinks"])
def test_a_bias_that_is_broadcast(shape, name):
    arrays = draw(**SMALL)
    check(*arrays, bias=rng(1).standard_normal(shape), **options_for(*arrays[:2], name))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (2, 1), (2, 4)], ids=str)
def test_sinks_that_are_broadcast(shape):
    check(*draw(**SMALL), causal=True, sinks=rng(1).standard_normal(shape))


@pytest.mark.parametrize("q, k, v", BROADCASTS.values(), ids=BROADCASTS)
def test_leading_axes_broadcast(q, k, v):
    normal = rng(0).standard_normal
    arrays = normal((*q, 2, 3)), normal((*k, 3, 3)), normal((*v, 3, 2))
    check(*arrays, causal=True, bias=normal((2, 1)), sinks=normal((1, *q)[-1]))


def test_what_flows_in_adds_up():
    arrays = draw(**SMALL)
    options = options_for(*arrays[:2], "causal", "bias", "sinks", "softcap")
    out, lse = attention(*arrays, return_lse=True, **options)
    grad_out, grad_lse = upstream(out, lse)
    by_out = attention_backward(grad_out, *arrays, out, lse, **options)
    by_lse = attention_backward(np.zeros_like(out), *arrays, out, lse, grad_lse=grad_lse, **options)
    for whole, one, other in zip(backward(*arrays, **options), by_out, by_lse):
        np.testing.assert_allclose(one + other, whole, rtol=1e-12, atol=1e-13)
    assert (by_lse.value == 0).all() and (by_lse.bias != 0).any()


# Sequences.

Q_COUNTS, K_COUNTS = (2, 0, 3, 1, 2), (3, 2, 4, 0, 2)
WHERE = dict(cu_seqlens_q=np.cumsum([0, *Q_COUNTS]), cu_seqlens_k=np.cumsum([0, *K_COUNTS]))
T, U, L, S = sum(Q_COUNTS), sum(K_COUNTS), max(K_COUNTS), len(Q_COUNTS)
VARLEN = {
    "nothing": dict(),
    "causal": dict(causal=True),
    "window": dict(window=(1, 1)),
    "bias": dict(bias=rng(1).standard_normal((4, T, L))),
    "bias of keys": dict(bias=rng(1).standard_normal(L)),
    "bias of rows": dict(bias=rng(1).standard_normal((4, T, 1)), causal=True),
    "sinks": dict(sinks=rng(2).standard_normal(4), softcap=2.0),
    "sinks per sequence": dict(sinks=rng(2).standard_normal((S, 4))),
    "everything": dict(
        mask=rng(3).random((T, L)) < 0.8, bias=rng(1).standard_normal((T, L)), window=(2, 1), q_offset=np.arange(S) - 1,
        kv_lengths=[2, 1, 4, 0, 1], scale=0.4, softcap=1.5, sinks=rng(2).standard_normal((S, 1)),
        alibi_slopes=rng(2).random(4),
    ),
}  # fmt: skip


def draw_packed(H=4, G=2, D=3, E=2):
    normal = rng(0).standard_normal
    return [normal((T, H, D)), normal((U, G, D)), normal((U, G, E))]


@pytest.mark.parametrize("options", VARLEN.values(), ids=VARLEN)
def test_sequences(options):
    inputs = dict(zip(["query", "key", "value"], draw_packed(H=2 if options == {} else 4))) | WHERE | options
    out, lse = attention_varlen(**inputs, return_lse=True)
    given = upstream(out, lse)
    grads = attention_varlen_backward(given[0], out=out, lse=lse, grad_lse=given[1], **inputs)
    for name, grad in grads._asdict().items():
        assert (grad is None) == (name not in inputs)
        if grad is not None:
            results = [attention_varlen(**inputs | {name: x}, return_lse=True) for x in moves(inputs[name])]
            totals = [total(out[None], lse[None], *given) for out, lse in results]
            assert_near(grad, slopes(totals, inputs[name]), name)


def test_one_sequence_is_a_call_of_three_axes():
    query, key, value = draw_packed()
    options = dict(causal=True, sinks=np.ones(4), bias=rng(1).standard_normal((4, T, U)))
    alone = backward(*(x.swapaxes(0, 1) for x in (query, key, value)), **options)
    where = dict(cu_seqlens_q=[0, T], cu_seqlens_k=[0, U])
    out, lse = attention_varlen(query, key, value, return_lse=True, **where, **options)
    grad_out, grad_lse = (x.swapaxes(0, 1) for x in upstream(out.swapaxes(0, 1), lse.T))
    packed = attention_varlen_backward(grad_out, query, key, value, out, lse, grad_lse=grad_lse, **where, **options)
    for actual, expected in zip(packed, [*(x.swapaxes(0, 1) for x in alone[:3]), *alone[3:]]):
        np.testing.assert_array_equal(actual, expected)


def test_no_sequences():
    query, key, value = (x[:0] for x in draw_packed())
    out, lse = np.zeros((0, 4, 2)), np.zeros((0, 4))
    more = dict(cu_seqlens_q=[0], bias=np.ones((1, 1)), sinks=np.ones(4))
    grads = attention_varlen_backward(out, query, key, value, out, lse, **more)
    assert [x.shape for x in grads] == [query.shape, key.shape, value.shape, (1, 1), (4,)]
    assert (grads.bias == 0).all() and (grads.sinks == 0).all()


# Numbers worked out by hand: one query 1, keys 0 and log 3 (weights 1/4 and 3/4), values 8 and 4, grad_out 1.
# Then dP is 8 and 4, and delta, the output, 5.

BY_HAND = {  # options, grad_lse, gradients of the scores, of query . key by the scores, of values, of a sink
    "plain": ({}, 0, [3 / 4, -3 / 4], 1, [1 / 4, 3 / 4], None),
    "grad_lse": ({}, 2, [5 / 4, 3 / 4], 1, [1 / 4, 3 / 4], None),
    "scale": (dict(scale=2, bias=[0, -LOG3]), 0, [3 / 4, -3 / 4], 2, [1 / 4, 3 / 4], None),
    "sink": (dict(sinks=[LOG4]), 0, [11 / 16, 9 / 16], 1, [1 / 8, 3 / 8], -5 / 4),  # the output is 5/2
    "sink and grad_lse": (dict(sinks=[LOG4]), 2, [15 / 16, 21 / 16], 1, [1 / 8, 3 / 8], -1 / 4),
    "softcap": (dict(softcap=2, bias=[0, LOG3 - 1]), 0, [3 / 4, -3 / 4], [1, 3 / 4], [1 / 4, 3 / 4], None),
    "mask": (dict(mask=[True, False]), 1, [1, 0], 1, [1, 0], None),
    "bias -inf": (dict(bias=[-inf, 0]), 1, [0, 1], 1, [0, 1], None),
}  # fmt: skip


@pytest.mark.parametrize("options, grad_lse, score, steepness, value, sink", BY_HAND.values(), ids=BY_HAND)
def test_by_hand(options, grad_lse, score, steepness, value, sink):
    query, key, values = np.array([[1.0]]), np.array([[0.0], [LOG3]]), np.array([[8.0], [4.0]])
    out, lse = attention(query, key, values, return_lse=True, **options)
    grads = attention_backward(
        np.ones((1, 1)), query, key, values, out, lse, grad_lse=np.full(1, float(grad_lse)), **options
    )

    def close(expected):
        return pytest.approx(expected, rel=1e-12, abs=1e-12)

    assert grads.key.ravel() == close(np.multiply(score, steepness))
    assert grads.query.item() == close(np.multiply(score, steepness)[1] * LOG3)
    assert grads.value.ravel() == close(value)
    assert grads.bias is None if "bias" not in options else grads.bias == close(score)
    assert grads.sinks is None if sink is None else grads.sinks == close([sink])


# The loops.


def by_loops(
    query, key, value, grad_out, grad_lse, *, bias, sinks, causal, window, q_offset, kv_lengths, scale, softcap
):
    """The chain rule read aloud, one number at a time, through all derivatives of weights by scores, of four axes."""
    (B, H, M, D), G, E = query.shape, key.shape[1], value.shape[-1]
    grads = [np.zeros_like(x) for x in (query, key, value, bias, sinks)]
    d_query, d_key, d_value, d_bias, d_sinks = grads
    for b, h, i in itertools.product(range(B), range(H), range(M)):
        g, position = h // (H // G), i + q_offset
        seen = [
            j
            for j in range(kv_lengths[b])
            if position - window[0] <= j <= position + (min(window[1], 0) if causal else window[1])
            and bias[b, h, i, j] != -inf
        ]
        products = [sum(query[b, h, i, d] * key[b, g, j, d] for d in range(D)) for j in seen]
        capped = [softcap * math.tanh(scale * x / softcap) for x in products]
        logits = [*(x + bias[b, h, i, j] for x, j in zip(capped, seen)), sinks[h]]  # the sink is the last
        sum_of_exp = sum(map(math.exp, logits))
        weights = [math.exp(x) / sum_of_exp for x in logits]
        by_weight = [sum(grad_out[b, h, i, e] * value[b, g, j, e] for e in range(E)) for j in seen] + [0]
        by_logit = [
            sum(by_weight[k] * weights[k] * ((k == j) - weights[j]) for k in range(len(logits)))
            + grad_lse[b, h, i] * weights[j]
            for j in range(len(logits))
        ]
        d_sinks[h] += by_logit[-1]
        for n, j in enumerate(seen):
            d_bias[b, h, i, j] += by_logit[n]
            by_product = by_logit[n] * (1 - (capped[n] / softcap) ** 2) * scale
            for d in range(D):
                d_query[b, h, i, d] += by_product * key[b, g, j, d]
                d_key[b, g, j, d] += by_product * query[b, h, i, d]
            for e in range(E):
                d_value[b, g, j, e] += weights[n] * grad_out[b, h, i, e]
    return grads


@pytest.mark.parametrize("causal", [False, True], ids=["window", "causal"])
def test_as_by_loops(causal):
    arrays = draw(**SMALL | dict(N=9, M=6, H=6))
    options = dict(
        bias=np.where(rng(1).random((2, 6, 6, 9)) < 0.3, -inf, rng(2).standard_normal((2, 6, 6, 9))),
        sinks=np.arange(6.0), causal=causal, window=(3, 1), q_offset=-1, kv_lengths=[3, 9], scale=0.7, softcap=1.2,
    )  # fmt: skip
    out, lse = attention(*arrays, return_lse=True, **options)
    expected = by_loops(*arrays, *upstream(out, lse), **options)
    for actual, loops in zip(backward(*arrays, **options), expected):
        np.testing.assert_allclose(actual, loops, rtol=1e-11, atol=1e-12)


# Rows that see nothing, and what hidden pairs hold.

BLIND = {
    "mask": dict(mask=False),
    "bias": dict(bias=np.full((3, 5), -inf)),
    "lengths": dict(kv_lengths=np.array([0, 0])),
    "causal": dict(causal=True, q_offset=-3),
    "empty window": dict(window=(0, -1)),
    "mask and length": dict(mask=np.arange(5) >= 2, kv_lengths=np.array([2, 2])),
}


@pytest.mark.parametrize("more", ["nothing", "sinks", "softcap", "alibi"])
@pytest.mark.parametrize("options", BLIND.values(), ids=BLIND)
def test_rows_that_see_no_key(options, more):
    arrays = draw(**SMALL)
    for x in arrays:
        x[0, 0] = nan
    options = options | options_for(*arrays[:2], more)
    out, lse = attention(*arrays, return_lse=True, **options)
    garbage = np.full(out.shape, nan)
    for grad_out, result in (garbage, out), (garbage, garbage), (np.full(out.shape, inf), out):
        grads = attention_backward(grad_out, *arrays, result, lse, grad_lse=np.ones(lse.shape), **options)
        assert all((x == 0).all() for x in grads[:4] if x is not None)
        assert grads.sinks is None or (grads.sinks == lse.shape[0] * lse.shape[2]).all()


def test_some_rows_see_no_key():
    """Of 4 queries the first two stand before both keys."""
    arrays = draw(**SMALL | dict(M=4, N=2))
    bias, sinks = rng(1).standard_normal((4, 2)), np.ones(4)
    options = dict(causal=True, bias=bias, sinks=sinks)
    clean = backward(*arrays, **options)
    out, lse = attention(*arrays, return_lse=True, **options)
    grad_out, grad_lse = upstream(out, lse)
    for x in (grad_out, out, arrays[0]):
        x[:, :, :2] = nan
    grads = attention_backward(grad_out, *arrays, out, lse, grad_lse=grad_lse, **options)
    for actual, expected in zip(grads, clean):
        np.testing.assert_array_equal(actual, expected)
    assert (grads.query[:, :, :2] == 0).all() and (grads.bias[:2] == 0).all() and (grads.query[:, :, 2:] != 0).all()


HIDDEN = {  # who does not see whom, of 3 queries and 5 keys
    "mask": lambda hidden: dict(mask=~hidden, bias=np.where(hidden, nan, 0.5)),
    "bias": lambda hidden: dict(bias=np.where(hidden, -inf, 0.5)),
}


@pytest.mark.parametrize("garbage", [nan, inf, -inf, 1e308])
@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("more", ["nothing", "softcap", "sinks"])
def test_a_key_hidden_from_all_may_hold_anything(garbage, hide, more):
    arrays = draw(**SMALL)
    options = hide(np.broadcast_to([False, True, False, False, True], (3, 5))) | options_for(*arrays[:2], more)
    clean = backward(*arrays, **options)
    for x in arrays[1:]:
        x[..., [1, 4], :] = garbage
    for name, actual, expected in zip(Gradients._fields, backward(*arrays, **options), clean):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        assert actual is None or np.isfinite(actual).all()
    assert (clean.key[..., [1, 4], :] == 0).all() and (clean.value[..., [1, 4], :] == 0).all()


@pytest.mark.parametrize("poisoned", ["query", "key", "value", "grad_out", "out", "grad_lse"])
def test_a_visible_nan_reaches_those_that_see_it_and_no_other(poisoned):
    """Four causal rows; row 2 of the named array holds a NaN in its feature 1.  Through a key or a value it reaches
    the rows 2 and 3, and from there what these see; through the others row 2, and the keys up to there."""
    query, key, value = (x[0, 0] for x in draw(**SMALL | dict(M=4, N=4)))
    clean = backward(query, key, value, causal=True, bias=np.zeros((4, 4)))
    out, lse = attention(query, key, value, causal=True, return_lse=True)
    grad_out, grad_lse = upstream(out, lse)
    given = dict(query=query, key=key, value=value, grad_out=grad_out, out=out, grad_lse=grad_lse)
    given[poisoned][(2, 1)[: given[poisoned].ndim]] = nan
    if poisoned in ("query", "key", "value"):
        given["out"], lse = attention(query, key, value, causal=True, return_lse=True)
    grads = attention_backward(lse=lse, causal=True, bias=np.zeros((4, 4)), **given)
    rows = [2, 3] if poisoned in ("key", "value") else [2]
    keys = np.arange(rows[-1] + 1)
    assert np.isnan(grads.query[rows]).all() and np.isnan(grads.key[keys]).all()
    assert all(np.isnan(grads.bias[i, : i + 1]).all() for i in rows)
    np.testing.assert_allclose(np.delete(grads.query, rows, 0), np.delete(clean.query, rows, 0), rtol=1e-13)
    np.testing.assert_allclose(np.delete(grads.key, keys, 0), np.delete(clean.key, keys, 0), rtol=1e-13)
    np.testing.assert_allclose(np.delete(grads.bias, rows, 0), np.delete(clean.bias, rows, 0), rtol=1e-13)
    struck = {"query": [0, 1], "key": [0, 1], "grad_out": [1]}.get(poisoned, [])  # of the features of dV
    assert np.isnan(grads.value[keys][:, struck]).all()
    assert np.isfinite(np.delete(grads.value[keys], struck, 1)).all() and np.isfinite(grads.value[len(keys) :]).all()


def test_a_visible_nan_that_weighs_nothing_is_not_lost():
    """Weight 0 by underflow; 0 * NaN is NaN."""
    query, key, value = np.ones((1, 1)), np.array([[0.0], [-1e4]]), np.array([[1.0], [nan]])
    grads = attention_backward(np.ones((1, 1)), query, key, value, np.ones((1, 1)), np.zeros(1))
    assert np.isnan(grads.key).tolist() == [[False], [True]] and np.isnan(grads.query).all()
    assert grads.value.tolist() == [[1], [0]]


def test_a_score_of_minus_inf_is_not_seen():
    query, key, value = np.ones((1, 1)), np.array([[0.0], [-inf]]), np.array([[1.0], [3.0]])
    out, lse = attention(query, key, value, return_lse=True)
    grads = attention_backward(np.ones((1, 1)), query, key, value, out, lse, grad_lse=np.ones(1), bias=np.zeros(2))
    assert [x.ravel().tolist() for x in grads[:4]] == [[0], [1, 0], [1, 0], [1, 0]]


@pytest.mark.parametrize("empty", ["B", "H", "HG", "M", "N", "D", "E", "DE", "BN", "MD", "BHGMNDE"])
def test_empty_axes(empty):
    sizes = dict(B=2, H=4, G=2, M=3, N=5, D=3, E=2) | dict.fromkeys(empty, 0)
    arrays = draw(**sizes, dtype=float64)
    bias, sinks = np.zeros((sizes["M"], 1)), np.zeros(sizes["H"])
    for causal in False, True:
        grads = backward(*arrays, causal=causal, bias=bias, sinks=sinks)
        for grad, x in zip(grads, (*arrays, bias, sinks)):
            assert grad.shape == x.shape and np.isfinite(grad).all()
            assert (grad == 0).all() or not set(empty) & set("MND") or x is sinks


# dtypes, and calls that mean nothing.


@pytest.mark.parametrize("dtype", [bfloat16, float16, float32, float64, np.longdouble], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_dtype_is_that_of_all_results(dtype, packed):
    """Whatever the dtypes of inputs are."""
    arrays = draw_packed() if packed else draw(**SMALL)
    options = dict(bias=np.ones((1, 1), float32), sinks=np.ones(4), softcap=2.0, causal=True) | (
        WHERE if packed else {}
    )
    forward = attention_varlen if packed else attention
    run = attention_varlen_backward if packed else attention_backward
    out, lse = forward(*arrays, return_lse=True, **options)
    grad_out, grad_lse = upstream(out, lse)
    exact = run(grad_out, *arrays, out, lse, grad_lse=grad_lse, **options)
    tolerance = 40 * max(eps(dtype), eps(float64))
    for actual, expected in zip(run(grad_out, *arrays, out, lse, grad_lse=grad_lse, dtype=dtype, **options), exact):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual.astype(float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [float16, float32, bfloat16])
def test_float64_by_default_whatever_the_inputs(dtype):
    narrow = draw(**SMALL | dict(dtype=dtype))
    for actual, expected in zip(backward(*narrow), backward(*(x.astype(float64) for x in narrow))):
        assert actual is None or actual.dtype == float64
        np.testing.assert_array_equal(actual, expected)


WRONG = {  # of a result (2, 4, 3, 2)
    "grad_out": (dict(grad_out=np.ones((2, 4, 3, 1))), ValueError, r"grad_out.*\(2, 4, 3, 1\).*\(2, 4, 3, 2\)"),
    "grad_out of three axes": (dict(grad_out=np.ones((4, 3, 2))), ValueError, r"grad_out.*\(4, 3, 2\)"),
    "out": (dict(out=np.ones((2, 4, 3, 3))), ValueError, r"out.*\(2, 4, 3, 3\).*\(2, 4, 3, 2\)"),
    "lse": (dict(lse=np.ones((2, 4, 3, 1))), ValueError, r"lse.*\(2, 4, 3, 1\).*\(2, 4, 3\)"),
    "grad_lse": (dict(grad_lse=np.ones((2, 4))), ValueError, r"grad_lse.*\(2, 4\).*\(2, 4, 3\)"),
    "integers": (dict(grad_out=np.ones((2, 4, 3, 2), int)), TypeError, "grad_out.*int64"),
    "mask": (dict(mask=np.ones((3, 5))), TypeError, "mask.*float64"),
}


@pytest.mark.parametrize("wrong, error, message", WRONG.values(), ids=WRONG)
def test_errors(wrong, error, message):
    query, key, value = draw(**SMALL)
    out, lse = attention(query, key, value, return_lse=True)
    given = dict(grad_out=out, query=query, key=key, value=value, out=out, lse=lse)
    with pytest.raises(error, match=message):
        attention_backward(**given | wrong)


def test_names_are_those_of_the_contract():
    options = "mask bias causal window q_offset kv_lengths scale softcap sinks alibi_slopes threads dtype".split()
    arrays = "grad_out query key value out lse".split()
    starts = ["cu_seqlens_q", "cu_seqlens_k"]
    assert list(inspect.signature(attention_backward).parameters) == [*arrays, "grad_lse", *options]
    assert list(inspect.signature(attention_varlen_backward).parameters) == [*arrays, *starts, "grad_lse", *options]
    assert Gradients._fields == ("query", "key", "value", "bias", "sinks")
