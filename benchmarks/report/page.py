"""The report as a page: one HTML file with everything in it."""

from html import escape
from typing import NamedTuple

from benchmarks import targets
from benchmarks.report import figures, report
from benchmarks.report.rows import geometric_mean, rows_of
from sdpa._report import drawing
from sdpa._report.document import as_html, document, facts, table
from sdpa._report.document import figures as drawn

TITLE = "Speed of sdpa"
INTRODUCTION = """
<p>Scaled dot-product attention on a CPU, by <code>sdpa</code> and by other libraries, all on the same machine in the
same minutes: each in a process of its own, in turns, as many threads as there are CPUs. The time is the shortest of
many calls. Results are compared with float64 first; a wrong one does not count.</p>
<p>The bound is what the machine can do: multiply-adds and one softmax pass, or reading memory, at the rates measured
in the same run. It is a yardstick: what it does not know, such as blocks that a mask hides, can be faster.</p>
"""


class Section(NamedTuple):
    name: str
    title: str
    claim: str
    figures: list
    tables: list
    more: str = ""  # HTML


def page(measured):
    """The text of the page; figures need matplotlib."""
    with_figures = drawing.available()
    sections = [one for one in sections_of(measured) if one.figures or one.tables]
    body = "\n".join(section(number, one, measured, with_figures) for number, one in enumerate(sections, 1))
    header = "\n".join([INTRODUCTION.strip(), summary(measured), contents(sections)])
    return document(TITLE, header, body, facts(about(measured), with_figures))


def sections_of(measured):
    lines = figures.lines(measured)
    ours = any(row.ours for row in rows_of(measured))
    return [
        Section(
            "bound", "Time against the bound", "How much of what the machine can do is used.",
            list(figures.shares(measured).values()), [],
        ),
        Section(
            "peers", "Speed-up over each peer", "A library counts with its fastest implementation that is right.",
            list(figures.leads(measured).values()), [report.means(measured)] if figures.leads(measured) else [],
        ),
        Section("sizes", "Scaling", "By length, threads, size of a head and context.", list(lines.values()), []),
        Section(
            "targets", "Targets", "What it aims at, and where it misses.",
            [], [report.aims(measured)] if ours else [], misses(measured),
        ),
        Section(
            "times", "All times", "Every workload and every library, and how exact each is.", [],
            [report.times(measured), report.errors(measured)],
        ),
    ]  # fmt: skip


def section(number, one, measured, with_figures):
    tables = "\n".join(map(table, one.tables))
    return f"""<section id="{one.name}">
<div class="head">
<h2><span class="number">{number}</span>{as_html(one.title)}</h2>
<p class="claim">{as_html(one.claim)}</p>
</div>
<div class="measured">
{drawn(one.figures, measured, one.name) if with_figures else ""}
{one.more}
<div class="tables">
{tables}
</div>
</div>
</section>"""


def summary(measured):
    """The two numbers that say the most."""
    rows = [row for row in rows_of(measured) if row.ours]
    items = []
    if any(row.best for row in rows):
        lead, ahead = geometric_mean([row.lead for row in rows]), sum(row.lead >= 1 for row in rows)
        compared = sum(row.best is not None for row in rows)
        items.append(
            f"<strong>{lead:.2f} {report.TIMES} as fast</strong> as the best of the others (geometric mean), "
            f"ahead on {ahead} of {compared} workloads"
        )
    if rows:
        items.append(
            f"<strong>{geometric_mean([row.share for row in rows]):.2f} of the bound</strong> (geometric mean)"
        )
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def contents(sections):
    entries = "\n".join(
        f'<li><a href="#{one.name}"><span class="number">{number}</span><span>{as_html(one.title)}</span></a></li>'
        for number, one in enumerate(sections, 1)
    )
    return f'<nav aria-label="Contents">\n<ol class="contents">\n{entries}\n</ol>\n</nav>'


def misses(measured):
    """Where a target is missed, or a peer ahead, and why."""
    items = []
    for one in targets.verdicts(rows_of(measured)):
        if not one.hit:
            said = []
            if one.share_missed:
                said.append(f"{one.row.share:.2f} of the bound (target {one.target.share:.2f})")
            if one.lead_missed:
                said.append(f"{one.row.lead:.2f} {report.TIMES} the best peer (target {one.target.lead:.2f})")
            if one.time_missed or one.of_float32_missed:
                said.append("{} (target {})".format(*report.other_target(one)))
            items.append(
                f'<li><span class="badge false">missed</span><strong>{escape(one.row.name)}: {", ".join(said)}</strong>'
                f'<span class="numbers">{as_html(targets.reason_of(one.row.name))}</span></li>'
            )
    return f'<ul class="findings">\n{chr(10).join(items)}\n</ul>' if items else ""


def about(measured):
    machine, *rates = measured["machine"].splitlines()
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    load = {"load": f"{measured['load']:.2f} in the minute before"} if "load" in measured else {}
    return {
        "date": measured["date"],
        "commit": f"{measured['commit']}, kernel {measured['kernel']}",
        "compiler": measured["compiler"],
        "machine": machine,
        "rates": "; ".join(" ".join(rate.split()) for rate in rates),
        "versions": versions,
        **load,
    }
