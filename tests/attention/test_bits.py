"""Bit-equality: what must not change a single bit of a result."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import HALF, WIDE, draw, float32, nan, rng
from support.kernels import on_kernels
from support.layouts import LAYOUTS
from support.options import OPTIONS, options_for
from support.together import assert_both_same, both

import sdpa

EACH_ARITHMETIC = on_kernels({"float32": float32, "bfloat16": bfloat16}, half="best")
EACH_DTYPE = on_kernels(WIDE, HALF, half="best")
EACH_OPTION = pytest.mark.parametrize("name", OPTIONS)


@EACH_DTYPE
@EACH_OPTION
def test_two_calls(kernel, name, dtype):
    arrays = draw(dtype=dtype)
    options = options_for(*arrays[:2], name)
    assert_both_same(both(*arrays, **options), both(*[x.copy() for x in arrays], **options))


@EACH_ARITHMETIC
@pytest.mark.parametrize("sizes", [(300, 300), (70, 513), (5, 400), (1, 1000)], ids=str)
@EACH_OPTION
def test_threads(kernel, name, sizes, dtype):
    arrays = draw(M=sizes[0], N=sizes[1], dtype=dtype)
    options = options_for(*arrays[:2], name)
    expected = both(*arrays, threads=1, **options)
    weights = sdpa.attention_weights(*arrays[:2], threads=1, **options)
    for threads in (2, 3, 5):
        assert_both_same(both(*arrays, threads=threads, **options), expected)
        assert_same_bits(sdpa.attention_weights(*arrays[:2], threads=threads, **options), weights)


@EACH_ARITHMETIC
@pytest.mark.parametrize("threads", [2, 3, 5, 16])
def test_threads_with_one_head(kernel, threads, dtype):
    """The rows of one head are shared among the threads."""
    for causal in False, True:
        for M in (17, 64, 65, 200):
            arrays = draw(1, 1, 1, M=M, N=300, dtype=dtype)
            assert_both_same(both(*arrays, causal=causal, threads=threads), both(*arrays, causal=causal, threads=1))


@EACH_DTYPE
@EACH_OPTION
def test_each_batch_and_head_alone(kernel, name, dtype):
    """Heads that share keys stand in one task, so the rows of a head lie in other lanes when it is alone."""
    query, key, value = draw(dtype=dtype)
    options = options_for(query, key, name)
    out, lse = both(query, key, value, **options)
    whole = (*query.shape[:3], key.shape[2])
    for b in range(2):
        for h in range(4):
            part = {}
            for what, option in options.items():
                if what in ("mask", "bias"):
                    option = np.broadcast_to(option, whole)[b, h]
                elif what in ("kv_lengths", "q_offset") and np.ndim(option):
                    option = option[b]
                elif what in ("sinks", "alibi_slopes"):
                    option = np.broadcast_to(option, (2, 4))[b, h : h + 1]
                part[what] = option
            alone = both(query[b, h], key[b, h // 2], value[b, h // 2], **part)
            assert_both_same(alone, (out[b, h], lse[b, h]))


@EACH_DTYPE
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_grouped_heads_and_repeated_keys(kernel, groups, causal, dtype):
    query, key, value = draw(H=8, G=groups, dtype=dtype)
    repeated = [x.repeat(8 // groups, axis=1) for x in (key, value)]
    assert_both_same(both(query, key, value, causal=causal), both(query, *repeated, causal=causal))


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("which", ["query", "key", "value", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, layout, which, dtype):
    arrays = dict(zip(["query", "key", "value"], draw(D=36, E=40, dtype=dtype)))
    for name in arrays if which == "all" else [which]:
        arrays[name] = LAYOUTS[layout](arrays[name])
    copies = {name: np.array(x, order="C") for name, x in arrays.items()}
    for options in ({}, dict(causal=True)):
        assert_both_same(both(**arrays, **options), both(**copies, **options))
    del arrays["value"], copies["value"]
    assert_same_bits(sdpa.attention_weights(**arrays), sdpa.attention_weights(**copies))


@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_mask_and_bias(kernel, layout, dtype):
    arrays = draw(dtype=dtype)
    for bias_dtype in np.float32, np.float64, np.float16, bfloat16:
        mask, bias = rng(0).random((2, 4, 37, 133)) < 0.6, rng(1).standard_normal((2, 4, 37, 133)).astype(bias_dtype)
        mask, bias = LAYOUTS[layout](mask), LAYOUTS[layout](bias)
        copies = np.array(mask, order="C"), np.array(bias, order="C")
        assert_both_same(both(*arrays, mask=mask, bias=bias), both(*arrays, mask=copies[0], bias=copies[1]))


@pytest.mark.parametrize("shape", [(), (133,), (37, 1), (1, 1), (4, 1, 1), (2, 1, 1, 133), (1, 4, 37, 1), (4, 37, 133)])
def test_mask_and_bias_broadcast(kernel, shape):
    arrays = draw()
    mask, bias = rng(0).random(shape) < 0.6, rng(1).standard_normal(shape).astype(np.float32)
    full = [np.broadcast_to(x, (2, 4, 37, 133)).copy() for x in (mask, bias)]
    assert_both_same(both(*arrays, mask=mask, bias=bias), both(*arrays, mask=full[0], bias=full[1]))


@EACH_ARITHMETIC
@pytest.mark.parametrize("cuts", [[17], [32], [64], [18, 40, 61, 90], list(range(19, 137, 19))], ids=str)
@EACH_OPTION
def test_a_subset_of_many_rows(kernel, name, cuts, dtype):
    check_parts(150, cuts, name, "many rows", dtype)


@EACH_ARITHMETIC
@pytest.mark.parametrize("cuts", [[1], [2], [1, 2, 3]], ids=str)
@EACH_OPTION
def test_a_subset_of_few_rows(kernel, name, cuts, dtype):
    check_parts(4, cuts, name, "few rows", dtype)


def check_parts(M, cuts, name, engine, dtype):
    """Rows computed together and in parts, by one engine: the two engines sum in different orders."""
    query, key, value = draw(2, 4, 4, M=M, N=150, dtype=dtype)
    options = options_for(query, key, name)
    out, lse = both(query, key, value, **options)
    offset = options.get("q_offset", options.get("kv_lengths", 150) - np.int64(M))
    for begin, end in zip([0, *cuts], [*cuts, M]):
        part = options | dict(q_offset=offset + begin)
        for what in ("mask", "bias"):
            if what in options:
                part[what] = np.broadcast_to(options[what], (2, 4, M, 150))[:, :, begin:end]
        assert engine in sdpa.explain(query[:, :, begin:end], key, value, **part).engine
        result = both(query[:, :, begin:end], key, value, **part)
        assert_both_same(result, (out[:, :, begin:end], lse[:, :, begin:end]))


@EACH_DTYPE
@pytest.mark.parametrize("left", [130, 300, 500])
def test_where_the_blocks_of_keys_begin(kernel, left, dtype):
    """At multiples of their size, not where a window begins: rows alone, in parts, on more threads."""
    query, key, value = draw(1, 2, 1, M=150, N=700, dtype=dtype)
    expected = both(query * 3, key, value, window=(left, 5), threads=1)
    for threads in 2, 3, 5:
        assert_both_same(both(query * 3, key, value, window=(left, 5), threads=threads), expected)
    for begin, end in [(0, 9), (1, 18), (9, 40), (41, 150), (141, 150)]:
        part = both(query[:, :, begin:end] * 3, key, value, window=(left, 5), q_offset=550 + begin)
        assert_both_same(part, [x[:, :, begin:end] for x in expected])


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("length", [1, 100, 127, 128, 129, 200])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_padding_of_keys(kernel, length, causal, dtype):
    """Keys that are not there, that are past the length, and that the mask hides are one and the same."""
    query, key, value = draw(M=70, N=260, dtype=dtype)
    key[:, :, length:] = value[:, :, length:] = nan
    expected = both(query, key[:, :, :length], value[:, :, :length], causal=causal)
    assert_both_same(both(query, key, value, causal=causal, kv_lengths=length), expected)
    options = dict(causal=causal, q_offset=length - 70)
    assert_both_same(both(query, key, value, mask=np.arange(260) < length, **options), expected)
    assert_both_same(both(query, key, value, mask=np.arange(260) < length, kv_lengths=length, **options), expected)


@EACH_DTYPE
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_the_short_way_and_the_long_way(kernel, rank, causal, dtype):
    """A call without options skips the normalisation."""
    arrays = [x[(0,) * (4 - rank)] for x in draw(M=50, N=300, dtype=dtype)]
    expected = sdpa.attention(*arrays, causal=causal)
    out = np.empty_like(expected)
    for way in [
        dict(scale=20**-0.5), dict(out=out), dict(threads=1), dict(threads=2), dict(return_lse=True),
        dict(window=(None, None)),
    ]:  # fmt: skip
        result = sdpa.attention(*arrays, causal=causal, **way)
        assert_same_bits(result[0] if "return_lse" in way else result, expected)
    assert_same_bits(sdpa.attention(*[x[None] for x in arrays], causal=np.bool_(causal))[0], expected)


@EACH_DTYPE
def test_options_that_say_what_is_so_anyway(kernel, dtype):
    arrays = draw(dtype=dtype)
    expected = both(*arrays)
    for options in [
        dict(mask=np.ones((), bool)), dict(mask=np.ones((37, 133), bool)), dict(kv_lengths=133), dict(q_offset=96),
        dict(window=(None, 132)), dict(window=(133, None)), dict(window=(132, 36)), dict(sinks=np.full(4, -np.inf)),
        dict(causal=True, q_offset=132), dict(scale=20**-0.5),
    ]:  # fmt: skip
        assert_both_same(both(*arrays, **options), expected)
    causal = both(*arrays, causal=True)
    assert_both_same(both(*arrays, window=(None, 0)), causal)
    assert_both_same(both(*arrays, mask=np.tri(37, 133, 96, dtype=bool)), causal)


@EACH_ARITHMETIC
def test_more_leading_axes_and_broadcasting(kernel, dtype):
    query, key, value = draw(B=6, dtype=dtype)
    expected = both(query, key, value, causal=True)
    split = [x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value)]
    assert_both_same([x.reshape(6, *x.shape[2:]) for x in both(*split, causal=True)], expected)
    turned = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in split]
    assert_both_same([x.reshape(6, *x.shape[2:]) for x in both(*turned, causal=True)], expected)
    shared = both(query, key[:1], value[:1], causal=True)
    assert_both_same(both(query, key[:1].repeat(6, 0), value[:1].repeat(6, 0), causal=True), shared)
    assert_both_same(both(query, key[0], value[0], causal=True), shared)


FROM_AFAR = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (40, 20)},
    "bias": {"bias": rng(5).standard_normal((70, 300)).astype(np.float32)},
    "lengths": {"kv_lengths": [290]},
}


@pytest.mark.cover(1)
@EACH_ARITHMETIC
@pytest.mark.parametrize("E", [0, 20])
@pytest.mark.parametrize("options", FROM_AFAR.values(), ids=FROM_AFAR)
def test_keys_that_come_from_memory(kernel, dtype, E, options):
    """So many that they are fetched beforehand, by the first of several tasks; each head is the same."""
    query, key, value = draw(1, 1, 1, M=70, N=300, D=64, E=E, dtype=dtype)
    many = [np.broadcast_to(x, (1, 500, *x.shape[2:])) for x in (query, key, value)]
    assert sum(x.nbytes for x in many[1:]) > 16 << 20
    out, lse = both(query, key, value, **options)
    assert_both_same(both(*many, **options), [np.broadcast_to(x, (1, 500, *x.shape[2:])) for x in (out, lse)])
    weights = sdpa.attention_weights(query, key, **options)
    of_many = sdpa.attention_weights(*many[:2], **options)
    assert_same_bits(of_many, np.broadcast_to(weights, of_many.shape))


@EACH_DTYPE
@pytest.mark.parametrize("N", [17, 49, 63])
def test_last_columns_of_a_bias(kernel, N, dtype):
    """Fewer than a vector of them, read with those before: as where the bias is not adjacent, one by one."""
    query, key, value = draw(M=49, N=N, D=16, E=16, dtype=dtype)
    bias = rng(2).standard_normal((4, 49, 2 * N)).astype(np.float32)
    out = sdpa.attention(query, key, value, bias=bias[..., ::2])
    assert_same_bits(sdpa.attention(query, key, value, bias=np.ascontiguousarray(bias[..., ::2])), out)
