"""Which dimension belongs under the root: that of a head, not that of the model."""

from typing import NamedTuple

import numpy as np

import sdpa

from .._report.panels import lines_over
from ._experiment import Experiment, Figure, Finding, Table, check_lists, check_sizes
from ._measures import judged, sharpness

SCALES = "1", "1/√d_k", "1/√d"
BARE, ROOT, MODEL = range(3)
PROJECTED_TOKENS = 64
PROJECTED_HEADS = 2  # of all heads: each is like the others


class Heads(NamedTuple):
    """What `heads` returns, for each of C counts of heads; S = 3 scales (SCALES)."""

    heads: np.ndarray  # (C)
    dims: np.ndarray  # (C): d_k = width / heads
    width: int  # d
    keys: int
    variance: np.ndarray  # (C, seeds): of q·k in a head
    largest: np.ndarray  # (S, C, seeds): largest weight of a query, mean
    effective: np.ndarray  # (S, C, seeds): exp(entropy), mean
    projected: int  # the count of heads for which x is projected
    element_variance: np.ndarray  # (2, seeds): of the elements of x W_Q and x W_K
    projected_variance: np.ndarray  # (seeds): of q·k in a head of these


def heads(
    *,
    counts: tuple[int, ...] = (1, 12, 24, 48, 96, 192, 384, 768),
    width: int = 12288,
    keys: int = 512,
    queries: int = 64,
    projected: int = 96,
    seeds: int = 8,
    progress=iter,
) -> Heads:
    """Measure the variance of q·k in a head, and the sharpness of its weights for three scales, if d = `width` is split
    into each of `counts` heads.  Queries and keys of a head are normal with variance 1.  For `projected` heads they are
    also computed from x (64, d) of variance 1 and weights W_Q, W_K of variance 1/d."""
    check_lists(counts=counts)
    check_sizes(width=width, queries=queries, projected=projected, seeds=seeds)
    check_sizes(2, keys=keys)
    for name, given in ("counts", counts), ("projected", (projected,)):
        for count in given:
            if width % count:
                raise ValueError(f"{name} has {count} heads: width, which is {width}, must be a multiple of that")
    drawn, real = [], []
    for seed in progress(range(seeds)):
        rng = np.random.default_rng(seed)
        drawn.append([measure(rng, queries, keys, width // count, width) for count in counts])
        real.append(project(rng, width, width // projected))
    variance, *rest = np.transpose(drawn, (2, 1, 0))
    elements = np.transpose(real)
    return Heads(
        np.array(counts), width // np.array(counts), width, keys, variance,
        np.array(rest[0::2]), np.array(rest[1::2]), projected, elements[:2], elements[2],
    )  # fmt: skip


def measure(rng, queries, keys, dim, width):
    """Variance of the products, then the largest weight and exp(entropy) for each scale."""
    query, key = rng.standard_normal((queries, dim), np.float32), rng.standard_normal((keys, dim), np.float32)
    numbers = [(query @ key.T).var()]
    for scale in (1.0, dim**-0.5, width**-0.5):
        largest, _, effective, _ = sharpness(sdpa.attention_weights(query, key, scale=scale))
        numbers += [largest.mean(), effective.mean()]
    return numbers


def project(rng, width, dim):
    """Variance of the elements of queries and of keys, and of their products, as a layer makes them."""
    x = rng.standard_normal((PROJECTED_TOKENS, width), np.float32)
    made = []
    for _ in "QK":
        weight = rng.standard_normal((width, PROJECTED_HEADS * dim), np.float32) / np.float32(width) ** 0.5
        made.append((x @ weight).reshape(PROJECTED_TOKENS, PROJECTED_HEADS, dim).swapaxes(0, 1))
    query, key = made
    return query.var(), key.var(), (query @ key.swapaxes(1, 2)).var()


def findings(numbers: Heads) -> list[Finding]:
    return [
        find_variance(numbers),
        find_root(numbers),
        find_model(numbers),
        find_bare(numbers),
        find_projected(numbers),
    ]


def find_variance(numbers):
    ratio = numbers.variance.mean(axis=-1) / numbers.dims
    return Finding(
        f"Var(q·k) in a head is d_k = d / heads, though d = {numbers.width}",
        f"{ratio.min():.3f} to {ratio.max():.3f} times d_k for {numbers.heads.min()} to {numbers.heads.max()} heads",
        judged(np.abs(ratio - 1).max() <= 0.05),
    )


def find_root(numbers):
    share = numbers.effective[ROOT].mean(axis=-1) / numbers.keys
    off = np.abs(share / np.exp(-0.5) - 1)
    return Finding(
        "With 1/√d_k the weights of a head are equally sharp for every number of heads",
        f"{share.min():.1%} to {share.max():.1%} of the keys count (expected e^(-1/2) = {np.exp(-0.5):.1%})",
        judged(off.max() <= 0.05),
    )


def find_model(numbers):
    """Scores of variance 1 / heads cost the entropy 1 / (2 heads)."""
    product = numbers.variance.mean(axis=-1) / numbers.width * numbers.heads
    share = numbers.effective[MODEL].mean(axis=-1) / numbers.keys
    many = numbers.heads >= 12
    return Finding(
        "With 1/√d the scores of a head have variance 1/heads, and the weights are nearly equal",
        f"variance times heads {product.min():.3f} to {product.max():.3f}; "
        "keys that count: " + ", ".join(f"{share[i]:.1%} with {numbers.heads[i]}" for i in middle(numbers)),
        judged(np.abs(product - 1).max() <= 0.05, many.any() and share[many].min() > 0.95),
    )


def middle(numbers):
    """Where the fewest, the projected and the most heads are."""
    some = {numbers.heads.argmin(), numbers.heads.argmax(), np.abs(numbers.heads - numbers.projected).argmin()}
    return sorted(some, key=lambda i: numbers.heads[i])


def find_bare(numbers):
    largest = numbers.largest[BARE].mean(axis=-1)
    order = np.argsort(numbers.dims)
    return Finding(
        "Without scaling a head saturates by its own size",
        "largest weight " + ", ".join(f"{largest[i]:.2f} with d_k = {numbers.dims[i]}" for i in middle(numbers)),
        judged(largest.max() > 0.9, len(order) > 1 and (np.diff(largest[order]) > 0).all()),
    )


def find_projected(numbers):
    dim = numbers.width // numbers.projected
    query, key = numbers.element_variance.mean(axis=-1)
    ratio = numbers.projected_variance.mean() / dim
    return Finding(
        f"x W with weights of variance 1/d has elements of variance 1, so that d_k = {dim} is left in the scores",
        f"{numbers.projected} heads, from x of width {numbers.width}: variance {query:.3f} and {key:.3f} of the "
        f"elements, Var(q·k) {ratio:.3f} times d_k",
        judged(max(abs(query - 1), abs(key - 1)) <= 0.05, abs(ratio - 1) <= 0.05),
    )


def tables(numbers: Heads) -> list[Table]:
    header = ("heads", "d_k", *(f"scale {scale}" for scale in SCALES))

    def rows(values, form):
        cells = [[form(mean) for mean in each] for each in values.mean(axis=-1).T]
        return [(str(heads), str(dim), *row) for heads, dim, row in zip(numbers.heads, numbers.dims, cells)]

    return [
        Table(f"Variance of the scores, d = {numbers.width}", header, rows(scaled_variance(numbers), four_digits)),
        Table(f"Keys that count of {numbers.keys}: exp(entropy)", header, rows(numbers.effective, "{:.1f}".format)),
        Table("Largest weight", header, rows(numbers.largest, "{:.3f}".format)),
    ]


def four_digits(number):
    """0.0013, 1.002, 12313."""
    return f"{number:.4f}" if number < 1 else f"{number:#.4g}".rstrip(".") if number < 10000 else f"{number:.0f}"


def scaled_variance(numbers):
    """(S, C, seeds): Var(scale · x) = scale² Var(x)."""
    squares = np.stack([np.ones(len(numbers.dims)), 1 / numbers.dims, np.full(len(numbers.dims), 1 / numbers.width)])
    return squares[:, :, None] * numbers.variance


def draw(numbers, values, ylabel, **options):
    return lines_over(
        numbers.heads, dict(zip((f"scale {scale}" for scale in SCALES), values)), f"heads (d = {numbers.width})",
        ylabel, columns=3, **options,
    )  # fmt: skip


def draw_variance(numbers):
    return draw(numbers, scaled_variance(numbers), "variance of the scores", yscale="log")


def draw_effective(numbers):
    return draw(numbers, numbers.effective / numbers.keys, "share of the keys that count", limits=(0, 1.02))


def draw_largest(numbers):
    return draw(numbers, numbers.largest, "largest weight", yscale="log")


REASON = """
<p>A score is a dot product within one head: a sum of <var>d<sub>k</sub></var> products, not of <var>d</var>. With
<var>x</var> of variance 1, as a normalisation leaves it, and weights of variance 1/<var>d</var>, an element of
<code>q = x W</code> is a sum of <var>d</var> terms of variance 1/<var>d</var>: the element has variance 1, whatever
<var>d</var> is. The width of the model is used up there. What is left is <code>Var(q·k) = d<sub>k</sub> =
d / heads</code>.</p>
<p>With scores divided by √<var>d<sub>k</sub></var> the variance is 1. With scores divided by √<var>d</var> it is
<code>d<sub>k</sub> / d = 1 / heads</code>: with 96 heads the scores have a standard deviation of 0.1, the entropy
ln <var>N</var> loses 1/(2 · 96), and attention is nearly the plain mean of all values. The two agree for one head
only.</p>
<p>The wrong factor is a constant, so training can make up for it by weights that are heads<sup>1/4</sup> times as large
in each of <var>W<sub>Q</sub></var> and <var>W<sub>K</sub></var>; what the wrong factor costs is the start.</p>
"""

EXPERIMENT = Experiment(
    run=heads,
    title="√d_k, not √d",
    claim="What belongs under the root is the dimension of a head, <var>d<sub>k</sub></var>, and not that of the "
    "model, <var>d</var>.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("Variance of the scores of a head, for three scales.", draw_variance),
        Figure("Share of the keys that count, exp(entropy) / N.", draw_effective),
        Figure("Largest weight of a query; equal weights have 1/N.", draw_largest),
    ],
)
