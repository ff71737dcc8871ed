"""PaddlePaddle: on CPUs its attention is made of products that keep all scores."""

import numpy as np

from benchmarks.measure.adapting import additive_mask, causal_or_mask, full_mask, require, require_scores_fit


def paddle_peer(workload):
    attend, tensors = paddle_attention(workload)
    return lambda: attend(*tensors), paddle_result


def paddle_backward_peer(workload):
    """Autograd."""
    import paddle

    attend, tensors = paddle_attention(workload)
    gradient = paddle_tensor(workload.draw_gradient())
    for tensor in tensors:
        tensor.stop_gradient = False

    def call():
        out = attend(*tensors)
        return out, *paddle.grad(out, tensors, gradient)

    return call, lambda outputs: tuple(map(paddle_result, outputs))


def paddle_attention(workload):
    """(function of the tensors, the tensors)."""
    require(workload.dtype.name in ("float32", "float64"), "float32 and float64 only")
    require(workload.H == workload.G, "as many key heads as query heads only")
    require_scores_fit(workload)
    import paddle

    paddle.set_device("cpu")
    arrays, options = workload.draw()
    causal, mask = causal_or_mask(workload, options, additive_mask)
    mask = None if mask is None else paddle.to_tensor(full_mask(mask, workload))

    def attend(query, key, value):
        return paddle.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)

    return attend, [*map(paddle_tensor, arrays)]


def paddle_tensor(array):
    """(B, H, M, D) as (B, M, H, D)."""
    import paddle

    return paddle.to_tensor(np.ascontiguousarray(array.swapaxes(1, 2)))


def paddle_result(out):
    return out.numpy().swapaxes(1, 2)
