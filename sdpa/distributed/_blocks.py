"""Which tokens of a cache each rank holds.  Plain arithmetic, without MPI."""

from typing import NamedTuple

import numpy as np

BLOCK = 16  # tokens: the most that one rank ever has more than another, which take a core a microsecond or two


class Blocks(NamedTuple):
    """Blocks of so many tokens are dealt to the ranks in turn: block i lies on rank i modulo P.

    Whatever the length, and whatever window of it a query sees, no rank has more of it than another but for one block.
    The tokens of a rank are numbered on their own, in the order of their positions: these are their places.
    """

    rank: int
    size: int

    def held(self, length):
        """How many of the first `length` tokens this rank holds: so the place of the first one from there on, too."""
        if isinstance(length, int):  # in a tenth of the time
            turns, rest = divmod(length, BLOCK * self.size)
            return turns * BLOCK + min(max(rest - self.rank * BLOCK, 0), BLOCK)
        turns, rest = np.divmod(length, BLOCK * self.size)
        return turns * BLOCK + np.clip(rest - self.rank * BLOCK, 0, BLOCK)

    def position(self, place):
        """The position of the token at a place."""
        turns, rest = np.divmod(place, BLOCK)
        return (turns * self.size + self.rank) * BLOCK + rest

    def most_of(self, length):
        """The most tokens that this rank may hold of any `length` tokens that follow one another."""
        turns, rest = divmod(length, BLOCK * self.size)
        return turns * BLOCK + min(rest, BLOCK)
