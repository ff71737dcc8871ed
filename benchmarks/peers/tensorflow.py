"""TensorFlow, by the attention of Keras: (B, M, H, D)."""

import os

import numpy as np

from benchmarks.measure.adapting import THREADS, boolean_mask, causal_or_mask, require_scores_fit


def keras_peer(workload):
    import tensorflow

    attend, tensors = keras_attention(workload)
    graph = tensorflow.function(attend)
    return lambda: graph(*tensors), keras_result


def keras_backward_peer(workload):
    import tensorflow

    attend, tensors = keras_attention(workload)
    gradient = keras_tensor(workload.draw_gradient())

    @tensorflow.function
    def graph(*tensors):
        with tensorflow.GradientTape() as tape:
            tape.watch(tensors)
            out = attend(*tensors)
        return out, *tape.gradient(out, tensors, gradient)

    return lambda: graph(*tensors), lambda outputs: tuple(map(keras_result, outputs))


def keras_attention(workload):
    """(function of the tensors, the tensors)."""
    require_scores_fit(workload)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow

    if tensorflow.config.threading.get_intra_op_parallelism_threads() == 0:  # can be set once only
        tensorflow.config.threading.set_intra_op_parallelism_threads(THREADS)
    arrays, options = workload.draw()
    causal, mask = causal_or_mask(workload, options, boolean_mask)
    extra = {"mask": mask, "bias": options.get("bias")}
    extra = {name: tensorflow.constant(array) for name, array in extra.items() if array is not None}

    def attend(*tensors):
        return keras.ops.dot_product_attention(*tensors, is_causal=causal, **extra)

    return attend, [*map(keras_tensor, arrays)]


def keras_tensor(array):
    import tensorflow

    return tensorflow.constant(np.ascontiguousarray(array.swapaxes(1, 2)))


def keras_result(out):
    return out.numpy().swapaxes(1, 2)
