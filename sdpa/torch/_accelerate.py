"""Models for inference: their modules become this library's, in place."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from .._fields import documented
from ._modules import Accelerated, AcceleratedLinear, Nothing
from ._patterns import DTYPES, Unlike, activation_of, agrees, known, linear_of


@documented
class Report(NamedTuple):
    """What `accelerate` did.  `str(report)` is a readable text.

    Attributes
    ----------
    replaced : dict of str
        What the module of that name is now.
    kept : dict of str
        Why the module of that name stays, though one like it might be replaced.
    twice : tuple of str
        Modules whose weights other modules have, too, so that there is a second copy.
    bytes_before : int
        The memory that the weights took before.
    bytes_after : int
        The memory that the weights take now.
    """

    replaced: dict[str, str]
    kept: dict[str, str]
    twice: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self):
        counts = Counter(self.replaced.values())
        lines = [f"{count:5} {what}" for what, count in counts.most_common()]
        lines += [f"kept  {name}: {why}" for name, why in self.kept.items()]
        lines += [f"twice {name}: its weights belong to another module, too" for name in self.twice]
        lines.append(f"memory of weights: {self.bytes_before / 1e6:.1f} MB before, {self.bytes_after / 1e6:.1f} MB now")
        return "\n".join(lines)


@torch.inference_mode(False)  # in which parameters would be given memory that no gradient can use any more
def accelerate(model: nn.Module) -> Report:
    """Let this library compute the projections, feed-forward blocks, norms and attention of a model, in place, for
    inference in float32 and bfloat16.

    An nn.Linear also computes the activation that follows it in an nn.Sequential or in a layer of nn.Transformer.  The
    blocks of transformers are recognised by the names of their parts, and each block is compared with its replacement
    before it is replaced.  Their attention becomes that of sdpa.huggingface.  Weights change to the layout of the
    kernels, and the memory of the old layout is given up, unless another module, such as an embedding, has the same
    weights.  Modules that are not known stay as they are.

    The model must be in eval mode.  Asking for its gradients is an error.  Its state_dict remains the same; to load
    another one, `restore` the model first.  A copy of the model, by copy.deepcopy, pickle or torch.save, is an
    accelerated model of its own.

    >>> import torch, sdpa.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).eval()
    >>> print(sdpa.torch.accelerate(model))
        1 Linear with gelu
        1 activation, with the projection before it
        1 Linear
    memory of weights: 0.1 MB before, 0.1 MB now
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}: it must be a torch.nn.Module")
    if model.training:
        raise ValueError("model is in training mode: call model.eval() first")
    if type(model) in (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention):
        raise ValueError(
            f"model is a {type(model).__name__}: it must contain what is replaced, as nn.Sequential(model) does"
        )
    work = _Work(model)
    before = work.bytes()
    work.walk("", model)
    work.attend(model)
    return Report(work.replaced, work.kept, tuple(work.twice), before, work.bytes())


@torch.inference_mode(False)
def restore(model: nn.Module) -> nn.Module:
    """Put back the modules that `accelerate` replaced, with their weights, and return the model."""
    originals: dict[int, nn.Module] = {}
    parent: Any
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, Accelerated):
                if id(child) not in originals:
                    originals[id(child)] = child.original()
                parent._modules[name] = originals[id(child)]
        changed = parent.__dict__.pop(BEFORE, {})
        if ATTENTION in changed:
            parent.set_attn_implementation(changed.pop(ATTENTION))
        parent.__dict__.update(changed)
    return model


class _Work:
    def __init__(self, model) -> None:
        self.model = model
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.twice: list[str] = []
        self.owners = Counter(x.data_ptr() for _, x in model.named_parameters(remove_duplicate=False))
        self.places = Counter(id(m) for m in model.modules() for m in m._modules.values() if m is not None)
        self.done: dict[int, Accelerated] = {}

    def bytes(self) -> int:
        seen = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.tensors()}
        return sum(seen.values()) + sum(m.nbytes for m in self.model.modules() if isinstance(m, Accelerated))

    def tensors(self):
        yield from self.model.parameters()
        yield from self.model.buffers()

    def walk(self, path, module) -> None:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            self.fuse(path, module, list(module._modules.items()))
        if isinstance(module, nn.TransformerEncoder) and "use_nested_tensor" in module.__dict__:
            change(module, use_nested_tensor=False)  # for which it reads the weights of its layers
        if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            self.fuse_activation(path, module)
        for name, child in list(module._modules.items()):
            full = f"{path}.{name}" if path else name
            if child is None or isinstance(child, Accelerated):
                continue
            if id(child) in self.done:
                module._modules[name] = self.done[id(child)]
            elif not self.replace(full, module, name, child):
                self.walk(full, child)

    def replace(self, path, parent, name, child, **options) -> bool:
        """Whether the child was replaced."""
        try:
            made = self.made(path, child, **options)
        except Unlike as why:
            self.kept[path] = str(why)
            return False
        if made is None:
            return False
        self.done[id(child)] = parent._modules[name] = made
        self.replaced[path] = made.said
        return True

    def made(self, path, child, activation=None):
        found = known(child)
        if found is None:
            return None
        dtypes = {x.dtype for x in child.parameters()}
        if not dtypes:
            return None
        if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            raise Unlike(f"its dtype is {' and '.join(sorted(map(str, dtypes)))}")
        if any(not x.is_cpu or x.layout is not torch.strided for x in child.parameters()):
            raise Unlike("it is not on the CPU")
        if hooked(child):
            raise Unlike("it has hooks")
        like = next(child.parameters())
        if found.width is not None and not agrees(child, found.make(keep=True), like, found.width, found.inputs):
            raise Unlike(f"{type(child).__name__} gives something else than its parts say")
        keep = self.shared(found.parameters)
        if keep:
            self.twice.append(path)
        return found.make(keep=keep) if activation is None else AcceleratedLinear(
            child, child, activation=activation, keep=keep
        )  # fmt: skip

    def shared(self, parameters) -> bool:
        return any(self.owners[x.data_ptr()] > 1 for x in parameters if x.numel())

    def attend(self, model) -> None:
        """The attention of models of transformers, by sdpa.huggingface."""
        for path, module in model.named_modules():
            before = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if before not in TRANSFORMERS_OWN or not hasattr(module, "set_attn_implementation"):
                continue
            try:
                from ..huggingface import register

                register(NAME)
                module.set_attn_implementation(NAME)
            except (ImportError, ValueError) as why:
                self.kept[path or type(module).__name__] = f"its attention: {why}"
                continue
            module.__dict__.setdefault(BEFORE, _Before()).setdefault(ATTENTION, before)
            self.replaced[f"{path}.{ATTENTION}" if path else ATTENTION] = "attention, by sdpa.huggingface"

    def fuse(self, path, parent, children) -> None:
        """Let projections compute the activations that follow them."""
        for (name, child), (after, following) in itertools.pairwise(children):
            alone = self.places[id(child)] == 1
            activation = None
            if type(child) is nn.Linear and alone and not list(following.parameters()) and not hooked(following):
                activation = activation_of(following)
            full = f"{path}.{name}" if path else name
            if activation is not None and self.replace(full, parent, name, child, activation=activation):
                parent._modules[after] = Nothing(following)
                self.replaced[f"{path}.{after}" if path else after] = parent._modules[after].said

    def fuse_activation(self, path, layer) -> None:
        """The same in torch's layers, which hold it as an attribute: a function or a module."""
        activation = activation_of(layer.activation)
        full = f"{path}.linear1" if path else "linear1"
        if linear_of(layer.linear1) is None or activation is None:
            return
        if self.replace(full, layer, "linear1", layer.linear1, activation=activation):
            if "activation" in layer.__dict__:
                change(layer, activation=_as_it_is)
            else:
                layer._modules["activation"] = Nothing(layer.activation)


def hooked(module) -> bool:
    """Whether a call of the module does more than its class says."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or "forward" in m.__dict__
        for m in module.modules()
    )


class _Before(dict):
    """Attributes as they were before they changed.  One that is read from a file makes the attention known that the
    model of the file has now."""

    def __reduce__(self):
        return _known_before, (dict(self),)


def _known_before(attributes):
    if ATTENTION in attributes:
        from ..huggingface import register

        register(NAME)
    return _Before(attributes)


def change(module, **attributes) -> None:
    """Set these attributes until `restore`."""
    before = module.__dict__.setdefault(BEFORE, _Before())
    for name, value in attributes.items():
        before.setdefault(name, module.__dict__[name])
        module.__dict__[name] = value


BEFORE = "_sdpa_before"  # where changed attributes are kept
ATTENTION = "attn_implementation"
NAME = "cpu_attention"
TRANSFORMERS_OWN = ("sdpa", "eager")


def _as_it_is(x):
    return x
