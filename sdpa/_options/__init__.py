"""The options of attention, each described once: its type, its default, and what it means.

Everything else follows from these classes: what type checkers accept (each function takes `**options: Unpack[...]`),
the signatures and parameter lists that `help` shows (`takes`, in signatures.py), and which keywords a function knows.
The values are checked in sdpa/_core/options.pxi, in the order of the fields here.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

from numpy.typing import ArrayLike, NDArray

from .signatures import takes as takes


class Option(NamedTuple):
    default: Any
    meaning: str


class Sight(TypedDict, total=False):
    """Which pairs of a query and a key count, and what is added to their scores."""

    mask: Annotated[
        ArrayLike | None, Option(None, "boolean, broadcast to (B, H, M, N).  True: the query may attend to the key.")
    ]
    bias: Annotated[
        ArrayLike | None, Option(None, "floating, broadcast to (B, H, M, N).  Added to the scores; -inf hides a key.")
    ]
    causal: Annotated[
        bool,
        Option(
            False,
            "query i stands at position `i + q_offset` and sees the keys up to there.  With M = 2 and N = 4\n\n"
            "        1 1 1 0\n        1 1 1 1\n",
        ),
    ]
    window: Annotated[
        Sequence[int | None] | None,
        Option(None, "(left, right).  A query sees keys from `position - left` to `position + right`; None: no bound."),
    ]
    q_offset: Annotated[
        ArrayLike | None,
        Option(
            None,
            "int, or one per batch.  Default N - M, with kv_lengths kv_lengths - M: the last query sees the last key.",
        ),
    ]


class Lengths(TypedDict, total=False):
    """How many keys there are, where batches differ in that."""

    kv_lengths: Annotated[ArrayLike | None, Option(None, "int, or (B).  Keys at and past the length do not exist.")]


class Scores(TypedDict, total=False):
    """How a score comes from a product, and what is in the denominator."""

    scale: Annotated[float | None, Option(None, "default 1 / sqrt(D).")]
    softcap: Annotated[float | None, Option(None, "bounds the scores to (-softcap, softcap).")]
    sinks: Annotated[
        ArrayLike | None,
        Option(None, "(H).  One more logit in the denominator, with no value; neither scaled nor capped."),
    ]
    alibi_slopes: Annotated[ArrayLike | None, Option(None, "(H) or (B, H).")]


class Results(TypedDict, total=False):
    """What a call returns, and where."""

    return_lse: Annotated[
        bool,
        Option(
            False,
            "also return the logarithm of the sum of exp(score), (B, H, M); natural, float32 (float64 for float64).",
        ),
    ]
    out: Annotated[
        NDArray[Any] | None,
        Option(
            None,
            "the array to fill and return.  It must not overlap an input.  One of a wider dtype than query takes the\n"
            "    result as it was summed, unrounded: for partial results that are merged, and for gradients.",
        ),
    ]


class Threads(TypedDict, total=False):
    """Who computes."""

    threads: Annotated[
        int | None,
        Option(None, "default SDPA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs this process may use."),
    ]


class AttentionOptions(Sight, Lengths, Scores, Results, Threads):
    """Of `attention`, and of whatever gives its result."""


class InputOptions(Sight, Lengths, Scores, Threads):
    """Of what gives something else for the same inputs: the weights, or the gradients."""


class CacheOptions(Sight, Scores, Results, Threads):
    """Of `KVCache.attend`: the cache knows its lengths."""
