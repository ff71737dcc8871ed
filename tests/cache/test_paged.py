"""The paged cache: what it computes, who owns which page, and that what fails changes nothing."""

import collections
import copy
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import HALF, WIDE, float16, float32, float64, inf, nan, rng
from support.kernels import on_kernels
from support.packed import EVERYTHING, OPTIONS, cumulative, draw_packed, judge_packed, options_for
from support.problems import examples

import sdpa

PAGE_SIZES = [1, 3, 16, 64, 128, 200]


def filled(counts, page_size=16, G=2, D=20, E=12, dtype=float32, spare=0, seed=0, chunk=None):
    """A cache with sequences of so many tokens, in pages that lie in disorder; the sequences; key and value, packed."""
    (_, key, value), _ = draw_packed((), counts, H=G, G=G, D=D, E=E, dtype=dtype, seed=seed)
    pages = sum(-(-count // page_size) for count in counts) + spare
    cache = sdpa.PagedKVCache(max(pages, 1), page_size, G, D, value_dim=E, dtype=key.dtype)
    sequences = [cache.allocate() for _ in counts]
    left, done = np.array(counts, int), np.zeros(len(counts), int)
    start, turn = cumulative(counts)[:-1], rng(seed)
    while left.any():  # a bit of each in turn
        take = np.minimum(left, turn.integers(1, chunk or 2 * page_size + 2, len(counts)))
        rows = np.concatenate([np.arange(b + d, b + d + n) for b, d, n in zip(start, done, take)])
        cache.append(sequences, key[rows], value[rows], cu_seqlens=cumulative(take))
        left, done = left - take, done + take
    assert [cache.length(s) for s in sequences] == list(counts)
    return cache, sequences, key, value


def queries(counts, H=4, D=20, dtype=float32):
    return rng(9).standard_normal((sum(counts), H, D)).astype(dtype)


def tokens_of(cache, sequence):
    """What `attend` sees of a sequence: the values (tokens, G, E), and the sums of the keys (tokens, G)."""
    count = cache.length(sequence)
    query = np.ones((count, cache.kv_heads, cache.head_dim), np.promote_types(cache.dtype, float32))
    value, score = cache.attend(
        query.swapaxes(0, 1), sequence, mask=np.eye(count, dtype=bool), causal=False, scale=1, return_lse=True
    )
    return value.swapaxes(0, 1), score.T


def state(cache):
    """All that must not change."""
    return (
        cache.free_pages, repr(cache), list(cache._pool.owners), sorted(cache._pool.free),
        {number: (s.length, s.pages.tolist()) for number, s in cache._pool.sequences.items()},
        cache._pool.keys.tobytes(), cache._pool.values.tobytes(),
    )  # fmt: skip


# What it computes.

MIXED = (1, 40, 3, 1, 0, 1, 17), (301, 40, 3, 1, 5, 64, 129)
ALIKE = {
    "decoding": ((1, 1, 1, 1), (1, 200, 16, 399)),
    "guessing ahead": ((2, 1, 3, 2), (2, 200, 16, 199)),
    "prefilling": ((40, 70, 33), (40, 130, 200)),
}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@on_kernels(WIDE, HALF, half="best")
def test_mixed_batch(kernel, dtype, page_size):
    q_counts, k_counts = MIXED
    cache, sequences, key, value = filled(k_counts, page_size, dtype=dtype)
    query, where = queries(q_counts, dtype=dtype), dict(cu_seqlens_q=cumulative(q_counts))
    out, lse = cache.attend(query, sequences, return_lse=True, **where)
    judge_packed(out, lse, query, key, value, causal=True, cu_seqlens_k=cumulative(k_counts), **where)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("q_counts, k_counts", ALIKE.values(), ids=ALIKE)
@on_kernels(WIDE, HALF, half="best")
def test_bits_of_keys_in_one_piece(kernel, dtype, q_counts, k_counts, page_size):
    cache, sequences, key, value = filled(k_counts, page_size, dtype=dtype)
    query = queries(q_counts, dtype=dtype)
    out, lse = cache.attend(query, sequences, cu_seqlens_q=cumulative(q_counts), return_lse=True)
    for b, sequence in enumerate(sequences):
        q, k = (slice(*cumulative(counts)[b : b + 2]) for counts in (q_counts, k_counts))
        arrays = [x.swapaxes(0, 1) for x in (query[q], key[k], value[k])]
        expected, expected_lse = sdpa.attention(*arrays, causal=True, return_lse=True)
        assert_same_bits(out[q], expected.swapaxes(0, 1))
        assert_same_bits(lse[q], expected_lse.T)
        alone, alone_lse = cache.attend(arrays[0], sequence, return_lse=True)
        assert_same_bits(alone, expected)
        assert_same_bits(alone_lse, expected_lse)


@on_kernels(WIDE, HALF, half="best")
@pytest.mark.parametrize("page_size", [5, 16, 48, 200])
@pytest.mark.parametrize("order", ["one behind the other", "in disorder", "a gap"])
def test_bits_of_pages_in_any_order(kernel, dtype, page_size, order):
    """So many bytes that they are fetched ahead; pages that follow each other are read as one."""
    N, D = 4500, 64
    cache = sdpa.PagedKVCache(N // page_size + 2, page_size, 2, D, dtype=np.dtype(dtype))
    if order == "in disorder":
        single = [cache.allocate(tokens=1) for _ in range(cache.pages)]
        for i in rng(3).permutation(cache.pages):
            cache.free(single[i])
    key, value = (rng(i).standard_normal((2, N, D)).astype(dtype) for i in (1, 2))
    sequence, other = cache.allocate(), cache.allocate()
    for begin, end in (0, 700), (700, N):
        cache.append(sequence, key[:, begin:end], value[:, begin:end])
        if order == "a gap" and begin == 0:
            cache.append(other, key[:, :1], value[:, :1])
    query = rng(0).standard_normal((4, 1, D)).astype(dtype)
    for threads in 1, 2:
        expected = sdpa.attention(query, key, value, threads=threads)
        assert_same_bits(cache.attend(query, sequence, threads=threads), expected)
    assert_same_bits(cache.attend(query, sequence), expected)


@on_kernels(WIDE, HALF, half="best")
@pytest.mark.parametrize("M", [1, 5])
def test_bits_without_options_are_those_of_their_defaults(kernel, dtype, M):
    """Without options a call takes a shorter way."""
    cache, sequences, _, _ = filled((40, 3, 17), spare=2, dtype=dtype)
    empty = cache.allocate(tokens=20)
    query = queries((1,) * 4, dtype=dtype)
    some = [*sequences, empty]
    for causal in True, False:
        expected = cache.attend(query, some, causal=causal, scale=20**-0.5)
        assert_same_bits(cache.attend(query, some, causal=causal), expected)
        one = np.ascontiguousarray(queries((M,), dtype=dtype).swapaxes(0, 1))
        expected = cache.attend(one, sequences[1], causal=causal, scale=20**-0.5)
        assert_same_bits(cache.attend(one, sequences[1], causal=causal), expected)
        backwards = one[:, ::-1]
        expected = cache.attend(backwards.copy(), sequences[1], causal=causal)
        assert_same_bits(cache.attend(backwards, sequences[1], causal=causal), expected)
    assert not cache.attend(query[:1], [empty]).any()


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_that_of_attention_varlen(kernel, name):
    q_counts, k_counts = MIXED
    cache, sequences, key, value = filled(k_counts, 16)
    query = queries(q_counts)
    options = dict(causal=False) | options_for(query, k_counts, name)
    out, lse = cache.attend(query, sequences, cu_seqlens_q=cumulative(q_counts), return_lse=True, **options)
    where = dict(cu_seqlens_q=cumulative(q_counts), cu_seqlens_k=cumulative(k_counts))
    judge_packed(out, lse, query, key, value, **where, **options)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_everything_at_once(page_size):
    q_counts, k_counts = MIXED
    cache, sequences, key, value = filled(k_counts, page_size)
    query = queries(q_counts)
    options = dict(causal=True) | options_for(query, k_counts, *EVERYTHING)
    out, lse = cache.attend(query, sequences, cu_seqlens_q=cumulative(q_counts), return_lse=True, **options)
    where = dict(cu_seqlens_q=cumulative(q_counts), cu_seqlens_k=cumulative(k_counts))
    judge_packed(out, lse, query, key, value, **where, **options)


@pytest.mark.parametrize("page_size", [7, 16, 1000])
def test_lengths_from_1_to_100_000(page_size):
    q_counts, k_counts = (1, 20, 1, 1, 3), (100_000, 20, 1, 1003, 99_001)
    cache, sequences, key, value = filled(k_counts, page_size, G=1, D=4, E=3, chunk=60_000)
    query, where = queries(q_counts, H=2, D=4), dict(cu_seqlens_q=cumulative(q_counts))
    out, lse = cache.attend(query, sequences, return_lse=True, **where)
    judge_packed(out, lse, query, key, value, causal=True, cu_seqlens_k=cumulative(k_counts), **where)


@pytest.mark.parametrize("cached, asking", [(bfloat16, float32), (float16, float32), (float32, float64)])
def test_queries_wider_than_the_cache(kernel, cached, asking):
    q_counts, k_counts = MIXED
    cache, sequences, key, value = filled(k_counts, dtype=cached)
    assert cache.dtype == cached and cache.nbytes == cache.pages * 16 * 2 * (20 + 12) * np.dtype(cached).itemsize
    query, where = queries(q_counts, dtype=asking), dict(cu_seqlens_q=cumulative(q_counts))
    out, lse = cache.attend(query, sequences, return_lse=True, **where)
    judge_packed(out, lse, query, key, value, causal=True, cu_seqlens_k=cumulative(k_counts), **where)


def test_a_sequence_may_be_asked_twice(kernel):
    cache, (first, second), _, _ = filled((40, 7))
    query = queries((1, 1, 1))
    out = cache.attend(query, [first, second, first])
    for i, sequence in enumerate([first, second, first]):
        assert_same_bits(out[i : i + 1], cache.attend(query[i : i + 1], [sequence]))


def test_sequences_without_tokens_or_queries_and_no_sequences():
    cache, sequences, _, _ = filled((0, 5, 0))
    out, lse = cache.attend(queries((3, 0, 1)), sequences, cu_seqlens_q=[0, 3, 3, 4], return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    assert cache.attend(queries(()), []).shape == (0, 4, 12)
    assert cache.attend(queries((0,)).swapaxes(0, 1), sequences[1]).shape == (4, 0, 12)


def test_what_other_sequences_left_in_a_page_does_not_matter(kernel):
    cache, (first, second), _, _ = filled((40, 20), spare=3)
    query = queries((1, 30))
    clean = cache.attend(query, [first, second], cu_seqlens_q=[0, 1, 31], return_lse=True)
    bad = np.full((2, 48, 20), nan, float32), np.full((2, 48, 12), inf, float32)
    third = cache.allocate()
    cache.append(third, *bad)
    cache.append(first, bad[0][:, :3], bad[1][:, :3])
    cache.truncate(first, 40)
    cache.free(third)
    for actual, expected in zip(
        cache.attend(query, [first, second], cu_seqlens_q=[0, 1, 31], return_lse=True), clean
    ):  # fmt: skip
        assert_same_bits(actual, expected)
    again = cache.allocate()
    cache.append(again, np.ones((2, 2, 20)), np.ones((2, 2, 12)))
    assert (cache.attend(query[:1], [again]) == 1).all()


def test_result_is_laid_out_as_query_and_out_is_filled():
    cache, sequences, _, _ = filled((40, 7))
    query = queries((2, 1))
    expected = cache.attend(query, sequences, cu_seqlens_q=[0, 2, 3])
    out = np.empty((3, 4, 12), float32)
    assert cache.attend(query, sequences, cu_seqlens_q=[0, 2, 3], out=out) is out
    assert_same_bits(out, expected)
    query = np.ascontiguousarray(query.swapaxes(0, 1))
    expected = cache.attend(query, sequences[0])
    assert expected.flags.c_contiguous
    out = np.empty((4, 3, 12), float32)
    result, lse = cache.attend(query, sequences[0], out=out, return_lse=True)
    assert result is out and lse.shape == (4, 3)
    assert_same_bits(out, expected)


# What it keeps.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_one_by_one_and_all_at_once_keep_the_same(page_size):
    counts = (0, 1, 40, 200, 3, 1)
    (_, key, value), _ = draw_packed((), counts)
    ends = cumulative(counts)
    caches = [sdpa.PagedKVCache(300, page_size, 2, 20, value_dim=12) for _ in range(3)]
    for cache in caches:
        for _ in counts:
            cache.allocate()
    caches[0].append(range(6), key, value, cu_seqlens=ends)
    for b in range(6):
        own = slice(ends[b], ends[b + 1])
        caches[1].append(b, key[own].swapaxes(0, 1), value[own].swapaxes(0, 1))
        for i in range(own.start, own.stop):
            caches[2].append([b], key[i : i + 1], value[i : i + 1])
    for cache in caches:
        for b in range(6):
            kept, score = tokens_of(cache, b)
            np.testing.assert_array_equal(kept, value[ends[b] : ends[b + 1]])
            np.testing.assert_allclose(score, key[ends[b] : ends[b + 1]].sum(axis=-1), rtol=1e-5, atol=1e-5)
            assert len(cache.pages_of(b)) == -(-counts[b] // page_size)


def test_any_layout_is_appended():
    values = rng(0).standard_normal((2, 50, 12)).astype(float32)
    cache = sdpa.PagedKVCache(100, 7, 2, 12)
    layouts = [values, np.asfortranarray(values), np.flip(values, 1), np.repeat(values, 2, 1)[:, ::2], values[:, :1]]
    for given in layouts:
        given.flags.writeable = False
        sequence = cache.allocate()
        cache.append(sequence, given, given)
        np.testing.assert_array_equal(tokens_of(cache, sequence)[0].swapaxes(0, 1), given)


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64])
def test_what_is_appended_is_rounded(dtype):
    cache = sdpa.PagedKVCache(4, 4, 1, 3, dtype=dtype)
    values = np.array([[[1 / 3, 1e5, -1e300]]])
    sequence = cache.allocate()
    cache.append(sequence, np.zeros((1, 1, 3)), values)
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    assert_same_bits(cache._pool.values[cache.pages_of(sequence)[0], :, :1], expected)


# Who owns which page.


def one_token(cache, count=1, fill=1):
    return [np.full((count, cache.kv_heads, size), fill, cache.dtype) for size in (cache.head_dim, cache.value_dim)]


def small_cache(pages=8, page_size=4):
    return sdpa.PagedKVCache(pages, page_size, kv_heads=1, head_dim=2, value_dim=3)


def with_tokens(cache, count, fill=1):
    sequence = cache.allocate()
    cache.append([sequence], *one_token(cache, count, fill), cu_seqlens=[0, count])
    return sequence


def test_reserved_pages_are_filled_first():
    cache = small_cache()
    sequence = cache.allocate(tokens=9)
    assert cache.free_pages == 5 and cache.length(sequence) == 0
    pages = cache.pages_of(sequence)
    cache.append(sequence, np.ones((1, 12, 2)), np.ones((1, 12, 3)))
    assert cache.pages_of(sequence) == pages
    cache.append(sequence, np.ones((1, 1, 2)), np.ones((1, 1, 3)))
    assert cache.pages_of(sequence)[:3] == pages and cache.free_pages == 4


def test_numbers_of_sequences_do_not_come_again():
    cache = small_cache()
    seen = set()
    for _ in range(20):
        first = cache.allocate()
        second = cache.fork(first)
        assert not {first, second} & seen and first != second
        seen |= {first, second}
        cache.free(first)
        cache.free(second)
    assert cache.free_pages == 8


def test_fork_shares_all_pages_and_copies_the_last_when_somebody_writes():
    cache = small_cache()
    old = with_tokens(cache, 6)
    new = cache.fork(old)
    assert cache.free_pages == 6 and cache.pages_of(new) == cache.pages_of(old)
    cache.append([old], *one_token(cache, fill=5))
    assert cache.free_pages == 5 and cache.pages_of(new)[0] == cache.pages_of(old)[0]
    assert cache.pages_of(new)[1] != cache.pages_of(old)[1]
    cache.append([new], *one_token(cache, fill=7))  # now its own
    assert cache.free_pages == 5
    assert tokens_of(cache, old)[0][:, 0, 0].tolist() == [1] * 6 + [5]
    assert tokens_of(cache, new)[0][:, 0, 0].tolist() == [1] * 6 + [7]
    cache.free(old)
    assert cache.free_pages == 6 and tokens_of(cache, new)[0][:, 0, 0].tolist() == [1] * 6 + [7]


def test_fork_of_full_pages_copies_nothing():
    cache = small_cache()
    old = with_tokens(cache, 8)
    new = cache.fork(old)
    cache.append([old, new], *one_token(cache, 2))
    assert cache.pages_of(old)[:2] == cache.pages_of(new)[:2] and cache.free_pages == 4


def test_reserved_pages_stay_with_the_old_sequence():
    cache = small_cache()
    old = cache.allocate(tokens=12)
    cache.append([old], *one_token(cache))
    new = cache.fork(old)
    assert len(cache.pages_of(old)) == 3 and len(cache.pages_of(new)) == 1
    cache.free(old)
    assert cache.free_pages == 7


def test_the_last_of_those_that_share_a_page_keeps_it():
    cache = small_cache(pages=5)
    sequences = [with_tokens(cache, 6)]
    sequences += [cache.fork(sequences[0]) for _ in range(3)]
    key, value = one_token(cache, 4)
    value[:] = np.arange(4)[:, None, None]
    cache.append(sequences, key, value)  # three copies: there are no more pages
    assert cache.free_pages == 0
    for i, sequence in enumerate(sequences):
        assert tokens_of(cache, sequence)[0][:, 0, 0].tolist() == [1] * 6 + [i]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_copies_come_before_writes(order):
    """One keeps the page and writes into what the other has yet to copy."""
    cache = small_cache()
    long = with_tokens(cache, 3)
    short = cache.fork(long)
    cache.truncate(short, 1)
    both = [(long, 5), (short, 7)]
    key, value = one_token(cache, 2)
    value[:] = np.array([both[i][1] for i in order])[:, None, None]
    cache.append([both[i][0] for i in order], key, value)
    assert tokens_of(cache, long)[0][:, 0, 0].tolist() == [1, 1, 1, 5]
    assert tokens_of(cache, short)[0][:, 0, 0].tolist() == [1, 7]
    assert cache.free_pages == 6


def test_appending_nothing_copies_nothing():
    cache = small_cache()
    old = with_tokens(cache, 3)
    new = cache.fork(old)
    cache.append([old, new], *one_token(cache, 0), cu_seqlens=[0, 0, 0])
    cache.append(old, np.ones((1, 0, 2)), np.ones((1, 0, 3)))
    cache.append([], *one_token(cache, 0))
    assert cache.pages_of(old) == cache.pages_of(new) and cache.free_pages == 7


def test_truncate_gives_back_pages():
    cache = small_cache()
    sequence = with_tokens(cache, 9)
    for n, free in (9, 5), (8, 6), (5, 6), (4, 7), (0, 8):
        cache.truncate(sequence, n)
        assert cache.length(sequence) == n and cache.free_pages == free
    cache.append([sequence], *one_token(cache, fill=3))
    assert tokens_of(cache, sequence)[0].tolist() == [[[3, 3, 3]]]


def test_repr_and_sizes():
    cache = small_cache()
    with_tokens(cache, 6)
    assert cache.nbytes == 8 * 4 * (2 + 3) * 4
    assert repr(cache) == "<sdpa.PagedKVCache (8, 1, 4, 2 and 3) float32, 1 sequences, 6 pages free, 640 bytes>"
    assert (cache.pages, cache.page_size, cache.kv_heads, cache.head_dim, cache.value_dim) == (8, 4, 1, 2, 3)


@pytest.mark.parametrize("kind", [tuple, np.array, lambda x: np.array(x, np.int32), lambda x: iter(x)])
def test_sequences_of_any_kind(kind):
    cache = small_cache()
    first, second = with_tokens(cache, 3), with_tokens(cache, 5)
    cache.append(kind([first, second]), *one_token(cache, 2))
    assert cache.attend(np.ones((2, 1, 2), float32), kind([second, first])).shape == (2, 1, 3)
    cache.truncate(np.int64(first), np.int64(2))
    cache.free(np.int64(first))
    assert cache.length(np.int32(second)) == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_independent(copied):
    cache = small_cache()
    first = with_tokens(cache, 6)
    second = cache.fork(first)
    twin = copied(cache)
    assert state(twin) == state(cache)
    for one, fill in (cache, 5), (twin, 7):
        one.append([second], *one_token(one, fill=fill))
    for one, fill in (cache, 5), (twin, 7):
        assert tokens_of(one, second)[0][:, 0, 0].tolist() == [1] * 6 + [fill]
        assert tokens_of(one, first)[0][:, 0, 0].tolist() == [1] * 6


# Any history, against lists.


class History(RuleBasedStateMachine):
    """Tokens are numbers; `model` has the list of each sequence."""

    sequences = Bundle("sequences")
    PAGES = 12

    def __init__(self):
        super().__init__()
        self.model, self.given = {}, 0

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7]))
    def begin(self, page_size):
        self.cache = sdpa.PagedKVCache(self.PAGES, page_size, 2, 1, value_dim=2, dtype=float64)

    def new_tokens(self, count):
        self.given += count
        return np.arange(self.given - count, self.given, dtype=float64)

    @rule(target=sequences, tokens=st.integers(0, 9))
    def allocate(self, tokens):
        cache = self.cache
        free, needed = cache.free_pages, -(-tokens // cache.page_size)
        if needed > free:
            with pytest.raises(MemoryError):
                cache.allocate(tokens)
            assert cache.free_pages == free
            tokens = needed = 0
        sequence = cache.allocate(tokens)
        assert sequence not in self.model and cache.free_pages == free - needed
        self.model[sequence] = []
        return sequence

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        free = self.cache.free_pages
        new = self.cache.fork(sequence)
        assert new not in self.model and self.cache.free_pages == free
        self.model[new] = list(self.model[sequence])
        return new

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        self.cache.free(sequence)
        del self.model[sequence]
        with pytest.raises(ValueError, match="was freed"):
            self.cache.length(sequence)

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        n = data.draw(st.integers(0, len(self.model[sequence])))
        self.cache.truncate(sequence, n)
        del self.model[sequence][n:]

    def pages_needed(self, counts):
        """Each new page of somebody; and of those that share a page and write into it, all but one if it is all."""
        cache, size = self.cache, self.cache.page_size
        holders = collections.Counter(page for s in self.model for page in cache.pages_of(s))
        needed, writers = 0, collections.Counter()
        for sequence, count in counts.items():
            length, pages = len(self.model[sequence]), cache.pages_of(sequence)
            needed += max(0, -(-(length + count) // size) - len(pages))
            if count and length % size:
                writers[pages[length // size]] += 1
        return needed + sum(min(count, holders[page] - 1) for page, count in writers.items())

    def append_or_fail(self, counts, append):
        free, needed = self.cache.free_pages, self.pages_needed(counts)
        if needed <= free:
            append()
            assert self.cache.free_pages == free - needed
            return True
        before = state(self.cache)
        with pytest.raises(MemoryError, match=f"need {needed} more pages"):
            append()
        assert state(self.cache) == before
        return False

    @rule(sequence=sequences, count=st.integers(0, 9))
    def append_to_one(self, sequence, count):
        tokens = self.new_tokens(count)
        key = np.stack([tokens, -tokens])[..., None]
        if self.append_or_fail({sequence: count}, lambda: self.cache.append(sequence, key, key.repeat(2, 2))):
            self.model[sequence] += tokens.tolist()

    @rule(data=st.data(), one_each=st.booleans())
    def append_to_some(self, data, one_each):
        some = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        counts = {s: 1 if one_each else data.draw(st.integers(0, 5)) for s in some}
        ends = cumulative(counts.values())
        tokens = self.new_tokens(int(ends[-1]))
        key = np.stack([tokens, -tokens], axis=-1)[..., None]
        where = {} if one_each else dict(cu_seqlens=ends)
        if self.append_or_fail(counts, lambda: self.cache.append(some, key, key.repeat(2, 2), **where)):
            for i, sequence in enumerate(some):
                self.model[sequence] += tokens[ends[i] : ends[i + 1]].tolist()

    @invariant()
    def tokens_are_those_of_the_model(self):
        for sequence, tokens in self.model.items():
            assert self.cache.length(sequence) == len(tokens)
            value, score = tokens_of(self.cache, sequence)
            assert value[:, 0, 0].tolist() == value[:, 0, 1].tolist() == score[:, 0].tolist() == tokens
            assert (-value[:, 1]).tolist() == value[:, 0].tolist()

    @invariant()
    def pages_add_up(self):
        cache = self.cache
        owned = [cache.pages_of(sequence) for sequence in self.model]
        holders = collections.Counter(page for pages in owned for page in pages)
        assert cache.free_pages == self.PAGES - len(holders)
        assert not holders.keys() & set(cache._pool.free) and len(set(cache._pool.free)) == len(cache._pool.free)
        assert [holders[page] for page in range(self.PAGES)] == cache._pool.owners
        for pages, tokens in zip(owned, self.model.values()):
            assert len(set(pages)) == len(pages) >= -(-len(tokens) // cache.page_size)
            assert all(holders[page] == 1 for page in pages[-(-len(tokens) // cache.page_size) :])

    def teardown(self):
        for sequence in self.model:
            self.cache.free(sequence)
        assert self.cache.free_pages == self.PAGES and not any(self.cache._pool.owners)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None, database=None)


# Errors.


def test_exhaustion_changes_nothing():
    cache = small_cache(pages=4)
    first, second = with_tokens(cache, 6), with_tokens(cache, 4)
    before = state(cache)
    with pytest.raises(MemoryError, match="8 tokens need 2 more pages of 4, and 1 of 4 are free: free or truncate"):
        cache.allocate(tokens=8)
    with pytest.raises(MemoryError, match="9 tokens need 2 more pages of 4, and 1 of 4 are free"):
        cache.append(first, np.ones((1, 9, 2)), np.ones((1, 9, 3)))
    with pytest.raises(MemoryError, match="5 tokens need 2 more pages"):  # one of them has enough
        cache.append([first, second], *one_token(cache, 5), cu_seqlens=[0, 3, 5])
    assert state(cache) == before


def test_copying_a_shared_page_may_exhaust():
    cache = small_cache(pages=2)
    old = with_tokens(cache, 6)
    new = cache.fork(old)
    before = state(cache)
    for sequences in [old], [new], [old, new]:
        with pytest.raises(MemoryError, match="need 1 more pages of 4, and 0 of 2 are free"):
            cache.append(sequences, *one_token(cache, len(sequences)))
    assert state(cache) == before
    cache.free(new)
    cache.append([old], *one_token(cache))


K, V = np.ones((1, 5, 2), float32), np.ones((1, 5, 3), float32)  # of one sequence
KS, VS = np.ones((2, 1, 2), float32), np.ones((2, 1, 3), float32)  # of two
Q = np.ones((2, 4, 2), float32)

BAD_CALLS = {
    "free: freed": (ValueError, "sequence 2 was freed", lambda c: c.free(2)),
    "fork: freed": (ValueError, "sequence 2 was freed", lambda c: c.fork(2)),
    "truncate: freed": (ValueError, "sequence 2 was freed", lambda c: c.truncate(2, 0)),
    "length: freed": (ValueError, "sequence 2 was freed", lambda c: c.length(2)),
    "pages_of: unknown": (ValueError, "sequence 3 was never allocated", lambda c: c.pages_of(3)),
    "free: below 0": (ValueError, "sequence -1 was never allocated", lambda c: c.free(-1)),
    "fork: boolean": (TypeError, "sequence is True: it must be a number from allocate", lambda c: c.fork(True)),
    "fork: fraction": (TypeError, "sequence is 1.0", lambda c: c.fork(1.0)),
    "append: freed": (ValueError, "sequence 2 was freed", lambda c: c.append(2, K, V)),
    "append: one of them freed": (ValueError, "sequence 2 was freed", lambda c: c.append([0, 2], KS, VS)),
    "append: none": (TypeError, "sequences is None", lambda c: c.append(None, K, V)),
    "append: many that hold nothing": (
        TypeError,
        r"sequences has shape \(1099511627776, 0\): it must be a sequence, or a list",
        lambda c: c.append(np.lib.stride_tricks.as_strided(np.zeros(0, int), (2**40, 0)), KS, VS),
    ),
    "append: name": (TypeError, "sequence is 'x'", lambda c: c.append("x", K, V)),
    "append: twice": (
        ValueError,
        r"sequences are \[1, 1\]: none may be there twice",
        lambda c: c.append([1, 1], KS, VS),
    ),
    "append: key of two axes": (ValueError, r"key has shape \(5, 2\).*heads, tokens", lambda c: c.append(0, K[0], V)),
    "append: heads": (ValueError, "key has 2 heads of size 2: .*1 heads", lambda c: c.append(0, np.ones((2, 5, 2)), V)),
    "append: size": (ValueError, "value has 1 heads of size 2: .*3 is the size", lambda c: c.append(0, K, K)),
    "append: fewer values": (ValueError, "key has 5 tokens and value 4", lambda c: c.append(0, K, V[:, 1:])),
    "append: whole numbers": (TypeError, "key has dtype int64", lambda c: c.append(0, K.astype(int), V)),
    "append: objects": (TypeError, "value has dtype object", lambda c: c.append(0, K, V.astype(object))),
    "append: masked": (TypeError, "masked", lambda c: c.append(0, np.ma.masked_array(K), V)),
    "append: one, with cu_seqlens": (ValueError, "cu_seqlens is .*one sequence", lambda c: c.append(0, K, V, [0, 5])),
    "append: rows": (ValueError, "key has 2 rows for 1 sequences: without cu_seqlens", lambda c: c.append([0], KS, VS)),
    "append: cu_seqlens": (
        ValueError,
        "cu_seqlens has 2 numbers for 2 sequences",
        lambda c: c.append([0, 1], KS, VS, [0, 2]),
    ),
    "append: end": (ValueError, "cu_seqlens is .*to the 2 rows of key", lambda c: c.append([0, 1], KS, VS, [0, 1, 3])),
    "append: fractions": (TypeError, "cu_seqlens has dtype float64", lambda c: c.append([0, 1], KS, VS, [0, 1.0, 2])),
    "truncate: longer": (
        ValueError,
        "n is 7: it must be from 0 to the length of sequence 0, 6",
        lambda c: c.truncate(0, 7),
    ),
    "truncate: below 0": (ValueError, "n is -1", lambda c: c.truncate(0, -1)),
    "truncate: fraction": (TypeError, "n is 1.5", lambda c: c.truncate(0, 1.5)),
    "allocate: below 0": (ValueError, "tokens is -1", lambda c: c.allocate(-1)),
    "allocate: fraction": (TypeError, "tokens is 0.5", lambda c: c.allocate(0.5)),
    "allocate: much": (MemoryError, "are free", lambda c: c.allocate(10**30)),
    "attend: freed": (ValueError, "sequence 2 was freed", lambda c: c.attend(Q, [0, 2])),
    "attend: rows": (
        ValueError,
        "query has 2 rows for 3 sequences: without cu_seqlens_q",
        lambda c: c.attend(Q, [0, 1, 0]),
    ),
    "attend: cu_seqlens": (
        ValueError,
        "cu_seqlens_q has 2 numbers for 2",
        lambda c: c.attend(Q, [0, 1], cu_seqlens_q=[0, 2]),
    ),
    "attend: one, with cu_seqlens": (ValueError, "with one sequence", lambda c: c.attend(Q, 0, cu_seqlens_q=[0, 2])),
    "attend: size": (ValueError, "query has 4 heads of size 1: .*the size 2", lambda c: c.attend(Q[..., :1], [0, 1])),
    "attend: axes": (ValueError, r"query has shape \(2, 4\)", lambda c: c.attend(Q[..., 0], [0, 1])),
    "attend: dtype": (TypeError, "query has dtype int64", lambda c: c.attend(Q.astype(int), [0, 1])),
    "attend: narrow": (
        TypeError,
        "key has dtype float32: .*not be wider",
        lambda c: c.attend(Q.astype(float16), [0, 1]),
    ),
    "attend: lengths": (ValueError, r"kv_lengths are 5.*\[6 4\]", lambda c: c.attend(Q, [0, 1], kv_lengths=5)),
    "attend: mask": (
        ValueError,
        r"mask has shape \(7,\).*\(4, 2, 6\)",
        lambda c: c.attend(Q, [0, 1], mask=np.ones(7, bool)),
    ),
    "attend: offsets": (ValueError, "q_offset has shape", lambda c: c.attend(Q, [0, 1], q_offset=[1, 2, 3])),
    "attend: out": (ValueError, r"out has shape \(1,\)", lambda c: c.attend(Q, [0, 1], out=np.zeros(1, float32))),
    "attend: out of one": (ValueError, r"has \(2, 4, 3\)", lambda c: c.attend(Q, 0, out=np.zeros((4, 2, 3), float32))),
    "attend: out is a list": (TypeError, "out is of type list", lambda c: c.attend(Q, 0, out=[])),
    "attend: out is query": (ValueError, "out overlaps query", lambda c: c.attend(W[..., :2], [0, 1], out=W)),
}
W = np.ones((2, 4, 3), float32)


@pytest.mark.parametrize("error, message, call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_errors_change_nothing(error, message, call):
    cache = small_cache()
    with_tokens(cache, 6)
    with_tokens(cache, 4)
    cache.free(with_tokens(cache, 3))
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert state(cache) == before


def test_heads_must_be_a_multiple():
    cache, sequences, _, _ = filled((3,))
    with pytest.raises(ValueError, match="query has 3 heads of size 20: the heads must be a multiple of the 2"):
        cache.attend(queries((1,), H=3), sequences)


@pytest.mark.parametrize(
    "error, message, changed",
    [
        (ValueError, "pages is 0: it must be 1 or more", dict(pages=0)),
        (ValueError, "page_size is -1", dict(page_size=-1)),
        (TypeError, "page_size is 1.5", dict(page_size=1.5)),
        (TypeError, "kv_heads is True", dict(kv_heads=True)),
        (ValueError, "head_dim is 0", dict(head_dim=0)),
        (ValueError, "value_dim is 0", dict(value_dim=0)),
        (TypeError, "dtype is .*int8.*float16, bfloat16, float32 or float64, in native", dict(dtype=np.int8)),
        (TypeError, "dtype is None", dict(dtype=None)),
        (TypeError, "dtype is 'x'", dict(dtype="x")),
        (TypeError, "native", dict(dtype=np.dtype(float32).newbyteorder())),
    ],
)
def test_errors_of_a_new_cache(error, message, changed):
    with pytest.raises(error, match=message):
        sdpa.PagedKVCache(**dict(pages=4, page_size=4, kv_heads=1, head_dim=2) | changed)


def test_sequences_as_an_array_without_axes():
    cache = sdpa.PagedKVCache(4, 2, 1, 3)
    cache.append(cache.allocate(), *np.ones((2, 1, 2, 3), np.float32))
    with pytest.raises(TypeError, match="sequences has shape"):
        cache.attend(np.ones((1, 1, 3), np.float32), np.array(0))


def test_pages_start_on_cache_lines():
    """With zeros: no kernel reads NaN where nothing was written."""
    for dtype in np.float32, bfloat16:
        cache = sdpa.PagedKVCache(pages=5, page_size=3, kv_heads=2, head_dim=64, value_dim=32, dtype=dtype)
        for pages in cache._pool.keys, cache._pool.values:
            assert pages.ctypes.data % 64 == 0 and not pages.any()
        assert cache.nbytes == 2 * 5 * 3 * (64 + 32) * cache.dtype.itemsize
