# The pages of a PagedKVCache, and who owns them.  Part of _core.pyx.
#
# What a method needs and may not get (memory, pages) it gets first; then it changes everything.  No Python code runs in
# between, so no signal handler and no trace function can raise there: what is raised finds the old state or the new.
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy
import numpy as np


@cython.final
cdef class Sequence:
    """`length` tokens, in the first pages of its table; those behind them were reserved, and are its own."""
    cdef readonly int64_t length
    cdef int64_t count
    cdef cnp.ndarray table

    def __init__(self, int64_t room):
        self.table = np.empty(room, np.int64)

    @property
    def pages(self):
        """Their numbers, in the order of its tokens."""
        return self.table[:self.count].copy()

    cdef int64_t *page(self, int64_t index) noexcept:
        return <int64_t *>cnp.PyArray_DATA(self.table) + index

    cdef int make_room(self, int64_t count) except -1:
        cdef cnp.ndarray longer
        if count > cnp.PyArray_DIM(self.table, 0):
            longer = np.empty(max(count, 2 * cnp.PyArray_DIM(self.table, 0)), np.int64)
            memcpy(cnp.PyArray_DATA(longer), self.page(0), self.count * sizeof(int64_t))
            self.table = longer
        return 0


@cython.final
cdef class Pool:
    """keys, values : (pages, G, page_size, ...).    sequences : by number; `issued` is the next one."""
    cdef readonly cnp.ndarray keys, values
    cdef readonly dict sequences
    cdef readonly int64_t issued, free_count
    cdef int64_t page_size
    cdef cnp.ndarray free_numbers, owner_counts

    def __init__(self, cnp.ndarray keys not None, cnp.ndarray values not None):
        cdef int64_t pages = cnp.PyArray_DIM(keys, 0)
        self.keys, self.values, self.page_size = keys, values, cnp.PyArray_DIM(keys, 2)
        self.free_numbers, self.owner_counts = np.arange(pages, dtype=np.int64)[::-1].copy(), np.zeros(pages, np.int64)
        self.sequences, self.free_count = {}, pages

    @property
    def free(self):
        """Pages without an owner; they are taken from the end."""
        return self.free_numbers[:self.free_count].tolist()

    @property
    def owners(self):
        """How many sequences have each page."""
        return self.owner_counts.tolist()

    def allocate(self, int64_t pages):
        """The number of a new sequence, which owns so many; they must be free."""
        cdef Sequence sequence = Sequence(pages)
        number = self.enter(sequence)
        while sequence.count < pages:
            self.take(sequence, sequence.count)
            sequence.count += 1
        return number

    def fork(self, Sequence old not None):
        cdef int64_t pages = self.pages_for(old.length), i
        cdef Sequence new = Sequence(pages)
        memcpy(new.page(0), old.page(0), pages * sizeof(int64_t))
        number = self.enter(new)
        for i in range(pages):
            self.owners_of(new, i)[0] += 1
        new.count, new.length = pages, old.length
        return number

    def remove(self, number):
        cdef Sequence sequence = self.sequences[number]
        del self.sequences[number]
        self.release(sequence, 0)

    def truncate(self, Sequence sequence not None, int64_t length):
        self.release(sequence, self.pages_for(length))
        sequence.length = length

    def append(
        self, list sequences not None, cnp.ndarray starts not None, cnp.ndarray key not None,
        cnp.ndarray value not None, bint heads_first,
    ):
        """Rows starts[i] to starts[i + 1] of key and value, (T, G, ...) or with heads first, of the dtype of the pool
        and without gaps in the last axis, for each sequence; or MemoryError."""
        cdef int64_t i, total = len(sequences), needed = 0, tokens = 0, missing, old, used
        cdef const int64_t *begins = <const int64_t *>cnp.PyArray_DATA(starts)
        cdef const int64_t *page
        cdef Sequence s
        cdef bytearray memory = bytearray(total + 1)
        cdef char *copies = memory  # whether its last page is shared, and is to be copied
        cdef dict left = {}
        for i in range(total):
            s = sequences[i]
            tokens += begins[i + 1] - begins[i]
            missing = self.pages_for(s.length + begins[i + 1] - begins[i]) - s.count
            if missing > 0:
                needed += missing
                s.make_room(s.count + missing)
            if begins[i + 1] > begins[i] and s.length % self.page_size:
                page = s.page(s.length // self.page_size)
                if self.owners_of(s, s.length // self.page_size)[0] > 1:
                    old = left.get(page[0], 0)  # of those that share it, the last one keeps it
                    if self.owners_of(s, s.length // self.page_size)[0] - old > 1:
                        left[page[0]] = old + 1
                        copies[i] = True
                        needed += 1
        if needed > self.free_count:
            raise self.exhausted(needed, tokens)
        # Nothing fails from here on.
        for i in range(total):
            s = <Sequence>sequences[i]
            if copies[i]:
                used = s.length % self.page_size
                old = s.page(s.length // self.page_size)[0]
                self.owners_of(s, s.length // self.page_size)[0] -= 1
                self.take(s, s.length // self.page_size)
                copy_page(self.keys, old, s.page(s.length // self.page_size)[0], used)
                copy_page(self.values, old, s.page(s.length // self.page_size)[0], used)
        for i in range(total):
            s = <Sequence>sequences[i]
            while s.count < self.pages_for(s.length + begins[i + 1] - begins[i]):
                self.take(s, s.count)
                s.count += 1
        for i in range(total):
            s = <Sequence>sequences[i]
            write_pages(self.keys, s, key, heads_first, begins[i], begins[i + 1])
            write_pages(self.values, s, value, heads_first, begins[i], begins[i + 1])
            s.length += begins[i + 1] - begins[i]

    def exhausted(self, needed, tokens):
        return MemoryError(
            f"{tokens} tokens need {needed} more pages of {self.page_size}, and {self.free_count} of "
            f"{len(self.owner_counts)} are free: free or truncate sequences"
        )

    def snapshot(self, list sequences not None):
        """What `restore` needs to take back an append to these: of each its length, how many pages it has, and the one
        that is not full, if any."""
        cdef int64_t[:, ::1] marks = np.empty((len(sequences), 3), np.int64)
        cdef Sequence s
        cdef Py_ssize_t i
        for i in range(marks.shape[0]):
            s = sequences[i]
            marks[i, 0], marks[i, 1] = s.length, s.count
            marks[i, 2] = s.page(s.length // self.page_size)[0] if s.length % self.page_size else -1
        return marks.base

    def restore(self, list sequences not None, const int64_t[:, ::1] marks):
        """Backwards, so that pages become free in the order in which they were taken."""
        cdef Sequence s
        cdef int64_t *page
        cdef Py_ssize_t i
        for i in range(marks.shape[0] - 1, -1, -1):
            self.release(<Sequence>sequences[i], marks[i, 1])
        for i in range(marks.shape[0] - 1, -1, -1):
            s = <Sequence>sequences[i]
            s.length = marks[i, 0]
            page = s.page(s.length // self.page_size)
            if marks[i, 2] >= 0 and page[0] != marks[i, 2]:  # it was shared, and copied
                self.give_back(page[0])
                page[0] = marks[i, 2]
                self.owners_of(s, s.length // self.page_size)[0] += 1

    cdef enter(self, Sequence sequence):
        """The last that may fail."""
        number = self.issued
        self.sequences[number] = sequence
        self.issued += 1
        return number

    cdef int64_t pages_for(self, int64_t tokens) noexcept:
        return (tokens + self.page_size - 1) // self.page_size

    cdef int64_t *owners_of(self, Sequence sequence, int64_t index) noexcept:
        return <int64_t *>cnp.PyArray_DATA(self.owner_counts) + sequence.page(index)[0]

    cdef void take(self, Sequence sequence, int64_t index) noexcept:
        self.free_count -= 1
        sequence.page(index)[0] = (<int64_t *>cnp.PyArray_DATA(self.free_numbers))[self.free_count]
        self.owners_of(sequence, index)[0] = 1

    cdef void give_back(self, int64_t page) noexcept:
        cdef int64_t *owners = <int64_t *>cnp.PyArray_DATA(self.owner_counts) + page
        owners[0] -= 1
        if owners[0] == 0:
            (<int64_t *>cnp.PyArray_DATA(self.free_numbers))[self.free_count] = page
            self.free_count += 1

    cdef void release(self, Sequence sequence, int64_t kept) noexcept:
        """All its pages but the first ones."""
        while sequence.count > kept:
            sequence.count -= 1
            self.give_back(sequence.page(sequence.count)[0])


cdef void copy_page(cnp.ndarray pool, int64_t old, int64_t new, int64_t tokens) noexcept:
    cdef ptrdiff_t page = cnp.PyArray_STRIDE(pool, 0), head = cnp.PyArray_STRIDE(pool, 1)
    cdef char *data = cnp.PyArray_BYTES(pool)
    cdef int64_t h
    for h in range(cnp.PyArray_DIM(pool, 1)):
        memcpy(data + new * page + h * head, data + old * page + h * head, tokens * cnp.PyArray_STRIDE(pool, 2))


def fits_pages(rows, cnp.ndarray pool not None, bint heads_first):
    """Whether `rows` are as Pool.append takes them for `pool`."""
    cdef int heads = 0 if heads_first else 1
    return (
        type(rows) is cnp.ndarray and cnp.PyArray_TYPE(rows) == cnp.PyArray_TYPE(pool)
        and cnp.PyArray_ISNOTSWAPPED(rows) and cnp.PyArray_NDIM(rows) == 3
        and cnp.PyArray_DIM(rows, heads) == cnp.PyArray_DIM(pool, 1)
        and cnp.PyArray_DIM(rows, 2) == cnp.PyArray_DIM(pool, 3)
        and cnp.PyArray_STRIDE(rows, 2) == cnp.PyArray_ITEMSIZE(rows)
    )


cdef void write_pages(
    cnp.ndarray pool, Sequence sequence, cnp.ndarray rows, bint heads_first, int64_t begin, int64_t end
) noexcept:
    """Rows from `begin` to `end` behind the tokens of the sequence; the pages are there."""
    cdef int64_t page_size = cnp.PyArray_DIM(pool, 2), heads = cnp.PyArray_DIM(pool, 1)
    cdef int64_t at = sequence.length, slot, run, head, row
    cdef ptrdiff_t step = cnp.PyArray_STRIDE(rows, 1 if heads_first else 0), size = cnp.PyArray_STRIDE(pool, 2)
    cdef ptrdiff_t head_step = cnp.PyArray_STRIDE(rows, 0 if heads_first else 1)
    cdef char *here
    cdef char *there
    while begin < end:
        slot = at % page_size
        run = min(end - begin, page_size - slot)
        for head in range(heads):
            here = cnp.PyArray_BYTES(pool) + sequence.page(at // page_size)[0] * cnp.PyArray_STRIDE(pool, 0)
            here += head * cnp.PyArray_STRIDE(pool, 1) + slot * size
            there = cnp.PyArray_BYTES(rows) + begin * step + head * head_step
            if step == size:
                memcpy(here, there, run * size)
            else:
                for row in range(run):
                    memcpy(here + row * size, there + row * step, size)
        at, begin = at + run, begin + run
