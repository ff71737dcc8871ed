"""The three attention operators of onnxruntime, each as a model of one node.

On CPUs they take float32, float16 and partly float64, not bfloat16.
"""

import numpy as np

from benchmarks.adapting import (
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

    some = next(iter(inputs.values()))
    require(some.dtype.name != "bfloat16", "its operators for CPUs do not take bfloat16")
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in inputs.items() if a is not None}
    made = {
        name: values[shape]
        if isinstance(shape, str)
        else onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(shape, some.dtype))
        for name, shape in outputs.items()
    }
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = THREADS
    model = ort_model(operator, domain, inputs, {name: value.shape() for name, value in made.items()}, attributes)
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in made.items():
        binding.bind_ortvalue_output(name, value)

    def call():
        session.run_with_iobinding(binding)
        return made

    return call


def ort_model(operator, domain, inputs, outputs, attributes):
    from onnx import helper

    some = next(iter(inputs.values()))
    element = helper.np_dtype_to_tensor_dtype
    node = helper.make_node(operator, [name.strip() for name in inputs], list(outputs), domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, element(a.dtype), a.shape) for n, a in inputs.items() if a is not None],
        [helper.make_tensor_value_info(n, element(some.dtype), shape) for n, shape in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
