"""Which positions each rank holds, which of them see each other, and how keys travel.  Plain arithmetic, without MPI.

All ranks compute the same from the same lengths, so nobody asks anybody what will arrive.
"""

import itertools
from typing import NamedTuple

import numpy as np

from .._checks import whole_number

LAYOUTS = ("contiguous", "zigzag")
FAR = 2**61  # two such numbers can be added in 64 bits, and no position is farther away


class Chunk(NamedTuple):
    """Rows that follow one another, both in the whole sequence and in the arrays of the rank that holds them."""

    rank: int
    first: int  # position of the first row
    count: int  # type: ignore[assignment]  # of rows; no chunk is asked for the count of a tuple
    at: int  # index of the first row in the arrays of its rank

    def part(self, begin, end):
        """Its rows from `begin` up to, not including, `end`."""
        return self._replace(first=self.first + begin, count=end - begin, at=self.at + begin)


def check_layout(layout):
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: it must be {' or '.join(map(repr, LAYOUTS))}")
    return layout


def counts_of(length, size, layout):
    """How many rows each rank holds: chunks differ by no more than one row, and the first ones are the longer ones."""
    number = size if layout == "contiguous" else 2 * size
    least, more = divmod(length, number)
    chunks = [least + (i < more) for i in range(number)]
    return chunks if layout == "contiguous" else [chunks[i] + chunks[-1 - i] for i in range(size)]


def cut(counts, layout):
    """The chunks in the order of positions, where rank r holds counts[r] rows.

    contiguous: chunk r is what rank r holds.  zigzag: of the 2 P chunks, rank r holds chunk r, the first half of its
    rows (rounded up), and chunk 2 P - 1 - r, the rest: early rows, which see little, with late rows, which see much.
    """
    if layout == "contiguous":
        held = [(rank, count, 0) for rank, count in enumerate(counts)]
    else:
        early = [(rank, (count + 1) // 2, 0) for rank, count in enumerate(counts)]
        held = early + [(rank, counts[rank] - count, count) for rank, count, _ in reversed(early)]
    firsts = itertools.accumulate((count for _, count, _ in held), initial=0)
    return [Chunk(rank, first, count, at) for (rank, count, at), first in zip(held, firsts)]


def rows(length, rank, size, layout="contiguous"):
    """The positions of a sequence of `length` rows that a rank of `size` holds, in the order of its arrays.

    Parameters
    ----------
    length
        Rows of the whole sequence.
    rank, size
        The rank, and the number of ranks of the communicator.
    layout
        "contiguous": one range for each rank. "zigzag": of 2 P chunks, rank r holds chunks r and 2 P - 1 - r, so that
        all ranks have the same work where a row sees only those before it.

    Notes
    -----
    Lengths that cannot be shared evenly are fine: chunks differ by one row at most, and may be empty.

    Examples
    --------
    >>> import sdpa.distributed
    >>> [sdpa.distributed.rows(8, rank, 2, layout="zigzag").tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    length, size = whole_number("length", length, 0), whole_number("size", size)
    if whole_number("rank", rank, 0) >= size:
        raise ValueError(f"rank is {rank}: it must be from 0 to {size - 1}, as size is {size}")
    chunks = cut(counts_of(length, size, check_layout(layout)), layout)
    return np.concatenate([np.arange(c.first, c.first + c.count) for c in chunks if c.rank == rank])


class Sight(NamedTuple):
    """Who sees whom by position and length: one number for each batch, or for each packed sequence, in each array."""

    left: int | None  # a row sees keys from position - left to position + right; None: no bound
    right: int | None
    offset: np.ndarray  # row i of a sequence stands at position i + offset
    lengths: np.ndarray  # keys of the sequence that exist
    q_starts: np.ndarray  # where the rows of the sequence begin and end among all; dense: at 0 and M
    q_ends: np.ndarray
    k_starts: np.ndarray
    k_ends: np.ndarray

    def rows_in(self, chunk):
        """Of each sequence: the first of its rows in the chunk, and how many."""
        return within(chunk, self.q_starts, self.q_ends)

    def keys_in(self, chunk):
        """The same for keys that exist."""
        return within(chunk, self.k_starts, np.minimum(self.k_ends, self.k_starts + self.lengths))

    def seen(self, q_chunks, k_chunks):
        """Whether any row of a chunk of rows sees any key of a chunk of keys: (chunks of rows, chunks of keys).

        Only what this says is computed, and only for that do keys travel.
        """
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            return np.zeros((len(q_chunks), len(k_chunks)), bool)
        keys, k_counts = (np.array(x).reshape(len(k_chunks), -1) for x in zip(*map(self.keys_in, k_chunks)))
        found = []
        for chunk in q_chunks:
            first, count = self.rows_in(chunk)
            low = near(self.offset) + first
            sees = (count > 0) & (k_counts > 0)
            if self.right is not None:
                sees &= low + count - 1 + near(self.right) >= keys
            if self.left is not None:
                sees &= low - near(self.left) < keys + k_counts
            found.append(sees.any(axis=1))
        return np.array(found)

    def sees_all(self, q, k):
        """Whether all rows of a chunk see all keys of another, in sequences that all lie where the arrays do; False
        where that is not easily said."""
        if self.left is not None:
            return False
        return self.right is None or bool(
            (near(self.offset) + q.first + near(self.right) >= k.first + k.count - 1).all()
        )


def near(distance):
    """A number, or an array, as near as FAR, so that sums fit into 64 bits."""
    return max(min(distance, FAR), -FAR) if isinstance(distance, int) else np.clip(distance, -FAR, FAR)


def within(chunk, starts, ends):
    first = np.clip(chunk.first, starts, ends)
    return first - starts, np.clip(chunk.first + chunk.count, starts, ends) - first


class Route(NamedTuple):
    """How chunks of keys come to the ranks that need them.

    At step t, rank r receives what it needs of rank r - t (modulo P): from its left neighbour, if that one needed the
    chunk a step before and so still holds it, and else from the owner.  So keys go round in a ring, past nobody who
    does not need them, each rank holds two blocks of others at most, and all ranks take each step together.
    """

    owners: list  # of each chunk of keys
    needs: np.ndarray  # (ranks, chunks): whether the rank needs the chunk, of another rank or its own

    @property
    def size(self):
        return len(self.needs)

    def arrivals(self, rank, step):
        """(chunk, source) of what a rank receives in a step."""
        owner, left = (rank - step) % self.size, (rank - 1) % self.size
        mine = [c for c, o in enumerate(self.owners) if o == owner and self.needs[rank, c]]
        return [(c, left if self.needs[left, c] else owner) for c in mine]

    def departures(self, rank, step):
        """(chunk, destination) of what it sends."""
        takers = {(rank + 1) % self.size, (rank + step) % self.size}
        return [(c, to) for to in sorted(takers) for c, source in self.arrivals(to, step) if source == rank]

    def next_holder(self, rank, chunk):
        """Where the sums of the gradients of a chunk go when this rank has added its own: on to the right neighbour if
        that one needs the chunk, too, and else to the owner."""
        right = (rank + 1) % self.size
        return right if self.needs[right, chunk] and right != self.owners[chunk] else self.owners[chunk]


def route(q_chunks, k_chunks, seen, size):
    needs = np.zeros((size, len(k_chunks)), bool)
    for chunk, sees in zip(q_chunks, seen):
        needs[chunk.rank] |= sees
    return Route([chunk.rank for chunk in k_chunks], needs)
