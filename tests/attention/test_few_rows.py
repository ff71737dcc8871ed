"""Few rows and many keys: keys are cut into parts, which are summed on their own, by one thread or by several, and
joined.  Also keys and values of 8 bits with scales, which the kernels take as caches hold them."""

import itertools

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits, judge
from support.draw import HALF, MIXED, WIDE, draw, float16, float32, float64, inf, nan, rng
from support.kernels import on_kernels
from support.options import OPTIONS, options_for
from support.processes import extra_memory
from support.together import (
    assert_both_same,
    assert_hidden_is_as_nothing,
    both,
    check,
    check_with_more,
    masks_and_biases,
)

import sdpa
from sdpa import _core, reference
from sdpa._cache import kv
from sdpa._runtime import kernels

EACH_DTYPE = on_kernels(WIDE, HALF, half="best")
EACH_ARITHMETIC = on_kernels({"float32": float32, "bfloat16": bfloat16}, half="best")
LENGTHS = [1023, 1025, 1535, 1536, 1537, 2175, 2559, 2560, 3073, 5000]  # two parts from 1536 keys on, three from 2560
N, JOINT = 3000, 1024  # so many keys, and where the second of three parts begins


def few(M=1, keys=N, **sizes):
    """Two rows of each key/value head, times M: few for each instruction set where M is 1."""
    return draw(**dict(M=M, N=keys, D=24, E=20) | sizes)


# Against the oracle.


@EACH_DTYPE
@pytest.mark.parametrize("keys", LENGTHS)
def test_numbers_of_keys(kernel, dtype, keys):
    for D, E in (16, 16), (5, 7):  # read as they lie, or copied
        arrays = few(1, keys, D=D, E=E, dtype=dtype)
        assert "few rows" in sdpa.explain(*arrays).engine
        check(*arrays, threads=1)
        check(*few(2, keys, D=D, E=E, dtype=dtype), threads=3, causal=True)


@on_kernels(MIXED)
@pytest.mark.parametrize("M", [1, 2, 3, 6])
def test_numbers_of_rows(kernel, dtype, M):
    check(*few(M, 2049, D=16, dtype=dtype), threads=2)


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_parts_as_there_are(kernel, dtype, threads):
    """64, and three of 512 keys of a wide head."""
    arrays = draw(1, 2, 1, 1, 66_000, 4, 3, dtype=dtype)
    check(*arrays, threads=threads)
    check(*arrays, threads=threads, kv_lengths=65_999, window=(40_000, None))
    check(*few(1, 1500, D=128, E=128, dtype=dtype), threads=threads)


@EACH_DTYPE
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(kernel, dtype, name):
    for M, threads in (1, 1), (2, 3):
        arrays = few(M, dtype=dtype)
        check(*arrays, threads=threads, **options_for(*arrays[:2], name))


# Two rows of each of four heads; keys 0 to 1023 are the first part.
ACROSS = {
    "window over the joint": dict(window=(700, 0), q_offset=1600),
    "window up to the joint": dict(window=(700, 0), q_offset=JOINT - 2),
    "window from the joint": dict(window=(0, 300), q_offset=JOINT),
    "window in the first part": dict(window=(100, 90), q_offset=500),
    "window in the last part": dict(window=(100, None), q_offset=2900),
    "window in parts that differ": dict(window=(200, 0), q_offset=np.array([500, 2000])),
    "window before all keys": dict(window=(None, -10), q_offset=0),
    **masks_and_biases(N, JOINT, JOINT, np.array([[True], [False]]), one_key=2000),
    "lengths": dict(kv_lengths=np.array([1000, N]), causal=True),
    "lengths at the joint": dict(kv_lengths=np.array([JOINT, JOINT + 1])),
    "lengths of nothing": dict(kv_lengths=np.array([0, 2048])),
}


@EACH_ARITHMETIC
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", ACROSS.values(), ids=ACROSS)
def test_options_across_parts(kernel, dtype, threads, options):
    arrays = few(2, H=2, dtype=dtype)
    check(*arrays, threads=threads, **options)
    check_with_more(*arrays, threads=threads, **options)


def test_parts_whose_scores_are_far_apart(kernel):
    """One rounding of a score of 150 changes its weight by up to 64 units: how close NumPy comes is chance."""
    query, key, value = few()
    for factor, floor in (1e-3, 4), (40, 64):
        arrays = query, np.where(np.arange(N)[:, None] < JOINT, key, factor * key), value
        judge(*both(*arrays, threads=2), *arrays, floor=floor)
        judge(*both(*arrays, threads=1), *arrays, floor=floor)


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, *list(ACROSS.values())[::3]], ids=["nothing", *list(ACROSS)[::3]])
def test_weights(kernel, dtype, options):
    query, key, _ = few(2, H=2, dtype=dtype)
    expected = reference.attention_weights(query, key, **options)
    weights = sdpa.attention_weights(query, key, threads=1, **options)
    unit = 2e-12 if dtype == float64 else 2e-5 if dtype == float32 else 1e-2
    np.testing.assert_allclose(weights.astype(float), expected, rtol=unit, atol=1e-7)
    for threads in 2, 3:
        assert_same_bits(sdpa.attention_weights(query, key, threads=threads, **options), weights)


# NaN.

HIDING = {  # keys 1600 to 1700
    "mask": dict(mask=(np.arange(N) < 1600) | (np.arange(N) > 1700)),
    "mask of the part": dict(mask=np.arange(N) < JOINT),
    "bias": dict(bias=np.where((np.arange(N) < 1600) | (np.arange(N) > 1700), 0.25, -inf).astype(float32)),
    "lengths": dict(kv_lengths=1600),
    "causal": dict(causal=True, q_offset=1590),
    "window": dict(window=(900, None), q_offset=2650),
}


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
def test_hidden_nan(kernel, dtype, threads, options):
    assert_hidden_is_as_nothing(*few(dtype=dtype), slice(1600, 1701), threads=threads, **options)


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("place", [5, JOINT - 1, JOINT, N - 1])
def test_visible_nan(kernel, dtype, threads, place):
    """It reaches what it should reach, and nothing else."""
    query, key, value = few(dtype=dtype)
    clean, clean_lse = both(query, key, value, threads=threads)
    mask = np.ones((4, 1, N), bool)
    mask[1, :, place] = False  # head 1 does not see it
    expected, expected_lse = both(query, key, value, threads=threads, mask=mask)
    for poison in nan, inf:
        poisoned = value.copy()
        poisoned[0, 0, place, 3] = poison
        out, lse = both(query, key, poisoned, threads=threads)
        assert_same_bits(lse, clean_lse)
        assert (np.isnan(out[0, :2, 0, 3]) if np.isnan(poison) else out[0, :2, 0, 3] == inf).all()
        out[0, :2, 0, 3] = clean[0, :2, 0, 3]
        assert_same_bits(out, clean)
        out, lse = both(query, key, poisoned, threads=threads, mask=mask)
        assert not np.isfinite(out[0, 0, 0, 3])
        out[0, 0, 0, 3] = expected[0, 0, 0, 3]
        assert_both_same((out, lse), (expected, expected_lse))
    key[0, 0, place, 2] = nan
    out, lse = both(query, key, value, threads=threads, mask=mask)
    assert np.isnan(out[0, 0]).all() and np.isnan(lse[0, 0]).all()
    assert_both_same((out[0, 1:], lse[0, 1:]), (expected[0, 1:], expected_lse[0, 1:]))


# Bits.


@EACH_ARITHMETIC
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_threads(kernel, dtype, name):
    """One thread sums the parts one after the other, several share them."""
    for keys in 2049, 5000:
        arrays = few(keys=keys, dtype=dtype)
        options = options_for(*arrays[:2], name)
        expected, weights = both(*arrays, threads=1, **options), None
        for threads in 2, 3, 5:
            assert_both_same(both(*arrays, threads=threads, **options), expected)
        for threads in 1, 2, 5:
            again = sdpa.attention_weights(*arrays[:2], threads=threads, **options)
            weights = again if weights is None else weights
            assert_same_bits(again, weights)


@EACH_DTYPE
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bits_of_one_head_among_many(kernel, dtype, causal):
    """With many heads each is one unit; alone its parts are."""
    query, key, value = draw(2, 16, 16, 2, 5000, 24, 20, dtype=dtype)
    out, lse = both(query, key, value, causal=causal, threads=2)
    for b, h in (0, 0), (0, 7), (1, 15):
        for threads in 1, 2, 3:
            alone = both(query[b, h], key[b, h], value[b, h], causal=causal, threads=threads)
            assert_both_same(alone, (out[b, h], lse[b, h]))


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_lengths(kernel, dtype, threads):
    """Parts are those of the keys that are there."""
    lengths = np.array([1, 1023, 1025, 1535, 1536, 2559, 2560, 4999, 5000])
    query, key, value = draw(len(lengths), 2, 1, 1, 5000, 8, 12, dtype=dtype)
    for causal in False, True:
        out, lse = both(query, key, value, kv_lengths=lengths, causal=causal, threads=threads)
        for b, length in enumerate(lengths):
            alone = both(query[b], key[b, :, :length], value[b, :, :length], causal=causal, threads=threads)
            assert_both_same(alone, (out[b], lse[b]))


@EACH_DTYPE
def test_bits_of_rows(kernel, dtype):
    """Guesses of a decoder, together and one by one."""
    query, key, value = draw(1, 1, 1, 2, N, 24, 20, dtype=dtype)
    out, lse = both(query, key, value, causal=True)
    for i in range(2):
        alone = both(query[:, :, i : i + 1], key, value, causal=True, q_offset=N - 2 + i)
        assert_both_same(alone, (out[:, :, i : i + 1], lse[:, :, i : i + 1]))


@EACH_DTYPE
@pytest.mark.parametrize("keys", [1, 13, 128, 300])
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 9, 16])
def test_bits_beside_other_rows(kernel, dtype, rows, keys):
    """Scores of several keys share a vector, of how many depends on the number of rows."""
    query, key, value = draw(1, 1, 1, rows, keys, 24, 20, dtype=dtype)
    if "few" not in sdpa.explain(query, key, value).engine:
        pytest.skip(f"{rows} rows are many here")
    for options in {}, dict(causal=True, q_offset=keys // 2), dict(bias=rng(0).standard_normal(keys)):
        out, lse = both(query, key, value, **options)
        offset = options.get("q_offset", 0)
        for i in {0, rows // 2, rows - 1}:
            alone = options | (dict(q_offset=offset + i) if offset else {})
            assert_both_same(
                both(query[:, :, i : i + 1], key, value, **alone), (out[:, :, i : i + 1], lse[:, :, i : i + 1])
            )


K_COUNTS = (3000, 0, 1, 1023, 2048, 2049, 128, 5001)


def packed(dtype, D=16, E=12):
    """query (S, H, D), one row for each sequence; key and value, packed; where sequences begin."""
    starts = np.cumsum([0, *K_COUNTS])
    query, key, value = draw(1, 4, 2, len(K_COUNTS), int(starts[-1]), D, E, dtype=dtype)
    return query[0].swapaxes(0, 1), key[0].swapaxes(0, 1), value[0].swapaxes(0, 1), starts


def assert_each_alone(result, query, key, value, starts, **options):
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        of_b = [x[begin:end].swapaxes(0, 1) for x in (key, value)]
        expected = both(query[b][:, None], *of_b, causal=True, **options)
        assert_both_same((result[0][b][:, None], result[1][b][:, None]), expected)


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_of_packed_sequences(kernel, dtype, threads):
    query, key, value, starts = packed(dtype)
    where = dict(cu_seqlens_q=np.arange(len(starts)), cu_seqlens_k=starts)
    for options in {}, dict(window=(1700, None)):
        result = sdpa.attention_varlen(
            query, key, value, **where, causal=True, return_lse=True, threads=threads, **options
        )
        assert_each_alone(result, query, key, value, starts, **options)


@EACH_DTYPE
@pytest.mark.parametrize("page_size", [1, 3, 16, 128, 1000])
def test_bits_of_pages(kernel, dtype, page_size):
    query, key, value, starts = packed(dtype)
    pages = sum(-(-count // page_size) for count in K_COUNTS)
    cache = sdpa.PagedKVCache(pages, page_size, 2, 16, value_dim=12, dtype=key.dtype)
    sequences = [cache.allocate() for _ in K_COUNTS]
    done = np.zeros(len(K_COUNTS), int)
    while (done < K_COUNTS).any():  # a bit of each in turn, so that the pages of a sequence do not follow each other
        counts = np.minimum(700, K_COUNTS - done)
        rows = np.concatenate([at + np.arange(n) for at, n in zip(starts[:-1] + done, counts)])
        cache.append(sequences, key[rows], value[rows], cu_seqlens=np.cumsum([0, *counts]))
        done += counts
    for threads in 1, 2:
        result = cache.attend(query, sequences, return_lse=True, threads=threads)
        assert_each_alone(result, query, key, value, starts)


# Numbers of 8 bits with scales.

INT8 = {  # D, E, group: numbers with one scale
    "whole vectors": (64, 96, 32),
    "wide groups": (128, 64, 64),
    "one group": (64, 32, 128),
    "tails": (40, 35, 32),
    "less than a vector": (3, 1, 32),
    "large": (256, 256, 32),
}
EACH_INT8 = on_kernels(WIDE, HALF, half="best")


def draw_int8(shape, group, seed=0):
    """Numbers of all sizes, and scales, of which some are 0."""
    numbers = rng(seed).integers(-128, 128, shape, dtype=np.int8)
    scales = rng(seed + 1).random((*shape[:-1], -(-shape[-1] // group)), dtype=float32) / 64
    return numbers, np.where(scales < 0.002, float32(0), scales)


def dequantised(numbers, scales, group):
    """Exactly."""
    return numbers * np.repeat(scales.astype(float64), group, axis=-1)[..., : numbers.shape[-1]]


def core(query, key, value, *, key_scale, value_scale, group, kv_lengths=None, **options):
    """(out, lse) of a cache that holds just these numbers."""
    sizes = key.shape[0], key.shape[1], key.shape[3]
    cache = sdpa.KVCache(*sizes, value_dim=value.shape[3], dtype=np.int8, group=group)
    cache.append(np.zeros(key.shape), np.zeros(value.shape))
    rows = key.shape[2]
    for array, given in zip(cache._store._now.memory.arrays.values(), (key, value, key_scale, value_scale)):
        array[:, :, :rows] = given
    options = dict(causal=False, return_lse=True) | options
    return _core.attend_cache(kernels.default, cache._store, query, rows, kv_lengths, None, options, kv.ATTEND)


def draw_problem(sizes, dtype, B=2, H=4, G=2, M=1, keys=N):
    D, E, group = sizes
    key, key_scale = draw_int8((B, G, keys, D), group)
    value, value_scale = draw_int8((B, G, keys, E), group, 2)
    query = rng(9).standard_normal((B, H, M, D)).astype(dtype)
    return (query, key, value), dict(key_scale=key_scale, value_scale=value_scale, group=group)


def check_int8(arrays, scales, threads, **options):
    query, key, value = arrays
    key, value = (
        dequantised(x, scales[name], scales["group"]) for x, name in ((key, "key_scale"), (value, "value_scale"))
    )
    out, lse = core(*arrays, **scales, threads=threads, **options)
    judge(out, lse, query, key, value, **options)


@EACH_INT8
@pytest.mark.parametrize("sizes", INT8.values(), ids=INT8)
def test_int8(kernel, dtype, sizes):
    for M, keys, threads in (1, 1, 1), (1, 127, 1), (1, 2050, 2), (2, 300, 2), (6, 300, 2), (37, 150, 2):
        arrays, scales = draw_problem(sizes, dtype, B=1, M=M, keys=keys)
        check_int8(arrays, scales, threads)


INT8_OPTIONS = {
    "causal": dict(causal=True, q_offset=np.array([N // 2 - 1, N - 2])),
    "lengths": dict(kv_lengths=np.array([700, N - 1])),
    "mask": dict(mask=rng(1).random((2, 4, 2, N)) < 0.5),
    "bias": dict(bias=rng(2).standard_normal((2, 4, 2, N))),
    "softcap": dict(softcap=1.5),
    "scale below 0": dict(scale=-0.3),
    "sinks": dict(sinks=np.full(4, 3.0)),
    "alibi": dict(alibi_slopes=np.full(4, 0.01)),
}


@EACH_INT8
@pytest.mark.parametrize("options", INT8_OPTIONS.values(), ids=INT8_OPTIONS)
def test_int8_with_options(kernel, dtype, options):
    arrays, scales = draw_problem((64, 40, 32), dtype, M=2)
    for threads in 1, 2:
        check_int8(arrays, scales, threads, **options)


@EACH_INT8
@pytest.mark.parametrize("M", [1, 20])
def test_int8_and_nan_in_scales(kernel, dtype, M):
    """A hidden scale has no influence, a visible one has."""
    arrays, scales = draw_problem((64, 64, 32), dtype, M=M)
    expected = core(*arrays, **scales, kv_lengths=np.array([2000, 2000]))
    for poison in nan, inf:
        for name in "key_scale", "value_scale":
            scales[name][:, :, 2000:] = poison
        assert_both_same(core(*arrays, **scales, kv_lengths=np.array([2000, 2000])), expected)
    scales["value_scale"][0, 0, 10, 1] = nan
    out, lse = core(*arrays, **scales, kv_lengths=np.array([2000, 2000]))
    seen = np.s_[0, :2, :, 32:]
    assert np.isnan(out[seen]).all()
    out[seen] = expected[0][seen]
    assert_both_same((out, lse), expected)
    scales["key_scale"][0, 0, 1990, 0] = nan
    out, lse = core(*arrays, **scales, kv_lengths=np.array([2000, 2000]))
    assert np.isnan(out[0, :2]).all() and np.isnan(lse[0, :2]).all()
    assert_both_same((out[0, 2:], lse[0, 2:]), (expected[0][0, 2:], expected[1][0, 2:]))


@EACH_INT8
@pytest.mark.parametrize("M", [1, 20])
@pytest.mark.parametrize("sizes", INT8.values(), ids=INT8)
def test_bits_of_int8(kernel, dtype, sizes, M):
    arrays, scales = draw_problem(sizes, dtype, M=M, keys=2050)
    expected = core(*arrays, **scales)
    for threads in 2, 3, 5:
        assert_both_same(core(*arrays, **scales, threads=threads), expected)
    of_head = {name: x[1:, 1:] for name, x in scales.items() if name != "group"}
    alone = core(arrays[0][1:, 2:], *[x[1:, 1:] for x in arrays[1:]], **of_head, group=scales["group"], threads=2)
    assert_both_same(alone, [x[1:, 2:] for x in expected])


# Memory.


@on_kernels({"float32": float32, "float16": float16}, half="best")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_memory(kernel, dtype, threads, heads):
    """It does not grow with the keys: there is a limit to the number of parts."""
    arrays = draw(1, heads, heads, 1, 200_000, 32, 32, dtype=dtype)
    assert extra_memory(*arrays, threads=threads) < 2e6 * threads
    assert extra_memory(*arrays, threads=threads, kv_lengths=199_999, causal=True) < 2e6 * threads
