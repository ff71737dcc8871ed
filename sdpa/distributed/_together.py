"""What a cache needs of MPI in each step: a small message to find out whether all ranks agree, and one that joins what
they found."""

import functools
import hashlib
import math
import pickle
from typing import Any

import numpy as np

from .. import _core
from ._agreement import agree

ALL, SOME = -1, -2
GATHER_BYTES = 1 << 18  # of the parts of all ranks: above that, Allreduce takes less time


def voted(group, digest, say, failure, gives=True):
    """All ranks call this.  If one has failed, or if they do not say the same, all raise the same error.  Else it tells
    which rank gives: its number if it is one, or ALL, or SOME.  It takes 3 us on one machine if nobody has failed,
    where comparing what the ranks say, as `agree` does, takes 100.

    digest : of what must be the same on all ranks that give.    say : a function that returns it, {name: value}.
    """
    MPI, never = _MPI(), -(2**62)
    numbers = [digest, -digest, group.rank, -group.rank] if gives else [never] * 4
    numbers = np.array([*numbers, not gives, failure is not None], np.int64)
    group.comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
    most, least, last, first, some_do_not, failed = numbers.tolist()
    if failed or most != -least:
        settle(group, dict if some_do_not else say, failure)
    return ALL if not some_do_not else last if last == -first else SOME


def digest_of(said):
    """A number below 2^56 that is the same in all processes, for what is said."""
    return int.from_bytes(hashlib.blake2b(pickle.dumps(said), digest_size=7).digest(), "little")


def settle(group, say, failure):
    """All ranks call this.  It raises the same error on all, unless they had no more than different words for the
    same."""

    def prepare():
        if failure is not None:
            raise failure if isinstance(failure, Exception) else RuntimeError(f"{type(failure).__name__}: {failure}")
        return None, say()

    try:
        agree(group, prepare)
    except Exception:
        if failure is not None and not isinstance(failure, Exception):
            raise failure from None
        raise


def attempt(work, *arguments):
    """(result, None), or (None, error): whoever fails tells the others before he raises."""
    try:
        return work(*arguments), None
    except BaseException as error:
        return None, error


class Parts:
    """Room for what each rank finds for its keys: results and their lse, one after the other; and a last number, which
    says whether it has failed.  A cache keeps it from call to call, as making it takes longer than joining."""

    def __init__(self, group, shape, dtype):
        self.group, self.shape, self.dtype, self.rows = group, shape, dtype, math.prod(shape[:-1])
        self.own = np.empty(self.rows * (shape[-1] + 1) + 1, dtype)
        self.out, self.lse = self._arrays(self.own)
        self.small = group.size * self.own.nbytes <= GATHER_BYTES
        if self.small:
            self.every = np.empty((group.size, self.own.size), dtype)
            self.outs, self.lses = zip(*map(self._arrays, self.every))
            self.failed = self.every[:, -1]

    def _arrays(self, numbers):
        end = -1 - self.rows
        return numbers[:end].reshape(self.shape), numbers[end:-1].reshape(self.shape[:-1])

    def join(self, failure):
        """(result, lse, whether a rank has failed) for the keys of all ranks, joined in their order, so with the same
        bits on all.

        Few numbers are gathered and joined in one call, which takes the least time.  Where there are many ranks, or
        much to join, `Allreduce` moves fewer bytes.
        """
        self.own[-1] = failure is not None
        if not self.small:
            return self._reduce()
        self.group.comm.Allgather(self.own, self.every)
        return *_core.merge(self.outs, self.lses, None), max(self.failed.tolist()) > 0

    def _reduce(self):
        number = self.dtype.char
        whole = _MPI()._typedict[number].Create_contiguous(self.own.size).Commit()  # MPI may cut what is more than one
        self.group.comm.Allreduce(_MPI().IN_PLACE, [self.own, 1, whole], _joining(number, self.shape[-1]))
        whole.Free()
        return self.out, self.lse, self.own[-1] > 0


@functools.cache
def _MPI() -> Any:
    from mpi4py import MPI

    return MPI


@functools.cache
def _joining(number, size):
    """The operation that joins such parts, for MPI."""

    def join(earlier, later, _):
        a, b = (np.frombuffer(part, number) for part in (earlier, later))
        rows = len(a) // (size + 1)
        (a_out, a_lse), (b_out, b_lse) = (
            (part[: rows * size].reshape(rows, size), part[rows * size : -1]) for part in (a, b)
        )
        _core.merge_into(b_out, b_lse, a_out, a_lse, 1)
        b[-1] = max(a[-1], b[-1])

    return _MPI().Op.Create(join, commute=False)
