"""What mpiexec starts: caches in which anything happens, spread over its ranks, against the oracle."""

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from mpi4py import MPI
from support.accuracy import blind_lse, judge
from support.draw import float16, float32, float64, inf, rng
from support.ranks import holds, on_ranks

import sdpa
from sdpa import distributed
from sdpa.distributed import _together

COUNTS = st.sampled_from([0, 1, 1, 1, 2, 5, 16, 17, 40, 90])
DTYPES = {float64: [float64, float32, bfloat16], float32: [float32, float16, bfloat16, np.int8], bfloat16: [bfloat16]}


class Past:
    """All tokens that a cache was given, as it rounds them: what the oracle attends to."""

    def __init__(self, sizes):
        self.window, self.keep = sizes["window"], sizes["keep"]
        self.cache = sdpa.KVCache(**sizes | dict(window=None, keep=0))
        self.before = None

    def append(self, key, value, lengths):
        self.before = self.cache.lengths.copy()
        self.cache.append(key, value, lengths)

    @property
    def arrays(self):
        numbers = (self.cache.keys, self.cache.key_scales), (self.cache.values, self.cache.value_scales)
        group = self.cache.group
        return [x if s is None else x * s.repeat(group, axis=-1)[..., : x.shape[-1]] for x, s in numbers]

    def options(self, options, count, ragged):
        """Those of the oracle for the last `count` tokens; `ragged`: for the rows of the last append."""
        options, lengths = {"causal": True} | options, self.cache.lengths
        offset = options.setdefault("q_offset", self.before if ragged else lengths - count)
        if self.window is not None:
            options["causal"] = True
            at = np.reshape(offset, (-1, 1, 1, 1)) + np.arange(count)[:, None]
            seen = (np.arange(len(self.cache)) > at - self.window) | (np.arange(len(self.cache)) < self.keep)
            options["mask"] = seen & options.get("mask", True)
        return options | {"kv_lengths": lengths}

    def with_meaning(self, out, lse, options):
        """Results for the rows of the last append, and options of the oracle.  In both, rows past the lengths of that
        append see no key: their results have no meaning."""
        counts = np.arange(out.shape[2]) < (self.cache.lengths - self.before)[:, None, None]  # (B, 1, M)
        options = options | {"mask": counts[..., None] & options.get("mask", True)}
        out = np.where(counts[..., None], out, out.dtype.type(0))
        return out, np.where(counts, lse, blind_lse(lse, options)), options


# What rank 0 draws.


@st.composite
def stories(choose, ranks):
    """Sizes of a cache, and what happens to it: pairs of a name and arguments."""
    dtype = choose(st.sampled_from(list(DTYPES)))
    B, G, D = choose(st.integers(1, 3)), choose(st.integers(1, 2)), choose(st.sampled_from([1, 8, 33]))
    window = choose(st.none() | st.sampled_from([1, 2, 16, 17, 33, 70]))
    sizes = dict(
        batch=B, kv_heads=G, head_dim=D, value_dim=choose(st.sampled_from([1, 16, 31])),
        dtype=choose(st.sampled_from(DTYPES[dtype])), window=window,
        keep=0 if window is None else choose(st.sampled_from([0, 1, 15, 20])),
    )  # fmt: skip
    past, happens, normal = Past(sizes), [], rng(choose(st.integers(0, 999)))
    for _ in range(choose(st.integers(1, 6))):
        count, ragged = choose(COUNTS), choose(st.integers(0, 3)) == 0
        lengths = normal.integers(0, count + 1, B) if ragged else None
        key, value = (normal.standard_normal((B, G, count, n)).astype(dtype) for n in (D, sizes["value_dim"]))
        past.append(key, value, lengths)
        happens.append(("append", (choose(st.integers(-1, ranks - 1)), key, value, lengths)))
        H = G * choose(st.integers(1, 3))
        query = normal.standard_normal((B, H, count, D)).astype(dtype)
        happens.append(("attend", (query, choose(options_of(past, H, count, normal)), ragged)))
        if choose(st.booleans()):
            least = np.zeros(B, np.int64) if window is None else past.before
            n = normal.integers(least, past.cache.lengths + 1)
            past.cache.truncate(n)
            happens.append(("truncate", n))
        if choose(st.integers(0, 3)) == 0:
            happens.append(("fork", None))
    return sizes, happens


@st.composite
def options_of(choose, past, H, M, normal):
    B, N = past.cache.batch, len(past.cache)
    pairs = tuple(n if choose(st.integers(0, 2)) else 1 for n in (B, H, M, N))
    of_heads = choose(st.sampled_from([(H,), (B, H)]))
    bias = normal.standard_normal(pairs)
    bias[normal.random(pairs) < 0.2] = -inf
    optional = dict(
        mask=st.just(normal.random(pairs) < 0.7), bias=st.just(bias), causal=st.booleans(),
        window=st.tuples(*[st.none() | st.integers(-2, 50) | st.sampled_from([2**62, -(2**62)])] * 2),
        scale=st.floats(-1, 1), softcap=st.floats(0.5, 30), sinks=st.just(normal.standard_normal(of_heads)),
        alibi_slopes=st.just(normal.random(of_heads) / 4),
    )  # fmt: skip
    if past.window is None:
        optional["q_offset"] = st.integers(-9, N + 9) | st.just(normal.integers(0, N + 1, B))
    return choose(st.fixed_dictionaries({}, optional=optional))


# What the ranks do.


def live(comm, sizes, happens, gather_bytes):
    """The results of a story, which have the same bits on all ranks."""
    _together.GATHER_BYTES = gather_bytes
    cache, found, forks = distributed.KVCache(comm, **sizes), [], []
    for what, about in happens:
        if what == "append":
            giver, *tokens = about
            cache.append(*(tokens if giver in (-1, comm.rank) else [None] * 3))
        elif what == "attend":
            query, options, _ = about
            wide = np.empty((*query.shape[:-1], cache.value_dim), float32 if query.itemsize < 4 else query.dtype)
            results = cache.attend(query, return_lse=True, **options)
            again = cache.attend(query, return_lse=True, out=wide, threads=2, **options)
            np.testing.assert_array_equal(wide.astype(query.dtype), results[0])
            np.testing.assert_array_equal(again[1], results[1])
            found.append(results)
        elif what == "truncate":
            cache.truncate(about)
        else:
            forks.append((cache, cache.lengths.copy()))
            cache = cache.fork()
        held = comm.allgather(int(cache._local.lengths.sum()))
        assert sum(held) == cache.lengths.sum() and max(held) - min(held) <= 16 * cache.batch
    for fork, lengths in forks:
        np.testing.assert_array_equal(fork.lengths, lengths)
        np.testing.assert_array_equal(fork._local.lengths, fork._blocks.held(lengths))
    bits = [[x.tobytes() for results in of_rank for x in results] for of_rank in comm.allgather(found)]
    assert all(one == bits[0] for one in bits)
    return found


def check(ranks, data):
    check_story(ranks, *data.draw(stories(ranks.comm.size)), data.draw(st.sampled_from([0, 1 << 18])))


def check_story(ranks, sizes, happens, gather_bytes):
    found, past = iter(ranks.all(live, sizes, happens, gather_bytes)[0]), Past(sizes)
    for what, about in happens:
        if what == "append":
            past.append(*about[1:])
        elif what == "truncate":
            past.cache.truncate(about)
        elif what == "attend":
            query, options, ragged = about
            out, lse = next(found)
            options = past.options(options, query.shape[2], ragged)
            if ragged and "q_offset" not in about[1]:
                out, lse, options = past.with_meaning(out, lse, options)
            judge(out, lse, query, *past.arrays, factor=4, floor=30, **options)


# What a fuzzer found: the second token is past the length, and nothing of the window of its place is in the cache.
TOKEN = np.ones((1, 1, 1, 1))
PAST_THE_LENGTH = [
    ("append", (-1, TOKEN, TOKEN, [1])), ("attend", (TOKEN, {}, True)),
    ("append", (-1, TOKEN, TOKEN, [0])), ("attend", (TOKEN, {}, True)),
]  # fmt: skip


def main(ranks):
    sizes = dict(batch=1, kv_heads=1, head_dim=1, value_dim=1, dtype=float64, window=1, keep=0)
    check_story(ranks, sizes, PAST_THE_LENGTH, 0)
    holds(check, ranks)


if __name__ == "__main__":
    on_ranks(MPI.COMM_WORLD, main)
