"""Families of workloads in which one size grows, against a few peers, for the lines of the report.

python -m benchmarks.studies.sweeps --json sweeps.json --seconds 240
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure import limits, machine, memory, runner
from benchmarks.measure.adapting import THREADS
from benchmarks.measure.libraries import OURS, READ
from benchmarks.peers import select_peers
from benchmarks.report.rows import is_right
from benchmarks.workloads import SWEEPS, WORKLOADS
from sdpa.lab._command import file_to_write

PEERS = "torch,onnxruntime,openvino,ov_fold,ncnn"  # unless others are asked for: more lines than these hide each other
FAMILIES = (*SWEEPS, "threads", "memory")
MEMORY_LENGTHS = 128, 512, 2048, 8192  # at 8192 a peer that keeps all scores takes 2 GB for them
ON_THREADS = WORKLOADS["prefill-2048-causal-fp32"]


def measure(peers, rounds, seconds, families=FAMILIES, kernel=None):
    """{family: points}, each point a size with the seconds of each implementation, and with the bound."""
    here = machine.measure(kernel)
    measured = {}
    with runner.progress_line(sys.stderr) as progress:
        for number, family in enumerate(families, 1):
            if family == "memory":
                progress("memory by length")
                measured[family] = memory.against_length([OURS, *peers], MEMORY_LENGTHS)
                continue
            names, workloads = contents(family, peers)
            environments = limits.environments(kernel, names)
            later = seconds * (1 - number / len(families))
            with runner.Comparison(workloads, names, environments, progress) as run:
                run.prepare(later=later + seconds / len(families))
                run.measure(rounds, seconds / len(families), later=later)
            measured[family] = points(family, run.results, here)
    return measured


def contents(family, peers):
    """(implementations, workloads)."""
    if family == "threads":
        return [f"{name}@{count}" for count in thread_counts() for name in (OURS, *peers)], [ON_THREADS]
    reading = [READ] if family == "context" else []  # of others, arithmetic is the bound
    return [OURS, *reading, *peers], list(SWEEPS[family].values())


def thread_counts(most=THREADS):
    """Powers of two, and all there are."""
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})


def points(family, results, here):
    if family != "threads":
        return [point(size, workload, here, results[workload.name]) for size, workload in SWEEPS[family].items()]
    on = {count: {} for count in thread_counts()}
    for name, result in results[ON_THREADS.name].items():
        implementation, _, count = name.partition("@")
        on[int(count)][implementation] = result
    return [point(count, ON_THREADS, here, found, share=count / THREADS) for count, found in on.items()]


def point(size, workload, here, results, share=1):
    """What was measured at one size; `share` of the machine."""
    times = {name: result.minimum for name, result in results.items() if result.samples and is_right(vars(result))}
    bound = workload.bound(here, times.get(READ)) / share
    return {"size": size, "workload": workload.name, "flops": workload.flops, "bound": bound, "times": times}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="FAMILY,...", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--peers", type=select_peers, default=PEERS, help=f"default {PEERS}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="for timing, preparation not counted (about)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", required=True)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.only.split(",")) - set(FAMILIES)
    if unknown:
        parser.error(f"argument --only: {', '.join(sorted(unknown))!r} is not one of {', '.join(FAMILIES)}")
    return chosen


def main(arguments=None):
    from benchmarks import compare  # which imports this module

    chosen = parse_arguments(arguments)
    runner.end_workers_on_termination()
    about = compare.about([OURS, *chosen.peers])
    families = measure(chosen.peers, chosen.rounds, chosen.seconds, chosen.only.split(","))
    chosen.json.write_text(json.dumps({"sweeps": {"about": about, "families": families}}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
