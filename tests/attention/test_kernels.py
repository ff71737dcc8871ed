"""Which kernel runs, what the library exports, what a call would do, and the memory it takes."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import HALF, WIDE, draw, rng
from support.kernels import KERNELS, PAIRS_OF_BFLOAT16, on_kernels
from support.processes import ROOT, extra_memory, run_python

import sdpa
from sdpa import _core
from sdpa._runtime import kernels

NAMES = ["amx", "avx512_bf16", "avx512", "avx2", "neon", "baseline"]  # best first
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"}
CPU_FLAGS = {
    "amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "avx512_bf16": AVX512 | {"avx512_bf16"}, "avx512": AVX512,
    "avx2": {"avx2", "fma", "f16c"},
}  # fmt: skip
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS, indirect=True)


def test_names_best_first():
    names = sdpa.kernels()
    assert names == [name for name in NAMES if name in names]
    assert names[-1] == "baseline" and names == [kernel.name for kernel in _core.kernels()]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="this system does not tell what the CPU has")
def test_kernels_are_those_the_cpu_runs():
    flags = re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(flags[0].split()) if flags else set()
    for name in sdpa.kernels():
        assert CPU_FLAGS.get(name, set()) <= flags


def test_the_cpu_is_asked_for_all_that_the_compiler_may_use():
    for name, isa in runpy.run_path(str(ROOT / "setup.py"))["ISAS"].items():
        allowed = {flag.removeprefix("-m").replace("-", "_") for flag in isa.flags if "=" not in flag}
        plain = [{flag.replace("_", "") for flag in flags} for flags in (allowed, CPU_FLAGS.get(name, set()))]
        assert plain[0] == plain[1]
        asked = re.findall(r"HAS\((\w+)\)", isa.question)
        assert set(asked) == allowed and len(asked) == len(allowed)


SIMULATED = {  # a CPU, the kernels that it runs
    "Haswell": ["avx2", "baseline"],
    "Haswell,-f16c": ["baseline"],
}


@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="qemu-x86_64 is not installed")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the Python at hand is for another architecture")
@pytest.mark.parametrize("cpu, expected", SIMULATED.items(), ids=SIMULATED)
def test_a_simulated_cpu(cpu, expected):
    """A kernel that the CPU does not run ends the process with SIGILL: in float16 without F16C, for example."""
    code = """
import numpy as np, sdpa
print(*sdpa.kernels())
for dtype in np.float16, np.float32:
    for rows in 1, 40:
        query, key = np.ones((2, rows, 8), dtype), np.ones((2, 40, 8), dtype)
        assert (sdpa.attention(query, key, key, threads=1) == 1).all()
"""
    run = subprocess.run(
        ["qemu-x86_64", "-cpu", cpu, sys.executable, "-c", code],
        cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == expected


@pytest.mark.parametrize("name", sdpa.kernels())
def test_the_environment_selects(name):
    code = "import sdpa, numpy as np; x = np.ones((64, 8)); print(sdpa.build_info()['kernel'])"
    code += "; print(sdpa.explain(x, x, x).kernel)"
    assert run_python(code, SDPA_KERNEL=name).split() == [name, name]


def test_the_best_is_the_default():
    for environment in {}, dict(SDPA_KERNEL=""):
        assert run_python("import sdpa; print(sdpa.build_info()['kernel'])", **environment) == sdpa.kernels()[0]


@pytest.mark.parametrize("name", ["avx9", "AVX2", "avx", "baseline "])
def test_a_wrong_name_fails(name):
    choices = ", ".join(map(repr, sdpa.kernels()))
    with pytest.raises(RuntimeError, match=rf"ValueError: no kernel named '{name}'.*\[{choices}\].*SDPA_KERNEL"):
        run_python("import sdpa", SDPA_KERNEL=name)


@every_kernel
def test_a_forced_kernel_really_runs(kernel):
    """Vectors of another size cut the rows otherwise."""
    assert sdpa.build_info()["kernel"] == kernel.name
    lanes = dict(amx=16, avx512_bf16=16, avx512=16, avx2=8, neon=4).get(kernel.name)
    for dtype, number in (np.float32, lanes), (np.float64, lanes and lanes // 2):
        x = np.ones((1000, 8), dtype)
        assert number is None or f"holds {number} rows of {np.dtype(dtype)}" in str(sdpa.explain(x, x, x))


@pytest.mark.skipif(not PAIRS_OF_BFLOAT16, reason="this CPU does not multiply pairs of bfloat16")
@pytest.mark.parametrize("M", [1, 3, 100])
@pytest.mark.parametrize("dtype", [*WIDE.values(), np.float16, (np.float32, bfloat16)], ids=str)
def test_pairs_of_bfloat16_are_for_bfloat16_alone(monkeypatch, dtype, M):
    """All else is computed as by the next kernel, so that the other tests need not be run for both."""
    arrays = draw(M=M, N=300, dtype=dtype)
    results = []
    for name in *PAIRS_OF_BFLOAT16, "avx512":
        monkeypatch.setattr(kernels, "default", KERNELS[name])
        results.append(sdpa.attention(*arrays, causal=True, return_lse=True))
    for one, *others in zip(*results):
        for other in others:
            assert_same_bits(one, other)


@pytest.mark.skipif(not PAIRS_OF_BFLOAT16, reason="this CPU does not multiply pairs of bfloat16")
@pytest.mark.parametrize("M", [1, 3, 100])
def test_pairs_of_bfloat16_are_multiplied(monkeypatch, M):
    """Of few rows by all but AMX, beside which numbers are multiplied faster."""
    arrays = draw(M=M, N=300, dtype=bfloat16)
    results = []
    for name in *PAIRS_OF_BFLOAT16, "avx512":
        monkeypatch.setattr(kernels, "default", KERNELS[name])
        results.append(sdpa.attention(*arrays, out=np.empty((*arrays[0].shape[:-1], arrays[2].shape[-1]), np.float32)))
    *own, widened = results
    for name, out in zip(PAIRS_OF_BFLOAT16, own):
        assert (out == widened).all() == (name == "amx" and M < 100)


def test_build_info():
    info = sdpa.build_info()
    assert info["version"] == sdpa.__version__
    assert info["kernels"] == sdpa.kernels() and info["kernel"] in info["kernels"]
    assert info["threads"] in ("openmp", "pool", "none") and info["openmp"] == (info["threads"] == "openmp")
    assert info["usable_cpus"] >= 1 and isinstance(info["openmp"], bool) and info["compiler"] and info["machine"]


@pytest.mark.skipif(not shutil.which("nm"), reason="nm is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="nm speaks otherwise on this system")
def test_only_the_entry_of_the_module_is_exported():
    listed = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__core"]


# explain


SEEN = {  # options, who sees whom among 40 queries and 100 keys
    "full": ({}, np.ones((40, 100), bool)),
    "causal": (dict(causal=True), np.tri(40, 100, 60, dtype=bool)),
    "top left": (dict(causal=True, q_offset=0), np.tri(40, 100, dtype=bool)),
    "behind": (dict(causal=True, q_offset=500), np.ones((40, 100), bool)),
    "before": (dict(causal=True, q_offset=-100), np.zeros((40, 100), bool)),
    "window": (dict(window=(5, 3)), np.tri(40, 100, 63, dtype=bool) & ~np.tri(40, 100, 54, dtype=bool)),
    "left": (dict(window=(5, None)), ~np.tri(40, 100, 54, dtype=bool)),
    "lengths": (dict(kv_lengths=70), np.ones((40, 100), bool) & (np.arange(100) < 70)),
    "causal and lengths": (dict(causal=True, kv_lengths=70), np.tri(40, 100, 30, dtype=bool)),
    "mask, which is not counted": (dict(mask=np.zeros(100, bool)), np.ones((40, 100), bool)),
}


@on_kernels(WIDE, HALF, half="best")
@pytest.mark.parametrize("options, seen", SEEN.values(), ids=SEEN)
def test_work(kernel, options, seen, dtype):
    arrays = draw(2, 4, 2, 40, 100, 16, 8, dtype=dtype)
    told = sdpa.explain(*arrays, **options)
    assert told.flops == 2 * (2 * 4) * int(seen.sum()) * (16 + 8)
    assert told.bytes == sum(x.nbytes for x in arrays) + arrays[0].itemsize * (2 * 4 * 40 * 8)
    assert told.kernel == kernel.name and told.dtype == np.dtype(dtype).name


def test_flops_add_up_over_batches():
    arrays = draw(2, 4, 2, 40, 100, 16, 8)
    told = sdpa.explain(*arrays, kv_lengths=[10, 90], q_offset=[0, 5], causal=True)
    first = sdpa.explain(*[x[0] for x in arrays], kv_lengths=10, q_offset=0, causal=True)
    second = sdpa.explain(*[x[1] for x in arrays], kv_lengths=90, q_offset=5, causal=True)
    assert told.flops == first.flops + second.flops


def test_threads_and_tasks(kernel):
    large, small = draw(1, 8, 8, 512, 512, 64, 64), draw(1, 1, 1, 8, 8, 4, 4)
    assert sdpa.explain(*small).threads == sdpa.explain(*large, threads=1).threads == 1
    told = sdpa.explain(*large, threads=3)
    assert told.threads == 3 and told.tasks >= 8 and told.rows_per_task * told.tasks >= 8 * 512
    assert "3 threads" in "\n".join(told.why)
    one = sdpa.explain(*draw(1, 1, 1, 512, 512, 64, 64), threads=4)
    assert one.threads == 4 and one.tasks >= 4
    few = sdpa.explain(*draw(1, 1, 1, 2, 512, 64, 64), threads=4)
    assert few.threads <= few.tasks
    assert sdpa.explain(*large, threads=2, causal=True).tasks >= sdpa.explain(*large, threads=2).tasks


def test_reasons_in_the_singular(kernel):
    told = sdpa.explain(*draw(1, 1, 1, 300, 300, 16, 16), threads=1000)
    assert told.tasks > 1 and not any(" 1 tasks" in reason for reason in told.why)
    one = sdpa.explain(*draw(1, 1, 1, 1, 16, 16, 16), threads=4)
    assert one.tasks == 1 and "there is 1 task for 4 threads" in one.why


def test_reasons(kernel):
    arrays = draw()
    told = sdpa.explain(*arrays, out=None, return_lse=True)
    text = str(told)
    assert all(str(value) in text for value in told[:-1]) and all(reason in text for reason in told.why)
    assert all(name in text for name in told._fields[:-1])
    assert "2 query heads" in text and "K and V are read once" in text
    assert "query heads of a key/value head" not in str(sdpa.explain(*draw(G=4)))
    best = sdpa.kernels()[0]
    assert f"{best} is the best" in text if kernel.name == best else "SDPA_KERNEL" in text and best in text
    assert told.scratch_bytes > 0 and told.keys_per_block > 0 and told.engine


# Memory: beyond inputs and results under 2 MB for each thread, whatever the number of keys.

MEMORY = {
    "plain": (np.asarray, {}),
    "causal": (np.asarray, dict(causal=True)),
    "heads inside": (lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2), {}),
    "Fortran order": (np.asfortranarray, dict(causal=True)),
    "mask and bias": (np.asarray, dict(mask=np.ones(1, bool), bias=np.zeros((1, 1)))),
    "everything": (np.asfortranarray, dict(window=(None, 5), softcap=3.0, sinks=np.ones(2), alibi_slopes=np.ones(2))),
}


@on_kernels({"float32": np.float32}, HALF, half="best")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("keys", [1000, 100_000])
@pytest.mark.parametrize("layout, options", MEMORY.values(), ids=MEMORY)
def test_memory_of_a_call(kernel, layout, options, keys, threads, dtype):
    arrays = [layout(x) for x in draw(1, 2, 1, 33, keys, 32, 32, dtype=dtype)]
    extra = extra_memory(*arrays, threads=threads, **options)
    told = sdpa.explain(*arrays, threads=threads, **options)
    assert told.scratch_bytes / threads <= extra < 2e6 * threads  # the caller may do it alone
    assert told.threads == threads


@on_kernels(WIDE, HALF, half="best")
def test_memory_with_large_heads(kernel, dtype):
    arrays = draw(1, 1, 1, 130, 1000, 256, 256, dtype=dtype)
    assert extra_memory(*arrays, threads=1) < 2e6


def test_a_mask_is_not_expanded(kernel):
    query, key, value = draw(1, 8, 8, 1, 20_000, 4, 4)
    query = np.broadcast_to(query, (1, 8, 500, 4))
    mask, bias = rng(0).random((1, 20_000)) < 0.01, np.zeros((8, 1, 1), np.float32)
    assert extra_memory(query, key, value, mask=mask, bias=bias, threads=1) < 2e6


@pytest.mark.parametrize("rows, per_task", [(13, 13), (64, 64), (65, 48), (197, 64), (1024, 64)])
def test_explain_counts_the_rows_of_a_task(rows, per_task):
    """With AVX-512 a vector holds 16 rows, and a task up to four vectors."""
    if "avx512" not in sdpa.kernels():
        pytest.skip("this CPU has no AVX-512")
    query = np.zeros((1, 1, rows, 64), np.float32)
    assert sdpa.explain(query, query, query, threads=1).rows_per_task == per_task
