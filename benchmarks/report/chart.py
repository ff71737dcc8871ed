"""The chart and the table of the README: docs/speed.svg, and what stands between the two comments that name publish."""

import json
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure.libraries import TITLES, title_of
from benchmarks.report.report import TIMES, with_text_between
from benchmarks.report.rows import rows_of
from benchmarks.workloads import WORKLOADS

BEGIN, END = "<!-- begin: python -m benchmarks.report.publish FILE.json -->", "<!-- end: benchmarks.report.publish -->"

# Heading: {workload: label}.  What was not measured is left out.
CHART = {
    "Every query sees every key": {
        "prefill-512-full-fp32": "512 long",
        "prefill-2048-full-fp32": "2048 long",
        "prefill-4096-d128-full-fp32": "4096 long, D = 128",
        "gqa-1024-d128-full-fp32": "1024 long, 32 heads on 8, D = 128",
        "cross-512x1500-fp32": "448 queries, 1500 keys",
        "prefill-2048-full-fp64": "2048 long, float64",
    },
    "Causal": {
        "prefill-512-causal-fp32": "512 long",
        "prefill-2048-causal-fp32": "2048 long",
        "prefill-4096-d128-causal-fp32": "4096 long, D = 128",
        "long-16384-fp32": "16384 long",
        "gqa-1024-d128-causal-fp32": "1024 long, 32 heads on 8, D = 128",
        "window-512-fp32": "4096 long, window of 512",
        "prefill-2048-causal-fp64": "2048 long, float64",
    },
    "Short sequences": {
        "bert-fp32": "8 of 128, 12 heads",
        "vit-197-fp32": "8 of 197, 12 heads",
        "clip-77-fp32": "8 of 77, 12 heads, causal",
        "cross-77-fp32": "4096 queries, 77 keys, D = 40",
    },
    "Masks": {
        "mask-pad-fp32": "padding, 4 of 384",
        "mask-bool-fp32": "random boolean, 1024 long",
        "mask-add-fp32": "bias, 1024 long",
    },
    "Few queries, D = 128": {
        "decode-4k-fp32": "1 query, 4096 keys, 32 heads on 8",
        "decode-32k-fp32": "1 query, 32768 keys, 32 heads on 8",
        "chunk-16-fp32": "16 queries, 8192 keys, 32 heads on 8",
    },
    "bfloat16": {
        "prefill-2048-full-bf16": "2048 long",
        "prefill-2048-causal-bf16": "2048 long, causal",
        "gqa-1024-d128-causal-bf16": "1024 causal, 32 heads on 8, D = 128",
        "bert-bf16": "8 of 128, 12 heads",
        "mask-bool-bf16": "random boolean mask, 1024 long",
        "decode-32k-bf16": "1 query, 32768 keys, D = 128",
    },
    "float16": {
        "prefill-2048-full-fp16": "2048 long",
        "prefill-2048-causal-fp16": "2048 long, causal",
        "decode-32k-fp16": "1 query, 32768 keys, D = 128",
    },
}
TABLE = [
    "prefill-2048-full-fp32", "prefill-2048-causal-fp32", "gqa-1024-d128-causal-fp32", "window-512-fp32",
    "bert-fp32", "mask-bool-fp32", "prefill-2048-causal-fp64", "decode-4k-fp32", "tiny-fp32",
    "prefill-2048-causal-bf16", "decode-32k-bf16", "prefill-2048-causal-fp16", "decode-32k-fp16",
]  # fmt: skip


class Case(NamedTuple):
    """One workload as measured, in milliseconds; `peer` is "" and its numbers None where there is none."""

    bound: float
    ours: float
    peer: str
    theirs: float | None
    faster: float | None

    @property
    def attained(self):
        return self.bound / self.ours

    @property
    def peer_attained(self):
        return self.bound / self.theirs


def cases_of(measured):
    """{workload: Case} of those that this library was measured on."""
    return {row.name: case_of(row) for row in rows_of(measured) if row.ours}


def case_of(row):
    peer = (title_of(row.best["implementation"]), row.best["minimum"] * 1e3, row.lead) if row.best else ("", None, None)
    return Case(row.bound * 1e3, row.ours["minimum"] * 1e3, *peer)


# ------------------------------------------------------------------------------------------------------- the picture

WIDTH, LEFT, RIGHT, ROW, HEADING = 860, 280, 645, 21, 30  # LEFT and RIGHT: where the share is 0 and 1
STYLE = """
    text { font: 13px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: #24292f }
    .title { font-size: 15px; font-weight: 600 }
    .heading { font-weight: 600 }
    .quiet { fill: #57606a; font-size: 12px }
    .page { fill: #ffffff; stroke: #d0d7de }
    .grid { stroke: #d8dee4 }
    .full { stroke: #8c959f }
    .ours { fill: #3b82c4 }
    .peer { fill: #f59e0b; stroke: #ffffff; stroke-width: 2 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .quiet { fill: #9da7b1 }
      .page { fill: #0d1117; stroke: #30363d }
      .grid { stroke: #262c34 }
      .full { stroke: #6e7681 }
      .ours { fill: #3f87c9 }
      .peer { stroke: #0d1117 }
    }
"""


def share(of_bound):
    """Where a share of the bound lies, in pixels; the picture ends at 1.1."""
    return round(LEFT + (RIGHT - LEFT) * min(of_bound, 1.1), 1)


def text(x, y, content, style="", anchor="start"):
    kind = f' class="{style}"' if style else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}"{kind}{where}>{escape(content)}</text>'


def legend(y):
    return [
        f'<rect class="ours" x="{LEFT}" y="{y - 10}" width="22" height="11" rx="2"/>',
        text(LEFT + 29, y, "sdpa"),
        f'<circle class="peer" cx="{LEFT + 88}" cy="{y - 4.5}" r="6"/>',
        text(LEFT + 100, y, "the best of the others"),
        text(WIDTH - 20, y, "their time ÷ sdpa's", "quiet", "end"),
    ]


def bar(y, label, case):
    """One line: how much of the bound is attained, by this library and by the best of the others."""
    length = share(case.attained) - LEFT
    parts = [
        text(LEFT - 12, y, label, anchor="end"),
        f'<rect class="ours" x="{LEFT}" y="{y - 11}" width="{length:.1f}" height="14" rx="2"/>',
    ]
    if case.peer:
        parts += [
            f'<circle class="peer" cx="{share(case.peer_attained)}" cy="{y - 4}" r="6"/>',
            text(WIDTH - 130, y, f"{case.faster:.2f} {TIMES}", anchor="end"),
            text(WIDTH - 20, y, case.peer, "quiet", "end"),
        ]
    return parts


def svg(measured):
    cases = cases_of(measured)
    groups = {
        heading: {name: label for name, label in rows.items() if name in cases} for heading, rows in CHART.items()
    }
    parts, y = [], 84
    for heading, rows in groups.items():
        if not rows:
            continue
        y += HEADING
        parts.append(text(20, y, heading, "heading"))
        for name, label in rows.items():
            y += ROW
            parts += bar(y, label, cases[name])
    bottom = y + 10
    for percent in range(0, 101, 25):
        x, style = share(percent / 100), "full" if percent in (0, 100) else "grid"
        parts.insert(0, f'<line class="{style}" x1="{x}" y1="88" x2="{x}" y2="{bottom}"/>')
        parts.append(text(x, bottom + 17, f"{percent} %", "quiet", "middle"))
    head = [
        text(20, 32, "Speed as a share of what the machine can do", "title"),
        text(
            20,
            52,
            "Bound ÷ time.  Bound: multiply-adds and one softmax pass, or reading memory, at the rates measured here.",
            "quiet",
        ),
        *legend(78),
    ]
    height = bottom + 76
    foot = [
        text(20, height - 34, f"{machine_line(measured)}; {measured['date']}", "quiet"),
        text(
            20,
            height - 16,
            "D = 64 and float32 where nothing else is said.  All sizes: benchmarks/workloads/cases.py",
            "quiet",
        ),
    ]
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        "<title>Speed of sdpa and of the best of its peers, as a share of what the machine can do</title>",
        f"<style>{STYLE}</style>", page, *head, *parts, *foot, "</svg>", "",
    ])  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the table


def machine_line(measured):
    return measured["machine"].partition("\n")[0]


def duration(milliseconds):
    return f"{milliseconds:.3g} ms" if milliseconds >= 0.1 else f"{milliseconds * 1e3:.3g} µs"


def what(name):
    """A workload in words."""
    w = WORKLOADS[name]
    kind = "causal" if w.causal else "full"
    if w.window is not None:
        kind = f"window of {w.window}"
    if w.hiding is not None:
        kind = {"pad": "padding mask", "random": "boolean mask", "bias": "bias"}[w.hiding]
    heads = f"{w.H}" if w.H == w.G else f"{w.H} on {w.G}"
    return [f"{w.B}", heads, f"{w.M}", f"{w.N}", f"{w.D}", kind, w.dtype.name]


def table(measured):
    cases = cases_of(measured)
    head = [
        "B",
        "heads",
        "M",
        "N",
        "D",
        "who sees whom",
        "dtype",
        "sdpa",
        "best of the others",
        "faster",
        "of the bound",
    ]
    lines = [head, ["---:"] * 5 + ["---"] * 2 + ["---:"] * 4]
    for name in TABLE:
        if name not in cases:
            continue
        case = cases[name]
        theirs = [f"{case.peer} {duration(case.theirs)}", f"{case.faster:.2f} {TIMES}"] if case.peer else ["", ""]
        # A call of a few microseconds is not bound by arithmetic or memory.
        attained = f"{case.attained:.2f}" if case.bound > 0.01 * case.ours and case.ours > 0.01 else ""
        lines.append([*what(name), duration(case.ours), *theirs, attained])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def caption(measured):
    versions = ", ".join(f"{TITLES.get(name, name)} {v}" for name, v in measured["versions"].items())
    about = f"{measured['date']}; {machine_line(measured)}; {measured['compiler']}."
    return "\n".join([about, *textwrap.wrap(f"{versions}.", 120)])


def with_numbers(readme, measured):
    """The text of the README with the table of `measured` in its place."""
    return with_text_between(readme, BEGIN, f"{table(measured)}\n\n{caption(measured)}", END)


def one_result_a_line(measured):
    results = ",\n".join(json.dumps(result) for result in measured["results"])
    return (
        json.dumps({**measured, "results": []}, indent=1).replace('"results": []', f'"results": [\n{results}\n]') + "\n"
    )
