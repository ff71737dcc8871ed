"""The page of the laboratory."""

from html import escape

from .._report import document as _document
from .._report.document import as_html, document, facts, table, unbroken
from ._experiment import MARKS, VERDICTS
from ._machine import machine

TITLE = "Why attention divides by √d"
INTRODUCTION = """
<p>Attention compares a query with keys: the score of a pair is their scalar product, the softmax turns the scores of a
query into weights, and the result is the mean of the values under these weights. The scores are divided by
√<var>d<sub>k</sub></var>, the root of the size of a key. Much is said about the reasons. Here each claim is an
experiment: the claim, the reason, the measurements, and whether the claim held.</p>
<p>The numbers come from the kernels of <code>sdpa</code> on one machine, at the sizes given, from fixed seeds. A shaded
band, or ±, holds the true mean with 95 % confidence.</p>
"""


def page(runs, *, figures, date):
    """The text of the page for experiments that were carried out, with figures if asked (which needs matplotlib)."""
    header = f"{INTRODUCTION.strip()}\n{_contents(runs)}"
    sections = "\n".join(_section(number, run, figures) for number, run in enumerate(runs, 1))
    about = machine() | {"date": date, "runtime": f"{sum(run.seconds for run in runs):.0f} s"}
    return document(TITLE, header, sections, facts(about, figures))


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
            f'<span>{as_html(run.experiment.title)}</span><span class="marks">{marks}</span></a></li>'
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
    tables = "\n".join(map(table, experiment.tables(run.numbers)))
    drawn = _document.figures(experiment.figures, run.numbers, experiment.name) if figures else ""
    return f"""<section id="{experiment.name}">
<div class="head">
<h2><span class="number">{number}</span>{as_html(experiment.title)}</h2>
<p class="claim">{unbroken(experiment.claim)}</p>
</div>
<div class="why">
<h3>Why</h3>
{unbroken(experiment.reason.strip())}
</div>
<div class="measured">
<h3>Measured</h3>
{drawn}
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


def _findings(run):
    items = "\n".join(
        f'<li><span class="badge {finding.verdict}">{VERDICTS[finding.verdict]}</span>'
        f'<strong>{as_html(finding.claim)}</strong><span class="numbers">{as_html(finding.measured)}</span></li>'
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
