"""What the mask functions of transformers mean.

transformers describes a mask by a Python function of four indices, put together from few parts by closures.  What is
recognised here needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import masking_utils


class Pattern(NamedTuple):
    """Which keys a query sees: those within `left` before and `right` after its own position, of its own chunk (of that
    many tokens, the first after the left padding of each batch) and of its own sequence (their numbers for each
    query, (B, M))."""

    left: int | None = None
    right: int | None = None
    chunk: tuple[int, Tensor] | None = None
    packed: Tensor | None = None


def least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def both(one: Pattern | None, other: Pattern | None) -> Pattern | None:
    """The pattern of what both patterns let a query see, or None."""
    if one is None or other is None or (one.chunk and other.chunk):
        return None
    if one.packed is not None and other.packed is not None:
        return None
    return Pattern(
        least(one.left, other.left), least(one.right, other.right), one.chunk or other.chunk,
        other.packed if one.packed is None else one.packed,
    )  # fmt: skip


def of_all(cells: dict[str, Any]) -> Pattern | None:
    pattern: Pattern | None = Pattern()
    for function in cells["mask_functions"]:
        pattern = both(pattern, pattern_of(function))
    return pattern


def of_remapped(cells: dict[str, Any]) -> Pattern | None:
    """Within a packed sequence positions differ from places by a constant, which only chunks would notice."""
    pattern = pattern_of(cells["mask_function"])
    return None if pattern is None or pattern.chunk else pattern


# By the function in which the closure is made.
CLOSURES: dict[str, Callable[[dict[str, Any]], Pattern | None]] = {
    "and_masks": of_all,
    "sliding_window_overlay": lambda cells: Pattern(left=cells["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay": lambda cells: Pattern(cells["sliding_window"], cells["sliding_window"]),
    "chunked_overlay": lambda cells: Pattern(chunk=(cells["chunk_size"], cells["left_padding"])),
    "packed_sequence_mask_function": lambda cells: Pattern(packed=cells["packed_sequence_mask"]),
    "remap_positions_for_packed_sequence": of_remapped,
}


def pattern_of(function: Callable) -> Pattern | None:
    """The pattern of a mask function, or None for one that is not known."""
    if function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern()
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != masking_utils.__name__:
        return None
    read = CLOSURES.get(function.__qualname__.partition(".")[0])
    if read is None:
        return None
    return read(dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))))
