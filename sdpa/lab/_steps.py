"""Experiment: self-attention step by step, and with several heads."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

import sdpa

from .._report.drawing import COLOURS, INK, panel
from ._experiment import FALSE, HELD, Experiment, Figure, Finding, Table, check_sizes
from ._heatmap import shades
from ._words import RULE, draw_matrix, embed

SENTENCE = "Love Apple phones"
ROUNDING = 1e-5  # what sums of 512 products of float32 may differ by, where elements are about 1


class Steps(NamedTuple):
    """Every intermediate result; 3 words, width 512, 8 heads of d_k = 64 by default."""

    tokens: tuple[str, ...]
    embeddings: np.ndarray  # (3, 512)
    w_query: np.ndarray  # (512, 64)
    w_key: np.ndarray  # (512, 64)
    w_value: np.ndarray  # (512, 64)
    query: np.ndarray  # (3, 64) = embeddings @ w_query
    key: np.ndarray  # (3, 64)
    value: np.ndarray  # (3, 64)
    dots: np.ndarray  # (3, 3) = query @ key.T
    scores: np.ndarray  # (3, 3) = dots / √64
    weights: np.ndarray  # (3, 3): softmax of each row
    out: np.ndarray  # (3, 64) = weights @ value
    difference: float  # the largest between out and that of sdpa.attention
    weights_difference: float  # that between weights and those of sdpa.attention_weights
    head_weights: np.ndarray  # (8, 3, 3): of all heads, the first the one above
    heads: np.ndarray  # (8, 3, 64): the result of each, by sdpa.attention
    concatenated: np.ndarray  # (3, 512)
    w_out: np.ndarray  # (512, 512)
    projected: np.ndarray  # (3, 512) = concatenated @ w_out
    projected_difference: float  # the largest to a loop over heads in NumPy that adds up head @ its rows of w_out


def steps(*, width: int = 512, heads: int = 8, seed: int = 0, progress: Callable[[list], Iterable] = iter) -> Steps:
    """Compute attention among the words of a sentence step by step in NumPy, next to the library's results: first one
    head of `width // heads`, then all heads.  RULE describes the embeddings and the matrices, whose seed is `seed`."""
    check_sizes(width=width, heads=heads)
    check_sizes(least=0, seed=seed)
    if width % heads:
        raise ValueError(f"width is {width}: it must be a multiple of heads, which is {heads}")
    tokens = tuple(SENTENCE.split())
    words = embed(tokens, width)
    random = np.random.default_rng(seed)
    *projections, w_out = (draw_matrix(random, width, width) for _ in range(4))
    per_head = [w.reshape(width, heads, -1).swapaxes(0, 1) for w in projections]  # (heads, width, d_k) each
    loop = [one_head(words, *(w[head] for w in per_head)) for head in progress(list(range(heads)))]
    query, key, value = (words @ w for w in per_head)  # (heads, 3, d_k)
    outs = sdpa.attention(query, key, value)
    concatenated = outs.swapaxes(0, 1).reshape(len(tokens), width)
    projected = concatenated @ w_out
    # Concatenating and projecting is the sum of what each head writes through its own rows of w_out.
    summed = sum(one.out @ rows for one, rows in zip(loop, np.split(w_out, heads)))
    first = loop[0]
    return Steps(
        tokens=tokens,
        embeddings=words,
        w_query=per_head[0][0],
        w_key=per_head[1][0],
        w_value=per_head[2][0],
        **first._asdict(),
        difference=farthest(first.out, sdpa.attention(first.query, first.key, first.value)),
        weights_difference=farthest(first.weights, sdpa.attention_weights(first.query, first.key)),
        head_weights=sdpa.attention_weights(query, key),
        heads=outs,
        concatenated=concatenated,
        w_out=w_out,
        projected=projected,
        projected_difference=farthest(projected, summed),
    )


class OneHead(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dots: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    out: np.ndarray


def one_head(words, w_query, w_key, w_value):
    """The steps in plain NumPy."""
    query, key, value = words @ w_query, words @ w_key, words @ w_value
    dots = query @ key.T
    scores = dots / np.float32(query.shape[1] ** 0.5)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return OneHead(query, key, value, dots, scores, weights, weights @ value)


def farthest(a, b):
    return float(np.abs(a - b).max())


def findings(numbers: Steps) -> list[Finding]:
    rest = np.abs(numbers.weights.sum(axis=1) - 1).max()
    heads, _, d = numbers.heads.shape
    width = numbers.embeddings.shape[1]
    shapes = numbers.scores.shape == (3, 3) and numbers.out.shape == (3, d) and numbers.projected.shape == (3, width)
    return [
        Finding(
            "The steps in NumPy give what sdpa.attention gives",
            f"results differ by at most {numbers.difference:.0e}, weights by {numbers.weights_difference:.0e}",
            HELD if max(numbers.difference, numbers.weights_difference) < ROUNDING else FALSE,
        ),
        Finding(
            "Each row of weights adds up to 1",
            f"the sums differ from 1 by at most {rest:.1g}",
            HELD if rest < 1e-6 else FALSE,
        ),
        Finding(
            f"3 × {width} becomes 3 × {d} in one head, and {width} = {heads} × {d} again with all",
            f"out {by(numbers.out)}, concatenated {by(numbers.concatenated)}, projected {by(numbers.projected)}",
            HELD if shapes and heads * d == width else FALSE,
        ),
        Finding(
            "Concatenating heads and projecting adds up what each head writes through its own rows of W_O",
            f"the two differ by at most {numbers.projected_difference:.0e}",
            HELD if numbers.projected_difference < 10 * ROUNDING else FALSE,
        ),
    ]


def by(array):
    return " × ".join(map(str, array.shape))


def tables(numbers: Steps) -> list[Table]:
    one = (
        ("embeddings X", numbers.embeddings),
        ("W_Q", numbers.w_query),
        ("W_K", numbers.w_key),
        ("W_V", numbers.w_value),
        ("Q = X W_Q", numbers.query),
        ("K = X W_K", numbers.key),
        ("V = X W_V", numbers.value),
        ("S = Q Kᵀ", numbers.dots),
        ("S′ = S / √d_k", numbers.scores),
        ("A = softmax(S′)", numbers.weights),
        ("O = A V", numbers.out),
    )
    several = (
        ("A of each head", numbers.head_weights),
        ("O of each head", numbers.heads),
        ("C: side by side", numbers.concatenated),
        ("W_O", numbers.w_out),
        ("C W_O", numbers.projected),
    )
    header = ("", "shape", "first numbers")

    def rows(items):
        return [(name, by(array), start(array)) for name, array in items]

    sentence = " ".join(numbers.tokens)
    return [
        Table(f"“{sentence}”, one head: every intermediate result.", header, rows(one)),
        Table("All heads: what comes on top.", header, rows(several)),
    ]


def start(array):
    return ", ".join(f"{x:.3f}" for x in array.ravel()[:3].round(3) + 0.0).replace("-", "−")


def draw_head(numbers):
    """Scores, divided scores and weights of the first head, as numbers on shades."""
    figure, axes = panel(360, 480, 3, 1)
    for ax, name, table in zip(
        axes, ("S = Q Kᵀ", "S′ = S / √d_k", "A = softmax(S′)"), (numbers.dots, numbers.scores, numbers.weights)
    ):
        most = 1 if name.startswith("A") else np.abs(numbers.dots).max()
        draw_numbers(ax, table, numbers.tokens, most)
        ax.set_title(name)
    return figure


def draw_numbers(axes, table, tokens, most):
    """Positive in one colour and negative in another, the stronger the nearer to `most`."""
    for part, colour in ((np.maximum(table, 0), COLOURS[0]), (np.maximum(-table, 0), COLOURS[1])):
        axes.pcolormesh(part, cmap=shades(colour, strongest=0.6), vmin=0, vmax=most)
    for (i, j), x in np.ndenumerate(table):
        axes.text(j + 0.5, i + 0.5, f"{x:.2f}".replace("-", "−"), ha="center", va="center", color=INK)
    at = np.arange(len(tokens)) + 0.5
    axes.set_xticks(at, tokens)
    axes.set_yticks(at, tokens)
    axes.set_ylim(len(tokens), 0)
    axes.tick_params(length=0)
    axes.grid(False)


def draw_heads(numbers):
    """The weights of every head."""
    heads = len(numbers.head_weights)
    columns = min(4, heads)
    rows = -(-heads // columns)
    figure, axes = panel(360, 95 * rows + 60, rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[heads:]:
        ax.set_visible(False)
    for head, (ax, weights) in enumerate(zip(axes.flat, numbers.head_weights)):
        ax.pcolormesh(weights, cmap=shades(), vmin=0, vmax=1)
        ax.set(title=f"head {head + 1}", aspect="equal")
        ax.tick_params(length=0, labelbottom=head + columns >= heads)
        ax.tick_params(axis="x", labelrotation=90)
        ax.grid(False)
        ax.spines[["top", "right"]].set_visible(True)
    at = np.arange(len(numbers.tokens)) + 0.5
    axes[0, 0].set_xticks(at, numbers.tokens)
    axes[0, 0].set_yticks(at, numbers.tokens)
    axes[0, 0].set_ylim(len(at), 0)
    return figure


EXPERIMENT = Experiment(
    run=steps,
    title="Self-attention step by step",
    claim=(
        f"“{SENTENCE}”: three vectors of 512 numbers become queries, keys and values of 64, these 3 × 3 scores, these "
        "weights, and these a result of 3 × 64; eight such heads side by side are 512 wide again."
    ),
    reason=f"""
<p>Every word asks (its query), offers (its key) and tells (its value): <span class="formula"><var>Q</var> =
<var>X W<sub>Q</sub></var></span>, <span class="formula"><var>K</var> = <var>X W<sub>K</sub></var></span>, <span
class="formula"><var>V</var> = <var>X W<sub>V</sub></var></span>. The score of a pair of words is the
product of one's query and the other's key. Divided by √<var>d<sub>k</sub></var> and put through the softmax, the scores
of a row are weights that add up to 1, and the result is the mean of the values under these weights.</p>
<p>With several heads, each has matrices of its own and so may look elsewhere. Their results lie side by side and are
mixed by one more matrix, <var>W<sub>O</sub></var>.</p>
<p>{RULE}</p>
""",
    findings=findings,
    tables=tables,
    figures=[
        Figure(
            "The first head: scores, scores divided by √d_k in the same shades, weights. A row asks, a column answers.",
            draw_head,
        ),
        Figure("The weights of every head, from empty for 0 to full for 1.", draw_heads),
    ],
)
