"""How much of a gradient passes through the softmax, against the size of a head, scaled and not."""

from typing import NamedTuple

import numpy as np

import sdpa

from .._report.panels import lines_over
from ._experiment import Experiment, Figure, Finding, Table, check_lists, check_sizes
from ._measures import DIMS, gap_rate, judged

SCALES = "1", "1/√d_k"
BARE, ROOT = range(2)
STATISTICS = "mean", "median", "longest"
MEAN, MEDIAN, LONGEST = range(3)
VALUE_DIM = 64
VANISHED = 0.1  # of the size with 1/√d_k
COMMON = 128  # size of a head in many models


class GradientSizes(NamedTuple):
    """What `gradients` returns.  Each array is (3 statistics, 2 scales, D, seeds): mean, median and longest over the
    tokens (STATISTICS), for each of SCALES."""

    dims: np.ndarray  # (D)
    tokens: int
    product: np.ndarray  # p(1 - p) of the largest weight of a query
    jacobian: np.ndarray  # Frobenius norm of diag(p) - p pᵀ of a query
    query: np.ndarray  # length of a row of dL/dQ
    key: np.ndarray  # length of a row of dL/dK


def gradients(
    *,
    dims: tuple[int, ...] = DIMS,
    tokens: int = 256,
    seeds: int = 16,
    progress=iter,
) -> GradientSizes:
    """Measure p(1 - p), the Jacobian of the softmax, dL/dQ and dL/dK, with scale 1 and 1/√d_k, for every size of a head
    in `dims`.  There are as many queries as keys, with normal elements of variance 1, and the gradient with respect to
    each result has length 1.  Everything is computed in float64: without scaling, float32 does not resolve half of the
    gradients."""
    check_lists(dims=dims)
    check_sizes(seeds=seeds)
    check_sizes(2, tokens=tokens)
    samples = []
    for seed in progress(range(seeds)):
        rng = np.random.default_rng(seed)
        samples.append([measure(rng, tokens, dim) for dim in dims])
    product, jacobian, by_query, by_key = np.transpose(samples, (3, 4, 2, 1, 0))
    return GradientSizes(np.array(dims), tokens, product, jacobian, by_query, by_key)


def measure(rng, tokens, dim):
    """(2 scales, 4 quantities, 3 statistics)."""
    query, key = rng.standard_normal((2, tokens, dim))
    value, grad_out = rng.standard_normal((2, tokens, VALUE_DIM))
    grad_out /= np.linalg.norm(grad_out, axis=-1, keepdims=True)
    sizes = []
    for scale in (1.0, dim**-0.5):
        product, jacobian = softmax_slopes(sdpa.attention_weights(query, key, scale=scale))
        out, lse = sdpa.attention(query, key, value, scale=scale, return_lse=True)
        grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=scale)
        lengths = (np.linalg.norm(grad, axis=-1) for grad in (grads.query, grads.key))
        sizes.append([(x.mean(), np.median(x), x.max()) for x in (product, jacobian, *lengths)])
    return sizes


def softmax_slopes(weights):
    """p(1 - p) of the largest weight p, and ‖diag(p) - p pᵀ‖, which is the root of Σ p_i²(1 - p_i)² + Σ p_i² p_j² over
    i ≠ j; of weights (M, N).  Where p is nearly 1, 1 - p is summed from the others: to subtract would leave nothing."""
    others = np.sort(weights, axis=-1)
    largest, others = others[:, -1], others[:, :-1]
    product = largest * others.sum(axis=-1)
    squares = (others**2).sum(axis=-1)
    on_diagonal = product**2 + (others**2 * (1 - others) ** 2).sum(axis=-1)
    off_diagonal = 2 * largest**2 * squares + squares**2 - (others**4).sum(axis=-1)
    return product, np.sqrt(on_diagonal + off_diagonal)


def findings(numbers: GradientSizes) -> list[Finding]:
    return [
        find_scaled(numbers),
        find_product(numbers),
        find_jacobian(numbers),
        find_vanishing("dL/dQ", numbers.query, numbers.dims),
        find_vanishing("dL/dK", numbers.key, numbers.dims),
        find_ties(numbers),
        find_longest(numbers),
    ]


def at_last(sizes, dims):
    """Means over the seeds (3 statistics, 2 scales) at the largest d_k."""
    return sizes[:, :, dims.argmax()].mean(axis=-1)


def vanished(sizes):
    """Whether mean and median have, of sizes (3 statistics, 2 scales)."""
    return sizes[:2, BARE] < VANISHED * sizes[:2, ROOT]


def find_scaled(numbers):
    """The least and the largest mean over all d_k, apart by a factor."""
    ratios = []
    for sizes in (numbers.jacobian, numbers.query, numbers.key):
        means = sizes[:2, ROOT].mean(axis=-1)[:, numbers.dims >= 16]
        ratios.append((means.max(axis=-1) / means.min(axis=-1)).max() if means.size else np.inf)
    listed = ", ".join(f"{ratio:.2f} ({name})" for ratio, name in zip(ratios, ("Jacobian", "dL/dQ", "dL/dK")))
    return Finding(
        "With 1/√d_k neither the Jacobian nor the gradients depend on d_k",
        f"largest mean or median of any d_k from 16 on over the smallest: {listed}"
        if np.isfinite(ratios).all()
        else "no d_k from 16",
        judged(*(ratio < 1.15 for ratio in ratios)),
    )


def first_below(sizes, dims):
    """The smallest d_k from which on the unscaled size is below the scaled size, or None."""
    bare, root = sizes.mean(axis=-1)
    found = None
    for i in np.argsort(dims)[::-1]:
        if bare[i] >= root[i]:
            break
        found = int(dims[i])
    return found


def below(statistic, sizes, dims):
    first = first_below(sizes, dims)
    return f"{statistic} below that with 1/√d_k " + ("for no d_k" if first is None else f"from d_k = {first} on")


def find_product(numbers):
    sizes = at_last(numbers.product, numbers.dims)
    return Finding(
        "Without scaling p(1 − p) of the largest weight vanishes",
        f"at d_k = {numbers.dims.max()} median {sizes[MEDIAN, BARE]:.1e}, mean {sizes[MEAN, BARE]:.3f} (with 1/√d_k "
        f"{sizes[MEDIAN, ROOT]:.3f}, {sizes[MEAN, ROOT]:.3f}); " + below("mean", numbers.product[MEAN], numbers.dims),
        judged(*vanished(sizes)),
    )


def find_jacobian(numbers):
    sizes = at_last(numbers.jacobian, numbers.dims)
    expected = gap_rate(numbers.tokens) / np.sqrt(numbers.dims.max())
    return Finding(
        "Without scaling the Jacobian of the softmax vanishes",
        f"at d_k = {numbers.dims.max()} median {sizes[MEDIAN, BARE]:.1e}, mean {sizes[MEAN, BARE]:.3f} (about "
        f"r/√d_k = {expected:.3f}; with 1/√d_k {sizes[MEAN, ROOT]:.3f}); "
        + below("mean", numbers.jacobian[MEAN], numbers.dims),
        judged(*vanished(sizes)),
    )


def find_vanishing(name, sizes, dims):
    last = at_last(sizes, dims)
    common = sizes[MEDIAN][:, dims == COMMON].mean(axis=-1)
    return Finding(
        f"Without scaling {name} vanishes",
        f"at d_k = {dims.max()} half of the rows are below {last[MEDIAN, BARE]:.1e} (with 1/√d_k "
        f"{last[MEDIAN, ROOT]:.3f}), but their mean length is {last[MEAN, BARE]:.2f} (with 1/√d_k "
        f"{last[MEAN, ROOT]:.3f}); "
        + below("median", sizes[MEDIAN], dims)
        + (f"; median at d_k = {COMMON} {common[BARE, 0]:.2f} ({common[ROOT, 0]:.3f})" if common.size else ""),
        judged(*vanished(last)),
    )


def find_ties(numbers):
    """The mean of r/(2√d_k) · √(4/π) · √(2 d_k); see REASON."""
    expected = gap_rate(numbers.tokens) * np.sqrt(2 / np.pi)
    large = numbers.dims >= 1024
    means = numbers.query[MEAN, BARE].mean(axis=-1)[large]
    off = np.abs(means / expected - 1).max() if means.size else np.inf
    return Finding(
        "Without scaling the mean length of dL/dQ tends to r·√(2/π): what many queries lack a few have",
        f"expected {expected:.2f} for {numbers.tokens} keys; "
        + (f"measured {means.min():.2f} to {means.max():.2f} from d_k = 1024 on" if means.size else "no d_k from 1024"),
        judged(off < 0.25),
    )


def find_longest(numbers):
    last = at_last(numbers.query, numbers.dims)
    return Finding(
        "Without scaling a few gradients are far too long",
        f"longest row of dL/dQ at d_k = {numbers.dims.max()}: {last[LONGEST, BARE]:.0f}, with 1/√d_k "
        f"{last[LONGEST, ROOT]:.2f}",
        judged(last[LONGEST, BARE] > 10 * last[LONGEST, ROOT]),
    )


def tables(numbers: GradientSizes) -> list[Table]:
    some = range(len(numbers.dims))[:: -(-len(numbers.dims) // 7)]
    header = ("d_k", *(f"scale {scale}: {name}" for scale in SCALES for name in STATISTICS[:2]))

    def rows(sizes):
        means = sizes.mean(axis=-1)
        return [(str(numbers.dims[i]), *(two_digits(x) for x in means[:2, :, i].T.ravel())) for i in some]

    return [
        Table("p(1 − p) of the largest weight", header, rows(numbers.product)),
        Table("Frobenius norm of the Jacobian of the softmax", header, rows(numbers.jacobian)),
        Table("Length of a row of dL/dQ", header, rows(numbers.query)),
        Table("Length of a row of dL/dK", header, rows(numbers.key)),
    ]


def two_digits(number):
    """0.040, 2.1, 6.2e-07."""
    return f"{number:#.2g}".rstrip(".")


def drawing(field, ylabel):
    def draw(numbers):
        sizes = getattr(numbers, field)
        lines = {
            f"{name}, scale {SCALES[scale]}": sizes[statistic, scale]
            for scale in (BARE, ROOT)
            for statistic, name in ((MEAN, "mean"), (MEDIAN, "median"))
        }
        return lines_over(numbers.dims, lines, "d_k", ylabel, yscale="log", paired=True)

    return draw


REASON = """
<p>The softmax <var>p</var> of scores <var>s</var> changes by <code>∂p<sub>i</sub>/∂s<sub>j</sub> =
p<sub>i</sub>(δ<sub>ij</sub> &minus; p<sub>j</sub>)</code>: its Jacobian is <code>J = diag(p) &minus; p pᵀ</code>, with
p(1 &minus; p) on the diagonal. The Jacobian is 0 where one weight is 1. The gradient with respect to a query is
<code>scale · Kᵀ J g</code>, where <var>g</var> is the gradient with respect to the weights.</p>
<p><b>With 1/√<var>d<sub>k</sub></var></b> the scores have standard deviation 1, and ‖J‖² is about Σ<var>p</var>² =
e/<var>N</var> at every <var>d<sub>k</sub></var>. The product with <var>K</var> makes the gradient
√<var>d<sub>k</sub></var> times as long, and the scale takes that back.</p>
<p><b>With scale 1</b> the scores have standard deviation √<var>d<sub>k</sub></var>, and the gap between the two best is
about exponential with mean √<var>d<sub>k</sub></var>/<var>r</var> (<var>r</var> = 2.8 for 256 keys). Its median,
0.69 · √<var>d<sub>k</sub></var>/<var>r</var>, leaves the second key e<sup>&minus;gap</sup>, so half of the Jacobians
are below about <code>2 · 2<sup>&minus;√d<sub>k</sub>/r</sup></code>: they vanish. But for a share of about
<var>r</var>/√<var>d<sub>k</sub></var> of the queries the two best scores are within 1 of each other, and there ‖J‖ is
up to 1/2. The mean of ‖J‖ is about
<code>∫ 2p(1 &minus; p) r/√d<sub>k</sub> d(gap) = r/√d<sub>k</sub></code>: it shrinks slowly, and is larger than with
scaling while <var>r</var>/√<var>d<sub>k</sub></var> is above √(e/<var>N</var>).</p>
<p><b>The gradient with respect to Q</b> where two keys tie is
<code>p(1 &minus; p) · |g<sub>1</sub> &minus; g<sub>2</sub>| · |k<sub>1</sub> &minus; k<sub>2</sub>|</code>. The mean of
p(1 &minus; p) is <var>r</var>/(2√<var>d<sub>k</sub></var>), those of the differences are 2/√π and
√(2<var>d<sub>k</sub></var>): the mean length is <code>r · √(2/π)</code>, the same for every large
<var>d<sub>k</sub></var>. On average nothing vanishes (the scale alone is √<var>d<sub>k</sub></var> times that of the
other side); but most queries learn nothing, and a few are thrown far. The gradient with respect to a key is a sum
over all queries, so that ties reach more keys than queries, and the median of its length falls later.</p>
<p>Below, mean or median count as vanished where they are less than a tenth of those with 1/√<var>d<sub>k</sub></var>,
at the largest <var>d<sub>k</sub></var>.</p>
"""

EXPERIMENT = Experiment(
    run=gradients,
    title="Vanishing gradients",
    claim="Without the factor 1/√<var>d<sub>k</sub></var> the softmax saturates, p(1 &minus; p) goes to 0, and "
    "gradients vanish.",
    reason=REASON,
    findings=findings,
    tables=tables,
    figures=[
        Figure("p(1 − p) of the largest weight of a query.", drawing("product", "p(1 − p)")),
        Figure("Norm of the Jacobian of the softmax.", drawing("jacobian", "‖diag(p) − p pᵀ‖")),
        Figure("Length of a row of dL/dQ, with a gradient of length 1 at each result.", drawing("query", "|dL/dq|")),
        Figure("Length of a row of dL/dK.", drawing("key", "|dL/dk|")),
    ],
)
