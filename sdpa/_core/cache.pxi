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
cdef class CacheState:
    """Which tokens a KVCache holds, and where; see Store.  Where all batches are alike, `length` and `floor` are their
    numbers, and lengths and floors None; else `length` is -1.  Rows below `writable` may be written at once."""
    cdef readonly object memory, aligned
    cdef readonly tuple arrays
    cdef readonly cnp.ndarray keys, values, lengths, floors
    cdef readonly int64_t length, floor, ring, extra, idle, writable

    def __init__(
        self, memory, cnp.ndarray lengths not None, cnp.ndarray floors not None, int64_t ring, int64_t extra,
        int64_t idle, int64_t writable, aligned,
    ):
        cdef const int64_t[::1] length = lengths, floor = floors
        cdef Py_ssize_t b
        cdef bint alike = True
        for b in range(1, length.shape[0]):
            alike = alike and length[b] == length[0] and floor[b] == floor[0]
        if alike:
            self.length, self.floor = length[0], floor[0]
        else:
            self.length, self.floor, self.lengths, self.floors = -1, -1, lengths, floors
        self.memory, self.arrays = memory, memory.arrays
        self.keys, self.values = self.arrays[0], self.arrays[1]
        self.ring, self.extra, self.idle, self.writable, self.aligned = ring, extra, idle, writable, aligned

    def shared(self):
        """The same, where others may have the memory, too."""
        cdef CacheState state = same_state(self)
        state.writable, state.aligned = 0, self.aligned
        return state


cdef CacheState same_state(CacheState old):
    """A copy, without `aligned`."""
    cdef CacheState new = CacheState.__new__(CacheState)
    new.memory, new.arrays, new.keys, new.values = old.memory, old.arrays, old.keys, old.values
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
        cdef int64_t count, slot
        if now is None or now.length < 0 or type(key) is not cnp.ndarray or type(value) is not cnp.ndarray:
            return False
        if cnp.PyArray_NDIM(key) != 4 or cnp.PyArray_NDIM(value) != 4:
            return False
        count, slot = cnp.PyArray_DIM(key, 2), now.length
        if not rows_fit(key, now.keys, count) or not rows_fit(value, now.values, count):
            return False
        if self.window is not None:
            if count != 1 or now.extra != 1:
                return False
            slot = slot_of(slot, self.keep, now.ring)
        if slot + count > now.writable or now.length + count > self.most:
            return False
        if len(now.arrays) == 4:
            if self.window is not None or not is_float_array(key) or not is_float_array(value):
                return False
            quantise_few("key", key, now.keys, now.arrays[2], slot, self.group)
            quantise_few("value", value, now.values, now.arrays[3], slot, self.group)
        else:
            key, value = stored_rows(key, now), stored_rows(value, now)
            if key is None or value is None:
                return False
        new = same_state(now)
        new.length = now.length + count
        if self.window is not None:
            new.floor = max(now.floor, new.length - now.ring)
        if len(now.arrays) == 2:
            move_rows(now.keys, key, 0, self.batch, slot, 0, count, False)
            move_rows(now.values, value, 0, self.batch, slot, 0, count, False)
        self._now = new
        return True

    def commit(
        self, CacheState state not None, list rows=None, CacheState begin=None, int64_t ring=0,
        const int64_t[::1] counts=None,
    ):
        """Go into `state`.  The rows, contiguous and of the dtypes of its arrays, become those of the tokens that
        follow those of the state `begin`, counts[b] of them (default: all) in a ring of that size."""
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
        for array in now.arrays:
            rows.append(np.empty((self.batch, self.kv_heads, count, array.shape[3]), array.dtype))
        self.move(now, rows, now, ring, None, True)
        return rows

    cdef int move(
        self, CacheState state, list rows, CacheState begin, int64_t ring, const int64_t[::1] counts, bint back
    ) except -1:
        cdef cnp.ndarray array, part
        cdef int64_t b, at, end, slot, run, room, first
        cdef Py_ssize_t i
        cdef const int64_t[::1] lengths = None if begin.length >= 0 else begin.lengths
        for i in range(len(rows)):
            array, part = <cnp.ndarray>state.arrays[i], <cnp.ndarray>rows[i]
            room = cnp.PyArray_DIM(array, 2)
            for b in range(self.batch):
                first = begin.length if begin.length >= 0 else lengths[b]
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


cdef stored_rows(cnp.ndarray rows, CacheState state):
    """In the dtype of the cache, the last axis without gaps: `rows` itself, if they are.  None if they hold no floats,
    or lie in the memory of the cache, where they might be overwritten before they are read."""
    cdef cnp.ndarray array = state.keys
    if not is_float_array(rows):
        return None
    if cnp.PyArray_TYPE(rows) != cnp.PyArray_TYPE(array):
        with np.errstate(all="ignore"):
            return rows.astype(array.dtype, order="C")
    if cnp.PyArray_STRIDE(rows, 3) != cnp.PyArray_ITEMSIZE(rows) or may_meet_in_memory(rows, state):
        return rows.copy()
    return rows


cdef bint may_meet_in_memory(cnp.ndarray rows, CacheState state) noexcept:
    return spans_meet(rows, state.keys) or spans_meet(rows, state.values)


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
    name, cnp.ndarray rows, cnp.ndarray whole, cnp.ndarray scales, int64_t slot, int64_t group
) except -1:
    """Into the rows from `slot` on, which nobody sees."""
    cdef sdpa_array source = array_of(rows), out = array_of(whole), scale = array_of(scales)
    cdef int64_t batches = cnp.PyArray_DIM(rows, 0), heads = cnp.PyArray_DIM(rows, 1)
    cdef int64_t count = cnp.PyArray_DIM(rows, 2), dim = cnp.PyArray_DIM(rows, 3)
    out.data += slot * out.row
    scale.data += slot * scale.row
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
