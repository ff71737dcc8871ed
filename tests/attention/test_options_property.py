"""Any shapes with any options in any layouts: the engine against the oracle, on every kernel."""

import numpy as np
import pytest
from conftest import (
    KERNELS,
    LAYOUTS,
    allowed,
    arithmetic,
    bfloat16,
    exactly,
    examples,
    float16,
    float32,
    float64,
    inf,
    judge,
    rng,
    units,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sdpa
from sdpa import reference

LENGTHS = st.integers(0, 6) | st.sampled_from([15, 16, 17, 33, 64, 65, 127, 128, 129, 140, 257])
SIZES = st.integers(0, 5) | st.sampled_from([7, 8, 16, 17, 33, 64])
LAYOUT = st.sampled_from(list(LAYOUTS.values()))
SIDE = st.none() | st.integers(-3, 8) | st.sampled_from([-140, -60, 40, 100, 130, 300, 2**40])
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS, indirect=True)
PROPERTY = settings(
    max_examples=examples(400), deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@st.composite
def problems(choose):
    """query, key, value, and any combination of options, of ranks 2 to 5 with leading axes that broadcast."""
    rank = choose(st.integers(2, 5))
    lead = tuple(choose(st.integers(0, 3)) for _ in range(rank - 3))
    G = choose(st.integers(1, 3)) if rank > 2 else 1
    H = G * choose(st.integers(1, 4)) if rank > 2 else 1
    M, N, D, E = choose(LENGTHS), choose(LENGTHS), choose(SIZES), choose(SIZES)
    heads = (H,) if rank > 2 else ()
    normal = rng(choose(st.integers(0, 9999)))
    dtype = choose(st.sampled_from([float32, float64, float16, bfloat16]))
    narrower = {float64: [float64, float32, float16, bfloat16], float32: [float32, float16, bfloat16]}
    kv_dtypes = st.sampled_from(narrower.get(dtype, [dtype]))
    key_dtype = choose(kv_dtypes)
    value_dtype = choose(kv_dtypes)
    if {key_dtype, value_dtype} == {float16, bfloat16}:
        value_dtype = key_dtype

    def broadcast(shape):
        """One that broadcasts to `shape`."""
        kept = [n if choose(st.integers(0, 2)) else 1 for n in shape]
        return tuple(kept[choose(st.integers(0, len(shape))) if choose(st.booleans()) else 0 :])

    def array(shape, of):
        return choose(LAYOUT)(np.asarray(normal.standard_normal(shape)).astype(of))

    query = array((*lead, *heads, M, D), dtype)  # the result has all axes
    key = array((*broadcast(lead), *((G,) if rank > 2 else ()), N, D), key_dtype)
    value = array((*broadcast(lead), *((G,) if rank > 2 else ()), N, E), value_dtype)
    pairs, per_head = (*lead, *(heads or (1,)), M, N), (*lead, *(heads or (1,)))
    mask = choose(LAYOUT)(np.asarray(normal.random(broadcast(pairs)) < choose(st.sampled_from([0.02, 0.5, 0.9]))))
    bias = array(broadcast(pairs), choose(st.sampled_from([float32, float64, float16, bfloat16])))
    if choose(st.booleans()):
        bias = np.where(normal.random(bias.shape) < 0.4, -inf, bias)
    optional = dict(
        mask=st.just(mask),
        bias=st.just(bias),
        causal=st.booleans(),
        window=st.none() | st.tuples(SIDE, SIDE),
        q_offset=st.integers(-150, 150) | st.just(normal.integers(-150, 150, broadcast(lead))),
        kv_lengths=st.integers(0, N) | st.just(normal.integers(0, N + 1, broadcast(lead))),
        scale=st.none() | st.floats(-2, 2),
        softcap=st.none() | st.floats(0.1, 50),
        sinks=st.just(normal.standard_normal(broadcast(per_head)) * 3),
        alibi_slopes=st.just(normal.random(broadcast(per_head)) / 4),
    )
    return query, key, value, choose(st.fixed_dictionaries({}, optional=optional))


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
    naive = reference.attention_weights(query, key, dtype=arithmetic(dtype), **options)
    weights = sdpa.attention_weights(query, key, **options)
    assert weights.shape == exact.shape
    error = units(naive, exact, np.ones(()), arithmetic(dtype))
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
