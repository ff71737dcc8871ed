"""The parts of a layer and their checks: weights, norms, and options of the rotary embedding."""

from functools import partial

import numpy as np

from .. import _core
from .._checks import epsilon, flag, sum_dtype
from .._runtime import kernels
from .rotary import turns_of

ROTARY = ("base", "interleaved", "dim", "frequencies")
NORM = ("query", "key", "eps", "center")
ROW_NORM = ("weight", "bias", "eps", "center")


def weight_array(name, given, shape, axes):
    """A read-only view of `given`; see `shaped`."""
    array = shaped(name, given, shape, axes).view()
    array.flags.writeable = False
    return array


def shaped(name, given, shape, axes):
    """`given` as an array, floats of `shape`, in which None is any size.  `axes` explains the shape."""
    array = _core.float_array(name, given, 0)
    if array.ndim != len(shape) or any(want is not None and n != want for n, want in zip(array.shape, shape)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape) + "," * (len(shape) == 1)
        raise ValueError(f"{name} has shape {array.shape}: it must be ({wanted}), {axes}")
    return array


def residual_or_none(given, shape, whose="the result"):
    """What is added, as an array of `shape`, or None."""
    if given is None:
        return None
    array = _core.float_array("residual", given, 0)
    if array.shape != shape:
        raise ValueError(f"residual has shape {array.shape}: it must be that of {whose}, {shape}")
    return array


def vector_or_none(name, given, size, axes):
    return None if given is None else weight_array(name, given, (size,), axes)


def input_weights(packed, separate, rows, widths):
    """The weights of queries, keys and values as (packed or None, [three]), from either of the two.

    rows : the number of rows of each weight.    widths : the sizes of what each weight is multiplied with.
    """
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    axes = ["(num_heads * head_dim, embed_dim)", "(kv_heads * head_dim, kdim)", "(kv_heads * value_dim, vdim)"]
    alike = len(set(widths)) == 1
    if packed is not None:
        given = [name for name, weight in zip(names, separate) if weight is not None]
        if given:
            raise ValueError(f"in_proj_weight and {given[0]} are given: it must be in_proj_weight or the other three")
        if not alike:
            raise ValueError(
                f"in_proj_weight is given and embed_dim, kdim and vdim are {', '.join(map(str, widths))}: "
                "they must be equal, or q_proj_weight, k_proj_weight and v_proj_weight be given"
            )
        what = "(num_heads * head_dim + kv_heads * (head_dim + value_dim), embed_dim)"
        packed = weight_array("in_proj_weight", packed, (sum(rows), widths[0]), what)
    else:
        missing = [name for name, weight in zip(names, separate) if weight is None]
        if missing:
            what = "in_proj_weight" if len(missing) == 3 else missing[0]
            raise ValueError(f"{what} is missing: it must be in_proj_weight or all of {', '.join(names)}")
        separate = [weight_array(*one) for one in zip(names, separate, zip(rows, widths), axes)]
        if not alike:
            return None, separate
        packed = joined(separate)
        packed.flags.writeable = False
    ends = np.cumsum(rows)
    return packed, np.split(packed, ends[:-1])


def joined(weights):
    """The weights on top of one another, in a dtype that holds the numbers of all of them."""
    if len({weight.dtype for weight in weights}) > 1:
        wide = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
        weights = [weight.astype(sum_dtype(wide)) for weight in weights]
    return np.concatenate(weights)


def extra_keys(layer):
    """The extra keys (G, 1 or 2, D) and values (G, 1 or 2, E), which every query sees, or None."""
    if (layer.bias_k is None) != (layer.bias_v is None):
        given, missing = ("bias_k", "bias_v") if layer.bias_v is None else ("bias_v", "bias_k")
        raise ValueError(f"{given} is given and {missing} is not: it must be both or none")
    shapes = [(layer.kv_heads, 1, size) for size in (layer.head_dim, layer.value_dim)]
    pairs = []
    if layer.bias_k is not None:
        pairs.append(
            [bias.astype(np.float64).reshape(shape) for bias, shape in zip((layer.bias_k, layer.bias_v), shapes)]
        )
    if layer.add_zero_attn:
        pairs.append([np.zeros(shape) for shape in shapes])
    return tuple(np.concatenate(parts, axis=1) for parts in zip(*pairs)) or None


class Norm:
    """Root mean square norm of queries and keys, for each head; with `center` the mean is subtracted first."""

    def __init__(self, given, head_dim):
        weights = {"query": None, "key": None}
        self.eps, self.center = 1e-6, False
        if isinstance(given, dict):
            _known("qk_norm", given, NORM)
            weights.update((name, given[name]) for name in weights if name in given)
            self.eps = epsilon("eps of qk_norm", given.get("eps", self.eps))
            self.center = flag("center of qk_norm", given.get("center", False))
        elif isinstance(given, (tuple, list)) and len(given) == 2:
            weights["query"], weights["key"] = given
        elif given is not True:
            raise TypeError(
                f"qk_norm is {given!r}: it must be True, a pair of weights for query and key, "
                f"a dict of {', '.join(NORM)}, or None"
            )
        self.query, self.key = (
            None if weight is None else weight_array(f"{name} of qk_norm", weight, (head_dim,), "(head_dim,)")
            for name, weight in weights.items()
        )

    def apply(self, query, key, threads):
        """Norm query and key (..., D) in place."""
        for heads, weight in ((query, self.query), (key, self.key)):
            _core.norm(heads, weight, None, self.eps, self.center, None, heads, None, kernels.default, threads)


def row_norm(name, given, size):
    """A function of rows (..., size) and threads that norms them; without a norm it returns them as they are."""
    if given is None:
        return _as_they_are
    if given is not True and not isinstance(given, dict):
        raise TypeError(f"{name} is {given!r}: it must be True, a dict of {', '.join(ROW_NORM)}, or None")
    options = {} if given is True else given
    _known(name, options, ROW_NORM)
    weight, bias = (
        None if options.get(part) is None else weight_array(f"{part} of {name}", options[part], (size,), f"({size},)")
        for part in ("weight", "bias")
    )
    eps = epsilon(f"eps of {name}", options.get("eps", 1e-6))
    return partial(_normed, weight, bias, eps, flag(f"center of {name}", options.get("center", False)))


def _normed(weight, bias, eps, center, rows, threads):
    return _core.norm(rows, weight, bias, eps, center, None, None, None, kernels.default, threads)


def _as_they_are(rows, threads):
    return rows


def turns(given, head_dim):
    """The arguments of `turn` in rotary.py for the arguments of `rotary` that `given` means, checked; or None."""
    if given is None:
        return None
    if given is True:
        options = {}
    elif isinstance(given, dict):
        _known("rotary", given, ROTARY)
        options = dict(given)
    elif isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool):
        options = {"base": given}
    else:
        raise TypeError(f"rotary is {given!r}: it must be True, a base, a dict of {', '.join(ROTARY)}, or None")
    if head_dim % 2 and options.get("dim") is None:
        raise ValueError(f"head_dim is {head_dim} and rotary {given!r}: head_dim must be even, or dim given in rotary")
    return turns_of(np.zeros((0, head_dim)), **options)


def _known(name, given, names):
    for key in given:
        if key not in names:
            raise TypeError(f"{name} has the key {key!r}: its keys must be among {', '.join(names)}")
