"""What stands beside attention: partial results joined, and rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._layer.rotary import rotary as rotary_of_arrays
from . import _batched
from ._tensors import array_of, as_tensor, check_plain, tensor_of, written
from ._watched import forward_mode, refuse_tangents, watched


def merge(outs, lses, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`sdpa.merge` for tensors: partial results over disjoint keys, joined into the result over all of them.

    Parameters
    ----------
    outs : sequence of tensors (..., M, E)
        The results of the parts.
    lses : sequence of tensors (..., M)
        The log-sum-exp of each part.
    out
        The tensor to fill and return.

    Returns
    -------
    (out, lse), with gradients with respect to all parts

    Examples
    --------
    >>> import torch, sdpa.torch
    >>> q, k, v = torch.ones(2, 4), torch.ones(6, 4), torch.arange(6.0)[:, None]
    >>> parts = [sdpa.torch.attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 2), slice(2, 6))]
    >>> sdpa.torch.merge(*zip(*parts))[0].round(decimals=3)
    tensor([[2.5000],
            [2.5000]])
    """
    outs, lses = list(outs), list(lses)
    for i, (part, its_lse) in enumerate(zip(outs, lses)) if forward_mode() else ():
        refuse_tangents(**{f"outs[{i}]": part, f"lses[{i}]": its_lse})
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses))
    if wanted or watched():
        if out is not None and wanted:
            raise ValueError("out is given and a part requires a gradient: it must be None, or torch.no_grad() be on")
        merged, lse = _merge_by_torch(outs, lses)
        return (merged if out is None else out.copy_(merged)), lse
    found = _core.merge(
        [array_of("outs", x) for x in outs], [array_of("lses", x) for x in lses],
        None if out is None else array_of("out", out),
    )  # fmt: skip
    return (tensor_of(found[0]) if out is None else written(out)), tensor_of(found[1])


def _merge_by_torch(outs, lses):
    """The same where it is differentiated or compiled."""
    shapes, lengths = [tuple(x.shape) for x in outs], [tuple(x.shape) for x in lses]
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}: they must be as many, and at least one")
    if any(shape != shapes[0] for shape in shapes) or any(shape != shapes[0][:-1] for shape in lengths):
        raise ValueError(
            f"outs have shapes {shapes} and lses {lengths}: all outs must be alike, and lses the same without the last "
            "axis"
        )
    blind = torch.stack([lse == -torch.inf for lse in lses])
    sums = torch.stack(lses).masked_fill(blind, 0.0)  # so that no gradient meets inf - inf
    largest = sums.masked_fill(blind, -torch.inf).amax(0).detach()
    sees_none = largest == -torch.inf
    largest = largest.masked_fill(sees_none, 0.0)
    shares = torch.exp(sums - largest).masked_fill(blind, 0.0)
    total = shares.sum(0).masked_fill(sees_none, 1.0)
    parts = [
        torch.where(unseen[..., None], 0.0, (share / total)[..., None] * x)
        for unseen, share, x in zip(blind, shares, outs)
    ]
    lse = (largest + torch.log(total)).masked_fill(sees_none, -torch.inf)
    return sum(parts[1:], parts[0]).to(outs[0].dtype), lse


def rotary(
    x: Tensor, positions: Any, *, base: float = 10000.0, frequencies: Any = None, interleaved: bool = False,
    dim: int | None = None, cos: Any = None, sin: Any = None, out: Tensor | None = None, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """`sdpa.rotary` for tensors: the arguments have the same meaning, and arrays there are tensors here.

    The result has a gradient with respect to x.

    >>> import torch, sdpa.torch
    >>> sdpa.torch.rotary(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.tensor([0, torch.pi / 2])).round(decimals=3)
    tensor([[ 3.,  4.],
            [-4.,  3.]])
    """
    if not isinstance(x, Tensor):
        check_plain(x=x)
    if forward_mode():
        refuse_tangents(x=x, positions=positions, frequencies=frequencies, cos=cos, sin=sin)
    if isinstance(positions, (int, float)) and (x.requires_grad or watched()):
        positions = positions + torch.arange(x.shape[-2])  # turning back takes the position of each row
    positions, frequencies, cos, sin = (
        None if y is None else as_tensor(y) for y in (positions, frequencies, cos, sin)
    )  # fmt: skip
    for name, y in ("positions", positions), ("frequencies", frequencies), ("cos", cos), ("sin", sin):
        if y is not None and y.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient: only x has one")
    given = positions, base, frequencies, interleaved, dim, cos, sin, threads
    wanted = torch.is_grad_enabled() and x.requires_grad
    if out is None:
        return torch.ops.sdpa.rotary(x, *given) if wanted or watched() else tensor_of(_turn(x, *given))
    if wanted:
        raise ValueError("out is given and x requires a gradient: it must be None, or torch.no_grad() be on")
    if watched():
        return out.copy_(torch.ops.sdpa.rotary(x, *given))
    _turn(x, *given, out=array_of("out", out))
    return written(out)


def _turn(x, positions, base, frequencies, interleaved, dim, cos, sin, threads, out=None):
    named = {"positions": positions, "frequencies": frequencies, "cos": cos, "sin": sin}
    arrays = {name: None if y is None else array_of(name, y) for name, y in named.items()}
    if positions is not None and positions.ndim == 0:
        arrays["positions"] = positions.item()
    return rotary_of_arrays(
        array_of("x", x), base=base, interleaved=interleaved, dim=dim, out=out,
        threads=torch.get_num_threads() if threads is None else threads, **arrays,
    )  # fmt: skip


@torch.library.custom_op("sdpa::rotary", mutates_args=(), device_types="cpu")
def _operator(
    x: Tensor, positions: Tensor | None, base: float, frequencies: Tensor | None, interleaved: bool, dim: int | None,
    cos: Tensor | None, sin: Tensor | None, threads: int | None,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(x)
    _turn(x, positions, base, frequencies, interleaved, dim, cos, sin, threads, out=array_of("out", out))
    return out


@_operator.register_fake
def _shape(x, *others):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*(y if isinstance(y, Tensor) else None for y in inputs[1:]))
    ctx.others = [None if isinstance(y, Tensor) else y for y in inputs[1:]]


def _turn_back(ctx, grad):
    """Turn by the opposite angles."""
    positions, base, frequencies, interleaved, dim, cos, sin, threads = (
        other if kept is None else kept for other, kept in zip(ctx.others, ctx.saved_tensors)
    )
    if sin is None:
        positions = -positions
    else:
        sin = -sin
    back = torch.ops.sdpa.rotary(grad, positions, base, frequencies, interleaved, dim, cos, sin, threads)
    return back, *[None] * len(ctx.others)


_operator.register_autograd(_turn_back, setup_context=_keep)
_operator.register_vmap(_batched.one_after_another(torch.ops.sdpa.rotary))
