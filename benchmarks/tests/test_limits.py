"""Peers that are kept to an instruction set."""

import os
import subprocess
import sys

from benchmarks.measure import limits
from benchmarks.measure.libraries import OURS, READ
from benchmarks.peers import PEERS


def test_environments():
    found = limits.environments("avx2", [OURS, f"{OURS}@2", READ, "torch", "torch_math@1", "ort_attn", "numpy"])
    assert found[OURS] == found[f"{OURS}@2"] == {"SDPA_KERNEL": "avx2"}
    assert found["torch"] == found["torch_math@1"] and found["torch"]["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "ort_attn" not in found and READ not in found
    assert limits.environments("baseline", [OURS, "torch"]) == {OURS: {"SDPA_KERNEL": "baseline"}}
    assert limits.environments(None, [OURS, "torch"]) == {}


def test_what_is_said():
    text = limits.describe("avx2", [OURS, READ, "torch", "torch_math", "openvino", "ort_attn"])
    assert text.startswith("avx2: kept to it: PyTorch; in part: OpenVINO (not kernels that are not oneDNN's")
    assert text.endswith("not, as there is no known way: ONNX Runtime")
    assert limits.describe(None, [OURS, "torch"]) is limits.describe("avx2", [OURS, READ]) is None
    assert {peer.library for peer in PEERS.values()} >= set(limits.LIMITS["avx2"])


def test_numpy_obeys():
    """None of what it chooses by the CPU, at run time, is later than AVX2."""
    environment = limits.numpy_environment()
    later = environment.get("NPY_DISABLE_CPU_FEATURES", "").split()
    code = f"from numpy._core._multiarray_umath import __cpu_features__ as f; print(*(f[name] for name in {later}))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"] * len(later)
