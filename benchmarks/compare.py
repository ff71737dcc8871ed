"""Compare this library with its peers and with the bound of the machine.  benchmarks/README.md says how it measures.

python -m sdpa bench --only prefill,decode --peers torch,ort_attn --seconds 30
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sdpa
from benchmarks import workloads
from benchmarks.measure import limits, machine, memory, runner
from benchmarks.measure.libraries import OURS, READ
from benchmarks.peers import PEERS, select_peers
from benchmarks.report import page, report, rows, tables
from benchmarks.studies import sweeps
from sdpa.lab._command import file_to_write


def parse_arguments(arguments, prog):
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help="workloads whose name contains or matches it; a,b for several"
    )
    parser.add_argument("--dtypes", type=dtypes_named, metavar="DTYPE,...", help=f"of {', '.join(workloads.DTYPES)}")
    parser.add_argument(
        "--peers",
        type=select_peers,
        default=list(PEERS),
        metavar="PEER,...",
        help=f"peers, libraries or patterns, '' for none (default: all): {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--from", nargs="+", type=Path, metavar="FILE", dest="files", help="measure nothing: show what --json wrote"
    )
    parser.add_argument("--without-sdpa", action="store_true", help="measure the peers alone")
    parser.add_argument(
        "--kernel",
        type=kernel_named,
        default=os.environ.get("SDPA_KERNEL") or None,
        help=f"force a kernel of sdpa, as SDPA_KERNEL does: {', '.join(sdpa.kernels())}; with avx2 peers that can be "
        "are kept to AVX2, too",
    )
    parser.add_argument("--rounds", type=count, default=5, help="default 5")
    parser.add_argument(
        "--seconds", type=duration, default=60, help="for timing, preparation not counted (about; default 60)"
    )
    parser.add_argument(
        "--sweeps", action="store_true", help=f"also length, head size and more, of {sweeps.PEERS}, in --seconds more"
    )
    parser.add_argument("--mem", action="store_true", help="also the memory of a call, in a table of its own")
    parser.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="all numbers; benchmarks.report.publish reads it"
    )
    parser.add_argument("--markdown", type=file_to_write, metavar="FILE", help="the table of all that was measured")
    parser.add_argument("--html", type=file_to_write, metavar="FILE", help="a page with charts")
    return parser.parse_args(arguments)


def dtypes_named(text):
    names = text.split(",")
    unknown = [name for name in names if name not in workloads.DTYPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(workloads.DTYPES)}")
    return names


def kernel_named(text):
    if text not in sdpa.kernels():
        raise argparse.ArgumentTypeError(
            f"no kernel named {text!r} on this CPU; there are: {', '.join(sdpa.kernels())}"
        )
    return text


def count(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def duration(text):
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no duration")
    return float(text)


def implementations(arguments):
    return [*([] if arguments.without_sdpa else [OURS]), READ, *arguments.peers]


def compare(arguments):
    """Measure, and return everything known as a dictionary that fits in JSON."""
    names = implementations(arguments)
    environments = limits.environments(arguments.kernel, names)
    chosen = workloads.select(arguments.only, arguments.dtypes)
    known = about(names, arguments.kernel)
    results, left = {}, arguments.seconds
    here = machine.measure(arguments.kernel)
    with runner.progress_line(sys.stderr) as progress:
        for batch in workloads.batches(chosen):
            seconds = arguments.seconds * len(batch) / len(chosen)
            left -= seconds
            with runner.Comparison(batch, names, environments, progress) as run:
                run.prepare(later=seconds + left)
                run.measure(arguments.rounds, seconds, later=left)
            results |= run.results
        here = here.best_of(machine.measure(arguments.kernel))
        every = [result.as_json() for row in results.values() for result in row.values()]
        if arguments.mem:
            memory.add_to(every, progress)
    return {
        **known,
        "machine": here.describe(),
        "bounds": {w.name: w.bound(here, read_seconds(results[w.name])) for w in chosen},
        "read_bytes": {w.name: w.read_bytes for w in chosen if read_seconds(results[w.name]) is not None},
        "results": every,
    }


def about(names, kernel=None):
    """When, what and where; the load is that of the last minute before."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "compiler": first_line("cc", "--version"),
        "kernel": kernel or rows.BEST_KERNEL,
        "limits": limits.describe(kernel, names),
        "versions": versions(names),
        "cpu": f"{machine.cpu_name()}, {runner.THREADS} threads",
        "load": os.getloadavg()[0],
    }


def read_seconds(results):
    """How long it took to read K and V, where that was measured."""
    return results[READ].minimum if results[READ].samples else None


def versions(names):
    """Of Python and of what the peers come from; this library's own is the commit."""
    distributions = importlib.metadata.packages_distributions()
    known = {"python": sys.version.split()[0]}
    for library in ["numpy", *(PEERS[name].library for name in names if name in PEERS)]:
        # Of one module there may be several distributions, such as those with and without CUDA.
        found = distributions.get(library)
        known[library] = importlib.metadata.version(found[0]) if found else "not installed"
    return known


def commit():
    return first_line("git", "describe", "--always", "--dirty", "--tags")


def first_line(*command):
    try:
        done = subprocess.run(command, cwd=runner.ROOT, capture_output=True, text=True, check=False)
    except OSError:  # there is no such command
        return "unknown"
    return done.stdout.partition("\n")[0] or "unknown"


def measure(arguments):
    """Everything that is asked for."""
    measured = compare(arguments)
    return with_sweeps(measured, arguments) if arguments.sweeps else measured


def with_sweeps(measured, arguments):
    peers = [name for name in arguments.peers if name in select_peers(sweeps.PEERS)]
    families = sweeps.measure(peers, rounds=3, seconds=arguments.seconds, kernel=arguments.kernel)
    return {**measured, "sweeps": {"about": about([OURS, *peers], arguments.kernel), "families": families}}


def main(arguments=None, prog=None):
    arguments = parse_arguments(arguments, prog)
    runner.end_workers_on_termination()
    measured = rows.read(arguments.files) if arguments.files else measure(arguments)
    if not measured["bounds"]:
        raise SystemExit(f"no file of {', '.join(map(str, arguments.files))} is of benchmarks.compare")
    write(measured, arguments)


def write(measured, arguments):
    """The files that are asked for, and what a terminal shows."""
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(
            "\n".join(sections_of(measured, report.markdown, tables.markdown)), encoding="utf-8"
        )
    if arguments.html:
        arguments.html.write_text(page.page(measured), encoding="utf-8")
    print(*sections_of(measured, report.text, tables.text), sep="\n\n")


def sections_of(measured, report_form, table_form):
    """The tables, that of memory among them if it was measured."""
    return [report_form(measured), *memory.sections(measured["results"], table_form)]


if __name__ == "__main__":
    main()
