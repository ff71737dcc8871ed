"""From the weights of other libraries' layers to the arguments of `MultiHeadAttention`.

None of these libraries is imported.  Their objects are recognised by their attributes.
"""

from collections.abc import Mapping

import numpy as np

from .._checks import float_array

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
TORCH = ("in_proj_weight", *SEPARATE, "in_proj_bias", "out_proj.weight", "out_proj.bias", "bias_k", "bias_v")
PARTS = ("query", "key", "value")


def of_torch(module, num_heads, prefix, batch_first, add_zero_attn):
    """torch.nn.MultiheadAttention: all weights are (out, in), and heads follow one another in `out`."""
    if isinstance(module, Mapping):
        given = module
    elif hasattr(module, "state_dict"):
        given = module.state_dict()
        if not prefix:  # with a prefix it is a model, whose attributes are not those of the layer
            own = getattr(module, "num_heads", None)
            if num_heads is not None and own is not None and num_heads != own:
                raise ValueError(f"num_heads is {num_heads} and that of module {own}: it must be the same, or None")
            num_heads = own if num_heads is None else num_heads
            batch_first = getattr(module, "batch_first", None) if batch_first is None else batch_first
            add_zero_attn = getattr(module, "add_zero_attn", None) if add_zero_attn is None else add_zero_attn
    else:
        raise TypeError(f"module is of type {type(module).__name__}: it must be a module or a state dict")
    if num_heads is None:
        raise ValueError("num_heads is None: with a state dict it must be given")
    _check_prefix(prefix)
    names = {str(name).removeprefix(prefix): name for name in given if str(name).startswith(prefix)}
    needed = ["out_proj.weight", *(SEPARATE if any(name in names for name in SEPARATE) else ["in_proj_weight"])]
    _check_names("module", names, needed, TORCH, prefix)
    arrays = {name: as_array(full, given[full]) for name, full in names.items()}
    weight = _axes(names["out_proj.weight"], arrays.pop("out_proj.weight"), 2)
    options = dict(out_proj_weight=weight, out_proj_bias=arrays.pop("out_proj.bias", None), num_heads=num_heads)
    options["embed_dim"] = weight.shape[0]
    for name in ("bias_k", "bias_v"):  # (1, 1, embed_dim)
        if name in arrays:
            options[name] = arrays.pop(name).reshape(-1)
    for width, name in (("kdim", "k_proj_weight"), ("vdim", "v_proj_weight")):
        if name in arrays:
            options[width] = _axes(prefix + name, arrays[name], 2).shape[1]
    for name, given in ("batch_first", batch_first), ("add_zero_attn", add_zero_attn):
        if given is not None:
            options[name] = given
    return options | arrays


def of_keras(layer, prefix):
    """keras.layers.MultiHeadAttention and GroupQueryAttention: see `of_kernels`."""
    _check_prefix(prefix)
    window = getattr(layer, "sliding_window", getattr(layer, "_sliding_window", None))
    if window is not None:
        raise ValueError(
            f"layer has a sliding_window of {window}: it must be None; take layer.get_weights() instead, and give "
            f"window=({window - 1}, {window - 1}) in calls"
        )
    given = layer.get_weights() if hasattr(layer, "get_weights") else layer
    names = (*PARTS, "attention_output")
    if isinstance(given, Mapping):
        found = leaves(given).items()
        arrays = {name.removeprefix(prefix).partition(":")[0]: x for name, x in found if name.startswith(prefix)}
        every = [f"{part}/{what}" for part in names for what in ("kernel", "bias")]
        _check_names("layer", arrays, every[::2], every, prefix)
    elif isinstance(given, (list, tuple)):
        if len(given) not in (4, 8):
            raise ValueError(f"layer has {len(given)} weights: there must be 4 kernels, or each with its bias, 8")
        whats = ("kernel", "bias") if len(given) == 8 else ("kernel",)
        every = [f"{part}/{what}" for part in names for what in whats]
        arrays = {name: as_array(name, array) for name, array in zip(every, given)}
    else:
        raise TypeError(
            f"layer is of type {type(layer).__name__}: it must be a layer, a list of its weights, or a dict of them"
        )
    return of_kernels(arrays, names[3])


def of_flax(params):
    """flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention: see `of_kernels`."""
    if hasattr(params, "items") and set(params) == {"params"}:
        params = params["params"]
    if not hasattr(params, "items"):
        raise TypeError(f"params are of type {type(params).__name__}: they must be a dict")
    arrays = leaves(params)
    every = [f"{part}/{what}" for part in (*PARTS, "out") for what in ("kernel", "bias")]
    norms = ["query_ln/scale", "key_ln/scale"]
    present = [name for name in norms if name in arrays]
    _check_names("params", arrays, every[::2] + (norms if present else []), every + norms)
    options = of_kernels(arrays, "out")
    if present:  # the epsilon is that of flax.linen.LayerNorm and nnx.LayerNorm
        query, key = (arrays[name] for name in norms)
        options["qk_norm"] = dict(query=query, key=key, eps=1e-6, center=True)
    return options


def of_kernels(arrays, out):
    """The arguments from kernels, which have the input axis first and an axis of heads (d is the size of x):

        query/kernel (d, H, D)    key/kernel (kdim, G, D)    value/kernel (vdim, G, E)    out/kernel (H, E, out_dim)
        query/bias   (H, D)       key/bias   (G, D)          value/bias   (G, E)          out/bias   (out_dim)

    for  query = einsum("bmd,dhe->bmhe", x, kernel) + bias  and  result = einsum("bmhe,heo->bmo", heads, kernel) + bias.
    """
    kernels = [_axes(f"{part}/kernel", arrays[f"{part}/kernel"], 3) for part in (*PARTS, out)]
    (embed_dim, num_heads, head_dim), (kdim, kv_heads, _), (vdim, _, value_dim), _ = (k.shape for k in kernels)
    expected = {
        "key/kernel": (kernels[1], (kdim, kv_heads, head_dim)),
        "value/kernel": (kernels[2], (vdim, kv_heads, value_dim)),
        f"{out}/kernel": (kernels[3], (num_heads, value_dim, kernels[3].shape[2])),
    }
    for name, (kernel, shape) in expected.items():
        if kernel.shape != shape:
            raise ValueError(f"{name} has shape {kernel.shape}: for the other kernels it must be {shape}")
    weights = [kernel.reshape(len(kernel), kernel.shape[1] * kernel.shape[2]).T for kernel in kernels[:3]]
    heads_out = kernels[3].reshape(num_heads * value_dim, kernels[3].shape[2])
    options = dict(zip(SEPARATE, weights)) | dict(
        embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        kdim=kdim, vdim=vdim, out_proj_weight=heads_out.T,
        out_proj_bias=arrays.get(f"{out}/bias"),
    )  # fmt: skip
    biases = {part: arrays.get(f"{part}/bias") for part in PARTS}
    if any(bias is not None for bias in biases.values()):
        for (part, bias), kernel in zip(biases.items(), kernels):
            if bias is None:
                biases[part] = np.zeros(kernel.shape[1:], kernel.dtype)
            elif bias.shape != kernel.shape[1:]:
                raise ValueError(f"{part}/bias has shape {bias.shape}: it must be {kernel.shape[1:]}")
        options["in_proj_bias"] = np.concatenate([bias.reshape(-1) for bias in biases.values()])
    return options


def leaves(tree, path=""):
    """The arrays of nested dicts, by paths such as "query/kernel".  None is no array."""
    found = {}
    for key, branch in tree.items():
        here = f"{path}/{key}" if path else str(key)
        if hasattr(branch, "items"):
            found |= leaves(branch, here)
        elif branch is not None:
            found[here] = as_array(here, branch)
    return found


def as_array(name, given):
    """The NumPy array of a tensor, a variable, or anything else that NumPy converts."""
    if not isinstance(given, np.ndarray) and callable(getattr(given, "get_value", None)):
        given = given.get_value()  # of flax.nnx
    if not isinstance(given, np.ndarray) and hasattr(given, "value"):
        given = given.value() if callable(given.value) else given.value  # of TensorFlow; of flax and Keras
    for method in ("detach", "cpu"):  # of torch, which Keras may run on
        if not isinstance(given, np.ndarray) and callable(getattr(given, method, None)):
            given = getattr(given, method)()
    if str(getattr(given, "dtype", "")) == "torch.bfloat16":  # torch does not convert it to NumPy
        return _bfloat16_if_there(given.float().numpy())
    if not isinstance(given, np.ndarray) and callable(getattr(given, "numpy", None)):
        given = given.numpy()
    return float_array(name, given, fewest_axes=0)


def _bfloat16_if_there(array):
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return array  # the same numbers, in float32
    return array.astype(bfloat16)


def _check_prefix(prefix):
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}: it must be text")


def _axes(name, array, count):
    if array.ndim != count:
        raise ValueError(f"{name} has shape {array.shape}: it must have {count} axes")
    return array


def _check_names(what, names, needed, known, prefix=""):
    """Raises if a needed name is missing, or if there is an unknown one."""
    after = f" after {prefix!r}" if prefix else ""
    missing = [name for name in needed if name not in names]
    unknown = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}{after}: there are {', '.join(names) or 'none'}")
    if unknown:
        raise ValueError(f"{what} has {', '.join(unknown)}{after}: there must be none but {', '.join(known)}")
