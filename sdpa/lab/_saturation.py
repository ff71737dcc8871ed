"""How sharp the softmax is, against the size of a head and the scale."""

from typing import NamedTuple

import numpy as np

import sdpa

from .._report.drawing import INK
from .._report.panels import lines_over
from ._experiment import Experiment, Figure, Finding, Table, check_lists, check_sizes
from ._measures import DIMS, freezing, gap_rate, judged, sharpness

SCALES = "1", "1/√d_k", "1/d_k", "1/√d_model"
BARE, ROOT, FLAT, MODEL = range(4)
SPREADS = 2.0 ** np.arange(-3, 6.5, 0.5)
SPREAD_DIM = 128  # size of a head where the spread of the scores is set by the scale


class Saturation(NamedTuple):
    """What `saturation` returns.  Means over the queries, for each of S = 4 scales (see SCALES), D dims and seed; and
    at d_k = 128 with scale s / √d_k for each of P spreads s."""

    dims: np.ndarray  # (D)
    keys: int
    heads: int  # d_model = heads * d_k
    largest: np.ndarray  # (S, D, seeds): the largest weight of a query
    entropy: np.ndarray  # (S, D, seeds), in nats
    effective: np.ndarray  # (S, D, seeds): exp(entropy)
    inverse: np.ndarray  # (S, D, seeds): 1 / Σp²
    spreads: np.ndarray  # (P)
    spread_entropy: np.ndarray  # (P, seeds)
    spread_inverse: np.ndarray  # (P, seeds)


def saturation(
    *,
    dims: tuple[int, ...] = DIMS,
    keys: int = 512,
    queries: int = 128,
    heads: int = 8,
    seeds: int = 16,
    progress=iter,
) -> Saturation:
    """Measure the largest weight, the entropy and the effective number of keys, for four scales and every size of a
    head in `dims`.  Queries and keys have independent normal elements of variance 1, and d_model is `heads` * d_k."""
    check_lists(dims=dims)
    check_sizes(queries=queries, heads=heads, seeds=seeds)
    check_sizes(2, keys=keys)
    by_dim, by_spread = [], []
    for seed in progress(range(seeds)):
        rng = np.random.default_rng(seed)
        scales = {dim: (1, dim**-0.5, 1 / dim, (heads * dim) ** -0.5) for dim in dims}
        by_dim.append([measure(rng, queries, keys, dim, scales[dim]) for dim in dims])
        by_spread.append(measure(rng, queries, keys, SPREAD_DIM, SPREADS * SPREAD_DIM**-0.5))
    largest, entropy, effective, inverse = np.transpose(by_dim, (3, 2, 1, 0))
    _, spread_entropy, _, spread_inverse = np.transpose(by_spread, (2, 1, 0))
    return Saturation(
        np.array(dims), keys, heads, largest, entropy, effective, inverse, SPREADS, spread_entropy, spread_inverse
    )


def measure(rng, queries, keys, dim, scales):
    """Sharpness (S, 4) of the weights at each scale, a mean over the queries."""
    query, key = rng.standard_normal((queries, dim), np.float32), rng.standard_normal((keys, dim), np.float32)
    weights = (sdpa.attention_weights(query, key, scale=float(scale)) for scale in scales)
    return [[values.mean() for values in sharpness(each)] for each in weights]


def reach(spreads, actual, expected, tolerance=0.1):
    """The largest spread up to which all of `actual` are that close to `expected`; 0 if none is."""
    close = np.abs(actual - expected) <= tolerance * expected
    return spreads[: int(np.argmin(close)) if not close.all() else None].max(initial=0)


def findings(numbers: Saturation) -> list[Finding]:
    return [find_saturation(numbers), find_root(numbers), find_flat(numbers), find_model(numbers), find_law(numbers)]


def find_saturation(numbers):
    low, high = numbers.dims.argmin(), numbers.dims.argmax()
    first, last = numbers.largest[BARE, low].mean(), numbers.largest[BARE, high].mean()
    return Finding(
        "Without scaling the softmax saturates as d_k grows",
        f"largest weight {first:.3f} at d_k = {numbers.dims[low]}, {last:.3f} at {numbers.dims[high]}; of "
        f"{numbers.keys} keys {numbers.effective[BARE, high].mean():.1f} count there (exp of the entropy)",
        judged(last > first, last > 0.9),
    )


def find_root(numbers):
    expected = numbers.keys * np.exp(-0.5)
    off = np.abs(numbers.effective[ROOT].mean(axis=-1) / expected - 1)
    usual = numbers.dims >= 16
    worst = off.argmax()
    return Finding(
        "With 1/√d_k the weights are equally sharp at every d_k",
        f"N e^(-1/2) = {expected:.0f} keys are expected to count; off by at most {off[usual].max(initial=0):.1%} from "
        f"d_k = 16 on, by {off[worst]:.1%} at d_k = {numbers.dims[worst]}",
        judged((off <= 0.05).all(), usual.any() and (off[usual] <= 0.05).all()),
    )


def find_flat(numbers):
    share = numbers.effective.mean(axis=-1) / numbers.keys
    high = numbers.dims.argmax()
    larger = numbers.dims > 1  # at 1 the two scales are one
    return Finding(
        "1/d_k is too flat",
        f"{share[FLAT, high]:.2%} of the keys count at d_k = {numbers.dims[high]}, where 1/√d_k has "
        f"{share[ROOT, high]:.1%}",
        judged((share[FLAT] > share[ROOT])[larger].all(), share[FLAT, high] > 0.99),
    )


def find_model(numbers):
    """The entropy lost is s²/2 with s² = 1 / heads."""
    share = numbers.effective.mean(axis=-1) / numbers.keys
    expected = np.exp(-0.5 / numbers.heads)
    off = np.abs(share[MODEL] / expected - 1).max()
    return Finding(
        f"1/√d_model is too flat, by the number of heads (here {numbers.heads}) and not by d_k",
        f"e^(-1/(2·heads)) = {expected:.1%} of the keys expected to count, measured {share[MODEL].min():.1%} to "
        f"{share[MODEL].max():.1%} over all d_k",
        judged(off <= 0.02, (share[MODEL] > share[ROOT]).all()),
    )


def find_law(numbers):
    spreads, keys = numbers.spreads, numbers.keys
    lost = np.log(keys) - numbers.spread_entropy.mean(axis=-1)
    entropy = reach(spreads, lost, spreads**2 / 2)
    inverse = reach(spreads, numbers.spread_inverse.mean(axis=-1), keys * np.exp(-(spreads**2)))
    return Finding(
        "Scores with standard deviation s take s²/2 from the entropy ln N",
        f"within 10 % up to s = {entropy:.2g}, 1/Σp² = N e^(-s²) up to s = {inverse:.2g}; above √(2 ln N) = "
        f"{freezing(keys):.2g} the law would leave an entropy below 0",
        judged(entropy == spreads.max(), entropy >= 1),
    )


def tables(numbers: Saturation) -> list[Table]:
    header = ("d_k", *(f"scale {scale}" for scale in SCALES))
    some = range(len(numbers.dims))[:: -(-len(numbers.dims) // 7)]

    def rows(values, form):
        return [(str(numbers.dims[i]), *(format(mean, form) for mean in values[:, i].mean(axis=-1))) for i in some]

    return [
        Table("Largest weight of a query, mean", header, rows(numbers.largest, ".3f")),
        Table(f"Keys that count of {numbers.keys}: exp(entropy), mean", header, rows(numbers.effective, ".1f")),
        Table(f"Keys that count of {numbers.keys}: 1/Σp², mean", header, rows(numbers.inverse, ".1f")),
    ]


def by_scale(values):
    return {f"scale {scale}": samples for scale, samples in zip(SCALES, values)}


def draw_largest(numbers):
    lines = by_scale(numbers.largest)
    return lines_over(numbers.dims, lines, "d_k", "largest weight", yscale="log")


def draw_effective(numbers):
    lines = by_scale(numbers.effective / numbers.keys)
    return lines_over(numbers.dims, lines, "d_k", "share of the keys that count", limits=(0, 1.02))


def draw_entropy(numbers):
    lines = by_scale(numbers.entropy)
    return lines_over(numbers.dims, lines, "d_k", "entropy (nats)", limits=(0, np.log(numbers.keys) * 1.05))


def draw_law(numbers):
    """The law of small spreads, and that of frozen weights: two keys share what is left."""
    limit, largest = freezing(numbers.keys), numbers.spreads.max()
    small, frozen = np.linspace(numbers.spreads.min(), limit, 50), np.linspace(2 * limit, largest, 50)
    expected = {
        "ln N − s²/2": (small, np.log(numbers.keys) - small**2 / 2),
        "(π²/6) · r/s": (frozen, np.pi**2 / 6 * gap_rate(numbers.keys) / frozen),
    }
    lines = {"measured": numbers.spread_entropy}
    figure = lines_over(
        numbers.spreads, lines, "standard deviation s of the scores", "entropy (nats)",
        expected=expected, ticks=SPREADS[::4], columns=3,
    )  # fmt: skip
    axes = figure.axes[0]
    axes.axvline(limit, color=INK, linewidth=0.8)
    axes.annotate("√(2 ln N)", (limit, np.log(numbers.keys)), (4, -4), textcoords="offset points", fontsize=8)
    return figure


REASON = """
<p>Let the elements of <var>q</var> and <var>k</var> be independent with mean 0 and variance 1. A score
<code>scale · q·k</code> then has the standard deviation <var>s</var> = <code>scale · √d<sub>k</sub></code>, and only
<var>s</var> and the number <var>N</var> of keys decide how sharp the softmax is: <var>s</var> is
√<var>d<sub>k</sub></var> for scale 1, 1 for 1/√<var>d<sub>k</sub></var>, 1/√<var>d<sub>k</sub></var> for
1/<var>d<sub>k</sub></var>, and 1/√heads for 1/√<var>d</var><sub>model</sub>.</p>
<p><b>Small s.</b> With scores <var>s z<sub>j</sub></var>, <var>z<sub>j</sub></var> normal, the sum of
<code>exp(s z<sub>j</sub>)</code> is about <var>N</var> e<sup>s²/2</sup>, and the mean of <var>z</var> under the weights
is <var>s</var>. So the entropy is
<code>ln Σ exp(s z<sub>j</sub>) &minus; s · s = ln N + s²/2 &minus; s² = ln N &minus; s²/2</code>:
e<sup>&minus;s²/2</sup> of the keys count, 61 % for <var>s</var> = 1. In the same way
<code>1/Σp² = (N e<sup>s²/2</sup>)² / (N e<sup>2s²</sup>) = N e<sup>&minus;s²</sup></code>.</p>
<p>Where <var>s</var> is near 0 all keys count, and the result is the mean of all values. At small
<var>d<sub>k</sub></var> queries differ much in length, each has an <var>s</var> of its own, and the mean over them is
not that of one <var>s</var>.</p>
<p><b>Large s.</b> The mean of <var>z</var> under the weights cannot exceed the largest of the <var>N</var>, which is
about √(2 ln <var>N</var>). Beyond <var>s</var> = √(2 ln <var>N</var>), which scale 1 reaches at
<var>d<sub>k</sub></var> = 2 ln <var>N</var> (12.5 for 512 keys), the weights freeze on a few keys, and more keys do not
help. The gap between the two best <var>z</var> is about exponential with a rate <var>r</var> (3.0 for 512 keys), so the
two best scores are within 1 of each other for a share <var>r/s</var> of the queries: what is left of the entropy is
(π²/6) · <var>r/s</var>, and 1 &minus; Σ<var>p</var>² is about <var>r/s</var>. Saturation comes like
1/√<var>d<sub>k</sub></var>, not faster.</p>
"""

EXPERIMENT = Experiment(
    run=saturation,
    title="Saturation",
    claim="Without the factor 1/√<var>d<sub>k</sub></var> the softmax of large heads gives nearly all weight to one "
    "key; with 1/<var>d<sub>k</sub></var> or 1/√<var>d</var><sub>model</sub> it is too flat.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("Largest weight of a query, for four scales; equal weights have 1/N.", draw_largest),
        Figure("Share of the keys that count, exp(entropy) / N, for four scales.", draw_effective),
        Figure("Entropy for four scales; equal weights have ln N.", draw_entropy),
        Figure(
            "Entropy against the spread of the scores, set by the scale at d_k = 128, and what is expected of it: on "
            "the left for small s, on the right for frozen weights.",
            draw_law,
        ),
    ],
)
