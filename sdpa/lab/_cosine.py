"""The dot product as lengths times cosine, and normalised queries and keys as another cure."""

from typing import NamedTuple

import numpy as np

import sdpa

from .._report.panels import lines_over
from ._experiment import (
    Experiment,
    Figure,
    Finding,
    Table,
    check_lists,
    check_positive,
    check_positive_lists,
    check_sizes,
)
from ._measures import DIMS, freezing, judged, sharpness

ROOT, NORMED, FIXED = range(3)


class Cosine(NamedTuple):
    """What `cosine` returns.  R = 3 rules for the scores: q·k / √d_k, cos · √d_k and cos · temperature."""

    dims: np.ndarray  # (D)
    keys: int
    temperature: float
    mean: np.ndarray  # (D, seeds): of the cosine
    spread: np.ndarray  # (D, seeds): root of the mean square of the cosine
    length: np.ndarray  # (D, seeds): mean of |k| / √d_k
    length_spread: np.ndarray  # (D, seeds): standard deviation of |k| / √d_k
    mismatch: float  # largest of |q·k - |q||k| cos| / (|q||k|)
    largest: np.ndarray  # (R, D, seeds): largest weight of a query, mean
    effective: np.ndarray  # (R, D, seeds): exp(entropy), mean
    aligned: np.ndarray  # (R, D, seeds): weight of a key equal to the query among the others, mean
    dim: int  # where queries and keys grow
    factors: np.ndarray  # (F): by which both are multiplied
    grown_largest: np.ndarray  # (R, F, seeds)
    grown_effective: np.ndarray  # (R, F, seeds)


def cosine(
    *,
    dims: tuple[int, ...] = DIMS,
    keys: int = 512,
    queries: int = 64,
    temperature: float = 10.0,
    dim: int = 128,
    factors: tuple[float, ...] = (1, 1.5, 2, 3, 4, 8, 16),
    seeds: int = 16,
    progress=iter,
) -> Cosine:
    """Measure cosines and lengths of vectors with normal elements of variance 1, and the sharpness of their weights by
    three rules: q·k / √d_k, cos · √d_k and cos · `temperature`.  This is done for every d_k in `dims`, and for queries
    and keys of size `dim` that are multiplied by each of `factors`."""
    check_lists(dims=dims)
    check_sizes(queries=queries, dim=dim, seeds=seeds)
    check_sizes(2, keys=keys)
    check_positive(temperature=temperature)
    check_positive_lists(factors=factors)
    geometry, by_dim, by_factor = [], [], []
    for seed in progress(range(seeds)):
        rng = np.random.default_rng(seed)
        pairs = [vectors(rng, queries, keys, size) for size in dims]
        geometry.append([measure_geometry(query, key) for query, key in pairs])
        by_dim.append([measure(query, key, temperature) for query, key in pairs])
        grown = [[np.float32(factor) * x for factor in factors] for x in vectors(rng, queries, keys, dim)]
        by_factor.append([measure(query, key, temperature)[:2] for query, key in zip(*grown)])
    mean, spread, length, length_spread, mismatch = np.transpose(geometry, (2, 1, 0))
    largest, effective, aligned = np.transpose(by_dim, (2, 3, 1, 0))
    grown_largest, grown_effective = np.transpose(by_factor, (2, 3, 1, 0))
    return Cosine(
        np.array(dims), keys, temperature, mean, spread, length, length_spread, float(mismatch.max()), largest,
        effective, aligned, dim, np.array(factors, float), grown_largest, grown_effective,
    )  # fmt: skip


def vectors(rng, queries, keys, dim):
    return rng.standard_normal((queries, dim), np.float32), rng.standard_normal((keys, dim), np.float32)


def normalise(x):
    """Vectors of length 1, and the lengths."""
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / length, length


def measure_geometry(query, key):
    """Mean and spread of the cosine, mean and spread of the lengths, mismatch of q·k = |q||k| cos."""
    (unit_query, query_length), (unit_key, key_length) = normalise(query), normalise(key)
    cosines = unit_query @ unit_key.T
    mismatch = np.abs(query @ key.T / (query_length * key_length.T) - cosines).max()
    length = key_length / np.sqrt(key.shape[-1])
    return cosines.mean(), np.sqrt((cosines**2).mean()), length.mean(), length.std(), mismatch


def measure(query, key, temperature):
    """Largest weight, exp(entropy) and weight of a key equal to the query, each (R): means over the queries."""
    root = query.shape[-1] ** 0.5
    units = normalise(query)[0], normalise(key)[0]
    rules = ((query, key), 1 / root), (units, root), (units, temperature)
    rows = []
    for (q, k), scale in rules:
        largest, _, effective, _ = sharpness(sdpa.attention_weights(q, k, scale=float(scale)))
        among = sdpa.attention_weights(q, np.concatenate([q, k]), scale=float(scale))
        rows.append((largest.mean(), effective.mean(), among.diagonal().mean()))
    return np.transpose(rows)


def findings(numbers: Cosine) -> list[Finding]:
    return [
        find_identity(numbers),
        find_spread(numbers),
        find_lengths(numbers),
        find_same(numbers),
        find_cure(numbers),
        find_temperature(numbers),
        find_bound(numbers),
    ]


def find_identity(numbers):
    return Finding(
        "q·k = |q||k| cos",
        f"in float32 the two sides differ by at most {numbers.mismatch:.1e} of |q||k|",
        judged(numbers.mismatch < 1e-5),
    )


def find_spread(numbers):
    ratio = numbers.spread.mean(axis=-1) * np.sqrt(numbers.dims)
    mean = np.abs(numbers.mean.mean(axis=-1) * np.sqrt(numbers.dims)).max()
    return Finding(
        "The cosine of random vectors has mean 0 and standard deviation 1/√d_k",
        f"standard deviation {ratio.min():.3f} to {ratio.max():.3f} times 1/√d_k for d_k = {numbers.dims.min()} to "
        f"{numbers.dims.max()}; mean at most {mean:.3f} of it",
        judged(np.abs(ratio - 1).max() <= 0.03, mean <= 0.05),
    )


def find_lengths(numbers):
    usual = numbers.dims >= 16
    ratio = (numbers.length_spread.mean(axis=-1) * np.sqrt(2 * numbers.dims))[usual]
    high = numbers.dims.argmax()
    mean = numbers.length[high].mean()
    return Finding(
        "Lengths concentrate at √d_k, with a standard deviation of √(1/2) at every d_k from 16 on",
        f"at d_k = {numbers.dims[high]} the mean is {mean:.4f} √d_k"
        + (
            f"; standard deviation {ratio.min():.3f} to {ratio.max():.3f} times √(1/2) from 16 on"
            if usual.any()
            else ""
        ),
        judged(abs(mean - 1) <= 0.01, usual.any() and np.abs(ratio - 1).max(initial=0) <= 0.05),
    )


def find_same(numbers):
    ratio = (numbers.effective[NORMED] / numbers.effective[ROOT]).mean(axis=-1)
    usual = numbers.dims >= 16
    off = np.abs(ratio - 1)
    return Finding(
        "While elements have variance 1, cos · √d_k is as sharp as q·k / √d_k",
        f"keys that count differ by at most {off[usual].max(initial=0):.1%} from d_k = 16 on, by {off.max():.0%} at "
        f"d_k = {numbers.dims[off.argmax()]}",
        judged(off.max() <= 0.1, usual.any() and off[usual].max(initial=0) <= 0.05),
    )


def find_cure(numbers):
    last = numbers.factors.argmax()
    first = numbers.factors.argmin()
    keys = numbers.grown_effective.mean(axis=-1)
    kept = np.abs(keys[NORMED] / keys[NORMED, first] - 1).max()
    return Finding(
        "Where queries and keys grow, 1/√d_k does not keep the softmax from saturating, and normalising does",
        f"both times {numbers.factors[last]:g}: of {numbers.keys} keys {keys[ROOT, last]:.1f} count with 1/√d_k, "
        f"{keys[NORMED, last]:.1f} with cos · √d_k (times {numbers.factors[first]:g}: {keys[ROOT, first]:.1f} and "
        f"{keys[NORMED, first]:.1f})",
        judged(keys[ROOT, last] < 2, kept <= 0.01),
    )


def find_temperature(numbers):
    share = numbers.effective[FIXED].mean(axis=-1) / numbers.keys
    usual = np.flatnonzero(numbers.dims >= 16)
    low, high = (usual[0], usual[-1]) if len(usual) else (0, -1)
    spread = share[usual].max() / share[usual].min() if len(usual) else np.inf
    return Finding(
        "A fixed temperature suits every d_k",
        f"cos · {numbers.temperature:g}: {share[low]:.1%} of the keys count at d_k = {numbers.dims[low]}, "
        f"{share[high]:.1%} at {numbers.dims[high]}",
        judged(spread <= 1.05),
    )


def find_bound(numbers):
    """A score of √d_k among N of standard deviation 1."""
    weight = numbers.aligned[NORMED].mean(axis=-1)
    high, low = numbers.dims.argmax(), np.abs(numbers.dims - numbers.dim).argmin()
    return Finding(
        "Scores bounded by √d_k cannot saturate",
        f"a key equal to the query gets the weight {weight[low]:.3f} at d_k = {numbers.dims[low]}, {weight[high]:.3f} "
        f"at {numbers.dims[high]}",
        judged(weight.max() < 0.9),
    )


def tables(numbers: Cosine) -> list[Table]:
    rules = names(numbers)
    return [
        Table(
            "Cosines and lengths of random vectors",
            ("d_k", "cos: mean", "cos: deviation", "1/√d_k", "|k|/√d_k: mean", "|k|/√d_k: deviation"),
            geometry_rows(numbers),
        ),
        Table(
            f"Queries and keys of size {numbers.dim} times a factor: keys that count of {numbers.keys}, largest weight",
            ("factor", *rules, *(f"{rule}: largest" for rule in rules[:2])),
            grown_rows(numbers),
        ),
    ]


def geometry_rows(numbers) -> list[tuple[str, ...]]:
    fields = numbers.mean, numbers.spread, numbers.dims[:, None] ** -0.5, numbers.length, numbers.length_spread
    means = [field.mean(axis=-1) for field in fields]
    some = range(len(numbers.dims))[:: -(-len(numbers.dims) // 7)]
    return [(str(numbers.dims[i]), *(f"{mean[i].round(4) + 0.0:.4f}" for mean in means)) for i in some]


def grown_rows(numbers) -> list[tuple[str, ...]]:
    keys, largest = numbers.grown_effective.mean(axis=-1).T, numbers.grown_largest.mean(axis=-1).T
    return [
        (f"{factor:g}", *(f"{x:.1f}" for x in keys[i]), *(f"{x:.3f}" for x in largest[i, :FIXED]))
        for i, factor in enumerate(numbers.factors)
    ]


def names(numbers):
    return "q·k / √d_k", "cos · √d_k", f"cos · {numbers.temperature:g}"


def draw_spread(numbers):
    lines = {"measured": numbers.spread}
    return lines_over(
        numbers.dims, lines, "d_k", "standard deviation of the cosine",
        expected={"1/√d_k": (numbers.dims, numbers.dims**-0.5)}, yscale="log",
    )  # fmt: skip


def draw_effective(numbers):
    lines = dict(zip(names(numbers), numbers.effective / numbers.keys))
    return lines_over(numbers.dims, lines, "d_k", "share of the keys that count", limits=(0, 1.02), columns=3)


def draw_grown(numbers):
    """Scores of standard deviation c² keep e^(-c⁴/2) of the keys, while few are lost."""
    limit = min(np.sqrt(freezing(numbers.keys)), numbers.factors.max())
    factors = np.linspace(numbers.factors.min(), limit, 50)
    lines = dict(zip(names(numbers), numbers.grown_effective / numbers.keys))
    return lines_over(
        numbers.factors, lines, f"factor c on queries and keys (d_k = {numbers.dim})", "share of the keys that count",
        expected={"exp(−c⁴/2)": (factors, np.exp(-(factors**4) / 2))}, limits=(0, 1.02),
    )  # fmt: skip


def draw_aligned(numbers):
    lines = dict(zip(names(numbers), numbers.aligned))
    return lines_over(numbers.dims, lines, "d_k", "weight of an equal key", limits=(0, 1.02), columns=3)


REASON = f"""
<p>By definition <code>q·k = |q| |k| cos</code>. Turn the space so that <var>q</var> points along the first axis: the
cosine is the first element of <var>k</var>/|<var>k</var>|. The squares of all <var>d<sub>k</sub></var> elements of that
sum to 1 and are alike, so each has the mean 1/<var>d<sub>k</sub></var>, exactly; the sign is random. So the cosine has
mean 0 and standard deviation 1/√<var>d<sub>k</sub></var>, whatever the lengths are.</p>
<p>A sum of <var>d<sub>k</sub></var> squares of normal numbers has mean <var>d<sub>k</sub></var> and variance
2<var>d<sub>k</sub></var>: lengths are √<var>d<sub>k</sub></var>, give or take √(1/2). So <code>q·k</code> is about
<code>d<sub>k</sub> cos</code>, and <code>q·k / √d<sub>k</sub></code> about <code>√d<sub>k</sub> cos</code>.</p>
<p>Dividing by √<var>d<sub>k</sub></var> rests on elements of variance 1. Let training multiply queries and keys by
<var>c</var>: scores have standard deviation <var>c</var>², and freeze where that passes √(2 ln <var>N</var>), for
512 keys at <var>c</var> = {np.sqrt(freezing(512)):.1f}. Normalised queries and keys times a temperature <var>t</var>
(fixed or learned) do not see <var>c</var>: their scores are <var>t</var> cos, within ±<var>t</var>, with standard
deviation <var>t</var>/√<var>d<sub>k</sub></var>. The root has not gone: <var>t</var> has to grow like
√<var>d<sub>k</sub></var>, or be learned.</p>
<p>A bound on scores is not one on weights: no weight exceeds
<code>1 / (1 + (N &minus; 1) e<sup>&minus;2t</sup>)</code>, which is nearly 1 for <var>t</var> = 10. The weights stay
flat among random keys, and are sharp where one matches.</p>
"""

EXPERIMENT = Experiment(
    run=cosine,
    title="Cosine similarity",
    claim="A dot product is a cosine times two lengths. Random vectors have cosines of 1/√<var>d<sub>k</sub></var>; "
    "normalised queries and keys are the other cure.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("Standard deviation of the cosine of random vectors.", draw_spread),
        Figure("Share of the keys that count, exp(entropy) / N, for three rules.", draw_effective),
        Figure("The same where queries and keys grow.", draw_grown),
        Figure("Weight of a key equal to the query among random ones.", draw_aligned),
    ],
)
