"""What stands in an accelerated model in place of torch's modules.

Each holds the module that was there, whose large weights are given up once the kernels have them in their layout, and
are read back from there by `original`.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._attention.forward import attention_weights
from .._layer.linear import FeedForward, Linear
from .._layer.norm import layer_norm, rms_norm
from ._attention import attention
from ._tensors import array_of, check_plain, tensor_of, without_tensors
from ._watched import autocast, without_gradients

REFUSED = "the gradient of an accelerated model was asked for: sdpa.torch.restore(model) comes first"


class Accelerated(nn.Module):
    """`module`, and what computes it: `compute` of arrays, which gives an array."""

    module: nn.Module
    given_up: tuple[nn.Parameter, ...] = ()  # those without memory
    dtype: torch.dtype | None = None  # of inputs; None: any

    def __init__(self, module: nn.Module, said: str) -> None:
        super().__init__()
        object.__setattr__(self, "module", module)  # which is no child: its parameters are not those of the model
        self.said = said
        self.training = module.training

    @torch.compiler.disable
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        if named:
            inputs = inspect.signature(self.module.forward).bind(*inputs, **named).args
        if self.training:
            raise RuntimeError("the model is in training mode and accelerated for inference: call model.eval() first")
        given = inputs
        if self.dtype is not None:
            if torch.is_autocast_enabled("cpu"):
                given = autocast(*inputs)
            else:
                self.check_dtype(*inputs)
        out = tensor_of(self.compute(*(array_of("input", x) for x in given)))
        return self.without_gradients(out, *inputs)

    def check_dtype(self, *inputs):
        for x in inputs:
            if not isinstance(x, Tensor):
                check_plain(input=x)
            if x.dtype is not self.dtype:
                raise RuntimeError(f"the input has dtype {x.dtype} and the accelerated weights {self.dtype}")

    def without_gradients(self, out, *inputs):
        if not torch.is_grad_enabled():
            return out
        # Others stand for the parameters given up, which the graph would take to be empty after `restore`, too.
        stands_for = lambda x: x if x.numel() else torch.empty(0, requires_grad=x.requires_grad)  # noqa: E731
        return without_gradients(REFUSED, out, *inputs, *map(stands_for, self.module.parameters()))

    def compute(self, *arrays):
        raise NotImplementedError

    def give_up(self, *parameters: nn.Parameter) -> None:
        """Free the memory of the weights that the kernels have."""
        self.given_up = parameters
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)

    def read_back(self) -> list[Any]:
        """The numbers of the parameters that were given up, read back from the layout of the kernels."""
        return []

    def given_back(self) -> dict[nn.Parameter, Tensor]:
        return {x: tensor_of(np.ascontiguousarray(read)) for x, read in zip(self.given_up, self.read_back())}

    def original(self) -> nn.Module:
        """The module that was there, with its weights."""
        for parameter, read in self.given_back().items():
            parameter.data = read
        self.given_up = ()
        module: nn.Module = self.module  # type: ignore[assignment]
        return module.train(self.training)

    @property
    def nbytes(self) -> int:
        """The bytes of the weights in the layout of the kernels."""
        return 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """As the module that was there would."""
        read = self.given_back()
        for name, x in self.module.state_dict(keep_vars=True).items():
            destination[prefix + name] = read[x] if x in read else x if keep_vars else x.detach()

    def _load_from_state_dict(self, *args, **options):
        raise RuntimeError("weights are loaded into an accelerated model: sdpa.torch.restore(model) comes first")

    def extra_repr(self) -> str:
        return self.said


def threads() -> int:
    return torch.get_num_threads()


def check_shape(name, mask, *shapes):
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: it must be {' or '.join(map(str, shapes))}")


def arrays_of(*parameters) -> list[Any]:
    return [None if x is None else array_of("weight", x.detach()) for x in parameters]


class AcceleratedLinear(Accelerated):
    """A projection, of nn.Linear or of transformers' Conv1D, with the activation that follows it, if there is one."""

    def __init__(self, module, linear, *, activation=None, transposed=False, keep=False) -> None:
        super().__init__(module, "Linear" if activation is None else f"Linear with {activation}")
        self.dtype = linear.weight.dtype
        weight, bias = arrays_of(linear.weight, linear.bias)
        self.linear = Linear(weight.T if transposed else weight, bias, activation=activation)
        self.in_features, self.out_features = self.linear.ins, self.linear.outs
        self.linear((weight.T if transposed else weight)[:0])  # lays the weights out
        self.transposed = transposed
        if not keep:
            self.give_up(linear.weight)

    def read_back(self):
        return [self.linear.weight.T if self.transposed else self.linear.weight]

    def compute(self, x, residual=None):
        return self.linear(x, residual=residual, threads=threads())

    @property
    def weight(self) -> Tensor:
        """A copy."""
        return tensor_of(self.linear.weight)

    @property
    def bias(self) -> Tensor | None:
        return None if self.linear.bias is None else tensor_of(self.linear.bias)

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes


class AcceleratedFeedForward(Accelerated):
    """Two projections with an activation between them, and perhaps a gate."""

    def __init__(self, module, parts, *, activation, keep=False) -> None:
        super().__init__(module, f"FeedForward with {activation}{' and a gate' if parts.gate is not None else ''}")
        self.dtype = parts.up[0].dtype
        up_weight, up_bias = arrays_of(*parts.up)
        down_weight, down_bias = arrays_of(*parts.down)
        gate_weight, gate_bias = arrays_of(*(parts.gate or (None, None)))
        self.feed_forward = FeedForward(
            up_weight, down_weight, gate_weight=gate_weight, up_bias=up_bias, gate_bias=gate_bias,
            down_bias=down_bias, activation=activation,
        )  # fmt: skip
        self.feed_forward(up_weight[:0])
        parameters, self.transposed = zip(*parts.parameters)
        if not keep:
            self.give_up(*parameters)

    def read_back(self):
        up, *gate = self.feed_forward._up._sources()
        if gate and len(self.transposed) == 2:  # the gate comes first
            up, gate = np.concatenate([*gate, up]), []
        found = [up, self.feed_forward._down.weight, *gate]
        return [x.T if transposed else x for x, transposed in zip(found, self.transposed)]

    def compute(self, x):
        return self.feed_forward(x, threads=threads())

    @property
    def nbytes(self) -> int:
        return self.feed_forward.nbytes


class AcceleratedNorm(Accelerated):
    """A norm of rows, whose weights stay those of the module; `offset` is added to them."""

    def __init__(self, module, weight, bias, eps, *, centred, offset=0.0) -> None:
        super().__init__(module, "layer_norm" if centred else "rms_norm")
        self.weight, self.bias = weight, bias
        self.eps, self.centred, self.offset = eps, centred, offset

    def compute(self, x):
        weight, bias = arrays_of(self.weight, self.bias)
        if self.offset:
            (weight,) = arrays_of(self.weight.float() + self.offset)
        if self.centred:
            return layer_norm(x, weight, bias, eps=self.eps, threads=threads())
        return rms_norm(x, weight, eps=self.eps, threads=threads())

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args, **options):
        nn.Module._load_from_state_dict(self, *args, **options)


class AcceleratedOutput(Accelerated):
    """norm(projection(x) + residual), as after each part of BERT's layers."""

    def __init__(self, module, linear, norm, *, keep=False) -> None:
        super().__init__(module, "Linear, residual and layer_norm")
        self.dtype = linear.weight.dtype
        self.dense = AcceleratedLinear(linear, linear, keep=keep)
        self.LayerNorm = AcceleratedNorm(norm, norm.weight, norm.bias, norm.eps, centred=True)

    def forward(self, *inputs, **named):
        if torch.is_autocast_enabled("cpu"):  # under which the residual keeps its dtype
            x, residual = inspect.signature(self.module.forward).bind(*inputs, **named).args
            return self.LayerNorm(self.dense(x) + residual)
        return super().forward(*inputs, **named)

    def compute(self, x, residual):
        total = self.dense.compute(x, residual)
        weight, bias = arrays_of(self.LayerNorm.weight, self.LayerNorm.bias)
        return layer_norm(total, weight, bias, eps=self.LayerNorm.eps, out=total, threads=threads())

    def original(self) -> nn.Module:
        self.dense.original()
        return super().original()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        pass  # its parts do


class Nothing(Accelerated):
    """In place of an activation that the projection before it computes."""

    def __init__(self, module) -> None:
        super().__init__(module, "activation, with the projection before it")

    def forward(self, x):
        return x


class AcceleratedMultiheadAttention(Accelerated):
    """nn.MultiheadAttention: projections and attention, and the weights where they are asked for."""

    in_proj_bias = None  # so that no layer takes its weights for torch's fast path
    _qkv_same_embed_dim = True

    def __init__(self, module, *, keep=False) -> None:
        super().__init__(module, "MultiheadAttention")
        self.dtype = module.in_proj_weight.dtype
        self.num_heads, self.batch_first, self.embed_dim = module.num_heads, module.batch_first, module.embed_dim
        weight, bias, out_weight, out_bias = arrays_of(
            module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias
        )
        self.together = Linear(weight, bias)  # self-attention: one projection
        self.out = Linear(out_weight, out_bias)
        for linear in self.together, self.out:
            linear(weight[:0])
        self.apart: list[Linear] | None = None  # cross-attention, once there is such a call
        if not keep:
            self.give_up(module.in_proj_weight, module.out_proj.weight)

    def read_back(self):
        return [self.together.weight, self.out.weight]

    @property
    def nbytes(self) -> int:
        return self.together.nbytes + self.out.nbytes + sum(linear.nbytes for linear in self.apart or ())

    @torch.compiler.disable
    def forward(
        self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
        is_causal=False,
    ):  # fmt: skip
        if self.training:
            raise RuntimeError("the model is in training mode and accelerated for inference: call model.eval() first")
        inputs, same = (query, key, value), query is key is value
        if torch.is_autocast_enabled("cpu"):
            query, key, value = autocast(*inputs)
        else:
            self.check_dtype(*inputs)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is True and attn_mask is None: it says of a mask that this is causal")
        batched = query.ndim == 3
        rows = [x if batched else x[None] for x in (query, key, value)]
        if batched and not self.batch_first:
            rows = [x.transpose(0, 1) for x in rows]
        with torch.no_grad():
            heads = self.heads(rows, same)
            options = self.masks(attn_mask, key_padding_mask, *(x.shape[:2] for x in rows[:2]))
            joined = attention(*heads, **options).transpose(1, 2).flatten(2)
            out = tensor_of(self.out(array_of("query", joined), threads=threads()))
            weights = self.weights_of(heads, options, average_attn_weights) if need_weights else None
        if not batched:
            out, weights = out[0], None if weights is None else weights[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return self.without_gradients(out, *inputs), weights

    def heads(self, rows, same):
        """(B, H, S, D) of query, key and value."""
        if same:
            found = tensor_of(self.together(array_of("query", rows[0]), threads=threads())).chunk(3, -1)
        else:
            if self.apart is None:
                weights, biases = self.together.weight, self.together.bias
                size = self.embed_dim
                parts = [slice(i * size, (i + 1) * size) for i in range(3)]
                self.apart = [Linear(weights[s], None if biases is None else biases[s]) for s in parts]
            found = [tensor_of(linear(array_of("query", x), threads=threads())) for linear, x in zip(self.apart, rows)]
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in found]

    def masks(self, attn_mask, key_padding_mask, rows, keys):
        """As options of `attention`.  What is True in torch's masks is hidden; floats are added."""
        (batch, queries), found = rows, []
        if attn_mask is not None:
            shapes = (queries, keys[1]), (batch * self.num_heads, queries, keys[1])
            check_shape("attn_mask", attn_mask, *shapes)
            found.append(attn_mask.unflatten(0, (batch, -1)) if attn_mask.ndim == 3 else attn_mask)
        if key_padding_mask is not None:
            check_shape("key_padding_mask", key_padding_mask, tuple(keys), *([tuple(keys[1:])] if batch == 1 else []))
            found.append(key_padding_mask.reshape(batch, 1, 1, -1))
        hidden = [x for x in found if x.dtype is torch.bool]
        added = [x for x in found if x.dtype is not torch.bool]
        options = {}
        if hidden:
            options["mask"] = ~(hidden[0] | hidden[-1])
        if added:
            options["bias"] = added[0] if len(added) == 1 else added[0] + added[1]
        return options

    def weights_of(self, heads, options, average):
        query, key = (array_of("query", x) for x in heads[:2])
        weights = tensor_of(attention_weights(query, key, **without_tensors(options), threads=threads()))
        return weights.mean(1) if average else weights
