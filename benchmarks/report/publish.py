"""Puts measured numbers into the documents: README.md, benchmarks/README.md, benchmarks/results.md and docs/.

python -m benchmarks.report.publish RUN.json [SWEEPS.json ...]       # of runs and of sweeps; later ones win
python -m benchmarks.report.publish AVX2.json                        # of one with --kernel avx2: its own results
python -m benchmarks.report.publish docs/speed.json docs/sweeps.json # after a change here: the numbers shown now
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import chart, figures, page, report, rows
from sdpa._report import drawing
from sdpa._report.svg import picture

ROOT = Path(__file__).resolve().parents[2]
CHARTS = "docs/charts"


def documents(measured):
    """{path: text} of all that shows these numbers."""
    if measured["kernel"] != rows.BEST_KERNEL:
        return documents_of_kernel(measured, rows.read([ROOT / "docs/speed.json"]))

    def current(path):
        return (ROOT / path).read_text(encoding="utf-8")

    run = {name: value for name, value in measured.items() if name != "sweeps"}
    charts = {f"{CHARTS}/{name}.svg": drawn(figure, measured) for name, figure in figures_of(measured).items()}
    return {
        "README.md": chart.with_numbers(current("README.md"), measured),
        "docs/speed.svg": chart.svg(measured),
        "docs/speed.json": chart.one_result_a_line(run),
        **({"docs/sweeps.json": as_json({"sweeps": measured["sweeps"]})} if "sweeps" in measured else {}),
        **charts,
        "docs/speed.html": page.page(measured),
        "benchmarks/results.md": results(measured),
        "benchmarks/README.md": with_results(current("benchmarks/README.md"), measured),
    }


def documents_of_kernel(measured, best):
    """The same for a run with a forced kernel: `best` is the published one without."""
    name, beside = measured["kernel"], report.beside(measured, best)
    text = f"{results(measured)}\n## Beside the best kernel of this CPU\n\n{beside.caption}\n\n"
    return {
        f"docs/speed-{name}.json": chart.one_result_a_line(measured),
        f"benchmarks/results-{name}.md": f"{text}{report.as_markdown(beside)}\n",
    }


def as_json(value):
    return json.dumps(value, indent=1) + "\n"


def figures_of(measured):
    return {**figures.shares(measured), **figures.leads(measured), **figures.lines(measured)}


def drawn(figure, measured):
    with drawing.style():
        return picture(figure.draw(measured), figure.caption)


def results(measured):
    """results.md: every number."""
    return "\n".join(
        [
            "# Results",
            "",
            "Made by `python -m benchmarks.report.publish`, see [README.md](README.md#results).",
            "",
            *(f"* {fact}" for fact in report.facts(measured)),
            "",
            "## Against each library",
            "",
            report.as_markdown(report.means(measured)),
            "",
            "## Workloads",
            "",
            "Milliseconds, the shortest of all calls.",
            "",
            report.as_markdown(report.details(measured), left=(0, 6, 10)),
            "",
            "## Errors",
            "",
            report.errors(measured).caption,
            "",
            report.as_markdown(report.errors(measured)),
            "",
            "## Targets",
            "",
            report.as_markdown(report.aims(measured), left=(0, 7)),
            "",
        ]
    )


def with_results(readme, measured):
    """The text of benchmarks/README.md with these numbers in their place."""
    losses = report.losses(measured)
    pictures = (f"![{name}](../{CHARTS}/{name}.svg)\n\n{one.caption}" for name, one in figures_of(measured).items())
    parts = [
        "\n".join(f"* {fact}" for fact in report.facts(measured)),
        report.as_markdown(report.means(measured)),
        folded("All times", report.times(measured)),
        *pictures,
        "### Where it loses",
        report.as_markdown(losses, left=(0, 7, 8)) if losses.rows else "Nowhere in this run.",
    ]
    return report.with_text_between(readme, chart.BEGIN, "\n\n".join(parts), chart.END)


def folded(title, table):
    return f"<details><summary>{title}</summary>\n\n{table.caption}\n\n{report.as_markdown(table)}\n\n</details>"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    measured = rows.read(parser.parse_args(arguments).files)
    if not measured["bounds"]:
        parser.error("none of the files is of benchmarks.compare")
    if not drawing.available():
        parser.error("the charts need matplotlib: pip install -e '.[bench]'")
    (ROOT / CHARTS).mkdir(parents=True, exist_ok=True)
    texts = documents(measured)
    drawn = any(path.startswith(CHARTS) for path in texts)
    for old in (ROOT / CHARTS).glob("*.svg"):
        if drawn and f"{CHARTS}/{old.name}" not in texts:
            old.unlink()
    for path, text in texts.items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
