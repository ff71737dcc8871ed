"""KVCache: what it holds, what its queries see, and what it does with memory and files."""

import copy
import gc
import json
import os
import pickle
import shutil
import tempfile
import weakref

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import HALF, WIDE, float16, float32, float64, rng
from support.options import SCORES, SEEN
from support.problems import examples
from support.processes import run_python

import sdpa
from sdpa import KVCache, _core, reference
from sdpa._cache import files

FLOATS = WIDE | HALF
ALL = FLOATS | {"int8": np.int8}
B, H, G, D, E = 2, 4, 2, 20, 12
of_dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


def tokens(count, dtype=float32, seed=0, batch=B, heads=H):
    """Query, key and value of `count` tokens."""
    normal = rng(seed).standard_normal
    shapes = (batch, heads, count, D), (batch, G, count, D), (batch, G, count, E)
    return [normal(shape).astype(dtype) for shape in shapes]


def new(dtype=float32, batch=B, **options):
    return KVCache(batch, G, D, value_dim=E, dtype=dtype, **options)


def filled(count, dtype=float32, batch=B, lengths=None, seed=0, **options):
    cache = new(dtype, batch, **options)
    _, key, value = tokens(count, float32 if dtype == np.int8 else dtype, seed, batch)
    cache.append(key, value, lengths)
    return cache


def contents(cache):
    """All that can be seen from outside."""
    arrays = [cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.lengths]
    return [None if x is None else x.copy() for x in arrays] + [cache.nbytes]


def assert_unchanged(cache, before):
    for x, y in zip(contents(cache), before):
        np.testing.assert_array_equal(x, y)


def dequantised(cache):
    """Keys and values of a cache of int8, exactly."""
    pairs = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
    with np.errstate(all="ignore"):  # past the lengths may be anything
        return [x * np.repeat(s.astype(float64), cache.group, axis=-1)[..., : x.shape[-1]] for x, s in pairs]


def within_window(positions, keys, window, keep=0):
    """(M, N): who sees whom."""
    j, i = np.arange(keys), np.asarray(positions)[:, None]
    return (j <= i) & ((j > i - window) | (j < keep))


# What it holds, and attention to it.


@of_dtypes
def test_any_chunks_give_the_bits_of_the_whole(dtype):
    """Across several doublings of the memory."""
    query, key, value = tokens(300, dtype)
    cache, at = new(dtype), 0
    for count in (1, 1, 5, 57, 1, 80, 1, 0, 1, 153):
        part = slice(at, at + count)
        cache.append(key[:, :, part], value[:, :, part])
        at += count
        assert len(cache) == at and cache.keys.shape == (B, G, at, D)
        assert_same_bits(cache.keys, key[:, :, :at])
        assert_same_bits(cache.values, value[:, :, :at])
        expected = sdpa.attention(query[:, :, part], key[:, :, :at], value[:, :, :at], causal=True)
        assert_same_bits(cache.attend(query[:, :, part]), expected)
    assert at == 300


def test_on_every_kernel(kernel):
    query, key, value = tokens(70)
    cache = new()
    cache.append(key[:, :, :69], value[:, :, :69])
    cache.append(key[:, :, 69:], value[:, :, 69:])
    for rows in (1, 2, 40):
        expected = sdpa.attention(query[:, :, -rows:], key, value, causal=True)
        assert_same_bits(cache.attend(query[:, :, -rows:]), expected)


@pytest.mark.parametrize("given", FLOATS.values(), ids=FLOATS)
@of_dtypes
def test_what_is_appended_is_rounded(dtype, given):
    _, key, value = tokens(9, given)
    cache = new(dtype)
    for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
        cache.append(key[:, :, part], value[:, :, part])
    assert_same_bits(cache.keys, key.astype(dtype))
    assert_same_bits(cache.values, value.astype(dtype))
    assert cache.keys.dtype == cache.dtype == dtype


def test_key_and_value_of_different_dtypes():
    _, key, value = tokens(9)
    cache = new(float16)
    cache.append(key.astype(float64), value)
    assert_same_bits(cache.keys, key.astype(float16))
    assert_same_bits(cache.values, value.astype(float16))


def test_numbers_too_large_become_infinite():
    cache = new(float16, batch=1)
    for _ in range(2):
        cache.append(np.full((G, 1, D), 1e6), np.full((G, 1, E), -1e6, float32))
    assert np.isposinf(cache.keys).all() and np.isneginf(cache.values).all()


def test_any_strides_are_taken_and_inputs_stay():
    _, key, value = tokens(8)
    for flags in (key, value):
        flags.flags.writeable = False
    cache = new()
    cache.append(key[:, :, ::-2], np.asfortranarray(value[:, :, ::-2]))
    assert_same_bits(cache.keys, np.ascontiguousarray(key[:, :, ::-2]))
    assert_same_bits(cache.values, np.ascontiguousarray(value[:, :, ::-2]))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [float32, np.int8])
def test_one_batch_needs_no_axis_for_it(dtype, window):
    query, key, value = (x[0] for x in tokens(9, batch=1))
    whole, short = new(dtype, 1, window=window), new(dtype, 1, window=window)
    whole.append(key[None], value[None])
    short.append(key, value)
    for rows in (1, 9):
        out, lse = whole.attend(query[None, :, -rows:], return_lse=True)
        assert_same_bits(short.attend(query[:, -rows:]), out[0])
        assert_same_bits(short.attend(query[:, -rows:], return_lse=True)[1], lse[0])
    one = KVCache(1, 1, D, value_dim=E, dtype=dtype, window=window)
    one.append(key[0], value[0])
    assert one.attend(query[0]).shape == (9, E)
    np.testing.assert_allclose(one.attend(query[0]), whole.attend(query[None])[0, 0], atol=1e-6)


def test_an_empty_cache_gives_zeros():
    cache = new()
    out, lse = cache.attend(tokens(3)[0], return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all() and out.shape == (B, H, 3, E)
    assert len(cache) == 0 and cache and cache.keys.shape == (B, G, 0, D)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", SEEN | SCORES)
@pytest.mark.parametrize("lengths", [None, [7, 33]], ids=["equal", "ragged"])
def test_options_as_of_attention(name, rows, lengths):
    query, key, value = tokens(33)
    cache = filled(33, lengths=lengths)
    query = query[:, :, -rows:]
    options = (SEEN | SCORES)[name](B, H, rows, 33)
    expected = sdpa.attention(query, key, value, causal=True, kv_lengths=lengths, return_lse=True, **options)
    for x, y in zip(cache.attend(query, return_lse=True, **options), expected):
        assert_same_bits(x, y)


def test_more_options():
    query, key, value = tokens(9)
    cache = filled(9)
    for options in (
        dict(causal=False),
        dict(window=(3, 1), causal=False),
        dict(window=(2, 2)),
        dict(q_offset=1),
        dict(q_offset=[0, 4]),
        dict(threads=2),
    ):
        expected = sdpa.attention(query[:, :, :3], key, value, **dict(causal=True) | options)
        assert_same_bits(cache.attend(query[:, :, :3], **options), expected)
    out = np.empty((B, H, 9, E), float32)
    assert cache.attend(query, out=out) is out
    assert_same_bits(out, cache.attend(query))


@pytest.mark.parametrize("options", [{}, dict(window=100), dict(window=4), dict(window=4, keep=2)], ids=str)
def test_ragged_batches_are_as_if_alone(options):
    """Chunks of which each batch takes some; then each result is that of its own sequence."""
    query, key, value = tokens(60)
    cache, done = new(**options), np.zeros(B, int)
    for counts in [(3, 5), (0, 4), (1, 1), (2, 0), (20, 31), (1, 1), (1, 1)]:
        width = max(counts)
        chunk = [np.full((B, x.shape[1], width, x.shape[3]), np.nan, float32) for x in (query, key, value)]
        for b, count in enumerate(counts):
            for array, source in zip(chunk, (query, key, value)):
                array[b, :, :count] = source[b, :, done[b] : done[b] + count]
        lengths = None if min(counts) == width else counts
        cache.append(chunk[1], chunk[2], lengths=lengths)
        out = cache.attend(np.nan_to_num(chunk[0]))
        for b, count in enumerate(counts):
            part = slice(done[b], done[b] + count)
            alone = query[b, :, part], key[b, :, : part.stop], value[b, :, : part.stop]
            mask = within_window(range(part.start, part.stop), part.stop, **dict(window=1000) | options)
            np.testing.assert_allclose(out[b, :, :count], sdpa.attention(*alone, mask=mask), atol=2e-6)
        done += counts
        assert cache.lengths.tolist() == done.tolist() and len(cache) == done.max()
        if min(done) and width > 1:  # now the last token of each
            out = cache.attend(np.stack([query[b, :, done[b] - 1 : done[b]] for b in range(B)]))
            for b, end in enumerate(done):
                alone = query[b, :, end - 1 : end], key[b, :, :end], value[b, :, :end]
                mask = within_window([end - 1], end, **dict(window=1000) | options)
                np.testing.assert_allclose(out[b], sdpa.attention(*alone, mask=mask), atol=2e-6)


def test_views_are_read_only_and_stay():
    cache = filled(5)
    keys, before = cache.keys, cache.keys.copy()
    for view in (cache.keys, cache.values, cache.lengths):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    for seed in range(5):
        _, key, value = tokens(40, seed=seed)
        cache.append(key, value)
    np.testing.assert_array_equal(keys, before)
    assert np.shares_memory(cache.keys, cache.keys)


def test_growth_doubles():
    """Few copies, and never room for more than twice what is needed; pieces of a cache line for each row."""
    cache, rooms = new(), set()
    for _ in range(1000):
        cache.append(np.zeros((B, G, 1, D)), np.zeros((B, G, 1, E)))
        rooms.add(cache.nbytes)
        assert cache.nbytes <= B * G * (D + E) * 4 * max(64, 2 * len(cache))
    assert len(rooms) == 5
    assert cache.keys.ctypes.data % 64 == 0 and cache.values.ctypes.data % 64 == 0


def test_what_it_says_of_itself():
    assert repr(filled(5)) == "<sdpa.KVCache (2, 2, 5, 20 and 12) float32, room for 64, 32,768 bytes>"
    assert "lengths [5, 2]" in repr(filled(5, lengths=[5, 2]))
    text = repr(filled(30, bfloat16, window=8, keep=2, capacity=100))
    assert "bfloat16, window 8 and the first 2, capacity 100" in text
    cache = filled(5, capacity=7)
    assert (cache.batch, cache.kv_heads, cache.head_dim, cache.value_dim, cache.capacity) == (B, G, D, E, 7)
    assert cache.window is None and cache.keep == 0 and cache.group == 32 and cache.dtype == float32
    assert cache.key_scales is None and cache.value_scales is None


# int8.


def as_int8(x, group):
    """Symmetric, to nearest, ties to even, in float32: whole numbers and scales."""
    x = x.astype(float32)
    whole, scales = np.empty(x.shape, np.int8), []
    for begin in range(0, x.shape[-1], group):
        part = x[..., begin : begin + group]
        most = abs(part).max(axis=-1, keepdims=True)
        most = np.where(most < 127 * 2.0**-126, 0, most).astype(float32)
        with np.errstate(divide="ignore"):
            inverse = np.where(most == 0, 0, float32(127) / most).astype(float32)
        whole[..., begin : begin + group] = np.rint(part * inverse)
        scales.append(most / float32(127))
    return whole, np.concatenate(scales, axis=-1)


@pytest.mark.parametrize("given", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("dim, group", [(20, 32), (64, 32), (80, 32), (128, 64), (300, 128), (300, 1024)])
def test_int8_is_rounded_as_in_numpy(given, dim, group):
    source = rng(1).standard_normal((2, 3, 7, dim))
    source[0, 0, 0] = 0
    source[0, 0, 1, :20] = 1e-37
    source[0, 0, 2, 3] = 1000
    source[0, 0, 3] = np.resize(np.arange(-127, 128) / 2, dim)  # ties
    source = source.astype(given)
    for layout in (lambda x: x, lambda x: x[..., ::-1], lambda x: np.asfortranarray(x)[:, ::-1]):
        x = layout(source)
        cache = KVCache(2, 3, dim, dtype=np.int8, group=group)
        cache.append(x[:, :, :4], -x[:, :, :4])
        for at in range(4, 7):
            cache.append(x[:, :, at : at + 1], -x[:, :, at : at + 1])
        for whole, scales, values in ((cache.keys, cache.key_scales, x), (cache.values, cache.value_scales, -x)):
            expected = as_int8(values, group)
            np.testing.assert_array_equal(whole, expected[0])
            np.testing.assert_array_equal(scales, expected[1])


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", [None, [50, 7]], ids=["equal", "ragged"])
def test_int8_attends_to_what_it_holds(dtype, rows, lengths):
    query, *_ = tokens(50, dtype)
    query = query[:, :, -rows:]
    cache = filled(50, np.int8, lengths=lengths)
    key, value = dequantised(cache)
    for options in ({}, dict(softcap=2.0, sinks=np.zeros(H), alibi_slopes=np.ones(H) / 8), dict(window=(9, 0))):
        exact, exact_lse = reference.attention(
            query, key, value, causal=True, kv_lengths=lengths, return_lse=True, **options
        )
        out, lse = cache.attend(query, return_lse=True, **options)
        assert out.dtype == dtype and lse.dtype == (float64 if dtype == float64 else float32)
        tolerance = {float16: 2e-3, bfloat16: 2e-2}.get(dtype, 5e-6)
        np.testing.assert_allclose(out.astype(float64), exact, atol=tolerance)
        np.testing.assert_allclose(lse, exact_lse, atol=1e-4)
        assert_same_bits(cache.attend(query, **options), out)
        given = np.empty_like(out)
        assert cache.attend(query, out=given, **options) is given
        assert_same_bits(given, out)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("size", [4, 8, 16, 32, 40, 64, 100, 256])
def test_int8_on_every_kernel(kernel, size, rows):
    """Sizes that are whole vectors, and that are not; few rows and many; several groups."""
    query, key, value = (rng(i).standard_normal((2, n, 50, size)) for i, n in enumerate((4, 2, 2)))
    for group in (32, 64):
        cache = KVCache(2, 2, size, dtype=np.int8, group=group)
        cache.append(key, value)
        for dtype, tolerance in ((float32, 1e-5), (float64, 1e-12)):
            given = query[:, :, -rows:].astype(dtype)
            exact = reference.attention(given, *dequantised(cache), causal=True)
            np.testing.assert_allclose(cache.attend(given), exact, atol=tolerance)


def test_error_of_int8_is_below_that_of_one_scale_for_a_row():
    query, key, value = (rng(i).standard_normal((1, n, 500, 128)) for i, n in enumerate((4, 2, 2)))
    exact = reference.attention(query, key, value)
    by_row = [x * s for x, s in (as_int8(array, 128) for array in (key, value))]
    allowed = abs(reference.attention(query, *by_row) - exact).max()
    for group in (32, 64, 128):
        cache = KVCache(1, 2, 128, dtype=np.int8, group=group)
        cache.append(key, value)
        assert abs(cache.attend(query, causal=False) - exact).max() <= 1.5 * allowed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("options", [{}, dict(window=5), dict(window=5, keep=2)], ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_int8_has_no_nan(bad, options, name, count):
    cache = filled(20, np.int8, **options)
    given = dict(zip(("query", "key", "value"), tokens(count, float64)))
    given[name][1, 1, -1, 5] = bad
    before = contents(cache)
    with pytest.raises(ValueError, match=f"{name} holds NaN or inf"):
        cache.append(given["key"], given["value"])
    assert_unchanged(cache, before)
    cache.append(given["key"], given["value"], lengths=[count, count - 1])  # not looked at
    assert cache.lengths.tolist() == [20 + count, 19 + count]


@pytest.mark.parametrize("options", [{}, dict(window=5)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_int8_takes_no_whole_numbers(options, count):
    """They would have no scales: as at the first append, so later."""
    cache = new(np.int8, **options)
    whole = [x.astype(np.int8) for x in tokens(count)[1:]]
    for _ in range(2):
        before = contents(cache)
        for pair in whole, [whole[0], tokens(count)[2]], [tokens(count)[1], whole[1]]:
            with pytest.raises(TypeError, match=r"(key|value) has dtype int8: .*float16, bfloat16, float32 or float64"):
                cache.append(*pair)
        assert_unchanged(cache, before)
        cache.append(*tokens(9)[1:])


# The window: memory is bound, and what queries see is what they would see of everything.

WINDOWS = {
    "1": dict(window=1),
    "5": dict(window=5),
    "5, 3 kept": dict(window=5, keep=3),
    "1, 1 kept": dict(window=1, keep=1),
    "40, 4 kept": dict(window=40, keep=4),
    "70": dict(window=70),
}
CHUNKS = {
    "tokens": [1] * 100,
    "a prompt, then tokens": [60] + [1] * 90,
    "chunks": [7] * 14,
    "chunks and tokens": [3, 1, 1, 1, 8, 1, 1, 30, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 20],
    "large chunks": [100, 100],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("dtype", [float32, np.int8], ids=["float32", "int8"])
def test_window_is_a_mask_over_everything(dtype, options, chunks):
    query, key, value = tokens(sum(chunks))
    cache, everything, at = new(dtype, **options), new(dtype), 0
    for count in chunks:
        part = slice(at, at + count)
        cache.append(key[:, :, part], value[:, :, part])
        everything.append(key[:, :, part], value[:, :, part])
        at += count
        mask = within_window(range(part.start, at), at, **options)
        out, lse = cache.attend(query[:, :, part], return_lse=True)
        expected = everything.attend(query[:, :, part], mask=mask, return_lse=True)
        np.testing.assert_allclose(out, expected[0], atol=2e-6)
        np.testing.assert_allclose(lse, expected[1], atol=2e-6)
        if count == 1:
            np.testing.assert_allclose(cache.attend(query[:, :, part]), expected[0], atol=2e-6)
        seen = np.flatnonzero(mask[-1])
        assert_same_bits(cache.keys, everything.keys[:, :, seen])
        assert_same_bits(cache.values, everything.values[:, :, seen])
    assert len(cache) == at


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", SEEN | SCORES)
@pytest.mark.parametrize("lengths", [None, [4, 2]], ids=["equal", "ragged"])
@pytest.mark.parametrize("before", [3, 40], ids=["straight", "around"])
@pytest.mark.parametrize("keep", [0, 2])
def test_options_within_a_window(name, rows, lengths, before, keep):
    query, key, value = tokens(before + 4)
    cache = filled(before, window=7, keep=keep)
    cache.append(key[:, :, before:], value[:, :, before:], lengths)
    key[:, :, :before], value[:, :, :before] = tokens(before)[1:]
    total = before + 4
    query, options = query[:, :, -rows:], (SEEN | SCORES)[name](B, H, rows, total)
    ends = [before + n for n in lengths or (4, 4)]
    starts = [before if lengths and rows == 4 else end - rows for end in ends]
    mask = np.stack([within_window(range(s, s + rows), total, 7, keep) for s in starts])[:, None]
    with_mask = options | dict(mask=mask & options.get("mask", True))
    exact, exact_lse = reference.attention(
        query, key, value, q_offset=starts, kv_lengths=ends, return_lse=True, **with_mask
    )
    out, lse = cache.attend(query, return_lse=True, **options)
    np.testing.assert_allclose(out, exact, atol=3e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


@pytest.mark.parametrize("keep", [0, 2])
def test_a_narrower_window_within_a_window(keep):
    query, key, value = tokens(50)
    cache = new(window=9, keep=keep)
    for part in (slice(0, 44), slice(44, 50)):
        cache.append(key[:, :, part], value[:, :, part])
        rows, end = part.stop - part.start, part.stop
        for window, causal in (((3, 0), True), ((4, None), False), ((None, -2), True), ((20, 5), False)):
            mask = within_window(range(part.start, end), end, 9, keep)
            exact = reference.attention(query[:, :, part], key[:, :, :end], value[:, :, :end], mask=mask, window=window)
            out = cache.attend(query[:, :, part], window=window, causal=causal)
            np.testing.assert_allclose(out, exact, atol=2e-6)
            assert out.shape[2] == rows


def test_a_long_prompt_within_a_window_takes_its_mask_in_parts(monkeypatch):
    query, key, value = tokens(200)
    cache = new(window=30, keep=3)
    cache.append(key, value)
    whole = cache.attend(query, return_lse=True, alibi_slopes=np.ones(H))
    monkeypatch.setattr("sdpa._cache.attend.MASK_ELEMENTS", 2000)
    out = np.empty_like(whole[0])
    parts = cache.attend(query, return_lse=True, alibi_slopes=np.ones(H), out=out)
    np.testing.assert_allclose(parts[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], atol=1e-6)
    assert parts[0] is out


@pytest.mark.parametrize("dtype", [float32, np.int8], ids=["float32", "int8"])
def test_memory_within_a_window_is_bound(dtype):
    def bytes_for(rows):
        of_a_row = (D + E) * 4 if dtype == float32 else D + E + 2 * 4
        return B * G * rows * of_a_row

    cache = new(dtype, window=50, keep=4)
    _, key, value = tokens(1000)
    for at in range(1000):
        cache.append(key[:, :, at : at + 1], value[:, :, at : at + 1])
        assert cache.nbytes <= bytes_for(54)
    assert cache.nbytes == bytes_for(54)
    for _ in range(10):
        cache.append(key[:, :, :8], value[:, :, :8])
        assert cache.nbytes <= bytes_for(54 + 16)
    cache.append(key, value)
    assert cache.nbytes <= bytes_for(54 + 1016)
    cache.append(key[:, :, :1], value[:, :, :1])
    assert cache.nbytes == bytes_for(54)
    for count in (8, *[1] * 60):
        cache.append(key[:, :, :count], value[:, :, :count])
    assert cache.nbytes == bytes_for(54)
    memory = cache._store._now.memory
    cache.append(key[:, :, :1], value[:, :, :1])
    assert cache._store._now.memory is memory


def test_what_the_window_dropped_is_an_error():
    cache = filled(30, window=5)
    for seed in range(2):
        cache.append(*tokens(1, seed=seed)[1:])
    before = contents(cache)
    with pytest.raises(
        ValueError, match=r"query has 2 rows, the first at position 30: .* token 27, which is the oldest"
    ):
        cache.attend(tokens(2)[0])
    with pytest.raises(ValueError, match=r"n is 30: .* window of 5 has dropped; it must be 31 or more"):
        cache.truncate(30)
    assert_unchanged(cache, before)
    cache.truncate(31)
    with pytest.raises(ValueError, match="the first at position 30"):
        cache.attend(tokens(1)[0])
    cache.append(*tokens(1)[1:])
    cache.attend(tokens(1)[0])
    cache.truncate(0)
    assert len(cache) == 0 and cache.keys.shape[2] == 0


def test_appending_its_own_keys():
    cache = KVCache(1, 1, 4, window=6, keep=2)
    cache.append(np.arange(28.0).reshape(7, 4), np.arange(28.0).reshape(7, 4))
    keys = cache.keys.copy()
    cache.append(cache.keys, cache.values)
    np.testing.assert_array_equal(cache.keys, np.concatenate([keys[:, :, :2], keys[:, :, -6:]], axis=2))


@pytest.mark.parametrize("window", [None, 30])
def test_appending_what_lies_in_its_memory(window):
    """Views that a truncate has left show rows that are written, in any order of the heads."""
    key, value = rng(0).standard_normal((2, 1, 3, 9, 4)).astype(float32)
    for layout in (slice(None), slice(None, None, -1), [2, 2, 0]):
        for count in 1, 3:
            cache = KVCache(1, 3, 4, window=window)
            cache.append(key, value)
            views = [x[:, layout, 5 : 5 + count] for x in (cache.keys, cache.values)]
            copies = [view.copy() for view in views]
            cache.truncate(4)
            cache.append(*views)
            assert_same_bits(cache.keys, np.concatenate([key[:, :, :4], copies[0]], axis=2))
            assert_same_bits(cache.values, np.concatenate([value[:, :, :4], copies[1]], axis=2))


# truncate and fork.


def test_truncate_and_go_on():
    cache = filled(20)
    cache.truncate(15)
    _, key, value = tokens(3, seed=1)
    cache.append(key, value)
    assert_same_bits(cache.keys, np.concatenate([tokens(20)[1][:, :, :15], key], axis=2))
    cache.truncate([3, 18])
    assert cache.lengths.tolist() == [3, 18] and len(cache) == 18
    cache.truncate(np.array([3, 3]))
    assert_same_bits(cache.keys, np.ascontiguousarray(tokens(20)[1][:, :, :3]))
    cache.truncate(0)
    cache.append(key, value)
    assert_same_bits(cache.keys, key)


def held_keys(cache):
    return cache._store.keys.numbers


@pytest.mark.parametrize("options", [{}, dict(window=9), dict(window=9, keep=2)], ids=str)
@pytest.mark.parametrize("dtype", [float32, np.int8], ids=["float32", "int8"])
def test_forks_share_until_one_appends(dtype, options):
    cache = filled(20, dtype, **options)
    twin, other = cache.fork(), copy.copy(cache)
    child = copy.deepcopy(twin)
    before = contents(cache)[:-1]
    assert all(np.shares_memory(held_keys(x), held_keys(cache)) for x in (twin, other, child))
    _, key, value = tokens(1, seed=5)
    cache.append(key, value)
    assert not np.shares_memory(held_keys(twin), held_keys(cache))
    assert np.shares_memory(held_keys(twin), held_keys(child))
    for unchanged in (twin, other, child):
        for x, y in zip(contents(unchanged), before):
            np.testing.assert_array_equal(x, y)
    child.append(-key, -value)
    assert len(twin) == 20 and len(child) == 21
    assert_same_bits(twin.keys, other.keys)
    assert not (child.keys[:, :, -1] == cache.keys[:, :, -1]).all()


def test_the_last_one_writes_in_place():
    cache = filled(20)
    memory = cache.fork()._store._now.memory
    gc.collect()
    _, key, value = tokens(1)
    cache.append(key, value)
    assert cache._store._now.memory is memory and cache._store._now.writable
    twin = cache.fork()
    cache.append(key, value)
    assert cache._store._now.memory is not memory and twin._store._now.memory is memory
    twin.append(key, value)
    assert twin._store._now.memory is memory
    many = [cache.fork() for _ in range(100)]
    assert len(cache._store._now.memory.owners) == 101
    del many[1:]
    gc.collect()
    cache.fork()
    assert len(cache._store._now.memory.owners) == 3


def test_forks_of_ragged_caches():
    cache = filled(9, lengths=[9, 2])
    twin = cache.fork()
    query, key, value = tokens(9)
    assert_same_bits(twin.attend(query), cache.attend(query))
    twin.append(key, value, lengths=[1, 3])
    assert cache.lengths.tolist() == [9, 2] and twin.lengths.tolist() == [10, 5]
    assert_same_bits(twin.keys[1, :, :2], np.ascontiguousarray(tokens(9)[1][1, :, :2]))


class Slots(KVCache):
    __slots__ = ("note",)


class Attributes(KVCache):
    pass


@pytest.mark.parametrize("kind", [Slots, Attributes])
@pytest.mark.parametrize("fork", [KVCache.fork, copy.copy, copy.deepcopy])
def test_a_fork_is_of_the_same_class(kind, fork):
    cache = kind(B, G, D, value_dim=E)
    cache.append(*tokens(9)[1:])
    cache.note = "mine"
    twin = fork(cache)
    assert type(twin) is kind and twin.note == "mine"
    twin.note = "its own"
    twin.append(*tokens(1)[1:])
    assert (cache.note, len(cache), len(twin)) == ("mine", 9, 10)


def test_only_what_users_need_is_public():
    assert {name for name in dir(KVCache) if not name.startswith("_")} == {
        "append", "attend", "batch", "capacity", "dtype", "fork", "group", "head_dim", "keep", "key_scales", "keys",
        "kv_heads", "lengths", "load", "nbytes", "save", "truncate", "value_dim", "value_scales", "values", "window",
    }  # fmt: skip


def test_where_integers_have_32_bits_unless_told(monkeypatch):
    """As those of NumPy 1 on Windows."""
    full = np.full
    monkeypatch.setattr(np, "full", lambda shape, number, dtype=np.int32: full(shape, number, dtype))
    cache, new = KVCache(2, 2, 8), np.zeros((2, 2, 3, 8), float32)
    for key in new, new[:, :, :1]:
        cache.append(key, key)
    cache.fork().truncate(2)
    assert cache.lengths.tolist() == [4, 4] and cache.lengths.dtype == np.int64


def test_sizes_cannot_be_changed():
    cache = filled(3)
    for name in "batch", "kv_heads", "head_dim", "value_dim", "dtype", "capacity", "window", "keep", "group":
        with pytest.raises(AttributeError):
            setattr(cache, name, 1)


def test_a_cache_that_was_not_made():
    cache = KVCache.__new__(KVCache)
    for call in (lambda: cache.append(K, V), lambda: cache.attend(Q), lambda: len(cache), cache.fork):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            call()


def test_caches_are_let_go():
    cache = filled(9)
    dead = weakref.ref(cache.fork())
    gc.collect()
    assert dead() is None
    with pytest.raises(TypeError, match="save and load"):
        pickle.dumps(cache)


# Any order of everything, against lists of tokens.


class Twin:
    """A cache, and the tokens that it should have: for each batch a list of (key, value).  `fresh`: how many of the
    last tokens may be asked about, or forgotten, for certain."""

    def __init__(self, cache, tokens, fresh):
        self.cache, self.tokens, self.fresh = cache, tokens, fresh


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        batch=st.integers(1, 3),
        window=st.none() | st.integers(1, 6),
        keep=st.integers(0, 3),
        dtype=st.sampled_from([float32, float32, np.int8]),
    )
    def begin(self, batch, window, keep, dtype):
        self.normal = rng(0).standard_normal
        self.batch, self.window, self.keep = batch, window, keep if window else 0
        cache = KVCache(batch, 1, 4, value_dim=3, dtype=dtype, window=window, keep=self.keep)
        self.twins = [Twin(cache, [[] for _ in range(batch)], [0] * batch)]

    def pick(self, data):
        return self.twins[data.draw(st.integers(0, len(self.twins) - 1))]

    def draw_counts(self, data, most):
        return [data.draw(st.integers(0, n)) for n in most]

    @rule(data=st.data(), count=st.integers(0, 3) | st.sampled_from([1, 1, 20]), ragged=st.booleans())
    def append(self, data, count, ragged):
        twin = self.pick(data)
        key, value = self.normal((self.batch, 1, count, 4)), self.normal((self.batch, 1, count, 3))
        counts = self.draw_counts(data, [count] * self.batch) if ragged else [count] * self.batch
        dtype = data.draw(st.sampled_from([float32, float64]))
        key, value = key.astype(float32), value.astype(float32)
        twin.cache.append(key.astype(dtype), value.astype(dtype), counts if ragged else None)
        if twin.cache.dtype == np.int8:
            key, value = ((x * s).astype(float32) for x, s in (as_int8(array, 32) for array in (key, value)))
        for b, n in enumerate(counts):
            twin.tokens[b] = twin.tokens[b] + [(key[b, 0, i], value[b, 0, i]) for i in range(n)]
            twin.fresh[b] = n or min(twin.fresh[b], 1)

    @rule(data=st.data())
    def truncate(self, data):
        twin = self.pick(data)
        most = twin.fresh if self.window else [len(tokens) for tokens in twin.tokens]
        dropped = self.draw_counts(data, most)
        twin.cache.truncate([len(tokens) - n for tokens, n in zip(twin.tokens, dropped)])
        for b, n in enumerate(dropped):
            twin.tokens[b] = twin.tokens[b][: len(twin.tokens[b]) - n]
            twin.fresh[b] -= min(n, twin.fresh[b])

    @rule(data=st.data())
    def truncate_far(self, data):
        """With a window it is refused, or does what it should."""
        twin = self.pick(data)
        lengths = [data.draw(st.integers(0, len(tokens))) for tokens in twin.tokens]
        before = contents(twin.cache)
        try:
            twin.cache.truncate(lengths)
        except ValueError:
            assert self.window
            assert_unchanged(twin.cache, before)
            return
        twin.tokens = [tokens[:n] for tokens, n in zip(twin.tokens, lengths)]
        twin.fresh = [0] * self.batch if self.window else twin.fresh

    @rule(data=st.data())
    @precondition(lambda self: len(self.twins) < 4)
    def fork(self, data):
        twin = self.pick(data)
        self.twins.append(Twin(twin.cache.fork(), list(twin.tokens), list(twin.fresh)))

    @rule(data=st.data(), mmap=st.booleans())
    def save_and_load(self, data, mmap):
        twin = self.pick(data)
        with tempfile.TemporaryDirectory() as folder:
            twin.cache.save(folder + "/cache")
            twin.cache = KVCache.load(folder + "/cache", mmap=mmap)

    @rule(data=st.data())
    @precondition(lambda self: len(self.twins) > 1)
    def forget(self, data):
        self.twins.remove(self.pick(data))

    @rule(data=st.data(), rows=st.integers(1, 4), alibi=st.booleans())
    def attend(self, data, rows, alibi):
        twin = self.pick(data)
        lengths = np.array([len(tokens) for tokens in twin.tokens])
        if self.window and min(twin.fresh) < rows:
            rows = max(1, min(twin.fresh))
        longest = lengths.max()
        key, value = (np.zeros((self.batch, 1, longest, n), float32) for n in (4, 3))
        for b, tokens in enumerate(twin.tokens):
            for i, (k, v) in enumerate(tokens):
                key[b, 0, i], value[b, 0, i] = k, v
        query = self.normal((self.batch, 2, rows, 4)).astype(float32)
        options = dict(alibi_slopes=[0.1, 0.3]) if alibi else {}
        starts = lengths - rows
        try:
            out = twin.cache.attend(query, q_offset=starts, **options)
        except ValueError:
            assert self.window and min(twin.fresh) < rows
            return
        mask = None
        if self.window:
            places = [range(start, start + rows) for start in starts]
            mask = np.stack([within_window(p, longest, self.window, self.keep) for p in places])[:, None]
        exact = reference.attention(query, key, value, causal=True, kv_lengths=lengths, mask=mask, **options)
        np.testing.assert_allclose(out, exact, atol=1e-5)

    def teardown(self):
        for twin in getattr(self, "twins", []):
            lengths = [len(tokens) for tokens in twin.tokens]
            assert twin.cache.lengths.tolist() == lengths
            if self.window is None and twin.cache.dtype == float32:
                for b, tokens in enumerate(twin.tokens):
                    for i, (k, v) in enumerate(tokens):
                        np.testing.assert_array_equal(twin.cache.keys[b, 0, i], k)
                        np.testing.assert_array_equal(twin.cache.values[b, 0, i], v)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(120), stateful_step_count=25, deadline=None, database=None)


# Files.


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("lengths", [None, [40, 3], [0, 0]], ids=["equal", "ragged", "empty"])
@pytest.mark.parametrize("options", [{}, dict(window=9, keep=2), dict(capacity=50)], ids=str)
@pytest.mark.parametrize("dtype", ALL.values(), ids=ALL)
def test_saved_and_loaded(tmp_path, dtype, options, lengths, mmap):
    cache = filled(40, dtype, lengths=lengths, **options)
    query, key, value = tokens(1, float32 if dtype == np.int8 else dtype, seed=3)
    if lengths is None:
        cache.append(key, value)
    cache.save(tmp_path / "cache")
    again = KVCache.load(tmp_path / "cache", mmap=mmap)
    for x, y in zip(contents(again)[:-1], contents(cache)):
        if x is None:
            assert y is None
        elif lengths is None:
            assert_same_bits(x, y)
        else:
            assert x.shape == y.shape and x.dtype == y.dtype
    for name in ("batch", "kv_heads", "head_dim", "value_dim", "dtype", "capacity", "window", "keep", "group"):
        assert getattr(again, name) == getattr(cache, name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    for _ in range(3):
        assert_same_bits(again.attend(query), cache.attend(query))
        for one in (again, cache):
            one.append(key, value)
    assert again.lengths.tolist() == cache.lengths.tolist()
    twin = again.fork()
    twin.append(key, value)
    again.truncate(again.lengths - 1)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_mapped_pages_are_not_copied(tmp_path):
    cache = filled(20, bfloat16)
    cache.save(tmp_path / "cache")
    again = KVCache.load(str(tmp_path / "cache"), mmap=True)
    base = again.keys
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) and type(again.keys) is np.ndarray
    memory = again._store._now.memory
    again.append(*tokens(1)[1:])
    assert again._store._now.memory is not memory and len(again) == 21


def test_saving_replaces_a_cache_and_nothing_else(tmp_path):
    path = tmp_path / "cache"
    filled(20, np.int8).save(path)
    mapped = KVCache.load(path, mmap=True)
    before = contents(mapped)
    filled(5).save(path)
    assert len(KVCache.load(path)) == 5 and not (path / "key_scales.npy").exists()
    assert_unchanged(mapped, before)
    mapped.save(path)
    assert len(KVCache.load(path)) == 20
    (path / "notes.txt").write_text("mine")
    foreign = [path, tmp_path / "empty", tmp_path / "file", tmp_path / "other"]
    foreign[1].mkdir()
    foreign[2].write_text("mine")
    foreign[3].mkdir()
    (foreign[3] / "cache.json").write_text("{}")
    for place in foreign:
        with pytest.raises(
            ValueError, match=r"path is '.*': what is there is not a saved cache, and is not overwritten"
        ):
            filled(5).save(place)
    assert (path / "notes.txt").read_text() == "mine" and foreign[2].read_text() == "mine"
    assert {x.name for x in tmp_path.iterdir()} == {"cache", "empty", "file", "other"}


def test_an_interrupted_save_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    filled(20).save(path)

    def full(file, array):
        file.write_bytes(array[:, :, :1].tobytes())
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "write_npy", full)
    with pytest.raises(OSError, match="no space"):
        filled(5).save(path)
    assert len(KVCache.load(path)) == 20 and [x.name for x in tmp_path.iterdir()] == ["cache"]
    with pytest.raises(FileNotFoundError):
        filled(5).save(tmp_path / "no" / "folder")


@pytest.mark.parametrize("mmap", [False, True])
def test_damaged_and_foreign_files(tmp_path, mmap):
    good, path = tmp_path / "good", tmp_path / "bad"
    filled(20, window=6, keep=1).save(good)
    header = json.loads((good / "cache.json").read_text())

    def check(match, **changes):
        if changes:
            (path / "cache.json").write_text(json.dumps(header | changes))
        with pytest.raises(ValueError, match=match) as error:
            KVCache.load(path, mmap=mmap)
        assert str(path) in str(error.value).replace("\\\\", "\\")
        shutil.rmtree(path)
        shutil.copytree(good, path)

    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        KVCache.load(path, mmap=mmap)
    path.mkdir()
    check("holds no saved cache")
    check("holds no saved cache", format="other")
    check("has version 2, not 1", version=2)
    check("damaged: .*int8, float16, bfloat16, float32 or float64", dtype="complex64")
    check("damaged: window", window=-1)
    check("damaged: .*heads", kv_heads="2")
    check("damaged: .*lengths", lengths=[20, 20, 20])
    check("damaged: .*lengths", lengths=[20.5, 20])
    check("damaged: .*do not fit", lengths=[2, 2])
    check("damaged: .*do not fit", lengths=[20, -1])
    check("damaged: .*do not fit", floors=[-1, 0])
    check("damaged: ring", ring=2)
    check("damaged: .*64 bits", lengths=[10**30, 20])
    check(r"keys.npy: it holds \(2, 2, 20, 20\) float32, not \(2, 3, 20, 20\) float32", kv_heads=3)
    check("keys.npy: it holds .* float32, not .* uint16", dtype="bfloat16")
    for damage in (b"", b"hello", (good / "keys.npy").read_bytes()[:-5], (good / "keys.npy").read_bytes()[:100]):
        (path / "keys.npy").write_bytes(damage)
        check("keys.npy: not a whole .npy file")
    (path / "values.npy").unlink()
    check("values.npy: not a whole .npy file")
    np.save(path / "values.npy", np.array([{}]), allow_pickle=True)
    check("values.npy: not a whole .npy file")
    for text in (b"\xff", b"{", b"[]", b"3"):
        (path / "cache.json").write_bytes(text)
        check("holds no saved cache")
    KVCache.load(path, mmap=mmap)
    with pytest.raises(ValueError, match="holds no saved cache"):
        KVCache.load(good / "keys.npy", mmap=mmap)


def test_ml_dtypes_is_needed_for_bfloat16_only(tmp_path):
    filled(20, float16).save(tmp_path / "half")
    filled(20, bfloat16).save(tmp_path / "brain")
    assert np.load(tmp_path / "brain/keys.npy").dtype == np.uint16
    assert KVCache(1, 1, 1, dtype="bfloat16").dtype == bfloat16
    assert sdpa.PagedKVCache(1, 1, 1, 1, dtype="bfloat16").dtype == bfloat16
    code = f"""
import sys, sdpa
sdpa.KVCache.load({str(tmp_path / "half")!r})
assert "ml_dtypes" not in sys.modules
cache = sdpa.KVCache.load({str(tmp_path / "brain")!r})
assert "ml_dtypes" in sys.modules and cache.dtype.name == "bfloat16" and len(cache) == 20
sys.modules["ml_dtypes"] = None
try:
    sdpa.KVCache.load({str(tmp_path / "brain")!r})
except ImportError as error:
    print(error)
"""
    assert "bfloat16 needs the package ml_dtypes: pip install ml_dtypes" in run_python(code)


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_the_folder_has_usual_permissions(tmp_path):
    filled(3).save(tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "folder").stat().st_mode


# Errors: what, which value, which rule; and nothing has changed.


@pytest.mark.parametrize(
    "options, error, match",
    [
        (dict(batch=0), ValueError, "batch is 0: it must be 1 or more"),
        (dict(kv_heads=-1), ValueError, "kv_heads is -1: it must be 1 or more"),
        (dict(head_dim=2.5), TypeError, r"head_dim is 2.5: it must be a whole number"),
        (dict(value_dim=0), ValueError, "value_dim is 0"),
        (dict(head_dim=True), TypeError, "head_dim is True"),
        (dict(head_dim=2**50), ValueError, "below 2"),
        (dict(capacity=-1), ValueError, "capacity is -1: it must be 0 or more"),
        (dict(capacity="many"), TypeError, "capacity is 'many'"),
        (dict(window=0), ValueError, "window is 0: it must be 1 or more"),
        (dict(window=(3, 0)), TypeError, r"window is \(3, 0\)"),
        (dict(keep=4), ValueError, "keep is 4 and window None"),
        (dict(window=3, keep=-4), ValueError, "keep is -4"),
        (dict(group=16), ValueError, "group is 16: it must be 32 or more"),
        (dict(group=48), ValueError, "group is 48: it must be a power of 2"),
        (dict(dtype=np.int16), TypeError, "dtype is .*int16.*int8, float16, bfloat16, float32 or float64"),
        (dict(dtype=complex), TypeError, "dtype is .*complex"),
        (dict(dtype=">f4"), TypeError, "native byte order"),
        (dict(dtype="nonsense"), TypeError, "dtype is 'nonsense'"),
        (dict(dtype=None), TypeError, "dtype is None"),
    ],
    ids=str,
)
def test_what_cannot_be_made(options, error, match):
    with pytest.raises(error, match=match):
        KVCache(**dict(batch=1, kv_heads=2, head_dim=4) | options)


K, V = np.zeros((B, G, 3, D), float32), np.zeros((B, G, 3, E), float32)


@pytest.mark.parametrize(
    "key, value, lengths, error, match",
    [
        (K[..., 1:], V, None, ValueError, r"key has shape \(2, 2, 3, 19\): it must be \(2, 2, new tokens, 20\)"),
        (K, V[:, 1:], None, ValueError, r"value has shape \(2, 1, 3, 12\): it must be \(2, 2, new tokens, 12\)"),
        (K[1:], V, None, ValueError, r"key has shape \(1, 2, 3, 20\)"),
        (K[0], V, None, ValueError, r"key has shape \(2, 3, 20\)"),
        (K[None], V[None], None, ValueError, r"key has shape \(1, 2, 2, 3, 20\)"),
        (K, V[:, :, 1:], None, ValueError, "key has 3 new tokens and value 2: they must be as many"),
        (K[0, 0, 0], V, None, ValueError, r"key has shape \(20,\)"),
        (K.astype(np.int8), V, None, TypeError, "key has dtype int8"),
        (K, V.astype(complex), None, TypeError, "value has dtype complex128"),
        (K, V.astype(">f4"), None, TypeError, "native byte order"),
        (K, V, [1, 4], ValueError, r"lengths are \[1, 4\]: they must be from 0 to the 3 tokens given"),
        (K, V, [-1, 3], ValueError, r"lengths are \[-1, 3\]"),
        (K, V, [1, 2, 3], ValueError, r"lengths has shape \(3,\)"),
        (K, V, [1.0, 2.0], TypeError, "lengths has dtype float64"),
        (K, V, [10**30, 0], ValueError, "64 bits"),
        (np.ma.masked_array(K), V, None, TypeError, "key is a masked array"),
    ],
)
@pytest.mark.parametrize("options", [{}, dict(window=2, keep=1), dict(dtype=np.int8)], ids=str)
def test_what_cannot_be_appended(options, key, value, lengths, error, match):
    cache = filled(5, **options)
    before = contents(cache)
    with pytest.raises(error, match=match):
        cache.append(key, value, lengths)
    assert_unchanged(cache, before)


def test_arrays_are_checked_before_memory_is_taken():
    cache = sdpa.KVCache(2**39, G, D)  # 4 TB of lengths
    with pytest.raises(ValueError, match=f"key has shape .* it must be \\({2**39}, {G}, new tokens, {D}\\)"):
        cache.append(K, V)


@pytest.mark.parametrize("window", [None, 3])
def test_capacity_is_a_limit(window):
    cache = filled(8, capacity=10, window=window)
    cache.append(K[:, :, :1], V[:, :, :1])
    before = contents(cache)
    with pytest.raises(ValueError, match=r"capacity is 10 and lengths are \[9, 9\]: \[3, 3\] more cannot be appended"):
        cache.append(K, V)
    assert_unchanged(cache, before)
    with pytest.raises(ValueError, match=r"\[0, 2\] more cannot be appended"):
        cache.append(K, V, [0, 2])
    assert_unchanged(cache, before)
    cache.append(K, V, [0, 1])
    with pytest.raises(ValueError, match=r"capacity is 10 and lengths are \[9, 10\]"):
        cache.append(K[:, :, :1], V[:, :, :1])
    cache.append(K, V, [1, 0])
    assert len(cache) == 10 and cache.nbytes <= 10 * B * G * (D + E) * 4
    empty = new(capacity=0)
    with pytest.raises(ValueError, match="capacity is 0"):
        empty.append(K[:, :, :1], V[:, :, :1])


Q = np.zeros((B, H, 2, D), float32)


@pytest.mark.parametrize(
    "query, options, error, match",
    [
        (
            Q[:1],
            {},
            ValueError,
            r"query has shape \(1, 4, 2, 20\): it must be \(2, H, M, 20\) with H a multiple of the 2",
        ),
        (Q[:, :3], {}, ValueError, r"query has shape \(2, 3, 2, 20\)"),
        (Q[..., 1:], {}, ValueError, r"query has shape \(2, 4, 2, 19\)"),
        (Q[0], {}, ValueError, r"query has shape \(4, 2, 20\)"),
        (Q[0, 0], {}, ValueError, r"query has shape \(2, 20\)"),
        (Q[None], {}, ValueError, r"query has shape \(1, 2, 4, 2, 20\)"),
        (Q.astype(int), {}, TypeError, "query has dtype int64"),
        (Q, dict(mask=np.ones(9)), TypeError, "mask has dtype float64"),
        (Q, dict(mask=np.ones(8, bool)), ValueError, r"mask has shape \(8,\)"),
        (Q, dict(bias=np.ones(9, bool)), TypeError, "bias has dtype bool"),
        (Q, dict(bias=np.ones(8)), ValueError, r"bias has shape \(8,\)"),
        (Q, dict(causal="yes"), TypeError, "causal is 'yes'"),
        (Q, dict(window=3), TypeError, "window is 3"),
        (Q, dict(q_offset=0.5), TypeError, "q_offset has dtype float64"),
        (Q, dict(q_offset=[1, 2, 3]), ValueError, r"q_offset has shape \(3,\)"),
        (Q, dict(softcap=-1), ValueError, "softcap is -1"),
        (Q, dict(alibi_slopes=np.ones(3)), ValueError, r"alibi_slopes has shape \(3,\)"),
        (Q, dict(sinks=np.ones(3)), ValueError, r"sinks has shape \(3,\)"),
        (Q, dict(threads=0), ValueError, "threads is 0"),
        (Q, dict(out=np.zeros((B, H, 2, E), np.float16)), ValueError, "out has shape .* float16"),
        (Q, dict(kv_lengths=[1, 1]), TypeError, "kv_lengths"),
    ],
)
@pytest.mark.parametrize("options_of_cache", [{}, dict(window=3, keep=1), dict(dtype=np.int8)], ids=str)
def test_what_cannot_be_asked(options_of_cache, query, options, error, match):
    cache = filled(7, **options_of_cache)
    cache.append(K[:, :, :2], V[:, :, :2])
    before = contents(cache)
    with pytest.raises(error, match=match):
        cache.attend(query, **options)
    assert_unchanged(cache, before)


def test_dtypes_that_do_not_meet():
    with pytest.raises(TypeError, match="query has dtype float32: it must not be narrower than the cache, float64"):
        filled(5, float64).attend(Q)
    with pytest.raises(TypeError, match="query has dtype float16 and the cache bfloat16: they must not meet"):
        filled(5, bfloat16).attend(Q.astype(float16))
    for dtype in (float16, bfloat16):
        assert filled(5, dtype).attend(Q).dtype == float32


@pytest.mark.parametrize(
    "n, error, match",
    [
        (6, ValueError, r"n is 6: it must be from 0 to the length, \[5, 5\]"),
        (-1, ValueError, "n is -1"),
        ([5, 6], ValueError, r"n is \[5, 6\]"),
        ([1, 2, 3], ValueError, r"n has shape \(3,\)"),
        (2.0, TypeError, "n has dtype float64"),
        (None, TypeError, "n has dtype object"),
    ],
)
def test_what_cannot_be_forgotten(n, error, match):
    cache = filled(5)
    before = contents(cache)
    with pytest.raises(error, match=match):
        cache.truncate(n)
    assert_unchanged(cache, before)


def test_quantise_takes_nothing():
    empty = np.zeros((1, 2, 0, 8), float32)
    assert _core.quantise(empty, empty.astype(np.int8), empty[..., :1], 32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8], ids=["float32", "float16", "int8"])
@pytest.mark.parametrize("options", [{}, dict(window=8, keep=2), dict(window=5)], ids=str)
@pytest.mark.parametrize("lengths", [[3, 5, 0], [4, 4, 4], [5, 1, 5]], ids=str)
def test_token_by_token_is_as_the_general_way(dtype, options, lengths):
    """Arrays of the shapes stored are appended by compiled code, lists are not."""
    caches = [KVCache(3, 2, 32, value_dim=4, dtype=dtype, **options) for _ in range(2)]
    prompt = rng(1).standard_normal((2, 3, 2, 5, 32)).astype(np.float32)
    for cache in caches:
        cache.append(prompt[0], prompt[1, ..., :4], lengths=lengths)
    for step in range(40):
        key, value = rng(step).standard_normal((2, 3, 2, 1, 32)).astype(np.float32)
        twin = caches[0].fork() if step == 20 else None
        caches[0].append(key, value[..., :4])
        caches[1].append(key.tolist(), value[..., :4].tolist())
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [n + step + 1 for n in lengths]
        assert twin is None or twin.lengths.tolist() == [n + step for n in lengths]
        for one, other in zip(stored(caches[0]), stored(caches[1])):
            assert_same_bits(one, other)
        query = rng(-step - 1 & 0xFFFF).standard_normal((3, 4, 1, 32)).astype(np.float32)
        assert_same_bits(caches[0].attend(query, softcap=3.0), caches[1].attend(query, softcap=3.0))


def stored(cache):
    """What counts of the arrays: rows past the length of a batch do not."""
    arrays = [cache.keys, cache.values, cache.key_scales, cache.value_scales]
    rows = np.minimum(cache.lengths, cache.keys.shape[2])
    for array in arrays:
        if array is not None:
            yield np.concatenate([array[b, :, : rows[b]] for b in range(cache.batch)], axis=1)
