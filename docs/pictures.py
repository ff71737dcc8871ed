"""The pictures of the site, drawn while it is built.  Who sees whom, and what a cache holds, is asked of the library.

Each picture is as wide as a phone; a page sets several side by side where there is room.
"""

import numpy as np

import sdpa
from sdpa._report.drawing import COLOURS, GRID, INK, MUTED, PAPER, panel

WIDTH = 360  # CSS pixels
PALE = 0.22
TASK, BLOCK, LENGTH = 8, 8, 48  # rows of a task, keys of a block: small enough to be seen


def canvas(height, columns, rows):
    """A figure with axes of so many cells, the first at the top left."""
    figure, axes = panel(width=WIDTH, height=height)
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure, axes


def cell(axes, x, y, colour, width=1, height=1, **style):
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, **{"fc": colour, "ec": PAPER, "lw": 1.2, **style}))


def arrow(axes, begin, end):
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": MUTED, "lw": 1.2})


def rows_in_lanes():
    """Six rows of the query in six lanes. One number of K meets all of them at once."""
    figure, axes = canvas(400, 18, 20)
    features, keys, feature, key = 4, 5, 1, 2
    left, right = 0.5, 10.5  # of what lies in memory; of vectors

    def vectors(top, name, count, chosen):
        axes.text(right, top - 0.4, name, fontsize=9)
        for y in range(count):
            for lane, colour in enumerate(COLOURS):
                cell(axes, right + lane, top + y, colour, alpha=1 if y == chosen else PALE)

    axes.text(left, 0.9, "query, as it lies", fontsize=9)
    for row, colour in enumerate(COLOURS):
        for x in range(features):
            cell(axes, left + x, 1.3 + row, colour, alpha=1 if x == feature else PALE)
    arrow(axes, (left + features + 0.4, 3.3), (right - 0.4, 3.3))
    axes.text(7.5, 2.9, "turned once", fontsize=8, color=MUTED, ha="center")
    vectors(1.3, "q[feature][rows]", features, feature)

    axes.text(left, 9.6, "K, as it lies", fontsize=9)
    for y in range(keys):
        for x in range(features):
            cell(axes, left + x, 10 + y, INK if (y, x) == (key, feature) else GRID)
    arrow(axes, (left + feature + 1.1, 10.5 + key), (right - 0.4, 10.5 + key))
    axes.text(7.9, 10.1 + key, "to all lanes", fontsize=8, color=MUTED, ha="center")
    vectors(10, "s[key][rows]", keys, key)
    axes.text(9, 17.2, "s[key] += K[key, feature] · q[feature]", fontsize=9, ha="center", weight="bold")
    axes.text(9, 18.3, "one instruction for all rows: for all keys and features,", fontsize=8, color=MUTED, ha="center")
    axes.text(9, 19.2, "without turning or packing K", fontsize=8, color=MUTED, ha="center")
    return figure


def blocks(title, **options):
    """Which blocks of keys the tasks compute: all of a block, a part of it, or nothing."""
    seen = sdpa.attention_weights(np.ones((LENGTH, 1)), np.ones((LENGTH, 1)), **options) > 0
    figure, axes = canvas(390, LENGTH + 4, LENGTH + 8)
    axes.text(4, 2.2, title, fontsize=9)
    counts = dict.fromkeys(("whole", "cut", "skipped"), 0)
    for top in range(0, LENGTH, TASK):
        for begin in range(0, LENGTH, BLOCK):
            part = seen[top : top + TASK, begin : begin + BLOCK]
            kind = "whole" if part.all() else "cut" if part.any() else "skipped"
            counts[kind] += 1
            colour, alpha = {"whole": (COLOURS[0], 1), "cut": (COLOURS[0], PALE), "skipped": (GRID, PALE)}[kind]
            cell(axes, 4 + begin, 4 + top, colour, BLOCK, TASK, alpha=alpha, lw=2)
            for row in np.flatnonzero(part.any(axis=1)) if kind == "cut" else ():
                keys = np.flatnonzero(part[row])
                cell(axes, 4 + begin + keys[0], 4 + top + row, COLOURS[0], keys.size, 1, lw=0)
    axes.text(4 + LENGTH / 2, LENGTH + 6.6, "keys, in blocks", fontsize=8.5, color=MUTED, ha="center")
    axes.text(1, 4 + LENGTH / 2, "rows, in tasks", fontsize=8.5, color=MUTED, ha="center", va="center", rotation=90)
    whole, cut, skipped = counts.values()
    axes.text(4 + LENGTH, 2.2, f"{whole} whole, {cut} cut, {skipped} skipped", fontsize=8.5, color=MUTED, ha="right")
    return figure


def causal_blocks():
    """With causal=True, blocks above the diagonal are skipped, and only those on it are compared lane by lane."""
    return blocks("causal", causal=True)


def window_blocks():
    """With a window, blocks left of it are skipped, too: the work grows with the window, not with all keys."""
    return blocks("window (16, 0)", window=(16, 0))


def window_keeps():
    """What a cache with window=4 and keep=2 holds after each token. The window moves on, the first two tokens stay."""
    tokens = 12
    figure, axes = canvas(390, tokens + 3, tokens + 4)
    cache = sdpa.KVCache(1, 1, 1, window=4, keep=2)
    axes.text(2, 0.8, "token", fontsize=8.5, color=MUTED)
    axes.text(0.5, 2 + tokens / 2, "after the token", fontsize=8.5, color=MUTED, ha="center", va="center", rotation=90)
    for now in range(tokens):
        number = np.full((1, 1, 1, 1), now, np.float32)
        cache.append(number, number)
        held = cache.keys[0, 0, :, 0].astype(int)
        axes.text(2.5 + now, 1.75, str(now), fontsize=8, color=MUTED, ha="center")
        for token in range(now + 1):
            colour = GRID if token not in held else COLOURS[1] if token < cache.keep else COLOURS[0]
            cell(axes, 2 + token, 2 + now, colour)
    for x, colour, name in (2, COLOURS[1], "kept"), (6, COLOURS[0], "in the window"), (11.5, GRID, "dropped"):
        cell(axes, x, tokens + 2.7, colour, 0.8, 0.8)
        axes.text(x + 1.1, tokens + 3.4, name, fontsize=8.5)
    return figure


PICTURES = {draw.__name__: draw for draw in (rows_in_lanes, causal_blocks, window_blocks, window_keeps)}
