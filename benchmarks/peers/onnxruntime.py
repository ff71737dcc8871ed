"""The three attention operators of onnxruntime, each as a model of one node, and layers with two of them.

On CPUs they take float32, float16 and partly float64, not bfloat16.
"""

import numpy as np

from benchmarks.measure.adapting import (
    THREADS,
    additive_mask,
    causal_or_mask,
    full_mask,
    mask_or_bias,
    require,
    require_scores_fit,
)


def ort_attn_peer(workload):
    """ONNX Attention, opset 24: (B, H, M, D)."""
    require_scores_fit(workload)
    (query, key, value), options = workload.draw()
    causal, mask = causal_or_mask(workload, options, mask_or_bias)
    inputs = {"Q": query, "K": key, "V": value}
    if mask is not None:
        inputs["mask"] = full_mask(mask, workload)
    call = ort_session("Attention", "", inputs, {"Y": query.shape}, is_causal=int(causal))
    return call, lambda outputs: outputs["Y"].numpy()


def ort_mha_peer(workload):
    """com.microsoft.MultiHeadAttention: (B, M, H * D)."""
    require(workload.H == workload.G, "as many key heads as query heads only")
    (query, key, value), options = workload.draw()
    causal, mask = causal_or_mask(workload, options, additive_mask)
    inputs = {"query": merge_heads(query), "key": merge_heads(key), "value": merge_heads(value)}
    if mask is not None:
        inputs |= {"": None, " ": None}  # no projection bias, no padding mask
        inputs["attention_bias"] = full_mask(mask, workload)
    shapes = {"output": inputs["query"].shape}
    attributes = {"num_heads": workload.H, "unidirectional": int(causal)}
    call = ort_session("MultiHeadAttention", "com.microsoft", inputs, shapes, **attributes)
    return call, lambda outputs: split_heads(outputs["output"].numpy(), workload)


def ort_gqa_peer(workload):
    """com.microsoft.GroupQueryAttention: (B, M, H * D), the cache (B, G, N, D) read and extended in place."""
    causal = workload.causal or workload.window is not None or workload.M == 1
    require(causal and workload.M <= workload.N and not workload.hiding, "causal only")
    (query, key, value), _ = workload.draw()
    new = slice(workload.N - workload.M, workload.N)
    inputs = {
        "query": merge_heads(query),
        "key": merge_heads(key[:, :, new]),
        "value": merge_heads(value[:, :, new]),
        "past_key": key,
        "past_value": value,
        "seqlens_k": np.full(workload.B, workload.N - 1, np.int32),
        "total_sequence_length": np.array([workload.N], np.int32),
    }
    shapes = {"output": inputs["query"].shape, "present_key": "past_key", "present_value": "past_value"}
    attributes = {"num_heads": workload.H, "kv_num_heads": workload.G}
    if workload.window is not None:
        attributes["local_window_size"] = workload.window
    call = ort_session("GroupQueryAttention", "com.microsoft", inputs, shapes, **attributes)
    return call, lambda outputs: split_heads(outputs["output"].numpy(), workload)


def merge_heads(array):
    """(B, H, M, D) to (B, M, H * D)."""
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(array.shape[0], array.shape[2], -1)


def split_heads(array, workload):
    return array.reshape(workload.B, workload.M, workload.H, workload.D).swapaxes(1, 2)


def ort_session(operator, domain, inputs, outputs, **attributes):
    """A call of one onnxruntime operator on bound memory.

    `inputs`: name to array, None for one left out; `outputs`: name to shape, or to the input it overwrites.
    """
    import onnxruntime
    from onnx import helper

    some = next(iter(inputs.values()))
    require(some.dtype.name != "bfloat16", "its operators for CPUs do not take bfloat16")
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in inputs.items() if a is not None}
    made = {
        name: values[shape]
        if isinstance(shape, str)
        else onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(shape, some.dtype))
        for name, shape in outputs.items()
    }
    names = [name.strip() for name in inputs]
    node = helper.make_node(operator, names, list(outputs), domain=domain, **attributes)
    results = {name: (some.dtype, value.shape()) for name, value in made.items()}
    return bound_call(ort_model([node], inputs, results, opset=24), values, made)


def ort_model(nodes, inputs, outputs, opset, constants=()):
    """The bytes of a model.  `inputs`: name to array, None for one left out; `outputs`: name to (dtype, shape)."""
    from onnx import helper

    def described(name, dtype, shape):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)

    given = [described(name, array.dtype, array.shape) for name, array in inputs.items() if array is not None]
    results = [described(name, *of_result) for name, of_result in outputs.items()]
    graph = helper.make_graph(nodes, "attention", given, results, list(constants))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def bound_call(model, inputs, outputs):
    """A call of the model, from the memory of `inputs` to that of `outputs`, which it returns: names to OrtValues; None
    for an output that is as large as the model makes it."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    if None in outputs.values():
        first = session.run_with_ort_values(list(outputs), inputs)
        outputs = {name: found if bound is None else bound for (name, bound), found in zip(outputs.items(), first)}
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)

    def call():
        session.run_with_iobinding(binding)
        return outputs

    return call


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
    x, *weights = workload.draw()
    names = ("in_weight", "in_bias", "out_weight", "out_bias")
    constants = [
        numpy_helper.from_array(np.ascontiguousarray(weight.T), name)
        for name, weight in zip(names, weights, strict=True)
    ]
    nodes = [
        *nodes_to_heads(helper, workload),
        helper.make_node("MatMul", ["heads", "out_weight"], ["projected"]),
        helper.make_node("Add", ["projected", "out_bias"], ["y"]),
    ]
    model = ort_model(nodes, {"x": x}, {"y": (x.dtype, x.shape)}, opset=21, constants=constants)
    given, made = map(onnxruntime.OrtValue.ortvalue_from_numpy, (x, np.empty_like(x)))
    call = bound_call(model, {"x": given}, {"y": made})
    return call, lambda outputs: outputs["y"].numpy()
