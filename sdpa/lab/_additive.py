"""Additive attention compared with dot-product attention: scores, gradients, time and memory."""

import time
import tracemalloc
from typing import NamedTuple

import numpy as np

import sdpa

from .._report.panels import lines_over
from ._experiment import Experiment, Figure, Finding, Table, check_lists, check_sizes
from ._measures import DIMS, judged, sharpness

KINDS = "dot product, scale 1", "dot product, 1/√d_k", "additive", "additive, W of variance 1"
BARE, ROOT, USUAL, WIDE = range(4)
WAYS = "dot product, sdpa", "additive, sdpa", "dot product, NumPy", "additive, NumPy"
DOT, ADDITIVE, NUMPY_DOT, NUMPY_ADDITIVE = range(4)
COMMON = 128  # d_k of the vectors where v is multiplied
FACTOR = 32  # by which
VALUE_DIM = 64
VANISHED = 0.1  # of the length with the usual W
REPEATS = 5


class Additive(NamedTuple):
    """What `additive` returns; K = 4 kinds of scores (KINDS), 4 ways to compute (WAYS)."""

    dims: np.ndarray  # (D)
    tokens: int  # queries, and keys
    features: int  # A
    bound: np.ndarray  # (seeds): Σ|v|
    largest_score: np.ndarray  # (K, D, seeds)
    largest: np.ndarray  # (K, D, seeds): largest weight of a query, mean
    effective: np.ndarray  # (K, D, seeds): exp(entropy), mean
    gradient: np.ndarray  # (K, D, seeds): length of a row of dL/dQ, mean
    slope: np.ndarray  # (2, D, seeds): 1 - tanh², mean, for the usual W and that of variance 1
    multiplied: np.ndarray  # (seeds): largest weight, where v is FACTOR times as large
    lengths: np.ndarray  # (L): queries, and keys
    size: int  # of a query, a key and a value there
    seconds: np.ndarray  # (4 ways, L): shortest of REPEATS
    peak: np.ndarray  # (4 ways, L): bytes beyond the inputs, while it runs


def additive(
    *,
    dims: tuple[int, ...] = DIMS,
    tokens: int = 64,
    features: int = 64,
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024),
    size: int = 64,
    seeds: int = 8,
    progress=iter,
) -> Additive:
    """Compare scores v·tanh(W_Q q + W_K k) with q·k, for queries and keys with normal elements of variance 1 and every
    d_k in `dims`.  W has variance 1/d_k, or 1, and v has variance 1 / `features`.  The gradient with respect to each
    result has length 1.  Time and memory of both are those of one head of `size` and each of `lengths`, in float32."""
    check_lists(dims=dims, lengths=lengths)
    check_sizes(features=features, size=size, seeds=seeds)
    check_sizes(2, tokens=tokens)
    seconds, peak = costs(lengths, size, features)  # first: see there
    samples, multiplied, bounds = [], [], []
    for seed in progress(range(seeds)):
        rng = np.random.default_rng(seed)
        v = rng.standard_normal(features) * features**-0.5
        bounds.append(np.abs(v).sum())
        samples.append([measure(rng, tokens, dim, v) for dim in dims])
        query, key, w_query, w_key = draw(rng, tokens, COMMON, features)
        weights = sdpa.additive_attention(query, key, np.eye(tokens), w_query, w_key, FACTOR * v)
        multiplied.append(weights.max(axis=-1).mean())
    columns = np.transpose(samples, (2, 1, 0))  # 4 numbers for each kind, then the slopes
    score, largest, effective, gradient = columns[:-2].reshape(len(KINDS), 4, *columns.shape[1:]).swapaxes(0, 1)
    return Additive(
        np.array(dims), tokens, features, np.array(bounds), score, largest, effective, gradient, columns[-2:],
        np.array(multiplied), np.array(lengths), size, seconds, peak,
    )  # fmt: skip


def draw(rng, tokens, dim, features):
    """Queries, keys, and W_Q and W_K that keep their variance."""
    query, key = rng.standard_normal((2, tokens, dim))
    return query, key, *(rng.standard_normal((2, features, dim)) * dim**-0.5)


def measure(rng, tokens, dim, v):
    """For each kind the largest score, the largest weight, exp(entropy) and the length of dL/dQ; then the slopes."""
    query, key, w_query, w_key = draw(rng, tokens, dim, len(v))
    value, grad_out = rng.standard_normal((2, tokens, VALUE_DIM))
    grad_out /= np.linalg.norm(grad_out, axis=-1, keepdims=True)
    numbers, slopes = [], []
    for scale in (1.0, dim**-0.5):
        out, lse = sdpa.attention(query, key, value, scale=scale, return_lse=True)
        grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=scale)
        weights = sdpa.attention_weights(query, key, scale=scale)
        numbers += describe(scale * query @ key.T, weights, grads.query)
    for factor in (1.0, dim**0.5):
        net = factor * w_query, factor * w_key, v
        out, lse = sdpa.additive_attention(query, key, value, *net, return_lse=True)
        grads = sdpa.reference.additive_attention_backward(grad_out, query, key, value, *net, out, lse)
        weights = sdpa.additive_attention(query, key, np.eye(tokens), *net)  # means of unit vectors
        bent = np.tanh((query @ net[0].T)[:, None] + key @ net[1].T)
        numbers += describe(bent @ v, weights, grads.query)
        slopes.append(1 - (bent**2).mean())
    return numbers + slopes


def describe(scores, weights, by_query):
    largest, _, effective, _ = sharpness(weights)
    return [np.abs(scores).max(), largest.mean(), effective.mean(), np.linalg.norm(by_query, axis=-1).mean()]


def costs(lengths, size, features):
    """Seconds and peak bytes (4 ways, lengths).  The library goes first: after a product, threads of NumPy's BLAS spin
    for a while and take the cores from the library."""
    rng = np.random.default_rng(0)
    w_query, w_key = rng.standard_normal((2, features, size), np.float32) * np.float32(size**-0.5)
    v = rng.standard_normal(features, np.float32) * np.float32(features**-0.5)
    inputs = [rng.standard_normal((3, length, size), np.float32) for length in lengths]
    ways = (
        sdpa.attention,
        lambda *arrays: sdpa.additive_attention(*arrays, w_query, w_key, v),
        lambda query, key, value: numpy_mean(query @ key.T / np.float32(size**0.5), value),
        lambda query, key, value: numpy_mean(numpy_scores(query @ w_query.T, key @ w_key.T, v), value),
    )
    pairs = [[cost(way, arrays) for arrays in inputs] for way in ways]
    return np.moveaxis(np.array(pairs), -1, 0)


def cost(way, arrays):
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        way(*arrays)
        seconds.append(time.perf_counter() - start)
    tracing = tracemalloc.is_tracing()  # by whoever calls: that goes on
    if not tracing:
        tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    way(*arrays)
    _, peak = tracemalloc.get_traced_memory()
    if not tracing:
        tracemalloc.stop()
    return min(seconds), peak - before


def numpy_scores(query, key, v):
    """(M, N) from projections (M, A) and (N, A): all sums at once, as the formula is written."""
    sums = query[:, None] + key
    return np.tanh(sums, out=sums) @ v


def numpy_mean(scores, value):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


def findings(numbers: Additive) -> list[Finding]:
    return [
        find_bound(numbers),
        find_no_scale(numbers),
        find_saturation(numbers),
        find_slope(numbers),
        find_gradient(numbers),
        find_built(numbers),
        find_faster(numbers),
    ]


def find_bound(numbers):
    share = (numbers.largest_score[[USUAL, WIDE]] / numbers.bound).max()
    high = numbers.dims.argmax()
    return Finding(
        "Additive scores are bounded by Σ|v|, whatever d_k is",
        f"the largest is {share:.2f} of it, which is {numbers.bound.mean():.1f}; at d_k = {numbers.dims[high]} the dot "
        f"product has {numbers.largest_score[BARE, high].mean():.0f}, with 1/√d_k "
        f"{numbers.largest_score[ROOT, high].mean():.1f}",
        judged(share <= 1),
    )


def shares(numbers):
    """(K, D) of the keys that count."""
    return numbers.effective.mean(axis=-1) / numbers.tokens


def find_no_scale(numbers):
    share = shares(numbers)[:, numbers.dims >= 16]
    steady = [each.size > 0 and each.max() / each.min() <= 1.1 for each in share]
    spans = (f"{each.min():.1%} to {each.max():.1%}" if each.size else "none" for each in share)
    return Finding(
        "Additive attention needs no factor: it is equally sharp at every d_k from 16 on",
        "keys that count: " + "; ".join(f"{span} ({kind})" for kind, span in zip(KINDS, spans)),
        judged(steady[USUAL], steady[WIDE]),
    )


def find_saturation(numbers):
    largest = numbers.multiplied.mean()
    return Finding(
        "Bounded scores cannot saturate the softmax",
        f"with v {FACTOR} times as large, as training may make it, the largest weight is {largest:.3f} at "
        f"d_k = {COMMON} (with v of variance 1/{numbers.features} at most "
        f"{numbers.largest[USUAL].mean(axis=-1).max():.3f})",
        judged(largest < 0.5),
    )


def find_slope(numbers):
    """The mean of 1 - tanh² under a normal density that is flat where the slope is not 0: ∫(1 - tanh²) = 2."""
    high = numbers.dims.argmax()
    usual, wide = numbers.slope[:, high].mean(axis=-1)
    expected = 1 / np.sqrt(np.pi * numbers.dims[high])
    return Finding(
        "Where projections grow with d_k, tanh saturates: its slope falls like 1/√(π d_k)",
        f"mean slope at d_k = {numbers.dims[high]} with W of variance 1 {wide:.4f}, expected {expected:.4f}; with the "
        f"usual W {usual:.3f}",
        judged(abs(wide / expected - 1) < 0.1),
    )


def find_gradient(numbers):
    high = numbers.dims.argmax()
    length = numbers.gradient[:, high].mean(axis=-1)
    return Finding(
        "So the gradients of additive attention vanish there",
        f"mean length of a row of dL/dQ at d_k = {numbers.dims[high]}: {length[WIDE]:.3f} with W of variance 1, "
        f"{length[USUAL]:.3f} with the usual W (dot product with 1/√d_k {length[ROOT]:.3f}, with 1 {length[BARE]:.3f})",
        judged(length[WIDE] < VANISHED * length[USUAL]),
    )


def find_built(numbers):
    last = numbers.lengths.argmax()
    count = numbers.lengths[last] ** 2 * numbers.features * 4
    peak = numbers.peak[:, last]
    return Finding(
        "Additive attention needs memory for M · N · A numbers",
        f"at {numbers.lengths[last]} queries and keys these are {mebibytes(count)}; beyond its inputs NumPy takes "
        f"{mebibytes(peak[NUMPY_ADDITIVE])} ({mebibytes(peak[NUMPY_DOT])} for the dot product), sdpa "
        f"{mebibytes(peak[ADDITIVE])} ({mebibytes(peak[DOT])})",
        judged(peak[NUMPY_ADDITIVE] >= count, peak[ADDITIVE] >= count),
    )


def find_faster(numbers):
    last = numbers.lengths.argmax()
    times = numbers.seconds[ADDITIVE, last] / numbers.seconds[DOT, last]
    numpy_times = numbers.seconds[NUMPY_ADDITIVE, last] / numbers.seconds[NUMPY_DOT, last]
    return Finding(
        "The dot product is much faster",
        f"at {numbers.lengths[last]} queries and keys additive attention takes {times:.1f} times as long in sdpa "
        f"({milliseconds(numbers.seconds[ADDITIVE, last])}), {numpy_times:.3g} times in NumPy "
        f"({milliseconds(numbers.seconds[NUMPY_ADDITIVE, last])})",
        judged(times > 2, numpy_times > 2),
    )


def mebibytes(count):
    return f"{count / 2**20:.3g} MiB"


def milliseconds(seconds):
    return f"{seconds * 1e3:.3g} ms"


def tables(numbers: Additive) -> list[Table]:
    some = range(len(numbers.dims))[:: -(-len(numbers.dims) // 7)]

    def rows(values, form):
        return [(str(numbers.dims[i]), *(format(mean, form) for mean in values[:, i].mean(axis=-1))) for i in some]

    def by_length(values):
        return [(str(length), *(f"{x:.3g}" for x in row)) for length, row in zip(numbers.lengths, values.T)]

    by_kind, by_way = ("d_k", *KINDS), ("queries and keys", *WAYS)
    return [
        Table(f"Keys that count of {numbers.tokens}: exp(entropy)", by_kind, rows(numbers.effective, ".1f")),
        Table("Mean length of a row of dL/dQ", by_kind, rows(numbers.gradient, ".3f")),
        Table(f"Time in ms, one head of {numbers.size}, float32", by_way, by_length(numbers.seconds * 1e3)),
        Table("Memory beyond the inputs in MiB", by_way, by_length(numbers.peak / 2**20)),
    ]


def draw_effective(numbers):
    lines = dict(zip(KINDS, numbers.effective / numbers.tokens))
    return lines_over(numbers.dims, lines, "d_k", "share of the keys that count", limits=(0, 1.02))


def draw_gradient(numbers):
    return lines_over(numbers.dims, dict(zip(KINDS, numbers.gradient)), "d_k", "mean |dL/dq|", yscale="log")


def draw_slope(numbers):
    large = numbers.dims[numbers.dims >= 16]
    return lines_over(
        numbers.dims, dict(zip(KINDS[USUAL:], numbers.slope)), "d_k", "mean of 1 − tanh²",
        expected={"1/√(π d_k)": (large, 1 / np.sqrt(np.pi * large))}, yscale="log",
    )  # fmt: skip


def draw_costs(numbers, values, ylabel):
    lines = {way: each[:, None] for way, each in zip(WAYS, values)}
    return lines_over(numbers.lengths, lines, "queries and keys", ylabel, yscale="log")


def draw_seconds(numbers):
    return draw_costs(numbers, numbers.seconds * 1e3, "time (ms)")


def draw_peak(numbers):
    return draw_costs(numbers, numbers.peak / 2**20, "memory (MiB)")


REASON = """
<p>Additive attention, the older one, compares by a small network of <var>A</var> features:
<code>v·tanh(W<sub>Q</sub> q + W<sub>K</sub> k)</code> (Bahdanau, Cho and Bengio). |tanh| is at most 1, so that a score
is at most Σ|<var>v</var>|. With W of variance 1/<var>d<sub>k</sub></var> a projection has variance 1 at every
<var>d<sub>k</sub></var>, and the scores no longer know <var>d<sub>k</sub></var>: the factor is in the matrices, where
initialisation put it. With W of variance 1 projections grow like √<var>d<sub>k</sub></var>, tanh becomes the sign, and
scores stay within the bound.</p>
<p>The bound itself is no guard: with <var>v</var> of variance 1/<var>A</var> it is √(2<var>A</var>/π), 6.4 for 64
features, and a gap of 12.8 is one-hot. What keeps the scores small is that their signs are random, and that
<var>v</var> is small; training may change both.</p>
<p><b>Gradients</b> pass tanh by its slope, 1 &minus; tanh². The sum of two projections of variance
<var>d<sub>k</sub></var> has the density 1/√(4π <var>d<sub>k</sub></var>) at 0, and the integral of the slope is 2: its
mean is 1/√(π <var>d<sub>k</sub></var>). But as most slopes are 0 and a few near 1, their root mean square only falls
like 1/<var>d<sub>k</sub></var><sup>1/4</sup>. The gradient with respect to <var>q</var> is multiplied by
W<sub>Q</sub> as well, whose columns are √<var>d<sub>k</sub></var> times as long as the usual ones: it grows like
<var>d<sub>k</sub></var><sup>1/4</sup>. The gradients of additive attention are those of the oracle,
<code>sdpa.reference.additive_attention_backward</code>, as the library has none.</p>
<p><b>Cost.</b> A product is <var>d<sub>k</sub></var> multiplications and additions for each pair, an additive score
<var>A</var> times a tanh. Written as a formula for arrays, the sums are an array of M · N · A numbers. The kernels of
<code>sdpa.additive_attention</code> make a block of scores at a time, as those of <code>sdpa.attention</code> do; what
they need beyond that are the projections. Memory is what Python's tracemalloc counts, the result included. The library
is measured first and NumPy after it, because the idle BLAS threads of NumPy would disturb the library.</p>
"""

EXPERIMENT = Experiment(
    run=additive,
    title="Additive attention",
    claim="Additive attention has bounded scores and needs no factor 1/√<var>d<sub>k</sub></var>; but the dot product "
    "is much faster, and takes less memory.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("Share of the keys that count, exp(entropy) / N.", draw_effective),
        Figure("Mean length of a row of dL/dQ, with a gradient of length 1 at each result.", draw_gradient),
        Figure("Mean slope of tanh.", draw_slope),
        Figure("Time of one head, by length.", draw_seconds),
        Figure("Memory beyond the inputs, by length.", draw_peak),
    ],
)
