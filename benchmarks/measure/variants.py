"""Ways to do the same work, timed in turns in one process: what `caches.py` and `projections.py` are lists of."""

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import sdpa
from benchmarks import compare
from benchmarks.measure import machine, runner
from benchmarks.measure.adapting import Unsupported
from benchmarks.measure.reading import fastest_reading
from benchmarks.report import report, tables

README = Path(__file__).resolve().parents[1] / "README.md"
HEADER = ["", "µs", "median", "times as fast", "µs more", "GB/s"]
WARM_SECONDS = 0.02  # as in worker.py


def nothing():
    pass


@dataclass
class Variant:
    """One way to do the work.  Its calls may be steps of a cycle, of which each has a minimum of its own."""

    label: str
    call: Callable
    before: Callable = nothing  # each call, and not timed
    steps: int = 1  # of a cycle
    read: tuple = ()  # the arrays of keys and values (and scales) that a call reads, all of each
    samples: list = field(default_factory=list, repr=False)

    def over_steps(self, statistic):
        """The mean of a statistic over the steps of the cycle."""
        return statistics.fmean(statistic(self.samples[step :: self.steps]) for step in range(self.steps))

    @property
    def minimum(self):
        return self.over_steps(min)

    @property
    def median(self):
        return self.over_steps(statistics.median)


@dataclass
class Comparison:
    """Several ways to do the same work; the first of `make()` is what the others are compared with."""

    name: str
    title: str
    make: Callable[[], Iterator[Variant]]


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(comparison, rounds, seconds):
    """A dictionary that fits in JSON.  The variants take turns, `rounds` times, in about so many seconds."""
    variants = list(comparison.make())
    readings = {variant.label: reading_of(variant) for variant in variants if variant.read}
    contenders = [*variants, *(reading for reading in readings.values() if reading is not None)]
    each = seconds / (rounds * len(contenders))
    for number in range(rounds):
        turn = number % len(contenders)
        for variant in contenders[turn:] + contenders[:turn]:
            take(variant, each)
    return {
        "name": comparison.name,
        "title": comparison.title,
        "variants": [as_json(variant, readings.get(variant.label)) for variant in variants],
    }


def reading_of(variant):
    """The loop that only reads what the variant reads; None where there is none on this machine."""
    try:
        return Variant("read", fastest_reading(variant.read))
    except Unsupported:
        return None


def take(variant, seconds):
    """Samples of about so many seconds, whole cycles, after some that only wake the threads."""
    before, call, clock = variant.before, variant.call, time.perf_counter
    for limit, samples in ((min(seconds, WARM_SECONDS), []), (seconds, variant.samples)):
        gc.disable()
        end = clock() + limit
        while True:
            for _ in range(variant.steps):
                before()
                start = clock()
                call()
                samples.append(clock() - start)
            if clock() >= end:
                break
        gc.enable()


def as_json(variant, reading):
    known = {
        "label": variant.label,
        "minimum": variant.minimum,
        "median": variant.median,
        "samples": len(variant.samples),
    }
    if reading is not None:
        nbytes = sum(array.nbytes for array in variant.read)
        known |= {"bytes": nbytes, "rate": nbytes / variant.minimum, "read_rate": nbytes / reading.minimum}
    return known


# ---------------------------------------------------------------------------------------------------------- reporting


def rows_of(measured):
    base = measured["variants"][0]["minimum"]
    for index, variant in enumerate(measured["variants"]):
        minimum = variant["minimum"]
        compared = [f"{base / minimum:.2f}", f"{(minimum - base) * 1e6:+.1f}"] if index else ["", ""]
        rates = f"{variant['rate'] / 1e9:.0f} of {variant['read_rate'] / 1e9:.0f}" if "rate" in variant else ""
        yield [variant["label"], microseconds(minimum), microseconds(variant["median"]), *compared, rates]


def microseconds(seconds):
    return f"{seconds * 1e6:.1f}"


def text_table(measured):
    return f"{measured['title']}\n{tables.text([HEADER, *rows_of(measured)])}"


def markdown_table(measured):
    return f"**{measured['title']}**\n\n{tables.markdown([HEADER, *rows_of(measured)])}"


def markdown(measured):
    return "\n\n".join([*map(markdown_table, measured["comparisons"]), facts(measured)])


def facts(measured):
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return (
        f"{measured['date']}, commit {measured['commit']}, kernel {measured['kernel']}, {measured['compiler']}; "
        f"{measured['cpu']}, {measured['threads']} threads; {versions}."
    )


def selected(comparisons, patterns):
    chosen = [one for one in comparisons if patterns is None or any(part in one.name for part in patterns.split(","))]
    if not chosen:
        raise SystemExit(f"no comparison matches {patterns!r}; there are: {', '.join(one.name for one in comparisons)}")
    return chosen


def measure_all(chosen, rounds, seconds):
    """Everything known, as a dictionary that fits in JSON."""
    done = []
    with runner.progress_line(sys.stderr) as progress:
        for comparison in chosen:
            progress(comparison.name)
            done.append(measure(comparison, rounds, seconds / len(chosen)))
    return {
        "date": datetime.date.today().isoformat(),
        "commit": compare.first_line("git", "describe", "--always", "--dirty", "--tags"),
        "compiler": compare.first_line("cc", "--version"),
        "kernel": sdpa.build_info()["kernel"],
        "cpu": machine.cpu_name(),
        "threads": sdpa.build_info()["usable_cpus"],
        "versions": compare.versions([]),
        "comparisons": done,
    }


def parse_arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PART", help="comparisons whose name contains it; a,b for several")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=100, help="for timing, preparation not counted (about)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--update", action="store_true", help="write the tables into benchmarks/README.md")
    return parser.parse_args()


def main(comparisons, command, description):
    """The command line of a module of comparisons, run as `python -m {command}`."""
    arguments = parse_arguments(description)
    measured = measure_all(selected(comparisons, arguments.only), arguments.rounds, arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1))
    print("\n\n".join([*map(text_table, measured["comparisons"]), facts(measured)]))
    if arguments.update:
        document = README.read_text(encoding="utf-8")
        begin, end = f"<!-- begin: python -m {command} --update -->", f"<!-- end: {command} -->"
        README.write_text(report.with_text_between(document, begin, markdown(measured), end), encoding="utf-8")
