"""Experiment: the variance of q·k grows with the dimension, and is 1 after division by √d_k."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

import sdpa

from .._report.drawing import COLOURS, INK, MUTED, draw_band, panel
from .._report.panels import mark_sizes
from .._report.statistics import Band, agrees, band, shown
from ._experiment import FALSE, HELD, Experiment, Figure, Finding, Table, check_lists, check_sizes

FACTORS = (0.125, 0.5, 3.0)
SHIFT = 0.5  # the mean of all elements, where it is not 0
RHO = 0.1  # the correlation of any two elements of one vector, where they are not independent
BINS = np.linspace(-4, 4, 81)  # in units of √d_max for the products, of 1 after division


class Variance(NamedTuple):
    """Bands over seeds; d stands for the dims."""

    dims: tuple[int, ...]
    bare: Band  # (d): the variance of q·k
    scaled: Band  # (d): that of q·k / √d_k
    factors: tuple[float, ...]
    by_factor: Band  # (factors): Var(c q·k) / Var(q·k), d_k the middle one of dims
    shifted: Band  # (d): Var(q·k / √d_k) where the elements have mean 1/2
    correlated: Band  # (d): the same where the elements of a vector have correlation 0.1
    edges: np.ndarray  # (bins + 1) of the histograms of q·k
    density: np.ndarray  # (d, bins): of q·k, the mean over seeds
    scaled_edges: np.ndarray  # (bins + 1)
    scaled_density: np.ndarray  # (d, bins): of q·k / √d_k


def variance(
    *,
    dims: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096),
    products: int = 2000,
    seeds: int = 10,
    progress: Callable[[list], Iterable] = iter,
) -> Variance:
    """Measure the variance of products q·k of vectors with independent elements, normal with mean 0 and variance 1, for
    each d_k in `dims`.  Each product has vectors of its own."""
    check_lists(dims=dims)
    check_sizes(least=2, products=products, seeds=seeds)
    shape = seeds, len(dims)
    bare, scaled, shifted, correlated = np.empty((4, *shape))
    density, scaled_density = np.zeros((2, len(dims), len(BINS) - 1))
    by_factor = np.empty((seeds, len(FACTORS)))
    for i, dim in progress(list(enumerate(dims))):
        for seed in range(seeds):
            random = np.random.default_rng((seed, dim))
            q, k = random.standard_normal((2, products, dim), np.float32)
            dots = dot(q, k, scale=1)
            by_root = dot(q, k)
            bare[seed, i], scaled[seed, i] = dots.var(), by_root.var()
            density[i] += np.histogram(dots, BINS * max(dims) ** 0.5, density=True)[0] / seeds
            scaled_density[i] += np.histogram(by_root, BINS, density=True)[0] / seeds
            if i == len(dims) // 2:
                by_factor[seed] = [dot(q, k, scale=factor).var() / dots.var() for factor in FACTORS]
            shifted[seed, i] = dot(q + np.float32(SHIFT), k + np.float32(SHIFT)).var()
            common = random.standard_normal((2, products, 1), np.float32) * np.float32(RHO**0.5)
            q, k = (x * np.float32((1 - RHO) ** 0.5) + part for x, part in zip((q, k), common))
            correlated[seed, i] = dot(q, k).var()
    return Variance(
        tuple(dims), band(bare), band(scaled), FACTORS, band(by_factor), band(shifted), band(correlated),
        BINS * max(dims) ** 0.5, density, BINS, scaled_density,
    )  # fmt: skip


def dot(q, k, scale=None):
    """The scores of pairs of rows, by the kernels: the log-sum-exp of a query that sees one key is their score."""
    q, k = q[:, None, None], k[:, None, None]
    return sdpa.attention(q, k, k[..., :1], scale=scale, return_lse=True)[1].ravel().astype(np.float64)


def expected_shifted():
    """Of (z + m)(w + m): (1 + m²)² - m⁴ for each element."""
    return (1 + SHIFT**2) ** 2 - SHIFT**4


def expected_correlated(dims):
    """With a part √ρ z₀ common to all elements, Var(q·k) = d(1 - ρ²) + ρ²d²."""
    return 1 - RHO**2 + RHO**2 * np.asarray(dims)


def findings(numbers: Variance) -> list[Finding]:
    dims = np.array(numbers.dims)
    span = f"d_k = {dims.min()} to {dims.max()}"
    ratio = numbers.bare.mean / dims
    factors = numbers.by_factor.mean / np.square(numbers.factors)
    worst = np.argmax(np.abs(numbers.correlated.mean - 1))
    rest = np.abs(factors - 1).max()
    return [
        Finding(
            "Var(q·k) = d_k",
            f"{ratio.min():.3f} to {ratio.max():.3f} times d_k for {span}",
            HELD if agrees(numbers.bare, dims) else FALSE,
        ),
        Finding(
            "Var(q·k / √d_k) = 1 at every d_k",
            f"{numbers.scaled.mean.min():.3f} to {numbers.scaled.mean.max():.3f} for {span}",
            HELD if agrees(numbers.scaled, 1) else FALSE,
        ),
        Finding(
            "Var(cX) = c² Var(X)",
            f"equal but for a part of {rest:.0e}, for c = {listed(numbers.factors)}",
            HELD if rest < 1e-4 else FALSE,
        ),
        Finding(
            "Variance 1 also where the elements have variance 1, but mean 1/2",
            f"{numbers.shifted.mean.min():.2f} to {numbers.shifted.mean.max():.2f} (theory: {expected_shifted():.2f}): "
            f"still the same at every d_k, but not 1",
            HELD if agrees(numbers.shifted, 1) else FALSE,
        ),
        Finding(
            "Variance 1 also where the elements of a vector are correlated (0.1)",
            f"{numbers.correlated.mean[worst]:.1f} at d_k = {dims[worst]} (theory: "
            f"{expected_correlated(dims[worst]):.1f}): it grows with d_k, and √d_k is too small",
            HELD if agrees(numbers.correlated, 1) else FALSE,
        ),
    ]


def listed(numbers):
    return ", ".join(f"{number:g}" for number in numbers)


def tables(numbers: Variance) -> list[Table]:
    bands = (numbers.bare, numbers.scaled, numbers.shifted, numbers.correlated)
    rows = [(str(dim), *(shown(band, i) for band in bands)) for i, dim in enumerate(numbers.dims)]
    caption = (
        "Variance of products, with 95 % bands.  The last two columns leave the assumptions: elements of mean 1/2, and "
        "elements of one vector with correlation 0.1."
    )
    header = ("d_k", "Var(q·k)", "Var(q·k / √d_k)", "mean 1/2, / √d_k", "correlated, / √d_k")
    return [Table(caption, header, rows)]


def draw_growth(numbers):
    figure, axes = panel()
    dims = np.array(numbers.dims)
    axes.plot(dims, dims, color=MUTED, linestyle="--", label="d_k")
    draw_band(axes, dims, numbers.bare, "Var(q·k)", COLOURS[1])
    draw_band(axes, dims, numbers.scaled, "Var(q·k / √d_k)", COLOURS[0])
    axes.set(xlabel="d_k", ylabel="variance")
    both_logarithmic(axes, dims)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def both_logarithmic(axes, dims):
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    mark_sizes(axes, dims)


def draw_histograms(numbers):
    shown = np.argsort(numbers.dims)[-3:]
    figure, axes = panel(rows=len(shown), sharex=True, squeeze=False)
    for i, ax, colour in zip(shown, axes[:, 0], COLOURS):
        ax.stairs(numbers.density[i], numbers.edges, fill=True, color=colour, alpha=0.3)
        ax.stairs(numbers.density[i], numbers.edges, color=colour)
        ax.text(0.98, 0.8, f"d_k = {numbers.dims[i]}", transform=ax.transAxes, ha="right", va="top")
        ax.set_yticks([])
        ax.spines.left.set_visible(False)
    axes[-1, 0].set(xlabel="q·k")
    return figure


def draw_scaled(numbers):
    shown = np.argsort(numbers.dims)[-3:]
    figure, axes = panel()
    for i, colour in zip(shown, COLOURS):
        axes.stairs(numbers.scaled_density[i], numbers.scaled_edges, color=colour, label=f"d_k = {numbers.dims[i]}")
    x = np.linspace(-4, 4, 161)
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color=INK, linestyle=":", label="normal")
    axes.set(xlabel="q·k / √d_k", ylabel="density", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def draw_assumptions(numbers):
    figure, axes = panel()
    dims = np.array(numbers.dims)
    axes.plot(dims, expected_correlated(dims), color=MUTED, linestyle="--")
    axes.plot(dims, np.full(len(dims), expected_shifted()), color=MUTED, linestyle="--", label="theory")
    draw_band(axes, dims, numbers.correlated, "correlation 0.1", COLOURS[1])
    draw_band(axes, dims, numbers.shifted, "mean 1/2", COLOURS[2])
    draw_band(axes, dims, numbers.scaled, "as assumed", COLOURS[0])
    axes.set(xlabel="d_k", ylabel="Var(q·k / √d_k)")
    both_logarithmic(axes, dims)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


EXPERIMENT = Experiment(
    run=variance,
    title="Variance grows with the dimension",
    claim=(
        "If the elements of <var>q</var> and <var>k</var> are independent with mean 0 and variance 1, the variance of "
        "<var>q</var>·<var>k</var> is <var>d<sub>k</sub></var>; divided by √<var>d<sub>k</sub></var> it is 1 at every "
        "dimension."
    ),
    reason="""
<p>Let all elements be independent with mean 0 and variance 1. In four lines:</p>
<ol>
<li>E[<var>q<sub>i</sub>k<sub>i</sub></var>] = E[<var>q<sub>i</sub></var>] · E[<var>k<sub>i</sub></var>] = 0,
for independent factors.</li>
<li>Var(<var>q<sub>i</sub>k<sub>i</sub></var>) = E[<var>q<sub>i</sub></var><sup>2</sup>] ·
E[<var>k<sub>i</sub></var><sup>2</sup>] − 0<sup>2</sup> = 1 · 1 = 1.</li>
<li>Var(<var>q</var>·<var>k</var>) = Var(∑ <var>q<sub>i</sub>k<sub>i</sub></var>) =
∑ Var(<var>q<sub>i</sub>k<sub>i</sub></var>) = <var>d<sub>k</sub></var>, as the terms are independent.</li>
<li>Var(<var>c</var> · <var>X</var>) = <var>c</var><sup>2</sup> Var(<var>X</var>); with <var>c</var> =
1/√<var>d<sub>k</sub></var> it is <var>d<sub>k</sub></var> / <var>d<sub>k</sub></var> = 1.</li>
</ol>
<p>The assumptions matter. Elements with mean <var>m</var> give each term the variance
(1 + <var>m</var><sup>2</sup>)<sup>2</sup> − <var>m</var><sup>4</sup>, still the same at every dimension. Elements with
correlation <var>ρ</var> inside a vector make the terms dependent: the variance becomes
<var>d<sub>k</sub></var>(1 − <var>ρ</var><sup>2</sup>) + <var>ρ</var><sup>2</sup><var>d<sub>k</sub></var><sup>2</sup>,
and √<var>d<sub>k</sub></var> no longer cures it.</p>
<p>The products are those of the kernels: the log-sum-exp of a query that sees a single key is their score.</p>
""",
    findings=findings,
    tables=tables,
    figures=[
        Figure("The variance of q·k follows d_k; after division by √d_k it is 1 at every dimension.", draw_growth),
        Figure(
            "Histograms of q·k on one axis, for the three largest d_k: each is wider than the last.", draw_histograms
        ),
        Figure("The same products after division by √d_k: one curve, the normal one.", draw_scaled),
        Figure("Where the assumptions fail: variance after division by √d_k, and what theory says.", draw_assumptions),
    ],
)
