"""The options of attention, each described once: its type, its default, how it broadcasts, and what it means.

Everything else follows from these classes: what type checkers accept (each function takes `**options: Unpack[...]`),
the signatures and parameter lists that `help` shows (`takes`, in signatures.py), and which keywords a function knows.
The values are checked in sdpa/_core/options.pxi, in the order of the fields here.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

from numpy.typing import ArrayLike, NDArray

from .signatures import Keywords, described


class Option(NamedTuple):
    """`kind` and `meaning` may hold names in braces, for which each function has words of its own."""

    kind: str
    default: Any
    meaning: str


# For the names in braces: the axes and defaults of `attention`, and those of calls with packed sequences.
WORDS = {
    "pairs": "(B, H, M, N)",
    "batch": "batch",
    "heads": "(H) or (B, H)",
    "lse": "(B, H, M)",
    "scale": "1 / sqrt(D)",
    "threads": "",
    "most": "SDPA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that this process may use",
    "array": "array",
    "offset": "N - M, or kv_lengths - M where lengths are given: the last query sees the last key",
}
PACKED = WORDS | {
    "pairs": "(H, T, L), L the keys of the longest sequence",
    "batch": "sequence",
    "heads": "(H) or (S, H)",
    "lse": "(T, H)",
    "offset": "each sequence's keys minus its queries: its last query sees its last key",
}


class Masks(TypedDict, total=False):
    """Which pairs of a query and a key count by an array, and what is added to their scores."""

    mask: Annotated[
        ArrayLike | None,
        Option("boolean {array}, broadcast to {pairs}", None, "True: the query may attend to the key."),
    ]
    bias: Annotated[
        ArrayLike | None,
        Option("floating {array}, broadcast to {pairs}", None, "It is added to the scores; -inf hides the key."),
    ]


class Positions(TypedDict, total=False):
    """Which pairs count by where the query stands."""

    causal: Annotated[bool, Option("bool", False, "A query sees the keys up to its position.")]
    window: Annotated[
        Sequence[int | None] | None,
        Option(
            "pair (left, right)",
            None,
            "A query sees the keys from `position - left` to `position + right`. None: no bound on that side.",
        ),
    ]
    q_offset: Annotated[
        ArrayLike | None,
        Option("int, or one per {batch}", None, "Query i stands at position `i + q_offset`. Default: {offset}."),
    ]


class Lengths(TypedDict, total=False):
    """How many keys there are, where batches differ in that."""

    kv_lengths: Annotated[
        ArrayLike | None, Option("int, or one per {batch}", None, "Keys at and past the length do not exist.")
    ]


class Scores(TypedDict, total=False):
    """How a score comes from a product, and what is in the denominator."""

    scale: Annotated[float | None, Option("float", None, "Factor of the scores. Default: {scale}.")]
    softcap: Annotated[
        float | None,
        Option("float", None, "Bounds the scores: `softcap * tanh(score / softcap)`, before bias and masks."),
    ]
    sinks: Annotated[
        ArrayLike | None,
        Option(
            "{array} {heads}", None, "One more logit in the denominator, without a value; neither scaled nor capped."
        ),
    ]


class Distances(TypedDict, total=False):
    """How a score depends on where the query and the key stand."""

    alibi_slopes: Annotated[
        ArrayLike | None,
        Option("{array} {heads}", None, "A score is lowered by the slope times the distance of query and key."),
    ]


class Results(TypedDict, total=False):
    """What a call returns, and where."""

    return_lse: Annotated[
        bool,
        Option(
            "bool",
            False,
            "Also return the log-sum-exp of the scores, {lse}: the natural logarithm, float32 (float64 for float64).",
        ),
    ]
    out: Annotated[
        NDArray[Any] | None,
        Option(
            "{array}",
            None,
            "The {array} to fill and return, which must not overlap an input. If its dtype is wider than that of "
            "query, the result is not rounded: for partial results that are merged, and for gradients.",
        ),
    ]


class Threads(TypedDict, total=False):
    """Who computes."""

    threads: Annotated[
        int | None,
        Option(
            "int",
            None,
            "The most threads to use. Default: {threads}{most}.",
        ),
    ]


class AttentionOptions(Masks, Positions, Lengths, Scores, Distances, Results, Threads):
    """Of `attention`, and of whatever gives its result."""


class InputOptions(Masks, Positions, Lengths, Scores, Distances, Threads):
    """Of what gives something else for the same inputs: the weights, the gradients, or a layer's result."""


class CacheOptions(Masks, Positions, Scores, Distances, Results, Threads):
    """Of `KVCache.attend`: the cache knows its lengths."""


class Anywhere(Scores, Results, Threads):
    """The options whose meaning does not depend on where tokens stand."""


ANYWHERE = frozenset(described(Anywhere))


def takes(function: str, options: type, words: Mapping[str, str] = WORDS, **defaults: Any) -> Keywords:
    """What the function of that name takes; `defaults` are those that differ from the description."""
    every = described(options)
    both = {name: defaults.get(name, option.default) for name, option in every.items()}
    return Keywords(function, frozenset(every), both, both.get("causal", False), every, words, {}, None)
