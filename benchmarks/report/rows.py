"""What result files say, a row for each workload; several files as one."""

import json
import math
from typing import NamedTuple

from benchmarks.measure.libraries import OURS, READ, library_of

BEST_KERNEL = "default"  # where none was forced
REST = " (the rest)"  # behind a commit: all workloads that are not of a later run
ENDED = "its process ended"  # so begins what is told of an implementation that crashed


class Row(NamedTuple):
    """One workload; results are dictionaries as `compare` writes them, None where there is none."""

    name: str
    bound: float
    ours: dict | None
    reading: dict | None  # of the loop that only reads K and V
    peers: list[dict]  # the fastest first, wrong ones among them
    read_bytes: int | None = None

    @property
    def right(self):
        """The peers that count."""
        return [result for result in self.peers if is_right(result)]

    @property
    def best(self):
        return next(iter(self.right), None)

    @property
    def share(self):
        return self.bound / self.ours["minimum"] if self.ours else math.nan

    @property
    def lead(self):
        return speed_up(self.ours, self.best)

    @property
    def libraries(self):
        """{library: the best result of its implementations}."""
        return {library_of(result["implementation"]): result for result in reversed(self.right)}


def is_right(result):
    """Whether the error is one that passes; that which is not a number does not."""
    return result["error"] <= result["allowed"]


def speed_up(ours, theirs):
    return theirs["minimum"] / ours["minimum"] if ours and theirs else math.nan


def rows_of(report):
    by_workload = {name: {} for name in report["bounds"]}
    for result in report["results"]:
        if "minimum" in result and result["workload"] in by_workload:
            by_workload[result["workload"]][result["implementation"]] = result
    rows = []
    for name, results in by_workload.items():
        ours, reading = results.pop(OURS, None), results.pop(READ, None)
        peers = sorted(results.values(), key=lambda result: result["minimum"])
        rows.append(Row(name, report["bounds"][name], ours, reading, peers, report.get("read_bytes", {}).get(name)))
    return rows


def joined(reports):
    """Several result files as one; a workload in more than one counts as in the last, and so do sweeps and memory.  Of
    several commits each is named, with the kinds of workloads that are of the later ones."""
    total = {}
    for report in reports:
        kept = [result for result in total.get("results", []) if result["workload"] not in report.get("bounds", {})]
        if total.get("bounds") and report.get("bounds") and report["commit"] != total["commit"]:
            kinds = sorted({name.partition("-")[0] for name in report["bounds"]})
            rest = total["commit"].removesuffix(REST) + REST
            report = {**report, "commit": f"{report['commit']} ({', '.join(kinds)}), {rest}"}
        parts = {part: {**total.get(part, {}), **report.get(part, {})} for part in ("bounds", "read_bytes", "versions")}
        total = {**total, **report, **parts, "results": kept + report.get("results", [])}
    return total


def geometric_mean(values):
    known = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(sum(known) / len(known)) if known else math.nan


def read(files):
    """Result files as one report."""
    return joined(list(map(read_one, files)))


def read_one(file):
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} cannot be read: {error}") from None
    if not isinstance(report, dict) or not {"bounds", "sweeps"} & report.keys():
        raise SystemExit(f"{file} is no result file: it has neither bounds nor sweeps")
    return report
