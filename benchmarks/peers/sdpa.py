"""This library."""

import numpy as np


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


def sdpa_layer_peer(workload):
    import sdpa

    x, in_weight, in_bias, out_weight, out_bias = workload.draw()
    layer = sdpa.MultiHeadAttention(
        workload.width,
        workload.H,
        in_proj_weight=in_weight,
        in_proj_bias=in_bias,
        out_proj_weight=out_weight,
        out_proj_bias=out_bias,
    )
    return lambda: layer(x), np.asarray


def sdpa_linear_peer(workload):
    import sdpa

    inputs, weights = workload.draw()
    *first, last = (
        sdpa.Linear(weights[f"weight_{number}"], weights[f"bias_{number}"], activation=workload.activation)
        for number in range(workload.count)
    )
    x, out = inputs["x"], np.empty((workload.rows, workload.outs), workload.dtype)

    def call():
        rows = x
        for linear in first:
            rows = linear(rows)
        return last(rows, out=out)

    return call, np.asarray


def sdpa_feed_forward_peer(workload):
    import sdpa

    inputs, weights = workload.draw()
    feed_forward = sdpa.FeedForward(**weights, activation=workload.activation)
    return lambda: feed_forward(inputs["x"]), np.asarray


def sdpa_norm_peer(workload):
    import sdpa

    inputs, options = workload.draw()
    norm = sdpa.layer_norm if workload.centred else sdpa.rms_norm
    options |= {"residual": inputs["residual"], "eps": workload.eps, "out": np.empty_like(inputs["x"])}
    return lambda: norm(inputs["x"], **options), lambda outputs: outputs
