# What appends change in a KVCache.  Part of _core.pyx.
#
# A cache is in one state, which is replaced and never changed.  An append first puts its rows where this state shows
# none, or into new memory; that may take long, fail or be interrupted.  Then `commit` makes them seen.  No Python code
# runs in there, so no signal handler and no trace function can raise in between: whoever catches what is raised finds
# the old state or the new one.  Rows that take the place of others (within a window) are copied by `commit` itself.
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy
import numpy as np


@cython.final
cdef class Operand:
    """The keys or the values of a cache: numbers (B, G, rows, size), and, where these are int8, scales
    (B, G, rows, groups), one for each `group` neighbours in a row; else None."""
    cdef readonly cnp.ndarray numbers, scales
    cdef readonly int64_t group
    cdef readonly tuple arrays  # what there is of both

    def __init__(self, cnp.ndarray numbers not None, cnp.ndarray scales, int64_t group):
        self.numbers, self.scales, self.group = numbers, scales, group
        self.arrays = (numbers,) if scales is None else (numbers, scales)


@cython.final
cdef class CacheState:
    """Which tokens a KVCache holds, and where; see Store.  Where all batches are alike, `length` and `floor` are their
    numbers, and lengths and floors None; else `length` is -1.  Rows below `writable` may be written at once."""
    cdef readonly object memory, aligned
    cdef readonly Operand keys, values
    cdef readonly cnp.ndarray lengths, floors
    cdef readonly int64_t length, floor, ring, extra, idle, writable

    def __init__(
        self, memory, cnp.ndarray lengths not None, cnp.ndarray floors not None, int64_t ring, int64_t extra,
        int64_t idle, int64_t writable, aligned,
    ):
        self.memory, self.keys, self.values = memory, memory.keys, memory.values
        self.ring, self.extra, self.idle, self.writable, self.aligned = ring, extra, idle, writable, aligned
        self.count(lengths, floors)

    cdef int count(self, cnp.ndarray lengths, cnp.ndarray floors) except -1:
        cdef const int64_t[::1] length = lengths, floor = floors
        cdef Py_ssize_t b
        cdef bint alike = True
        for b in range(1, length.shape[0]):
            alike = alike and length[b] == length[0] and floor[b] == floor[0]
        if alike:
            self.length, self.floor, self.lengths, self.floors = length[0], floor[0], None, None
        else:
            self.length, self.floor, self.lengths, self.floors = -1, -1, lengths, floors
        return 0

    cdef int64_t length_of(self, int64_t b) noexcept:
        return self.length if self.length >= 0 else (<const int64_t *>cnp.PyArray_DATA(self.lengths))[b]

    cdef int64_t floor_of(self, int64_t b) noexcept:
        return self.floor if self.length >= 0 else (<const int64_t *>cnp.PyArray_DATA(self.floors))[b]

    def shared(self):
        """The same, where others may have the memory, too."""
        cdef CacheState state = same_state(self)
        state.writable, state.aligned = 0, self.aligned
        return state


cdef CacheState same_state(CacheState old):
    """A copy, without `aligned`."""
    cdef CacheState new = CacheState.__new__(CacheState)
    new.memory, new.keys, new.values = old.memory, old.keys, old.values
    new.lengths, new.floors, new.length, new.floor = old.lengths, old.floors, old.length, old.floor
    new.ring, new.extra, new.idle, new.writable = old.ring, old.extra, old.idle, old.writable
    return new


cdef class CacheBase:
    """What a KVCache was made with, and the state it is in."""
    cdef object __weakref__
    cdef readonly CacheState _now
    cdef readonly int64_t batch, kv_heads, head_dim, value_dim, keep, group
    cdef readonly object dtype, capacity, window
    cdef int64_t most

    def __init__(
        self, int64_t batch, int64_t kv_heads, int64_t head_dim, int64_t value_dim, dtype, capacity, window,
        int64_t keep, int64_t group,
    ):
        self.batch, self.kv_heads, self.head_dim, self.value_dim = batch, kv_heads, head_dim, value_dim
        self.dtype, self.capacity, self.window, self.keep, self.group = dtype, capacity, window, keep, group
        self.most = <int64_t>1 << 62 if capacity is None else capacity

    def begin_as(self, CacheBase other not None):
        """Have its sizes and its state."""
        self.batch, self.kv_heads, self.head_dim = other.batch, other.kv_heads, other.head_dim
        self.value_dim, self.keep, self.group, self.most = other.value_dim, other.keep, other.group, other.most
        self.dtype, self.capacity, self.window, self._now = other.dtype, other.capacity, other.window, other._now

    def append_few(self, key, value):
        """What `append` does where there is room and the shapes are those stored, in less time than the general case
        takes.  False, and nothing is done, if it is not so."""
        cdef CacheState now = self._now, new
        cdef int64_t count, b
        if now is None or type(key) is not cnp.ndarray or type(value) is not cnp.ndarray:
            return False
        if cnp.PyArray_NDIM(key) != 4 or cnp.PyArray_NDIM(value) != 4:
            return False
        count = cnp.PyArray_DIM(key, 2)
        if not rows_fit(key, now.keys.numbers, count) or not rows_fit(value, now.values.numbers, count):
            return False
        if self.window is not None and (count != 1 or now.extra != 1):
            return False
        for b in range(self.batch):
            if now.length_of(b) + count > self.most or self.next_slot(now, b) + count > now.writable:
                return False
        keys, values = stored_rows("key", key, now.keys, now), stored_rows("value", value, now.values, now)
        if keys is None or values is None:
            return False
        new = self.after(now, count)
        self.put(now, now.keys, keys, count)
        self.put(now, now.values, values, count)
        self._now = new
        return True

    cdef int64_t next_slot(self, CacheState now, int64_t b) noexcept:
        return now.length_of(b) if self.window is None else slot_of(now.length_of(b), self.keep, now.ring)

    cdef CacheState after(self, CacheState now, int64_t count):
        """The state with so many tokens more."""
        cdef CacheState new = same_state(now)
        cdef cnp.ndarray lengths, floors
        cdef int64_t b
        if now.length >= 0:
            new.length += count
            if self.window is not None:
                new.floor = max(now.floor, new.length - now.ring)
            return new
        lengths, floors = cnp.PyArray_Copy(now.lengths), cnp.PyArray_Copy(now.floors)
        for b in range(self.batch):
            (<int64_t *>cnp.PyArray_DATA(lengths))[b] = now.length_of(b) + count
            if self.window is not None:
                (<int64_t *>cnp.PyArray_DATA(floors))[b] = max(now.floor_of(b), now.length_of(b) + count - now.ring)
        new.count(lengths, floors)
        return new

    cdef int put(self, CacheState now, Operand operand, tuple rows, int64_t count) except -1:
        """Rows as they are stored, behind those that there are."""
        cdef Py_ssize_t i
        cdef int64_t b
        for i in range(len(rows)):
            if now.length >= 0:
                move_rows(operand.arrays[i], rows[i], 0, self.batch, self.next_slot(now, 0), 0, count, False)
            else:
                for b in range(self.batch):
                    move_rows(operand.arrays[i], rows[i], b, b + 1, self.next_slot(now, b), 0, count, False)
        return 0

    def seen_by_one(self):
        """With a window: how many slots there are, and the lengths of the batches in them (None: all of them), if one
        query behind the last token sees all that they hold; else None."""
        cdef CacheState now = self._now
        cdef int64_t b, length, floor, window, bound, rows = 0
        cdef cnp.ndarray lengths = None
        if now is None or self.window is None:
            return None
        window, bound = self.window, self.keep + now.ring
        for b in range(self.batch):
            length, floor = now.length_of(b), now.floor_of(b)
            if length > self.keep + window or floor > self.keep:  # some were overwritten, by just as many?
                if now.ring != window or length - floor != window:
                    return None
            rows = max(rows, min(length, bound))
        if now.length < 0:
            lengths = cnp.PyArray_Copy(now.lengths)
            for b in range(self.batch):
                (<int64_t *>cnp.PyArray_DATA(lengths))[b] = min(now.length_of(b), bound)
        return rows, lengths

    def commit(
        self, CacheState state not None, list rows=None, CacheState begin=None, int64_t ring=0,
        const int64_t[::1] counts=None,
    ):
        """Go into `state`.  The rows, contiguous and of the dtypes of its arrays, those of the keys first, become those
        of the tokens that follow those of the state `begin`, counts[b] of them (default: all) in a ring of that
        size."""
        if rows is not None:
            self.move(state, rows, begin, ring, counts, False)
        self._now = state

    def rows_behind(self, int64_t count, int64_t ring):
        """Copies of the rows that an append of so many tokens would write in a ring of that size; undefined where the
        memory has none."""
        cdef CacheState now = self._now
        cdef list rows = []
        if now is None:
            raise AttributeError("the cache was not initialised")
        for array in now.keys.arrays + now.values.arrays:
            rows.append(np.empty((self.batch, self.kv_heads, count, array.shape[3]), array.dtype))
        self.move(now, rows, now, ring, None, True)
        return rows

    cdef int move(
        self, CacheState state, list rows, CacheState begin, int64_t ring, const int64_t[::1] counts, bint back
    ) except -1:
        cdef cnp.ndarray array, part
        cdef int64_t b, at, end, slot, run, room, first
        cdef Py_ssize_t i
        cdef tuple arrays = state.keys.arrays + state.values.arrays
        for i in range(len(rows)):
            array, part = <cnp.ndarray>arrays[i], <cnp.ndarray>rows[i]
            room = cnp.PyArray_DIM(array, 2)
            for b in range(self.batch):
                first = begin.length_of(b)
                at, end = first, first + (cnp.PyArray_DIM(part, 2) if counts is None else counts[b])
                while at < end:
                    slot = slot_of(at, self.keep, ring)
                    run = min(end - at, self.keep + ring - slot)
                    if slot < room:
                        move_rows(array, part, b, b + 1, slot, at - first, min(run, room - slot), back)
                    at += run
        return 0


cdef int64_t slot_of(int64_t at, int64_t keep, int64_t ring) noexcept nogil:
    return at if at < keep + ring else keep + (at - keep) % ring


cdef bint rows_fit(cnp.ndarray rows, cnp.ndarray array, int64_t count) noexcept:
    return (
        cnp.PyArray_DIM(rows, 0) == cnp.PyArray_DIM(array, 0) and cnp.PyArray_DIM(rows, 1) == cnp.PyArray_DIM(array, 1)
        and cnp.PyArray_DIM(rows, 2) == count and cnp.PyArray_DIM(rows, 3) == cnp.PyArray_DIM(array, 3)
    )


cdef bint is_float_array(cnp.ndarray rows) noexcept:
    cdef int type_num = cnp.PyArray_TYPE(rows)
    return cnp.PyArray_ISNOTSWAPPED(rows) and (
        type_num == cnp.NPY_FLOAT or type_num == cnp.NPY_DOUBLE or is_half(type_num)
    )


cdef tuple stored_rows(str name, cnp.ndarray rows, Operand operand, CacheState state):
    """As the operand holds them, the last axis without gaps: `rows` itself, if they are.  None if they hold no floats,
    or are too many numbers to be copied on the way to int8.  Nothing of it lies in the memory of the cache, where it
    might be overwritten before it is read."""
    cdef cnp.ndarray array = operand.numbers, numbers, scales
    if not is_float_array(rows):
        return None
    if operand.scales is not None:
        if cnp.PyArray_SIZE(rows) > MOST_TO_INT8:
            return None
        numbers, scales = like_rows(array, rows), like_rows(operand.scales, rows)
        quantise_few(name, rows, numbers, scales, operand.group)
        return numbers, scales
    if cnp.PyArray_TYPE(rows) != cnp.PyArray_TYPE(array):
        with np.errstate(all="ignore"):
            return (rows.astype(array.dtype, order="C"),)
    if cnp.PyArray_STRIDE(rows, 3) != cnp.PyArray_ITEMSIZE(rows) or may_meet_in_memory(rows, state):
        return (rows.copy(),)
    return (rows,)


cdef int64_t MOST_TO_INT8 = 1 << 16  # takes 0.1 ms: more go the way that signals can stop


cdef cnp.ndarray like_rows(cnp.ndarray array, cnp.ndarray rows):
    """A new array as long as `rows`, of the dtype and the last axis of `array`."""
    cdef cnp.npy_intp shape[4]
    memcpy(shape, cnp.PyArray_DIMS(rows), sizeof(shape))
    shape[3] = cnp.PyArray_DIM(array, 3)
    return cnp.PyArray_EMPTY(4, shape, cnp.PyArray_TYPE(array), 0)


cdef bint may_meet_in_memory(cnp.ndarray rows, CacheState state) noexcept:
    return spans_meet(rows, state.keys.numbers) or spans_meet(rows, state.values.numbers)


cdef bint spans_meet(cnp.ndarray rows, cnp.ndarray array) noexcept:
    """Whether what lies between the first and the last byte of one does so in the other, which has no gaps."""
    cdef char *low = cnp.PyArray_BYTES(rows)
    cdef char *high = low + cnp.PyArray_ITEMSIZE(rows)
    cdef char *begin = cnp.PyArray_BYTES(array)
    cdef int axis
    cdef ptrdiff_t extent
    for axis in range(4):
        extent = (cnp.PyArray_DIM(rows, axis) - 1) * cnp.PyArray_STRIDE(rows, axis)
        if extent > 0:
            high += extent
        else:
            low += extent
    return low < begin + cnp.PyArray_NBYTES(array) and begin < high


cdef int quantise_few(
    str name, cnp.ndarray rows, cnp.ndarray numbers, cnp.ndarray scales, int64_t group
) except -1:
    cdef sdpa_array source = array_of(rows), out = array_of(numbers), scale = array_of(scales)
    cdef int64_t batches = cnp.PyArray_DIM(rows, 0), heads = cnp.PyArray_DIM(rows, 1)
    cdef int64_t count = cnp.PyArray_DIM(rows, 2), dim = cnp.PyArray_DIM(rows, 3)
    if not sdpa_quantise_rows(&source, batches, heads, count, dim, group, &out, &scale):
        raise ValueError(f"{name} holds NaN or inf, or a number beyond float32: int8 has none")
    return 0


cdef void move_rows(
    cnp.ndarray array, cnp.ndarray rows, int64_t batch, int64_t batches, int64_t slot, int64_t first, int64_t count,
    bint back,
) noexcept:
    """`count` rows (B, G, M, D) of these batches, from number `first` on, into the slots from `slot` on; or `back`."""
    cdef sdpa_array to = array_of(array), source = array_of(rows)
    cdef int64_t heads = cnp.PyArray_DIM(array, 1), b, head, row
    cdef size_t size = cnp.PyArray_DIM(array, 3) * to.itemsize
    cdef char *here
    cdef char *there
    if back:
        to, source, slot, first = source, to, first, slot
    for b in range(batch, batches):
        for head in range(heads):
            here = to.data + b * to.batch + head * to.head + slot * to.row
            there = source.data + b * source.batch + head * source.head + first * source.row
            if to.row == source.row == <ptrdiff_t>size:
                memcpy(here, there, count * size)
            else:
                for row in range(count):
                    memcpy(here + row * to.row, there + row * source.row, size)
