"""The parts of a page, one HTML file with everything in it.  The laboratory and the benchmarks write such pages."""

import re
from html import escape

from . import drawing
from .page_style import STYLE
from .svg import SUBSCRIPT, svg

POWER = r"\^\(((?:[^()]|\([^()]*\))*)\)"  # in text: e^(-1/2)
ITALIC, UPRIGHT = "<sub>model</sub></var>", "</var><sub>model</sub>"  # a word, not a variable
OVER_ROOT = r"1/√<var>.*?</var>(?:<sub>model</sub>)?"


def document(title, header, main, footer):
    """The text of a page; its parts are HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{header}
</header>
<main>
{main}
</main>
<footer>
{footer}
</footer>
</body>
</html>
"""


def as_html(text):
    """Text as HTML: d_k with a subscript, e^(-1/2) with a superscript, and 1/√d_k in one piece."""
    marked = re.sub(SUBSCRIPT, r"<var>\1<sub>\2</sub></var>", escape(text)).replace(ITALIC, UPRIGHT)
    marked = re.sub(POWER, lambda power: f"<sup>{power[1].replace('-', '−')}</sup>", marked)
    return unbroken(re.sub(r"√d\b", "√<var>d</var>", marked))


def unbroken(markup):
    """Lines do not end within 1/√d_k."""
    return re.sub(OVER_ROOT, r'<span class="formula">\g<0></span>', markup)


def figures(list_of_figures, numbers, prefix):
    """Figures of these numbers, side by side where there is room."""
    drawn = []
    for number, figure in enumerate(list_of_figures, 1):
        with drawing.style():
            image = svg(figure.draw(numbers), f"{prefix}-{number}", figure.caption)
        drawn.append(f"<figure>\n{image}\n<figcaption>{as_html(figure.caption)}</figcaption>\n</figure>")
    return f'<div class="figures">\n{chr(10).join(drawn)}\n</div>' if drawn else ""


def table(one):
    """A table in a box of its own, which scrolls if the table is wider than the page."""
    head = "".join(f'<th scope="col">{as_html(cell)}</th>' for cell in one.header)
    rows = "\n".join(f"<tr>{''.join(_cell(one, i, j) for j in range(len(row)))}</tr>" for i, row in enumerate(one.rows))
    caption = escape(one.caption)
    return f"""<div><p class="caption">{as_html(one.caption)}</p>
<div class="table" role="region" aria-label="{caption}" tabindex="0"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div></div>"""


def _cell(one, i, j):
    cell = as_html(one.rows[i][j])
    return f"<td><strong>{cell}</strong></td>" if (i, j) in one.best else f"<td>{cell}</td>"


def facts(items, figures):
    """Names with texts, for the foot of a page."""
    listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in items.items())
    missing = "" if figures else "<p>Figures need matplotlib: <code>pip install matplotlib</code></p>\n"
    return f"{missing}<dl>\n{listed}\n</dl>"
