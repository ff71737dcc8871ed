"""Experiment: what the softmax makes of the gaps between scores."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

import sdpa

from .._report.drawing import COLOURS, MUTED, panel
from ._experiment import (
    FALSE,
    HELD,
    PARTLY,
    Experiment,
    Figure,
    Finding,
    Table,
    check_lists,
    check_positive,
    check_sizes,
)

SCORES = ((7, 3), (4, 5), (1, 10), (25, 2, -3))
SAID = ("0.98/0.02", "26.89 %/73.11 %", "0.01 %/99.99 %", "one-hot")  # of the scores, in the notes
DIGITS = (2, 4, 4, 4)  # decimals of the weights that these give
EXPECTED = ((0.98, 0.02), (0.2689, 0.7311), (0.0001, 0.9999), (1, 0, 0))
SHIFT = 1000.0
LOUD = 1e12  # the value of a key with hardly any weight


class Gaps(NamedTuple):
    scores: tuple[tuple[float, ...], ...]
    weights: tuple[np.ndarray, ...]  # of each of the scores, float32
    shifted: float  # the largest change of a weight where SHIFT is added to all scores of a row, float64
    leak: float  # the result for the last scores where the value of the largest is 0, of the second LOUD
    keys: tuple[int, ...]
    gaps: np.ndarray  # (gaps)
    largest: np.ndarray  # (keys, gaps): the weight of a key that is so far above all others
    needed: np.ndarray  # (keys): the gap at which it has half of the weight


def gaps(
    *,
    keys: tuple[int, ...] = (2, 16, 256, 4096),
    widest: float = 16.0,
    points: int = 65,
    progress: Callable[[list], Iterable] = iter,
) -> Gaps:
    """Measure the weights of given scores, and the weight of a key whose score is 0 to `widest` above the scores of all
    other keys, for several numbers of keys."""
    check_lists(least=2, keys=keys)
    check_sizes(least=2, points=points)
    check_positive(widest=widest)
    weights = tuple(weights_of(np.array(scores, np.float32)) for scores in SCORES)
    shifted = max(
        np.abs(weights_of(np.add(scores, SHIFT)) - weights_of(np.add(scores, 0.0))).max() for scores in SCORES
    )
    last = np.array(SCORES[-1], np.float32)[:, None]
    leak = sdpa.attention(np.ones((1, 1), np.float32), last, np.array([[0], [LOUD], [0]], np.float32), scale=1)
    steps = np.linspace(0, widest, points)
    largest = np.empty((len(keys), points))
    for i, count in enumerate(progress(list(keys))):
        scores = np.zeros((points, count))
        scores[:, 0] = steps
        largest[i] = weights_of(scores)[:, 0]
    return Gaps(
        SCORES, weights, float(shifted), float(leak[0, 0]), tuple(keys), steps, largest, np.log(np.subtract(keys, 1))
    )


def weights_of(scores):
    """The weights that the kernels give keys with these scores, (..., N): one feature, and queries of 1."""
    return sdpa.attention_weights(np.ones((*scores.shape[:-1], 1, 1), scores.dtype), scores[..., None], scale=1)[
        ..., 0, :
    ]


def findings(numbers: Gaps) -> list[Finding]:
    found = []
    for scores, weights, said, digits, expected in zip(numbers.scores, numbers.weights, SAID, DIGITS, EXPECTED):
        right = np.array_equal(np.round(weights.astype(float), digits), expected)
        measured = " / ".join(f"{weight:.{digits}f}" if weight > 1e-4 else f"{weight:.1e}" for weight in weights)
        found.append(Finding(f"softmax({bracket(scores)}) is {said}", measured, HELD if right else FALSE))
    alone = np.count_nonzero(numbers.weights[-1]) == 1 and numbers.leak == 0
    one_hot = np.allclose(numbers.weights[-1], EXPECTED[-1], atol=1e-4)
    return [
        *found,
        Finding(
            "One-hot: the other keys no longer count",
            f"the second key keeps {numbers.weights[-1][1]:.1e}; with a value of {LOUD:.0e} it moves the result by "
            f"{numbers.leak:.0f}",
            HELD if alone else PARTLY if one_hot else FALSE,
        ),
        Finding(
            "Only gaps count: a number added to all scores changes nothing",
            f"adding {SHIFT:.0f} changes weights by at most {numbers.shifted:.1g} (float64)",
            HELD if numbers.shifted < 1e-12 else FALSE,
        ),
        found_in_crowds(numbers),
    ]


def found_in_crowds(numbers):
    """The same gap among more keys."""
    i = int(np.abs(numbers.gaps - 4).argmin())
    shares = numbers.largest[:, i]
    most, least = shares[np.argmin(numbers.keys)], shares[np.argmax(numbers.keys)]
    return Finding(
        f"A gap of {numbers.gaps[i]:g} decides, however many keys there are",
        f"the largest weight is {most:.3f} of {min(numbers.keys)} keys, {least:.3f} of {max(numbers.keys)}; half of "
        f"the weight needs a gap of ln(N − 1)",
        HELD if least > 0.9 else PARTLY if most > 0.9 else FALSE,
    )


def bracket(scores):
    return f"[{', '.join(f'{score:g}' for score in scores)}]".replace("-", "−")


def tables(numbers: Gaps) -> list[Table]:
    rows = [
        (bracket(scores), *(f"{weight:.4%}" if weight > 1e-6 else f"{weight:.1e}" for weight in weights))
        for scores, weights in zip(numbers.scores, numbers.weights)
    ]
    shares = [
        (f"{count}", *(f"{share:.4f}" for share in picked(numbers, row)), f"{needed:.2f}")
        for count, row, needed in zip(numbers.keys, numbers.largest, numbers.needed)
    ]
    gaps = picked(numbers, numbers.gaps)
    return [
        Table(
            "Weights of given scores, by the kernels in float32.",
            ("scores", "first", "second", "third"),
            [(*row, *[""] * (4 - len(row))) for row in rows],
        ),
        Table(
            "The weight of one key by how far its score is above those of all others.",
            ("keys", *(f"gap {gap:g}" for gap in gaps), "gap for 1/2"),
            shares,
        ),
    ]


def picked(numbers, row):
    """Five of the columns."""
    return row[np.linspace(0, len(numbers.gaps) - 1, 5).round().astype(int)]


def draw_weights(numbers):
    figure, axes = panel()
    at, places, names = 0.0, [], []
    for scores, weights, colour in zip(numbers.scores, numbers.weights, COLOURS):
        for score, weight in zip(scores, 100 * weights):
            axes.bar(at, weight, width=0.8, color=colour)
            axes.text(at, weight + 1.5, percent(weight), ha="center", fontsize=7)
            places.append(at)
            names.append(f"{score:g}".replace("-", "−"))
            at += 1
        at += 0.7
    axes.set_xticks(places, names)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="score", ylabel="weight in %", ylim=(0, 109))
    return figure


def percent(weight):
    """Short enough for the width of a bar."""
    return "≈ 0" if weight < 1e-3 else f"{weight:.2f}" if weight < 0.1 or 99.9 < weight < 99.995 else f"{weight:.3g}"


def draw_gaps(numbers):
    figure, axes = panel()
    for count, row, colour in zip(numbers.keys, numbers.largest, COLOURS):
        axes.plot(numbers.gaps, row, color=colour, label=f"{count} keys")
    axes.axhline(0.5, color=MUTED, linewidth=0.8, linestyle="--")
    axes.set(xlabel="gap to all other scores", ylabel="largest weight", ylim=(0, 1.03), xlim=(0, None))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


EXPERIMENT = Experiment(
    run=gaps,
    title="Softmax and its gaps",
    claim=(
        "The softmax turns gaps between scores into ratios of weights, exponentially: a gap of 4 is 98 to 2, a gap of "
        "9 is 9999 to 1, and a gap of 23 leaves nothing to share."
    ),
    reason="""
<p>The ratio of two weights is e<sup><var>a</var></sup> / e<sup><var>b</var></sup> =
e<sup><var>a</var> − <var>b</var></sup>: only the gap counts, and each further step of 1 multiplies the ratio by
2.718. With two keys the larger weight is 1 / (1 + e<sup>−gap</sup>); with <var>N</var> keys, all others equal, it is
1 / (1 + (<var>N</var> − 1) e<sup>−gap</sup>), which is one half at the gap ln(<var>N</var> − 1).</p>
<p>Scores with standard deviation √<var>d<sub>k</sub></var> have gaps of that size: 8 at
<var>d<sub>k</sub></var> = 64. Division by √<var>d<sub>k</sub></var> makes it 1, where the softmax still
shares.</p>
<p>The kernels are given one feature, a query of 1 and the scores as keys, with scale 1.</p>
""",
    findings=findings,
    tables=tables,
    figures=[
        Figure("Weights of four sets of scores.", draw_weights),
        Figure("The weight of one key that is above all others by a gap, among more and more keys.", draw_gaps),
    ],
)
