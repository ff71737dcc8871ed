"""What the caches of this library cost: their calls against others of this library that do the same work.

python -m benchmarks.studies.caches                         # all of it, about three minutes
python -m benchmarks.studies.caches --only paged --seconds 10 --json caches.json
python -m benchmarks.studies.caches --update                # writes the tables into benchmarks/README.md
"""

import itertools
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sdpa
from benchmarks.measure import variants
from benchmarks.measure.variants import Comparison, Variant

HEADS, KV_HEADS, DIM = 32, 8, 128
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tokens(count, heads=KV_HEADS, seed=0):
    """(heads, count, DIM) of normal numbers."""
    return np.random.default_rng(seed).standard_normal((heads, count, DIM), np.float32)


def int8_variants(length=32768):
    """One query, of bfloat16 in all variants, and caches that hold the same keys."""
    query = tokens(1, HEADS)[None].astype(BFLOAT16)
    for label, options in {
        "bfloat16": {"dtype": BFLOAT16},
        **{f"int8, a scale for {group}": {"dtype": np.int8, "group": group} for group in (32, 64, 128)},
    }.items():
        cache = sdpa.KVCache(1, KV_HEADS, DIM, **options)
        cache.append(tokens(length, seed=1)[None], tokens(length, seed=2)[None])
        arrays = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        yield Variant(
            label, lambda cache=cache: cache.attend(query), read=tuple(array for array in arrays if array is not None)
        )


def paged_variants(length):
    """One query in float32: contiguous keys, and pages that follow each other or lie anywhere in the pool."""
    query, key, value = tokens(1, HEADS), tokens(length, seed=1), tokens(length, seed=2)
    yield Variant("contiguous", lambda: sdpa.attention(query, key, value), read=(key, value))
    for page_size, scattered in itertools.product((16, 64, 128), (False, True)):
        cache = sdpa.PagedKVCache(length // page_size, page_size, KV_HEADS, DIM)
        if scattered:
            scatter(cache)
        sequence = cache.allocate()
        cache.append(sequence, key, value)
        order = "anywhere" if scattered else "in order"
        yield Variant(
            f"pages of {page_size}, {order}", lambda cache=cache, sequence=sequence: cache.attend(query, sequence)
        )


def scatter(cache):
    """Free the pages of the cache in a random order, which is that in which they will be given out again."""
    sequences = [cache.allocate(tokens=cache.page_size) for _ in range(cache.pages)]
    for index in np.random.default_rng(0).permutation(len(sequences)):
        cache.free(sequences[index])


def step_variants(dtype, length=256):
    """One token more, always the last of so many: the kernel on its own, and what the cache adds."""
    cache, tokens_by_position, query = full_cache(dtype, length)
    keys, values, token = cache.keys, cache.values, tokens_by_position[-1]

    def forget():
        cache.truncate(length - 1)

    def step():
        cache.append(*token)
        return cache.attend(query)

    def step_again():
        forget()
        return step()

    yield Variant("attention on the arrays of the cache", lambda: sdpa.attention(query, keys, values))
    yield Variant("attend", lambda: cache.attend(query))
    yield Variant("append, attend", step, before=forget)
    yield Variant("truncate, append, attend", step_again)


def growing_variants(dtype, length=256, steps=64):
    """So many tokens one after the other, half of them up to the length and half beyond; means over them."""
    first, last = length - steps // 2, length + steps // 2
    cache, tokens_by_position, query = full_cache(dtype, last)
    views = itertools.cycle([(cache.keys[:, :, :end], cache.values[:, :, :end]) for end in range(first + 1, last + 1)])
    view, token = [], []

    def next_view():
        view[:] = next(views)

    def next_token():
        if len(cache) == last:
            cache.truncate(first)
        token[:] = tokens_by_position[len(cache)]

    def step():
        cache.append(*token)
        return cache.attend(query)

    yield Variant(
        "attention on the arrays of the cache", lambda: sdpa.attention(query, *view), before=next_view, steps=steps
    )
    yield Variant("append, attend", step, before=next_token, steps=steps)


def full_cache(dtype, length):
    """A cache of so many tokens, key and value of each of them, and a query."""
    cache = sdpa.KVCache(1, KV_HEADS, DIM, dtype=dtype)
    key, value = (tokens(length, seed=seed)[None].astype(dtype) for seed in (1, 2))
    cache.append(key, value)
    one_by_one = [(key[:, :, n : n + 1].copy(), value[:, :, n : n + 1].copy()) for n in range(length)]
    return cache, one_by_one, tokens(1, HEADS)[None].astype(dtype)


def mixed_variants(decoding=(16, 100, 500, 1000, 2000, 4000, 8000), prefilling=(256, 1024), page_size=16):
    """A batch of a server, in float32: sequences that continue with one token, and one in the middle of its prompt."""
    counts, lengths = [*[1] * len(decoding), prefilling[0]], [*decoding, prefilling[1]]
    sequences = [
        (tokens(count, HEADS), tokens(length, seed=1), tokens(length, seed=2))
        for count, length in zip(counts, lengths, strict=True)
    ]
    cache = sdpa.PagedKVCache(sum(-(-length // page_size) for length in lengths), page_size, KV_HEADS, DIM)
    numbers = [cache.allocate() for _ in lengths]
    for number, (_, key, value) in zip(numbers, sequences, strict=True):
        cache.append(number, key, value)
    rows, keys, values = (
        np.ascontiguousarray(np.concatenate(arrays, axis=1).swapaxes(0, 1)) for arrays in zip(*sequences, strict=True)
    )
    starts, key_starts = ([0, *itertools.accumulate(numbers)] for numbers in (counts, lengths))
    yield Variant(
        "attention, a call for each",
        lambda: [sdpa.attention(query, key, value, causal=True) for query, key, value in sequences],
    )
    yield Variant(
        "attention_varlen",
        lambda: sdpa.attention_varlen(rows, keys, values, cu_seqlens_q=starts, cu_seqlens_k=key_starts, causal=True),
    )
    yield Variant(f"pages of {page_size}", lambda: cache.attend(rows, numbers, cu_seqlens_q=starts))


COMPARISONS = [
    Comparison(
        "int8",
        "int8 from memory: 32768 keys, one query of bfloat16 (aim: 1.7 times as fast as a cache of bfloat16)",
        int8_variants,
    ),
    *(
        Comparison(
            f"paged-{length}",
            f"Pages: {length} keys, one query, float32 (aim: 0.95 of the speed on contiguous arrays)",
            lambda length=length: paged_variants(length),
        )
        for length in (4096, 32768)
    ),
    *(
        Comparison(
            f"{name}-{dtype.name}",
            f"A step of decoding, {text}, {dtype.name} (aim: at most 5 µs more than the kernel)",
            lambda variants=variants, dtype=dtype: variants(dtype),
        )
        for dtype in (np.dtype(np.float32), BFLOAT16)
        for name, text, variants in (
            ("step", "256 keys", step_variants),
            ("growing", "the cache growing from 224 to 288 keys", growing_variants),
        )
    ),
    Comparison(
        "mixed",
        "A mixed batch: 7 sequences of 16 to 8000 keys with one query, one of 1024 with 256, float32",
        mixed_variants,
    ),
]

if __name__ == "__main__":
    variants.main(COMPARISONS, "benchmarks.studies.caches", __doc__)
