"""Types of the compiled module; _core.pyx holds the meaning."""

from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

OPENMP: Final[bool]
COMPILER: Final[str]

@final
class Kernel:
    def __init__(self, /, *args: Any, **kwargs: Any) -> None: ...  # raises: kernels() lists the kernels there are
    @property
    def name(self) -> str: ...

def kernels() -> list[Kernel]: ...
def attend(
    kernel: Kernel,
    query: NDArray[Any],
    key: NDArray[Any],
    *,
    value: NDArray[Any] | None,
    out: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    lse: NDArray[Any] | None,
    mask: NDArray[np.bool_] | None,
    bias: NDArray[Any] | None,
    begin_shift: NDArray[np.int64] | None,
    end_shift: NDArray[np.int64] | None,
    q_offset: NDArray[np.int64] | None,
    kv_lengths: NDArray[np.int64] | None,
    scale: float,
    softcap: float,
    sinks: NDArray[np.float64] | None,
    alibi_slopes: NDArray[np.float64] | None,
    threads: int,
    key_scale: NDArray[np.float32] | None = None,
    value_scale: NDArray[np.float32] | None = None,
    group: int = 0,
    q_starts: NDArray[np.int64] | None = None,
    k_starts: NDArray[np.int64] | None = None,
    pages: NDArray[np.int64] | None = None,
    page_size: int = 0,
    v: NDArray[np.float64] | None = None,
) -> None: ...
def attend_backward(
    kernel: Kernel,
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    out: NDArray[Any],
    lse: NDArray[Any],
    grad_out: NDArray[Any],
    grad_lse: NDArray[Any] | None,
    grad_query: NDArray[Any],
    grad_key: NDArray[Any],
    grad_value: NDArray[Any],
    grad_bias: NDArray[Any] | None,
    delta: NDArray[Any] | None,
    mask: NDArray[np.bool_] | None,
    bias: NDArray[Any] | None,
    begin_shift: NDArray[np.int64] | None,
    end_shift: NDArray[np.int64] | None,
    q_offset: NDArray[np.int64] | None,
    kv_lengths: NDArray[np.int64] | None,
    scale: float,
    softcap: float,
    alibi_slopes: NDArray[np.float64] | None,
    threads: int,
    q_starts: NDArray[np.int64] | None = None,
    k_starts: NDArray[np.int64] | None = None,
) -> None: ...
def attend_plain(
    kernel: Kernel,
    query: Any,
    key: Any,
    value: Any,
    causal: bool,
    threads_of: Callable[[None], int],
    key_scale: NDArray[np.float32] | None = None,
    value_scale: NDArray[np.float32] | None = None,
    group: int = 0,
) -> NDArray[Any] | None: ...
def attend_pages(
    kernel: Kernel,
    query: Any,
    key: NDArray[Any],
    value: NDArray[Any],
    sequences: list[Any],
    one: bool,
    causal: bool,
    threads_of: Callable[[None], int],
) -> NDArray[Any] | None: ...
def is_small(batches: int, heads: int, q_len: int, kv_len: int, dim: int, value_dim: int) -> bool: ...
def know_bfloat16(dtype: np.dtype[Any]) -> None: ...
def quantise(source: NDArray[Any], out: NDArray[np.int8], scales: NDArray[np.float32], group: int) -> bool: ...
def plan(
    kernel: Kernel,
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    scale: float,
    bounded: bool,
    threads: int,
) -> tuple[bool, bool, bool, int, int, int, int, int, int, int, bool, int, int]: ...
def rotate(
    x: NDArray[Any],
    out: NDArray[Any],
    positions: NDArray[np.float64] | None,
    first_position: float,
    frequency: NDArray[np.float64],
    interleaved: bool,
    threads: int,
) -> None: ...
def rotates_alone(x: NDArray[Any]) -> bool: ...
def holds_floats(x: NDArray[Any]) -> bool: ...
def takes_rotated(out: NDArray[Any], x: NDArray[Any], positions: NDArray[Any] | None) -> bool: ...
def all_below(numbers: NDArray[np.float64], limit: float) -> bool: ...
def pack_weights(
    kernel: Kernel, weight: NDArray[Any], bias: NDArray[Any] | None
) -> tuple[NDArray[np.uint8], NDArray[Any] | None]: ...
def linear(
    kernel: Kernel,
    x: NDArray[Any],
    packed: NDArray[np.uint8],
    bias: NDArray[Any] | None,
    out: NDArray[Any],
    threads: int,
) -> None: ...
