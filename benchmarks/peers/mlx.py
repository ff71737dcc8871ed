"""MLX, on Linux with its backend for CPUs."""

import numpy as np

from benchmarks.measure.adapting import as_bits, mask_or_bias, require_scores_fit


def mlx_peer(workload):
    import mlx.core as mx

    attend, arrays = mlx_attention(workload)

    def call():
        out = attend(*arrays)
        mx.eval(out)
        return out

    return call, mlx_result


def mlx_backward_peer(workload):
    import mlx.core as mx

    attend, arrays = mlx_attention(workload)
    gradient = mlx_array(workload.draw_gradient())

    def call():
        (out,), gradients = mx.vjp(attend, arrays, [gradient])
        mx.eval(out, gradients)
        return out, *gradients

    return call, lambda outputs: tuple(map(mlx_result, outputs))


def mlx_attention(workload):
    """(function of the arrays, the arrays).  Its causal mask is aligned as ours is."""
    require_scores_fit(workload)
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    arrays, options = workload.draw()
    if workload.causal:
        mask = "causal"
    else:
        mask = mask_or_bias(workload, options)
        mask = None if mask is None else mlx_array(mask)

    def attend(query, key, value):
        return mx.fast.scaled_dot_product_attention(query, key, value, scale=workload.D**-0.5, mask=mask)

    return attend, [*map(mlx_array, arrays)]


def mlx_array(array):
    import mlx.core as mx

    if array.dtype.name == "bfloat16":
        return mx.array(as_bits(array)).view(mx.bfloat16)
    return mx.array(array, dtype=getattr(mx, array.dtype.name if array.dtype != np.bool_ else "bool_"))


def mlx_result(out):
    """A NumPy array; one of bfloat16 becomes float32."""
    import mlx.core as mx

    return np.array(out.astype(mx.float32) if out.dtype == mx.bfloat16 else out)
