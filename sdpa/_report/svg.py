"""Figures as SVG inside an HTML page."""

import html
import io
import re

from . import drawing
from .page_style import DARK, LIGHT

VARIABLES = {
    drawing.INK: "--ink",
    drawing.MUTED: "--muted",
    drawing.GRID: "--grid",
    drawing.PAPER: "--paper",
    **{colour: f"--series-{number}" for number, colour in enumerate(drawing.COLOURS, 1)},
}
SUBSCRIPT = r"(?<![A-Za-z])([A-Za-z])_(k|model|[A-Z])\b"  # in text: d_k, d_model, W_Q
LOWERED = r'\1<tspan dy="1.5" style="font-size: 75%">\2</tspan><tspan dy="-1.5">&#8203;</tspan>'
FONTS = 'system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif'  # of a picture by itself
POINT = 4 / 3  # CSS pixels
MARGIN = 8  # points, around a picture


def svg(figure, prefix, label):
    """A figure in the colours of the page, with its own ids."""
    file = io.StringIO()
    with drawing.style():
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{prefix}-', text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found[0]), text)
    text = re.sub(r">[^<>]+</text>", lambda found: re.sub(SUBSCRIPT, LOWERED, found[0]), text)
    text = text.replace("'DejaVu Sans'", "inherit")
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    return re.sub(r"<svg[^>]*>", lambda found: _head(found[0], label), text, count=1).strip()


def picture(figure, label):
    """A figure as a file of its own, on paper with a margin, light or dark as its reader."""
    image = svg(figure, "figure", label)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', image)
    wide, high = (float(size) + 2 * MARGIN for size in box.groups())
    place = f'x="{-MARGIN}" y="{-MARGIN}" width="{wide:g}" height="{high:g}"'
    style = (
        f"<style>:root {{ {LIGHT} font-family: {FONTS} }} "
        f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}</style>"
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" \
width="{wide * POINT:.0f}" height="{high * POINT:.0f}" viewBox="{-MARGIN} {-MARGIN} {wide:g} {high:g}">
<title>{html.escape(label)}</title>
{style}
<rect {place} rx="5" style="fill: var(--paper)"/>
{re.sub(r"^<svg[^>]*>|</svg>$", "", image)}
</svg>
"""


def _variable(colour):
    return f"var({VARIABLES[colour]})" if colour in VARIABLES else colour


def _head(tag, label):
    box = re.search(r'viewBox="([^"]*)"', tag)[1]
    wide, high = (round(float(points) * POINT) for points in box.split()[2:])
    label = html.escape(label, quote=True)
    return f'<svg role="img" aria-label="{label}" width="{wide}" height="{high}" viewBox="{box}">'
