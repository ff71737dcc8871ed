"""Turns result files of compare.py into one table.

python -m benchmarks.report a.json b.json [--markdown FILE]
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

OURS, READ = "sdpa", "read"
HEADER = [
    "workload",
    "bound ms",
    "sdpa ms",
    "median",
    "bound/sdpa",
    "GB/s",
    "best peer",
    "ms",
    "speed-up",
    "error",
    "the others",
]


def rows_of(report):
    """One row of HEADER per workload, and the (bound/sdpa, speed-up) pairs that are known."""
    rows, ratios = [], []
    for name, bound in report["bounds"].items():
        measured = [result for result in report["results"] if result["workload"] == name and "minimum" in result]
        results = {result["implementation"]: result for result in measured}
        ours, reading = results.pop(OURS, None), results.pop(READ, None)
        peers = sorted(results.values(), key=lambda r: r["minimum"])
        valid = [result for result in peers if result["error"] <= result["allowed"]]
        best = valid[0] if valid else None
        others = [result for result in peers if result is not best]
        ratio = bound / ours["minimum"] if ours else math.nan
        lead = best["minimum"] / ours["minimum"] if ours and best else math.nan
        ratios.append((ratio, lead))
        rates = rate_cell(report["kv_bytes"][name], ours, reading) if reading else ""
        rows.append([name, milliseconds(bound), *our_cells(ours), fixed(ratio), rates, *best_cells(best), fixed(lead)])
        rows[-1] += [error_cell(ours or best), ", ".join(map(other_cell, others))]
    return rows, ratios


def rate_cell(nbytes, ours, reading):
    """How fast K and V were read: by this library, of what the loop that only reads them reached."""
    rates = [f"{nbytes / result['minimum'] / 1e9:.0f}" if result else "" for result in (ours, reading)]
    return " of ".join(rates).strip()


def our_cells(ours):
    return [milliseconds(ours["minimum"]), milliseconds(ours["median"])] if ours else ["", ""]


def best_cells(best):
    return [best["implementation"], milliseconds(best["minimum"])] if best else ["", ""]


def other_cell(result):
    wrong = "" if result["error"] <= result["allowed"] else f" (error {result['error']:.0e})"
    return f"{result['implementation']} {milliseconds(result['minimum'])}{wrong}"


def error_cell(result):
    if result is None:
        return ""
    return f"{result['error']:.1e}" + ("" if result["error"] <= result["allowed"] else " WRONG")


def milliseconds(seconds):
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def fixed(ratio):
    return "" if math.isnan(ratio) else f"{ratio:.2f}"


def geometric_mean(values):
    known = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(sum(known) / len(known)) if known else math.nan


def total_row(ratios):
    total = [""] * len(HEADER)
    total[0] = "geometric mean"
    total[HEADER.index("bound/sdpa")] = fixed(geometric_mean([ratio for ratio, _ in ratios]))
    total[HEADER.index("speed-up")] = fixed(geometric_mean([lead for _, lead in ratios]))
    return total


def text_table(report):
    rows, ratios = rows_of(report)
    rows = [HEADER, *rows, total_row(ratios)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, "", *facts(report), *failures(report)])


def markdown_table(report):
    rows, ratios = rows_of(report)
    lines = [f"| {' | '.join(row)} |" for row in [HEADER, ["---"] * len(HEADER), *rows, total_row(ratios)]]
    return "\n".join([*(f"* {fact}" for fact in facts(report)), "", *lines, ""])


def facts(report):
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    repeated = sum(result["disturbed"] for result in report["results"])
    return [
        f"{report['date']}, commit {report['commit']}, kernel {report['kernel']}, {report['compiler']}",
        *report["machine"].splitlines(),
        versions,
        f"{repeated} slices disturbed by other load",
    ]


def failures(report):
    """Why our own results are missing, where they are."""
    missing = [r for r in report["results"] if r["implementation"] == OURS and r["unsupported"]]
    return [f"sdpa on {result['workload']}: {result['unsupported']}" for result in missing]


def joined(reports):
    """Several result files as one; a workload in more than one counts as in the last."""
    total = {**reports[-1], "bounds": {}, "kv_bytes": {}, "results": [], "versions": {}}
    for report in reports:
        total["versions"] |= report["versions"]
        kept = [result for result in total["results"] if result["workload"] not in report["bounds"]]
        total["results"] = kept + report["results"]
        total["bounds"] |= report["bounds"]
        total["kv_bytes"] |= report.get("kv_bytes", {})
    return total


def with_text_between(document, begin, text, end):
    """The document with `text` between its lines `begin` and `end`, in place of what is there."""
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document must have the lines {begin!r} and {end!r}, in this order")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report = joined([json.loads(file.read_text()) for file in arguments.files])
    print(text_table(report))
    if arguments.markdown:
        arguments.markdown.write_text(markdown_table(report))


if __name__ == "__main__":
    main()
