"""The least that decoding does: read all keys and values, or all weights, and nothing else; of a norm: copy rows.

One query for each key, or few rows for each weight, is too little arithmetic to matter, so memory is the limit, and the
speed of memory that others
use too changes from minute to minute.  Hence the bound of such workloads is the time of this loop, taken in the same
rounds as that of the implementations.
"""

import itertools
import time

import numpy as np

from benchmarks.measure.adapting import THREADS, require
from benchmarks.measure.probe import COPY_PIECES, READ_PATTERNS, Probe

READ = "read"  # the name of this loop among the implementations
TUNING_SECONDS = 0.3


def read_peer(workload):
    """Reads the keys and values, or the weights; the sum that it returns is checked here, so there is no result to be
    compared."""
    require(workload.limited_by_memory, "for workloads that memory limits only")
    return fastest_reading(workload.to_read()), None


def copy_peer(workload):
    """Copies the inputs of the workload; that the copies are right is checked here."""
    return fastest_copying(workload.to_read()), None


def fastest_copying(arrays):
    """A call that copies these arrays, in the way that was the fastest in a trial: on all threads or one."""
    probe = Probe()
    require(probe.has_threads, "the C compiler has no OpenMP")
    calls, to = [], [np.zeros_like(array) for array in arrays]
    for threads, piece in itertools.product({1, THREADS}, COPY_PIECES):
        for array in to:
            array[...] = 0
        calls.append(probe.copying(to, arrays, threads, piece))
        calls[-1]()
        if not all(map(np.array_equal, to, arrays)):
            raise AssertionError(f"copying on {threads} threads, {piece} bytes at a time, gives something else")
    return fastest(calls)


def fastest_reading(arrays):
    """A call that reads these contiguous arrays with all threads, in the pattern that was the fastest in a trial."""
    probe = Probe()
    require(probe.has_threads, "the C compiler has no OpenMP")
    words = sum(int(array.reshape(-1).view(np.uint64).sum(dtype=np.uint64)) for array in arrays) % 2**64
    readings = [probe.reading(arrays, THREADS, *pattern) for pattern in READ_PATTERNS]
    for reading, pattern in zip(readings, READ_PATTERNS, strict=True):
        if reading() != words:
            raise AssertionError(f"reading in the pattern {pattern} gives another sum than NumPy")
    return fastest(readings)


def fastest(calls):
    """The one whose shortest time is the least, of calls in turn."""
    least = [float("inf")] * len(calls)
    end = time.perf_counter() + TUNING_SECONDS
    while time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            least[index] = min(least[index], time.perf_counter() - start)
    return calls[int(np.argmin(least))]
