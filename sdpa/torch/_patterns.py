"""Which modules of a model are known, and what they become.

A module is recognised by the names of its parts, which families of models share.  Its replacement is then compared with
it on random numbers: if the results differ, the module stays as it is, whatever its parts are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ._modules import (
    Accelerated,
    AcceleratedFeedForward,
    AcceleratedLinear,
    AcceleratedMultiheadAttention,
    AcceleratedNorm,
    AcceleratedOutput,
)

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
}  # fmt: skip
# The names of up, down and, if there is one, the gate.
FEED_FORWARDS = (
    ("up_proj", "down_proj", "gate_proj"),  # Llama and what descends from it
    ("wi_1", "wo", "wi_0"),  # T5 1.1
    ("gate_up_proj", "down_proj", "gate_up_proj"),  # Phi 3: gate and up in one
    ("fc1", "fc2", None),  # ViT, CLIP, BART
    ("c_fc", "c_proj", None),  # GPT-2, with Conv1D
    ("up_proj", "down_proj", None),
    ("dense_h_to_4h", "dense_4h_to_h", None),  # GPT-NeoX, Falcon
    ("wi", "wo", None),  # T5
    ("lin1", "lin2", None),  # DistilBERT
)
ACTIVATED = ("act_fn", "activation_fn", "activation", "act", "intermediate_act_fn", "transform_act_fn")
EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")


class Unlike(Exception):
    """The reason why a module that looks like a known one stays as it is."""


class Known(NamedTuple):
    """What a module may become, and the parameters whose memory that takes over."""

    make: Callable[..., Accelerated]  # of keep=, whether the parameters must stay as they are
    parameters: list[nn.Parameter]
    width: int | None = None  # of the inputs with which it is compared; None: it is not
    inputs: int = 1


def activation_of(function) -> str | None:
    """What the library calls an activation, by what it does."""
    if function is None:
        return None
    x = torch.cat([torch.linspace(-7, 7, 141), torch.tensor([-1e4, -50.0, 50.0, 1e4])])  # some are clipped far out
    try:
        y = function(x)
    except Exception:
        return None
    for name, ours in ACTIVATIONS.items():
        if isinstance(y, torch.Tensor) and y.shape == x.shape and (y - ours(x)).abs().max() < 1e-6:
            return name
    return None


def linear_of(module) -> tuple[Any, Any, bool] | None:
    """Weight, bias, and whether the weight is (ins, outs)."""
    if type(module) is nn.Linear:
        return module.weight, module.bias, False
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return module.weight, module.bias, True
    return None


def known(module: nn.Module) -> Known | None:
    """What the module may become; None if no known module is like it."""
    for recognise in (_linear, _norm, _feed_forward, _output, _activated, _multihead):
        found = recognise(module)
        if found is not None:
            return found
    return None


def _linear(module):
    found = linear_of(module)
    if found is None:
        return None
    return Known(lambda **keep: AcceleratedLinear(module, module, transposed=found[2], **keep), [found[0]])


def _norm(module):
    if type(module) is nn.LayerNorm:
        if len(module.normalized_shape) != 1:
            raise Unlike(f"its rows have {len(module.normalized_shape)} axes")
        return Known(lambda **_: AcceleratedNorm(module, module.weight, module.bias, module.eps, centred=True), [])
    if "Norm" not in type(module).__name__ or list(module.children()):
        return None
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    eps = next((getattr(module, name) for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if type(module) is nn.RMSNorm and eps is None and weight is not None:
        eps = torch.finfo(torch.float32).eps  # of the sums
    if weight is None or weight.ndim != 1 or parameters or eps is None:
        return None

    def make(**_):
        for offset in 0.0, 1.0:  # Gemma's weights are what is added to 1
            made = AcceleratedNorm(module, weight, None, eps, centred=False, offset=offset)
            if agrees(module, made, weight, len(weight), 1, size=0.01):
                return made
        raise Unlike("it gives something else than rms_norm")

    return Known(make, [])


class Parts(NamedTuple):
    """(weight, bias) of each projection, as torch has them; and the parameters in which the weights of up, down and the
    gate are, and whether these are transposed there.  Gate and up may be in one, that of up."""

    up: tuple[Any, Any]
    gate: tuple[Any, Any] | None
    down: tuple[Any, Any]
    parameters: list[tuple[nn.Parameter, bool]]


def _feed_forward(module):
    for up, down, gate in FEED_FORWARDS:
        linears = [linear_of(getattr(module, name, None)) for name in (up, down, gate) if name]
        if linears and all(linears):
            break
    else:
        return None
    if sum(linear_of(x) is not None for x in module.children()) > len({up, down, gate} - {None}):
        return None
    activation = _activation(module)
    parts = _parts(*linears, fused=up == gate)
    ins = parts.up[0].shape[1]
    return Known(
        lambda **keep: AcceleratedFeedForward(module, parts, activation=activation, **keep),
        list({id(linear[0]): linear[0] for linear in linears}.values()), ins,
    )  # fmt: skip


def _parts(up, down, gate=None, *, fused=False):
    def turned(linear):
        weight, bias, transposed = linear
        return weight.data.T if transposed else weight.data, None if bias is None else bias.data

    if fused:
        weight, bias = turned(up)
        (gate_weight, up_weight), biases = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
        up_parts, gate_parts, gate = (up_weight, biases[1]), (gate_weight, biases[0]), None
    else:
        up_parts, gate_parts = turned(up), None if gate is None else turned(gate)
    parameters = [(linear[0], linear[2]) for linear in (up, down, gate) if linear is not None]
    return Parts(up_parts, gate_parts, turned(down), parameters)


def _activation(module):
    given = next((getattr(module, name) for name in ACTIVATED if hasattr(module, name)), None)
    activation = activation_of(given)
    if activation is None:
        raise Unlike("its activation is none that is known")
    return activation


def _output(module):
    """BERT's: dense and LayerNorm, called with what is projected and with what is added."""
    linear, norm = linear_of(getattr(module, "dense", None)), getattr(module, "LayerNorm", None)
    if linear is None or type(norm) is not nn.LayerNorm:
        return None
    return Known(
        lambda **keep: AcceleratedOutput(module, module.dense, norm, **keep), [linear[0]], linear[0].shape[1], 2
    )  # fmt: skip


def _activated(module):
    """A projection and its activation in a module of their own, as BERT's intermediate."""
    children = [x for x in module.children() if linear_of(x) is not None]
    if len(children) != 1 or type(getattr(module, "dense", None)) is not nn.Linear:
        return None
    if not any(hasattr(module, name) for name in ("intermediate_act_fn",)):
        return None
    activation, linear = _activation(module), module.dense
    return Known(
        lambda **keep: AcceleratedLinear(module, linear, activation=activation, **keep), [linear.weight],
        linear.in_features,
    )  # fmt: skip


def _multihead(module):
    if type(module) is not nn.MultiheadAttention:
        return None
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        raise Unlike("its keys or values have sizes of their own, or there are keys beside them")
    return Known(
        lambda **keep: AcceleratedMultiheadAttention(module, **keep), [module.in_proj_weight, module.out_proj.weight]
    )  # fmt: skip


def agrees(module, made, like, width, inputs, size=1.0) -> bool:
    """Whether both modules give the same results on random numbers, but for rounding.  Small numbers show the eps of
    norms."""
    generator = torch.Generator().manual_seed(0)
    widths = [width] if inputs == 1 else [width, made.dense.out_features]
    given = [(torch.randn(1, 3, width, generator=generator) * size).to(like.dtype) for width in widths]
    takes = inspect.signature(module.forward).parameters.values()
    if len(takes) != inputs or any(x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in takes):
        return False
    try:
        with torch.no_grad():
            expected, got = module(*given), made(*given)
    except Exception:
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != got.shape or expected.dtype is not got.dtype:
        return False
    bound = (3e-2 if like.dtype is torch.bfloat16 else 1e-4) * expected.float().abs().max()
    return bool((got.float() - expected.float()).abs().max() <= bound)
