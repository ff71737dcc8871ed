"""How calls are cut for threads: `rehearse` says what they would share, without computing."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import draw, float32
from support.kernels import on_kernels

import sdpa
from sdpa import _core
from sdpa._runtime import nodes, threads

EACH_ARITHMETIC = on_kernels({"float32": float32, "bfloat16": bfloat16}, half="best")
COUNTS = (1, 2, 3, 7, 16, 64, 192)
CALLS = {
    "many rows": ((2, 4, 2, 300, 300, 24, 20), {}),
    "causal": ((1, 3, 3, 700, 700, 32, 32), dict(causal=True)),
    "a window": ((1, 2, 2, 500, 900, 16, 16), dict(causal=True, window=(100, 0))),
    "lengths": ((3, 2, 1, 200, 400, 16, 16), dict(kv_lengths=np.array([400, 17, 250]))),
    "few rows": ((1, 8, 2, 1, 6000, 128, 128), {}),
    "few rows, a window": ((2, 8, 2, 1, 9000, 64, 64), dict(window=(2000, 0))),
    "few rows, lengths": ((4, 4, 2, 1, 5000, 128, 64), dict(kv_lengths=np.array([5000, 3, 0, 2600]))),
    "guesses": ((1, 4, 2, 3, 4000, 128, 128), dict(causal=True)),
    "a chunk": ((1, 4, 2, 40, 7000, 64, 64), dict(causal=True)),
    "a chunk, lengths": ((3, 2, 1, 60, 9000, 16, 16), dict(kv_lengths=np.array([9000, 0, 3300]), window=(4000, 0))),
}


@pytest.fixture(autouse=True)
def many_threads(monkeypatch):
    monkeypatch.setattr(threads, "MOST", max(COUNTS))


def rehearsed(function, *arguments, **options):
    (region,) = _core.rehearse(lambda: function(*arguments, **options))
    return region


@pytest.mark.parametrize("name", CALLS)
def test_units_are_all_the_work_and_no_more(name):
    """Whatever the number of threads: each pair of query and key that is visible is in one unit."""
    sizes, options = CALLS[name]
    arrays = draw(*sizes)
    query, _, value = arrays
    flops = sdpa.explain(*arrays, **options).flops
    pairs = flops // (2 * (query.shape[-1] + value.shape[-1]))
    for count in COUNTS:
        region = rehearsed(sdpa.attention, *arrays, threads=count, **options)
        assert region.threads == min(count, len(region.work))
        assert region.work.sum() == pairs * (query.shape[-1] + value.shape[-1] + 16)


@pytest.mark.parametrize("name", CALLS)
def test_units_of_gradients_are_all_the_work(name):
    """Of five products where heads are whole, of seven where they are cut: nothing else."""
    sizes, options = CALLS[name]
    arrays = draw(*sizes)
    out, lse = sdpa.attention(*arrays, return_lse=True, **options)
    *_, D, E = sizes
    pairs = sdpa.explain(*arrays, **options).flops // (2 * (D + E))
    whole, cut = pairs * (3 * D + 2 * E + 16), pairs * (4 * D + 3 * E + 32)
    assert rehearsed(sdpa.attention_backward, out, *arrays, out, lse, threads=1, **options).work.sum() == whole
    for count in COUNTS[1:]:
        region = rehearsed(sdpa.attention_backward, out, *arrays, out, lse, threads=count, **options)
        assert whole <= region.work.sum() <= cut


@EACH_ARITHMETIC
@pytest.mark.parametrize("name", CALLS)
def test_bits_of_any_cut(kernel, dtype, name):
    """Trees of parts, of which threads take nodes of any level; and rows cut down to a vector."""
    sizes, options = CALLS[name]
    arrays = draw(*sizes, dtype=dtype)
    expected = sdpa.attention(*arrays, return_lse=True, threads=1, **options)
    for count in 2, 3, 8, 24:
        for one, other in zip(sdpa.attention(*arrays, return_lse=True, threads=count, **options), expected):
            assert_same_bits(one, other)


@EACH_ARITHMETIC
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(90, 0), softcap=3.0)], ids=str)
def test_bits_of_gradients_of_any_cut(kernel, dtype, options):
    """Keys are cut within blocks, down to 32 of them, and rows down to a vector."""
    arrays = draw(1, 4, 2, 210, 330, 24, 20, dtype=dtype)
    out, lse = sdpa.attention(*arrays, return_lse=True, **options)
    expected = sdpa.attention_backward(out, *arrays, out, lse, threads=1, **options)
    for count in 2, 5, 24:
        found = sdpa.attention_backward(out, *arrays, out, lse, threads=count, **options)
        for one, other in zip(found[:3], expected[:3]):
            assert_same_bits(one, other)


def test_the_longest_units_of_gradients_come_first():
    """Those of rows, then those of keys: with causality the threads fill up with the short ones in the end."""
    arrays = draw(1, 16, 4, 1024, 1024, 16, 16)
    out, lse = sdpa.attention(*arrays, return_lse=True, causal=True)
    work = rehearsed(sdpa.attention_backward, out, *arrays, out, lse, threads=64, causal=True).work
    assert (np.diff(work) > 0).sum() == 1
    assert work.sum() / 64 > 1.5 * work.max()


def test_one_token_has_work_for_many():
    query, key, value = draw(1, 32, 8, 1, 4096, 128, 128)
    assert len(rehearsed(sdpa.attention, query, key, value, threads=2).work) == 8  # heads: one stream for each thread
    units = rehearsed(sdpa.attention, query, key, value, threads=64).work
    assert len(units) == 64 and units.min() == units.max()


def test_memory_of_parts_is_that_of_the_threads():
    """Not of the keys: units are as large as the threads allow."""
    for keys in 100_000, 3_000_000:
        query, key, value = (np.broadcast_to(np.float32(0), (1, 2, n, 128)) for n in (1, keys, keys))
        assert sdpa.explain(query, key, value, threads=8).scratch_bytes < 8 * 500_000
        assert len(rehearsed(sdpa.attention, query, key, value, threads=192).work) <= 2 * 1024


def test_more_blocks_of_a_projection_for_more_threads():
    """Two panels: with two threads one block of rows, with many more."""
    weight, x = np.ones((128, 600), np.float32), np.ones((64, 600), np.float32)
    expected = sdpa.Linear(weight, threads=2)(x)
    for count, units in (2, 2), (16, 12):
        linear = sdpa.Linear(weight, threads=count)
        assert_same_bits(linear(x), expected)
        assert len(rehearsed(linear, x).work) >= units


def test_panels_are_cut_where_there_are_fewer_than_threads(kernel):
    """Down to a line of the cache; with other kernels than AVX-512 a panel has no more."""
    x, linear = np.ones((1, 600), float32), sdpa.Linear(np.ones((64 * 40, 600), float32))
    linear(x)  # which packs the weights
    for count in 1, 2, 8, 40, 80, 160:
        work = rehearsed(linear, x, threads=count).work
        assert work.sum() == 64 * 40 * 600
        assert len(work) == max(40, count) or (kernel.name != "avx512" and len(work) >= 160)


def test_nothing_is_computed_in_a_rehearsal():
    x = np.ones((1, 2, 64, 16), np.float32)
    out = np.full_like(x, 7)
    assert len(_core.rehearse(lambda: sdpa.attention(x, x, x, out=out))) == 1
    assert (out == 7).all()
    sdpa.attention(x, x, x, out=out)
    assert (out == 1).all()


def test_an_error_ends_a_rehearsal():
    with pytest.raises(ZeroDivisionError):
        _core.rehearse(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="another rehearsal"):
        _core.rehearse(lambda: _core.rehearse(lambda: None))
    assert _core.rehearse(lambda: None) == []


# Memory that all threads read.


@pytest.mark.parametrize("text, nodes_there", [("0\n", 1), ("0-1\n", 2), ("0,2-4\n", 4), ("", 1)])
def test_nodes_that_have_memory(tmp_path, text, nodes_there):
    (tmp_path / "has_memory").write_text(text)
    assert nodes.count(tmp_path) == nodes_there
    assert nodes.count(tmp_path / "nowhere") == 1


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 4095, 5 << 20, (9 << 20) + 4097])
def test_each_page_is_touched(count, size):
    """And nothing but a number on each: what is touched is new."""
    for begin in 0, 64, 4096 + 8:
        array = np.full(size + begin, 1, np.uint8)[begin:]
        _core.touch(array, count)
        touched = np.flatnonzero(array == 0)
        pages = (array.ctypes.data + touched) // 4096 if touched.size else touched
        whole = (size + (array.ctypes.data % 4096)) // 4096
        assert len(touched) >= max(1, whole - 1) and len(np.unique(pages)) == len(touched)


def test_caches_on_a_machine_with_two_nodes(monkeypatch):
    """They hold the same."""
    seen = []
    monkeypatch.setattr(_core, "touch", lambda array, count: seen.append(array.nbytes))
    monkeypatch.setattr(nodes, "COUNT", 2)
    key, value = draw(1, 2, 2, 1, 20_000, 128, 128)[1:]
    cache = sdpa.KVCache(1, 2, 128)
    cache.append(key, value)
    assert (cache.keys == key).all() and (cache.values == value).all()
    sdpa.PagedKVCache(1000, 16, 2, 128)
    assert len(seen) == 4 and min(seen) >= nodes.LARGE
