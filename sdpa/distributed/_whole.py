"""Whole arrays spread over the ranks, and brought together again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import plain_array, whole_number
from ._agreement import agree, gather_counts, join, ready
from ._layout import check_layout, counts_of, cut

MOST_AXES = 64  # of NumPy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def scatter(
    comm: Any, array: ArrayLike | None, *, axis: int = -2, layout: str = "contiguous", root: int = 0
) -> NDArray[Any]:
    """The rows of this rank, as `rows` says, of an array that rank `root` has.

    Parameters
    ----------
    comm
        The communicator of mpi4py.  All its ranks call this.
    array
        The whole array on rank `root`.  On the other ranks it has no meaning, and may be None.
    axis
        The axis of the rows: -2 of (B, H, M, D), 0 of packed sequences.
    layout
        As for `rows`.
    root
        The rank that has the array.

    Notes
    -----
    The rows are new arrays, in C order, also on rank `root`.
    """
    group = join(comm)

    def check():
        given = None if group.rank != root else plain_array("array", array)
        return given, _check(group, given, axis, layout, root)

    given = agree(group, check)
    shape, dtype = group.comm.bcast(None if given is None else (given.shape, given.dtype), root)
    counts = counts_of(shape[axis], group.size, layout)

    def rooms():
        own = np.empty(_with_rows(shape, axis, counts[group.rank]), dtype)
        if given is None:
            return own, None
        sent, begin = np.empty(given.size, dtype), 0
        for rank, sizes in enumerate(_with_rows(shape, axis, count) for count in counts):
            part = sent[begin : begin + math.prod(sizes)].reshape(sizes)
            for chunk in cut(counts, layout):
                if chunk.rank == rank:
                    _rows(part, chunk.at, chunk.count, axis)[...] = _rows(given, chunk.first, chunk.count, axis)
            begin += part.size
        return own, [sent.view(np.uint8), _bytes_of(shape, axis, counts, dtype)]

    own, sent = ready(group, rooms)
    group.comm.Scatterv(sent, own.reshape(-1).view(np.uint8), root)
    return own


def gather(
    comm: Any, array: ArrayLike, *, axis: int = -2, layout: str = "contiguous", root: int | None = 0
) -> NDArray[Any] | None:
    """The whole array whose rows the ranks have, on rank `root`; None on the others.  root=None: on all ranks.

    The parameters are those of `scatter`, which `gather` undoes.  The ranks may have any numbers of rows.
    """
    group = join(comm)
    counts = gather_counts(group, array, axis=axis)[0]

    def check():
        given = plain_array("array", array)
        said = _check(group, given, axis, layout, root)
        shape = _with_rows(given.shape, axis, 0)
        return given, said | {"the dtype of array": str(given.dtype), "the shape of array without its rows": shape}

    return gather_rows(group, agree(group, check), axis, cut(counts, layout), root)


def gather_rows(group, array, axis, chunks, root=None):
    """The whole array, whose rows the ranks have as `chunks` say, on rank `root` or on all; None on the others."""
    counts = [sum(chunk.count for chunk in chunks if chunk.rank == rank) for rank in range(group.size)]
    sizes = _bytes_of(array.shape, axis, counts, array.dtype)

    def rooms():
        sent = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if root not in (None, group.rank):
            return sent, None, None
        return sent, np.empty(sum(sizes), np.uint8), np.empty(_with_rows(array.shape, axis, sum(counts)), array.dtype)

    sent, received, whole = ready(group, rooms)
    if root is None:
        group.comm.Allgatherv(sent, [received, sizes])
    else:
        group.comm.Gatherv(sent, None if received is None else [received, sizes], root)
    if received is None:
        return None
    parts = np.split(received.view(array.dtype), np.cumsum(sizes)[:-1] // array.itemsize)
    parts = [part.reshape(_with_rows(array.shape, axis, count)) for part, count in zip(parts, counts)]
    for chunk in chunks:
        _rows(whole, chunk.first, chunk.count, axis)[...] = _rows(parts[chunk.rank], chunk.at, chunk.count, axis)
    return whole


def _check(group, array, axis, layout, root):
    """Raise if the call is wrong, else return {name: value} of what must be the same on all ranks."""
    check_layout(layout)
    axis = whole_number("axis", axis, -MOST_AXES)
    if root is not None and whole_number("root", root, 0) >= group.size:
        raise ValueError(f"root is {root}: it must be from 0 to {group.size - 1}, the last rank")
    if array is not None:
        if array.dtype.hasobject:
            raise TypeError(f"array has dtype {array.dtype}: objects do not travel")
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"axis is {axis}: array has shape {array.shape}, so there is no such axis")
    return {"axis": axis, "layout": layout, "root": root}


def _with_rows(shape, axis, rows):
    shape = list(shape)
    shape[axis] = rows
    return tuple(shape)


def _bytes_of(shape, axis, counts, dtype):
    """Of the rows of each rank."""
    return [math.prod(_with_rows(shape, axis, count)) * dtype.itemsize for count in counts]


def _rows(array, first, count, axis):
    return np.moveaxis(np.moveaxis(array, axis, 0)[first : first + count], 0, axis)
