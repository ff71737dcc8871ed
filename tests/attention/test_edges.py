"""The edges of the contract: rows that see nothing, NaN and inf, empty axes."""

import ml_dtypes
import numpy as np
import pytest
from support.accuracy import assert_same_bits, blind_lse, eps
from support.draw import HALF, draw, float32, inf, nan
from support.edges import BLIND, HIDDEN
from support.kernels import on_kernels
from support.options import OPTIONS, SCORES, options_for

import sdpa
from sdpa import reference

EACH_DTYPE = on_kernels({"float32": float32}, HALF, half="best")


def assert_near(actual, expected, dtype):
    """Where what matters is whether they are finite, and which of them."""
    size = dict(rtol=1e-4, atol=1e-5) if dtype == float32 else dict(rtol=2 * eps(dtype), atol=2 * eps(dtype))
    np.testing.assert_allclose(actual.astype(float), expected, **size)


@EACH_DTYPE
@pytest.mark.parametrize("more", ["nothing", *SCORES])
@pytest.mark.parametrize("options", BLIND.values(), ids=BLIND)
def test_rows_that_see_no_key(kernel, options, more, dtype):
    query, key, value = draw(dtype=dtype)
    query[0, 0] = key[0, 0] = value[1, 0] = nan
    key[1, 1] = value[0, 0] = inf
    options = options | options_for(query, key, more)
    out, lse = sdpa.attention(query, key, value, return_lse=True, **options)
    assert (out == 0).all()
    assert_same_bits(lse, blind_lse(lse, options))
    assert (sdpa.attention_weights(query, key, **options) == 0).all()


@EACH_DTYPE
@pytest.mark.parametrize("more", ["nothing", "sinks", "softcap", "bias"])
def test_some_rows_see_no_key(kernel, more, dtype):
    """More queries than keys, causal: the first stand before all keys."""
    arrays = draw(M=90, N=35, dtype=dtype)
    options = options_for(*arrays[:2], more)
    out, lse = sdpa.attention(*arrays, causal=True, return_lse=True, **options)
    assert (out[:, :, :55] == 0).all()
    assert_same_bits(lse[:, :, :55], blind_lse(lse, options)[:, :, :55])
    assert (out[:, :, 55:] != 0).all() and np.isfinite(lse[:, :, 55:]).all()


# What a hidden key holds.  Each case hides `j` from row `i` in its own way: 133 keys, 37 queries.

MORE = ["nothing", "softcap", "scale below 0", "alibi", "sinks"]


@EACH_DTYPE
@pytest.mark.parametrize("garbage", [nan, inf, -inf, "largest"])
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("options, hidden", HIDDEN.values(), ids=HIDDEN)
def test_garbage_in_keys_that_nobody_sees_changes_no_bit(kernel, options, hidden, more, garbage, dtype):
    query, key, value = draw(D=36, E=40, dtype=dtype)
    garbage = ml_dtypes.finfo(dtype).max if garbage == "largest" else garbage
    options = options | options_for(query, key, more)
    clean = sdpa.attention(query, key, value, return_lse=True, **options)
    weights = sdpa.attention_weights(query, key, **options)
    nobody = hidden.all(axis=0)
    key[:, :, nobody] = value[:, :, nobody] = garbage
    for actual, expected in zip(sdpa.attention(query, key, value, return_lse=True, **options), clean):
        assert np.isfinite(expected).all()
        assert_same_bits(actual, expected)
    assert_same_bits(sdpa.attention_weights(query, key, **options), weights)


@EACH_DTYPE
@pytest.mark.parametrize("place", ["key", "value", "both"])
@pytest.mark.parametrize("garbage", [nan, inf, -inf])
@pytest.mark.parametrize("options, hidden", HIDDEN.values(), ids=HIDDEN)
def test_garbage_reaches_the_rows_that_see_it_and_no_other(kernel, options, hidden, garbage, place, dtype):
    query, key, value = draw(D=36, E=40, dtype=dtype)
    clean = sdpa.attention(query, key, value, return_lse=True, **options)
    planted = [3, 41, 77, 110, 129]
    if place != "value":
        key[0, 1, planted] = garbage
    if place != "key":
        value[0, 1, planted] = garbage
    out, lse = sdpa.attention(query, key, value, return_lse=True, **options)
    struck = np.zeros(lse.shape, bool)
    struck[0, 2:] = ~hidden[:, planted].all(axis=1)  # heads 2 and 3 share key head 1
    assert_same_bits(out[~struck], clean[0][~struck])
    assert_same_bits(lse[~struck], clean[1][~struck])
    expected, expected_lse = reference.attention(query, key, value, return_lse=True, **options)
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, float32)
    if place != "key" and struck.any():
        assert not np.isfinite(out[struck]).any()


@EACH_DTYPE
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("garbage", [nan, inf, -inf])
def test_garbage_as_in_the_oracle(kernel, garbage, name, dtype):
    """One element of V: one feature is struck."""
    query, key, value = draw(dtype=dtype)
    value[1, 0, 64, 5] = garbage
    options = options_for(query, key, name)
    expected = reference.attention(query, key, value, **options)
    assert_near(sdpa.attention(query, key, value, **options), expected, dtype)


@EACH_DTYPE
@pytest.mark.parametrize("name", ["nothing", "causal", "mask", "bias", "softcap", "sinks", "alibi", "scale below 0"])
def test_nan_in_a_query_stays_in_its_row(kernel, name, dtype):
    query, key, value = draw(dtype=dtype)
    options = options_for(query, key, name)
    clean = sdpa.attention(query, key, value, return_lse=True, **options)
    query[1, 2, 30, 4] = nan
    results = sdpa.attention(query, key, value, return_lse=True, **options)
    others = np.ones(clean[1].shape, bool)
    others[1, 2, 30] = False
    for result, expected in zip(results, clean):
        assert_same_bits(result[others], expected[others])
        assert np.isnan(result[1, 2, 30]).all()


@EACH_DTYPE
@pytest.mark.parametrize("name", ["causal", "window", "mask", "bias that hides", "lengths"])
def test_a_hidden_key_weighs_0_in_a_row_of_nan(kernel, name, dtype):
    query, key, _ = draw(dtype=dtype)
    options = options_for(query, key, name)
    query[1, 2, 30] = nan
    expected = reference.attention_weights(query, key, **options)
    weights = sdpa.attention_weights(query, key, **options)
    assert_near(weights, expected, dtype)
    assert (weights[expected == 0] == 0).all()


@EACH_DTYPE
@pytest.mark.parametrize("sinks", [None, np.zeros(1)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("score", [inf, -inf, nan])
def test_a_visible_score_that_is_not_finite(kernel, score, sinks, dtype):
    """Two rows, and twenty."""
    key, value = (np.array(x, float32).astype(dtype)[:, None] for x in ([score, 0, 1], [1, 2, 3]))
    for query in np.ones((2, 1), dtype), np.ones((20, 1), dtype):
        results = sdpa.attention(query, key, value, return_lse=True, sinks=sinks)
        for actual, expected in zip(results, reference.attention(query, key, value, return_lse=True, sinks=sinks)):
            assert_near(actual, expected, dtype)


@EACH_DTYPE
def test_all_visible_scores_are_minus_inf(kernel, dtype):
    key = np.full((3, 1), -inf, dtype)
    for rows in 2, 20:
        out, lse = sdpa.attention(np.ones((rows, 1), dtype), key, np.ones((3, 1), dtype), return_lse=True)
        assert (out == 0).all() and (lse == -inf).all()


@EACH_DTYPE
@pytest.mark.parametrize("hide", ["mask", "lengths"])
def test_nan_in_bias_and_slopes_of_hidden_keys(kernel, hide, dtype):
    query, key, value = draw(M=19, N=40, dtype=dtype)
    bias = np.where(np.arange(40) < 25, 0.5, nan)
    options = dict(mask=np.arange(40) < 25) if hide == "mask" else dict(kv_lengths=25)
    out = sdpa.attention(query, key, value, bias=bias, **options)
    assert_same_bits(out, sdpa.attention(query, key, value, bias=np.nan_to_num(bias), **options))


# Empty axes.


@EACH_DTYPE
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("empty", ["H", "HG", "M", "N", "D", "E", "DE", "MD", "NE", "HGMNDE"])
def test_empty_axes(kernel, empty, lead, causal, dtype):
    size = dict(H=4, G=2, M=3, N=5, D=3, E=2) | dict.fromkeys(empty, 0)
    H, G, M, N, D, E = size.values()
    query, key, value = (np.ones((*lead, *x), dtype) for x in [(H, M, D), (G, N, D), (G, N, E)])
    out, lse = sdpa.attention(query, key, value, causal=causal, return_lse=True, sinks=np.ones(H))
    assert out.shape == (*lead, H, M, E) and lse.shape == (*lead, H, M)
    assert (out == 0).all() and ((lse == 1).all() if 0 in (N, D) else (lse > 1).all())
    assert_same_bits(sdpa.attention(query, key, value, causal=causal), np.zeros_like(out) if out.size == 0 or N * D == 0
                     else np.ones_like(out))  # fmt: skip
    weights = sdpa.attention_weights(query, key, causal=causal, mask=np.ones((M, N), bool), bias=np.zeros((M, N)))
    assert weights.shape == (*lead, H, M, N)
    assert D or (weights == 0).all()
    assert sdpa.explain(query, key, value, causal=causal).flops >= 0


@pytest.mark.parametrize("lead", [(0,), (0, 2), (2, 0)], ids=str)
def test_no_batches(kernel, lead):
    query = key = np.ones((*lead, 4, 3, 5), np.float32)
    out, lse = sdpa.attention(query, key, key, return_lse=True, kv_lengths=np.ones(lead, int), mask=np.ones(3, bool))
    assert out.shape == query.shape and lse.shape == query.shape[:-1]
    assert sdpa.attention(query, key, key).shape == query.shape
    assert sdpa.attention_weights(query, key).shape == (*lead, 4, 3, 3)


@pytest.mark.parametrize("lead", [(0, 20_000), (20_000, 0)], ids=str)
def test_no_batches_of_keys_that_broadcast(lead):
    """Where each batch begins has no place in a table of none."""
    query = np.ones((*lead, 4, 3, 5), np.float32)
    for shared in (1, lead[1]), (lead[0], 1):
        key = np.ones((*shared, 1, 3, 5), np.float32)
        out, lse = sdpa.attention(query, key, key, return_lse=True)
        assert out.shape == query.shape
        assert sdpa.attention_weights(query, key).shape == (*lead, 4, 3, 3)
        gradients = sdpa.attention_backward(out, query, key, key, out, lse)
        assert (gradients.key == 0).all() and (gradients.value == 0).all()
