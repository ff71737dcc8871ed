"""One adapter per implementation of attention that the benchmarks compare.

An adapter takes a workload and returns `(call, result)`: `call()` is what is timed, `result(call())` the
outcome as a NumPy array (B, H, M, D).  It brings the arrays into the layout its implementation likes best
beforehand, but not into a wider dtype.  Where the implementation cannot do the workload, or not without losing
precision, the adapter raises `Unsupported`, or lets what it raises itself pass.  Adding a peer is one function and one
line in PEERS.

Workloads of the kind "backward" have adapters of their own: `result(call())` is a tuple, the outcome and the gradients
of query, key and value.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.adapting import (
    THREADS,
    additive_mask,
    as_bits,
    boolean_mask,
    causal_or_mask,
    full_mask,
    require,
    require_scores_fit,
)
from benchmarks.oracle import arithmetic
from benchmarks.peers_layer import (
    jax_layer_peer,
    numpy_layer_peer,
    openvino_layer_peer,
    ort_attention_layer_peer,
    ort_mha_layer_peer,
    sdpa_layer_peer,
    torch_layer_peer,
    torch_mha_layer_peer,
)
from benchmarks.peers_onnxruntime import ort_attn_peer, ort_gqa_peer, ort_mha_peer
from benchmarks.reading import READ, read_peer


def sdpa_peer(workload):
    import sdpa

    arrays, options = workload.draw()
    return lambda: sdpa.attention(*arrays, **options), np.asarray


def sdpa_backward_peer(workload):
    import sdpa

    arrays, options = workload.draw()
    gradient = workload.draw_gradient()

    def call():
        out, lse = sdpa.attention(*arrays, **options, return_lse=True)
        return out, *sdpa.attention_backward(gradient, *arrays, out, lse, **options)[:3]

    return call, lambda outputs: outputs


def numpy_peer(workload):
    """Half types are widened for the products, in every call, and the result is rounded."""
    require_scores_fit(workload)
    arrays, options = workload.draw()
    B, H, M, N, D = workload.B, workload.H, workload.M, workload.N, workload.D
    wide = arithmetic(workload.dtype)
    mask = additive_mask(workload, options)

    def call():
        query, key, value = (array.astype(wide, copy=False) for array in arrays)
        folded = query.reshape(B, workload.G, -1, D) * wide(D**-0.5)
        scores = (folded @ key.swapaxes(-1, -2)).reshape(B, H, M, N)
        if mask is not None:
            scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(B, workload.G, -1, N) @ value
        return (out.reshape(B, H, M, D) / total).astype(workload.dtype, copy=False)

    return call, np.asarray


def torch_peer(workload):
    import torch

    torch.set_grad_enabled(False)
    arrays, options = workload.draw()
    return torch_call(workload, [*map(torch_tensor, arrays)], options), torch_result


def torch_call(workload, tensors, options):
    import torch

    torch.set_num_threads(THREADS)
    query, key, value = tensors
    causal, mask = causal_or_mask(workload, options, additive_mask)
    mask = None if mask is None else torch_tensor(mask)
    grouped = workload.H != workload.G

    def call():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    return call


def torch_backward_peer(workload):
    """Autograd."""
    import torch

    arrays, options = workload.draw()
    tensors = [torch_tensor(array).requires_grad_() for array in arrays]
    gradient = torch_tensor(workload.draw_gradient())
    forward = torch_call(workload, tensors, options)

    def call():
        with torch.enable_grad():
            out = forward()
            return out, *torch.autograd.grad(out, tensors, gradient)

    return call, lambda outputs: tuple(torch_result(tensor.detach()) for tensor in outputs)


def torch_tensor(array):
    """The array as a tensor on the same memory."""
    import torch

    if array.dtype.name == "bfloat16":  # which torch does not know from NumPy
        return torch.from_numpy(as_bits(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_result(tensor):
    """A NumPy array; one of bfloat16 becomes float32."""
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def torch_math_peer(workload):
    require_scores_fit(workload)
    return torch_math(*torch_peer(workload))


def torch_math_backward_peer(workload):
    require_scores_fit(workload)
    return torch_math(*torch_backward_peer(workload))


def torch_math(default, result):
    """The same without a fused kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call():
        with sdpa_kernel(SDPBackend.MATH):
            return default()

    return call, result


def openvino_peer(workload):
    arrays, options = workload.draw()
    return openvino_call(workload, arrays, options)


def ov_fold_peer(workload):
    """OpenVINO with the query heads of a group folded into rows: keys and values are not repeated."""
    require(workload.H > workload.G, "for grouped query heads only")
    require(not workload.causal and workload.window is None and not workload.hiding, "without masks only")
    (query, key, value), options = workload.draw()
    folded = query.reshape(workload.B, workload.G, -1, workload.D)
    call, result = openvino_call(workload, (folded, key, value), options)
    return call, lambda out: result(out).reshape(query.shape)


# dtype: (element type, inference precision).  With "f16" float16 would be computed in bfloat16 where the CPU has that.
OPENVINO_TYPES = {"float32": ("f32", "f32"), "bfloat16": ("bf16", "bf16"), "float16": ("f16", "f32")}


def openvino_call(workload, arrays, options):
    import openvino
    from openvino import opset13 as ops

    require(workload.dtype.name in OPENVINO_TYPES, f"only {', '.join(OPENVINO_TYPES)}")
    element, precision = OPENVINO_TYPES[workload.dtype.name]
    element = getattr(openvino.Type, element)
    causal, mask = causal_or_mask(workload, options, additive_mask)
    inputs = [*arrays] if mask is None else [*arrays, full_mask(mask, workload)]
    parameters = [ops.parameter(array.shape, element) for array in inputs]
    heads = arrays[0].shape[1]
    key, value = (openvino_repeat(parameter, heads) for parameter in parameters[1:3])
    node = ops.scaled_dot_product_attention(parameters[0], key, value, *parameters[3:], causal=causal)
    settings = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision}
    model = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", settings)
    request = model.create_infer_request()
    for index, array in enumerate(inputs):
        # Copied: a tensor that shares memory does not keep the array alive.
        tensor = openvino.Tensor(element, array.shape)
        as_bits(tensor.data)[...] = as_bits(array)
        request.set_input_tensor(index, tensor)
    # Views of a bfloat16 tensor come as float16.
    return lambda: request.infer(share_outputs=True), lambda _: request.get_output_tensor().data.view(workload.dtype)


def openvino_repeat(parameter, heads):
    """Keys or values of G heads repeated for all query heads, in the form the compiler knows how to fuse."""
    from openvino import opset13 as ops

    B, G, N, D = parameter.shape
    if heads == G:
        return parameter
    groups = ops.unsqueeze(parameter, np.int64(2))
    return ops.reshape(ops.broadcast(groups, np.array([B, G, heads // G, N, D])), np.array([B, heads, N, D]), False)


def ncnn_peer(workload):
    """ncnn's SDPA layer: (B * H, M, D).  It reads bfloat16, computes in float32 and gives that."""
    require(workload.dtype.name in ("float32", "bfloat16"), "float32 and bfloat16 only")
    import ncnn

    arrays, options = workload.draw()
    mask = additive_mask(workload, options)
    inputs = [array.reshape(-1, *array.shape[2:]) for array in arrays]
    if mask is not None:
        inputs.append(ncnn_mask(mask, workload))
    half = workload.dtype.itemsize == 2
    mats = [ncnn.Mat(as_bits(array) if half else array).clone() for array in inputs]
    net = ncnn_net(len(inputs), bfloat16=half)

    def call():
        with net.create_extractor() as extractor:
            for index, mat in enumerate(mats):
                extractor.input(f"in{index}", mat)
            return extractor.extract("out")[1]

    return call, lambda out: np.array(out).reshape(arrays[0].shape)


def ncnn_mask(mask, workload):
    """(M, N) if all heads have the same, else (B * H, M, N)."""
    if mask.shape[:2] == (1, 1):
        return mask[0, 0]
    every = np.broadcast_to(mask, (workload.B, workload.H, workload.M, workload.N))
    return every.reshape(-1, workload.M, workload.N)


def ncnn_net(inputs, bfloat16):
    """A network of the one layer, whose inputs are float32 or all bfloat16."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = THREADS
    for option in ("fp16_storage", "fp16_packed", "fp16_arithmetic"):
        setattr(net.opt, f"use_{option}", False)
    net.opt.use_bf16_storage = bfloat16
    names = [f"in{index}" for index in range(inputs)]
    lines = [f"Input {name} 0 1 {name}" for name in names]
    lines.append(f"SDPA attention {inputs} 1 {' '.join(names)} out 5={int(inputs == 4)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.param"
        path.write_text("\n".join(["7767517", f"{len(lines)} {inputs + 1}", *lines, ""]))
        net.load_param(str(path))
    return net


def jax_peer(workload):
    """jax.nn.dot_product_attention: (B, M, H, D)."""
    require_scores_fit(workload)
    import jax

    jax.config.update("jax_enable_x64", workload.dtype == np.float64)
    arrays, options = workload.draw()
    fixed, mask = {}, None
    if workload.window:
        fixed["local_window_size"] = (workload.window - 1, 0)
    else:
        fixed["is_causal"], mask = causal_or_mask(workload, options, boolean_mask)
    inputs = [jax.device_put(np.ascontiguousarray(array.swapaxes(1, 2))) for array in arrays]
    extra = {"mask": mask, "bias": options.get("bias")}
    extra = {name: jax.device_put(array) for name, array in extra.items() if array is not None}
    compiled = jax.jit(lambda arrays, extra: jax.nn.dot_product_attention(*arrays, **extra, **fixed))
    return lambda: compiled(inputs, extra).block_until_ready(), lambda out: np.asarray(out).swapaxes(1, 2)


class Peer(NamedTuple):
    adapter: Callable
    distribution: str  # what to install from PyPI
    backward: Callable | None = None  # the adapters for workloads of these kinds
    layer: Callable | None = None


def adapter_of(peer, workload):
    """The one for workloads of this kind."""
    adapter = {"forward": peer.adapter, "backward": peer.backward, "layer": peer.layer}[workload.kind]
    require(adapter is not None, f"no {workload.kind}")
    return adapter


def no_adapter(workload):
    require(False, f"no {workload.kind} alone")


PEERS = {
    "numpy": Peer(numpy_peer, "numpy", layer=numpy_layer_peer),
    "torch": Peer(torch_peer, "torch", torch_backward_peer, torch_layer_peer),
    "torch_math": Peer(torch_math_peer, "torch", torch_math_backward_peer),
    "torch_mha": Peer(no_adapter, "torch", layer=torch_mha_layer_peer),
    "ort_attn": Peer(ort_attn_peer, "onnxruntime", layer=ort_attention_layer_peer),
    "ort_mha": Peer(ort_mha_peer, "onnxruntime", layer=ort_mha_layer_peer),
    "ort_gqa": Peer(ort_gqa_peer, "onnxruntime"),
    "openvino": Peer(openvino_peer, "openvino", layer=openvino_layer_peer),
    "ov_fold": Peer(ov_fold_peer, "openvino"),
    "ncnn": Peer(ncnn_peer, "ncnn"),
    "jax": Peer(jax_peer, "jax", layer=jax_layer_peer),
}
IMPLEMENTATIONS = {
    "sdpa": Peer(sdpa_peer, "sdpa", sdpa_backward_peer, sdpa_layer_peer),
    READ: Peer(read_peer, "sdpa"),
    **PEERS,
}
