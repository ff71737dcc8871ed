"""This library."""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.workloads import checkpoints
from benchmarks.workloads.models import past_names


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


def sdpa_model(workload):
    """The model, from a folder that is gone afterwards: its files stay mapped."""
    import sdpa

    with tempfile.TemporaryDirectory() as folder:
        checkpoints.write(Path(folder), workload.config, workload.draw_weights(), workload.dtype_name)
        return sdpa.models.load(folder)


def sdpa_encoder_peer(workload):
    model = sdpa_model(workload)
    inputs = workload.draw_inputs()
    return lambda: model(**inputs), lambda x: workload.comparable(x)


def sdpa_decoder_peer(workload):
    """Of a prompt generates a token; of a token computes the logits."""
    model = sdpa_model(workload)
    inputs = workload.draw_inputs()
    ids, caches = inputs["ids"], model.new_caches(workload.B)
    if workload.cached:
        for cache, names in zip(caches, past_names(workload.layers), strict=True):
            cache.append(*(inputs[name] for name in names))

    def logits():
        return model(ids[:, -1:], caches=caches)

    def token():
        truncate(caches, workload.cached)
        return logits()

    def prompt():
        truncate(caches, 0)
        return next(model.generate(ids, 1, caches=caches))

    def logits_after_prompt(_):
        """Of its last token, from the keys and values that the call left of the others."""
        truncate(caches, workload.cached + workload.S - 1)
        return workload.comparable(logits())

    return (token, lambda x: workload.comparable(x)) if workload.cached else (prompt, logits_after_prompt)


def truncate(caches, length):
    for cache in caches:
        cache.truncate(length)


def sdpa_norm_peer(workload):
    import sdpa

    inputs, options = workload.draw()
    norm = sdpa.layer_norm if workload.centred else sdpa.rms_norm
    out = np.empty_like(inputs["x"]), np.empty_like(inputs["x"])
    options |= {"residual": inputs["residual"], "eps": workload.eps, "out": out}
    return lambda: norm(inputs["x"], **options), lambda outputs: outputs
