"""PyTorch."""

import numpy as np

from benchmarks.measure.adapting import (
    THREADS,
    additive_mask,
    as_bits,
    causal_or_mask,
    require_scores_fit,
)
from benchmarks.workloads.formulas import Pieces

COMPILED_LIMIT = 1000  # workloads in a process: beyond 8, PyTorch's own limit, flex_attention would not be compiled


def torch_peer(workload):
    import torch

    torch.set_grad_enabled(False)
    arrays, options = workload.draw()
    return torch_call(workload, [*map(torch_tensor, arrays)], options), torch_result


def torch_call(workload, tensors, options):
    import torch

    torch.set_num_threads(THREADS)
    query, key, value = tensors
    causal, mask = causal_or_mask(workload, options, additive_mask)
    mask = None if mask is None else torch_tensor(mask)
    grouped = workload.H != workload.G

    def call():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    return call


def torch_backward_peer(workload):
    """Autograd."""
    import torch

    arrays, options = workload.draw()
    tensors = [torch_tensor(array).requires_grad_() for array in arrays]
    gradient = torch_tensor(workload.draw_gradient())
    forward = torch_call(workload, tensors, options)

    def call():
        with torch.enable_grad():
            out = forward()
            return out, *torch.autograd.grad(out, tensors, gradient)

    return call, lambda outputs: tuple(torch_result(tensor.detach()) for tensor in outputs)


def torch_tensor(array):
    """The array as a tensor on the same memory."""
    import torch

    if array.dtype.name == "bfloat16":  # which torch does not know from NumPy
        return torch.from_numpy(as_bits(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_result(tensor):
    """A NumPy array; one of bfloat16 becomes float32."""
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def torch_math_peer(workload):
    require_scores_fit(workload)
    return torch_math(*torch_peer(workload))


def torch_math_backward_peer(workload):
    require_scores_fit(workload)
    return torch_math(*torch_backward_peer(workload))


def torch_math(default, result):
    """The same without a fused kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call():
        with sdpa_kernel(SDPBackend.MATH):
            return default()

    return call, result


def torch_flex_peer(workload):
    """flex_attention, compiled: uncompiled it keeps all scores, and takes twice as long as torch_math."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    arrays, options = workload.draw()
    query, key, value = map(torch_tensor, arrays)
    block_mask, shape_score = flex_block_mask(workload, options), flex_score(options)
    torch._dynamo.config.recompile_limit = COMPILED_LIMIT
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call():
        return compiled(query, key, value, shape_score, block_mask=block_mask, enable_gqa=workload.H != workload.G)

    return call, torch_result


def flex_block_mask(workload, options):
    """Which blocks of keys each block of rows sees, and which keys within those that it sees in part."""
    from torch.nn.attention.flex_attention import create_block_mask

    visible, B = flex_visible(workload, options)
    if visible is None:
        return None
    return create_block_mask(visible, B, None, workload.M, workload.N, device="cpu")


def flex_visible(workload, options):
    """(function that tells whether a row sees a key, or None; the number of batches it tells apart, or None)."""
    offset, window = workload.N - workload.M, workload.window
    if window is not None:
        return lambda b, h, row, key: (row + offset >= key) & (row + offset - key < window), None
    if workload.causal:
        return lambda b, h, row, key: row + offset >= key, None
    if "mask" not in options:
        return None, None
    mask = torch_tensor(options["mask"])
    batches, _, rows, _ = mask.shape
    if rows == 1:
        return lambda b, h, row, key: mask[b, 0, 0, key], batches
    return lambda b, h, row, key: mask[0, 0, row, key], None


def flex_score(options):
    """What is done to a score, or None."""
    if "bias" not in options:
        return None
    bias = torch_tensor(options["bias"])
    return lambda score, b, h, row, key: score + bias[0, h, row, key]


def torch_layer_arrays(workload):
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    return [torch_tensor(array) for array in workload.draw()]


def torch_layer_peer(workload):
    """Two linear functions around scaled_dot_product_attention."""
    from torch.nn import functional

    x, in_weight, in_bias, out_weight, out_bias = torch_layer_arrays(workload)
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def call():
        heads = functional.linear(x, in_weight, in_bias).view(B, M, 3, H, D).transpose(1, 3)
        out = functional.scaled_dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        return functional.linear(out.transpose(1, 2).reshape(B, M, -1), out_weight, out_bias)

    return call, torch_result


def torch_mha_layer_peer(workload):
    """torch.nn.MultiheadAttention, by the fast path for inference."""
    import torch

    x, *weights = torch_layer_arrays(workload)
    module = torch.nn.MultiheadAttention(workload.width, workload.H, batch_first=True, dtype=x.dtype).eval()
    for own, given in zip(
        (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias), weights, strict=True
    ):
        own.copy_(given)
    return lambda: module(x, x, x, need_weights=False)[0], torch_result


class TorchPieces(Pieces):
    """torch.nn.functional, one operation after the other; whole models are those of transformers."""

    def variable(self, name, array):
        return torch_tensor(array)

    weight = staticmethod(torch_tensor)  # of an array

    def linear(self, x, weight, bias=None, activation=None):
        from torch.nn import functional

        y = functional.linear(x, weight, bias)
        return y if activation is None else getattr(functional, activation)(y)

    def add(self, x, y):
        return x + y

    def multiply(self, x, y):
        return x * y

    def layer_norm(self, x, weight, bias, eps):
        from torch.nn import functional

        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def rms_norm(self, x, weight, eps):
        from torch.nn import functional

        return functional.rms_norm(x, weight.shape, weight, eps)


def torch_formula_peer(workload):
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    pieces = TorchPieces()
    prepared = workload.prepared(pieces)
    return lambda: workload.formula(pieces, *prepared), lambda outputs: tuple(map(torch_result, outputs))
