"""What an experiment consists of: a function that measures, and how its numbers are judged, tabulated and drawn."""

import inspect
import math
import numbers
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

HELD, PARTLY, FALSE = "held", "partly", "false"
VERDICTS = {HELD: "held", PARTLY: "half true", FALSE: "false"}  # as people read them
MARKS = {HELD: "✓", PARTLY: "◐", FALSE: "✗"}


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
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the cells that stand out


class Figure(NamedTuple):
    caption: str
    draw: Callable[[Any], Any]  # numbers -> matplotlib.figure.Figure, made with `drawing.panel`


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

    @property
    def options(self) -> dict[str, Any]:
        """The defaults of what can be chosen, by name."""
        parameters = inspect.signature(self.run).parameters.values()
        return {one.name: one.default for one in parameters if one.name != "progress"}


class Run(NamedTuple):
    """An experiment that was carried out."""

    experiment: Experiment
    chosen: dict[str, Any]  # the options that were given
    numbers: Any
    seconds: float


def carry_out(experiment: Experiment, chosen: dict[str, Any], progress: Callable[[Iterable], Iterable] = iter) -> Run:
    start = time.perf_counter()
    numbers = experiment.run(**chosen, progress=progress)
    return Run(experiment, chosen, numbers, time.perf_counter() - start)


def check_sizes(least=1, **sizes):
    """Each of the arguments is a whole number, `least` or more."""
    for name, size in sizes.items():
        if _whole(size) is None:
            raise TypeError(f"{name} is {size!r}: it must be a whole number")
        if size < least:
            raise ValueError(f"{name} is {size!r}: it must be {least} or more")


def check_lists(least=1, **lists):
    """Each of the arguments is a tuple, or a list, of such numbers, and not empty."""
    for name, sizes in lists.items():
        if not isinstance(sizes, tuple | list) or any(_whole(size) is None for size in sizes):
            raise TypeError(f"{name} is {sizes!r}: it must be a tuple of whole numbers")
        if not sizes:
            raise ValueError(f"{name} is empty: it must hold at least one number")
        if min(sizes) < least:
            raise ValueError(f"{name} is {sizes!r}: each must be {least} or more")


def check_positive(**given):
    """Each of the arguments is a number above 0, and finite."""
    for name, number in given.items():
        if not _real(number):
            raise TypeError(f"{name} is {number!r}: it must be a number")
        if not 0 < number < math.inf:
            raise ValueError(f"{name} is {number!r}: it must be above 0, and finite")


def check_positive_lists(**lists):
    """Each of the arguments is a tuple, or a list, of such numbers, and not empty."""
    for name, given in lists.items():
        if not isinstance(given, tuple | list) or not all(map(_real, given)):
            raise TypeError(f"{name} is {given!r}: it must be a tuple of numbers")
        if not given:
            raise ValueError(f"{name} is empty: it must hold at least one number")
        if not all(0 < number < math.inf for number in given):
            raise ValueError(f"{name} is {given!r}: each must be above 0, and finite")


def _real(number):
    return isinstance(number, numbers.Real) and not isinstance(number, bool)


def _whole(size):
    try:
        return operator.index(None if isinstance(size, bool) else size)
    except TypeError:
        return None
