"""Runs adapters once on every workload, shrunk, and judges what they compute: the first thing for a new adapter.

python -m benchmarks.measure.trial torch,ort_* --only decode
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure import oracle
from benchmarks.measure.reading import READ
from benchmarks.measure.runner import Process
from benchmarks.peers import IMPLEMENTATIONS, select_peers
from benchmarks.workloads import select


def expect(workloads, folder):
    """name -> (the workload shrunk, a file of what it must give)."""
    expected = {}
    for workload in workloads:
        small = workload.shrunk()
        file = str(Path(folder) / f"{workload.name}.npz")
        oracle.save(file, small.expected())
        expected[workload.name] = small, file
    return expected


def trials(name, expected):
    """(name of a workload, answer of the adapter) for each: its error and the one that passes, or why it cannot."""
    process = Process(name, {})
    try:
        for workload, (small, file) in expected.items():
            check = None if name == READ else file  # which compares what it read itself
            yield workload, process.ask(do="trial", sizes=small.as_json(), check=check)
    finally:
        process.close()


def verdict(answer):
    if "unsupported" in answer:
        return f"cannot: {answer['unsupported']}"
    word = "right" if answer["error"] <= answer["allowed"] else "WRONG"
    return f"{word}: error {answer['error']:.1e} of {answer['allowed']:.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "peers", nargs="?", type=select_peers, default="*", help="peers, libraries or patterns, comma-separated"
    )
    parser.add_argument("--only", metavar="PATTERN", help="workloads whose name contains or matches it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected = expect(select(arguments.only), folder)
        for name in arguments.peers:
            if not IMPLEMENTATIONS[name].installed:
                print(f"{name}: {IMPLEMENTATIONS[name].library} is not installed")
                continue
            for workload, answer in trials(name, expected):
                print(f"{name}: {workload}: {verdict(answer)}", flush=True)


if __name__ == "__main__":
    main()
