"""Where the time of a call goes: the reasons in ../targets.py, measured.

python -m benchmarks.studies.stages                              # attention that misses an aim in docs/speed.json
python -m benchmarks.studies.stages --only decode-4k,window
python -m benchmarks.studies.stages --update                     # writes the table into benchmarks/README.md

Builds the library once more with each stage of its kernels timed (../measure/stages.c).  Per cent are of the time of
all threads together; what is no stage is arguments, the cutting of work, and threads that begin, end or wait.  "near"
is what the stages take for the same work on arrays that fit in the second-level cache: how much of the time would be
left if nothing came from farther away, and every thread was in some stage from beginning to end.  "aligned" is the
time where all arrays begin with a cache line: those of NumPy begin at any multiple of 16 bytes, so that most vectors of
64 bytes lie in two lines.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind the library that is measured

from benchmarks import targets, workloads
from benchmarks.measure import machine
from benchmarks.measure.libraries import OURS
from benchmarks.peers import IMPLEMENTATIONS, adapter_of
from benchmarks.report import rows
from benchmarks.report.report import with_text_between
from benchmarks.revisions import building
from benchmarks.workloads.attention import Attention

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "benchmarks/README.md"
# By the numbers in stages.c.
NAMES = ("queries", "scores", "softmax", "values", "results", "slopes", "gradient of queries", "gradients of keys",
         "projections", "norms")  # fmt: skip
ROOM = 16, 256  # stages and threads, there
NEAR_BYTES = 512 << 10  # half of a second-level cache of 1 MB
FEWEST = 256  # keys, when there are made fewer
LINE = 64  # bytes of a cache line
TURN = 5  # calls after each other


def chosen(only):
    if only:
        found = workloads.select(only)
    else:
        published = rows.rows_of(rows.read([ROOT / "docs/speed.json"]))
        missed = {verdict.row.name for verdict in targets.verdicts(published) if not verdict.hit}
        found = [workload for workload in workloads.select("*") if workload.name in missed]
    return [workload for workload in found if isinstance(workload, Attention)]


def near(workload):
    """The same kind of work on one head, and on fewer keys; None if that does not fit into a near cache."""
    one = replace(workload, B=1, H=workload.H // workload.G, G=1)
    while one.bytes > NEAR_BYTES and one.N // 2 >= max(FEWEST, 4 * (one.window or 0)):
        rows_too = one.window is not None
        one = replace(one, N=one.N // 2, M=one.M // 2 if rows_too else one.M)
    return one if one.bytes <= NEAR_BYTES and workload.kind != "layer" else None


# ---------------------------------------------------------------------------------------------------------- measuring


def measured(chosen, threads, seconds):
    """{name: what `measure` found}, in a process that has the library whose stages are timed."""
    sources = {"csrc/kernel_itself.h": ROOT / "csrc/kernel.c", "csrc/kernel.c": ROOT / "benchmarks/measure/stages.c"}
    instead = {path: source.read_text(encoding="utf-8") for path, source in sources.items()}
    library = building.revision(None, lambda text: print(f"{text}, with stages timed", file=sys.stderr), instead)
    names = [workload.name for workload in chosen]
    work = f"import sdpa; from benchmarks.studies import stages; stages.work({names!r}, {threads}, {seconds})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [library.folder, ROOT]))}
    for line in lines_of([sys.executable, "-P", "-c", work], environment):
        yield json.loads(line)


def lines_of(command, environment):
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield from process.stdout
    if process.returncode:
        raise SystemExit(f"the process that measures ended with {process.returncode}")


def work(names, threads, seconds):
    """That process: a line of JSON for each workload."""
    from sdpa import _core

    clock = Clock(_core.__file__)
    for name in names:
        (workload,) = [one for one in workloads.select(name) if one.name == name]
        calls, small = [call_of(workload)], near(workload)
        if workload.kind == "forward":
            calls.append(aligned_call_of(workload))
        found, *others = measure(calls, threads, seconds, clock)
        if others:
            found["aligned"] = others[0]["seconds"]
        if small is not None:
            (one,) = measure([call_of(small)], 1, seconds, clock)
            found["near"] = sum(one["stages"]) * workload.flops / small.flops / threads
        print(json.dumps({"name": name, "threads": threads, **found}), flush=True)


def call_of(workload):
    return adapter_of(IMPLEMENTATIONS[OURS], workload)(workload)[0]


def aligned_call_of(workload):
    import sdpa

    arrays, options = workload.draw()
    arrays, options = [aligned(array) for array in arrays], {name: aligned(given) for name, given in options.items()}
    return lambda: sdpa.attention(*arrays, **options)


def aligned(given):
    """A copy that begins with a cache line; what is no array stays."""
    if not isinstance(given, np.ndarray):
        return given
    room = np.empty(given.nbytes + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    copy = room[begin : begin + given.nbytes].view(given.dtype).reshape(given.shape)
    copy[...] = given
    return copy


class Clock:
    """The ticks that threads have spent in stages."""

    def __init__(self, library):
        stages, threads = ROOM
        loaded = ctypes.CDLL(library)
        self.ticks = np.ctypeslib.as_array((ctypes.c_uint64 * stages * threads).in_dll(loaded, "sdpa_stage_ticks"))
        now = loaded.sdpa_stage_now
        now.restype = ctypes.c_uint64
        begin, ticks = time.perf_counter(), now()
        time.sleep(0.2)
        self.each = (time.perf_counter() - begin) / (now() - ticks)  # seconds of a tick

    def seconds(self):
        """Of each stage, of all threads."""
        return self.ticks.sum(axis=0)[: len(NAMES)] * self.each


def measure(calls, threads, seconds, clock):
    """Of the fastest of each of the calls, which take turns of a few."""
    os.environ["SDPA_NUM_THREADS"] = str(threads)
    found, end = [[] for _ in calls], time.perf_counter() + seconds * len(calls)
    while not found[-1] or time.perf_counter() < end:
        for call, times in zip(calls, found):
            call()
            for _ in range(TURN):
                before, begin = clock.seconds(), time.perf_counter()
                call()
                times.append((time.perf_counter() - begin, (clock.seconds() - before).tolist()))
    return [dict(zip(("seconds", "stages"), min(times))) for times in found]


# ------------------------------------------------------------------------------------------------------------ showing


def line(found):
    """Of the table: shares of the time of all threads."""
    whole = found["seconds"] * found["threads"]
    shares = [100 * spent / whole for spent in found["stages"]]
    told = [f"{name} {share:.0f}" for name, share in zip(NAMES, shares) if share >= 0.5]
    others = (f"{100 * found[name] / found['seconds']:.0f}" if name in found else "" for name in ("near", "aligned"))
    time_cell = f"{found['seconds'] * 1e6:.3g}"
    return f"| {found['name']} | {time_cell} | {', '.join(told)} | {100 - sum(shares):.0f} | {' | '.join(others)} |"


HEADER = [
    "| workload | µs | stages, % of the time | no stage, % | near, % | aligned, % |", "|---|---:|---|---:|---:|---:|"
]  # fmt: skip


def write(lines, threads):
    text = DOCUMENT.read_text(encoding="utf-8")
    facts = f"With {threads} threads on {machine.cpu_name()}; timing takes some per cent of short calls itself."
    table = "\n".join(["", facts, "", *HEADER, *lines, ""])
    text = with_text_between(text, "<!-- begin: stages -->", table, "<!-- end: stages -->")
    DOCUMENT.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="PATTERN", help="workloads whose name contains or matches it; a,b for several"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring each workload, and each near")
    parser.add_argument("--update", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    print(*HEADER, sep="\n")
    lines = []
    for found in measured(chosen(arguments.only), arguments.threads, arguments.seconds):
        lines.append(line(found))
        print(lines[-1], flush=True)
    if arguments.update:
        write(lines, arguments.threads)


if __name__ == "__main__":
    main()
