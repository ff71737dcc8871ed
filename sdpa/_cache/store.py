"""The memory of a KVCache: where each token lies, and who may write there."""

import math
import weakref

import numpy as np

from .. import _core
from .._runtime import nodes

UNBOUNDED = 2**62
FIRST_ROOM = 64  # tokens that a new cache has room for
LINE = 64  # bytes of a cache line
CHUNK = 16  # the ring grows by multiples of this, so that chunks of similar sizes do not move the tokens each time


class Store(_core.CacheBase):
    """The memory of a KVCache: keys and values by position, without checks of arguments and without attention."""

    # A slot is a row of the arrays.  The token at position p lies in row p if p is below keep + ring, else in row
    # keep + (p - keep) % ring.  Without a window the ring is endless, so that the row always is the position.
    #
    # Batch b still has the positions p < lengths[b] that are below keep, or not below floors[b]; the other tokens were
    # overwritten.  The ring has window - 1 + extra rows, enough for queries of chunks of `extra` tokens, and `idle`
    # tokens were appended since so many rows were last needed.  So for every b:
    #
    #     floors[b] <= lengths[b],    lengths[b] - ring <= max(floors[b], keep) <= max(keep, lengths[b] - window + 1)
    #
    # `aligned` describes the last append if it had lengths: the number of its rows, and the position of the first.
    __slots__ = ()

    def __init__(self, *sizes):
        super().__init__(*sizes)
        none = np.zeros(1, np.int64)
        ring = UNBOUNDED if self.window is None else self.window
        self.commit(_core.CacheState(Memory(*self._new_operands(0), self), none, none, ring, 1, 0, 0, None))

    def fork(self):
        """A store with the same tokens, in the same memory until one of the two appends."""
        twin = type(self).__new__(type(self))
        self.commit(self._now.shared())
        twin.begin_as(self)
        self._now.memory.add_owner(twin)
        return twin

    def select(self, batches):
        """A store of its own with these of the batches, in this order."""
        twin = type(self)(
            len(batches), self.kv_heads, self.head_dim, self.value_dim, self.dtype, self.capacity, self.window,
            self.keep, self.group,
        )  # fmt: skip
        now, (lengths, floors) = self._now, self.state()
        memory, rows = Memory(*twin._new_operands(self.room), twin), min(len(self), self.bound(), self.room)
        for old, new in zip(now.memory.arrays.values(), memory.arrays.values()):
            for to, batch in enumerate(batches):
                new[to, :, :rows] = old[batch, :, :rows]
        twin.commit(twin.state_of(memory, lengths[batches], floors[batches], now.ring, now.extra, now.idle))
        return twin

    def forget(self, lengths, floors):
        """Keep so many tokens of each batch."""
        now = self._now
        self.commit(_core.CacheState(now.memory, lengths, floors, now.ring, now.extra, now.idle, now.writable, None))

    def __len__(self):
        """The length of the longest batch."""
        return self._now.length if self._now.length >= 0 else int(self._now.lengths.max())

    def write(self, key, value, before, floors, added, aligned):
        """Put rows of `key` and `value`, added[b] of them, after the before[b] that there are."""
        memory, after = self._now.memory, before + added
        ring, extra, idle = self._wanted_ring(int(added.max()))
        rows = int(after.max())
        limit = self.bound(ring) if self.capacity is None else min(self.bound(ring), self.capacity)
        stays = ring == self._now.ring or (  # each token has the same row in both rings
            (floors <= self.keep).all() and (before <= self.bound(ring)).all() and memory.rows <= limit
        )
        in_place = stays and min(rows, limit) <= memory.rows and memory.belongs_to(self)
        if not in_place:
            room = memory.rows if stays else 0
            if rows > room:
                room = min(max(rows, 2 * room, FIRST_ROOM), limit)
            memory, floors = self._moved(before, floors, ring, room)
        if self.window is not None:
            floors = np.maximum(floors, after - ring)
        state = self.state_of(memory, after, floors, ring, extra, idle, aligned)
        if in_place and self.window is not None:  # a new row takes the place of an old one
            stored = self._stored("key", key, memory.keys) + self._stored("value", value, memory.values)
            self.commit(state, stored, self._now, ring, added)
        else:  # no other cache sees these rows yet
            for name, rows, operand in ("key", key, memory.keys), ("value", value, memory.values):
                self._put(name, rows, operand, before, after, ring)
            self.commit(state)

    def state_of(self, memory, lengths, floors, ring, extra, idle, aligned=None):
        """A state in which the memory belongs to this cache alone."""
        return _core.CacheState(
            memory, lengths, floors, ring, extra, idle, 0 if memory.frozen else memory.rows, aligned
        )

    def snapshot(self, count):
        """What `restore` needs to take back an append of `count` tokens.  With a window, this includes the rows that
        the new tokens replace."""
        if self.window is None:
            return self._now, None, None, 0
        ring, _, _ = self._wanted_ring(count)
        return self._now, self.rows_behind(count, ring), self._now, ring

    def restore(self, snapshot):
        state, *rows = snapshot
        if state.memory is self._now.memory:
            self.commit(state, *rows)
        else:  # the old rows were copied, not overwritten
            self.commit(state)

    def _put(self, name, rows, operand, before, after, ring):
        for batches, begin, end in alike(before, after):
            at = begin
            while at < end:
                slot, run = self._slot(at, ring, end)
                new = rows[batches, :, at - begin : at - begin + run]
                convert(name, new, [array[batches, :, slot : slot + run] for array in operand.arrays], operand.group)
                at += run

    def _stored(self, name, rows, operand):
        """Copies as the arrays of the operand hold them."""
        into = [np.empty((*rows.shape[:3], array.shape[3]), array.dtype) for array in operand.arrays]
        convert(name, rows, into, operand.group)
        return into

    def _moved(self, before, floors, ring, room):
        """New memory with the same tokens, in a ring of another size; and the floors of the tokens in it."""
        new = Memory(*self._new_operands(room), self)
        if ring != UNBOUNDED:
            floors = np.maximum(floors, before - ring)
        for batches, kept, begin, end in alike(np.minimum(before, self.keep), np.maximum(floors, self.keep), before):
            for at, stop in ((0, kept), (begin, end)):
                while at < stop:
                    source, run = self._slot(at, self._now.ring, stop)
                    target, run = self._slot(at, ring, at + run)
                    for old, array in zip(self._now.memory.arrays.values(), new.arrays.values()):
                        array[batches, :, target : target + run] = old[batches, :, source : source + run]
                    at += run
        return new, floors

    def _wanted_ring(self, count):
        """(ring, extra, idle) for the queries of `count` tokens, the first of which sees window - 1 tokens before.  The
        ring gets smaller at once if that frees more than half of the memory, else only after so many tokens that moving
        the contents costs little for each token."""
        if self.window is None:
            return UNBOUNDED, 1, 0
        extra = max(count if count <= 1 else -(-count // CHUNK) * CHUNK, 1)
        idle = 0
        if extra < self._now.extra:
            idle = self._now.idle + count
            if self._now.extra > self.window or idle > self.window:
                idle = 0
            else:
                extra = self._now.extra
        return self.window - 1 + extra, extra, idle

    def _slot(self, at, ring, end):
        """The row of the token at position `at`, and how many tokens up to `end` lie in consecutive rows from there."""
        bound = self.bound(ring)
        slot = at if at < bound else self.keep + (at - self.keep) % ring
        return slot, min(end - at, bound - slot)

    def bound(self, ring=None):
        """The first row that is never used."""
        return self.keep + (self._now.ring if ring is None else ring)

    def _new_operands(self, rows):
        """Keys and values, with room for so many rows."""
        lead, group = (self.batch, self.kv_heads, rows), self.group
        for dim in self.head_dim, self.value_dim:
            scales = new_array((*lead, -(-dim // group)), np.dtype(np.float32)) if self.dtype == np.int8 else None
            yield _core.Operand(new_array((*lead, dim), self.dtype), scales, group)

    def state(self):
        """The lengths and floors of the batches, as arrays that are replaced, never changed."""
        now = self._now
        if now.length >= 0:
            return np.full(self.batch, now.length, np.int64), np.full(self.batch, now.floor, np.int64)
        return now.lengths, now.floors

    @property
    def keys(self):
        return self._now.keys

    @property
    def values(self):
        return self._now.values

    @property
    def ragged(self):
        """Whether batches have lengths of their own."""
        return self._now.length < 0

    @property
    def room(self):
        """How many tokens the arrays have room for."""
        return self._now.memory.rows

    @property
    def nbytes(self):
        return sum(array.nbytes for array in self._now.memory.arrays.values())

    def next_position(self):
        """Of the next token: an int, or (B) where batches differ."""
        return self._now.length if self._now.length >= 0 else self._now.lengths.copy()

    def readable(self, array):
        """The rows of `array` (None: None) that the last token sees, in the order of their positions, read-only."""
        now = self._now
        if array is None:
            return None
        if self.window is None or (now.length >= 0 and max(now.floor, now.length - self.window) <= self.keep):
            rows = array[:, :, : len(self)]
        else:
            lengths, floors = self.state()
            kept = np.minimum(lengths, self.keep)
            first = np.maximum(np.maximum(floors, lengths - self.window), self.keep)
            counts = kept + np.maximum(lengths - first, 0)
            rows = np.zeros((*array.shape[:2], int(counts.max()), array.shape[3]), array.dtype)
            for batch in range(self.batch):
                positions = np.r_[: kept[batch], first[batch] : max(first[batch], lengths[batch])]
                rows[batch, :, : counts[batch]] = array[batch][:, self._slots_of(positions)]
        rows = rows.view()
        rows.flags.writeable = False
        return rows

    def between(self, operand, begin, end):
        """The numbers of the tokens from position `begin` up to `end`, float where they are int8.  All batches must
        have them.  This is a view if the tokens lie one after another."""
        slot, run = self._slot(begin, self._now.ring, end)
        slots = slice(slot, slot + run) if run == end - begin else self._slots_of(np.arange(begin, end))
        if operand.scales is None:
            return operand.numbers[:, :, slots]
        numbers, scales = operand.numbers[:, :, slots], operand.scales[:, :, slots]
        return numbers * scales.repeat(operand.group, axis=-1)[..., : numbers.shape[-1]]

    def _slots_of(self, positions):
        return np.where(positions < self.bound(), positions, self.keep + (positions - self.keep) % self._now.ring)

    def positions(self, rows):
        """The position of the token in each of the first `rows` slots, (B, rows) or (1, rows); -1 for an empty slot."""
        lengths, floors = self.state()
        if self._now.length >= 0:
            lengths, floors = lengths[:1], floors[:1]
        lengths, floors, slot = lengths[:, None], floors[:, None], np.arange(rows)
        last = lengths - 1 - (lengths - 1 - slot) % self._now.ring  # the last position that lies in this slot
        position = np.where((slot < self.keep) | (lengths <= self.bound()), slot, last)
        there = (position < lengths) & ((position >= floors) | (slot < self.keep))
        return np.where(there & ((slot < self.keep) | (position >= self.keep)), position, -1)


class Memory:
    """Keys and values, and the caches that use them.  `frozen`: not to be written."""

    __slots__ = ("frozen", "keys", "owners", "rows", "values")

    def __init__(self, keys, values, owner, frozen=False):
        self.keys, self.values, self.frozen, self.rows = keys, values, frozen, keys.numbers.shape[2]
        self.owners = [weakref.ref(owner)]

    @property
    def arrays(self):
        """What there is of them, by name."""
        numbers = {"keys": self.keys.numbers, "values": self.values.numbers}
        if self.keys.scales is None:
            return numbers
        return numbers | {"key_scales": self.keys.scales, "value_scales": self.values.scales}

    def add_owner(self, cache):
        self.owners = [owner for owner in self.owners if self.used_by(owner())] + [weakref.ref(cache)]

    def belongs_to(self, cache):
        """Whether `cache` may write."""
        return not self.frozen and not any(self.used_by(o := owner()) and o is not cache for owner in self.owners)

    def used_by(self, cache):
        return cache is not None and cache._now.memory is self


def convert(name, rows, into, group):
    """Fill the arrays of an operand with `rows`, rounded."""
    if len(into) == 1:
        with np.errstate(all="ignore"):
            into[0][...] = rows
    elif not _core.quantise(rows, *into, group):
        raise ValueError(f"{name} holds NaN or inf, or a number beyond float32: int8 has none")


def new_array(shape, dtype, new=np.empty):
    """An array that starts on a cache line, so that each vector lies in one line; arrays of NumPy do not.  Large arrays
    have huge pages, as those of NumPy do.

    new : np.empty or np.zeros
    """
    size = math.prod(shape) * dtype.itemsize
    memory = nodes.spread(new(size + LINE, np.uint8))
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def alike(*numbers):
    """(batches, ...): one slice for all batches if they have the same numbers, else one slice for each."""
    if all((array == array[0]).all() for array in numbers):
        yield slice(None), *(int(array[0]) for array in numbers)
        return
    for batch, those in enumerate(zip(*(array.tolist() for array in numbers))):
        yield slice(batch, batch + 1), *those


def without_padding(array, lengths):
    """A copy of `array` (B, G, M, D), with zeros from row lengths[b] on in batch b."""
    array = array.copy()
    for batch, length in enumerate(lengths.tolist()):
        array[batch, :, length:] = 0
    return array


def attributes(cache):
    """The attributes that a subclass has added."""
    yield from getattr(cache, "__dict__", {}).items()
    for kind in type(cache).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "_store" and not name.startswith("__") and hasattr(cache, name):
                yield name, getattr(cache, name)
