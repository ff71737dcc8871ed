"""JAX, compiled by XLA."""

import numpy as np

from benchmarks.measure.adapting import boolean_mask, causal_or_mask, require_scores_fit


def jax_peer(workload):
    """jax.nn.dot_product_attention: (B, M, H, D)."""
    import jax

    attend, inputs, extra = jax_attention(workload)
    compiled = jax.jit(attend)
    return lambda: compiled(inputs, extra).block_until_ready(), jax_result


def jax_backward_peer(workload):
    """jax.vjp of the same, compiled together with it."""
    import jax

    attend, inputs, extra = jax_attention(workload)

    @jax.jit
    def compiled(arrays, extra, gradient):
        out, pull_back = jax.vjp(lambda *arrays: attend(arrays, extra), *arrays)
        return out, *pull_back(gradient)

    gradient = jax_array(workload.draw_gradient())
    return (
        lambda: jax.block_until_ready(compiled(inputs, extra, gradient)),
        lambda outputs: tuple(map(jax_result, outputs)),
    )


def jax_attention(workload):
    """(function of the arrays and of masks by name, the arrays, the masks)."""
    require_scores_fit(workload)
    import jax

    jax.config.update("jax_enable_x64", workload.dtype == np.float64)
    arrays, options = workload.draw()
    fixed, mask = {}, None
    if workload.window:
        fixed["local_window_size"] = (workload.window - 1, 0)
    else:
        fixed["is_causal"], mask = causal_or_mask(workload, options, boolean_mask)
    extra = {"mask": mask, "bias": options.get("bias")}
    extra = {name: jax.device_put(array) for name, array in extra.items() if array is not None}

    def attend(arrays, extra):
        return jax.nn.dot_product_attention(*arrays, **extra, **fixed)

    return attend, [*map(jax_array, arrays)], extra


def jax_array(array):
    """(B, H, M, D) as (B, M, H, D)."""
    import jax

    return jax.device_put(np.ascontiguousarray(array.swapaxes(1, 2)))


def jax_result(out):
    return np.asarray(out).swapaxes(1, 2)


def jax_layer_peer(workload):
    import jax

    jax.config.update("jax_enable_x64", workload.dtype == np.float64)
    x, *weights = map(jax.device_put, workload.draw())
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def layer(x, in_weight, in_bias, out_weight, out_bias):
        heads = (x @ in_weight.T + in_bias).reshape(B, M, 3, H, D)
        out = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        return out.reshape(B, M, -1) @ out_weight.T + out_bias

    compiled = jax.jit(layer)
    return lambda: compiled(x, *weights).block_until_ready(), np.asarray
