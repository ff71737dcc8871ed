"""What the laboratory shows in a terminal: how far it is, and tables."""

import html
import re
import shutil
import sys
import textwrap
import time

from ..lab._experiment import VERDICTS

NARROWEST, DEFAULT_WIDTH, WIDEST = 60, 100, 120
NARROWEST_COLUMN = 8
BAR = 20


def width():
    """Columns for tables: those of the terminal within reason."""
    return min(max(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, NARROWEST), WIDEST)


class Progress:
    """How far the experiments are, on stderr: a bar where it is a terminal, else a line for each when it is done."""

    def __init__(self, count):
        self.count, self.number, self.name = count, 0, ""
        self.start = time.perf_counter()
        self.moves = sys.stderr.isatty()

    def begin(self, name):
        self.number, self.name = self.number + 1, name
        self._draw(0, 1)

    def __call__(self, items):
        """The items, one after the other; an experiment passes its longest loop through this."""
        items = list(items)
        for done, item in enumerate(items):
            self._draw(done, len(items))
            yield item
        self._draw(len(items), len(items))

    def end(self, seconds):
        if self.moves:
            self.clear()
        else:
            print(f"{self.number} of {self.count}: {self.name}, {seconds:.1f} s", file=sys.stderr, flush=True)

    def clear(self):
        """Leave an empty line where the bar is."""
        if self.moves:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _draw(self, done, count):
        if self.moves:
            full = BAR * done // count
            bar = "█" * full + "░" * (BAR - full)
            line = f"{self.number} of {self.count} {self.name:12} {bar} {time.perf_counter() - self.start:4.0f} s"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def table(header, rows, left=1):
    """Lines of text: columns under a header, of which the first `left` are set left, the others right.  Cells are
    broken into lines, those of the widest column first, until all fit the terminal."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    room = width() - 2 * (len(header) - 1)
    while sum(widths) > room and max(widths) > NARROWEST_COLUMN:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for number, row in enumerate(cells):
        broken = [textwrap.wrap(cell, at) or [""] for cell, at in zip(row, widths)]
        for i in range(max(map(len, broken))):
            texts = [part[i] if i < len(part) else "" for part in broken]
            sides = (text.ljust if i < left else text.rjust for i, text in enumerate(texts))
            lines.append("  ".join(side(at) for side, at in zip(sides, widths)).rstrip())
        if number == 0:
            lines.append("  ".join("─" * at for at in widths))
    return "\n".join(lines)


def summary(runs):
    """One row for each finding."""
    rows = []
    for run in runs:
        rows += [("",) * 4] if rows else []
        for i, finding in enumerate(run.experiment.findings(run.numbers)):
            name = "" if i else run.experiment.name
            rows.append((name, finding.claim, finding.measured, VERDICTS[finding.verdict]))
    return table(("experiment", "claim", "measured", "verdict"), rows, left=4)


def report(run):
    """All of one experiment but its figures."""
    tables = [
        f"{textwrap.fill(one.caption, width())}\n\n{table(one.header, one.rows)}"
        for one in run.experiment.tables(run.numbers)
    ]
    head = f"{run.experiment.title}\n{textwrap.fill(plain(run.experiment.claim), width())}"
    return "\n\n".join((head, *tables, summary([run])))


def plain(markup):
    """HTML as text."""
    markup = re.sub(r"<sub>", "_", re.sub(r"<sup>", "^", markup))
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", markup))).strip()
