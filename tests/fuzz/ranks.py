"""sdpa.distributed on one rank to three, which mpiexec starts: the properties of tests/distributed, and any arguments
on one rank or on all of them."""

import importlib.util
import subprocess
from pathlib import Path

from support.problems import examples
from support.ranks import MPIEXEC, run_ranks

from sdpa._runtime import kernels

SECONDS = 100  # of a start: less than those that a round may take
TESTS = Path(__file__).parents[1] / "distributed"
WORKERS = {
    "distributed": [str(TESTS / "many_cases.py"), 40],
    "distributed caches": [str(TESTS / "any_cache.py"), 100],
    "distributed arguments": ["-m", "tests.fuzz.unequal", 600],
}


def of_worker(*command, count):
    def run(number):
        ranks = 1 + number // 8 % 3  # neither all odd nor all even, as seeds of one process may be
        arguments = (*command, str(examples(count)), str(number))
        try:
            run_ranks(ranks, *arguments, timeout=SECONDS, SDPA_KERNEL=kernels.default.name)
        except subprocess.TimeoutExpired as error:
            said = (error.stderr or b"").decode(errors="replace")
            raise AssertionError(f"{ranks} ranks had no end\n{said[-3000:]}") from None

    return run


TARGETS = {}
if MPIEXEC is not None and importlib.util.find_spec("mpi4py") is not None:
    TARGETS = {name: of_worker(*command, count=count) for name, (*command, count) in WORKERS.items()}
