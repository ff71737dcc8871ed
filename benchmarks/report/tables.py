"""Rows of text as a table: of a terminal, or in Markdown.  The first row is the header, the first column set left."""

import shutil
import textwrap

HEADER_WIDTH = 10  # a longer name of a column is broken into lines, unless its cells are wider anyway
UNLIMITED = 10_000  # columns where there is no terminal


def text(rows, width=None):
    """A table wider than `width` (by default the terminal) goes on below, its first column repeated."""
    width = width or shutil.get_terminal_size((UNLIMITED, 0)).columns
    first, *others = map(aligned, zip(*rows, strict=True), [str.ljust] + [str.rjust] * (len(rows[0]) - 1))
    parts = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and sum(len(one[-1]) + 2 for one in parts[-1]) + len(column[-1]) > width:
            parts.append([first])
        parts[-1].append(column)
    return "\n\n".join(map(lines, parts))


def aligned(column, adjust):
    """The lines of the header, and a line for each cell, all of one width."""
    header, *cells = column
    widest = max(map(len, [*header.split(), *cells]), default=0)
    named = textwrap.wrap(header, max(HEADER_WIDTH, widest), break_on_hyphens=False) or [""]
    size = max(map(len, [*named, *cells]), default=0)
    return [adjust(line, size) for line in [*named, *cells]]


def lines(columns):
    """As text; columns with fewer lines of header begin below."""
    most = max(map(len, columns))
    filled = [[" " * len(column[-1])] * (most - len(column)) + column for column in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*filled, strict=True))


def markdown(rows, left=(0,)):
    """`left`: the columns that are set left; the others are numbers."""
    header, *others = rows
    rule = ["---" if column in left else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *others))
