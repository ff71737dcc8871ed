"""What mpiexec starts: wrong calls, ranks that fail, several communicators, bits, and what travels."""

import itertools
import threading

import numpy as np
from mpi4py import MPI
from support.accuracy import assert_same_bits
from support.draw import draw, float32, float64, rng
from support.errors import ERRORS
from support.packed import ERRORS as PACKED_ERRORS
from support.packed import KS, QS, A, K, V
from support.ranks import caught, same_everywhere

import sdpa
from sdpa import _core, distributed
from sdpa.distributed import _agreement, _attention, _heads, _whole

world = MPI.COMM_WORLD
LAST = world.size - 1


class NoArray:
    """What NumPy makes of it fails."""

    def __array__(self, *_, **__):
        raise RuntimeError("no array")


def spread(*arrays, layout="contiguous"):
    return [distributed.scatter(world, x, layout=layout) for x in arrays]


def wrong_arguments_on_one_rank():
    for case in ERRORS:
        kind, changes, parts = case.values
        query, key, value = draw()
        mine = dict(query=query, key=key, value=value) | (changes if world.rank == LAST else {})
        if (
            world.size > 1
            and "kv_lengths" in changes
            and not isinstance(changes["kv_lengths"], (np.ma.MaskedArray, list))
        ):
            continue  # a length that is too large for one rank is not for all of them
        error = same_everywhere(lambda mine=mine: distributed.attention(world, **mine))
        assert isinstance(error, (kind, ValueError)), (case.id, error)
        if world.size == 1 or f"rank {LAST}" in str(error):
            assert parts[0].split()[0] in str(error), (case.id, error)


def wrong_packed_arguments_on_one_rank():
    right = dict(query=A, key=K, value=V, cu_seqlens_q=QS, cu_seqlens_k=KS)
    total = {"cu_seqlens_q": [0, *[6 * world.size] * 2], "cu_seqlens_k": [0, *[9 * world.size] * 2]}
    for name, (kind, _, changes) in PACKED_ERRORS.items():
        mine = right | total | (changes if world.rank == LAST else {})
        if world.size > 1 and name in ("unequal", "lengths", "length"):
            continue  # these depend on the numbers of one rank
        error = same_everywhere(lambda mine=mine: distributed.attention_varlen(world, **mine))
        assert isinstance(error, (kind, ValueError)), (name, error)


def ranks_that_do_not_agree():
    if world.size == 1:
        return
    query, key, value = draw(dtype=float64)
    own = float(world.rank == LAST)
    for said, changes in {
        "causal": dict(causal=bool(own)),
        "scale": dict(scale=0.5 + own),
        "window": dict(window=(3 + int(own), None)),
        "sinks": dict(sinks=np.full(4, own)),
        "kv_lengths": dict(kv_lengths=3 + int(own)),
        "q_offset": dict(q_offset=[0, int(own)]),
        "layout": dict(layout="zigzag" if own else "contiguous"),
        "split": dict(split="heads" if own else "sequence") if world.size < 5 else dict(split="tails"),
        "whether bias is given": dict(bias=np.ones(133 * world.size) if own else None),
        "the dtype of key": dict(key=key.astype(float32) if own else key),
        "the shape of value without its rows": dict(value=value[..., :5] if own else value),
        "the shape of query without its rows": dict(query=query[:1] if own else query),
    }.items():
        mine = dict(query=query, key=key, value=value) | changes
        error = same_everywhere(lambda mine=mine: distributed.attention(world, **mine))
        assert isinstance(error, ValueError) and said in str(error), (said, error)
    for name in ("bias", "mask"):
        given = {} if own else {name: np.ones(133 * world.size, bool if name == "mask" else float64)}
        error = same_everywhere(lambda given=given: distributed.attention(world, query, key, value, **given))
        assert f"whether {name} is given is True on rank 0 and False" in str(error)
    same = dict(
        scale=np.float64(0.5) if own else 0.5, q_offset=np.int32(7) if own else 7, window=[4, 1] if own else (4, 1)
    )
    distributed.attention(world, query, key, value, sinks=[np.nan] * 4, **same)  # equal, and so it goes through

    def another():
        if own:
            distributed.attention_varlen(
                world,
                *(x[0].swapaxes(0, 1) for x in (query, key, value)),
                cu_seqlens_q=[0, 37 * world.size],
                cu_seqlens_k=[0, 133 * world.size],
            )
        else:
            distributed.attention(world, query[0], key[0], value[0])

    assert isinstance(same_everywhere(another), ValueError)


def numbers_of_no_module():
    """A number that goes nowhere: its class has no name by which others could find it."""

    class Own:
        def __float__(self):
            return 0.5

    return Own()


def arguments_that_raise_by_themselves():
    """Before the checks of this library, or behind them."""
    own, (query, key, value) = world.rank == LAST, draw()
    cache = distributed.KVCache(world, 2, 2, 20, value_dim=12)
    wrong = NoArray() if own else key
    calls = [
        (lambda: distributed.attention(world, query, wrong, value), "key must be an array"),
        (lambda: distributed.attention(world, query, key, value, bias=NoArray() if own else None), "bias"),
        (lambda: distributed.explain(world, wrong, key, value), "query must be an array"),
        (lambda: distributed.gather(world, wrong), "array must be an array"),
        (lambda: distributed.scatter(world, wrong, root=LAST), "array must be an array"),
        (lambda: distributed.gather(world, key, axis="rows" if own else 0), "axis is 'rows'"),
        (lambda: distributed.gather(world, key, axis=1.0 if own else 0), "axis is 1.0"),
        (lambda: distributed.scatter(world, key, axis=None if own else 0, root=LAST), "axis is None"),
        (lambda: cache.append(wrong, value), "key must be an array"),
        (lambda: cache.attend(query, causal=NoArray() if own else True), "causal is"),
        (lambda: cache.truncate(NoArray() if own else 0), "n must be an array"),
    ]
    if LAST:
        odd = numbers_of_no_module() if own else 0.5
        calls += [
            (lambda: distributed.attention(world, query, key, value, scale=odd), "pickle"),
            (lambda: cache.attend(query, scale=odd), "pickle"),
        ]
    for call, said in calls:
        error = same_everywhere(call)
        assert said in str(error) and (world.size == 1 or f"rank {LAST}" in str(error)), (said, error)
    assert len(cache) == 0


class Failing:
    """In place of a function of the core: raises at one of its calls, on one rank."""

    def __init__(self, name, rank, call):
        self.name, self.mine, self.left, self.real = name, world.rank == rank, call, getattr(_core, name)

    def __call__(self, *arguments):
        self.left -= 1
        if self.mine and self.left == 0:
            raise MemoryError("no memory, says the test")
        return self.real(*arguments)

    def __enter__(self):
        setattr(_core, self.name, self)

    def __exit__(self, *_):
        setattr(_core, self.name, self.real)


def a_rank_fails_in_the_middle():
    """On each rank in turn; afterwards nothing is left over that a next call could meet."""
    query, key, value = draw(M=40, N=40)
    out, lse = sdpa.attention(query, key, value, return_lse=True)
    for layout, gathered, rank in itertools.product(("contiguous", "zigzag"), (True, False), range(world.size)):
        _attention.GATHER_BYTES = 1 << 20 if gathered else -1
        calls = [("attention", 1 if gathered else 2, distributed.attention, (query, key, value), {})]
        if world.size <= 4:
            calls.append(("attention", 1, distributed.attention, (query, key, value), {"split": "heads"}))
        calls.append(("attention_backward", 2, distributed.attention_backward, (out, query, key, value, out, lse), {}))
        for name, nth, function, arrays, options in calls:
            with Failing(name, rank, nth):
                check_failure(rank, function, *arrays, layout=layout, **options)
            function(world, *arrays, layout=layout, **options)


class NoMemory:
    """In place of NumPy in a module: on one rank, one of its arrays cannot be made."""

    def __init__(self, module, rank, call):
        self.module, self.mine, self.left = module, world.rank == rank, call

    def __getattr__(self, name):
        made = getattr(np, name)
        return self._counted(made) if name in ("empty", "empty_like", "concatenate") else made

    def _counted(self, made):
        def make(*arguments, **options):
            self.left -= 1
            if self.mine and self.left == 0:
                raise MemoryError("no memory, says the test")
            return made(*arguments, **options)

        return make

    def __enter__(self):
        self.module.np = self
        return self

    def __exit__(self, *_):
        self.module.np = np


def a_rank_has_no_memory_for_what_arrives():
    """Whichever array it is."""
    query, key, value = draw(M=40, N=40)
    calls = [
        (_whole, lambda: distributed.scatter(world, query, root=LAST)),
        (_whole, lambda: distributed.gather(world, query, layout="zigzag", root=None)),
        (_whole, lambda: distributed.gather(world, query)),
    ]
    if world.size <= 4:
        calls.append((_heads, lambda: distributed.attention(world, query, key, value, split="heads")))
    for (module, call), rank in itertools.product(calls, range(world.size if LAST else 0)):
        for number in itertools.count(1):
            with NoMemory(module, rank, number) as memory:
                error = caught(call)
            if not world.bcast(memory.left <= 0, rank):
                assert error is None
                break
            assert isinstance(error, MemoryError if world.rank == rank else RuntimeError), (number, error)
        assert number > 1 or (module is _whole and rank), (module, rank)


def check_failure(rank, function, *arrays, **options):
    if world.size == 1:
        return
    error = caught(function, world, *arrays, **options)
    assert isinstance(error, MemoryError if world.rank == rank else RuntimeError) and "no memory" in str(error), error
    assert world.rank == rank or f"failed on rank {rank}" in str(error)


def one_rank_is_the_plain_call():
    query, key, value = draw(M=70, N=200)
    options = dict(causal=True, return_lse=True)
    expected = sdpa.attention(query, key, value, **options)
    out = np.empty_like(expected[0])
    found = distributed.attention(MPI.COMM_SELF, query, key, value, layout="zigzag", out=out, **options)
    assert found[0] is out
    for actual, plain in zip(found, expected):
        assert_same_bits(actual, plain)
    arguments = out, query, key, value, *expected
    for actual, plain in zip(
        distributed.attention_backward(MPI.COMM_SELF, *arguments, causal=True)[:3],
        sdpa.attention_backward(*arguments, causal=True)[:3],
    ):
        assert_same_bits(actual, plain)


def several_communicators():
    """Halves of the ranks, each with a call of its own, and the world between; messages of the caller meet none."""
    _attention.GATHER_BYTES = -1
    half = world.Split(world.rank % 2, -world.rank)
    mine = draw(M=20 + half.size, N=50, seed=world.rank % 2)
    parts = [distributed.scatter(half, x) for x in mine]
    waiting = world.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    out = distributed.attention(half, *parts)
    all_of_them = distributed.attention(world, *mine)
    world.send("of the caller", (world.rank + 1) % world.size)
    assert waiting.wait() == "of the caller"
    whole = distributed.gather(half, out, root=None)
    np.testing.assert_allclose(whole, sdpa.attention(*mine), rtol=0, atol=1e-5)
    assert all_of_them.shape == (*mine[0].shape[:-1], 12)
    half.Free()


def threads_with_a_communicator_each():
    """At once, from the first call with them on."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    arrays, found = draw(M=40, N=40), []
    mine = spread(*arrays)
    _agreement._KEY = None

    def attend(comm):
        found.extend(distributed.attention(comm, *mine, causal=True) for _ in range(3))

    comms = [world.Dup() for _ in range(3)]
    threads = [threading.Thread(target=attend, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (expected,) = spread(sdpa.attention(*arrays, causal=True))
    assert len(found) == 9
    for out in found:
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    for comm in comms:
        comm.Free()


def bytes_sent(call):
    """By this rank."""
    tally = _agreement.join(world).tally
    before = tally.bytes_sent
    call()
    return tally.bytes_sent - before


def what_travels():
    """As `explain` says, and no more than what windows and causality let a rank see."""
    _attention.GATHER_BYTES = -1
    query, key, value = (rng(0).standard_normal((1, 2, 64 * world.size, 8)) for _ in range(3))
    block = 2 * 2 * 64 * 8 * 8
    for layout, options, sent in (
        ("contiguous", {}, block * world.size * LAST),
        ("contiguous", dict(causal=True), block * world.size * LAST // 2),
        ("contiguous", dict(causal=True, window=(32, None)), block * LAST),
        ("contiguous", dict(window=(0, 0)), 0),
        ("contiguous", dict(kv_lengths=64), block * LAST),
        ("zigzag", {}, block * world.size * LAST),
        ("zigzag", dict(causal=True), block * world.size * LAST * 3 // 4),
    ):
        mine = spread(query, key, value, layout=layout)
        really = bytes_sent(lambda: distributed.attention(world, *mine, layout=layout, **options))  # noqa: B023
        told = distributed.explain(world, *mine, layout=layout, **options)
        assert told.bytes_sent == really and told.bytes_sent_in_all == sent, (layout, options, told, sent)
        assert told.way == ("ring" if world.size > 1 else "one rank") and f"{told.flops}" in str(told)
        out = np.ones(mine[0].shape)
        lse = np.ones(out.shape[:-1])
        arrays = out, *mine, out, lse
        really = bytes_sent(lambda: distributed.attention_backward(world, *arrays, layout=layout, **options))  # noqa: B023
        assert world.allreduce(really) == 2 * sent  # the gradients of what travelled go back
    _attention.GATHER_BYTES = 1 << 30
    mine = spread(query, key, value)
    told = distributed.explain(world, *mine)
    really = bytes_sent(lambda: distributed.attention(world, *mine))
    assert told.bytes_sent == really == LAST * block and told.way in ("gather", "one rank")
    causal = {
        layout: distributed.explain(world, *spread(query, key, value, layout=layout), layout=layout, causal=True)
        for layout in ("contiguous", "zigzag")
    }
    assert causal["zigzag"].balance <= 1.05 and causal["contiguous"].balance <= 2
    if world.size <= 2:
        told = distributed.explain(world, *mine, split="heads")
        assert told.bytes_sent == bytes_sent(lambda: distributed.attention(world, *mine, split="heads"))


def whole_arrays():
    for dtype in (float32, np.int8, bool, "datetime64[s]"):
        whole = np.arange(3 * 11 * 2).reshape(3, 11, 2).astype(dtype)
        for layout in ("contiguous", "zigzag"):
            for axis in (0, 1, -1):
                part = distributed.scatter(
                    world, whole if world.rank == LAST else None, axis=axis, layout=layout, root=LAST
                )
                expected = np.take(whole, distributed.rows(whole.shape[axis], world.rank, world.size, layout), axis)
                np.testing.assert_array_equal(part, expected)
                np.testing.assert_array_equal(
                    distributed.gather(world, part, axis=axis, layout=layout, root=None), whole
                )
                at_root = distributed.gather(world, part, axis=axis, layout=layout)
                assert (at_root is None) == (world.rank != 0)
    own = np.ones((world.rank, 3))
    assert distributed.gather(world, own, layout="zigzag", root=None).shape == (sum(range(world.size)), 3)
    for call in (
        lambda: distributed.scatter(world, None),
        lambda: distributed.scatter(world, np.ones((2, 2)), root=world.size),
        lambda: distributed.scatter(world, np.ones((2, 2)), axis=2),
        lambda: distributed.gather(world, np.ones((2, 2)), layout="no"),
        lambda: distributed.scatter(world, np.array([[None]])),
        lambda: distributed.scatter(world, np.ones((2, 2)), axis="x" if world.rank == LAST else -2),
        lambda: distributed.gather(world, np.ones((2, 2)), axis="x" if world.rank == LAST else -2),
        lambda: distributed.gather(world, np.ones((2, 2)), axis=1.0 if world.rank == LAST else 1),
        lambda: distributed.gather(world, NoArray() if world.rank == LAST else np.ones((2, 2))),
        lambda: distributed.attention(world, *[NoArray() if world.rank == LAST else np.ones((2, 2))] * 3),
    ):
        assert isinstance(same_everywhere(call), (ValueError, TypeError))


def a_communicator_keeps_its_group():
    again = world.Dup()
    group = _agreement.join(again)
    assert _agreement.join(again) is group and group.comm != again and group.size == world.size
    again.Free()
    for comm in (MPI.COMM_NULL, None):
        error = caught(_agreement.join, comm)
        assert isinstance(error, TypeError) and "communicator of mpi4py" in str(error)


for check in (
    wrong_arguments_on_one_rank,
    wrong_packed_arguments_on_one_rank,
    ranks_that_do_not_agree,
    arguments_that_raise_by_themselves,
    a_rank_fails_in_the_middle,
    a_rank_has_no_memory_for_what_arrives,
    one_rank_is_the_plain_call,
    several_communicators,
    threads_with_a_communicator_each,
    what_travels,
    whole_arrays,
    a_communicator_keeps_its_group,
):
    if world.rank == 0:
        print(check.__name__, flush=True)
    check()
