"""Many rows and many keys: the keys of each row are cut into parts, which one thread sums or several, as with few rows
(test_few_rows.py has these)."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.draw import HALF, WIDE, draw, float32, inf, nan
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
from sdpa import _core
from sdpa._runtime import threads

EACH_DTYPE = on_kernels(WIDE, HALF, half="best")
EACH_ARITHMETIC = on_kernels({"float32": float32, "bfloat16": bfloat16}, half="best")
LENGTHS = {2049: 1, 3071: 1, 3072: 2, 3073: 2, 4096: 2, 5119: 2, 5120: 3, 9000: 4}  # keys: parts
M, N, JOINT = 9, 6000, 2048  # queries, keys, and where the second of three parts begins


def many(keys=N, **sizes):
    """Eighteen rows of a key/value head."""
    return draw(**dict(B=1, H=2, G=1, M=M, N=keys, D=24, E=20) | sizes)


@EACH_DTYPE
@pytest.mark.parametrize("keys", LENGTHS)
def test_numbers_of_keys(kernel, dtype, keys):
    for D, E in (16, 16), (5, 7):  # read as they lie, or copied
        arrays = many(keys, D=D, E=E, dtype=dtype)
        plan = str(sdpa.explain(*arrays))
        assert "many rows" in plan and (LENGTHS[keys] == 1 or f"cut into {LENGTHS[keys]} parts" in plan)
        check(*arrays, threads=1)
        check(*arrays, threads=3, causal=True)


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 3])
def test_numbers_of_rows(kernel, dtype, threads):
    """A vector, several tasks, and more than a bundle of them."""
    for queries in 18, 65, 700:
        arrays = draw(1, 1, 1, queries, 3100, 8, 8, dtype=dtype)
        check(*arrays, threads=threads)
        check(*arrays, threads=threads, causal=True, window=(900, 0))


@EACH_ARITHMETIC
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(kernel, dtype, name):
    arrays = many(B=2, dtype=dtype)
    check(*arrays, threads=2, **options_for(*arrays[:2], name))


ACROSS = {
    "window over the joint": dict(window=(700, 0), q_offset=2600),
    "window up to the joint": dict(window=(700, 0), q_offset=JOINT - M),
    "window from the joint": dict(window=(0, 300), q_offset=JOINT),
    "window in the last part": dict(window=(100, None), q_offset=5900),
    "window before all keys": dict(window=(None, -M), q_offset=0),
    **masks_and_biases(N, JOINT, 2 * JOINT, np.arange(M)[:, None] % 2 == 1, one_key=4000),
    "lengths": dict(kv_lengths=np.array([1000, N]), causal=True),
    "lengths at the joint": dict(kv_lengths=np.array([JOINT, 3072])),
    "lengths of nothing": dict(kv_lengths=np.array([0, 4096])),
}


@EACH_ARITHMETIC
@pytest.mark.parametrize("options", ACROSS.values(), ids=ACROSS)
def test_options_across_parts(kernel, dtype, options):
    arrays = many(B=2, dtype=dtype)
    check(*arrays, threads=2, **options)
    check_with_more(*arrays, threads=1, **options)


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [dict(mask=np.arange(N) < JOINT), dict(kv_lengths=3200)], ids=["mask", "lengths"])
def test_hidden_nan(kernel, dtype, threads, options):
    assert_hidden_is_as_nothing(*many(dtype=dtype), slice(3200, 3300), threads=threads, **options)


@EACH_DTYPE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("place", [5, JOINT - 1, JOINT, N - 1])
def test_visible_nan(kernel, dtype, threads, place):
    """It reaches what it should reach, and nothing else."""
    query, key, value = many(dtype=dtype)
    mask = np.ones((2, M, N), bool)
    mask[1, ::3, place] = False
    expected, expected_lse = both(query, key, value, threads=threads, mask=mask)
    for poison in nan, inf:
        value[..., place, 3] = poison
        out, lse = both(query, key, value, threads=threads, mask=mask)
        reached = mask[None, :, :, place]
        assert (np.isnan(out[..., 3]) if np.isnan(poison) else out[..., 3] == inf)[reached].all()
        out[..., 3][reached] = expected[..., 3][reached]
        assert_both_same((out, lse), (expected, expected_lse))


@EACH_ARITHMETIC
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_threads(kernel, dtype, name, monkeypatch):
    """One thread sums the parts one after the other, several share them, and where they are many also the rows."""
    monkeypatch.setattr(threads, "MOST", 40)
    arrays = many(B=2, keys=9000, dtype=dtype)
    options = options_for(*arrays[:2], name)
    expected = both(*arrays, threads=1, **options)
    for count in 2, 3, 5, 40:
        assert_both_same(both(*arrays, threads=count, **options), expected)


@EACH_DTYPE
@pytest.mark.parametrize("cuts", [[17], [32, 64], [18, 40, 61, 90]], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(causal=True, window=(1800, 0))], ids=str)
def test_bits_of_some_rows(kernel, dtype, cuts, options):
    """They do not depend on the others, whose parts may be others, too."""
    rows, keys = 120, 5300
    query, key, value = draw(1, 1, 1, rows, keys, 16, 12, dtype=dtype)
    offset = 3000
    out, lse = both(query, key, value, q_offset=offset, **options)
    for begin, end in zip([0, *cuts], [*cuts, rows]):
        alone = both(query[:, :, begin:end], key, value, q_offset=offset + begin, **options)
        assert_both_same(alone, (out[:, :, begin:end], lse[:, :, begin:end]))


@EACH_DTYPE
def test_bits_of_lengths_sequences_and_pages(kernel, dtype):
    """Parts are those of the keys that are there, wherever they lie."""
    lengths = np.array([9000, 40, 3071, 3072, 5120])
    query, key, value = draw(len(lengths), 2, 1, M, 9000, 8, 12, dtype=dtype)
    rows = query.swapaxes(1, 2).reshape(-1, 2, 8)
    packed = [np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)]) for x in (key, value)]
    starts = dict(cu_seqlens_q=np.arange(len(lengths) + 1) * M, cu_seqlens_k=np.cumsum([0, *lengths]))
    cache = sdpa.PagedKVCache(500, 64, 1, 8, value_dim=12, dtype=key.dtype)
    sequences = [cache.allocate() for _ in lengths]
    cache.append(sequences, *packed, cu_seqlens=starts["cu_seqlens_k"])
    for count in 1, 3:
        out, lse = both(query, key, value, kv_lengths=lengths, causal=True, threads=count)
        in_sequences = sdpa.attention_varlen(rows, *packed, **starts, causal=True, return_lse=True, threads=count)
        in_pages = cache.attend(rows, sequences, cu_seqlens_q=starts["cu_seqlens_q"], return_lse=True, threads=count)
        for b, length in enumerate(lengths):
            alone = both(query[b], key[b, :, :length], value[b, :, :length], causal=True, threads=count)
            assert_both_same(alone, (out[b], lse[b]))
            for result in in_sequences, in_pages:
                of_b = [x[b * M : (b + 1) * M].swapaxes(0, 1) for x in result]
                assert_both_same(of_b, alone)


def test_a_chunk_has_work_for_many(monkeypatch):
    """Few tasks behind many keys."""
    monkeypatch.setattr(threads, "MOST", 128)
    query, key, value = draw(1, 32, 8, 16, 8192, 128, 128)
    for count in 2, 64, 128:
        (region,) = _core.rehearse(lambda count=count: sdpa.attention(query, key, value, causal=True, threads=count))
        assert region.work.sum() / count / region.work.max() > 0.95


@pytest.mark.parametrize("count", [1, 2])
def test_memory(count):
    """It does not grow with the keys: there is a limit to the number of parts."""
    arrays = draw(1, 1, 1, 70, 400_000, 8, 8)
    assert extra_memory(*arrays, threads=count) < 2e6 * count
