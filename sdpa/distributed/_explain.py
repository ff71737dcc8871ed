"""What a call over several ranks would do, and why."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._attention.forward import ATTENTION
from .._fields import documented
from .._options import AttentionOptions, takes
from .._runtime import kernels
from . import _attention
from ._agreement import join
from ._calls import Dense
from ._heads import check_heads, shares
from ._layout import Chunk

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


@documented
class Explanation(NamedTuple):
    """How one call is spread over the ranks.  `str(explanation)` is a readable text.

    Attributes
    ----------
    ranks : int
        The number of ranks.
    rank : int
        Which of them this one is.
    way : str
        How keys and values meet the rows that see them: "ring", "gather", "heads", or "one rank".
    layout : str
        Which positions the rows have, as it was given.
    threads : int
        The most threads of this rank.
    chunk_pairs : int
        How many pairs of a chunk of rows and a chunk of keys this rank computes.
    flops : int
        The work of this rank, counted as `sdpa.explain` counts it.
    balance : float
        The work of the busiest rank, divided by the mean of all ranks.
    bytes_sent : int
        What this rank sends.
    bytes_sent_in_all : int
        What all ranks send together.
    bytes_held : int
        The most bytes of keys and values of other ranks that this rank holds at a time.
    why : tuple of str
        The reasons.
    """

    ranks: int
    rank: int
    way: str
    layout: str
    threads: int
    chunk_pairs: int
    flops: int
    balance: float
    bytes_sent: int
    bytes_sent_in_all: int
    bytes_held: int
    why: tuple

    def __str__(self):
        fields = [f"{name:18}{value}" for name, value in zip(self._fields[:-1], self)]
        return "\n".join(fields + [f"{'because' if i == 0 else '':18}{reason}" for i, reason in enumerate(self.why)])


EXPLAIN = takes("explain", AttentionOptions)


@EXPLAIN
def explain(
    comm: Any, query: ArrayLike, key: ArrayLike, value: ArrayLike, *, layout: str = "contiguous",
    split: str = "sequence", **options: Unpack[AttentionOptions],
) -> Explanation:  # fmt: skip
    """How a call of `sdpa.distributed.attention` with these arguments is spread: in which way, with how much work, and
    what travels.

    All ranks call this, and each is told its own part.  No key travels.

    Parameters
    ----------
    comm, query, key, value, layout, split
        As for `attention`.
    {options}
    """
    group = join(comm)

    def check(call):
        _attention.check_split(split)
        if split == "heads":
            check_heads(call)

    call = Dense(group, query, key, value, options, EXPLAIN, layout, check, split=split)
    way = _way(call, split)
    flops = _flops(call)
    if way == "heads":
        flops = sum(group.comm.allgather(flops)) * len(_own_heads(call)[0]) // max(1, call.heads)
    sent = _bytes_sent(call, way)
    every = np.array(group.comm.allgather((flops, sent)), float)
    mean = every[:, 0].mean()
    return Explanation(
        ranks=group.size,
        rank=group.rank,
        way=way,
        layout=layout,
        threads=call.threads,
        chunk_pairs=int(call.seen[call.own_rows].sum()),
        flops=flops,
        balance=float(every[:, 0].max() / mean) if mean else 1.0,
        bytes_sent=sent,
        bytes_sent_in_all=int(every[:, 1].sum()),
        bytes_held=_bytes_held(call, way),
        why=tuple(_reasons(call, way)),
    )


def _way(call, split):
    if call.group.size == 1:
        return "one rank"
    return "heads" if split == "heads" else "gather" if _attention.is_gathered(call) else "ring"


def _flops(call):
    """The operations for the rows of this rank: a multiplication and an addition per feature of each visible pair."""
    every = Chunk(0, 0, call.keys, 0)
    arrays = call.of_all(call.key, call.keys), call.of_all(call.value, call.keys)
    pairs = 0
    for i in call.own_rows:
        q = call.q_chunks[i]
        options = call.between(q, every, False)
        pairs += _core.plan_call(
            kernels.default, call.rows_of(call.query, q), *arrays, options, ATTENTION
        ).visible_pairs()
    return 2 * pairs * (call.query.shape[-1] + call.value.shape[-1])


def _own_heads(call):
    return [of_ranks[call.group.rank] for of_ranks in shares(call.heads, call.kv_heads, call.group.size)]


def _chunk_bytes(call, *chunks):
    return sum(call.of_all(x, chunk.count).nbytes for x in (call.key, call.value) for chunk in chunks)


def _own_keys(call):
    return _chunk_bytes(call, *(chunk for chunk in call.k_chunks if chunk.rank == call.group.rank))


def _bytes_sent(call, way):
    size, rank = call.group.size, call.group.rank
    if way == "gather":
        return (size - 1) * _own_keys(call)
    if way == "ring":
        departures = [c for step in range(1, size) for c, _ in call.route.departures(rank, step)]
        return _chunk_bytes(call, *(call.k_chunks[c] for c in departures))
    if way == "one rank":
        return 0
    of_query, of_keys = shares(call.heads, call.kv_heads, size)
    query, key = call.query.nbytes // max(1, call.heads), _own_keys(call) // max(1, call.kv_heads)
    there = sum(len(of_query[r]) * query + len(of_keys[r]) * key for r in range(size) if r != rank)
    rows = math.prod(call.out_shape[:-3]) * (call.rows - call.out_shape[-2])  # of the others, and of each head
    back = rows * len(of_query[rank]) * (call.value.shape[-1] * call.query.itemsize + call.sums.itemsize)
    return there + back


def _bytes_held(call, way):
    whole = _chunk_bytes(call, Chunk(0, 0, call.keys, 0))
    if way == "ring":
        steps = [call.route.arrivals(call.group.rank, step) for step in range(1, call.group.size)]
        return sum(sorted(_chunk_bytes(call, *(call.k_chunks[c] for c, _ in each)) for each in steps)[-2:])
    if way == "heads":
        return whole * len(_own_heads(call)[1]) // max(1, call.kv_heads)
    return whole - _own_keys(call)


def _reasons(call, way):
    keys = f"the keys and values of all ranks are {_chunk_bytes(call, Chunk(0, 0, call.keys, 0))} bytes"
    if way == "one rank":
        yield "the communicator has one rank, so this is the plain call"
    elif way == "gather":
        yield f"{keys}, no more than {_attention.GATHER_BYTES}: all ranks get all of them at once"
    elif way == "heads":
        yield "heads were asked for: all ranks exchange query, key and value, and then the result"
    else:
        yield f"{keys}, more than {_attention.GATHER_BYTES}: they go round the ranks in blocks"
        yield f"{int(call.seen.sum())} of {call.seen.size} pairs of a chunk of rows and a chunk of keys see each other"
        owners = call.route.owners
        journeys = int(call.route.needs.sum() - sum(call.route.needs[owner, c] for c, owner in enumerate(owners)))
        yield f"{journeys} of {len(owners) * (call.group.size - 1)} journeys of a chunk to another rank are needed"
    if call.group.sharing > 1:
        yield f"{call.group.sharing} ranks share the CPUs of this one"
