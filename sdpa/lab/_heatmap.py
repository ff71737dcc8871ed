"""Pictures of attention weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._checks import is_float
from .._report import drawing

CELL, LABELS, HEADING, SCALE = 15, 56, 24, 62  # CSS pixels: a cell, words beside the cells, a title, the scale below
LARGEST_MAP = 720  # cells shrink where a map would be larger
WORD = 12  # what a word needs
DETAIL = 10_000  # cells that are drawn one by one; more become a picture
SHADES = 51
ROUNDING = 0.01  # weights above 1 by less come from narrow types


def heatmap(
    weights: Any, tokens: Sequence[str], *, key_tokens: Sequence[str] | None = None, titles: Sequence[str] | None = None
) -> Any:
    """Draw attention weights, a map for each head: the darker, the larger.

    Parameters
    ----------
    weights : (M, N), (H, M, N) or (1, H, M, N), from 0 to 1, as `sdpa.attention_weights` returns them
    tokens
        The M queries, from top to bottom.
    key_tokens
        The N keys, from left to right.  Default: the tokens, if there are as many.
    titles
        One for each head.  Default: "head 1", ...; none for a single one.

    Notes
    -----
    Returns a `matplotlib.figure.Figure`: `heatmap(...).savefig("weights.png")`.  It needs
    matplotlib: pip install matplotlib.
    """
    maps = _maps(weights)
    heads, M, N = maps.shape
    tokens = _labels("tokens", tokens, M, "queries")
    if key_tokens is None and M != N:
        raise ValueError(f"weights has {M} queries and {N} keys: key_tokens must be given where these differ")
    key_tokens = tokens if key_tokens is None else _labels("key_tokens", key_tokens, N, "keys")
    if titles is None:
        titles = [f"head {head + 1}" for head in range(heads)] if heads > 1 else [""]
    else:
        titles = _labels("titles", titles, heads, "heads")
    if not drawing.available():
        raise ImportError("heatmap needs matplotlib: pip install matplotlib")
    with drawing.style():
        return _draw(maps, tokens, key_tokens, titles)


def _maps(weights):
    """As (H, M, N), float64."""
    given = np.asarray(weights)
    if not (given.dtype.kind in "biu" or is_float(given.dtype)):
        raise TypeError(f"weights has dtype {given.dtype}: it must be real numbers")
    maps = given.astype(np.float64)
    if maps.ndim == 4 and len(maps) == 1:
        maps = maps[0]
    if maps.ndim == 2:
        maps = maps[None]
    if maps.ndim != 3 or not maps.size:
        raise ValueError(
            f"weights has shape {given.shape}: it must be (M, N), (H, M, N) or (1, H, M, N), none of them 0"
        )
    wrong = maps[~((maps >= 0) & (maps <= 1 + ROUNDING))]
    if wrong.size:
        raise ValueError(f"weights holds {wrong[0]:g}: weights are from 0 to 1, after the softmax")
    return maps


def _labels(name, labels, count, what):
    if isinstance(labels, str | bytes):
        raise TypeError(f"{name} is the string {labels!r}: it must be a sequence of strings, as its .split() is")
    labels = [str(label) for label in labels]
    if len(labels) != count:
        raise ValueError(f"{name} has {len(labels)} entries: weights has {count} {what}")
    return labels


def _draw(maps, tokens, key_tokens, titles):
    heads, M, N = maps.shape
    columns = min(2, heads)
    rows = -(-heads // columns)
    cell = min(CELL, LARGEST_MAP / max(M, N))
    wide = max(360, columns * max(cell * N, 60) + LABELS)
    high = rows * (max(cell * M, 30) + HEADING) + LABELS + SCALE
    figure, axes = drawing.panel(wide, high, rows, columns, squeeze=False, sharex=True, sharey=True)
    figure.set_facecolor(drawing.PAPER)
    for ax in axes.flat[heads:]:
        ax.set_visible(False)
    for head, (ax, weights, title) in enumerate(zip(axes.flat, maps, titles)):
        mesh = ax.pcolormesh(weights, cmap=shades(), vmin=0, vmax=1, rasterized=M * N > DETAIL)
        ax.set(title=title, aspect="equal")
        ax.grid(False)
        ax.spines[["top", "right"]].set_visible(True)
        ax.tick_params(length=0, labelsize=8, labelbottom=head + columns >= heads)
        ax.tick_params(axis="x", labelrotation=90)
    each = max(1, round(WORD / cell + 0.49))  # words that would lie on each other are left out
    axes[0, 0].set_xticks(np.arange(0, N, each) + 0.5, key_tokens[::each])
    axes[0, 0].set_yticks(np.arange(0, M, each) + 0.5, tokens[::each])
    axes[0, 0].set_ylim(M, 0)
    bar = figure.colorbar(mesh, ax=axes, location="bottom", aspect=40, fraction=0.05, shrink=0.6, ticks=[0, 0.5, 1])
    bar.ax.tick_params(labelsize=8, length=0)
    bar.outline.set_visible(False)
    return figure


def shades(colour=drawing.COLOURS[0], strongest=1.0):
    """From nothing to a colour: transparent, so that it is right on light and on dark paper."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    ends = [(*to_rgb(colour), 0), (*to_rgb(colour), strongest)]
    return LinearSegmentedColormap.from_list("weights", ends, N=SHADES)
