"""What models call becomes this library's, and torch's again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.nn import Parameter
from torch.nn.attention.bias import CausalBias

from .._attention.explain import Explanation
from .._attention.explain import explain as explain_arrays
from ._kernels import Replaced
from ._like_torch import TORCH, as_options, scaled_dot_product_attention
from ._tensors import array_of, check_dense, without_tensors
from ._watched import forward_mode, watched

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Switch:
    """One for the process.  It is on while `enable` holds or any `enabled` block has not ended, of whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held, self._blocks = False, 0
        self._replaced: Replaced | None = None
        self._fastpath = True
        if hasattr(os, "register_at_fork"):  # else a child might wait for a thread that it has not
            unlock = self._lock.release
            os.register_at_fork(before=self._lock.acquire, after_in_parent=unlock, after_in_child=unlock)

    def hold(self, held: bool) -> None:
        with self._lock:
            self._held = held
            self._turn()

    def enter(self, blocks: int) -> None:
        with self._lock:
            self._blocks += blocks
            try:
                self._turn()
            except BaseException:
                self._blocks -= blocks
                raise

    def _turn(self) -> None:
        wanted = self._held or self._blocks > 0
        if wanted and self._replaced is None:
            self._replaced = Replaced()
            # The fast path of nn.MultiheadAttention and nn.TransformerEncoder computes attention by other operators.
            self._fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            torch.nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
        elif not wanted and self._replaced is not None:
            if torch.nn.functional.scaled_dot_product_attention is attend:  # else it is another's, who may call ours
                torch.nn.functional.scaled_dot_product_attention = TORCH
            torch.backends.mha.set_fastpath_enabled(self._fastpath)
            self._replaced.remove()
            self._replaced = None

    @property
    def on(self) -> bool:
        return self._replaced is not None


SWITCH = Switch()


def enable() -> None:
    """Compute the attention that models call by this library, until `disable`.

    That is torch.nn.functional.scaled_dot_product_attention and the operators behind it, also in graphs that
    torch.compile and torch.export made; nn.MultiheadAttention without weights, nn.TransformerEncoderLayer and
    nn.TransformerDecoderLayer, whose fast path is turned off meanwhile; and torch.nn.attention.varlen, which has no
    kernel for the CPU otherwise.  Gradients are this library's, too.  Calls that this library does not take are
    computed by torch, as before: `explain` tells why.

    The change holds for the whole process.  Calling `enable` again changes nothing.
    """
    SWITCH.hold(True)


def disable() -> None:
    """End what `enable` began.  Blocks of `enabled` that have not ended keep the change until they end."""
    SWITCH.hold(False)


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` for the length of a `with` block, however the block ends.  Blocks may be nested, and may overlap in
    several threads: the last one that ends restores everything.

    >>> import torch, sdpa.torch
    >>> x = torch.randn(1, 8, 512, 64)
    >>> with sdpa.torch.enabled():
    ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    """
    SWITCH.enter(1)
    try:
        yield
    finally:
        SWITCH.enter(-1)


def register_flash_attention_impl(name: str = "cpu_attention") -> None:
    """Offer the operators to torch.nn.attention.activate_flash_attention_impl(name), which replaces them without the
    function in torch.nn.functional, until torch.nn.attention.restore_flash_attention_impl()."""
    torch.nn.attention.register_flash_attention_impl(name, register_fn=Replaced)


def attend(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> Tensor:  # fmt: skip
    """The function that stands in torch.nn.functional meanwhile."""
    if type(attn_mask) is CausalBias:  # makes a mask of itself for a function that it knows by its place
        known_as = torch.nn.functional.scaled_dot_product_attention
        given = query, key, value, attn_mask, dropout_p, is_causal
        return CausalBias.__torch_function__(known_as, (CausalBias,), given, dict(scale=scale, enable_gqa=enable_gqa))
    if not watched() and SWITCH.on and torchs_own(query, key, value, attn_mask, dropout_p) is None:
        try:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except (TypeError, ValueError):
            pass  # an error, which torch words for its own function; or a call that only torch knows
    return TORCH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def torchs_own(query, key, value, attn_mask, dropout_p) -> str | None:
    """Why torch must compute a call itself, or None."""
    if dropout_p:
        return f"dropout_p is {dropout_p}, and this library has no random numbers"
    if not type(query) is type(key) is type(value) is Tensor or attn_mask is not None:
        tensors = {"query": query, "key": key, "value": value, "attn_mask": query if attn_mask is None else attn_mask}
        for name, x in tensors.items():
            if type(x) is not Tensor and type(x) is not Parameter:
                return f"{name} is of type {type(x).__name__}, not a plain tensor"
    dtype = query.dtype
    if dtype not in FLOATS or not dtype is key.dtype is value.dtype:
        return f"the dtypes are {query.dtype}, {key.dtype} and {value.dtype}"
    if _len_torch_function_stack() > 0:
        return "a torch function mode is active"
    if forward_mode():
        return "forward-mode differentiation is active"
    return None


def explain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Explanation | str:  # fmt: skip
    """How a call of torch.nn.functional.scaled_dot_product_attention is computed while `enabled`: the answer of
    `sdpa.explain`, or in words the reason why torch computes the call.

    >>> import torch, sdpa.torch
    >>> x = torch.zeros(1, 8, 512, 64)
    >>> sdpa.torch.explain(x, x, x).dtype
    'float32'
    >>> sdpa.torch.explain(x, x, x, dropout_p=0.1)
    'computed by torch: dropout_p is 0.1, and this library has no random numbers'
    """
    why = torchs_own(query, key, value, attn_mask, dropout_p)
    if why is None and watched():
        why = "a compiler, torch.func, a dispatch mode or a trace must see torch's own operator"
    if why is None:
        try:
            check_dense(query=query, key=key, value=value, **{} if attn_mask is None else {"attn_mask": attn_mask})
            query, key, value, options = as_options(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            arrays = [array_of(*named) for named in (("query", query), ("key", key), ("value", value))]
            return explain_arrays(*arrays, **without_tensors(options), threads=torch.get_num_threads())
        except (TypeError, ValueError) as error:
            why = str(error)
    return f"computed by torch: {why}"
