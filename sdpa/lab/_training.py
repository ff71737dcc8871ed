"""How a small model learns to recall, with four scales and several rates."""

from typing import NamedTuple

import numpy as np

import sdpa

from .._report.drawing import COLOURS, draw_band, panel
from .._report.panels import legend_above, lines_over
from .._report.statistics import band, shown
from ._experiment import Experiment, Figure, Finding, Table, check_positive_lists, check_sizes
from ._measures import judged
from ._recall_model import THREADS, Adam, draw_batch, draw_parameters, learn_from

SCALES = "1", "1/√d_k", "1/d_k", "1/√d_model"
BARE, ROOT, FLAT, MODEL = range(4)
SYMBOLS = 32  # names there are, and things
LEARNT = 0.9  # accuracy
WINDOW = 10  # steps whose mean accuracy is compared with that: 1280 questions


class Training(NamedTuple):
    """What `training` returns, for each of S = 4 scales (SCALES), R rates and seed.  A rate is that of Adam."""

    rates: np.ndarray  # (R)
    dim: int  # d_k = width / heads
    heads: int
    pairs: int
    loss: np.ndarray  # (S, R, steps, seeds): of a batch that was not seen before, in nats
    accuracy: np.ndarray  # (S, R, steps, seeds)
    needed: np.ndarray  # (S, R, seeds): steps until the accuracy is LEARNT; as many as there are, plus 1, if never
    largest: np.ndarray  # (2, S, R, seeds): mean largest weight of a question, at the first step and at the last

    @property
    def steps(self):
        return self.loss.shape[2]


def training(
    *,
    steps: int = 150,
    rates: tuple[float, ...] = (0.001, 0.003, 0.01),
    width: int = 256,
    heads: int = 4,
    pairs: int = 16,
    batch: int = 8,
    seeds: int = 5,
    progress=iter,
) -> Training:
    """Train a layer of attention to recall: it is shown `pairs` of a name and a thing, and asked for the thing of each
    name.  For each seed, every scale and rate starts from the same matrices and sees the same batches."""
    check_sizes(steps=steps, width=width, heads=heads, pairs=pairs, batch=batch, seeds=seeds)
    if width % heads:
        raise ValueError(f"width is {width}: it must be a multiple of heads, which is {heads}")
    if pairs > SYMBOLS:
        raise ValueError(f"pairs is {pairs}: it must be {SYMBOLS} or less, the number of names")
    check_positive_lists(rates=rates)
    dim = width // heads
    scales = 1.0, dim**-0.5, 1 / dim, width**-0.5
    loss, accuracy = np.empty((2, len(scales), len(rates), steps, seeds))
    largest = np.empty((2, len(scales), len(rates), seeds))
    for seed in progress(range(seeds)):
        for i, scale in enumerate(scales):
            for j, rate in enumerate(rates):
                run = train(seed, steps, scale, rate, width, heads, pairs, batch)
                loss[i, j, :, seed], accuracy[i, j, :, seed], largest[:, i, j, seed] = run
    return Training(np.array(rates), dim, heads, pairs, loss, accuracy, steps_needed(accuracy), largest)


def train(seed, steps, scale, rate, width, heads, pairs, batch):
    """Losses (steps), accuracies (steps), and the mean largest weight at the first step and at the last."""
    random = np.random.default_rng(seed)
    parameters = draw_parameters(random, SYMBOLS, width)
    adam = Adam(parameters, rate)
    losses, accuracies, largest = np.empty(steps), np.empty(steps), np.empty(2)
    for i in range(steps):
        result = learn_from(parameters, draw_batch(random, batch, pairs, SYMBOLS), heads, scale)
        losses[i], accuracies[i] = result.loss, result.accuracy
        if i in (0, steps - 1):
            weights = sdpa.attention_weights(result.query, result.key, scale=scale, threads=THREADS)
            largest[int(i > 0) :] = weights.max(axis=-1).mean()  # of a single step both
        adam.step(result.gradients)
    return losses, accuracies, largest


def steps_needed(accuracy):
    """The first step at which the mean accuracy of the last WINDOW is LEARNT; of accuracy (S, R, steps, seeds)."""
    steps = accuracy.shape[2]
    window = min(WINDOW, steps)
    learnt = np.lib.stride_tricks.sliding_window_view(accuracy, window, axis=2).mean(axis=-1) >= LEARNT
    return np.where(learnt.any(axis=2), learnt.argmax(axis=2) + window, steps + 1)


def findings(numbers: Training) -> list[Finding]:
    return [
        find_saturated(numbers),
        find_slower(numbers),
        find_never(numbers),
        find_later(numbers, FLAT),
        find_later(numbers, MODEL),
        find_end(numbers),
    ]


def find_saturated(numbers):
    first = numbers.largest[0, :, middle(numbers)].mean(axis=-1)
    return Finding(
        "Without scaling the model starts saturated",
        f"with d_k = {numbers.dim} the largest weight of a question is {first[BARE]:.2f} at the first step, "
        f"{first[ROOT]:.2f} with 1/√d_k (equal weights are 1/{numbers.pairs} = {1 / numbers.pairs:.2f})",
        judged(first[BARE] > 0.7, first[BARE] > 1.5 * first[ROOT]),
    )


def find_slower(numbers):
    needed = typical(numbers)
    return Finding(
        "Without scaling it takes longer to learn, at every rate",
        f"steps until {LEARNT:.0%} are right: "
        + "; ".join(
            f"{said(needed[BARE, j], numbers.steps)} with scale 1, {said(needed[ROOT, j], numbers.steps)} with 1/√d_k "
            f"(rate {rate:g})"
            for j, rate in enumerate(numbers.rates)
        ),
        judged((needed[BARE] > 1.5 * needed[ROOT]).all(), (needed[BARE] > needed[ROOT]).any()),
    )


def find_never(numbers):
    accuracy = last(numbers.accuracy)[BARE]
    return Finding(
        "Without scaling it does not learn",
        f"after {numbers.steps} steps {accuracy.max():.0%} are right at the best of the rates, {accuracy.min():.0%} at "
        f"the worst (by guessing {1 / SYMBOLS:.0%})",
        judged(accuracy.max() < 0.5, accuracy.min() < 0.5),
    )


def find_later(numbers, scale):
    """At the same rate, and each at its best rate."""
    needed = typical(numbers)
    ratios, best = needed[scale] / needed[ROOT], needed.min(axis=-1)
    return Finding(
        f"{SCALES[scale]} takes longer than 1/√d_k",
        ", ".join(f"{ratio:.2f}" for ratio in ratios)
        + " times as many steps at the rates "
        + ", ".join(f"{rate:g}" for rate in numbers.rates)
        + f"; each at its best rate {said(best[scale], numbers.steps)} and {said(best[ROOT], numbers.steps)}",
        judged((ratios > 1.1).all(), (ratios > 1.1).any()),
    )


def find_end(numbers):
    loss, accuracy = last(numbers.loss).min(axis=-1), last(numbers.accuracy).max(axis=-1)
    return Finding(
        "In the end the scale does not matter, for training makes up for it",
        f"over the last {min(WINDOW, numbers.steps)} of {numbers.steps} steps, each scale at its best rate: "
        f"at least {accuracy.min():.1%} are right; loss "
        + ", ".join(f"{each:.1g} with {scale}" for scale, each in zip(SCALES, loss)),
        judged(accuracy.min() > 0.99, loss.max() < 2 * loss[ROOT]),
    )


def last(values):
    """Means over the last steps and all seeds, (S, R)."""
    return values[:, :, -WINDOW:].mean(axis=(2, 3))


def typical(numbers):
    """Median over the seeds, which those that never learn do not blur; (S, R)."""
    return np.median(numbers.needed, axis=-1)


def said(needed, steps):
    return f"{needed:.0f}" if needed <= steps else f"over {steps}"


def middle(numbers):
    """The rate of the curves."""
    return len(numbers.rates) // 2


def tables(numbers: Training) -> list[Table]:
    needed = typical(numbers)
    loss, accuracy = last(numbers.loss), last(numbers.accuracy)
    header = ("rate", *(f"scale {scale}" for scale in SCALES))
    largest = band(numbers.largest[:, :, middle(numbers)], axis=-1)

    def rows(cell):
        return [(f"{rate:g}", *(cell(i, j) for i in range(len(SCALES)))) for j, rate in enumerate(numbers.rates)]

    return [
        Table(
            f"Steps until {LEARNT:.0%} are right, median of {numbers.loss.shape[-1]} seeds: {numbers.heads} heads of "
            f"{numbers.dim}, lists of {numbers.pairs} pairs",
            header,
            rows(lambda i, j: said(needed[i, j], numbers.steps)),
        ),
        Table(
            f"Loss and share of right answers over the last {min(WINDOW, numbers.steps)} of {numbers.steps} steps",
            header,
            rows(lambda i, j: f"{loss[i, j]:.3g}, {accuracy[i, j]:.1%}"),
        ),
        Table(
            f"Largest weight of a question, rate {numbers.rates[middle(numbers)]:g}",
            ("", *header[1:]),
            [
                (name, *(shown(largest, (at, i)) for i in range(len(SCALES))))
                for at, name in enumerate(("first step", f"step {numbers.steps}"))
            ],
        ),
    ]


def draw_curves(numbers, values, ylabel, **options):
    figure, axes = panel()
    steps = np.arange(1, numbers.steps + 1)
    for scale, colour, samples in zip(SCALES, COLOURS, values[:, middle(numbers)]):
        draw_band(axes, steps, band(samples, axis=-1), f"scale {scale}", colour, markevery=len(steps))
    axes.set(xlabel=f"step (rate {numbers.rates[middle(numbers)]:g})", ylabel=ylabel, **options)
    legend_above(figure, 2)
    return figure


def draw_loss(numbers):
    return draw_curves(numbers, numbers.loss, "loss (nats)", ylim=(0, None))


def draw_accuracy(numbers):
    return draw_curves(numbers, numbers.accuracy, "share of right answers", ylim=(0, 1.02))


def draw_needed(numbers):
    lines = {f"scale {scale}": samples for scale, samples in zip(SCALES, numbers.needed)}
    return lines_over(
        numbers.rates, lines, "rate", f"steps until {LEARNT:.0%} are right", limits=(0, numbers.steps * 1.05)
    )


REASON = f"""
<p><b>The task.</b> The model is shown pairs of a name and a thing, drawn anew for each list, and asked for the thing of
each name: “plum 7, stone 2, rope 9: stone?” It is one layer: embeddings, projections to queries, keys and values,
attention by <code>sdpa.attention</code>, and one matrix from all heads to a logit for each of {SYMBOLS} things. The
gradients are those of <code>sdpa.attention_backward</code> and a few products; the optimiser is Adam. Every batch is
new, so the model learns to look up, and not the lists. All scales start from the same matrices, of variance
1/<var>d</var><sub>model</sub>, and see the same batches; the first table says how large heads and lists are.</p>
<p><b>A scale that is too large.</b> With scale 1 scores start with a standard deviation of √<var>d<sub>k</sub></var>:
each question looks at one pair, hardly ever the right one, and nearly nothing passes the softmax back to its scores.
Adam divides gradients by their size, so that small gradients alone would do no harm. But if most questions have no
gradient, the few questions for which two keys tie decide, and these say little of the others.</p>
<p><b>A scale that is too small</b> starts with the mean over all pairs. Every pair has a share, so that every question
has a gradient, and that of the right pair can grow. Scores have to grow by √<var>d<sub>k</sub></var> for
1/<var>d<sub>k</sub></var>, by √heads for 1/√<var>d</var><sub>model</sub>, and query and key grow both.</p>
<p><b>The rate.</b> A step of Adam changes each element of a matrix by about the rate, whatever the scale; what that
changes in a score goes with the scale. A smaller scale is a smaller step, so that a scale may be good or bad for one
rate only: scales are compared at several rates.</p>
"""

EXPERIMENT = Experiment(
    run=training,
    title="Training with it and without",
    claim="Without the factor 1/√<var>d<sub>k</sub></var> a model does not learn, or slowly; with "
    "1/<var>d<sub>k</sub></var> or 1/√<var>d</var><sub>model</sub> it learns more slowly.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("Loss on batches not seen before.", draw_loss),
        Figure("Share of right answers.", draw_accuracy),
        Figure(f"Steps until {LEARNT:.0%} of the answers are right, by the rate; at the top: never.", draw_needed),
    ],
)
