"""What must be the same on all ranks, and errors that all of them raise."""

import math
import operator
import os
import pickle
import sys
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass
class Tally:
    """What one rank has sent so far, and how long it has waited for others."""

    bytes_sent: int = 0
    seconds_waiting: float = 0.0


class Group(NamedTuple):
    """The ranks of a communicator, and a communicator of our own for them, so that no message of the caller's meets one
    of ours."""

    comm: Any
    rank: int
    size: int
    sharing: int  # ranks that share the CPUs of this one
    rooms: dict[str, Any]  # memory that a call used and the next one finds again, see `room`
    tally: Tally  # of all calls for this communicator


# Of what a call used for its own ends so much is kept for the next one, which then does not wait for new pages of
# memory: they cost 3 of 50 ms where 4096 positions are spread over two ranks.  Longer calls do not notice them.
KEPT_BYTES = 1 << 26


def room(group, name, shape, dtype=np.uint8):
    """An array for the use of that name, of which a call has one at a time."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    found = group.rooms.get(name)
    if found is None or found.size < size:
        found = np.empty(size, np.uint8)
        group.rooms.pop(name, None)
        if size + sum(others.size for others in group.rooms.values()) <= KEPT_BYTES:
            group.rooms[name] = found
    return found[:size].view(dtype).reshape(shape)


_KEY = None  # under which a communicator keeps the Group
_MAKING = threading.Lock()  # of the key: threads may have a communicator each


def join(comm):
    """The Group of an mpi4py communicator, made at the first call with it; all ranks of it call this."""
    global _KEY
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(f"comm is {comm!r}: it must be a communicator of mpi4py, such as MPI.COMM_WORLD")
    with _MAKING:
        if _KEY is None:
            _KEY = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, group: group.comm.Free())
    group = comm.Get_attr(_KEY)
    if group is None:
        own = comm.Dup()
        group = Group(own, own.rank, own.size, _sharing(own), {}, Tally())
        comm.Set_attr(_KEY, group)
    return group


def _sharing(comm):
    """How many ranks may use the CPUs that this one may use.  mpiexec may bind each rank to CPUs of its own."""
    from mpi4py import MPI

    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    here = sum(not cpus.isdisjoint(others) for others in node.allgather(cpus))
    node.Free()
    return here


def gather_counts(group, *arrays, axis):
    """The rows of each array on each rank, (arrays, ranks)."""
    counts = np.empty((group.size, len(arrays)), np.int64)
    group.comm.Allgather(np.array([_rows(array, axis) for array in arrays], np.int64), counts)
    return counts.T.tolist()


def _rows(array, axis):
    """0 of what has no such axis, which the checks then find."""
    try:
        return operator.index(np.shape(array)[axis])
    except Exception:
        return 0


def agree(group, prepare):
    """What `prepare()` returns on this rank: (result, {name: value}).  All ranks call this.

    If it raises on any rank, or if the values differ from those of rank 0, the same error is raised on all ranks.
    """
    result, error = None, None
    try:
        result, said = prepare()
        told = pickle.dumps((None, said))  # here, because this may fail, too
    except Exception as raised:
        kind = next((kind for kind in KINDS if isinstance(raised, kind)), ValueError)
        error, told = raised, pickle.dumps(((kind, str(raised)), {}))
    everyone = [pickle.loads(each) for each in group.comm.allgather(told)]
    for rank, (wrong, _) in enumerate(everyone):
        if wrong is not None:
            kind, text = wrong
            raise kind(f"{text} (on rank {rank})") from error
    for rank, (_, others) in enumerate(everyone):
        for name, value in everyone[0][1].items():
            # A rank has nothing to say of what it was not given; that is a difference with a name of its own.
            if name in others and not _same(value, others[name]):
                raise ValueError(
                    f"{name} is {_shown(value)} on rank 0 and {_shown(others[name])} on rank {rank}: "
                    "it must be the same on all ranks"
                )
    return result


KINDS = (ValueError, TypeError, MemoryError)


def _same(a, b):
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _shown(value):
    """An array without numbers may have a long axis all the same, and one with many need not be told whole."""
    if not isinstance(value, np.ndarray):
        return value
    if not value.size:
        return f"an array of shape {value.shape}"
    return value.tolist() if value.size <= 64 else np.array2string(value, threshold=64, separator=", ")


def ready(group, make):
    """What `make()` returns, when it has on all ranks: from here on nothing should fail."""
    made, failure = None, None
    try:
        made = make()
    except BaseException as error:
        failure = error
    finish(group, failure)
    return made


def finish(group, failure):
    """All ranks call this when their work is done, or has failed: they all return, or they all raise."""
    failed = np.array([failure is not None], np.int32)
    anywhere = np.empty_like(failed)
    group.comm.Allreduce(failed, anywhere)
    if not anywhere[0]:
        return
    own = failure is not None and not isinstance(failure, Elsewhere)
    errors = group.comm.allgather(f"{type(failure).__name__}: {failure}" if own else None)
    if own:
        raise failure
    rank, text = next((rank, text) for rank, text in enumerate(errors) if text is not None)
    raise RuntimeError(f"the call failed on rank {rank}, so no rank has a result: {text}") from None


class Elsewhere(RuntimeError):
    """Another rank has sent nothing where a block was due, because it failed."""
