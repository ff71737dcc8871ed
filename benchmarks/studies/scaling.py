"""How busy up to 192 threads would be, and how much memory they would ask for: a simulation.

python -m benchmarks.studies.scaling                            # all workloads, a minute or two
python -m benchmarks.studies.scaling --only decode,bwd --threads 16,48
python -m benchmarks.studies.scaling --update                   # writes tables and chart into docs/explanation

The library cuts each workload into units, as for a call with so many threads, and says how much work is in each
(`_core.rehearse`): nothing is planned here.  What is simulated is who takes which unit: as OpenMP hands them out, with
threads that are equally fast.  One call on one thread is measured, for the seconds that the work stands for.
"""

import argparse
import heapq
import os
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import workloads
from benchmarks.measure import machine
from benchmarks.measure.libraries import OURS
from benchmarks.peers import IMPLEMENTATIONS, adapter_of
from benchmarks.report.report import with_text_between
from sdpa import _core
from sdpa._report import drawing, panels
from sdpa._report.svg import picture
from sdpa._runtime import threads as threads_module

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/explanation/scaling.md"
CHART = DOCUMENT.with_suffix(".svg")
THREADS = 1, 2, 4, 8, 16, 32, 64, 96, 128, 192
RATES = 50, 100, 200, 400, 800  # of memory, in GB/s: what one to some tens of channels give
ENOUGH = 50e-6  # seconds of work for each thread: with less, starting and ending a call is what counts
AIMS = ((64, 0.90), (192, 0.80))  # up to so many threads such a share, where there is enough to do
WITHOUT = ("hf-",)  # these need torch, and are attention and projections like the others
HALF = ("prefill-", "gqa-", "decode-", "chunk-", "speculate-", "bwd-", "linear-")  # shown in bfloat16, too
CHARTED = ("decode-4k-bf16", "decode-32k-bf16", "prefill-512-causal-fp32", "prefill-2048-causal-fp32",
           "bwd-1024-causal-fp32", "model-bert-base-8x128-fp32")  # fmt: skip


class Scaled(NamedTuple):
    workload: workloads.Workload
    seconds: float  # of a call on one thread, measured
    busy: dict  # {threads: share of the time in which they have work}

    def enough(self, threads):
        return self.seconds / threads >= ENOUGH

    def time(self, threads):
        """Seconds that so many threads would take, each as fast as one alone."""
        return self.seconds * self.busy[1] / (threads * self.busy[threads])

    def demand(self, threads):
        """Bytes a second that they ask for, if each byte is read or written once."""
        return self.workload.bytes / self.time(threads)

    def missed(self):
        """The numbers of threads for which an aim is missed."""
        return [n for n in self.busy if self.enough(n) and self.busy[n] < aim(n)]


def aim(threads):
    return next((share for most, share in AIMS if threads <= most), 0)


# -------------------------------------------------------------------------------------------------------- simulating


def longest(region):
    """When the last thread ends, in the work of one thread."""
    work = region.work
    if region.threads == 1 or not len(work):
        return work.sum()
    if region.sharing == "equally":
        return max(part.sum() for part in np.array_split(work, region.threads))
    ends = [0.0] * region.threads
    at = 0
    while at < len(work):
        count = region.chunk if region.sharing == "by chunks" else -(-(len(work) - at) // region.threads)
        heapq.heapreplace(ends, ends[0] + work[at : at + count].sum())
        at += count
    return max(ends)


def busy_share(call, threads):
    """Of all loops of a call, one after the other: what is between them is not counted."""
    os.environ["SDPA_NUM_THREADS"] = str(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is computed: arrays hold anything
        regions = _core.rehearse(call)
    total, last = (sum(of(region) for region in regions) for of in (lambda region: region.work.sum(), longest))
    return total / (threads * last) if last else 1.0


def seconds_alone(call, seconds):
    os.environ["SDPA_NUM_THREADS"] = "1"
    call()
    samples, end = [], time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return min(samples)


def scaled(workload, counts, seconds):
    call, _ = adapter_of(IMPLEMENTATIONS[OURS], workload)(workload)
    return Scaled(workload, seconds_alone(call, seconds), {threads: busy_share(call, threads) for threads in counts})


def chosen(only):
    def wanted(workload):
        return not workload.name.startswith(WITHOUT) and (
            only or workload.dtype_name == "fp32" or (workload.dtype_name == "bf16" and workload.name.startswith(HALF))
        )

    return [workload for workload in workloads.select(only) if wanted(workload)]


# ---------------------------------------------------------------------------------------------------------- showing


def share_table(results, counts):
    yield f"| workload | ms on one thread | {' | '.join(map(str, counts))} |"
    yield f"|---|---:{'|---:' * len(counts)}|"
    for one in results:
        cells = (format_share(one, threads) for threads in counts)
        yield f"| {one.workload.name} | {one.seconds * 1e3:.3g} | {' | '.join(cells)} |"


def format_share(one, threads):
    text = f"{one.busy[threads]:.2f}"
    if not one.enough(threads):
        return f"({text})"
    return f"**{text}**" if one.busy[threads] < aim(threads) else text


def memory_table(results, counts):
    """Of the workloads of which one thread asks for a hundredth of the smallest rate, or more."""
    shown = [threads for threads in counts if threads in (1, 16, 64, 192)]
    yield (
        f"| workload | MB | {' | '.join(f'GB/s of {n}' for n in shown)} "
        f"| {' | '.join(f'threads for {rate} GB/s' for rate in RATES)} |"
    )
    yield f"|---|---:{'|---:' * (len(shown) + len(RATES))}|"
    for one in sorted(results, key=lambda one: -one.demand(1)):
        if one.demand(1) < RATES[0] * 1e7:
            continue
        demands = (f"{one.demand(n) / 1e9:.3g}" for n in shown)
        enough = (f"{max(1, np.ceil(rate * 1e9 / one.demand(1))):.0f}" for rate in RATES)
        yield (
            f"| {one.workload.name} | {one.workload.bytes / 1e6:.3g} | {' | '.join(demands)} | {' | '.join(enough)} |"
        )


def draw(results, counts):
    figure, axes = drawing.panel(560, 320)
    shown = [one for one in results if one.workload.name in CHARTED]
    for one, colour in zip(shown, drawing.COLOURS):
        enough = [n for n in counts if one.enough(n)]
        axes.plot(counts, [one.busy[n] for n in counts], color=colour, linewidth=0.8, linestyle=":")
        axes.plot(enough, [one.busy[n] for n in enough], color=colour, marker="o", markersize=3,
                  label=one.workload.name)  # fmt: skip
    axes.set(xlabel="threads", ylabel="share of the time with work", ylim=(0, 1.03))
    panels.mark_sizes(axes, counts)
    panels.legend_above(figure, 3)
    return figure


CAPTION = "Share of the time in which threads have work, simulated; dotted where a thread has less than 50 µs of it"


def write(results, counts):
    """The tables and the chart, into the documentation."""
    text = DOCUMENT.read_text(encoding="utf-8")
    facts = f"Rates are those of one core of {machine.cpu_name()}, each call alone on it."
    for name, lines in {
        "shares": ["", f"![{CAPTION}]({CHART.name})", "", *share_table(results, counts), ""],
        "memory": ["", facts, "", *memory_table(results, counts), ""],
    }.items():
        text = with_text_between(text, f"<!-- begin: {name} -->", "\n".join(lines), f"<!-- end: {name} -->")
    DOCUMENT.write_text(text, encoding="utf-8")
    with drawing.style():
        CHART.write_text(picture(draw(results, counts), CAPTION), encoding="utf-8")


def numbers(text):
    return tuple(sorted({1, *map(int, text.split(","))}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="PATTERN", help="workloads whose name contains or matches it; a,b for several"
    )
    parser.add_argument("--threads", type=numbers, default=THREADS, metavar="N,...", help=f"default {THREADS}")
    parser.add_argument("--seconds", type=float, default=0.2, help="of measuring each workload")
    parser.add_argument("--update", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)} and its chart")
    arguments = parser.parse_args()
    threads_module.MOST = max(arguments.threads)  # nobody starts them
    results = []
    for workload in chosen(arguments.only):
        results.append(scaled(workload, arguments.threads, arguments.seconds))
        header, ruler, *rows = share_table(results, arguments.threads)
        print(*([header, ruler] if len(rows) == 1 else []), rows[-1], sep="\n", flush=True)
    print("", *memory_table(results, arguments.threads), sep="\n")
    for one in results:
        for threads in one.missed():
            print(f"below the aim: {one.workload.name}, {threads} threads: {one.busy[threads]:.3f}")
    if arguments.update:
        write(results, arguments.threads)


if __name__ == "__main__":
    main()
