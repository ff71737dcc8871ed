"""`python -m sdpa bench`: the benchmarks of the checkout that this package lies in."""

import importlib
import os
import sys
from pathlib import Path

TEXT = "speed against other libraries and against what the machine can do (in a clone)"
CHECKOUT = Path(__file__).resolve().parents[2]
MISSING = """python -m sdpa bench needs the folder benchmarks/, which an installed package does not have.
Clone the repository, and there: pip install -e '.[bench]', then python -m sdpa bench --help"""


def bench(arguments):
    """Run benchmarks/compare.py, which alone knows these arguments."""
    if not (CHECKOUT / "benchmarks" / "compare.py").is_file():
        raise SystemExit(MISSING)
    if not hasattr(os, "sched_getaffinity"):
        raise SystemExit("the benchmarks need Linux: they bind processes to CPUs, stop them, and read /proc")
    sys.path.insert(0, str(CHECKOUT))
    try:
        compare = importlib.import_module("benchmarks.compare")
    except ModuleNotFoundError as error:
        raise SystemExit(f"the benchmarks need {error.name}: pip install -e '.[bench]'") from None
    compare.main(arguments, prog="python -m sdpa bench")
