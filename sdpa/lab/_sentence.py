"""Experiment: where the words of a sentence look, with and without scaling."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

import sdpa

from .._report.drawing import COLOURS, panel
from .._report.statistics import Band, band, shown
from ._experiment import FALSE, HELD, PARTLY, Experiment, Figure, Finding, Table, check_sizes
from ._heatmap import heatmap
from ._words import RULE, draw_matrix, embed

SENTENCE = "The dog chased the ball because it was fast"
PRONOUN, MEANT = "it", ("dog", "ball")  # to which of the two it refers is left open


class Sentence(NamedTuple):
    """Weights of the first seed, and bands over seeds of what was measured in each head (H)."""

    tokens: tuple[str, ...]
    bare: np.ndarray  # (H, 9, 9): weights with scale 1
    scaled: np.ndarray  # (H, 9, 9): with 1/√d_k
    bare_largest: Band  # (H): the largest weight of a row, the mean over rows
    scaled_largest: Band
    bare_keys: Band  # (H): the effective number of keys, e to the entropy of a row, the mean over rows
    scaled_keys: Band
    same_place: float  # the share of rows whose largest weight is at the same key with both scales
    at_meant: float  # the share of heads whose largest weight for PRONOUN is at one of MEANT


def sentence(
    *, head_dim: int = 64, heads: int = 4, seeds: int = 20, progress: Callable[[list], Iterable] = iter
) -> Sentence:
    """Compute self-attention of the words of a sentence, with weight matrices (width, width) for several heads of
    `head_dim`, drawn again for each seed.  RULE describes the embeddings."""
    check_sizes(head_dim=head_dim, heads=heads)
    check_sizes(least=2, seeds=seeds)
    tokens = tuple(SENTENCE.split())
    words = embed(tokens, heads * head_dim)
    weights = np.empty((2, seeds, heads, len(tokens), len(tokens)))
    for seed in progress(list(range(seeds))):
        query, key = project(words, heads, np.random.default_rng(seed))
        weights[0, seed] = sdpa.attention_weights(query, key, scale=1)
        weights[1, seed] = sdpa.attention_weights(query, key)
    largest = weights.max(axis=-1).mean(axis=-1)
    keys = effective_keys(weights).mean(axis=-1)
    place = weights.argmax(axis=-1)
    return Sentence(
        tokens=tokens,
        bare=weights[0, 0],
        scaled=weights[1, 0],
        bare_largest=band(largest[0]),
        scaled_largest=band(largest[1]),
        bare_keys=band(keys[0]),
        scaled_keys=band(keys[1]),
        same_place=float((place[0] == place[1]).mean()),
        at_meant=float(np.isin(place[1][..., tokens.index(PRONOUN)], list(map(tokens.index, MEANT))).mean()),
    )


def project(words, heads, random):
    """Queries and keys of all heads, (H, words, head_dim)."""
    width = words.shape[1]
    return tuple(
        (words @ draw_matrix(random, width, width)).reshape(len(words), heads, -1).swapaxes(0, 1) for _ in range(2)
    )


def effective_keys(weights):
    """e to the entropy of each row: 1 for a single key, N for equal weights."""
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return np.exp(-(weights * logs).sum(axis=-1))


def findings(numbers: Sentence) -> list[Finding]:
    count = len(numbers.tokens)
    bare, scaled = numbers.bare_largest, numbers.scaled_largest
    chance = len(MEANT) / count
    return [
        Finding(
            "Without scaling each word looks at hardly more than one",
            f"the largest of {count} weights is {bare.mean.min():.2f} to {bare.mean.max():.2f} by head, the effective "
            f"number of keys {numbers.bare_keys.mean.mean():.1f}",
            HELD if bare.low.min() > 0.8 else PARTLY if bare.mean.mean() > 0.5 else FALSE,
        ),
        Finding(
            "With scaling it shares its attention",
            f"the largest is {scaled.mean.min():.2f} to {scaled.mean.max():.2f}, the effective number of keys "
            f"{numbers.scaled_keys.mean.mean():.1f}",
            HELD if scaled.high.max() < 0.5 else PARTLY if scaled.mean.mean() < bare.mean.mean() else FALSE,
        ),
        Finding(
            "Scaling changes how sharply a word looks, not where",
            f"{numbers.same_place:.1%} of rows have their largest weight at the same key",
            HELD if numbers.same_place == 1 else FALSE,
        ),
        Finding(
            f"“{PRONOUN}” looks at “{MEANT[0]}” or “{MEANT[1]}”",
            f"in {numbers.at_meant:.0%} of heads, where chance gives {chance:.0%}: this attention was not trained, and "
            f"only training can teach it",
            HELD if numbers.at_meant > 0.5 else PARTLY if numbers.at_meant > 2 * chance else FALSE,
        ),
    ]


def tables(numbers: Sentence) -> list[Table]:
    bands = numbers.bare_largest, numbers.scaled_largest, numbers.bare_keys, numbers.scaled_keys
    rows = [(f"head {head + 1}", *(shown(band, head) for band in bands)) for head in range(len(numbers.bare))]
    header = ("", "largest weight, bare", "scaled", "effective keys, bare", "scaled")
    caption = "Means over the words of the sentence and over seeds, with 95 % bands over seeds."
    return [Table(caption, header, rows)]


def draw_pronoun(numbers):
    figure, axes = panel()
    row = numbers.tokens.index(PRONOUN)
    at = np.arange(len(numbers.tokens))
    axes.bar(at - 0.2, numbers.bare[0, row], 0.4, color=COLOURS[1], label="scale 1")
    axes.bar(at + 0.2, numbers.scaled[0, row], 0.4, color=COLOURS[0], label="1/√d_k")
    axes.set_xticks(at, numbers.tokens, rotation=90)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="weight", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


EXPERIMENT = Experiment(
    run=sentence,
    title="Where a sentence looks",
    claim=(
        f"“{SENTENCE}”: without scaling the softmax of each word picks one other word, whichever happens to match "
        "best; with scaling it spreads over several."
    ),
    reason=f"""
<p>Each row of a map is a word that asks, each column a word that answers; a row adds up to 1. Scores of untrained
heads have the standard deviation √<var>d<sub>k</sub></var> without scaling, 8 for heads of 64, and gaps of that size
leave a single winner. A model that starts like this has made up its mind before it has learned anything.</p>
<p>{RULE}</p>
<p>To draw weights of your own: <code>sdpa.lab.heatmap(sdpa.attention_weights(query, key), tokens)</code>.</p>
""",
    findings=findings,
    tables=tables,
    figures=[
        Figure(
            "Without scaling: the weights of each head. From the top the words that ask, from the left those that "
            "answer.",
            lambda numbers: heatmap(numbers.bare, numbers.tokens),
        ),
        Figure(
            "The same heads with scores divided by √d_k.",
            lambda numbers: heatmap(numbers.scaled, numbers.tokens),
        ),
        Figure(f"Where “{PRONOUN}” looks in head 1, with both scales.", draw_pronoun),
    ],
)
