"""The memory of a KVCache: where each token lies, and who may write there."""

import math
import operator
import weakref

import numpy as np

from . import _core
from ._problem import is_float

UNBOUNDED = 2**62
FIRST_ROOM = 64  # tokens that a new cache has room for
LINE = 64  # bytes of a cache line
# All that an append changes, but for rows of the arrays.
STATE = (
    "_aligned", "_extra", "_floor", "_floors", "_idle", "_keys", "_length", "_lengths", "_memory", "_ring", "_values",
    "_writable",
)  # fmt: skip
get_state = operator.attrgetter(*STATE)
CHUNK = 16  # the ring grows by multiples of it, so that chunks of like sizes do not each move it


class Store:
    """Keys and values by position: what KVCache consists of, without its checks and without attention."""

    # Slots: the token at position p lies in row p of the arrays as long as that is below keep + _ring, and then in row
    # keep + (p - keep) % _ring.  Without a window the ring is endless, so that the row always is the position.
    #
    # Of batch b the positions p < _lengths[b] are there that are below keep, or not below _floors[b]: others were
    # overwritten.  Where all batches are alike, _length and _floor are their numbers, else _length is -1.
    __slots__ = (
        "__weakref__", "_aligned", "_extra", "_floor", "_floors", "_idle", "_keys", "_length", "_lengths", "_memory",
        "_ring", "_values", "_writable", "batch", "capacity", "dtype", "group", "head_dim", "keep", "kv_heads",
        "value_dim", "window",
    )  # fmt: skip

    def append_few(self, key, value):
        """What `append` does, where there is room and all shapes are as they are stored: in less time than the general
        case takes.  False, and nothing is done, if it is not so."""
        start, shape = self._length, key.shape
        if start < 0 or len(shape) != 4 or key.dtype != value.dtype:
            return False
        batch, heads, count, dim = shape
        if (
            batch != self.batch or heads != self.kv_heads or dim != self.head_dim
            or value.shape != (batch, heads, count, self.value_dim)
        ):  # fmt: skip
            return False
        slot = start
        if self.window is not None:
            if not count == self._extra == 1:
                return False
            slot, _ = self._slot(start, self._ring, start + 1)
        end = slot + count
        if end > self._writable:
            return False
        if key.dtype == self.dtype:
            self._keys[:, :, slot:end] = key
            self._values[:, :, slot:end] = value
        elif is_float(key.dtype):
            into = [array[:, :, slot:end] for array in self._memory.arrays]
            if len(into) == 4:
                self._quantise(key, value, into)
            else:
                with np.errstate(all="ignore"):
                    into[0][...], into[1][...] = key, value
        else:
            return False
        self._length = start + count
        if self.window is not None:
            self._floor = max(self._floor, self._length - self._ring)
        self._aligned = None
        return True

    def write(self, key, value, before, floors, added):
        """Put rows of `key` and `value`, added[b] of them, after the before[b] that there are."""
        after = before + added
        rows = [key, value]
        if self.window is not None:  # a new row takes the place of an old one
            rows = [row.copy() if np.may_share_memory(row, old) else row for row, old in zip(rows, self._memory.arrays)]
        # NaN is found while quantising: before anything changes, or where it is written past the end.
        in_place = self.window is None and after.max() <= self._memory.rows and self._memory.belongs_to(self)
        if self.dtype == np.int8 and not in_place:
            rows = self._new_arrays(key.shape[2])
            self._quantise(key, value, rows)
        floors = self._make_room(before, floors, after, int(added.max()))
        for batches, begin, end in alike(before, after):
            at = begin
            while at < end:
                slot, run = self._slot(at, self._ring, end)
                there, new = (batches, slice(None), slice(slot, slot + run)), slice(at - begin, at - begin + run)
                into = [array[there] for array in self._memory.arrays]
                if len(rows) < len(into):
                    self._quantise(key[batches, :, new], value[batches, :, new], into)
                else:
                    with np.errstate(all="ignore"):
                        for target, source in zip(into, rows):
                            target[...] = source[batches, :, new]
                at += run
        if self.window is not None:
            floors = np.maximum(floors, after - self._ring)
        self.set_lengths(after, floors)
        self.set_memory(self._memory)  # which no one shares now

    def snapshot(self, count):
        """What `restore` needs to take back an append of `count` tokens: with a window also the rows of which those
        take the place."""
        state, extra, idle = get_state(self), self._extra, self._idle
        if self.window is None:
            return state, None, ()
        ring, start = self._wanted_ring(count), self._length
        self._extra, self._idle = extra, idle
        slot, run = self._slot(start, ring, start + count)
        if start >= 0 and run == count:
            slots = slice(slot, slot + count)
            lost = slot < start
        else:
            lengths = self.state()[0]
            slots = self._slots_of(lengths[:, None] + np.arange(count), ring)
            slots = slots[slots < min(lengths.max(), self._memory.rows)]
            lost = slots.size
        return state, slots, [array[:, :, slots].copy() for array in self._memory.arrays] if lost else ()

    def restore(self, snapshot):
        state, slots, rows = snapshot
        memory = self._memory
        for name, value in zip(STATE, state):
            setattr(self, name, value)
        if memory is self._memory:  # otherwise what was there has been copied, not written
            for array, old in zip(memory.arrays, rows):
                array[:, :, slots] = old

    def _quantise(self, key, value, into):
        for name, source, out, scales in zip(("key", "value"), (key, value), into[:2], into[2:]):
            if not _core.quantise(source, out, scales, self.group):
                raise ValueError(f"{name} holds NaN or inf, or a number beyond float32: int8 has none")

    def _make_room(self, before, floors, after, count):
        """Memory of this cache alone, for `after` tokens of which `count` are new, if need be by moving what is there.
        Returns the floors."""
        ring = self._ring if self.window is None else self._wanted_ring(count)
        rows = int(after.max())
        limit = self.bound(ring) if self.capacity is None else min(self.bound(ring), self.capacity)
        stays = ring == self._ring or (  # each token has the same row in both rings
            (floors <= self.keep).all() and (before <= self.bound(ring)).all() and self._memory.rows <= limit
        )
        if stays and min(rows, limit) <= self._memory.rows and self._memory.belongs_to(self):
            self._ring = ring
            return floors
        room = self._memory.rows if stays else 0
        if rows > room:
            room = min(max(rows, 2 * room, FIRST_ROOM), limit)
        arrays = self._new_arrays(room)
        if ring != UNBOUNDED:
            floors = np.maximum(floors, before - ring)
        for batches, kept, begin, end in alike(np.minimum(before, self.keep), np.maximum(floors, self.keep), before):
            for at, stop in ((0, kept), (begin, end)):
                while at < stop:
                    source, run = self._slot(at, self._ring, stop)
                    target, run = self._slot(at, ring, at + run)
                    for old, new in zip(self._memory.arrays, arrays):
                        new[batches, :, target : target + run] = old[batches, :, source : source + run]
                    at += run
        self._ring = ring
        self.set_memory(Memory(arrays, self))
        return floors

    def _wanted_ring(self, count):
        """A ring for the queries of `count` tokens: the first of them sees window - 1 tokens before.  It gets smaller
        again at once where that frees more than half of the memory, else only after so many tokens that moving what it
        holds costs little for each of them."""
        extra = count if count <= 1 else -(-count // CHUNK) * CHUNK
        if extra >= self._extra:
            self._extra, self._idle = max(extra, 1), 0
        else:
            self._idle += count
            if self._extra > self.window or self._idle > self.window:
                self._extra, self._idle = max(extra, 1), 0
        return self.window - 1 + self._extra

    def _slot(self, at, ring, end):
        """Where the token at position `at` lies, and how many up to `end` lie there in a row."""
        bound = self.bound(ring)
        slot = at if at < bound else self.keep + (at - self.keep) % ring
        return slot, min(end - at, bound - slot)

    def bound(self, ring=None):
        """The first row that is never used."""
        return self.keep + (self._ring if ring is None else ring)

    def _new_arrays(self, rows):
        lead = (self.batch, self.kv_heads, rows)
        arrays = [new_array((*lead, dim), self.dtype) for dim in (self.head_dim, self.value_dim)]
        if self.dtype == np.int8:
            groups = [-(-dim // self.group) for dim in (self.head_dim, self.value_dim)]
            arrays += [new_array((*lead, number), np.dtype(np.float32)) for number in groups]
        return arrays

    def set_memory(self, memory):
        self._memory = memory
        self._keys, self._values = memory.arrays[:2]
        # Within a window a row takes the place of another, which must survive an error.
        careful = self.window is not None and (self.dtype == np.int8 or self.capacity is not None)
        self._writable = 0 if careful or memory.frozen else memory.rows

    def state(self):
        """Lengths and floors of the batches: arrays that are replaced, never changed."""
        if self._length >= 0:
            return np.full(self.batch, self._length), np.full(self.batch, self._floor)
        return self._lengths, self._floors

    def set_lengths(self, lengths, floors):
        self._lengths, self._floors = lengths, floors
        self._length, self._floor = int(lengths[0]), int(floors[0])
        if self.batch > 1 and not ((lengths == self._length).all() and (floors == self._floor).all()):
            self._length = self._floor = -1

    def seen_whole(self, count):
        """With a window: how many slots there are, if `count` queries see all that they hold; else 0."""
        length, ring, window = self._length, self._ring, self.window
        if count != 1 or length < 0:
            return 0
        if ring == window and length - self._floor == ring:
            return self.keep + ring if length > self.keep + ring else length
        return length if length <= self.keep + window and self._floor <= self.keep else 0

    def readable(self, array):
        """The rows of `array` that are seen from the end, in the order of their positions; read-only."""
        if self.window is None or (self._length >= 0 and max(self._floor, self._length - self.window) <= self.keep):
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

    def _slots_of(self, positions, ring=None):
        ring = self._ring if ring is None else ring
        return np.where(positions < self.bound(ring), positions, self.keep + (positions - self.keep) % ring)

    def positions(self, rows):
        """Position of the token in each of the first `rows` slots, (B, rows) or (1, rows); -1 where there is none."""
        lengths, floors = self.state()
        if self._length >= 0:
            lengths, floors = lengths[:1], floors[:1]
        lengths, floors, slot = lengths[:, None], floors[:, None], np.arange(rows)
        last = lengths - 1 - (lengths - 1 - slot) % self._ring  # the last one that this slot was for
        position = np.where((slot < self.keep) | (lengths <= self.bound()), slot, last)
        there = (position < lengths) & ((position >= floors) | (slot < self.keep))
        return np.where(there & ((slot < self.keep) | (position >= self.keep)), position, -1)


class Memory:
    """Arrays (B, G, rows, ...), and the caches that use them.  `frozen`: not to be written."""

    __slots__ = ("arrays", "frozen", "owners", "rows")

    def __init__(self, arrays, owner, frozen=False):
        self.arrays, self.frozen, self.rows = arrays, frozen, arrays[0].shape[2]
        self.owners = [weakref.ref(owner)]

    def add_owner(self, cache):
        self.owners = [owner for owner in self.owners if self.used_by(owner())] + [weakref.ref(cache)]

    def belongs_to(self, cache):
        """Whether `cache` may write."""
        return not self.frozen and not any(self.used_by(o := owner()) and o is not cache for owner in self.owners)

    def used_by(self, cache):
        return cache is not None and cache._memory is self


def new_array(shape, dtype):
    """An uninitialised array that starts on a cache line, as those of NumPy do not: vectors then lie in one line each.
    Like those, large ones have huge pages."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def alike(*numbers):
    """(batches, ...): one slice for all where all batches have the same numbers, else one for each."""
    if all((array == array[0]).all() for array in numbers):
        yield slice(None), *(int(array[0]) for array in numbers)
        return
    for batch, those in enumerate(zip(*(array.tolist() for array in numbers))):
        yield slice(batch, batch + 1), *those


def without_padding(array, lengths):
    """A copy of (B, G, M, D) with zeros from lengths[b] on."""
    array = array.copy()
    for batch, length in enumerate(lengths.tolist()):
        array[batch, :, length:] = 0
    return array


def whole_number(name, given, least=1):
    """`given` as an int, checked."""
    try:
        if isinstance(given, (bool, np.bool_)):
            raise TypeError
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} is {given!r}: it must be a whole number") from None
    if not least <= number < 2**40:
        raise ValueError(f"{name} is {given}: it must be {least} or more, and below 2**40")
    return number
