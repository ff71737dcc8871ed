"""Heads instead of rows: each rank gets all rows of some heads, computes them as one call, and sends them back.

Two exchanges among all ranks take the place of the steps of a ring, as in DeepSpeed-Ulysses (Jacobs et al., 2023).
"""

import itertools
import math

import numpy as np

from .. import _core
from .._attention.forward import ATTENTION
from .._runtime import kernels
from ._agreement import finish, ready
from ._calls import BY_HEAD
from ._ring import Mail


def check_heads(call):
    if call.heads < call.group.size:
        raise ValueError(
            f"split is 'heads', and query has {call.heads} heads: there must be as many as ranks, {call.group.size}"
        )


def attend_by_heads(call, options):
    """As `attend` of _attention.py.  A row's result does not depend on the other heads, so its bits are those of the
    plain call, as long as the same engine computes both."""
    mail = Mail(call.group)
    exchange = Exchange(call, mail)
    heads, kv_heads = shares(call.heads, call.kv_heads, call.group.size)
    query = exchange.rows_to_heads(call.query, heads, call.q_chunks, call.rows)
    key, value = (exchange.rows_to_heads(x, kv_heads, call.k_chunks, call.keys) for x in (call.key, call.value))
    wanted = options.get("out")
    dtype = call.query.dtype if wanted is None or wanted.dtype == call.query.dtype else call.sums
    over_pairs = {name: exchange.pairs_to_heads(x, heads, call) for name, x in call.pairs.items()}
    lead, own = call.out_shape[:-3], heads[call.group.rank]
    out, lse = ready(
        call.group,
        lambda: (
            np.empty((*lead, len(own), call.rows, value.shape[-1]), dtype),
            np.empty((*lead, len(own), call.rows, 1), call.sums),
        ),
    )

    def compute():
        groups = call.heads // call.kv_heads
        for some in runs(own, groups):
            here = slice(some.start - own.start, some.stop - own.start)
            first = kv_heads[call.group.rank].start
            of_keys = slice(some.start // groups - first, (some.stop - 1) // groups + 1 - first)
            settings = {name: given for name, given in options.items() if given is not None} | {
                "out": out[..., here, :, :], "return_lse": True, "threads": call.threads,
            }  # fmt: skip
            for name in BY_HEAD:
                if settings.get(name) is not None:
                    given = np.asarray(settings[name])
                    settings[name] = given[..., some.start : some.stop] if given.shape[-1:] not in ((), (1,)) else given
            for name, array in over_pairs.items():
                settings[name] = array[..., here, :, :] if array.ndim > 2 and array.shape[-3] != 1 else array
            arrays = query[..., here, :, :], key[..., of_keys, :, :], value[..., of_keys, :, :]
            lse[..., here, :, 0] = _core.attention(kernels.default, *arrays, settings, ATTENTION)[1]

    mail.attempt(compute)
    result, of_rows = (exchange.heads_to_rows(x, heads, call) for x in (out, lse))

    def close():
        taken = np.empty_like(call.query, shape=call.out_shape, subok=False) if wanted is None else wanted
        taken[...] = result
        return taken

    result = mail.attempt(close)
    finish(call.group, mail.failure)
    return (result, of_rows[..., 0]) if options.get("return_lse") else result


def shares(heads, kv_heads, size):
    """Which heads of query, and of key and value, each rank computes, as ranges.  Whole groups where there are enough
    of them; else ranks share the key/value heads that their query heads need."""
    group = heads // kv_heads
    whole = kv_heads >= size
    unit, count = (group, kv_heads) if whole else (1, heads)
    bounds = [unit * (count * rank // size) for rank in range(size + 1)]
    of_query = [range(*pair) for pair in itertools.pairwise(bounds)]
    return of_query, [range(own.start // group, (own.stop - 1) // group + 1) for own in of_query]


def runs(own, group):
    """The heads that one call can compute: all, if they are whole groups, and else those of each group."""
    if own.start % group == 0 and own.stop % group == 0:
        return [own]
    edges = [own.start, *range((own.start // group + 1) * group, own.stop, group), own.stop]
    return [range(*pair) for pair in itertools.pairwise(edges)]


class Exchange:
    """All ranks send each other a part of an array."""

    def __init__(self, call, mail):
        self.call, self.mail, self.group = call, mail, call.group

    def rows_to_heads(self, array, heads, chunks, rows):
        """From (..., all heads, own rows, size) to (..., own heads, all rows, size)."""
        array = array.reshape((1,) * (3 - array.ndim) + array.shape)
        lead, size, rank = array.shape[:-3], array.shape[-1], self.group.rank
        counts = [sum(chunk.count for chunk in chunks if chunk.rank == r) for r in range(self.group.size)]
        whole, parts = self.swap(
            lambda: [array[..., of_rank.start : of_rank.stop, :, :] for of_rank in heads],
            [(*lead, len(heads[rank]), count, size) for count in counts],
            (*lead, len(heads[rank]), rows, size),
            array.dtype,
        )
        for chunk in chunks:
            part = parts[chunk.rank][..., chunk.at : chunk.at + chunk.count, :]
            whole[..., chunk.first : chunk.first + chunk.count, :] = part
        return whole

    def pairs_to_heads(self, array, heads, call):
        """The same of an array over pairs, which may have one head for all, or one row for all rows of a rank."""
        own = sum(chunk.count for chunk in call.q_chunks if chunk.rank == self.group.rank)
        array = np.broadcast_to(array, (*array.shape[:-2], own, array.shape[-1]))
        of_heads = heads if array.ndim > 2 and array.shape[-3] != 1 else [range(1)] * self.group.size
        return self.rows_to_heads(array, of_heads, call.q_chunks, call.rows)

    def heads_to_rows(self, array, heads, call):
        """From (..., own heads, all rows, size) back to (..., all heads, own rows, size)."""
        lead, size = array.shape[:-3], array.shape[-1]
        in_order = sorted(call.q_chunks)  # by rank, and then as they lie there
        chunks = [[c for c in in_order if c.rank == r] for r in range(self.group.size)]
        rows = sum(c.count for c in chunks[self.group.rank])
        whole, parts = self.swap(
            lambda: [
                np.concatenate([array[..., c.first : c.first + c.count, :] for c in of_rank], axis=-2)
                for of_rank in chunks
            ],
            [(*lead, len(of_rank), rows, size) for of_rank in heads],
            (*lead, sum(map(len, heads)), rows, size),
            array.dtype,
        )
        for of_rank, part in zip(heads, parts):
            whole[..., of_rank.start : of_rank.stop, :, :] = part
        return whole

    def swap(self, parts, shapes, shape, dtype):
        """An empty array of the last shape, for what is returned with it: what the other ranks had for this one, of
        these shapes, for each of the `parts()` for them."""

        def rooms():
            sent = [part.reshape(-1) for part in parts()]
            received = np.empty(sum(map(math.prod, shapes)), dtype)
            return np.empty(shape, dtype), [part.nbytes for part in sent], np.concatenate(sent), received

        whole, sizes, sent, received = ready(self.group, rooms)
        ends = np.cumsum([math.prod(each) for each in shapes])
        arriving = [math.prod(each) * dtype.itemsize for each in shapes]
        self.group.comm.Alltoallv([sent.view(np.uint8), sizes], [received.view(np.uint8), arriving])
        self.mail.tally.bytes_sent += sent.nbytes - sizes[self.group.rank]
        return whole, [x.reshape(each) for x, each in zip(np.split(received, ends[:-1]), shapes)]
