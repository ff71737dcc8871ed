"""The kernels that this machine can run, and how a test runs on each of them."""

import pytest

from sdpa import _core

# Kernels.  One that has its own arithmetic for bfloat16 is like the next in the list for all other dtypes.

KERNELS = {kernel.name: kernel for kernel in _core.kernels()}
PAIRS_OF_BFLOAT16 = [name for name in ("amx", "avx512_bf16") if name in KERNELS]
WIDENING = {name: kernel for name, kernel in KERNELS.items() if name not in PAIRS_OF_BFLOAT16}


def on_kernels(*groups, half="every"):
    """A test that takes `kernel` and `dtype` runs for all dtypes of the groups on all kernels where they differ.  What
    depends on the arithmetic and not on how arrays are read and written needs half types on the "best" kernels only:
    bfloat16 on the best, float16 on the best that widens."""
    dtypes = {name: dtype for group in groups for name, dtype in group.items()}
    best = {"bfloat16": next(iter(KERNELS)), "float16": next(iter(WIDENING))}
    cases = {}
    for name, kernel in KERNELS.items():
        for what, dtype in dtypes.items():
            new = name in WIDENING or what == "bfloat16"
            if new and (half == "every" or name == best.get(what, name)):
                cases[f"{name}-{what}"] = kernel, dtype
    return pytest.mark.parametrize("kernel, dtype", cases.values(), ids=cases, indirect=["kernel"])
