"""Figures as SVG inside an HTML page."""

import html
import io
import re

from . import _drawing

VARIABLES = {
    _drawing.INK: "--ink",
    _drawing.MUTED: "--muted",
    _drawing.GRID: "--grid",
    _drawing.PAPER: "--paper",
    **{colour: f"--series-{number}" for number, colour in enumerate(_drawing.COLOURS, 1)},
}
SUBSCRIPT = r"(?<![A-Za-z])([A-Za-z])_(k|model|[A-Z])\b"  # in text: d_k, d_model, W_Q
LOWERED = r'\1<tspan dy="1.5" style="font-size: 75%">\2</tspan><tspan dy="-1.5">&#8203;</tspan>'
POINT = 4 / 3  # CSS pixels


def svg(figure, prefix, label):
    """A figure in the colours of the page, with its own ids."""
    file = io.StringIO()
    with _drawing.style():
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


def _variable(colour):
    return f"var({VARIABLES[colour]})" if colour in VARIABLES else colour


def _head(tag, label):
    box = re.search(r'viewBox="([^"]*)"', tag)[1]
    wide, high = (round(float(points) * POINT) for points in box.split()[2:])
    label = html.escape(label, quote=True)
    return f'<svg role="img" aria-label="{label}" width="{wide}" height="{high}" viewBox="{box}">'
