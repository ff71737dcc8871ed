"""OpenVINO: models of one node, or of a layer, compiled for the CPU."""

import numpy as np

from benchmarks.measure.adapting import (
    THREADS,
    additive_mask,
    as_bits,
    causal_or_mask,
    full_mask,
    require,
)

# dtype: (element type, inference precision).  With "f16" float16 would be computed in bfloat16 where the CPU has that.
OPENVINO_TYPES = {"float32": ("f32", "f32"), "bfloat16": ("bf16", "bf16"), "float16": ("f16", "f32")}
INDICES = {"int64": "i64", "int32": "i32"}


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
    from openvino import opset13 as ops

    element = element_type(workload)
    causal, mask = causal_or_mask(workload, options, additive_mask)
    inputs = [*arrays] if mask is None else [*arrays, full_mask(mask, workload)]
    parameters = [ops.parameter(array.shape, element) for array in inputs]
    heads = arrays[0].shape[1]
    key, value = (repeat_heads(parameter, heads) for parameter in parameters[1:3])
    node = ops.scaled_dot_product_attention(parameters[0], key, value, *parameters[3:], causal=causal)
    return compiled_call(workload, node, parameters, inputs)


def repeat_heads(parameter, heads):
    """Keys or values of G heads repeated for all query heads, in the form the compiler knows how to fuse."""
    from openvino import opset13 as ops

    B, G, N, D = parameter.shape
    if heads == G:
        return parameter
    groups = ops.unsqueeze(parameter, np.int64(2))
    return ops.reshape(ops.broadcast(groups, np.array([B, G, heads // G, N, D])), np.array([B, heads, N, D]), False)


def openvino_layer_peer(workload):
    import openvino
    from openvino import opset13 as ops

    element = element_type(workload)
    x, *weights = workload.draw()
    B, M, H, D = workload.B, workload.M, workload.H, workload.D
    in_weight, in_bias, out_weight, out_bias = (openvino.op.Constant(tensor_of(weight, element)) for weight in weights)
    parameter = ops.parameter(x.shape, element)
    all_heads = ops.add(ops.matmul(parameter, in_weight, False, True), in_bias)
    by_head = ops.transpose(ops.reshape(all_heads, np.array([B, M, 3, H, D]), False), np.array([2, 0, 3, 1, 4]))
    heads = [ops.squeeze(part, np.int64(0)) for part in ops.split(by_head, np.int64(0), 3).outputs()]
    merged = ops.transpose(ops.scaled_dot_product_attention(*heads), np.array([0, 2, 1, 3]))
    out = ops.reshape(merged, np.array([B, M, H * D]), False)
    y = ops.add(ops.matmul(out, out_weight, False, True), out_bias)
    return compiled_call(workload, y, [parameter], [x])


def element_type(typed):
    """Of an array, or a workload."""
    import openvino

    name = typed.dtype.name
    if name in INDICES:
        return getattr(openvino.Type, INDICES[name])
    require(name in OPENVINO_TYPES, f"only {', '.join(OPENVINO_TYPES)}")
    return getattr(openvino.Type, OPENVINO_TYPES[name][0])


def compiled_call(workload, node, parameters, inputs):
    """(call, result) of the model that ends in `node`, on the arrays of its parameters."""
    request = compiled_request(workload, [node], parameters, inputs)
    return lambda: request.infer(share_outputs=True), lambda _: output_of(request, 0, workload)


def compiled_request(workload, nodes, parameters, inputs, sinks=()):
    """What runs the model that ends in `nodes`, and in `sinks` that keep something for the next run."""
    import openvino

    precision = OPENVINO_TYPES[workload.dtype.name][1]
    settings = {
        "INFERENCE_NUM_THREADS": THREADS,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # or it would be of 8 bits
    }
    model = openvino.Model([openvino.opset13.result(node) for node in nodes], [*sinks], parameters)
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    for index, array in enumerate(inputs):
        request.set_input_tensor(index, tensor_of(array, element_type(array)))
    return request


def output_of(request, index, workload):
    """Views of a bfloat16 tensor come as float16."""
    return request.get_output_tensor(index).data.view(workload.dtype)


def tensor_of(array, element):
    """A copy: a tensor that shares memory does not keep the array alive."""
    import openvino

    tensor = openvino.Tensor(element, array.shape)
    as_bits(tensor.data)[...] = as_bits(array)
    return tensor
