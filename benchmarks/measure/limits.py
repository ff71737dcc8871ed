"""What keeps other libraries to an older instruction set than the CPU has: environment variables, of those that have
any.  So one machine says how this library's kernel for AVX2 compares with theirs, on CPUs without AVX-512."""

from typing import NamedTuple

from benchmarks.measure.libraries import OURS, READ, library_of, title_of


class Limit(NamedTuple):
    environment: dict
    rest: str = ""  # what of the library goes on as it likes


ONEDNN = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
TORCH = ONEDNN | {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def numpy_environment():
    """OpenBLAS by a CPU that had no more; NumPy by the names that this version has for what came later."""
    from numpy._core._multiarray_umath import __cpu_dispatch__

    later = [name for name in __cpu_dispatch__ if name.startswith(("AVX512", "X86_V4"))]
    return {"OPENBLAS_CORETYPE": "Haswell"} | ({"NPY_DISABLE_CPU_FEATURES": " ".join(later)} if later else {})


# By kernel of ours and library of theirs.  The other libraries look at the CPU alone: onnxruntime asks cpuid
# (onnxruntime#7010 asks for a way), and so does ncnn.
LIMITS = {
    "avx2": {
        "torch": Limit(TORCH),
        "vllm": Limit(TORCH, "its own kernels, which were compiled for the CPU"),
        "zentorch": Limit(TORCH, "its own kernels"),
        "openvino": Limit(ONEDNN, "kernels that are not oneDNN's: OV_CPU_MAX_ISA is for debug builds"),
        "tensorflow": Limit(ONEDNN, "Eigen's kernels"),
        "jax": Limit({"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}),
        "numpy": Limit(numpy_environment()),
    }
}


def environments(kernel, names):
    """{implementation: environment} of those that can be kept to what this kernel of ours uses."""
    limits = LIMITS.get(kernel, {}) | ({OURS: Limit({"SDPA_KERNEL": kernel})} if kernel else {})
    return {name: limits[library_of(name)].environment for name in names if library_of(name) in limits}


def describe(kernel, names):
    """Which libraries are kept to it, wholly or in part, and which are not; None where nothing was asked for."""
    libraries = [name for name in dict.fromkeys(map(library_of, names)) if name not in (OURS, READ)]
    if not kernel or not libraries:
        return None
    limits = LIMITS.get(kernel, {})
    kept = [title_of(name) for name in libraries if name in limits and not limits[name].rest]
    partly = [
        f"{title_of(name)} (not {limits[name].rest})" for name in libraries if name in limits and limits[name].rest
    ]
    free = [title_of(name) for name in libraries if name not in limits]
    texts = [("kept to it", kept), ("in part", partly), ("not, as there is no known way", free)]
    return f"{kernel}: " + "; ".join(f"{text}: {', '.join(found)}" for text, found in texts if found)
