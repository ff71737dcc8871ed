"""One adapter per implementation of attention that the benchmarks compare.

An adapter takes a workload and returns `(call, result)`: `call()` is what is timed, `result(call())` the
outcome as a NumPy array (B, H, M, D).  It brings the arrays into the layout its implementation likes best
beforehand.  Where the implementation cannot do the workload the adapter raises `Unsupported`, or lets what it
raises itself pass.  Adding a peer is one function and one line in PEERS.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.adapting import (
    THREADS,
    additive_mask,
    boolean_mask,
    causal_or_mask,
    full_mask,
    mask_or_bias,
    require,
    require_scores_fit,
)
from benchmarks.peers_onnxruntime import ort_attn_peer, ort_gqa_peer, ort_mha_peer


def sdpa_peer(workload):
    import sdpa

    arrays, options = workload.draw()
    return lambda: sdpa.attention(*arrays, **options), np.asarray


def numpy_peer(workload):
    require_scores_fit(workload)
    (query, key, value), options = workload.draw()
    B, H, M, N, D = workload.B, workload.H, workload.M, workload.N, workload.D
    folded = query.reshape(B, workload.G, -1, D) * workload.dtype.type(D**-0.5)
    key = key.swapaxes(-1, -2)
    mask = additive_mask(workload, options)

    def call():
        scores = (folded @ key).reshape(B, H, M, N)
        if mask is not None:
            scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(B, workload.G, -1, N) @ value
        return out.reshape(B, H, M, D) / total

    return call, np.asarray


def torch_peer(workload):
    import torch

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    arrays, options = workload.draw()
    query, key, value = map(torch.from_numpy, arrays)
    causal, mask = causal_or_mask(workload, options, mask_or_bias)
    mask = None if mask is None else torch.from_numpy(mask)
    grouped = workload.H != workload.G

    def call():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    return call, lambda out: out.numpy()


def torch_math_peer(workload):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    require_scores_fit(workload)
    default, result = torch_peer(workload)

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


def openvino_call(workload, arrays, options):
    import openvino
    from openvino import opset13 as ops

    require(workload.dtype == np.float32, "float32 only")
    causal, mask = causal_or_mask(workload, options, additive_mask)
    inputs = [*arrays] if mask is None else [*arrays, full_mask(mask, workload)]
    parameters = [ops.parameter(array.shape, array.dtype) for array in inputs]
    heads = arrays[0].shape[1]
    key, value = (openvino_repeat(parameter, heads) for parameter in parameters[1:3])
    node = ops.scaled_dot_product_attention(parameters[0], key, value, *parameters[3:], causal=causal)
    settings = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", settings)
    request = model.create_infer_request()
    for index, array in enumerate(inputs):
        # Copied: a tensor that shares memory does not keep the array alive.
        request.set_input_tensor(index, openvino.Tensor(array))
    return lambda: request.infer(share_outputs=True), lambda _: request.get_output_tensor().data


def openvino_repeat(parameter, heads):
    """Keys or values of G heads repeated for all query heads, in the form the compiler knows how to fuse."""
    from openvino import opset13 as ops

    B, G, N, D = parameter.shape
    if heads == G:
        return parameter
    groups = ops.unsqueeze(parameter, np.int64(2))
    return ops.reshape(ops.broadcast(groups, np.array([B, G, heads // G, N, D])), np.array([B, heads, N, D]), False)


def ncnn_peer(workload):
    """ncnn's SDPA layer: (B * H, M, D)."""
    require(workload.dtype == np.float32, "float32 only")
    import ncnn

    arrays, options = workload.draw()
    mask = additive_mask(workload, options)
    inputs = [array.reshape(-1, *array.shape[2:]) for array in arrays]
    if mask is not None:
        inputs.append(ncnn_mask(mask, workload))
    mats = [ncnn.Mat(array).clone() for array in inputs]
    net = ncnn_net(len(inputs))

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


def ncnn_net(inputs):
    """A network of the one layer."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = THREADS
    for option in ("bf16_storage", "fp16_storage", "fp16_packed", "fp16_arithmetic"):
        setattr(net.opt, f"use_{option}", False)
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


PEERS = {
    "numpy": Peer(numpy_peer, "numpy"),
    "torch": Peer(torch_peer, "torch"),
    "torch_math": Peer(torch_math_peer, "torch"),
    "ort_attn": Peer(ort_attn_peer, "onnxruntime"),
    "ort_mha": Peer(ort_mha_peer, "onnxruntime"),
    "ort_gqa": Peer(ort_gqa_peer, "onnxruntime"),
    "openvino": Peer(openvino_peer, "openvino"),
    "ov_fold": Peer(ov_fold_peer, "openvino"),
    "ncnn": Peer(ncnn_peer, "ncnn"),
    "jax": Peer(jax_peer, "jax"),
}
IMPLEMENTATIONS = {"sdpa": Peer(sdpa_peer, "sdpa"), **PEERS}
