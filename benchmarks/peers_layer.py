"""Adapters for workloads of the kind "layer": self-attention of x (B, M, W) between two projections.

The weights are constants of the model, packed beforehand by those that do so.  Results are (B, 1, M, W).
"""

import numpy as np

from benchmarks.adapting import THREADS, as_bits, require
from benchmarks.oracle import arithmetic


def as_result(out):
    """(B, M, W) to the axes of all results."""
    return out[:, None]


def sdpa_layer_peer(workload):
    import sdpa

    x, in_weight, in_bias, out_weight, out_bias = workload.draw_layer()
    layer = sdpa.MultiHeadAttention(
        workload.width,
        workload.H,
        in_proj_weight=in_weight,
        in_proj_bias=in_bias,
        out_proj_weight=out_weight,
        out_proj_bias=out_bias,
    )
    return lambda: layer(x), as_result


def numpy_layer_peer(workload):
    """Half types are widened for the products, x in every call."""
    wide = arithmetic(workload.dtype)
    x, *weights = workload.draw_layer()
    in_weight, in_bias, out_weight, out_bias = (weight.astype(wide) for weight in weights)
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def call():
        heads = (x.astype(wide, copy=False) @ in_weight.T + in_bias).reshape(B, M, 3, H, D)
        query, key, value = (heads[:, :, i].swapaxes(1, 2) for i in range(3))
        scores = query * wide(D**-0.5) @ key.swapaxes(-1, -2)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = (scores @ value).swapaxes(1, 2).reshape(B, M, -1)
        return (out @ out_weight.T + out_bias).astype(workload.dtype, copy=False)

    return call, as_result


def torch_layer_arrays(workload):
    import torch

    from benchmarks.peers import torch_tensor

    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    return [torch_tensor(array) for array in workload.draw_layer()]


def torch_layer_result(out):
    from benchmarks.peers import torch_result

    return as_result(torch_result(out))


def torch_layer_peer(workload):
    """Two linear functions around scaled_dot_product_attention."""
    from torch.nn import functional

    x, in_weight, in_bias, out_weight, out_bias = torch_layer_arrays(workload)
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def call():
        heads = functional.linear(x, in_weight, in_bias).view(B, M, 3, H, D).transpose(1, 3)
        out = functional.scaled_dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        return functional.linear(out.transpose(1, 2).reshape(B, M, -1), out_weight, out_bias)

    return call, torch_layer_result


def torch_mha_layer_peer(workload):
    """torch.nn.MultiheadAttention, by the fast path for inference."""
    import torch

    x, *weights = torch_layer_arrays(workload)
    module = torch.nn.MultiheadAttention(workload.width, workload.H, batch_first=True, dtype=x.dtype).eval()
    for own, given in zip(
        (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias), weights, strict=True
    ):
        own.copy_(given)
    return lambda: module(x, x, x, need_weights=False)[0], torch_layer_result


def ort_attention_layer_peer(workload):
    """com.microsoft.Attention, which projects too, and a MatMul for the way out."""
    return ort_layer(workload, ort_fused_nodes)


def ort_mha_layer_peer(workload):
    """com.microsoft.MultiHeadAttention between MatMuls."""
    return ort_layer(workload, ort_separate_nodes)


def ort_fused_nodes(helper, workload):
    attributes = {"num_heads": workload.H}
    inputs = ["x", "in_weight", "in_bias"]
    return [helper.make_node("Attention", inputs, ["heads"], domain="com.microsoft", **attributes)]


def ort_separate_nodes(helper, workload):
    attributes = {"num_heads": workload.H}
    return [
        helper.make_node("MatMul", ["x", "in_weight"], ["product"]),
        helper.make_node("Add", ["product", "in_bias"], ["all"]),
        helper.make_node("Split", ["all"], ["query", "key", "value"], axis=2, num_outputs=3),
        helper.make_node(
            "MultiHeadAttention", ["query", "key", "value"], ["heads"], domain="com.microsoft", **attributes
        ),
    ]


def ort_layer(workload, nodes_to_heads):
    import onnxruntime
    from onnx import helper, numpy_helper

    require(workload.dtype.name in ("float32", "float16"), "its operators for CPUs do not take bfloat16")
    x, *weights = workload.draw_layer()
    names = ("in_weight", "in_bias", "out_weight", "out_bias")
    constants = [
        numpy_helper.from_array(np.ascontiguousarray(weight.T), name)
        for name, weight in zip(names, weights, strict=True)
    ]
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    nodes = [
        *nodes_to_heads(helper, workload),
        helper.make_node("MatMul", ["heads", "out_weight"], ["projected"]),
        helper.make_node("Add", ["projected", "out_bias"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, element, x.shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = THREADS
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(x))
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_ortvalue_output("y", value)
    return lambda: session.run_with_iobinding(binding), lambda _: as_result(value.numpy())


def openvino_layer_peer(workload):
    import openvino
    from openvino import opset13 as ops

    from benchmarks.peers import OPENVINO_TYPES

    require(workload.dtype.name in OPENVINO_TYPES, f"only {', '.join(OPENVINO_TYPES)}")
    name, precision = OPENVINO_TYPES[workload.dtype.name]
    element = getattr(openvino.Type, name)
    x, *weights = workload.draw_layer()
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def constant(array):
        tensor = openvino.Tensor(element, array.shape)
        as_bits(tensor.data)[...] = as_bits(array)
        return openvino.op.Constant(tensor)

    in_weight, in_bias, out_weight, out_bias = map(constant, weights)
    parameter = ops.parameter(x.shape, element)
    all_heads = ops.add(ops.matmul(parameter, in_weight, False, True), in_bias)
    by_head = ops.transpose(ops.reshape(all_heads, np.array([B, M, 3, H, D]), False), np.array([2, 0, 3, 1, 4]))
    heads = [ops.squeeze(part, np.int64(0)) for part in ops.split(by_head, np.int64(0), 3).outputs()]
    merged = ops.transpose(ops.scaled_dot_product_attention(*heads), np.array([0, 2, 1, 3]))
    out = ops.reshape(merged, np.array([B, M, H * D]), False)
    y = ops.add(ops.matmul(out, out_weight, False, True), out_bias)
    settings = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision}
    model = openvino.Core().compile_model(openvino.Model([y], [parameter]), "CPU", settings)
    request = model.create_infer_request()
    tensor = openvino.Tensor(element, x.shape)
    as_bits(tensor.data)[...] = as_bits(x)
    request.set_input_tensor(0, tensor)
    call = lambda: request.infer(share_outputs=True)  # noqa: E731
    return call, lambda _: as_result(request.get_output_tensor().data.view(workload.dtype))


def jax_layer_peer(workload):
    import jax

    jax.config.update("jax_enable_x64", workload.dtype == np.float64)
    x, *weights = map(jax.device_put, workload.draw_layer())
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def layer(x, in_weight, in_bias, out_weight, out_bias):
        heads = (x @ in_weight.T + in_bias).reshape(B, M, 3, H, D)
        out = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        return out.reshape(B, M, -1) @ out_weight.T + out_bias

    compiled = jax.jit(layer)
    return lambda: compiled(x, *weights).block_until_ready(), lambda out: as_result(np.asarray(out))
