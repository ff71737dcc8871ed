"""The kind of figure that most experiments share: lines with bands over a logarithmic axis."""

import numpy as np

from .drawing import COLOURS, INK, draw_band, panel
from .statistics import band


def lines_over(
    x, lines, xlabel, ylabel, *, expected=None, paired=False, yscale="linear", limits=None, ticks=None, columns=2
):
    """A panel with a line and its band for each of `lines`, {label: samples (X, seeds)}, and a thin one for each of
    `expected`, {label: (x, y)}.  `paired`: every two have a colour, and the second is dashed.  The legend stands above,
    in so many columns."""
    figure, axes = panel()
    for i, (label, samples) in enumerate(lines.items()):
        colour, dash = (COLOURS[i // 2], "-" if i % 2 == 0 else "--") if paired else (COLOURS[i], "-")
        draw_band(axes, x, band(samples, axis=-1), label, colour, linestyle=dash)
    for dash, (label, (at, y)) in zip(("--", ":", "-."), (expected or {}).items()):
        axes.plot(at, y, dash, color=INK, linewidth=1.1, label=label)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale=yscale)
    if limits:
        axes.set_ylim(*limits)
    if yscale == "log":
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.minorticks_off()
    mark_sizes(axes, x if ticks is None else ticks)
    legend_above(figure, columns)
    return figure


def legend_above(figure, columns):
    figure.legend(loc="outside upper center", ncols=columns, fontsize=8, handlelength=2, columnspacing=1.2)


def mark_sizes(axes, x):
    """A logarithmic axis with some of the sizes written as they are said: 64, 4096."""
    step = -(-len(x) // 8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x[::step], [f"{size:g}" for size in np.asarray(x)[::step]], fontsize=8)
    axes.xaxis.minorticks_off()
