"""Types of the compiled module; what it does stands in the parts that _core.pyx lists."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from ._attention.gradients import Gradients
from ._options.signatures import Keywords

THREADS: Final[str]
COMPILER: Final[str]

@final
class Kernel:
    def __init__(self, /, *args: Any, **kwargs: Any) -> None: ...  # raises: kernels() lists the kernels there are
    @property
    def name(self) -> str: ...

def kernels() -> list[Kernel]: ...
def know_threads(main: int, forked: bool = False) -> int: ...
def touch(array: NDArray[Any], threads: int) -> None: ...

class Region(NamedTuple):
    threads: int
    sharing: str
    chunk: int
    work: NDArray[np.float64]

def rehearse(function: Callable[[], object]) -> list[Region]: ...
def attention(kernel: Kernel, query: Any, key: Any, value: Any, options: Mapping[str, Any], known: Keywords) -> Any: ...
def attention_weights(
    kernel: Kernel, query: Any, key: Any, options: Mapping[str, Any], known: Keywords
) -> NDArray[Any]: ...
def attention_varlen(
    kernel: Kernel,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    options: Mapping[str, Any],
    known: Keywords,
) -> Any: ...
def attend_cache(
    kernel: Kernel,
    cache: CacheBase,
    query: Any,
    rows: int,
    lengths: NDArray[np.int64] | None,
    q_offset: Any,
    options: Mapping[str, Any],
    known: Keywords,
) -> Any: ...
def cached_query(kernel: Kernel, cache: CacheBase, query: Any) -> NDArray[Any]: ...
def attend_pages(
    kernel: Kernel,
    query: Any,
    keys: NDArray[Any],
    values: NDArray[Any],
    sequences: list[Sequence],
    one: bool,
    cu_seqlens_q: Any,
    options: Mapping[str, Any],
    known: Keywords,
) -> Any: ...
def attention_backward(
    kernel: Kernel,
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    grad_lse: Any,
    options: Mapping[str, Any],
    known: Keywords,
    unrounded: list[NDArray[Any]] | None = None,
) -> Gradients: ...
def attention_varlen_backward(
    kernel: Kernel,
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    grad_lse: Any,
    options: Mapping[str, Any],
    known: Keywords,
    unrounded: list[NDArray[Any]] | None = None,
) -> Gradients: ...

class Plan(NamedTuple):
    few_rows: bool
    pairs: bool
    converted: bool
    lanes: int
    most_rows: int
    rows: int
    keys: int
    tasks: int
    bundle: int
    parts: int
    parts_shared: bool
    threads: int
    scratch_bytes: int

@disjoint_base
class Inputs:
    beside: dict[str, Any]
    @property
    def query(self) -> NDArray[Any]: ...
    @property
    def key(self) -> NDArray[Any]: ...
    @property
    def value(self) -> NDArray[Any]: ...
    @property
    def threads(self) -> int: ...

class PackedInputs(Inputs): ...
class Options(PackedInputs): ...

@final
class Call(Options):
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def sinks(self) -> NDArray[np.float64] | None: ...
    def project(self, query: NDArray[Any], key: NDArray[Any], scale: float, v: NDArray[np.float64]) -> None: ...
    def result_shape(self, columns: int) -> tuple[int, ...]: ...
    def attend(self) -> Any: ...
    def visible_pairs(self) -> int: ...
    def plan(self) -> Plan: ...

def plan_call(
    kernel: Kernel, query: Any, key: Any, value: Any, options: Mapping[str, Any], known: Keywords
) -> Call: ...
def plan_packed(
    kernel: Kernel,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    options: Mapping[str, Any],
    known: Keywords,
) -> Call: ...
def additive_call(
    kernel: Kernel, query: Any, key: Any, value: Any, features: int, options: Mapping[str, Any], known: Keywords
) -> Call: ...
def merge(outs: Any, lses: Any, out: Any) -> tuple[NDArray[Any], Any]: ...
def merge_into(out: NDArray[Any], lse: NDArray[Any], part: Any, part_lse: Any, threads: int | None) -> None: ...
def tensor_memory(capsule: Any) -> NDArray[Any] | None: ...
def know_bfloat16(dtype: np.dtype[Any]) -> None: ...
def quantise(source: NDArray[Any], out: NDArray[np.int8], scales: NDArray[np.float32], group: int) -> bool: ...
def float_array(name: str, given: Any, fewest_axes: int = 2) -> NDArray[Any]: ...
def checked_out(
    given: Any, shape: tuple[int, ...], like: NDArray[Any], inputs: Mapping[str, Any], wider: bool = True
) -> NDArray[Any]: ...
def rotate(
    x: NDArray[Any],
    out: NDArray[Any] | None,
    positions: NDArray[np.float64] | None,
    first_position: float,
    frequency: NDArray[np.float64],
    largest_frequency: float,
    interleaved: bool,
    threads: int | None,
) -> NDArray[Any]: ...
def rotate_by_tables(
    x: NDArray[Any],
    out: NDArray[Any] | None,
    cosine: NDArray[Any],
    sine: NDArray[Any],
    interleaved: bool,
    threads: int | None,
) -> NDArray[Any]: ...
def rotates_alone(x: NDArray[Any]) -> bool: ...
def takes_rotated(out: NDArray[Any], x: NDArray[Any], positions: NDArray[Any] | None) -> bool: ...
def all_below(numbers: NDArray[np.float64], limit: float) -> bool: ...
def split_heads(rows: NDArray[Any], first: int, heads: int, size: int) -> NDArray[Any]: ...
def join_heads(heads: NDArray[Any]) -> NDArray[Any]: ...

ACTIVATIONS: dict[str | None, int]

@final
class Panels:
    @property
    def kernel(self) -> Kernel: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def outs(self) -> int: ...
    @property
    def ins(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def __init__(
        self,
        kernel: Kernel,
        dtype: np.dtype[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None,
        gate: NDArray[Any] | None,
        gate_bias: NDArray[Any] | None,
    ) -> None: ...
    def weight(self, gate: bool = False) -> NDArray[Any]: ...

def linear(
    panels: Panels,
    x: NDArray[Any],
    out: NDArray[Any] | None,
    residual: NDArray[Any] | None,
    activation: int,
    threads: int | None,
) -> NDArray[Any]: ...
def norm(
    x: NDArray[Any],
    weight: NDArray[Any] | None,
    bias: NDArray[Any] | None,
    eps: float,
    centred: bool,
    residual: NDArray[Any] | None,
    out: NDArray[Any] | None,
    total: NDArray[Any] | None,
    kernel: Kernel,
    threads: int | None,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...

@final
class Operand:
    @property
    def numbers(self) -> NDArray[Any]: ...
    @property
    def scales(self) -> NDArray[np.float32] | None: ...
    @property
    def group(self) -> int: ...
    @property
    def arrays(self) -> tuple[NDArray[Any], ...]: ...
    def __init__(self, numbers: NDArray[Any], scales: NDArray[np.float32] | None, group: int) -> None: ...

@final
class CacheState:
    @property
    def memory(self) -> Any: ...
    @property
    def aligned(self) -> tuple[int, NDArray[np.int64]] | None: ...
    @property
    def keys(self) -> Operand: ...
    @property
    def values(self) -> Operand: ...
    @property
    def lengths(self) -> NDArray[np.int64] | None: ...
    @property
    def floors(self) -> NDArray[np.int64] | None: ...
    @property
    def length(self) -> int: ...
    @property
    def floor(self) -> int: ...
    @property
    def ring(self) -> int: ...
    @property
    def extra(self) -> int: ...
    @property
    def idle(self) -> int: ...
    @property
    def writable(self) -> int: ...
    def __init__(
        self,
        memory: Any,
        lengths: NDArray[np.int64],
        floors: NDArray[np.int64],
        ring: int,
        extra: int,
        idle: int,
        writable: int,
        aligned: tuple[int, NDArray[np.int64]] | None,
    ) -> None: ...
    def shared(self) -> CacheState: ...

@disjoint_base
class CacheBase:
    @property
    def _now(self) -> CacheState: ...
    @property
    def batch(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def keep(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def capacity(self) -> int | None: ...
    @property
    def window(self) -> int | None: ...
    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: np.dtype[Any],
        capacity: int | None,
        window: int | None,
        keep: int,
        group: int,
    ) -> None: ...
    def begin_as(self, other: CacheBase) -> None: ...
    def append_few(self, key: Any, value: Any) -> bool: ...
    def seen_by_one(self) -> tuple[int, NDArray[np.int64] | None] | None: ...
    def commit(
        self,
        state: CacheState,
        rows: list[NDArray[Any]] | None = None,
        begin: CacheState | None = None,
        ring: int = 0,
        counts: NDArray[np.int64] | None = None,
    ) -> None: ...
    def rows_behind(self, count: int, ring: int) -> list[NDArray[Any]]: ...

@final
class Sequence:
    @property
    def length(self) -> int: ...
    @property
    def pages(self) -> NDArray[np.int64]: ...
    def __init__(self, room: int) -> None: ...

@final
class Pool:
    @property
    def keys(self) -> NDArray[Any]: ...
    @property
    def values(self) -> NDArray[Any]: ...
    @property
    def sequences(self) -> dict[int, Sequence]: ...
    @property
    def issued(self) -> int: ...
    @property
    def free_count(self) -> int: ...
    @property
    def free(self) -> list[int]: ...
    @property
    def owners(self) -> list[int]: ...
    def __init__(self, keys: NDArray[Any], values: NDArray[Any]) -> None: ...
    def allocate(self, pages: int) -> int: ...
    def fork(self, old: Sequence) -> int: ...
    def remove(self, number: int) -> None: ...
    def truncate(self, sequence: Sequence, length: int) -> None: ...
    def append(
        self,
        sequences: list[Sequence],
        starts: NDArray[np.int64],
        key: NDArray[Any],
        value: NDArray[Any],
        heads_first: bool,
    ) -> None: ...
    def exhausted(self, needed: int, tokens: int) -> MemoryError: ...
    def snapshot(self, sequences: list[Sequence]) -> NDArray[np.int64]: ...
    def restore(self, sequences: list[Sequence], marks: NDArray[np.int64]) -> None: ...

def fits_pages(rows: Any, pool: NDArray[Any], heads_first: bool) -> bool: ...
