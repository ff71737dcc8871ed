"""The page: one HTML file with everything in it."""

import re
from html import escape

from . import _drawing
from ._experiment import MARKS, VERDICTS
from ._machine import machine
from ._page_style import STYLE
from ._svg import SUBSCRIPT, svg

TITLE = "Why attention divides by √d"
INTRODUCTION = """
<p>Attention compares a query with keys: the score of a pair is their scalar product, the softmax turns the scores of a
query into weights, and the result is the mean of the values under these weights. The scores are divided by
√<var>d<sub>k</sub></var>, the root of the size of a key. Much is said about why. Here each claim is an experiment: what
is claimed, the reason, what was measured, and whether it held.</p>
<p>The numbers come from the kernels of <code>sdpa</code> on one machine, at the sizes given, from fixed seeds. A shaded
band, or ±, holds the true mean with 95 % confidence.</p>
"""


def page(runs, *, figures, date):
    """The text of the page for experiments that were carried out, with figures if asked (which needs matplotlib)."""
    sections = "\n".join(_section(number, run, figures) for number, run in enumerate(runs, 1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{TITLE}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{TITLE}</h1>
{INTRODUCTION.strip()}
{_contents(runs)}
</header>
<main>
{sections}
</main>
{_footer(runs, date, figures)}
</body>
</html>
"""


def _text(text):
    """Text as HTML: d_k with a subscript."""
    return re.sub(SUBSCRIPT, r"<var>\1<sub>\2</sub></var>", escape(text))


def _contents(runs):
    """The titles, with a mark for each finding."""
    entries = []
    for number, run in enumerate(runs, 1):
        marks = "".join(
            f'<span class="{finding.verdict}" title="{escape(finding.claim)}: {VERDICTS[finding.verdict]}">'
            f"{MARKS[finding.verdict]}</span>"
            for finding in run.experiment.findings(run.numbers)
        )
        entries.append(
            f'<li><a href="#{run.experiment.name}"><span class="number">{number}</span>'
            f'<span>{_text(run.experiment.title)}</span><span class="marks">{marks}</span></a></li>'
        )
    legend = ", ".join(
        f'<span class="entry"><span class="{verdict}">{MARKS[verdict]}</span> {text}</span>'
        for verdict, text in VERDICTS.items()
    )
    return f"""<nav aria-label="Experiments">
<ol class="contents">
{chr(10).join(entries)}
</ol>
<p class="legend">A mark for each claim: {legend}.</p>
</nav>"""


def _section(number, run, figures):
    experiment = run.experiment
    tables = "\n".join(map(_table, experiment.tables(run.numbers)))
    return f"""<section id="{experiment.name}">
<div class="head">
<h2><span class="number">{number}</span>{_text(experiment.title)}</h2>
<p class="claim">{experiment.claim}</p>
</div>
<div class="why">
<h3>Why</h3>
{experiment.reason.strip()}
</div>
<div class="measured">
<h3>Measured</h3>
{_figures(run) if figures else ""}
<div class="tables">
{tables}
</div>
</div>
<div class="verdict">
<h3>Did it hold?</h3>
{_findings(run)}
</div>
<div class="repeat">
<h3>Repeat it</h3>
{_calls(run)}
</div>
</section>"""


def _figures(run):
    drawn = []
    for number, figure in enumerate(run.experiment.figures, 1):
        with _drawing.style():
            image = svg(figure.draw(run.numbers), f"{run.experiment.name}-{number}", figure.caption)
        drawn.append(f"<figure>\n{image}\n<figcaption>{_text(figure.caption)}</figcaption>\n</figure>")
    return f'<div class="figures">\n{chr(10).join(drawn)}\n</div>' if drawn else ""


def _table(table):
    """In a box of its own, that scrolls where it is wider than the page."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    caption = escape(table.caption)
    return f"""<div><p class="caption">{_text(table.caption)}</p>
<div class="table" role="region" aria-label="{caption}" tabindex="0"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div></div>"""


def _findings(run):
    items = "\n".join(
        f'<li><span class="badge {finding.verdict}">{VERDICTS[finding.verdict]}</span>'
        f'<strong>{_text(finding.claim)}</strong><span class="numbers">{_text(finding.measured)}</span></li>'
        for finding in run.experiment.findings(run.numbers)
    )
    return f'<ul class="findings">\n{items}\n</ul>'


def _calls(run):
    """The command and the call that give these numbers again."""
    name = run.experiment.name
    options = "".join(
        f" --{option.replace('_', '-')} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for option, value in run.chosen.items()
    )
    call = ", ".join(f"{option}={value!r}" for option, value in run.chosen.items())
    lines = f"python -m sdpa lab {name}{options} --html {name}.html", f"numbers = sdpa.lab.{name}({call})"
    return "\n".join(f"<pre><code>{escape(line)}</code></pre>" for line in lines)


def _footer(runs, date, figures):
    facts = machine() | {"date": date, "runtime": f"{sum(run.seconds for run in runs):.0f} s"}
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    missing = "" if figures else f"<p>Figures need matplotlib: <code>pip install '{_drawing.EXTRA}'</code></p>\n"
    return f"<footer>\n{missing}<dl>\n{items}\n</dl>\n</footer>"
