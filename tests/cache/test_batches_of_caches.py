"""What adapters of other libraries do to caches: choose batches, as beam search does, and read tokens."""

import numpy as np
import pytest

import sdpa
from sdpa._cache import kv

DTYPES = ["float32", "bfloat16", "int8"]


def filled(dtype, lengths=(), **options):
    """A cache of 3 batches, and the keys of all its tokens; a prompt of 9 tokens and 7 more, one by one."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 3, 2, 16, 8), np.float32)
    cache = sdpa.KVCache(3, 2, 8, dtype=dtype, **options)
    if lengths:
        cache.append(key, value, lengths=lengths)
        return cache, key
    cache.append(key[:, :, :9], value[:, :, :9])
    for at in range(9, 16):
        cache.append(key[:, :, at : at + 1], value[:, :, at : at + 1])
    return cache, key


@pytest.mark.parametrize("options", [{}, dict(window=4), dict(window=4, keep=2), dict(lengths=(16, 3, 9))], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_select(dtype, options):
    """The same bits as those batches of the old cache, which stays as it was; then each changes on its own."""
    cache, _ = filled(dtype, **options)
    query = np.random.default_rng(1).standard_normal((3, 4, 1, 8), np.float32)
    before, batches = cache.attend(query), [2, 0, 0, 1, 2]
    chosen = kv.select(cache, batches)
    np.testing.assert_array_equal(chosen.attend(query[batches]), before[batches])
    assert chosen.lengths.tolist() == cache.lengths[batches].tolist() and chosen.batch == 5
    key, value = np.random.default_rng(2).standard_normal((2, 5, 2, 1, 8), np.float32)
    chosen.append(key, value)
    cache.append(key[[1, 3, 0]], value[[1, 3, 0]])  # from which the others came
    np.testing.assert_array_equal(cache.attend(query), chosen.attend(query[batches])[[1, 3, 0]])
    assert (chosen.dtype, chosen.window, chosen.keep, chosen.group) == (cache.dtype, cache.window, cache.keep, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_tokens(dtype, window):
    cache, key = filled(dtype, window=window)
    spread = abs(key).max() / 127 if dtype == "int8" else 2**-8 * abs(key).max()
    for begin, end in ((13, 16), (12, 14), (12, 12), *(() if window else ((0, 16), (3, 9)))):
        found = kv.tokens(cache, "keys", begin, end)
        assert found.shape == (3, 2, end - begin, 8)
        np.testing.assert_allclose(found.astype(np.float32), key[:, :, begin:end], atol=spread)
    if window is None and dtype != "int8":
        assert np.shares_memory(kv.tokens(cache, "keys", 3, 9), cache.keys)


def test_tokens_that_are_gone():
    cache, _ = filled("float32", window=4)
    with pytest.raises(RuntimeError, match="the values of the tokens 5 to 15 are not in the cache any more"):
        kv.tokens(cache, "values", 5, 16)
    with pytest.raises(RuntimeError, match="the keys of the tokens 14 to 16 are not in the cache"):
        kv.tokens(cache, "keys", 14, 17)
