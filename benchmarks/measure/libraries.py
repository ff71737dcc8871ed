"""Which library an implementation comes from, and what both are called in public."""

from benchmarks.peers import PEERS

OURS, READ = "sdpa", "read"
# Of libraries and of what else has a version; others keep their names.
TITLES = {
    "python": "Python", "numpy": "NumPy", "torch": "PyTorch", "onnxruntime": "ONNX Runtime", "jax": "JAX",
    "openvino": "OpenVINO", "vllm": "vLLM", "tensorflow": "TensorFlow", "mlx": "MLX", "paddle": "PaddlePaddle",
}  # fmt: skip


def library_of(implementation):
    """Of `name`, or of `name@2`, which is the same on two CPUs."""
    name = implementation.partition("@")[0]
    return PEERS[name].library if name in PEERS else name


def title_of(implementation):
    """Of an implementation or a library."""
    library = library_of(implementation)
    return TITLES.get(library, library)
