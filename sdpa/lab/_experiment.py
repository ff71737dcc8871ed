"""What an experiment consists of: a function that measures, and how its numbers are judged, tabulated and drawn."""

from collections.abc import Callable
from typing import Any, NamedTuple

HELD, PARTLY, FALSE = "held", "partly", "false"


class Finding(NamedTuple):
    """Whether one claim held, by what was measured."""

    claim: str  # "Var(q·k) = d_k"
    measured: str  # "0.997 to 1.004 times d_k for d_k = 1 to 4096"
    verdict: str  # HELD, PARTLY or FALSE


class Table(NamedTuple):
    """Cells as text; the first column is set left, the others right."""

    caption: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Figure(NamedTuple):
    caption: str
    draw: Callable[[Any], Any]  # numbers -> matplotlib.figure.Figure, made with `_drawing.panel`


class Experiment(NamedTuple):
    """`run` is the public function, whose name is that of the experiment.  All of its arguments are keywords with
    defaults: int, float or a tuple of int, which are options of the command line, and `progress`, through which it
    passes the list of its longest loop (`for dim in progress(dims)`)."""

    run: Callable[..., Any]  # -> numbers: a NamedTuple of arrays and numbers
    title: str
    claim: str  # HTML, a sentence or two
    reason: str  # HTML, paragraphs: the derivation
    findings: Callable[[Any], list[Finding]]
    tables: Callable[[Any], list[Table]]
    figures: list[Figure]

    @property
    def name(self) -> str:
        return self.run.__name__
