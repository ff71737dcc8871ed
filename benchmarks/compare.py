"""Compare this library with its peers and with the bound of the machine.  README.md says how it measures.

python -m benchmarks.compare --only prefill,decode --peers torch,ort_attn --seconds 30
"""

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine, memory, report, runner, tables, workloads
from benchmarks.peers import PEERS, select_peers
from benchmarks.reading import READ


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="PATTERN", help="workloads whose name contains or matches it; a,b for several"
    )
    parser.add_argument(
        "--peers", default="*", help="peers, libraries or patterns, comma-separated; '' for none (default: all)"
    )
    parser.add_argument("--without-sdpa", action="store_true", help="measure the peers alone")
    parser.add_argument("--kernel", help="force a kernel of sdpa, as SDPA_KERNEL does")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60, help="for timing, preparation not counted (about)")
    parser.add_argument("--mem", action="store_true", help="also the memory of a call, in a table of its own")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args()


def implementations(arguments):
    ours = [] if arguments.without_sdpa else ["sdpa"]
    return [*ours, READ, *select_peers(arguments.peers)]


def compare(arguments):
    """Measure, and return everything known as a dictionary that fits in JSON."""
    names = implementations(arguments)
    environments = {"sdpa": {"SDPA_KERNEL": arguments.kernel}} if arguments.kernel else {}
    chosen = workloads.select(arguments.only)
    with (
        runner.progress_line(sys.stderr) as progress,
        runner.Comparison(chosen, names, environments, progress) as run,
    ):
        run.prepare()
        here = machine.measure(arguments.kernel)
        run.measure(arguments.rounds, arguments.seconds)
        here = here.best_of(machine.measure(arguments.kernel))
        results = [result.as_json() for row in run.results.values() for result in row.values()]
    if arguments.mem:
        with runner.progress_line(sys.stderr) as progress:
            memory.add_to(results, progress)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "compiler": first_line("cc", "--version"),
        "kernel": arguments.kernel or "default",
        "versions": versions(names),
        "machine": here.describe(),
        "bounds": {w.name: w.bound(here, read_seconds(run.results[w.name])) for w in chosen},
        "kv_bytes": {w.name: w.kv_bytes for w in chosen if read_seconds(run.results[w.name]) is not None},
        "results": results,
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
    done = subprocess.run(command, cwd=runner.ROOT, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] or "unknown"


def main():
    arguments = parse_arguments()
    runner.end_workers_on_termination()
    measured = compare(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1))
    if arguments.markdown:
        sections = [report.markdown_table(measured), *memory.sections(measured["results"], tables.markdown)]
        arguments.markdown.write_text("\n".join(sections))
    print(report.text_table(measured), *memory.sections(measured["results"], tables.text), sep="\n\n")


if __name__ == "__main__":
    main()
