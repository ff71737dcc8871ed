"""The memory that a call takes beyond its inputs and its result, in a fresh process each.  ../README.md says how.

python -m benchmarks.measure.memory --only prefill-2048,decode-4k --peers torch,ort_attn
"""

import argparse
import contextlib
import ctypes
import gc
import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure.adapting import require
from benchmarks.measure.reading import READ
from benchmarks.measure.runner import Process, TimeLeft, end_workers_on_termination, preparation, progress_line
from benchmarks.peers import select_peers
from benchmarks.report import tables
from benchmarks.workloads import WORKLOADS, select

FEW = 64  # rows and keys of the calls that set up what a process sets up once
WARM_CALLS = 2  # the first finds out how much memory it takes, from which onnxruntime plans the second
CALLS = 3  # measured; the median counts
STARTING = 2  # seconds, about: of a process, and of the library in it
MB = 1e6

# ------------------------------------------------------------------------------------------------- inside the process


class Usage(NamedTuple):
    """Bytes: at the height of a call, its result not counted; and what stays taken between calls, be it a result."""

    extra: int
    kept: int


def usage(adapter, workload):
    """Of a workload, in a process in which nothing else ran before.

    Two things would count as memory of a call without being it: what a library sets up once (threads, code), hence the
    calls on few rows, and what malloc keeps to itself after `free`, hence the trimming.  What the implementation itself
    keeps for the next call is counted.
    """
    require(Path("/proc/self/clear_refs").exists(), "the system does not say the peak of a process")
    warm(adapter, workload.shortened(FEW))
    call = adapter(workload)[0]  # the other one, for checks, may hold arrays of its own
    prepared = settled()
    for _ in range(WARM_CALLS):
        call()
    kept = settled() - prepared
    heights = [height_of(call) - prepared for _ in range(CALLS)]
    return Usage(round(statistics.median(heights)) - workload.result_bytes, kept)


def warm(adapter, workload):
    """Calls whose arrays are gone afterwards."""
    call = adapter(workload)[0]
    for _ in range(WARM_CALLS):
        call()


def height_of(call):
    """Resident bytes at the height of one call."""
    settled()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    call()
    known = status()
    return known["VmHWM"] - known["RssFile"]


def settled():
    """Resident bytes, files not counted (code that happens to be read), after all that is free went to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # other C libraries than glibc keep less
        ctypes.CDLL(None).malloc_trim(0)
    known = status()
    return known["VmRSS"] - known["RssFile"]


def status():
    """Bytes by name, of this process."""
    return {
        name: int(kilobytes) << 10
        for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    }


# --------------------------------------------------------------------------------------------------- many processes


def measure(implementation, workload):
    """In a process of its own: {"extra": bytes, "kept": bytes}, or {"unsupported": why}."""
    with contextlib.closing(Process(implementation, {})) as process:
        return process.ask(do="memory", sizes=workload.as_json())


def add_to(results, progress):
    """Give each result (a dictionary that names its workload and implementation) its "memory"."""
    asked = [one for one in results if one["implementation"] != READ and not one.get("unsupported")]
    left = TimeLeft(sum(STARTING + preparation(WORKLOADS[one["workload"]]) for one in asked))
    for result in asked:
        workload = WORKLOADS[result["workload"]]
        progress(f"memory: {result['implementation']} on {workload.name}", left())
        result["memory"] = measure(result["implementation"], workload)
        left.took(STARTING + preparation(workload))


def against_length(implementations, lengths, workload=WORKLOADS["prefill-2048-full-fp32"]):
    """{implementation: {length: bytes beyond inputs and result, None where it cannot}}, for as many queries as keys."""
    return {
        name: {length: measure(name, replace(workload, M=length, N=length)).get("extra") for length in lengths}
        for name in implementations
    }


def rows_of(results):
    """The header, and a row per workload: what must be there anyway, and what each implementation takes besides."""
    measured = {(result["workload"], result["implementation"]): result["memory"] for result in results}
    names = list(dict.fromkeys(name for _, name in measured))
    workloads = dict.fromkeys(workload for workload, _ in measured)
    yield ["extra MB", "arrays MB", *names]
    for workload in workloads:
        cells = [cell(measured.get((workload, name), {})) for name in names]
        yield [workload, megabytes(WORKLOADS[workload].bytes), *cells]


def cell(known):
    if "extra" not in known:
        return ""
    kept = min(known["kept"], known["extra"])  # where the place of the result is kept, it is no extra memory
    return megabytes(max(0, known["extra"])) + (f" ({megabytes(kept)} kept)" if kept > MB / 2 else "")


def megabytes(nbytes):
    return f"{nbytes / MB:.1f}"


def sections(results, form):
    """The table of those results that have a memory, in a list to be added to others; no table where none has."""
    measured = [result for result in results if "memory" in result]
    return [form(list(rows_of(measured)))] if measured else []


# -------------------------------------------------------------------------------------------------------- the command


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="as for benchmarks.compare")
    parser.add_argument("--peers", type=select_peers, default="*", help="as for benchmarks.compare")
    parser.add_argument("--without-sdpa", action="store_true", help="measure the peers alone")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main():
    from benchmarks import compare  # which imports this module

    arguments = parse_arguments()
    end_workers_on_termination()
    names = [name for name in compare.implementations(arguments) if name != READ]
    results = [{"workload": w.name, "implementation": name} for w in select(arguments.only) for name in names]
    with progress_line(sys.stderr) as progress:
        add_to(results, progress)
    if arguments.json:
        known = {"versions": compare.versions(names), "commit": compare.commit(), "results": results}
        arguments.json.write_text(json.dumps(known, indent=1))
    print(*sections(results, tables.text))


if __name__ == "__main__":
    main()
