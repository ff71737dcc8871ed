"""Any shapes with any options in any layouts: the engine against the oracle, on every kernel."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accuracy import allowed, exactly, judge, plainly, units
from support.draw import inf
from support.problems import EVERY_KERNEL, PROPERTY, examples, problems

import sdpa
from sdpa import reference


@EVERY_KERNEL
@PROPERTY
@given(problems(), st.integers(1, 3))
def test_any_problem(kernel, problem, threads):
    query, key, value, options = problem
    before = [x.copy() for x in (query, key, value)]
    out, lse = sdpa.attention(query, key, value, return_lse=True, threads=threads, **options)
    assert all((x == y).all() for x, y in zip(before, (query, key, value)))
    judge(out, lse, query, key, value, factor=4, floor=20, **options)


@EVERY_KERNEL
@settings(PROPERTY, max_examples=examples(150))
@given(problems())
def test_any_weights(kernel, problem):
    query, key, _, options = problem
    dtype = query.dtype.type
    exact = reference.attention_weights(query, key, dtype=exactly(dtype), **options)
    naive = reference.attention_weights(query, key, dtype=plainly(dtype), **options)
    weights = sdpa.attention_weights(query, key, **options)
    assert weights.shape == exact.shape
    error = units(naive, exact, np.ones(()), plainly(dtype))
    assert units(weights, exact, np.ones(()), dtype) <= allowed(error, dtype, factor=4, floor=20)
    assert (weights[exact == 0] == 0).all()


@EVERY_KERNEL
@settings(PROPERTY, max_examples=examples(150))
@given(problems(), st.sampled_from([np.nan, inf, -inf]))
def test_keys_that_nobody_sees_may_hold_anything(kernel, problem, garbage):
    query, key, value, options = problem
    level = dict(scale=0, bias=hidden_only(options), softcap=None, alibi_slopes=None)  # all that is seen weighs > 0
    seen = reference.attention_weights(query, key, **options | level) > 0
    unseen = ~seen.reshape(-1, seen.shape[-1]).any(axis=0) if seen.size else np.ones(key.shape[-2], bool)
    clean = sdpa.attention(query, key, value, return_lse=True, **options)
    key, value = key.copy(), value.copy()
    key[..., unseen, :] = value[..., unseen, :] = garbage
    for actual, expected in zip(sdpa.attention(query, key, value, return_lse=True, **options), clean):
        np.testing.assert_array_equal(actual, expected)


def hidden_only(options):
    """The bias without its numbers."""
    return np.where(np.isneginf(options["bias"]), -inf, 0) if "bias" in options else None
