"""Figures in one style, with matplotlib.  They are drawn in the colours of the light page; `svg.py` replaces each by
the variable of the style sheet that is light or dark."""

import importlib.util

INK, MUTED, GRID, PAPER = "#1c1e21", "#5f6670", "#d9dde2", "#ffffff"
COLOURS = ("#2563c9", "#c2410c", "#15803d", "#7e3bb5", "#a16207", "#0e7490")  # one per series, in this order

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sdpa",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
DOTS_PER_INCH = 96


def available():
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def style():
    """A context in which figures are drawn and saved."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def panel(width=360, height=270, rows=1, columns=1, **options):
    """A figure of so many CSS pixels, and its axes (as of `plt.subplots`).  On the page panels stand side by side where
    there is room; 360 wide is what a phone shows without shrinking."""
    from matplotlib.figure import Figure

    size = width / DOTS_PER_INCH, height / DOTS_PER_INCH
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def draw_band(axes, x, band, label, colour, **options):
    """A line through the means, with the band shaded."""
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, band.mean, color=colour, label=label, marker="o", markersize=3, **options)
