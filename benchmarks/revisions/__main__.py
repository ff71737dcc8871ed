"""Whether a change makes this library faster: two revisions, measured side by side.  ../README.md says how.

python -m benchmarks.revisions BASE [HEAD] --only prefill,decode-4k --markdown change.md

HEAD: what is compared with BASE; the working tree, committed or not, if left out.
"""

import argparse
import datetime
import itertools
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import compare, workloads
from benchmarks.measure import machine, oracle, runner
from benchmarks.measure.adapting import THREADS
from benchmarks.report import report, tables
from benchmarks.revisions import building, paired

BASE, AGAIN, NEW = "base", "again", "new"  # the base runs twice: how far it is from itself is the noise
ROLES = {BASE: "BASE", AGAIN: "BASE", NEW: "HEAD"}
ORDERS = list(itertools.permutations(ROLES))
ROUNDS = 2  # in the same processes; other processes find more, as their memory lies elsewhere
HEADER = ["", "BASE ms", "HEAD ms", "HEAD / BASE", "interval", "BASE / BASE", "interval", ""]
TYPICAL = (  # each engine, dtype and kind of work once, and what is short, where the calls themselves count
    "prefill-512-full-fp32,prefill-2048-causal-fp32,gqa-1024-d128-causal-fp32,clip-77-fp32,hdim-80-fp32,"
    "mask-bool-fp32,mask-add-fp32,window-512-fp32,prefill-2048-full-fp64,prefill-512-causal-bf16,"
    "prefill-512-causal-fp16,chunk-16-fp32,decode-4k-fp32,decode-4k-bf16,decode-short-fp16,small-32-fp32,tiny-fp32,"
    "bwd-1024-causal-fp32,bwd-bert-bf16,layer-b8-128-fp32,linear-1-768x3072-fp32,linear-1024-gelu-bf16,"
    "norm-layer-1024x768-fp32,model-minilm-1x16-fp32"
)

# ---------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Row:
    """A workload: seconds of the fastest call, of each of the processes that a role had; `trouble` says why none."""

    workload: workloads.Workload
    minima: dict = field(default_factory=lambda: {role: [] for role in ROLES})
    trouble: str = ""
    disturbed: int = 0

    @property
    def ratios(self):
        """HEAD / BASE, a number for each start of the processes.  The two of the base, as good as each other, count
        together."""
        both = np.sqrt(np.multiply(self.minima[BASE], self.minima[AGAIN]))
        return (np.array(self.minima[NEW]) / both).tolist()

    @property
    def controls(self):
        """BASE / BASE."""
        return np.divide(self.minima[AGAIN], self.minima[BASE]).tolist()

    @property
    def done(self):
        return not self.trouble and bool(self.minima[NEW])


def measure(folders, chosen, starts, seconds, progress):
    """A Row per workload; `folders`: role to the folder of its revision.

    All processes are started anew `starts` times.  Each workload is then prepared and timed in ROUNDS rounds, in an
    order that changes, in about so many seconds altogether.
    """
    rows = [Row(workload) for workload in chosen]
    each = float(np.clip(seconds / (starts * ROUNDS * len(ROLES) * len(rows)), *runner.SLICE_SECONDS))
    with tempfile.TemporaryDirectory() as checks:
        for start in range(starts):
            processes = {role: process_of(folder) for role, folder in folders.items()}
            try:
                for role, process in processes.items():
                    expect_origin(process, folders[role])
                for row in rows:
                    progress(f"start {start + 1} of {starts}: {row.workload.name}")
                    time_row(row, processes, Path(checks), orders_from(start), each)
            finally:
                for process in processes.values():
                    process.close()
    return rows


def orders_from(start):
    """In which order the roles are timed, round by round, such that all orders take turns over the starts."""
    return itertools.islice(itertools.cycle(ORDERS), start * ROUNDS, None)


def process_of(folder):
    """A worker that imports `sdpa` from the folder, and the benchmarks from here."""
    path = os.pathsep.join(filter(None, [str(runner.ROOT), os.environ.get("PYTHONPATH")]))
    return runner.Process("sdpa", {"PYTHONPATH": path}, folder)


def expect_origin(process, folder):
    answer = process.ask(do="origin")
    if answer.get("origin") != str(folder.resolve()):
        raise SystemExit(f"the library of {folder} cannot be measured: {answer}")


def time_row(row, processes, checks, orders, seconds):
    """Add the minimum of each process, unless the workload is in trouble."""
    if not row.trouble:
        prepare(row, processes, check_of(row.workload, checks))
    if row.trouble:
        return
    samples = {role: [] for role in processes}
    for order in itertools.islice(orders, ROUNDS):
        for role in order:
            answer, disturbed = runner.quiet_slice_of(processes[role], row.workload, seconds)
            row.disturbed += disturbed
            row.trouble = row.trouble or trouble_of(role, answer)
            samples[role] += answer.get("samples", [])
    if not row.trouble:
        for role, found in samples.items():
            row.minima[role].append(min(found))


def check_of(workload, folder):
    """The file of what the workload must give, made when it is first asked for."""
    path = folder / f"{workload.name}.npz"
    if not path.exists():
        oracle.save(path, workload.expected())
    return str(path)


def prepare(row, processes, check):
    for role, process in processes.items():
        answer = process.ask(do="prepare", workload=row.workload.name, check=check)
        row.trouble = row.trouble or trouble_of(role, answer)


def trouble_of(role, answer):
    """Why an answer of a role cannot be used, or nothing."""
    if "unsupported" in answer:
        return f"not in {ROLES[role]}: {answer['unsupported']}"
    if not answer.get("error", 0) <= answer.get("allowed", 0):
        return f"WRONG in {ROLES[role]}: error {answer['error']:.1e}, allowed {answer['allowed']:.1e}"
    return ""


# ---------------------------------------------------------------------------------------------------------- reporting


def as_json(revisions, rows, starts):
    """Everything known, as a dictionary that fits in JSON."""
    return {
        "date": datetime.date.today().isoformat(),
        "base": revisions[BASE].name,
        "head": revisions[NEW].name,
        "starts": starts,
        "cpu": machine.cpu_name(),
        "threads": THREADS,
        "compiler": compare.first_line("cc", "--version"),
        "versions": compare.versions([]),
        "rows": [
            {"workload": row.workload.name, "minima": row.minima, "disturbed": row.disturbed, "trouble": row.trouble}
            for row in rows
        ],
        "verdicts": {row.workload.name: verdict(row.ratios, row.controls) for row in rows if row.done},
    }


def verdict(ratios, controls):
    ratio = paired.ratio_of(ratios)
    if not paired.differs(ratio, paired.ratio_of(controls)):
        return ""
    return "faster" if ratio.median < 1 else "slower"


def table(rows):
    """The rows of a table, its header among them."""
    done = [row for row in rows if row.done]
    yield HEADER
    for row in done:
        times = min(row.minima[BASE] + row.minima[AGAIN]), min(row.minima[NEW])
        yield [row.workload.name, *map(report.milliseconds, times), *cells(row.ratios, row.controls)]
    if done:
        yield ["geometric mean", "", "", *cells(means([r.ratios for r in done]), means([r.controls for r in done]))]


def means(ratios_of_rows):
    """For each start, the geometric mean over the workloads."""
    return [report.geometric_mean(ratios) for ratios in zip(*ratios_of_rows, strict=True)]


def cells(ratios, controls):
    both = [paired.ratio_of(ratios), paired.ratio_of(controls)]
    return [*itertools.chain(*map(ratio_cells, both)), verdict(ratios, controls)]


def ratio_cells(ratio):
    return [f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]


def facts(measured):
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    starts = measured["starts"]
    covers = paired.covered(starts, paired.rank_of(starts))
    disturbed = sum(row["disturbed"] for row in measured["rows"])
    return [
        f"HEAD {measured['head']} against BASE {measured['base']}: time of HEAD / time of BASE, below 1 is faster",
        f"median and {covers:.0%} interval of {starts} starts of all processes; faster or slower: the interval leaves "
        "out 1, and the median is farther from 1 than the interval of BASE against itself",
        f"{measured['date']}, {measured['cpu']}, {measured['threads']} threads, {measured['compiler']}; {versions}; "
        f"{disturbed} slices disturbed by other load",
        *(f"{row['workload']} {row['trouble']}" for row in measured["rows"] if row["trouble"]),
    ]


def text(measured, rows):
    return "\n".join([tables.text(list(table(rows))), "", *facts(measured)])


def markdown(measured, rows):
    return "\n".join([tables.markdown(list(table(rows))), "", *(f"* {fact}" for fact in facts(measured)), ""])


# -------------------------------------------------------------------------------------------------------- the command


def starts_argument(given):
    if int(given) < paired.FEWEST:
        raise argparse.ArgumentTypeError(f"{given} is too few for an interval: at least {paired.FEWEST}")
    return int(given)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit, a branch or a tag")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="another (default: the working tree)")
    parser.add_argument("--only", metavar="PATTERN", default=TYPICAL, help="as for benchmarks.compare; '*' for all")
    parser.add_argument("--starts", type=starts_argument, default=9, help="of the processes of each revision")
    parser.add_argument("--seconds", type=float, default=90, help="for timing, preparation not counted (about)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    runner.end_workers_on_termination()
    chosen = workloads.select(arguments.only)
    with runner.progress_line(sys.stderr) as progress:
        base, new = (building.revision(name, progress) for name in (arguments.base, arguments.head))
        revisions = {BASE: base, AGAIN: base, NEW: new}
        folders = {role: revision.folder for role, revision in revisions.items()}
        rows = measure(folders, chosen, arguments.starts, arguments.seconds, progress)
    measured = as_json(revisions, rows, arguments.starts)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(markdown(measured, rows))
    print(text(measured, rows))


if __name__ == "__main__":
    main()
