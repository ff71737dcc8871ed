"""Calls of attention that the tests have no property for: larger sizes, merged parts, torch's function, additive."""

import numpy as np
import test_additive
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits, exactly, judge, units
from support.draw import DTYPES, draw, float32, float64, rng
from support.kernels import PAIRS_OF_BFLOAT16
from support.options import OPTIONS, options_for
from support.problems import ANY_DTYPE, LENGTHS, PROPERTY, SIZES, examples, problems
from test_weights_merge import parts_of

import sdpa
from sdpa import reference
from sdpa._runtime import kernels

LONGER = LENGTHS | st.integers(0, 700)
WIDER = SIZES | st.integers(0, 160)
THREADS = st.none() | st.integers(1, 5)


def a_large_problem(choose):
    """Of bfloat16 mostly, where the kernel has its own arithmetic for that."""
    dtypes = ANY_DTYPE
    if kernels.default.name in PAIRS_OF_BFLOAT16:
        dtypes = st.sampled_from([bfloat16] * 3) | ANY_DTYPE
    return choose(problems(LONGER, WIDER, dtypes))


@settings(PROPERTY, max_examples=examples(150))
@given(st.data(), THREADS)
def larger_sizes(data, threads):
    query, key, value, options = a_large_problem(data.draw)
    out, lse = sdpa.attention(query, key, value, return_lse=True, threads=threads, **options)
    judge(out, lse, query, key, value, factor=4, floor=20, **options)


@settings(PROPERTY, max_examples=examples(150))
@given(st.data(), st.integers(2, 5))
def bits(data, threads):
    """Those of each row stay, whatever the number of threads, and in whichever batch it is."""
    query, key, value, options = a_large_problem(data.draw)
    expected = sdpa.attention(query, key, value, return_lse=True, threads=1, **options)
    for found, one in zip(sdpa.attention(query, key, value, return_lse=True, threads=threads, **options), expected):
        assert_same_bits(found, one)
    whole = sdpa.explain(query, key, value, **options).engine
    more = np.broadcast_to(query, (2, *query.shape))
    if query.ndim >= 3 and sdpa.explain(more, key, value, **options).engine == whole:
        for found, one in zip(sdpa.attention(more, key, value, return_lse=True, **options), expected):
            assert_same_bits(found[1], one)


@settings(PROPERTY, max_examples=examples(300))
@given(st.data(), LONGER, LONGER, WIDER, WIDER, st.sampled_from(list(DTYPES.values())))
def merged(data, M, N, D, E, dtype):
    """Parts over any stretches of the keys, as one call over all."""
    arrays = draw(M=min(M, 80), N=N, D=D, E=E, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    boundaries = sorted(data.draw(st.lists(st.integers(0, N), max_size=5)))
    options = data.draw(
        st.fixed_dictionaries({}, optional=dict(
            causal=st.booleans(), q_offset=st.integers(-20, N), softcap=st.floats(0.5, 20), scale=st.floats(-1, 1),
        ))
    )  # fmt: skip
    outs, lses = zip(*parts_of(*arrays, boundaries, **options))
    out, lse = sdpa.merge(outs, lses)
    exact, exact_lse = reference.merge(outs, lses, dtype=exactly(arrays[0].dtype.type))
    scale, _ = reference.merge([np.abs(x) for x in outs], lses, dtype=exactly(arrays[0].dtype.type))
    assert out.dtype == arrays[0].dtype and units(out, exact, scale, out.dtype.type) <= 4
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    if out.dtype in (float32, float64):
        judge(out, lse, *arrays, factor=4, floor=20, **options)


@settings(PROPERTY, max_examples=examples(300))
@given(st.data(), LENGTHS, LENGTHS, st.sampled_from(list(DTYPES.values())), st.booleans())
def like_torch(data, M, N, dtype, grouped):
    """As the same call of attention, where nothing else may differ."""
    arrays = draw(G=2 if grouped else 4, M=M, N=N, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    kind = data.draw(st.sampled_from(["nothing", "causal", "mask", "bias"]))
    shape = data.draw(st.sampled_from([(M, N), (1, N), (2, 1, M, N), (4, M, 1), (2, 4, M, N)]))
    scale = data.draw(st.none() | st.floats(-2, 2))
    theirs, ours = {}, {}
    if kind == "causal":
        theirs, ours = dict(is_causal=True), dict(causal=True, q_offset=0)
    elif kind != "nothing":
        given = rng(1).random(shape) < 0.6 if kind == "mask" else rng(1).standard_normal(shape)
        theirs, ours = dict(attn_mask=given), {kind: given}
    out = sdpa.scaled_dot_product_attention(*arrays, **theirs, scale=scale, enable_gqa=grouped)
    assert_same_bits(out, sdpa.attention(*arrays, **ours, scale=scale))
    exact = reference.scaled_dot_product_attention(*arrays, **theirs, scale=scale, enable_gqa=grouped, dtype=float64)
    assert_same_bits(exact, reference.attention(*arrays, **ours, scale=scale, dtype=float64))


@settings(PROPERTY, max_examples=examples(200))
@given(
    st.integers(0, 40) | LENGTHS, LENGTHS, *[st.integers(1, 40)] * 4, st.sampled_from(list(DTYPES.values())),
    *[st.booleans()] * 2, st.lists(st.sampled_from(list(OPTIONS)), max_size=3), st.integers(0, 99),
)  # fmt: skip
def additive(M, N, D, K, E, A, dtype, of_query, of_key, names, number):
    arrays, weights = test_additive.draw(
        M=M, N=N, D=D, K=K, E=E, A=A, dtype=dtype, of_query=of_query, of_key=of_key, seed=number
    )
    test_additive.check(arrays, weights, factor=4, floor=20, **options_for(*arrays[:2], *names))


PROPERTIES = {
    "larger sizes": larger_sizes,
    "bits": bits,
    "merge": merged,
    "like torch": like_torch,
    "additive": additive,
}
