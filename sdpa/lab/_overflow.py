"""The softmax by the formula and by log-sum-exp, in three dtypes: where each fails, and how far off it is."""

from typing import NamedTuple

import numpy as np

import sdpa

from .._report.panels import lines_over
from ._experiment import Experiment, Figure, Finding, Table, check_lists, check_sizes
from ._gaps import weights_of
from ._measures import judged

DTYPES = "float16", "float32", "float64"
HALF, SINGLE, DOUBLE = range(3)
SCALES = "1", "1/√d_k"
BARE, ROOT = range(2)
METHODS = "formula", "log-sum-exp", "kernels"
FORMULA, SHIFTED, KERNELS = range(3)
DIMS = tuple(2**i for i in range(19))  # up to where float64 overflows as well
COUNTS = 2, 512, 65536  # of equal scores
COMMON = 128  # size of a head in many models
ROUNDINGS = 16  # that many units of the dtype is the error that counts as none
# Elements up to these have products whose sum is still a number of the dtype of sums, float32 or float64.
WIDEST = 65504.0, 1e17, 1e150
TOO_WIDE = 1e20  # in float32


class Overflow(NamedTuple):
    """What `overflow` returns; T = 3 dtypes (DTYPES), S = 2 scales (SCALES), 3 methods (METHODS)."""

    limits: np.ndarray  # (T): ln of the largest number
    highest: np.ndarray  # (T): the largest score whose exp is finite
    lowest: np.ndarray  # (T): the smallest score whose exp is above 0
    highest_equal: np.ndarray  # (T, COUNTS): the largest score for which the formula is right, if all scores are equal
    below: np.ndarray  # (T): whether the formula gives NaN for equal scores below `lowest`
    dims: np.ndarray  # (D)
    keys: int
    failed: np.ndarray  # (S, 3 methods, T, D, seeds): share of queries whose weights do not add up to 1
    error: np.ndarray  # (3 methods, T, D, seeds): largest of a weight at scale 1, in units of eps; NaN where all failed
    calls: int  # of sdpa.attention in each dtype, with queries and keys of any size
    not_finite: np.ndarray  # (T): calls in which a result was not
    outside: np.ndarray  # (T): calls in which a result was outside of the values
    largest_score: np.ndarray  # (T)
    too_wide: float  # the result where the products of queries and keys overflow themselves


def overflow(
    *,
    dims: tuple[int, ...] = DIMS,
    keys: int = 512,
    queries: int = 64,
    calls: int = 200,
    seeds: int = 4,
    progress=iter,
) -> Overflow:
    """Find where the formula exp(x) / Σ exp(x) fails, for single scores and for the scores of queries and keys with
    normal elements of variance 1; and whether log-sum-exp and the kernels fail."""
    check_lists(dims=dims)
    check_sizes(queries=queries, calls=calls, seeds=seeds)
    check_sizes(2, keys=keys)
    kinds = [np.dtype(name).type for name in DTYPES]
    samples = []
    for seed in progress(range(seeds)):
        rng = np.random.default_rng(seed)
        samples.append([measure(rng, queries, keys, dim, kinds) for dim in dims])
    failed, root_failed, error = np.transpose(samples, (2, 4, 3, 1, 0))
    not_finite, outside, largest = np.transpose(
        [fuzz(np.random.default_rng(0), calls, *each) for each in zip(kinds, WIDEST)]
    )
    return Overflow(
        np.array([np.log(float(np.finfo(kind).max)) for kind in kinds]),
        np.array([last_right(lambda x: np.isfinite(exp(x)), kind) for kind in kinds]),
        np.array([-last_right(lambda x: exp(-x) > 0, kind) for kind in kinds]),
        np.array([[last_right(lambda x, n=n: right(np.full(n, x)), kind) for n in COUNTS] for kind in kinds]),
        np.array([np.isnan(by_formula(np.full(keys, -1000, kind))).all() for kind in kinds]),
        np.array(dims), keys, np.stack([failed, root_failed]), error, calls,
        not_finite, outside, largest, result_of_too_wide(),
    )  # fmt: skip


def exp(x):
    """That of many, as arrays have it: a single number may go another way."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(np.full(64, x)).max()


def by_formula(scores):
    with np.errstate(all="ignore"):
        weights = np.exp(scores)
        return weights / weights.sum(axis=-1, keepdims=True)


def by_log_sum_exp(scores):
    with np.errstate(under="ignore"):
        return by_formula(scores - scores.max(axis=-1, keepdims=True))


def right(scores):
    return not fails(by_formula(scores))


def fails(weights):
    """Whether they do not add up to 1: NaN, or all 0 because their sum alone is infinite."""
    return ~(np.abs(weights.sum(axis=-1, dtype=np.float64) - 1) < 0.01)


def last_right(is_right, kind):
    """The largest number x of a dtype, of those from -1 to 1000, up to which it is right: by halving."""
    low, high = kind(-1), kind(1000)
    while (middle := kind(low + (high - low) / 2)) not in (low, high):
        low, high = (middle, high) if is_right(middle) else (low, middle)
    return float(low)


def measure(rng, queries, keys, dim, kinds):
    """(3, T, 3 methods): share of failures at scale 1 and at 1/√d_k, and error at scale 1."""
    # Given a query q, its scores with normal keys are independent normal numbers of deviation |q|, and |q|² is a sum of
    # dim squares: there is no need for the keys.
    scores = rng.standard_normal((queries, keys)) * np.sqrt(rng.chisquare(dim, (queries, 1)))
    bare, root = ([weights_by_all(each.astype(kind)) for kind in kinds] for each in (scores, scores * dim**-0.5))
    failed, root_failed = ([[fails(weights).mean() for weights in each] for each in all_] for all_ in (bare, root))
    errors = [[farthest(weights, scores.astype(kind)) for weights in each] for kind, each in zip(kinds, bare)]
    return failed, root_failed, errors


def weights_by_all(scores):
    return by_formula(scores), by_log_sum_exp(scores), weights_of(scores)


def farthest(weights, scores):
    """The largest error in units of eps, of the rows that did not fail; NaN where none is left."""
    kept = ~fails(weights)
    if not kept.any():
        return np.nan
    exact = by_log_sum_exp(scores[kept].astype(np.longdouble if scores.dtype == np.float64 else np.float64))
    return float(np.abs(weights[kept] - exact).max() / np.finfo(scores.dtype).eps)


def fuzz(rng, calls, kind, widest):
    """Random problems with elements of any size up to `widest`: how many results were not finite, how many means were
    outside of the values, and the largest score."""
    not_finite = outside = 0
    largest = 0.0
    for _ in range(calls):
        queries, keys, dim = rng.integers(1, (20, 200, 100))
        sizes = widest ** rng.uniform(-0.5, 1, 2) / 6  # of normal elements hardly any is beyond 6
        query, key = (
            np.clip(size * rng.standard_normal((n, dim)), -widest, widest).astype(kind)
            for size, n in zip(sizes, (queries, keys))
        )
        value = rng.standard_normal((keys, 8)).astype(kind)
        out, lse = sdpa.attention(query, key, value, scale=1, return_lse=True)
        rounding = ROUNDINGS * np.finfo(kind).eps * np.abs(value).max()
        not_finite += not (np.isfinite(out).all() and np.isfinite(lse).all())
        outside += bool(((out > value.max(axis=0) + rounding) | (out < value.min(axis=0) - rounding)).any())
        largest = max(largest, float(np.abs(lse).max()))
    return not_finite, outside, largest


def result_of_too_wide():
    ones = np.ones((2, 4), np.float32)
    return float(sdpa.attention(TOO_WIDE * ones, TOO_WIDE * ones, ones)[0, 0])


def findings(numbers: Overflow) -> list[Finding]:
    return [
        find_limits(numbers),
        find_sums(numbers),
        find_underflow(numbers),
        find_heads(numbers),
        find_root(numbers),
        find_kernels(numbers),
        find_error(numbers),
    ]


def listed(values, form=".2f"):
    """float16 11.09, float32 ..."""
    return ", ".join(f"{name} {value:{form}}".replace("-", "−") for name, value in zip(DTYPES, values))


def find_limits(numbers):
    return Finding(
        "exp(x) is infinite for x above ln(max): 11.09 in float16, 88.72 in float32, 709.78 in float64",
        f"the largest x with a finite one: {listed(numbers.highest)}",
        judged(near(numbers.highest, (11.09, 88.72, 709.78), 0.01), near(numbers.highest, numbers.limits)),
    )


def near(measured, expected, within=0.0):
    """Numbers (T), each to the spacing of its dtype there, or to that of results near 1."""
    spacing = np.array([np.finfo(name).eps for name in DTYPES]) * np.maximum(1, np.abs(expected))
    return bool((np.abs(measured - np.asarray(expected)) <= within + 2 * spacing).all())


def find_sums(numbers):
    expected = numbers.limits[:, None] - np.log(COUNTS)
    rows = (f"{count} keys: {listed(highest, '.4g')}" for count, highest in zip(COUNTS, numbers.highest_equal.T))
    return Finding(
        "With N keys the sum overflows earlier, for equal scores above ln(max / N)",
        "the largest score for which the formula is right: " + "; ".join(rows),
        judged(all(near(measured, each) for measured, each in zip(numbers.highest_equal.T, expected.T))),
    )


def find_underflow(numbers):
    return Finding(
        "Scores far below 0 fail as well: every exp is 0, and 0/0 is NaN",
        f"the smallest score whose exp is above 0: {listed(numbers.lowest)}; equal scores of −1000 give NaN in "
        f"{np.count_nonzero(numbers.below)} of {len(DTYPES)} dtypes",
        judged(numbers.below.all()),
    )


def first_failed(numbers, scale):
    """By dtype, the smallest d_k from which on most of the queries fail; infinite if they do not at the largest."""
    order = np.argsort(numbers.dims)
    most = numbers.failed[scale, FORMULA].mean(axis=-1)[:, order] > 0.5
    from_there = np.logical_and.accumulate(most[:, ::-1], axis=1)[:, ::-1]
    return np.where(from_there.any(axis=1), numbers.dims[order][from_there.argmax(axis=1)], np.inf)


def find_heads(numbers):
    first = first_failed(numbers, BARE)
    return Finding(
        f"Without scaling, the formula overflows for heads of the usual size ({COMMON})",
        f"with {numbers.keys} random keys most queries fail from d_k on: "
        + ", ".join(f"{name} {'none' if np.isinf(d) else f'{d:.0f}'}" for name, d in zip(DTYPES, first)),
        judged(*(first <= COMMON)),
    )


def find_root(numbers):
    worst = numbers.failed[ROOT, FORMULA].mean(axis=-1).max(axis=-1)
    return Finding(
        "With 1/√d_k the formula is right at every d_k, while elements have variance 1",
        f"largest share of failed queries: {listed(worst, '.1%')}",
        judged(*(worst == 0)),
    )


def find_kernels(numbers):
    failed = int(numbers.not_finite.sum() + numbers.outside.sum())
    random = numbers.failed[:, KERNELS].max()
    return Finding(
        "The kernels never return NaN or infinity for finite queries and keys",
        f"{numbers.calls} calls in each dtype with random sizes, scores up to {listed(numbers.largest_score, '.0e')}: "
        f"{failed} with a result that is not finite or no mean of the values; but elements of {TOO_WIDE:.0e} in "
        f"float32, whose products are no float32 any more, give {numbers.too_wide}",
        judged(failed == 0 and random == 0, np.isfinite(numbers.too_wide)),
    )


def worst_error(numbers):
    """(3 methods, T): in units of eps, over all d_k and seeds; 0 if there is none."""
    errors = np.where(np.isnan(numbers.error), 0, numbers.error)
    return errors.max(axis=(2, 3))


def find_error(numbers):
    worst = worst_error(numbers)
    return Finding(
        "Log-sum-exp is right to a few roundings, however large the scores are",
        f"largest error of a weight in units of eps: kernels {listed(worst[KERNELS])}; in NumPy "
        f"{listed(worst[SHIFTED])}; by the formula, where it works, {listed(worst[FORMULA])}",
        judged(*(worst[KERNELS] < ROUNDINGS), *(worst[SHIFTED] < ROUNDINGS)),
    )


def tables(numbers: Overflow) -> list[Table]:
    some = range(len(numbers.dims))[:: -(-len(numbers.dims) // 10)]
    failed = numbers.failed[:, FORMULA].mean(axis=-1)
    return [
        Table(
            "Where the formula stops being right",
            ("dtype", "ln(max)", "exp is infinite above", *(f"{n} equal scores" for n in COUNTS), "exp is 0 below"),
            [
                (name, *(f"{x:.4f}".replace("-", "−") for x in (limit, highest, *equal, lowest)))
                for name, limit, highest, equal, lowest in zip(
                    DTYPES, numbers.limits, numbers.highest, numbers.highest_equal, numbers.lowest
                )
            ],
        ),
        Table(
            f"Share of queries for which the formula fails, {numbers.keys} random keys",
            ("d_k", *(f"{name}, scale {scale}" for scale in SCALES for name in DTYPES)),
            [(str(numbers.dims[i]), *(f"{share:.1%}" for share in failed[:, :, i].ravel())) for i in some],
        ),
        Table(
            "Largest error of a weight, in units of eps",
            ("dtype", *METHODS),
            [(name, *(f"{x:.2f}" for x in row)) for name, row in zip(DTYPES, worst_error(numbers).T)],
        ),
    ]


def draw_failed(numbers):
    lines = {f"{name}, scale 1": samples for name, samples in zip(DTYPES, numbers.failed[BARE, FORMULA])}
    lines["float16, 1/√d_k"] = numbers.failed[ROOT, FORMULA, HALF]
    return lines_over(numbers.dims, lines, "d_k", "share of queries that fail", limits=(-0.02, 1.02))


def draw_error(numbers):
    lines = {
        f"{name}, {METHODS[method]}": numbers.error[method, i]
        for i, name in enumerate(DTYPES)
        for method in (KERNELS, FORMULA)
    }
    return lines_over(numbers.dims, lines, "d_k (scale 1)", "largest error (eps)", limits=(0, None), paired=True)


REASON = """
<p>The formula <code>p<sub>j</sub> = exp(x<sub>j</sub>) / Σ exp(x<sub>i</sub>)</code> overflows long before its result
does. The largest number is 65504 in float16, 3.4 · 10<sup>38</sup> in float32, 1.8 · 10<sup>308</sup> in float64;
<code>exp(x)</code> passes it at its logarithm. Then one weight is <code>&infin;/&infin;</code>, NaN. A sum of
<var>N</var> equal terms passes it earlier, at <code>ln(max) &minus; ln N</code>, and then all weights are
<code>exp(x)/&infin; = 0</code>: a wrong result that nothing marks. In float16 this happens with 65536 keys whose scores
are all 0. Far below 0 every <code>exp</code> rounds to 0, and 0/0 is NaN.</p>
<p><b>Random scores</b> with scale 1 have the standard deviation √<var>d<sub>k</sub></var>, and the largest of
<var>N</var> is about √(2 <var>d<sub>k</sub></var> ln <var>N</var>): with 512 keys it passes 11.09 at
<var>d<sub>k</sub></var> = 10, 88.72 at 630, 709.78 at 40,000. With 1/√<var>d<sub>k</sub></var> it stays at 3.5. But the
factor is no guard against overflow: it only holds while elements have variance 1, and training does not keep
that.</p>
<p><b>Log-sum-exp.</b> Only gaps count, so the largest score <var>m</var> can be taken from all:
<code>p<sub>j</sub> = exp(x<sub>j</sub> &minus; m) / Σ exp(x<sub>i</sub> &minus; m)</code>. No exponent is above 0, and
the sum is between 1 and <var>N</var>. <code>m + ln Σ exp(x<sub>i</sub> &minus; m)</code> is the log-sum-exp, which
<code>return_lse</code> returns and by which parts are merged. What is left of overflow is that of the product
<code>q·k</code> itself.</p>
<p><b>Error.</b> A weight changes by <code>p(1 &minus; p)</code> times the error of its gap. The kernels multiply scores
by log<sub>2</sub> e, for 2<sup>x</sup> is faster, before they subtract; that rounds a score by up to
|<var>x</var>| · eps/2, and the weight by a quarter of that at the most. Where scores are large, no two keys share, and
p(1 &minus; p) is 0. A weight in float16 is computed in float32 and rounded once.</p>
"""

EXPERIMENT = Experiment(
    run=overflow,
    title="Overflow and log-sum-exp",
    claim="exp overflows at scores of 11.09 (float16), 88.72 (float32) and 709.78 (float64); subtracting the largest "
    "score from all of them first avoids that.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("Share of queries for which exp(x) / Σ exp(x) gives NaN or zeros only.", draw_failed),
        Figure("Largest error of a weight in units of eps; the formula ends where it fails for all.", draw_error),
    ],
)
