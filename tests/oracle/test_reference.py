"""The oracle against numbers worked out by hand and against loops over single numbers in plain Python."""

import inspect
import itertools
import math
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from support.accuracy import blind_lse
from support.problems import examples

from sdpa import reference
from sdpa.reference import attention, attention_weights, merge, scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("error")  # NumPy's warnings must not escape, whatever the inputs hold

inf, nan = math.inf, math.nan
LOG2, LOG3 = math.log(2), math.log(3)


def by_loops(
    query, key, value, *, mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None,
):  # fmt: skip
    """The contract read aloud, one number at a time, for four axes: (out, lse, weights)."""
    (B, H, M, D), (_, G, N, _), E = query.shape, key.shape, value.shape[-1]
    out, lse, weights = np.zeros((B, H, M, E)), np.full((B, H, M), -inf), np.zeros((B, H, M, N))
    mask = None if mask is None else np.broadcast_to(mask, weights.shape)
    bias = None if bias is None else np.broadcast_to(bias, weights.shape)
    left, right = window or (None, None)
    for b, h, i in itertools.product(range(B), range(H), range(M)):
        g = h // (H // G)
        length = N if kv_lengths is None else int(np.broadcast_to(kv_lengths, B)[b])
        offset = length - M if q_offset is None else int(np.broadcast_to(q_offset, B)[b])
        position = i + offset
        logits = {}
        for j in range(length if D else 0):
            hidden = (
                (mask is not None and not mask[b, h, i, j])
                or (bias is not None and bias[b, h, i, j] == -inf)
                or (causal and j > position)
                or (left is not None and j < position - left)
                or (right is not None and j > position + right)
            )
            if hidden:
                continue
            s = sum(float(query[b, h, i, d]) * float(key[b % len(key), g, j, d]) for d in range(D))
            s *= 1 / math.sqrt(D) if scale is None else scale
            if softcap is not None:
                s = softcap * math.tanh(s / softcap)
            if bias is not None:
                s += float(bias[b, h, i, j])
            if alibi_slopes is not None:
                s -= float(np.broadcast_to(alibi_slopes, (B, H))[b, h]) * abs(position - j)
            logits[j] = s
        if not logits:
            lse[b, h, i] = -inf if sinks is None else sinks[h]
            continue
        terms = list(logits.values()) + ([] if sinks is None else [float(sinks[h])])
        high = max(terms)
        total = sum(math.exp(t - high) for t in terms)
        lse[b, h, i] = high + math.log(total)
        for j, s in logits.items():
            weights[b, h, i, j] = math.exp(s - high) / total
            for e in range(E):
                out[b, h, i, e] += weights[b, h, i, j] * float(value[b % len(value), g, j, e])
    return out, lse, weights


def assert_as_by_loops(query, key, value, **options):
    out, lse, weights = by_loops(query, key, value, **options)
    actual_out, actual_lse = attention(query, key, value, return_lse=True, **options)
    np.testing.assert_allclose(actual_out, out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(actual_lse, lse, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(attention_weights(query, key, **options), weights, rtol=1e-12, atol=1e-13)


def close(expected):
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def draw(B=2, H=4, G=2, M=3, N=5, D=3, E=2, seed=0):
    normal = np.random.default_rng(seed).standard_normal
    return normal((B, H, M, D)) * 2, normal((B, G, N, D)), normal((B, G, N, E))


def one_row(scores, values=None, **options):
    """Attention of one query of size 1 whose scores are given: (out, lse, weights) as plain numbers."""
    query, key = np.ones((1, 1)), np.array(scores, float)[:, None]
    value = np.zeros_like(key) if values is None else np.array(values, float)[:, None]
    out, lse = attention(query, key, value, return_lse=True, **options)
    return out.item(), lse.item(), attention_weights(query, key, **options)[0].tolist()


# Numbers worked out by hand.


BY_HAND = {  # scores of one row, options, weights, lse
    "7 and 3": ([7, 3], {}, [0.9820137900379085, 0.0179862099620916], 7.018149927917809),
    "4 and 5": ([4, 5], {}, [0.2689414213699951, 0.7310585786300049], 5.313261687518223),
    "one key": ([2.5], {}, [1], 2.5),
    "log 3": ([LOG3, 0], {}, [3 / 4, 1 / 4], math.log(4)),
    "scale": ([LOG3, 0], dict(scale=2), [9 / 10, 1 / 10], math.log(10)),
    "scale 0": ([LOG3, 0], dict(scale=0), [1 / 2, 1 / 2], LOG2),
    "scale below 0": ([LOG3, 0], dict(scale=-1), [1 / 4, 3 / 4], math.log(4 / 3)),
    "bias": ([0, 0], dict(bias=[LOG3, 0]), [3 / 4, 1 / 4], math.log(4)),
    "bias is not scaled": ([0, 0], dict(bias=[LOG3, 0], scale=2), [3 / 4, 1 / 4], math.log(4)),
    "bias -inf": ([0, 0, 9], dict(bias=[0, 0, -inf]), [1 / 2, 1 / 2, 0], LOG2),
    "mask": ([0, 0, 9], dict(mask=[True, True, False]), [1 / 2, 1 / 2, 0], LOG2),
    "sink": ([0, 0], dict(sinks=[LOG2]), [1 / 4, 1 / 4], math.log(4)),
    "sink is not scaled": ([0, 0], dict(sinks=[LOG2], scale=5), [1 / 4, 1 / 4], math.log(4)),
    "sink is not capped": ([0, 0], dict(sinks=[LOG2], softcap=0.1), [1 / 4, 1 / 4], math.log(4)),
    "sink -inf is none": ([0, 0], dict(sinks=[-inf]), [1 / 2, 1 / 2], LOG2),
    "sink far above": ([0, 0], dict(sinks=[1000.0]), [0, 0], 1000),
    "alibi": ([0, 0, 0], dict(alibi_slopes=[LOG2]), [1 / 7, 2 / 7, 4 / 7], math.log(7 / 4)),
    "alibi, both sides": ([0, 0, 0], dict(alibi_slopes=[LOG2], q_offset=1), [1 / 4, 1 / 2, 1 / 4], LOG2),
    "softcap": ([LOG3, 0], dict(softcap=2), [math.e / (math.e + 1), 1 / (math.e + 1)], math.log(math.e + 1)),
    "softcap after scale": ([1e9, 0], dict(scale=1e-9 * LOG3, softcap=2),
                            [math.e / (math.e + 1), 1 / (math.e + 1)], math.log(math.e + 1)),
    "softcap reached": ([9e9, -9e9], dict(softcap=LOG3), [9 / 10, 1 / 10], math.log(10 / 3)),
    "softcap before bias": ([0, 0], dict(softcap=0.01, bias=[LOG3, 0]), [3 / 4, 1 / 4], math.log(4)),
    "softcap before alibi": ([0, 0], dict(softcap=0.1, alibi_slopes=[LOG3]), [1 / 4, 3 / 4], math.log(4 / 3)),
    "no overflow": ([10000, 10000], {}, [1 / 2, 1 / 2], 10000 + LOG2),
    "no underflow": ([-10000, -10000], {}, [1 / 2, 1 / 2], -10000 + LOG2),
    "weight 0": ([0, -10000], {}, [1, 0], 0),
}  # fmt: skip


@pytest.mark.parametrize("scores, options, weights, lse", BY_HAND.values(), ids=BY_HAND)
def test_by_hand(scores, options, weights, lse):
    values = [8, 4, 2][: len(scores)]
    actual_out, actual_lse, actual_weights = one_row(scores, values, **options)
    assert actual_weights == close(weights)
    assert actual_lse == close(lse)
    assert actual_out == close(sum(w * v for w, v in zip(weights, values)))


def test_scale_is_one_over_root_of_key_size():
    query, key = np.array([[2.0, 0, 0, 0]]), np.array([[math.log(9), 5, 5, 5], [0, 5, 5, 5]])
    assert attention_weights(query, key)[0] == close([0.9, 0.1])  # 2 log 9 / sqrt 4 = log 9


def test_neighbouring_query_heads_share_a_key_head():
    value = np.array([10.0, 20.0]).reshape(2, 1, 1)
    out = attention(np.ones((6, 1, 1)), np.ones((2, 1, 1)), value)
    assert out.ravel().tolist() == [10, 10, 10, 20, 20, 20]


DRAWINGS = {
    "nothing hides": (dict(), "1111 1111"),
    "causal, square": (dict(causal=True), "100 110 111"),
    "causal, more keys": (dict(causal=True), "1110 1111"),
    "causal, more queries": (dict(causal=True), "00 00 10 11"),
    "causal, top left": (dict(causal=True, q_offset=0), "1000 1100"),
    "causal, before all keys": (dict(causal=True, q_offset=-1), "000 100 110"),
    "causal, behind all keys": (dict(causal=True, q_offset=9), "111 111"),
    "window (1, 0)": (dict(window=(1, 0)), "1000 1100 0110 0011"),
    "window (0, 1)": (dict(window=(0, 1)), "1100 0110 0011 0001"),
    "window (1, 1)": (dict(window=(1, 1)), "1100 1110 0111 0011"),
    "window (0, 0)": (dict(window=(0, 0)), "0100 0010 0001"),
    "window (1, None)": (dict(window=(1, None)), "1111 1111 0111 0011"),
    "window (None, 1)": (dict(window=(None, 1)), "1100 1110 1111 1111"),
    "window (None, None)": (dict(window=(None, None)), "111 111"),
    "window (2, -1)": (dict(window=(2, -1)), "0000 1000 1100 0110"),
    "window (-1, 2)": (dict(window=(-1, 2)), "0110 0011 0001 0000"),
    "window, more keys": (dict(window=(1, 0)), "01100 00110 00011"),
    "window, offset": (dict(window=(1, 0), q_offset=1), "11000 01100 00110"),
    "window of 64 bits": (dict(window=(sys.maxsize, sys.maxsize), q_offset=-1), "11 11"),
    "offset of 64 bits": (dict(window=(sys.maxsize, 0), q_offset=sys.maxsize), "11 01"),
    "offset of 64 bits, below": (dict(window=(0, sys.maxsize), q_offset=-sys.maxsize), "10 11"),
    "causal cuts the window": (dict(causal=True, window=(1, 1)), "100 110 011"),
    "causal cuts the open window": (dict(causal=True, window=(1, None)), "100 110 011"),
    "causal leaves a window below": (dict(causal=True, window=(2, -1)), "000 100 110"),
    "length": (dict(kv_lengths=3), "1110 1110"),
    "length, causal": (dict(kv_lengths=3, causal=True), "1100 1110"),
    "length, causal, more queries": (dict(kv_lengths=1, causal=True), "000 000 100"),
    "length, causal, offset": (dict(kv_lengths=3, causal=True, q_offset=0), "1000 1100 1110 1110"),
    "length, window": (dict(kv_lengths=4, window=(1, 1)), "011100 001100"),
    "length 0": (dict(kv_lengths=0), "00 00"),
    "full length": (dict(kv_lengths=4, causal=True), "1110 1111"),
}  # fmt: skip


@pytest.mark.parametrize("options, drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_who_sees_whom(options, drawing):
    rows = drawing.split()
    weights = attention_weights(np.zeros((len(rows), 1)), np.zeros((len(rows[0]), 1)), **options)
    assert ["".join("1" if weight else "0" for weight in row) for row in weights] == rows


def test_offsets_and_lengths_per_batch():
    q, k = np.zeros((2, 1, 2, 1)), np.zeros((2, 1, 3, 1))
    seen = attention_weights(q, k, causal=True, q_offset=[0, 1]) > 0
    assert seen.astype(int).tolist() == [[[[1, 0, 0], [1, 1, 0]]], [[[1, 1, 0], [1, 1, 1]]]]
    seen = attention_weights(q, k, causal=True, kv_lengths=[3, 2]) > 0
    assert seen.astype(int).tolist() == [[[[1, 1, 0], [1, 1, 1]]], [[[1, 0, 0], [1, 1, 0]]]]


# The loops. The shapes are those of `draw`: B = 2, H = 4, G = 2, M = 3, N = 5.

_RNG = np.random.default_rng(1)
OPTIONS = {
    "mask": dict(mask=_RNG.random((2, 4, 3, 5)) < 0.6),
    "mask of keys": dict(mask=_RNG.random((2, 1, 1, 5)) < 0.6),
    "bias": dict(bias=_RNG.standard_normal((2, 4, 3, 5))),
    "bias of heads": dict(bias=_RNG.standard_normal((4, 1, 5)).astype(np.float32)),
    "bias that hides": dict(bias=np.where(_RNG.random((3, 5)) < 0.4, -inf, 0.5)),
    "causal": dict(causal=True),
    "window": dict(window=(1, 1)),
    "window of the past": dict(window=(3, -1)),
    "open window": dict(window=(None, 1)),
    "offset": dict(q_offset=1),
    "offset below 0": dict(q_offset=-1),
    "offset per batch": dict(q_offset=np.array([4, -2])),
    "lengths": dict(kv_lengths=np.array([2, 4])),
    "lengths with 0": dict(kv_lengths=np.array([0, 5])),
    "scale": dict(scale=-0.3),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=_RNG.standard_normal(4)),
    "alibi": dict(alibi_slopes=np.array([0.5, 0.25, 0.125, -1])),
    "alibi per batch": dict(alibi_slopes=_RNG.random((2, 4))),
}
PAIRS = [(a, b) for a, b in itertools.combinations(OPTIONS, 2) if not OPTIONS[a].keys() & OPTIONS[b].keys()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option(options):
    assert_as_by_loops(*draw(), **options)


@pytest.mark.parametrize("first, second", PAIRS)
def test_options_compose(first, second):
    assert_as_by_loops(*draw(), **OPTIONS[first], **OPTIONS[second])


@pytest.mark.parametrize(
    "sizes",
    [dict(H=1, G=1), dict(H=3, G=3), dict(H=6, G=2), dict(H=4, G=1), dict(B=1), dict(M=1), dict(N=1),
     dict(M=6), dict(D=1, E=4), dict(D=5, E=1)],
    ids=str,
)  # fmt: skip
def test_shapes(sizes):
    assert_as_by_loops(*draw(**sizes), causal=True)


@st.composite
def problems(draw_one):
    """Arrays of small sizes, empty ones too, and any combination of options."""
    size = {name: draw_one(st.integers(0, most)) for name, most in dict(B=2, M=4, N=5, D=3, E=2).items()}
    size["G"] = draw_one(st.integers(1, 2))
    size["H"] = size["G"] * draw_one(st.integers(1, 3))
    B, H, M, N = (size[name] for name in "BHMN")
    seed = draw_one(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    query, key, value = draw(**size, seed=seed)
    if B and draw_one(st.booleans()):
        key, value = key[:1], value[:1]
    shape = tuple(n if draw_one(st.booleans()) else 1 for n in (B, H, M, N))[draw_one(st.integers(0, 3)) :]
    side = st.none() | st.integers(-2, 5)
    hides = rng.random(shape) < 0.3
    options = draw_one(
        st.fixed_dictionaries(
            {},
            optional=dict(
                mask=st.just(rng.random(shape) < 0.7),
                bias=st.sampled_from([rng.standard_normal(shape), np.where(hides, np.float16(-inf), 1)]),
                causal=st.booleans(),
                window=st.none() | st.tuples(side, side),
                q_offset=st.integers(-6, 6) | st.just(rng.integers(-6, 7, B)),
                kv_lengths=st.integers(0, N) | st.just(rng.integers(0, N + 1, B)),
                scale=st.none() | st.floats(-2, 2),
                softcap=st.none() | st.floats(0.1, 5),
                sinks=st.none() | st.just(rng.standard_normal(H)),
                alibi_slopes=st.none() | st.just(rng.random(H)),
            ),
        )
    )
    return query, key, value, options


@settings(max_examples=examples(300), deadline=None, database=None)
@given(problems())
def test_any_options(problem):
    query, key, value, options = problem
    assert_as_by_loops(query, key, value, **options)


@settings(max_examples=examples(100), deadline=None, database=None)
@given(problems(), st.sampled_from([nan, inf, -inf]))
def test_keys_that_nobody_sees_may_hold_anything(problem, garbage):
    query, key, value, options = problem
    key, value = (np.broadcast_to(x, (len(query), *x.shape[1:])).copy() for x in (key, value))
    clean = attention(query, key, value, return_lse=True, **options)
    weights = attention_weights(query, key, **options)
    B, G, N, _ = key.shape
    unseen = ~weights.any(axis=2).reshape(B, G, weights.shape[1] // G, N).any(axis=2)
    key[unseen] = value[unseen] = garbage
    for actual, expected in zip(attention(query, key, value, return_lse=True, **options), clean):
        np.testing.assert_array_equal(actual, expected)


# Edges.

BLIND = {
    "mask": dict(mask=False),
    "bias": dict(bias=-inf),
    "lengths": dict(kv_lengths=np.array([0, 0])),
    "causal": dict(causal=True, q_offset=-3),
    "window before": dict(window=(None, -6)),
    "window behind": dict(window=(-6, None)),
    "empty window": dict(window=(0, -1)),
    "mask and length": dict(mask=np.arange(5) >= 2, kv_lengths=np.array([2, 2])),
}


@pytest.mark.parametrize("more", [{}, OPTIONS["sinks"], OPTIONS["softcap"], OPTIONS["alibi"]])
@pytest.mark.parametrize("options", BLIND.values(), ids=BLIND)
def test_a_row_that_sees_no_key(options, more):
    query, key, value = draw()
    query[0, 0] = key[0, 0] = value[1, 0] = nan
    out, lse = attention(query, key, value, return_lse=True, **options, **more)
    assert (out == 0).all() and (lse == blind_lse(lse, more)).all()
    assert (attention_weights(query, key, **options, **more) == 0).all()


HIDE_LAST = {  # of 4 keys from 1 query
    "mask": dict(mask=[True, True, True, False]),
    "bias": dict(bias=[0.0, 1.0, 2.0, -inf]),
    "causal": dict(causal=True, q_offset=2),
    "window": dict(window=(3, -1)),
    "length": dict(kv_lengths=3),
    "mask, under a bias of NaN": dict(mask=[True, True, True, False], bias=[0.0, 0.0, 0.0, nan]),
    "length, under a bias of inf": dict(kv_lengths=3, bias=[0.0, 0.0, 0.0, inf]),
}


@pytest.mark.parametrize("garbage", [nan, inf, -inf, 1e308])
@pytest.mark.parametrize("options", HIDE_LAST.values(), ids=HIDE_LAST)
def test_a_hidden_key_may_hold_anything(options, garbage):
    query, key, value = (x[0, 0] for x in draw(M=1, N=4))
    clean = attention(query, key, value, softcap=3.0, return_lse=True, **options)
    key[3] = value[3] = garbage
    for actual, expected in zip(attention(query, key, value, softcap=3.0, return_lse=True, **options), clean):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_other(poisoned):
    query, key, value = (x[0, 0] for x in draw(M=4, N=4))
    clean = attention(query, key, value, causal=True)
    dict(query=query, key=key, value=value)[poisoned][2, 1] = nan
    out = attention(query, key, value, causal=True)
    struck = {"query": [2], "key": [2, 3], "value": [2, 3]}[poisoned]
    assert np.isnan(out[struck][:, 1]).all()
    assert np.isnan(out[struck][:, 0]).all() == (poisoned != "value")
    others = np.delete(np.arange(4), struck)
    np.testing.assert_allclose(out[others], clean[others], rtol=1e-13)


def test_a_hidden_key_weighs_nothing_in_a_row_of_nan():
    query, key, _ = (x[0, 0] for x in draw(M=4, N=4))
    query[2] = nan
    weights = attention_weights(query, key, causal=True)
    assert np.isnan(weights[2, :3]).all() and weights[2, 3] == 0


@pytest.mark.parametrize("queries", [1, 5])
def test_a_visible_nan_is_not_lost_in_a_product_with_zero(queries):
    zeros, key = np.zeros((queries, 3)), np.zeros((4, 3))
    key[1, 1] = nan
    out, lse = attention(zeros, key, np.ones((4, 2)), return_lse=True)
    assert np.isnan(out).all() and np.isnan(lse).all()
    assert np.isnan(attention_weights(zeros, key)).all()


@pytest.mark.parametrize(
    "scores, values, out",
    [
        pytest.param([0, 0], [inf, 1], inf, id="inf"),
        pytest.param([0, 0], [inf, -inf], nan, id="inf - inf"),
        pytest.param([0, 0], [nan, 1], nan, id="nan"),
        pytest.param([0, -10000], [1, nan], nan, id="0 times nan"),
        pytest.param([0, -10000], [1, inf], nan, id="0 times inf"),
    ],
)
def test_visible_values_that_are_not_finite(scores, values, out):
    np.testing.assert_equal(one_row(scores, values)[0], out)


def test_a_score_of_inf_gives_nan():
    out, lse, weights = one_row([inf, 0], [1, 1])
    assert math.isnan(out) and math.isnan(lse) and np.isnan(weights).all()
    assert np.isnan(one_row([0, 0], [1, 1], bias=[inf, 0])[:2]).all()


def test_a_score_of_minus_inf_weighs_nothing():
    assert one_row([-inf, 0], [1, 3]) == (3, 0, [0, 1])
    assert one_row([-inf, -inf], [1, 3]) == (0, -inf, [0, 0])


@pytest.mark.parametrize("empty", ["B", "H", "HG", "M", "N", "D", "E", "DE", "BN", "MD", "BHGMNDE"])
def test_empty_axes(empty):
    size = dict(B=2, H=4, G=2, M=3, N=5, D=3, E=2) | dict.fromkeys(empty, 0)
    B, H, M, N, E = (size[name] for name in "BHMNE")
    query, key, value = draw(**size)
    for causal in False, True:
        out, lse = attention(query, key, value, causal=causal, return_lse=True)
        assert out.shape == (B, H, M, E) and lse.shape == (B, H, M)
        assert (out == 0).all()
        assert (np.isneginf(lse) if 0 in (N, size["D"]) else np.isfinite(lse)).all()
        assert attention_weights(query, key, causal=causal).shape == (B, H, M, N)


@pytest.mark.parametrize("more", [{}, OPTIONS["sinks"], OPTIONS["bias"], OPTIONS["alibi"]], ids=list)
def test_keys_of_size_zero_are_seen_by_no_one(more):
    query, key, value = draw(D=0)
    out, lse = attention(query, key, value, return_lse=True, **more)
    assert (out == 0).all() and (lse == blind_lse(lse, more)).all()
    assert (attention_weights(query, key, **more) == 0).all()


# Axes, dtypes, out.


def test_two_and_three_axes():
    query, key, value = draw(B=1)
    whole, whole_lse = attention(query, key, value, return_lse=True)
    out, lse = attention(query[0], key[0], value[0], return_lse=True)
    np.testing.assert_array_equal(out, whole[0])
    np.testing.assert_array_equal(lse, whole_lse[0])
    np.testing.assert_array_equal(attention_weights(query[0], key[0]), attention_weights(query, key)[0])
    out, lse = attention(query[0, 3], key[0, 1], value[0, 1], return_lse=True)
    np.testing.assert_allclose(out, whole[0, 3], rtol=1e-13)
    np.testing.assert_allclose(lse, whole_lse[0, 3], rtol=1e-13)
    assert attention_weights(query[0, 3], key[0, 1]).shape == (3, 5)


BROADCASTS = {  # leading axes and heads of query, key, value and result
    "key and value of batch 1": ((2, 4), (1, 2), (1, 2), (2, 4)),
    "key and value without batch": ((2, 4), (2,), (2,), (2, 4)),
    "key and value of two axes": ((2, 4), (), (), (2, 4)),
    "query without batch": ((4,), (2, 2), (2, 2), (2, 4)),
    "query of two axes": ((), (2, 1), (2, 1), (2, 1)),
    "only value has a batch": ((4,), (2,), (3, 2), (3, 4)),
    "five axes": ((3, 2, 4), (3, 2, 2), (3, 2, 2), (3, 2, 4)),
    "five axes that broadcast": ((3, 1, 4), (2, 2), (1, 1, 2), (3, 2, 4)),
}


@pytest.mark.parametrize("q, k, v, result", BROADCASTS.values(), ids=BROADCASTS)
def test_leading_axes_broadcast(q, k, v, result):
    normal = np.random.default_rng(0).standard_normal
    query, key, value = normal((*q, 3, 2)), normal((*k, 5, 2)), normal((*v, 5, 4))
    leading, heads, kv_heads = result[:-1], result[-1], (1, *k)[-1]
    lengths = np.random.default_rng(1).integers(0, 6, leading)
    out, lse = attention(query, key, value, causal=True, kv_lengths=lengths, return_lse=True)
    assert out.shape == (*result, 3, 4) and lse.shape == (*result, 3)
    whole = [
        np.broadcast_to(x, (*leading, n, *x.shape[-2:])).reshape(-1, n, *x.shape[-2:])
        for x, n in [(query, heads), (key, kv_heads), (value, kv_heads)]
    ]
    expected, expected_lse, _ = by_loops(*whole, causal=True, kv_lengths=lengths.ravel())
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse.reshape(lse.shape), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (4, 1, 1), (1, 1, 3, 5), (2, 4, 3, 5)])
def test_mask_and_bias_broadcast(shape):
    arrays = draw()
    mask = np.random.default_rng(2).random(shape) < 0.7
    expected, _, _ = by_loops(*arrays, mask=mask)
    np.testing.assert_allclose(attention(*arrays, mask=mask), expected, rtol=1e-12)
    np.testing.assert_allclose(attention(*arrays, bias=np.where(mask, 0, -inf)), expected, rtol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.float32, np.float64])
def test_dtype_is_that_of_all_results(dtype, options):
    """Of 16 bits there is no lse: it is float32."""
    query, key, value = draw()
    out, lse = attention(query, key, value, return_lse=True, dtype=dtype, **options)
    weights = attention_weights(query, key, dtype=dtype, **options)
    assert out.dtype == weights.dtype == dtype
    assert lse.dtype == (np.float32 if out.itemsize == 2 else dtype)
    exact, tolerance = attention(query, key, value, **options), 40 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(float), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, below", [(np.float16, 2**-11), (bfloat16, 2**-8)])
def test_what_is_rounded_to_16_bits(dtype, below):
    """1 + below lies half way between 1 and the next number, and becomes 1: inputs, scores, probabilities, results."""
    one, more = np.ones((1, 1)), np.full((1, 1), 1 + below)
    assert attention(one, one, more, dtype=dtype) == 1
    key = 2 ** np.arange(3.0)[:, None]
    assert (attention(one, more * key, np.eye(3), dtype=dtype) == attention(one, key, np.eye(3), dtype=dtype)).all()
    lse = attention(np.ones((1, 2)), np.array([[1, below]]), one, scale=1, return_lse=True, dtype=dtype)[1]
    assert lse == 1  # a score
    assert attention(one, one, one, bias=more, scale=0, return_lse=True, dtype=dtype)[1] == 1
    weights = attention_weights(one, np.zeros((3, 1)), dtype=dtype).astype(float)
    assert (weights == np.float32(1 / 3).astype(dtype).astype(float)).all()
    halves = attention(one, np.zeros((2, 1)), np.array([[1.0], [1 + 2 * below]]), dtype=dtype)
    assert halves == 1  # the mean is 1 + below


def test_sums_of_16_bits_are_float32():
    """Of 300 ones: a sum in bfloat16 would stop at 256."""
    out, lse = attention(np.ones((1, 1)), np.zeros((300, 1)), np.ones((300, 1)), return_lse=True, dtype=bfloat16)
    assert lse == np.log(np.float32(300)) and abs(float(out[0, 0]) - 1) < 0.005


def test_merge_to_16_bits():
    outs, lses = np.array([[[1.0]], [[1 + 2**-10]]]), np.array([[1000.25], [1000.25]])
    out, lse = merge(outs, lses, dtype=np.float16)
    assert out.dtype == np.float16 and out == 1
    assert lse.dtype == np.float32 and lse == np.float32(1000.25 + LOG2)


def test_dtype_is_that_of_the_arithmetic():
    rounded = one_row([1e8, 1e8 + 1], dtype=np.float32)[2]
    assert rounded == [0.5, 0.5]
    assert one_row([1e8, 1e8 + 1])[2] == close([0.2689414213699951, 0.7310585786300049])
    assert one_row([1e5, 0], [1, 1], dtype=np.float16)[0] != one_row([1e5, 0], [1, 1])[0]  # 1e5 is inf there


@pytest.mark.parametrize("dtype", [np.float16, np.float32, bfloat16])
def test_float64_by_default_whatever_the_inputs(dtype):
    narrow = [x.astype(dtype) for x in draw()]
    out = attention(*narrow)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, attention(*(x.astype(float) for x in narrow)))
    np.testing.assert_array_equal(attention(*narrow, out=np.empty(out.shape, dtype)), out.astype(dtype))


def test_out_is_written_and_returned():
    query, key, value = draw()
    out = np.empty((2, 3, 4, 2), np.float32).swapaxes(1, 2)
    result, lse = attention(query, key, value, out=out, return_lse=True)
    assert result is out and lse.dtype == np.float64
    np.testing.assert_array_equal(out, attention(query, key, value).astype(np.float32))


def test_an_option_beyond_a_narrow_dtype_is_inf_there():
    assert one_row([0, 0], [1, 1], sinks=[-1e300], dtype=np.float32)[0] == 1


def test_out_of_a_narrow_dtype_overflows_to_inf():
    out = np.empty((1, 2), np.float16)
    attention(np.ones((1, 1)), np.ones((1, 1)), np.array([[1e5, -1e5]]), out=out)
    assert out.tolist() == [[inf, -inf]]


def test_inputs_may_be_read_only_and_of_any_stride():
    arrays = draw()
    expected = attention(*arrays, **OPTIONS["bias"], threads=3)
    flipped = [np.flip(np.ascontiguousarray(np.flip(x).swapaxes(1, 2))).swapaxes(1, 2) for x in arrays]
    for x in flipped:
        x.flags.writeable = False
    np.testing.assert_allclose(attention(*flipped, **OPTIONS["bias"]), expected, rtol=1e-13)


# merge


def parts_of(query, key, value, cuts, **options):
    """Partial results over the keys between the cuts, placed as they stand in the whole."""
    spans = list(itertools.pairwise([0, *cuts, key.shape[-2]]))
    return zip(*[
        attention(query, key[..., a:b, :], value[..., a:b, :], q_offset=key.shape[-2] - query.shape[-2] - a,
                  return_lse=True, **options)
        for a, b in spans
    ])  # fmt: skip


@pytest.mark.parametrize("cuts", [[], [2], [0], [1, 1, 4], [1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(window=(1, 0))], ids=str)
def test_merge_of_parts_is_the_whole(cuts, options):
    arrays = draw()
    outs, lses = parts_of(*arrays, cuts, **options)
    out, lse = merge(outs, lses)
    expected_out, expected_lse = attention(*arrays, return_lse=True, **options)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_merge_by_hand():
    outs, lses = np.array([[[8.0]], [[4.0]]]), np.array([[LOG3], [0.0]])
    out, lse = merge(outs, lses)
    assert out.shape == (1, 1) and lse.shape == (1,)
    assert out.item() == close(7) and lse.item() == close(math.log(4))
    assert merge(outs, lses + 1e4)[0].item() == close(7)


def test_merge_of_a_part_without_keys():
    outs, lses = [[[nan], [nan]], [[5.0], [inf]]], [[-inf, -inf], [2.0, -inf]]
    out, lse = merge(outs, lses)
    assert out.tolist() == [[5], [0]] and lse.tolist() == [2, -inf]


def test_merge_keeps_a_nan_of_a_part_with_keys():
    out, lse = merge([[[nan, 1.0]], [[5.0, 1.0]]], [[-1e4], [0.0]])
    assert np.isnan(out[0, 0]) and out[0, 1] == 1 and lse[0] == 0
    assert np.isnan(merge([[[1.0]], [[1.0]]], [[nan], [0.0]])[0]).all()


def test_merge_dtype_and_out():
    outs, lses = np.ones((2, 3, 4)), np.zeros((2, 3))
    out, lse = merge(outs, lses, dtype=np.float32)
    assert out.dtype == lse.dtype == np.float32
    into = np.empty((3, 4), np.float32)
    assert merge(outs, lses, out=into)[0] is into
    assert (into == 1).all()
    assert merge(np.ones((2, 0, 4)), np.zeros((2, 0)))[0].shape == (0, 4)


# scaled_dot_product_attention


@pytest.mark.parametrize(
    "torch, ours",
    [
        pytest.param(dict(), dict(), id="plain"),
        pytest.param(dict(is_causal=True), dict(causal=True, q_offset=0), id="causal at the top left"),
        pytest.param(dict(scale=0.3), dict(scale=0.3), id="scale"),
        pytest.param(dict(attn_mask=OPTIONS["mask"]["mask"]), OPTIONS["mask"], id="boolean mask"),
        pytest.param(dict(attn_mask=OPTIONS["bias"]["bias"]), OPTIONS["bias"], id="additive mask"),
    ],
)
def test_torch_semantics(torch, ours):
    query, key, value = draw()
    expected, _, _ = by_loops(query, key, value, **ours)
    actual = scaled_dot_product_attention(query, key, value, enable_gqa=True, **torch)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_torch_dtype():
    out = scaled_dot_product_attention(*draw(G=4), dtype=np.float32)
    assert out.dtype == np.float32


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attn_mask=np.ones((3, 5), bool), is_causal=True, enable_gqa=True), "attn_mask"),
        (dict(dropout_p=0.1, enable_gqa=True), "dropout is not offered"),
        (dict(), "enable_gqa"),
    ],
    ids=["mask and causal", "dropout", "heads that differ"],
)
def test_torch_errors(options, message):
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(*draw(), **options)


# Calls that mean nothing, and the names.


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(mask=np.zeros((3, 5))), TypeError, "float64.*bias"),
        (dict(mask=np.ones((3, 5), int)), TypeError, "int64.*bias"),
        (dict(bias=np.ones((3, 5), bool)), TypeError, "mask"),
        (dict(bias=np.ones((3, 5), int)), TypeError, "bias.*int64"),
        (dict(mask=np.ones((4, 5), bool)), ValueError, r"mask.*\(4, 5\)"),
        (dict(bias=np.ones((3, 2, 4, 3, 5))), ValueError, "bias.*broadcast"),
        (dict(sinks=np.ones(3)), ValueError, "sinks"),
        (dict(alibi_slopes=np.ones(3)), ValueError, "alibi_slopes"),
        (dict(kv_lengths=[6, 1]), ValueError, "kv_lengths.*6"),
        (dict(kv_lengths=[-1, 1]), ValueError, "kv_lengths.*-1"),
        (dict(kv_lengths=[1, 1, 1]), ValueError, "kv_lengths"),
        (dict(q_offset=0.5), TypeError, "q_offset.*float64"),
        (dict(window=(1.5, 0)), TypeError, "integer"),
        (dict(softcap=0.0), ValueError, "softcap.*0.0"),
        (dict(out=np.empty((4, 3, 2))), ValueError, r"out.*\(4, 3, 2\)"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        attention(*draw(), **options)


@pytest.mark.parametrize(
    "shapes",
    {
        "heads": dict(key=(2, 3, 5, 3), value=(2, 3, 5, 2)),
        "fewer query heads": dict(query=(2, 1, 3, 3)),
        "no key heads": dict(key=(2, 0, 5, 3), value=(2, 0, 5, 2)),
        "heads of value": dict(value=(2, 1, 5, 2)),
        "key size": dict(key=(2, 2, 5, 2)),
        "keys and values": dict(value=(2, 2, 1, 2)),
        "batch": dict(value=(3, 2, 5, 2)),
        "one axis": dict(query=(3,)),
    }.values(),
    ids=str,
)
def test_shapes_that_do_not_fit(shapes):
    arrays = dict(zip(["query", "key", "value"], draw())) | {name: np.ones(x) for name, x in shapes.items()}
    with pytest.raises(ValueError, match=r"\(B, H, M, D\)|broadcast|two axes"):
        attention(**arrays)


@pytest.mark.parametrize("dtype", [int, bool, complex, object])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_only_floats(name, dtype):
    arrays = dict(zip(["query", "key", "value"], draw()))
    with pytest.raises(TypeError, match=f"{name}.*{np.dtype(dtype)}"):
        attention(**arrays | {name: np.ones_like(arrays[name]).astype(dtype)})


def test_out_that_overlaps_an_input():
    query, key, value = draw(D=2, E=2)
    with pytest.raises(ValueError, match="overlap"):
        attention(query, key, value, out=query)


def test_names_are_those_of_the_contract():
    options = "mask bias causal window q_offset kv_lengths scale softcap sinks alibi_slopes".split()
    expected = {
        "attention": ["query", "key", "value", *options, "return_lse", "out", "threads", "dtype"],
        "attention_weights": ["query", "key", *options, "threads", "dtype"],
        "merge": ["outs", "lses", "out", "dtype"],
        "scaled_dot_product_attention": [
            *"query key value attn_mask dropout_p is_causal scale enable_gqa".split(), "dtype"
        ],
    }  # fmt: skip
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(reference, name)).parameters) == parameters
