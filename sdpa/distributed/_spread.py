"""The tokens that one rank has of a cache that is spread over the ranks."""

from typing import NamedTuple

import numpy as np

from .._cache import kv
from .._checks import float_dtype, whole_number, whole_numbers
from ._blocks import BLOCK, Blocks
from ._together import attempt, digest_of, voted


class Tokens(NamedTuple):
    """New tokens: keys (B, G, M, D) and values (B, G, M, E), added[b] of which follow the before[b] there are."""

    key: np.ndarray
    value: np.ndarray
    before: np.ndarray
    added: np.ndarray
    alike: bool  # `before` is the same for all batches, and added is M

    @property
    def digest(self):
        """The numbers of what `said` has: their hash is the same in all processes."""
        if not self.alike:
            return digest_of(self.said())
        kinds = ord(self.key.dtype.char), ord(self.value.dtype.char)
        return hash((*self.key.shape, *self.value.shape, *kinds, int(self.before[0])))

    def said(self):
        """{name: value} of what all ranks must give alike."""
        return {
            "the function": "append", "lengths so far": self.before.tolist(),
            "the shape of key": self.key.shape, "the dtype of key": self.key.dtype.name,
            "the shape of value": self.value.shape, "the dtype of value": self.value.dtype.name,
            "lengths": self.added.tolist(),
        }  # fmt: skip

    def of_rank(self, blocks):
        """Keys and values that belong to a rank, and how many of them in each batch; None: all."""
        if blocks.size == 1:
            return self.key, self.value, self.added
        if self.alike:
            before, count = int(self.before[0]), self.key.shape[2]
            begin, end = blocks.held(before), blocks.held(before + count)
            if end - begin in (0, count):
                return self.key[:, :, : end - begin], self.value[:, :, : end - begin], None
            where = blocks.position(np.arange(begin, end)) - before
            return self.key[:, :, where], self.value[:, :, where], None
        begins, ends = blocks.held(self.before), blocks.held(self.before + self.added)
        where = [blocks.position(np.arange(*of)) - before for *of, before in zip(begins, ends, self.before)]
        return *(_padded(array, where) for array in (self.key, self.value)), ends - begins


def _padded(array, where):
    """The rows of each batch, which may be more or fewer than those of the others."""
    taken = np.zeros((*array.shape[:2], max(map(len, where)), array.shape[3]), array.dtype)
    for batch, rows in enumerate(where):
        taken[batch, :, : len(rows)] = array[batch][:, rows]
    return taken


def own_sizes(whole, blocks):
    """What a rank's own cache is made with, for a cache of these sizes.

    A window of W tokens ends with a query's own.  No W - 1 tokens that follow one another have more than most_of(W - 1)
    on a rank, so a cache whose window holds one more keeps all that the queries of a chunk may see.
    """
    capacity, window = whole.capacity, whole.window
    return dict(
        batch=whole.batch, kv_heads=whole.kv_heads, head_dim=whole.head_dim, value_dim=whole.value_dim,
        dtype=whole.dtype, capacity=None if capacity is None else int(blocks.held(capacity)),
        window=None if window is None else blocks.most_of(window - 1) + 1, keep=int(blocks.held(whole.keep)),
        group=whole.group,
    )  # fmt: skip


def send_others(group, tokens):
    """The rank that alone has tokens sends all others theirs."""
    parts, failure = attempt(
        lambda: [
            [np.ascontiguousarray(x) for x in tokens.of_rank(Blocks(r, group.size))[:2]] for r in range(group.size)
        ]
    )
    about = tokens.key.dtype.name, tokens.value.dtype.name, tokens.key.shape[2], tokens.added, tokens.alike
    group.comm.bcast(None if failure is not None else about, group.rank)
    voted(group, 0, dict, failure)
    others = [(rank, array) for rank, arrays in enumerate(parts) if rank != group.rank for array in arrays]
    for request in [group.comm.Isend(_bytes(array), rank) for rank, array in others]:
        request.Wait()


def receive_own(cache, giver):
    """(own keys, own values, how many of them in each batch), as `Tokens.of_rank`; and how many tokens were given, how
    many of them count, and whether all batches are alike in that."""
    group = cache._group
    about = group.comm.bcast(None, giver)
    own, failure = attempt(_room, cache, *about) if about is not None else (None, None)
    voted(group, 0, dict, failure)
    for array in own[:2]:
        group.comm.Recv(_bytes(array), giver)
    return own, *about[2:]


def _room(cache, key_dtype, value_dtype, count, added, alike):
    counts = cache._blocks.held(cache._lengths + added) - cache._blocks.held(cache._lengths)
    shape = cache.batch, cache.kv_heads, int(counts.max())
    key = np.empty((*shape, cache.head_dim), float_dtype(key_dtype))
    return key, np.empty((*shape, cache.value_dim), float_dtype(value_dtype)), None if alike else counts


def _bytes(array):
    """MPI has no name for bfloat16."""
    return array.reshape(-1).view(np.uint8)


def keep_own(cache, key, value, counts):
    """Appends to the cache of this rank; what `restore` needs to take that back."""
    before = kv.snapshot(cache._local, key.shape[2])
    if key.shape[2]:
        cache._local.append(key, value, counts)
    return before


def take_part(cache, part, local, lengths, floors):
    """Begin with what `save` wrote for this rank; the number of the save.  Raises if that does not fit `local`, which
    is what else was in the folder."""
    blocks, names = cache._blocks, {"rank", "size", "block", "save", "lengths", "floors", "capacity", "window", "keep"}
    if not isinstance(part, dict) or part.keys() != names:
        raise ValueError(f"its part is {part!r}: it must have {', '.join(sorted(names))}")
    place = [whole_number(name, part[name], least=0) for name in ("rank", "size", "block")]
    if place != [*blocks, BLOCK]:
        raise ValueError(f"its rank, size and block are {place}: they must be {[*blocks, BLOCK]}")
    whole = kv.KVCache(
        local.batch, local.kv_heads, local.head_dim, value_dim=local.value_dim, dtype=local.dtype, group=local.group,
        **{name: part[name] for name in ("capacity", "window", "keep")},
    )  # fmt: skip
    all_lengths, all_floors = (whole_numbers(name, part[name], (local.batch,)) for name in ("lengths", "floors"))
    fits = [
        own_sizes(whole, blocks) == {name: getattr(local, name) for name in own_sizes(whole, blocks)},
        (all_lengths >= 0).all() and (all_lengths < 2**60).all() and (blocks.held(all_lengths) == lengths).all(),
        (all_floors >= 0).all() and (all_floors <= all_lengths).all(),
        (floors <= np.maximum(local.keep, blocks.held(all_floors))).all(),
    ]
    if not all(fits):
        raise ValueError(f"its part {part} does not fit its own lengths {lengths.tolist()} and sizes")
    cache._whole, cache._local, cache._lengths, cache._floors, cache._aligned = (
        whole, local, all_lengths, all_floors, None
    )  # fmt: skip
    cache._alike = bool((all_lengths == all_lengths[0]).all())
    return part["save"]
