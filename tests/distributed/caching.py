"""What mpiexec starts: wrong calls of caches, ranks that fail, files, threads, and one token at a time."""

import copy
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI
from support.draw import draw, rng
from support.ranks import caught, same_everywhere

import sdpa
from sdpa import distributed
from sdpa._cache import kv

world = MPI.COMM_WORLD
LAST = world.size - 1
FOLDER = Path(sys.argv[-1])  # doctests import this file, too, with other arguments


def tokens(count, B=2, G=2, D=20, E=12, seed=0):
    normal = rng(seed).standard_normal
    return normal((B, G, count, D), np.float32), normal((B, G, count, E), np.float32)


def filled(count=40, **options):
    cache = distributed.KVCache(world, 2, 2, 20, value_dim=12, **options)
    cache.append(*tokens(count))
    return cache


def wrong_sizes():
    for changes, said in (
        (dict(batch=0), "batch is 0"), (dict(head_dim=2.5), "head_dim is 2.5"), (dict(dtype=int), "dtype is"),
        (dict(keep=2), "keep is 2 and window None"), (dict(group=33), "group is 33"), (dict(window=0), "window is 0"),
    ):  # fmt: skip
        sizes = dict(batch=2, kv_heads=2, head_dim=4)
        mine = sizes | (changes if world.rank == LAST else {})
        assert said in str(same_everywhere(distributed.KVCache, world, **mine))
    if LAST:
        error = same_everywhere(distributed.KVCache, world, 2, 2, 4 + (world.rank == LAST))
        assert f"head_dim is 4 on rank 0 and 5 on rank {LAST}" in str(error)
    wrong = dict(groups=16) if world.rank == LAST else {}
    assert "groups" in str(same_everywhere(distributed.KVCache, world, 2, 2, 4, **wrong))
    assert "comm is None" in str(caught(distributed.KVCache, None, 1, 1, 4))


def wrong_tokens():
    """On one rank, or other ones than the others have: the cache stays as it was."""
    for dtype in (np.float32, np.int8):
        cache = filled(dtype=dtype, capacity=60)
        query = draw(M=1)[0]
        before = cache.attend(query)
        key, value = tokens(3)
        for mine, said in (
            ((key[:1], value), "key has shape"), ((key, value[:, :, :2]), "key has 3 new tokens and value 2"),
            ((key, None), "value"), ((key, value, [4, 1]), "lengths are [4, 1]"), (("no", value), "key"),
            (tokens(21), "capacity is 60"),
            *([((np.where(key > 1, np.nan, key), value), "key holds NaN")] if dtype == np.int8 else []),
        ):  # fmt: skip
            on_all = said.startswith("key holds")  # which only the ranks find out that hold the token
            error = same_everywhere(cache.append, *(mine if on_all or world.rank == LAST else (key, value)))
            assert said in str(error), (said, error)
        if LAST:
            others = {
                "the shape of key": tokens(3 + (world.rank == LAST)),
                "the dtype of value": (key, value.astype(np.float64 if world.rank == LAST else np.float32)),
                "lengths": (key, value, [3, 1 + (world.rank == LAST)]),
            }
            for said, mine in others.items():
                assert said in str(same_everywhere(cache.append, *mine))
        if LAST > 1:
            some = (key, value) if world.rank < 2 else (None, None)
            assert "None on some ranks" in str(same_everywhere(cache.append, *some))
            some = tokens(3 + world.rank) if world.rank < 2 else (None, None)
            assert "None on some ranks" in str(same_everywhere(cache.append, *some))
        assert "None on some ranks" in str(same_everywhere(cache.append, None, None))
        assert "n is 41" in str(same_everywhere(cache.truncate, 41 if world.rank == LAST else 3))
        if LAST:
            assert "n is" in str(same_everywhere(cache.truncate, [3, 4 + (world.rank == LAST)]))
        assert cache.lengths.tolist() == [40, 40] and len(cache) == 40
        np.testing.assert_array_equal(cache.attend(query), before)


def wrong_queries():
    cache, (query, _, _) = filled(), draw(M=3)
    overlapping = np.zeros((2, 4, 3, 20), np.float32)
    for changes, said in (
        (dict(query=query[..., :5]), "query"), (dict(query=query[0, 0, 0]), "query has shape (20,)"),
        (dict(query=query.astype(int)), "query"), (dict(query=query[:, :3]), "query"),
        (dict(scale="x"), "scale is 'x'"), (dict(softcap=-1.0), "softcap"), (dict(mask=np.ones(41, bool)), "mask"),
        (dict(mask=np.ones(40)), "bias"), (dict(bias=np.ones((3, 41))), "bias has shape (3, 41)"),
        (dict(window=3), "window"), (dict(alibi_slopes=np.ones(3)), "alibi_slopes"),
        (dict(q_offset=[1, 2, 3]), "q_offset"),
        (dict(causal=1), "causal is 1"), (dict(return_lse=0), "return_lse is 0"), (dict(threads=0), "threads is 0"),
        (dict(out=np.zeros(3)), "out has shape"), (dict(kv_lengths=3), "kv_lengths"),
        (dict(query=overlapping, out=overlapping[..., :12]), "out overlaps query"),
    ):  # fmt: skip
        mine = dict(query=query) | (changes if world.rank == LAST else {})
        error = same_everywhere(cache.attend, **mine)
        assert said.split()[0] in str(error), (said, error)
        error = same_everywhere(cache.attend, **dict(query=query) | changes)
        assert said in str(error), (said, error)
    assert "sinks" in str(same_everywhere(cache.attend, query, sinks=np.ones(3)))
    if LAST:
        own = float(world.rank == LAST)
        for name, mine in {
            "scale": 1 + own, "softcap": 2 + own, "sinks": np.full(4, own), "alibi_slopes": np.full(4, own),
            "window": (3 + int(own), None), "q_offset": int(own), "causal": bool(own),
            "the shape and dtype of mask": np.ones(40, bool) if own else np.ones((1, 40), bool),
            "the shape and dtype of bias": np.ones(40, np.float32 if own else np.float64),
        }.items():  # fmt: skip
            error = same_everywhere(cache.attend, query, **{name.split()[-1]: mine})
            assert name in str(error) and "must be the same on all ranks" in str(error), (name, error)
        # Told in no time: as a list it would be two thousand million empty ones.
        error = same_everywhere(cache.attend, query, q_offset=np.empty((1 << 31, 0)) if own else None)
        assert "an array of shape (2147483648, 0)" in str(error), error
        fork = cache.fork()
        fork.append(*tokens(1))
        mixed = fork if own else cache
        assert "lengths so far" in str(same_everywhere(mixed.attend, query))
        same_everywhere(*((cache.attend, query) if own else (cache.truncate, 3)))
    cache.attend(query, scale=np.float64(0.5) if world.rank else 0.5)  # equal, and so it goes through


def dropped_tokens():
    cache = filled(40, window=8)
    cache.append(*tokens(1))
    query = draw(M=3)[0]
    assert "attend right after append" in str(same_everywhere(cache.attend, query))
    assert "the window of 8 has dropped" in str(same_everywhere(cache.truncate, 39))
    cache.truncate(40)
    assert cache.attend(query[:, :, :1], q_offset=40).shape == (2, 4, 1, 12)


class Failing:
    """In place of a function: raises on one rank."""

    def __init__(self, module, name, rank, error):
        self.module, self.name, self.real = module, name, getattr(module, name)
        self.error = error if world.rank == rank else None

    def __call__(self, *arguments, **options):
        if self.error is not None:
            raise self.error
        return self.real(*arguments, **options)

    def __enter__(self):
        setattr(self.module, self.name, self)

    def __exit__(self, *_):
        setattr(self.module, self.name, self.real)


def a_rank_fails_in_the_middle():
    from sdpa.distributed import _cache, _question, _spread

    query = draw(M=1)[0]
    for rank in range(world.size):
        cache, memory = filled(), MemoryError("no memory, says the test")
        before = cache.attend(query)
        if LAST:
            with Failing(_question, "attend_rows", rank, memory):
                assert "no memory" in str(caught(cache.attend, query))
        with Failing(_cache, "keep_own", rank, memory):
            assert "no memory" in str(caught(cache.append, *tokens(50)))
            given = tokens(50) if world.rank == LAST else (None, None)
            assert "no memory" in str(caught(cache.append, *given))
        with Failing(_spread, "_room", rank, memory):
            given = tokens(50) if world.rank == (rank + 1) % world.size else (None, None)
            if LAST:
                assert "no memory" in str(caught(cache.append, *given))
        with Failing(_cache.files, "save", rank, memory):
            assert "no memory" in str(caught(cache.save, FOLDER / "fails"))
        np.testing.assert_array_equal(cache.attend(query), before)
        with Failing(_cache, "keep_own", rank, KeyboardInterrupt()):
            error = caught(cache.append, *tokens(50))
            assert isinstance(error, KeyboardInterrupt if world.rank == rank else Exception)
        np.testing.assert_array_equal(cache.attend(query), before)


def files():
    for number, (dtype, options) in enumerate(((np.float32, {}), (np.int8, dict(window=9, keep=3, capacity=99)))):
        cache, path = filled(dtype=dtype, **options), FOLDER / f"files-{number}"
        cache.append(*tokens(7, seed=1), lengths=[7, 2])
        cache.save(path)
        (last,) = {tuple(each) for each in world.allgather(sorted(each.name for each in path.iterdir()))}
        assert last == tuple(sorted(f"rank-{rank}-of-{world.size}" for rank in range(world.size)))
        query = draw(M=1)[0]
        for mmap in (False, True):
            again = distributed.KVCache.load(world, path, mmap=mmap)
            assert again.lengths.tolist() == [47, 42] and again.capacity == options.get("capacity")
            np.testing.assert_array_equal(again.attend(query), cache.attend(query))
            further = cache.fork()
            for each in (again, further):
                each.append(*tokens(1, seed=2))
            np.testing.assert_array_equal(again.attend(query), further.attend(query))
        cache.append(*tokens(1))
        cache.save(path)
        assert distributed.KVCache.load(world, path).lengths.tolist() == [48, 43]
        assert "sdpa.distributed.KVCache" in str(caught(sdpa.KVCache.load, path / last[0]))
        wrong_files(cache, path)


def wrong_files(cache, path):
    world.Barrier()
    if LAST:
        assert "has no rank-" in str(caught(distributed.KVCache.load, MPI.COMM_SELF, path))
    mine = path / f"rank-{world.rank}-of-{world.size}"
    if LAST:  # one rank has an older one
        if world.rank == LAST:
            shutil.copytree(mine, path / "older")
        cache.save(path)
        if world.rank == LAST:
            shutil.rmtree(mine)
            (path / "older").rename(mine)
        error = same_everywhere(distributed.KVCache.load, world, path)
        assert "the save that is in the files is" in str(error)
        cache.save(path)
    world.Barrier()
    if world.rank == LAST:
        header = mine / "cache.json"
        text = header.read_text()
    for old, new in (
        ('"block": 16', '"block": 8'),
        ('"part"', '"other"'),
        ('"save"', '"other"'),
        ('"rank": ', '"rank": 9'),
    ):
        if world.rank == LAST:
            assert old in text
            header.write_text(text.replace(old, new))
        error = same_everywhere(distributed.KVCache.load, world, path)
        assert isinstance(error, ValueError) and "cache.json is damaged" in str(error), error
    if world.rank == LAST:
        header.write_text(text)
    distributed.KVCache.load(world, path)
    assert "no rank-" in str(same_everywhere(distributed.KVCache.load, world, FOLDER / "none"))


def one_token_at_a_time():
    """Against the plain cache, from the first token on: some ranks have none at first."""
    key, value = tokens(70)
    query = draw(M=70)[0]
    spread, plain = distributed.KVCache(world, 2, 2, 20, value_dim=12), sdpa.KVCache(2, 2, 20, value_dim=12)
    nothing = spread.attend(query[:, :, :1], return_lse=True)
    assert not nothing[0].any() and np.isneginf(nothing[1]).all()
    for i in range(70):
        for cache in (spread, plain):
            cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        one = query[:, :, i : i + 1]
        np.testing.assert_allclose(spread.attend(one), plain.attend(one), rtol=0, atol=2e-6)
    held = world.allgather(len(spread._local))
    assert sum(held) == 70 and max(held) - min(held) <= 16
    if not LAST:
        np.testing.assert_array_equal(spread.attend(query), plain.attend(query))


def what_it_says():
    cache = filled(40, dtype=np.float16, window=30, keep=1, capacity=400)
    names = "batch", "kv_heads", "head_dim", "value_dim", "dtype", "capacity", "window", "keep", "group"
    assert [getattr(cache, name) for name in names] == [2, 2, 20, 12, np.float16, 400, 30, 1, 32]
    assert len(cache) == 40 and cache and not cache.lengths.flags.writeable and cache.nbytes == cache._local.nbytes
    assert f"40 tokens, on {world.size} ranks" in repr(cache)
    assert isinstance(caught(pickle.dumps, cache), TypeError)
    for twin in (copy.copy(cache), copy.deepcopy(cache)):
        twin.append(*tokens(1))
        assert len(twin) == 41 and len(cache) == 40
    assert kv.KVCache.attend.__signature__ == distributed.KVCache.attend.__signature__


if __name__ == "__main__":
    for test in (
        wrong_sizes, wrong_tokens, wrong_queries, dropped_tokens, a_rank_fails_in_the_middle, files,
        one_token_at_a_time, what_it_says,
    ):  # fmt: skip
        test()
        world.Barrier()
