"""MultiHeadAttention: against the oracle, step by step with caches, and what it makes of wrong arguments."""

import copy
import pickle
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits, eps, exactly
from support.draw import HALF, WIDE, float16, float32, float64, nan, rng
from support.kernels import on_kernels
from support.layouts import LAYOUTS
from support.options import OPTIONS
from support.problems import examples

import sdpa
from sdpa import MultiHeadAttention, PagedKVCache, reference
from sdpa._layer.linear import Linear

WIDTH, H, G, D, E, OUT, B, M, N = 24, 4, 2, 6, 5, 17, 2, 9, 13


def normal(*shape, dtype=float64, seed=0):
    return rng(seed).standard_normal(shape).astype(dtype)


def arguments(dtype=float64, width=WIDTH, H=H, G=G, D=D, E=E, out=OUT, kdim=None, vdim=None, biases=True, seed=1):
    """Those of a layer, as a dict; with separate weights if kdim or vdim is given."""
    rows, widths = (H * D, G * D, G * E), (width, kdim or width, vdim or width)
    draw = [normal(r, w, dtype=dtype, seed=seed + i) / dtype(w**0.5) for i, (r, w) in enumerate(zip(rows, widths))]
    given = dict(embed_dim=width, num_heads=H, kv_heads=G, head_dim=D, value_dim=E)
    given["out_proj_weight"] = normal(out, H * E, dtype=dtype, seed=seed + 3) / dtype((H * E) ** 0.5)
    if biases:
        given["in_proj_bias"] = normal(sum(rows), dtype=dtype, seed=seed + 4)
        given["out_proj_bias"] = normal(out, dtype=dtype, seed=seed + 5)
    if kdim is None and vdim is None:
        return given | dict(in_proj_weight=np.concatenate(draw))
    names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return given | dict(zip(names, draw), kdim=widths[1], vdim=widths[2])


EXTRA = dict(bias_k=normal(G * D, seed=7), bias_v=normal(G * E, seed=8))
PARTS = {
    "plain": {},
    "rotary": dict(rotary=True),
    "rotary of neighbours": dict(rotary=dict(base=500, interleaved=True, dim=4)),
    "rotary by frequencies": dict(rotary=dict(frequencies=[0.5, 0.01], dim=4)),
    "norm": dict(qk_norm=True),
    "norm with weights": dict(qk_norm=(1 + normal(D, seed=5) / 4, 1 + normal(D, seed=6) / 4)),
    "norm around the mean": dict(qk_norm=dict(key=normal(D, seed=6), eps=0.1, center=True)),
    "norm before": dict(pre_norm=True),
    "norms before and after": dict(
        pre_norm=dict(weight=normal(WIDTH, seed=5), bias=normal(WIDTH, seed=6), center=True),
        post_norm=dict(weight=normal(OUT, seed=9), bias=normal(OUT, seed=10), eps=0.1),
    ),
    "extra key": EXTRA,
    "zero key": dict(add_zero_attn=True),
    "all": dict(rotary=1000.0, qk_norm=True, add_zero_attn=True, **EXTRA),
}


def both(parts="plain", **sizes):
    """A layer and its oracle."""
    given = arguments(**sizes) | PARTS[parts]
    return MultiHeadAttention(**given), reference.MultiHeadAttention(**given)


def assert_close(actual, expected, size=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=size)


def judge(dtype, layer, oracle, *arrays, **options):
    """At most twice the error of NumPy in the same dtype, plus a rounding floor."""
    out = layer(*arrays, **options)
    exact = oracle(*arrays, dtype=exactly(dtype), **options)
    naive = oracle(*arrays, dtype=dtype, **options)
    assert out.dtype == dtype and out.shape == exact.shape
    errors = [float(np.abs(x.astype(exact.dtype) - exact).max(initial=0)) for x in (out, naive)]
    assert errors[0] <= 2 * errors[1] + 4 * eps(dtype) * float(np.abs(exact).max(initial=0))


# What is known without computing.


def test_two_heads_by_hand():
    """Queries and keys are 0, so each head gives the mean of what it sees."""
    layer = MultiHeadAttention(
        2,
        2,
        in_proj_weight=np.eye(6, 2, -4),
        out_proj_weight=np.array([[1.0, 2.0], [3.0, 4.0]]),
        out_proj_bias=[0.5, 0.0],
    )
    x = np.array([[8.0, 0.0], [4.0, 2.0]])
    np.testing.assert_array_equal(layer(x), [[8.5, 22], [8.5, 22]])  # means 6 and 1
    np.testing.assert_array_equal(layer(x, causal=True), [[8.5, 24], [8.5, 22]])
    _, weights = layer(x, causal=True, return_weights=True)
    np.testing.assert_array_equal(weights, [[[1, 0], [0.5, 0.5]]] * 2)


def test_the_norm_by_hand():
    """(3, 4) becomes (3, 4) / sqrt(12.5), whose product with itself is 2; the scale is 1 / sqrt(2)."""
    weight = np.concatenate([np.eye(2), np.eye(2), np.eye(2)])
    layer = MultiHeadAttention(2, 1, in_proj_weight=weight, out_proj_weight=np.eye(2), qk_norm=dict(eps=0))
    x = np.array([[3.0, 4.0], [-6.0, -8.0]])
    _, weights = layer(x, return_weights=True)
    near, far = np.exp(2**0.5), np.exp(-(2**0.5))
    assert_close(weights, np.array([[[near, far], [far, near]]]) / (near + far))


def test_heads_of_a_group_share_a_key_and_a_value():
    given = arguments()
    q, k, v = np.split(given["in_proj_weight"], [H * D, (H + G) * D])
    biases = np.split(given["in_proj_bias"], [H * D, (H + G) * D])

    def repeated(rows, size):
        return np.repeat(rows.reshape(G, size, *rows.shape[1:]), H // G, axis=0).reshape(-1, *rows.shape[1:])

    whole = given | dict(
        kv_heads=H, in_proj_weight=np.concatenate([q, repeated(k, D), repeated(v, E)]),
        in_proj_bias=np.concatenate([biases[0], repeated(biases[1], D), repeated(biases[2], E)]),
    )  # fmt: skip
    x = normal(B, M, WIDTH)
    assert_close(MultiHeadAttention(**given)(x), MultiHeadAttention(**whole)(x))


def test_the_steps_one_by_one():
    """What the layer does, with the functions of the library."""
    given = arguments(dtype=float32)
    x = normal(B, M, WIDTH, dtype=float32)
    y = x @ given["in_proj_weight"].T + given["in_proj_bias"]
    query, key, value = np.split(y, [H * D, (H + G) * D], axis=-1)
    query, key, value = (
        part.reshape(B, M, -1, size).swapaxes(1, 2) for part, size in ((query, D), (key, D), (value, E))
    )
    heads = sdpa.attention(sdpa.rotary(query, 0), sdpa.rotary(key, 0), value, causal=True)
    expected = heads.swapaxes(1, 2).reshape(B, M, H * E) @ given["out_proj_weight"].T + given["out_proj_bias"]
    assert_close(MultiHeadAttention(**given, rotary=True)(x, causal=True), expected, 1e-6)


# Against the oracle.


@pytest.mark.parametrize("parts", ["plain", "all"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(kernel, name, parts):
    layer, oracle = both(parts)
    x, context = normal(B, M, WIDTH), normal(B, N, WIDTH, seed=1)
    for inputs, count in ((x,), M), ((x, context), N):
        options = OPTIONS[name](B, H, M, count)
        out, weights = layer(*inputs, **options, return_weights=True)
        expected, expected_weights = oracle(*inputs, **options, return_weights=True)
        assert_close(out, expected)
        assert_close(weights, expected_weights)
        assert_close(layer(*inputs, **options), expected)


@pytest.mark.parametrize("parts", PARTS)
@on_kernels(WIDE, HALF, half="best")
def test_dtypes(kernel, dtype, parts):
    given = arguments(dtype=dtype) | PARTS[parts]
    layer, oracle = MultiHeadAttention(**given), reference.MultiHeadAttention(**given)
    x, context = normal(B, M, WIDTH, dtype=dtype), normal(B, N, WIDTH, dtype=dtype, seed=1)
    judge(dtype, layer, oracle, x, causal=True)
    judge(dtype, layer, oracle, x, context, kv_lengths=[N, 4])


@pytest.mark.parametrize("parts", ["plain", "norm before", "norms before and after"])
@on_kernels(WIDE, HALF, half="best")
def test_residual(kernel, dtype, parts):
    given = arguments(dtype=dtype) | PARTS[parts]
    layer, oracle = MultiHeadAttention(**given), reference.MultiHeadAttention(**given)
    x, residual = normal(B, M, WIDTH, dtype=dtype), normal(B, M, OUT, dtype=dtype, seed=2)
    kept = residual.copy()
    judge(dtype, layer, oracle, x, residual=residual, causal=True)
    np.testing.assert_array_equal(residual, kept)
    whole = layer(x, residual=residual)
    np.testing.assert_array_equal(layer(x[0], residual=residual[0]), whole[0])
    turned = MultiHeadAttention(**given, batch_first=False)
    x, residual = (rows.swapaxes(0, 1).copy() for rows in (x, residual))
    np.testing.assert_array_equal(turned(x, residual=residual), whole.swapaxes(0, 1))
    with raises(ValueError, ["residual has shape (9, 2, 5)", "(9, 2, 17)"]):
        turned(x, residual=residual[..., :5])


def test_larger_sizes(kernel):
    sizes = dict(width=192, H=6, G=3, D=40, E=24, out=100)
    layer, oracle = both(dtype=float32, **sizes)
    judge(float32, layer, oracle, normal(2, 150, 192, dtype=float32), causal=True)


@pytest.mark.parametrize("weights", [float16, bfloat16, float32, float64])
@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64])
def test_weights_may_have_another_dtype(dtype, weights):
    layer, oracle = both("all", dtype=weights)
    x = normal(B, M, WIDTH, dtype=dtype)
    out = layer(x)
    assert out.dtype == dtype
    size = max(eps(dtype), eps(float32) if dtype != float64 else 0)
    assert_close(out.astype(float64), oracle(x), 30 * size)


@pytest.mark.parametrize("kdim, vdim", [(10, 10), (10, 7), (WIDTH, 7), (10, WIDTH), (WIDTH, WIDTH)])
def test_contexts_of_other_sizes(kdim, vdim):
    layer, oracle = both("rotary", kdim=kdim, vdim=vdim)
    x, context, other = normal(B, M, WIDTH), normal(B, N, kdim, seed=1), normal(B, N, vdim, seed=2)
    assert_close(layer(x, context, value_context=other), oracle(x, context, value_context=other))
    if kdim == vdim:
        assert_close(layer(x, context), oracle(x, context))
    if kdim == vdim == WIDTH:
        assert_close(layer(x), oracle(x))


def test_positions():
    layer, oracle = both("rotary")
    x, context = normal(B, M, WIDTH), normal(B, N, WIDTH, seed=1)
    for positions in 5, np.arange(M) ** 2, rng(3).integers(0, 50, (B, M)):
        assert_close(layer(x, positions=positions), oracle(x, positions=positions))
        assert_close(layer(x, context, positions=positions), oracle(x, context, positions=positions))
    assert_close(layer(x, positions=1000), layer(x), 1e-11)  # only distances matter


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_combination(data):
    draw, few = data.draw, st.integers(1, 4)
    G, width = draw(few), draw(st.integers(1, 20))
    sizes = dict(G=G, H=G * draw(few), D=2 * draw(few), E=draw(st.integers(1, 9)), out=draw(st.integers(1, 9)))
    count, keys, batch = draw(st.integers(0, 20)), draw(st.integers(0, 20)), draw(st.integers(0, 3))
    parts = {}
    if draw(st.booleans()):
        parts["rotary"] = dict(interleaved=draw(st.booleans()), base=draw(st.sampled_from([10.0, 1e4])))
    if draw(st.booleans()):
        parts["qk_norm"] = dict(center=draw(st.booleans()), query=normal(sizes["D"], seed=9))
    if draw(st.booleans()):
        parts |= dict(bias_k=normal(G * sizes["D"], seed=7), bias_v=normal(G * sizes["E"], seed=8))
    parts["add_zero_attn"] = draw(st.booleans())
    own, options = draw(st.booleans()), {}
    total = count if own else keys
    if draw(st.booleans()):
        options["kv_lengths"] = np.array(draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch)), int)
    if draw(st.booleans()):
        options["q_offset"] = draw(st.integers(-5, 20))
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(*[st.none() | st.integers(-3, 9)] * 2))
    if draw(st.booleans()):
        options["mask"] = rng(10).random((count, total)) < 0.7
    if draw(st.booleans()):
        options["sinks"] = normal(sizes["H"], seed=11)
    options["causal"] = draw(st.booleans())
    given = arguments(width=width, **sizes) | parts
    x, context = normal(batch, count, width), normal(batch, keys, width, seed=1)
    layer, oracle = MultiHeadAttention(**given), reference.MultiHeadAttention(**given)
    inputs = (x,) if own else (x, context)
    out, weights = layer(*inputs, **options, return_weights=True)
    expected, expected_weights = oracle(*inputs, **options, return_weights=True)
    assert_close(out, expected)
    assert_close(weights, expected_weights)


# Axes, layouts and values of what comes in.


def test_without_a_batch():
    layer, _ = both("all")
    x, context = normal(B, M, WIDTH), normal(B, N, WIDTH, seed=1)
    out, weights = layer(x, context, return_weights=True)
    one, one_weights = layer(x[0], context[0], return_weights=True)
    assert one.shape == (M, OUT) and one_weights.shape == (H, M, N + 2)
    assert_close(one, out[0])
    assert_close(one_weights, weights[0])
    assert_close(layer(x[0]), layer(x)[0])


@pytest.mark.parametrize("parts", ["plain", "all"])
def test_one_context_for_all_batches(parts):
    layer, _ = both(parts)
    x, context = normal(B, M, WIDTH), normal(N, WIDTH, seed=1)
    expected = layer(x, np.stack([context] * B))
    assert_close(layer(x, context), expected)
    assert_close(layer(x, context[None]), expected)
    assert_close(layer(x, context, value_context=context[None]), expected)


@pytest.mark.parametrize("parts", ["plain", "all"])
def test_batch_second(parts):
    given = arguments() | PARTS[parts]
    layer, other = MultiHeadAttention(**given), MultiHeadAttention(**given, batch_first=False)
    x, context = normal(B, M, WIDTH), normal(B, N, WIDTH, seed=1)
    swapped = x.swapaxes(0, 1), context.swapaxes(0, 1)
    options = dict(kv_lengths=[3, N])
    assert_close(other(*swapped, **options), layer(x, context, **options).swapaxes(0, 1))
    assert_close(other(swapped[0], causal=True), layer(x, causal=True).swapaxes(0, 1))
    assert_close(other(x[0]), layer(x[0]))
    oracle = reference.MultiHeadAttention(**given, batch_first=False)
    out, weights = other(*swapped, return_weights=True)
    expected, expected_weights = oracle(*swapped, return_weights=True)
    assert_close(out, expected)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("parts", ["plain", "all"])
@pytest.mark.parametrize("shape", [(0, M), (B, 0), (0, 0)])
def test_empty_axes(shape, parts):
    layer, oracle = both(parts)
    x = normal(*shape, WIDTH)
    for context in None, normal(shape[0], N, WIDTH):
        out, weights = layer(x, context, return_weights=True)
        expected, expected_weights = oracle(x, context, return_weights=True)
        assert out.shape == expected.shape and weights.shape == expected_weights.shape


def test_nothing_to_attend_to_gives_the_last_bias():
    layer, oracle = both()
    x, context = normal(B, M, WIDTH), normal(B, 0, WIDTH)
    out = layer(x, context)
    np.testing.assert_array_equal(out, np.broadcast_to(layer.out_proj_bias, out.shape))
    layer, oracle = both("extra key")
    assert_close(layer(x, context), oracle(x, context))


def test_an_extra_key_that_counts_as_hidden():
    """As its score is -inf; where nothing else is seen, all weights are 0."""
    given = dict(in_proj_weight=ones((3, 1)), out_proj_weight=ones((1, 1)), bias_k=[-np.inf], bias_v=[3.0])
    layer, oracle = MultiHeadAttention(1, 1, **given), reference.MultiHeadAttention(1, 1, **given)
    x, mask = np.array([[1.0], [2.0]]), np.array([[True, False], [False, False]])
    out, weights = layer(x, mask=mask, return_weights=True)
    expected, expected_weights = oracle(x, mask=mask, return_weights=True)
    assert_close(out, expected)
    assert_close(weights, expected_weights)
    np.testing.assert_array_equal(weights, [[[1, 0, 0], [0, 0, 0]]])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    """Of inputs and weights, which stay as they are."""
    x, context = normal(B, M, WIDTH, dtype=float32), normal(B, N, WIDTH, dtype=float32, seed=1)
    given = arguments(dtype=float32)
    laid = {name: layout(array) if np.ndim(array) > 1 else array for name, array in given.items()}
    inputs = layout(x), layout(context)
    kept = [np.array(array) for array in (*inputs, laid["in_proj_weight"], laid["out_proj_weight"])]
    plain = {name: np.array(array) if np.ndim(array) else array for name, array in laid.items()}
    expected = MultiHeadAttention(**plain, rotary=True, qk_norm=True)(np.array(inputs[0]), np.array(inputs[1]))
    layer = MultiHeadAttention(**laid, rotary=True, qk_norm=True)
    assert_close(layer(*inputs), expected, 2e-6)
    for array, before in zip((*inputs, laid["in_proj_weight"], laid["out_proj_weight"]), kept):
        np.testing.assert_array_equal(array, before)


def test_the_heads_are_not_copied_before_the_last_projection(monkeypatch):
    layer, _ = both()
    seen = []
    own = sdpa._layer.layer.attend
    monkeypatch.setattr(sdpa._layer.layer, "attend", lambda *a, **options: seen.append(own(*a, **options)) or seen[0])
    layer(normal(B, M, WIDTH))
    heads = seen[0][0].swapaxes(1, 2)
    assert heads.shape == (B, M, H, E) and heads.flags.c_contiguous


def test_what_is_past_a_length_has_no_influence():
    layer, _ = both("all")
    x = normal(B, M, WIDTH)
    cut = x.copy()
    cut[0, 4:] = nan
    out = layer(cut, causal=True, kv_lengths=[4, M])
    assert_close(out[0, :4], layer(x[:1, :4], causal=True)[0])
    assert_close(out[1], layer(x, causal=True)[1])
    assert np.isnan(out[0, 4:]).all()


def test_nan_reaches_those_who_see_it():
    layer, _ = both("rotary")
    x = normal(1, M, WIDTH)
    expected = layer(x, causal=True)
    x[0, 5] = nan
    out = layer(x, causal=True)
    assert np.isnan(out[0, 5:]).all()
    assert_close(out[0, :5], expected[0, :5])


def test_large_numbers_overflow_silently():
    layer, _ = both("all", dtype=float16)
    out = layer(np.full((1, 3, WIDTH), 6e4, float16))
    assert out.dtype == float16 and out.shape == (1, 3, OUT)


def test_numbers_that_another_dtype_does_not_have_are_rounded_silently():
    """In weights, biases, norms and extra keys; whatever NumPy was told to do about such numbers."""
    large, small = 1e300, 1e-300
    for size in large, small:
        parts = dict(bias_k=np.full(4, size), bias_v=np.full(4, size), qk_norm=dict(query=np.full(4, size), eps=large))
        layer = MultiHeadAttention(
            4, 1, in_proj_weight=np.full((12, 4), size), in_proj_bias=np.full(12, size),
            out_proj_weight=np.full((4, 4), size), out_proj_bias=np.full(4, size), **parts,
        )  # fmt: skip
        for dtype in float16, bfloat16, float32:
            with np.errstate(under="raise", over="warn"):
                out, _ = layer(np.ones((3, 4), dtype), return_weights=True)
            assert out.dtype == dtype and (size == large or not out.any())


# Caches.


def kept(cache):
    return [np.array(array) for array in (cache.keys, cache.values, cache.lengths)]


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 1, 3], [9]], ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_step_by_step(kernel, parts, chunks):
    layer, oracle = both(parts)
    x = normal(B, M, WIDTH)
    expected, expected_weights = oracle(x, causal=True, return_weights=True)
    cache, other = layer.new_cache(B, dtype=float64), layer.new_cache(B, dtype=float64)
    begin = 0
    for count in chunks:
        rows = slice(begin, begin := begin + count)
        assert_close(layer(x[:, rows], cache=cache), expected[:, rows])
        out, weights = layer(x[:, rows], cache=other, return_weights=True)
        assert_close(out, expected[:, rows])
        extra = expected_weights.shape[-1] - M
        seen = np.concatenate([expected_weights[:, :, rows, :begin], expected_weights[:, :, rows, M:]], axis=-1)
        assert weights.shape == (B, H, count, begin + extra)
        assert_close(weights, seen)
    assert len(cache) == M


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16])
def test_steps_in_other_dtypes(dtype):
    layer, oracle = both("rotary", dtype=dtype)
    x = normal(B, M, WIDTH, dtype=dtype)
    cache = layer.new_cache(B, dtype=dtype)
    steps = np.concatenate([layer(x[:, i : i + 1], cache=cache) for i in range(M)], axis=1)
    assert steps.dtype == dtype
    assert_close(steps.astype(float64), oracle(x, causal=True), 10 * eps(dtype))


@pytest.mark.parametrize("parts", ["plain", "all"])
def test_batches_of_different_lengths(parts):
    """Prompts padded behind, then single tokens: as each batch on its own."""
    layer, oracle = both(parts)
    x, lengths = normal(3, 8, WIDTH), [5, 0, 8]
    more = normal(3, 2, WIDTH, seed=1)
    cache = layer.new_cache(3, dtype=float64)
    out, weights = layer(x, cache=cache, kv_lengths=lengths, return_weights=True)
    assert cache.lengths.tolist() == lengths
    steps = [layer(more[:, i : i + 1], cache=cache) for i in range(2)]
    for b, length in enumerate(lengths):
        whole, whole_weights = oracle(np.concatenate([x[b, :length], more[b]]), causal=True, return_weights=True)
        assert_close(out[b, :length], whole[:length])
        assert_close(weights[b, :, :length, :length], whole_weights[:, :length, :length])
        assert_close(np.concatenate([step[b] for step in steps]), whole[length:])


def test_options_with_a_cache():
    layer, oracle = both("rotary")
    x = normal(B, M, WIDTH)
    for name in "window", "bias of heads", "softcap", "sinks", "alibi", "mask of keys":
        options = OPTIONS[name](B, H, M, M)
        cache = layer.new_cache(B, dtype=float64)
        start = {key: array[..., :5] if key in ("mask", "bias") else array for key, array in options.items()}
        first = layer(x[:, :5], cache=cache, **start)
        out = np.concatenate([first, layer(x[:, 5:], cache=cache, **options)], axis=1)
        assert_close(out, oracle(x, causal=True, **options))


def test_not_causal_and_q_offset_with_a_cache():
    layer, oracle = both()
    x = normal(B, M, WIDTH)
    cache = layer.new_cache(B, dtype=float64)
    layer(x[:, :5], cache=cache)
    fork = cache.fork()
    assert_close(layer(x[:, 5:], cache=cache, causal=False), oracle(x)[:, 5:])
    assert_close(layer(x[:, 5:], cache=fork, q_offset=2), oracle(x[:, 5:], x, causal=True, q_offset=2))


@pytest.mark.parametrize("parts", ["rotary", "zero key"])
def test_a_cache_with_a_window(parts):
    layer, oracle = both(parts)
    x = normal(1, 30, WIDTH)
    cache = layer.new_cache(window=7, dtype=float64)
    steps = np.concatenate([layer(x[:, i : i + 1], cache=cache) for i in range(30)], axis=1)
    assert_close(steps, oracle(x, causal=True, window=(6, 0)))


def test_a_cache_of_int8():
    layer, oracle = both("rotary")
    x = normal(B, M, WIDTH)
    cache = layer.new_cache(B, dtype=np.int8)
    steps = np.concatenate([layer(x[:, i : i + 1], cache=cache) for i in range(M)], axis=1)
    assert 0 < abs(steps - oracle(x, causal=True)).max() < 0.03


@pytest.mark.parametrize("parts", ["plain", "all"])
def test_cross_attention_over_a_cache(parts):
    """The context is appended once; one without rows adds nothing."""
    layer, oracle = both(parts, kdim=10, vdim=10)
    x, context = normal(B, 3, WIDTH), normal(B, N, 10, seed=1)
    cache = layer.new_cache(B, dtype=float64)
    steps = [layer(x[:, :1], context, cache=cache, q_offset=0)]
    steps += [layer(x[:, i : i + 1], context[:, :0], cache=cache, q_offset=i) for i in (1, 2)]
    assert len(cache) == N
    assert_close(np.concatenate(steps, axis=1), oracle(x, context, q_offset=0))
    ragged, one = layer.new_cache(B, dtype=float64), layer.new_cache(B, dtype=float64)
    out, weights = layer(x, context, cache=ragged, kv_lengths=[N, 4], return_weights=True)
    expected, expected_weights = oracle(x, context, kv_lengths=[N, 4], return_weights=True)
    assert_close(out, expected)
    assert_close(weights, expected_weights)
    assert_close(layer(x, context[:1], cache=one), oracle(x, context[:1]))


@pytest.mark.parametrize("parts", ["plain", "all"])
def test_one_context_for_all_batches_behind_different_lengths(parts):
    """It is appended to each, at positions of its own."""
    layer, _ = both(parts)
    x, lengths = normal(B, 3, WIDTH), [2, 5]
    first, second = normal(B, 5, WIDTH, seed=1), normal(1, 4, WIDTH, seed=2)
    caches = [layer.new_cache(B, dtype=float64) for _ in range(2)]
    for cache in caches:
        layer(x, first, cache=cache, kv_lengths=lengths)
    expected = layer(x, np.concatenate([second] * B), cache=caches[1])
    assert_close(layer(x, second, cache=caches[0]), expected)
    for b, length in enumerate(lengths):
        whole = np.concatenate([first[b, :length], second[0]])
        assert_close(expected[b], layer(x[b], whole))


def test_as_many_rows_in_the_context_as_in_x():
    """The last query stands at the last key, though the cache was given lengths for as many rows."""
    layer, oracle = both("rotary")
    x, context, lengths = normal(B, M, WIDTH), normal(B, M, WIDTH, seed=1), [4, M]
    cache = layer.new_cache(B, dtype=float64)
    out = layer(x, context, cache=cache, kv_lengths=lengths, causal=True)
    assert_close(out, oracle(x, context, kv_lengths=lengths, causal=True))


WRONG_OPTIONS = [
    dict(mask=np.ones((3, 3))), dict(bias=np.ones((7, 7))), dict(window=3), dict(softcap=-1), dict(scale="x"),
    dict(sinks=[1, 2, 3]), dict(threads=0), dict(causal=1), dict(q_offset=0.5),
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("parts", ["plain", "all"])
def test_an_error_appends_nothing(parts, options):
    layer, _ = both(parts)
    cache = layer.new_cache(B, dtype=float64)
    layer(normal(B, 4, WIDTH), cache=cache)
    before = kept(cache)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        layer(normal(B, 2, WIDTH), cache=cache, **options)
    for array, expected in zip(kept(cache), before):
        np.testing.assert_array_equal(array, expected)
    windowed = layer.new_cache(B, dtype=float64, window=3)
    x = normal(B, 8, WIDTH)
    expected = layer(x, causal=True, window=(2, 0))
    assert_close(layer(x[:, :6], cache=windowed), expected[:, :6])
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        layer(x[:, 6:], cache=windowed, **options)
    assert_close(layer(x[:, 6:], cache=windowed), expected[:, 6:])
    pages = PagedKVCache(8, 4, G, D, value_dim=E, dtype=float64)
    sequence = pages.allocate()
    layer(normal(4, WIDTH), cache=pages, sequences=sequence)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        layer(normal(2, WIDTH), cache=pages, sequences=sequence, **options)
    assert pages.length(sequence) == 4 and pages.free_pages == 7


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("dtype", [float64, np.int8])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_a_call_that_fails_leaves_no_trace_in_a_cache(window, keep, dtype):
    """Whatever comes before and after, prompts, tokens and lengths that differ: as in a cache that saw no such call."""
    layer, _ = both()
    options = dict(dtype=dtype, window=window, keep=keep if window else 0)
    cache, other = layer.new_cache(B, **options), layer.new_cache(B, **options)
    forks, draw = [], rng(4)
    for step in range(100):
        count = int(draw.choice([1, 1, 1, 2, 7, 20]))
        x, query = normal(B, count, WIDTH, seed=step), normal(B, H, count, D, seed=step)
        lengths = None if draw.random() < 0.7 else draw.integers(0, count + 1, B)
        if draw.random() < 0.2:
            forks.append((cache.fork(), other.fork()))
        assert_same_bits(*(layer(x, cache=one, kv_lengths=lengths) for one in (cache, other)))
        for more in draw.choice([1, 1, 3, 25], draw.integers(0, 3)).tolist():
            some = None if draw.random() < 0.7 else draw.integers(0, more + 1, B)
            with pytest.raises(TypeError, match="mask"):
                layer(normal(B, more, WIDTH), cache=cache, kv_lengths=some, mask=ones((2, 2)))
        np.testing.assert_array_equal(cache.lengths, other.lengths)
        assert cache.keys.shape == other.keys.shape
        assert_same_bits(cache.attend(query), other.attend(query))
        if draw.random() < 0.3:  # what was appended last can be forgotten
            forgotten = draw.integers(0, (count if lengths is None else lengths) + np.ones(B, int))
            for one in cache, other:
                one.truncate(one.lengths - forgotten)
    for one, two in forks:
        assert_same_bits(*(layer(normal(B, 1, WIDTH), cache=fork) for fork in (one, two)))


def test_a_call_that_fails_leaves_no_trace_in_pages():
    """Reserved pages stay reserved, shared ones shared, and free ones in order."""
    layer, _ = both()
    cache, other = (PagedKVCache(60, 4, G, D, value_dim=E, dtype=float64) for _ in range(2))
    draw, sequences = rng(5), []
    for step in range(80):
        if draw.random() < 0.2 or len(sequences) < 3:
            reserved = int(draw.integers(0, 9))
            old = draw.choice(sequences) if sequences and draw.random() < 0.7 else None
            for one in cache, other:
                number = one.allocate(reserved) if old is None else one.fork(old)
            sequences.append(number)
        if len(sequences) > 6:
            number = sequences.pop(int(draw.integers(6)))
            for one in cache, other:
                one.free(number)
        few = draw.permutation(sequences)[: draw.integers(1, 4)]
        starts = np.cumsum([0, *draw.integers(0, 6, len(few))])
        with pytest.raises(TypeError, match="mask"):
            layer(normal(starts[-1], WIDTH), cache=cache, sequences=few, cu_seqlens=starts, mask=ones((2, 2)))
        assert (cache._pool.free, cache._pool.owners) == (other._pool.free, other._pool.owners)
        few = draw.permutation(sequences)[: draw.integers(1, 3)]
        x = normal(len(few), WIDTH, seed=step)
        assert_same_bits(*(layer(x, cache=one, sequences=few) for one in (cache, other)))
        for number in sequences:
            assert cache.pages_of(number) == other.pages_of(number)
            if cache.length(number):
                assert_same_bits(*(one.attend(normal(H, 1, D), number) for one in (cache, other)))


@pytest.mark.parametrize("parts", PARTS)
def test_pages(kernel, parts):
    """Sequences of their own lengths, packed: as each one on its own."""
    layer, oracle = both(parts)
    cache = PagedKVCache(40, 4, G, D, value_dim=E, dtype=float64)
    prompts = [normal(count, WIDTH, seed=count) for count in (5, 3, 6)]
    new = normal(6, WIDTH)
    first = cache.allocate()
    outs = [[layer(prompts[0], cache=cache, sequences=first)], [], []]
    sequences = [first, cache.allocate(), cache.allocate()]
    packed = layer(np.concatenate(prompts[1:]), cache=cache, sequences=sequences[1:], cu_seqlens=[0, 3, 9])
    outs[1].append(packed[:3])
    outs[2].append(packed[3:])
    for rows in new[:3], new[3:]:  # one token for each
        for out, row in zip(outs, layer(rows, cache=cache, sequences=sequences)):
            out.append(row[None])
    assert [cache.length(sequence) for sequence in sequences] == [7, 5, 8]
    for b, (prompt, out) in enumerate(zip(prompts, outs)):
        whole = np.concatenate([prompt, new[b : b + 1], new[3 + b : 4 + b]])
        assert_close(np.concatenate(out), oracle(whole, causal=True))


def test_sequences_from_a_generator():
    layer, _ = both("rotary")
    x, outs = normal(2, WIDTH), []
    for kind in list, iter, lambda numbers: (number for number in numbers):
        cache = PagedKVCache(40, 4, G, D, value_dim=E, dtype=float64)
        sequences = [cache.allocate(), cache.allocate()]
        outs.append(layer(x, cache=cache, sequences=kind(sequences)))
        assert [cache.length(sequence) for sequence in sequences] == [1, 1]
    assert_same_bits(outs[1], outs[0])
    assert_same_bits(outs[2], outs[0])


def test_as_many_rows_as_sequences_in_pages_and_all_of_one():
    layer, oracle = both("rotary")
    cache = PagedKVCache(40, 4, G, D, value_dim=E, dtype=float64)
    x = normal(2, WIDTH)
    out = layer(x, cache=cache, sequences=[cache.allocate(), cache.allocate()], cu_seqlens=[0, 0, 2])
    assert_close(out, oracle(x, causal=True))


def test_pages_with_offsets():
    layer, oracle = both("rotary")
    cache = PagedKVCache(40, 4, G, D, value_dim=E, dtype=float64)
    sequences = [cache.allocate(), cache.allocate()]
    x = normal(7, WIDTH)
    layer(x, cache=cache, sequences=sequences, cu_seqlens=[0, 4, 7])
    out = layer(x[:3], cache=cache, sequences=sequences, cu_seqlens=[0, 1, 3], q_offset=[2, 1], causal=False)
    assert_close(out[:1], oracle(x[:1], np.concatenate([x[:4], x[:1]]), q_offset=2))
    assert_close(out[1:], oracle(x[1:3], np.concatenate([x[4:], x[1:3]]), q_offset=1))


# Engine.


@pytest.mark.parametrize("parts", ["plain", "all"])
def test_threads(parts):
    given = arguments(dtype=float32) | PARTS[parts]
    x = normal(B, M, WIDTH, dtype=float32)
    layer = MultiHeadAttention(**given)
    assert layer.threads is None and MultiHeadAttention(**given, threads=1).threads == 1
    expected = layer(x)
    for threads in 1, 2:
        assert_same_bits(layer(x, threads=threads), expected)
        assert_same_bits(MultiHeadAttention(**given, threads=threads)(x), expected)


def test_the_threads_of_a_call_go_before_those_of_the_layer(monkeypatch):
    seen = []

    def attention(*arrays, threads, **options):
        seen.append(threads)
        return sdpa.attention(*arrays, threads=threads, **options)

    monkeypatch.setattr(sdpa._layer.keys, "attention", attention)
    layer = MultiHeadAttention(**arguments(), threads=2)
    layer(normal(M, WIDTH))
    layer(normal(M, WIDTH), threads=1)
    assert seen == [2, 1]


def test_first_calls_at_once():
    """Weights are prepared at the first call; several may come first."""
    given = arguments(dtype=bfloat16)
    x = normal(B, M, WIDTH, dtype=float32)
    expected = MultiHeadAttention(**given)(x)
    for _ in range(5):
        layer, outs, start = MultiHeadAttention(**given), [], threading.Barrier(4)

        def call(layer=layer, outs=outs, start=start):
            start.wait()
            outs.append(layer(x))

        workers = [threading.Thread(target=call) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(outs) == 4
        for out in outs:
            assert_same_bits(out, expected)


def test_pickled_without_what_kernels_read():
    """Which is for one kernel of one version of the library, and as large as the weights."""
    layer, _ = both("all", width=300)
    x, size = normal(B, M, 300), len(pickle.dumps(layer))
    expected = layer(x)
    assert len(pickle.dumps(layer)) < 1.1 * size
    for twin in pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer):
        assert_same_bits(twin(x), expected)
        assert_same_bits(twin(x, cache=twin.new_cache(B, dtype=float64)), layer(x, causal=True))


@pytest.mark.parametrize("dtype, whole", [(float16, 2048), (bfloat16, 256)])
def test_half_types_are_rounded_once(dtype, whole):
    """Above `whole` only every other number exists, so sums would stop there, or lose a one before the bias comes."""
    row = np.ones((1, 4 * whole), dtype)
    assert Linear(row)(row) == 4 * whole
    row = row[:, : whole + 1]
    out = Linear(row, np.ones(1, dtype))(row)
    assert out.dtype == dtype and out == whole + 2


def test_the_norm_of_half_types_is_float32():
    """The squares of queries and keys of 1000 are too large for float16."""
    given = arguments(dtype=float16) | dict(qk_norm=True)
    given["in_proj_weight"] = given["in_proj_weight"] * float16(1000)
    given["out_proj_weight"] = given["out_proj_weight"] / float16(1000)
    layer, oracle = MultiHeadAttention(**given), reference.MultiHeadAttention(**given)
    x = normal(B, M, WIDTH, dtype=float16)
    assert_close(layer(x).astype(float64), oracle(x), 0.01)


def test_separate_weights_of_different_dtypes_keep_their_numbers():
    given = arguments(kdim=WIDTH)
    dtypes = dict(q_proj_weight=float16, k_proj_weight=bfloat16, v_proj_weight=float16)
    given |= {name: given[name].astype(dtype) for name, dtype in dtypes.items()}
    layer = MultiHeadAttention(**given)
    assert layer.in_proj_weight.dtype == float32 and not layer.in_proj_weight.flags.writeable
    for name in dtypes:
        np.testing.assert_array_equal(getattr(layer, name), given[name].astype(float32))
    assert MultiHeadAttention(**given | dict(k_proj_weight=np.ones((G * D, WIDTH)))).in_proj_weight.dtype == float64


# What it says of itself.


def test_attributes():
    given = arguments() | PARTS["all"]
    layer = MultiHeadAttention(**given)
    assert (layer.embed_dim, layer.num_heads, layer.kv_heads) == (WIDTH, H, G)
    assert (layer.head_dim, layer.value_dim, layer.kdim, layer.vdim, layer.out_dim) == (D, E, WIDTH, WIDTH, OUT)
    assert layer.rotary == 1000.0 and layer.qk_norm is True and layer.add_zero_attn is True and layer.batch_first
    for name in "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "bias_k", "bias_v":
        array = getattr(layer, name)
        np.testing.assert_array_equal(array, given[name])
        assert np.shares_memory(array, given[name]) and not array.flags.writeable
        assert given[name].flags.writeable
    parts = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    np.testing.assert_array_equal(np.concatenate(parts), given["in_proj_weight"])
    assert not any(part.flags.writeable for part in parts)
    separate = MultiHeadAttention(**arguments(kdim=3, vdim=4))
    assert separate.in_proj_weight is None and separate.v_proj_weight.shape == (G * E, 4)


def test_repr():
    def shown(**more):
        return repr(MultiHeadAttention(**arguments(**more.pop("sizes", {})) | more))

    assert shown() == "<sdpa.MultiHeadAttention 24 to 17, 4 heads of 6 and 5 on 2, float64>"
    sizes = dict(G=4, E=6, kdim=3, dtype=float32)
    assert shown(sizes=sizes, batch_first=False) == (
        "<sdpa.MultiHeadAttention 24 to 17, 4 heads of 6, contexts of 3 and 24, float32, batch second>"
    )
    assert shown(**PARTS["all"]).endswith("float64, rotary, qk_norm, bias_kv, add_zero_attn>")


def test_new_cache():
    layer, _ = both()
    cache = layer.new_cache(3, dtype=float16, capacity=50, window=10, keep=2)
    sizes = cache.batch, cache.kv_heads, cache.head_dim, cache.value_dim, cache.capacity, cache.window, cache.keep
    assert sizes == (3, G, D, E, 50, 10, 2) and cache.dtype == float16
    assert layer.new_cache().batch == 1 and layer.new_cache().dtype == float32


# Errors.


def raises(error, parts):
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


ones = np.ones
MADE_WRONG = {
    "embed_dim 0": (ValueError, dict(embed_dim=0), ["embed_dim", "0", "1 or more"]),
    "embed_dim of float": (TypeError, dict(embed_dim=24.0), ["embed_dim", "24.0", "whole number"]),
    "num_heads of text": (TypeError, dict(num_heads="4"), ["num_heads", "'4'", "whole number"]),
    "kv_heads": (ValueError, dict(kv_heads=3), ["num_heads is 4", "kv_heads 3", "multiple"]),
    "head_dim": (ValueError, dict(head_dim=None, num_heads=5, kv_heads=5), ["embed_dim is 24", "5", "head_dim"]),
    "value_dim 0": (ValueError, dict(value_dim=0), ["value_dim", "0"]),
    "no weights": (ValueError, dict(in_proj_weight=None), ["in_proj_weight is missing"]),
    "one weight": (
        ValueError,
        dict(in_proj_weight=None, q_proj_weight=ones((24, 24)), v_proj_weight=ones((10, 24))),
        ["k_proj_weight is missing"],
    ),
    "both weights": (ValueError, dict(k_proj_weight=ones((12, 24))), ["in_proj_weight and k_proj_weight"]),
    "kdim and in_proj_weight": (ValueError, dict(kdim=3), ["in_proj_weight", "24, 3, 24", "equal"]),
    "shape of in_proj_weight": (ValueError, dict(in_proj_weight=ones((24, 46))), ["(24, 46)", "(46, 24)", "embed_dim"]),
    "axes of in_proj_weight": (ValueError, dict(in_proj_weight=ones(46)), ["in_proj_weight", "(46,)", "(46, 24)"]),
    "dtype of in_proj_weight": (TypeError, dict(in_proj_weight=ones((46, 24), int)), ["in_proj_weight", "int64"]),
    "shape of in_proj_bias": (ValueError, dict(in_proj_bias=ones(45)), ["in_proj_bias", "(45,)", "(46,)"]),
    "shape of out_proj_weight": (ValueError, dict(out_proj_weight=ones((20, 17))), ["(20, 17)", "(any, 20)"]),
    "None as out_proj_weight": (TypeError, dict(out_proj_weight=None), ["out_proj_weight", "object"]),
    "masked out_proj_weight": (TypeError, dict(out_proj_weight=np.ma.ones((17, 20))), ["out_proj_weight", "masked"]),
    "shape of out_proj_bias": (ValueError, dict(out_proj_bias=ones((17, 1))), ["out_proj_bias", "(17, 1)", "(17,)"]),
    "bias_k alone": (ValueError, dict(bias_k=ones(12)), ["bias_k is given and bias_v is not"]),
    "bias_v alone": (ValueError, dict(bias_v=ones(10)), ["bias_v is given and bias_k is not"]),
    "shape of bias_k": (ValueError, dict(bias_k=ones(10), bias_v=ones(10)), ["bias_k", "(10,)", "(12,)"]),
    "add_zero_attn": (TypeError, dict(add_zero_attn=1), ["add_zero_attn is 1", "True or False"]),
    "batch_first": (TypeError, dict(batch_first=None), ["batch_first is None", "True or False"]),
    "rotary False": (TypeError, dict(rotary=False), ["rotary is False", "True, a base, a dict"]),
    "rotary text": (TypeError, dict(rotary="yes"), ["rotary is 'yes'"]),
    "key of rotary": (TypeError, dict(rotary=dict(theta=1)), ["rotary", "'theta'", "base, interleaved, dim"]),
    "base of rotary": (ValueError, dict(rotary=-1.0), ["base is -1.0", "above 0"]),
    "dim of rotary": (ValueError, dict(rotary=dict(dim=8)), ["dim is 8", "6"]),
    "odd head_dim": (
        ValueError,
        dict(rotary=True, head_dim=5, in_proj_weight=ones((40, 24)), in_proj_bias=None),
        ["head_dim is 5", "even"],
    ),
    "qk_norm": (TypeError, dict(qk_norm=False), ["qk_norm is False"]),
    "pre_norm": (TypeError, dict(pre_norm="rms"), ["pre_norm is 'rms'", "weight, bias, eps, center"]),
    "key of post_norm": (
        TypeError,
        dict(post_norm=dict(gamma=1)),
        ["post_norm", "'gamma'", "weight, bias, eps"],
    ),
    "shape of pre_norm": (ValueError, dict(pre_norm=dict(bias=ones(5))), ["bias of pre_norm", "(5,)"]),
    "key of qk_norm": (TypeError, dict(qk_norm=dict(q=1)), ["qk_norm", "'q'", "query, key, eps, center"]),
    "shape of qk_norm": (ValueError, dict(qk_norm=(ones(6), ones(24))), ["key of qk_norm", "(24,)", "(6,)"]),
    "eps of qk_norm": (ValueError, dict(qk_norm=dict(eps=-1)), ["eps of qk_norm is -1", "0 or more"]),
    "eps of text": (TypeError, dict(qk_norm=dict(eps="1")), ["eps of qk_norm is '1'", "number"]),
    "center of qk_norm": (TypeError, dict(qk_norm=dict(center=0)), ["center of qk_norm is 0", "True or False"]),
    "threads": (ValueError, dict(threads=0), ["threads is 0", "1 or more"]),
}


@pytest.mark.parametrize("error, changes, parts", MADE_WRONG.values(), ids=MADE_WRONG)
def test_what_cannot_be_made(error, changes, parts):
    with raises(error, parts):
        MultiHeadAttention(**arguments() | changes)


def test_out_proj_weight_is_needed():
    with pytest.raises(TypeError, match="out_proj_weight"):
        MultiHeadAttention(4, 2, in_proj_weight=ones((12, 4)))


X, C = ones((B, M, WIDTH)), ones((B, N, WIDTH))
PAGES = PagedKVCache(4, 2, G, D, value_dim=E, dtype=float64)
CALLED_WRONG = {
    "integers": (TypeError, (X.astype(int),), {}, ["x has dtype int64"]),
    "no array": (TypeError, ("x",), {}, ["x has dtype <U1"]),
    "width of x": (ValueError, (X[..., 1:],), {}, ["x has shape (2, 9, 23)", "24"]),
    "axes of x": (ValueError, (X[None],), {}, ["x has shape (1, 2, 9, 24)", "two or three axes"]),
    "one axis": (ValueError, (X[0, 0],), {}, ["x has shape (24,)"]),
    "width of context": (ValueError, (X, C[..., 1:]), {}, ["context has shape (2, 13, 23)"]),
    "dtype of context": (TypeError, (X, C.astype(float32)), {}, ["context has dtype float32", "float64", "equal"]),
    "batch of context": (ValueError, (X, ones((3, N, WIDTH))), {}, ["context has a batch of 3", "x one of 2"]),
    "context with a batch, x without": (ValueError, (X[0], C), {}, ["context has a batch of 2", "x one of 1"]),
    "value_context alone": (ValueError, (X,), dict(value_context=C), ["value_context", "context is None"]),
    "rows of value_context": (ValueError, (X, C), dict(value_context=C[:, 1:]), ["13 rows", "12", "equal"]),
    "batch of value_context": (ValueError, (X, C), dict(value_context=ones((3, N, WIDTH))), ["value_context", "3"]),
    "positions without rotary": (ValueError, (X,), dict(positions=3), ["positions is 3", "without rotary"]),
    "return_weights": (TypeError, (X,), dict(return_weights=1), ["return_weights is 1", "True or False"]),
    "causal": (TypeError, (X,), dict(causal=0), ["causal is 0", "True or False"]),
    "kv_lengths too large": (ValueError, (X,), dict(kv_lengths=[3, 10]), ["kv_lengths", "10", "9 keys"]),
    "negative kv_lengths of a context": (ValueError, (X, C), dict(kv_lengths=[-1, 3]), ["kv_lengths", "-1", "13 keys"]),
    "kv_lengths of float": (TypeError, (X,), dict(kv_lengths=[1.0, 2.0]), ["kv_lengths", "float64"]),
    "kv_lengths for three": (ValueError, (X,), dict(kv_lengths=[1, 2, 3]), ["kv_lengths", "(3,)"]),
    "mask": (TypeError, (X,), dict(mask=ones((M, M))), ["mask has dtype float64"]),
    "shape of mask": (ValueError, (X,), dict(mask=ones((M, N), bool)), ["mask has shape (9, 13)", "(2, 4, 9, 9)"]),
    "threads": (TypeError, (X,), dict(threads="2"), ["threads is '2'"]),
    "cache": (TypeError, (X,), dict(cache={}), ["cache is of type dict", "KVCache"]),
    "sizes of the cache": (ValueError, (X,), dict(cache=sdpa.KVCache(B, G, D)), ["(2, 6, 6)", "(2, 6, 5)"]),
    "batch of the cache": (
        ValueError, (X,), dict(cache=sdpa.KVCache(3, G, D, value_dim=E)), ["x has a batch of 2", "cache one of 3"],
    ),
    "dtype of the cache": (
        TypeError, (X.astype(float32),), dict(cache=sdpa.KVCache(B, G, D, value_dim=E, dtype=float64)),
        ["cache has dtype float64 and x float32", "narrower"],
    ),
    "another half type in the cache": (
        TypeError, (X.astype(bfloat16),), dict(cache=sdpa.KVCache(B, G, D, value_dim=E, dtype=float16)),
        ["cache has dtype float16 and x bfloat16"],
    ),
    "dtype of pages": (
        TypeError, (X[0].astype(float32),), dict(cache=PAGES, sequences=0), ["cache has dtype float64 and x float32"],
    ),
    "sequences without pages": (ValueError, (X,), dict(sequences=0), ["sequences is 0", "PagedKVCache"]),
    "cu_seqlens without pages": (ValueError, (X,), dict(cu_seqlens=[0, 9]), ["cu_seqlens", "PagedKVCache"]),
    "pages without sequences": (ValueError, (X[0],), dict(cache=PAGES), ["sequences is None"]),
    "pages with a batch": (ValueError, (X,), dict(cache=PAGES, sequences=0), ["x has shape (2, 9, 24)", "(rows, 24)"]),
    "pages with context": (ValueError, (X[0], C[0]), dict(cache=PAGES, sequences=0), ["context", "None"]),
    "pages with lengths": (ValueError, (X[0],), dict(cache=PAGES, sequences=0, kv_lengths=3), ["kv_lengths is 3"]),
    "unknown sequence": (ValueError, (X[0],), dict(cache=PAGES, sequences=99), ["sequence 99", "never allocated"]),
    "weights of a window": (
        ValueError, (X,), dict(cache=sdpa.KVCache(B, G, D, value_dim=E, window=3), return_weights=True), ["window 3"],
    ),
    "weights of int8": (
        ValueError, (X,), dict(cache=sdpa.KVCache(B, G, D, value_dim=E, dtype="i1"), return_weights=True), ["int8"],
    ),
    "weights of pages": (
        ValueError, (X[0],), dict(cache=PAGES, sequences=PAGES.allocate(), return_weights=True), ["return_weights"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("error, arrays, options, parts", CALLED_WRONG.values(), ids=CALLED_WRONG)
def test_what_cannot_be_asked(error, arrays, options, parts):
    layer, _ = both()
    with raises(error, parts):
        layer(*arrays, **options)


def test_contexts_that_must_be_given():
    layer, _ = both(kdim=10, vdim=7)
    with raises(ValueError, ["context is None", "24, 10, 7", "must be given"]):
        layer(X)
    with raises(ValueError, ["value_context is None", "24, 10, 7", "must be given"]):
        layer(X, ones((B, N, 10)))


@pytest.mark.parametrize("shape", [(3,), (3, M), (M, 1), (2, 4, M), (1, 1, M)], ids=str)
def test_wrong_positions(shape):
    layer, _ = both("rotary")
    for context in (), (C,):
        with raises(ValueError, ["positions has shape", str(shape), "(9,) or (2, 9)"]):
            layer(X, *context, positions=ones(shape))


def test_what_rotary_cannot_place():
    """Errors are about what was given, not about the positions that follow from it."""
    layer, _ = both("rotary")
    with raises(TypeError, ["positions", "<U1"]):
        layer(X, positions="a")
    with raises(TypeError, ["q_offset", "float64"]):
        layer(X, q_offset=1.5)
    for offset in 2**53, -(2**53), 2**80, [0, 2**60], [-(2**63), 2**63 - 1], 2**53 - M:
        with raises(ValueError, ["q_offset is", str(offset)]):
            layer(X, q_offset=offset)
    layer(X, q_offset=2**53 - M - 1)
    for cache in None, layer.new_cache(B, dtype=float64):
        for lengths in 2**60, [3, N + 1], -1:
            with raises(ValueError, ["kv_lengths", str(lengths), "13 keys"]):
                layer(X, C, kv_lengths=lengths, cache=cache)
