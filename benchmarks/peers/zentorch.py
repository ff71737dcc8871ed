"""zentorch: AMD's operators for PyTorch on CPUs."""

from benchmarks.measure.adapting import THREADS, additive_mask, causal_or_mask, full_mask
from benchmarks.peers.torch import torch_result, torch_tensor


def zentorch_peer(workload):
    import torch
    import zentorch  # noqa: F401  which registers its operators

    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    arrays, options = workload.draw()
    query, key, value = map(torch_tensor, arrays)
    causal, mask = causal_or_mask(workload, options, additive_mask)
    mask = None if mask is None else torch_tensor(full_mask(mask, workload))

    def call():
        return torch.ops.zentorch.zentorch_sdpa(query, key, value, is_causal=causal, attn_mask=mask)[0]

    return call, torch_result
