"""Ranks of mpiexec: how tests start them, and how a worker on them runs checks that rank 0 chooses.

Hypothesis draws on rank 0 alone.  The other ranks wait for what it wants to be checked, so that one start serves many
examples, and an example can be shrunk.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import sdpa
from support.processes import ROOT

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
WITH_RANKS = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py or mpiexec is missing: pip install mpi4py mpich",
)
# Ranks that wait poll, and there may be more of them than CPUs: these variables of MPICH make them sleep instead.
PATIENT = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "OMP_NUM_THREADS": "1"}


def environment():
    paths = [str(Path(sdpa.__file__).parents[1]), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | PATIENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def finished(command, timeout, env):
    """As subprocess.run does it, but only those seconds count in which this process ran, too: fuzzers run for hours,
    and may be stopped, or sleep with the machine."""
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=env, **pipes) as process:
        for second in range(1, timeout + 1):
            try:
                said = process.communicate(timeout=1)
                return subprocess.CompletedProcess(command, process.returncode, *said)
            except subprocess.TimeoutExpired:
                if second == timeout:
                    process.kill()
                    raise


def run_ranks(number, *arguments, timeout=300, before=(), options=(), **variables):
    """What `number` ranks of this Python print; `before` and `options` stand before mpiexec and after it."""
    command = [*before, MPIEXEC, *options, "-n", str(number), sys.executable, *arguments]
    done = finished(command, timeout, environment() | variables)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


class Ranks:
    """On rank 0: `ranks.all(check, ...)` calls `check(comm, ...)` on all ranks and returns a list of what they return;
    what one of them raises is raised here."""

    def __init__(self, comm):
        self.comm = comm

    def all(self, check, *arguments):
        self.comm.bcast((check, arguments))
        return self._run(check, arguments)

    def serve(self):
        """On the other ranks: until rank 0 has no more to ask."""
        while (task := self.comm.bcast(None)) is not None:
            self._run(*task)

    def _run(self, check, arguments):
        result, error = None, None
        try:
            result = check(self.comm, *arguments)
        except BaseException:
            error = traceback.format_exc()
        found = self.comm.gather((result, error))
        if found is None:
            return None
        for rank, (_, error) in enumerate(found):
            assert error is None, f"on rank {rank}:\n{error}"
        return [result for result, _ in found]


def on_ranks(comm, main):
    """`main(ranks)` on rank 0, while the others serve."""
    ranks = Ranks(comm)
    if comm.rank:
        ranks.serve()
        return
    try:
        main(ranks)
    finally:
        comm.bcast(None)


def caught(call, *arguments, **options):
    """The error that the call raises, or None."""
    try:
        call(*arguments, **options)
    except BaseException as error:
        return error


def same_everywhere(call, *arguments, **options):
    """The error that the call raises, which must be the same on all ranks."""
    from mpi4py import MPI

    error = caught(call, *arguments, **options)
    said = MPI.COMM_WORLD.allgather((type(error).__name__, str(error)))
    assert len(set(said)) == 1 and error is not None, said
    return error


def holds(check, ranks):
    """`check(ranks, data)` for as many examples as the command line says, and from the seed that it may say."""

    @seed(int(sys.argv[2]) if len(sys.argv) > 2 else ranks.comm.size)
    @settings(
        max_examples=int(sys.argv[1]), deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(st.data())
    def example(data):
        check(ranks, data)

    example()


def positions(counts, layout):
    """Of the rows of each rank, where rank r has counts[r] of them."""
    chunks = list(counts)
    if layout == "zigzag":
        chunks = [(n + 1) // 2 for n in counts] + [n // 2 for n in reversed(counts)]
    ends = np.cumsum([0, *chunks])
    found = [np.arange(*ends[i : i + 2]) for i in range(len(chunks))]
    if layout == "contiguous":
        return found
    return [np.concatenate([found[r], found[-1 - r]]) for r in range(len(counts))]


def taken(array, rows, axis, all_rows):
    """The rows of an array that has them on an axis; one row may stand for all."""
    array = np.asarray(array)
    if array.ndim < -axis or array.shape[axis] != all_rows or (all_rows == 1 and axis == -2 and array.shape[axis] == 1):
        return array
    return np.take(array, rows, axis)


def joined(parts, places, axis):
    """The whole array whose rows are at these places."""
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.take(np.concatenate(parts, axis), order, axis)
