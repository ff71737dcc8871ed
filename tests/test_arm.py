"""The C kernels without Python (arm/driver.c): built for Arm and run under qemu, and here with sanitizers."""

import itertools
import os
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import MIXED, PAIRS_OF_BFLOAT16, WIDE, arithmetic, bfloat16, eps, float16, float64

import sdpa
from sdpa import reference
from sdpa._problem import Problem

ROOT = Path(__file__).parents[1]
CC, ARM_CC, QEMU = os.environ.get("CC", "cc"), "aarch64-linux-gnu-gcc", "qemu-aarch64"
INF, NAN = np.inf, np.nan


# Each shape is (B, H, G, M, N, D, E), the sizes chosen for the tails they leave in rows, blocks of keys and features.
CASES = {
    "one": ((1, 1, 1, 1, 1, 1, 1), {}),
    "tails": ((2, 3, 3, 37, 203, 19, 13), {}),
    "two key blocks": ((1, 2, 2, 70, 300, 64, 64), {}),
    "grouped heads": ((2, 6, 2, 21, 150, 40, 24), {"causal": True}),
    "causal": ((1, 2, 1, 67, 67, 16, 16), {"causal": True}),
    "causal, more queries than keys": ((1, 1, 1, 90, 40, 8, 9), {"causal": True}),
    "window": ((1, 2, 2, 80, 260, 12, 20), {"window": (9, 3)}),
    "left window": ((1, 1, 1, 50, 200, 12, 7), {"window": (70, None), "causal": True}),
    "offset": ((2, 1, 1, 33, 150, 6, 5), {"causal": True, "q_offset": [0, -10]}),
    "lengths": ((3, 2, 1, 31, 141, 10, 11), {"kv_lengths": [0, 17, 141]}),
    "mask": ((2, 2, 2, 35, 170, 16, 16), {"mask": 0.3}),
    "mask of a padded batch": ((2, 2, 2, 35, 170, 16, 16), {"mask": "padding"}),
    "bias": ((1, 3, 3, 30, 155, 9, 10), {"bias": True}),
    "softcap": ((1, 2, 2, 30, 100, 16, 16), {"softcap": 2.5}),
    "scale": ((1, 2, 2, 30, 100, 16, 16), {"scale": -0.7}),
    "alibi": ((2, 4, 2, 30, 100, 16, 16), {"alibi_slopes": True, "causal": True}),
    "sinks": ((2, 4, 2, 30, 100, 16, 16), {"sinks": True}),
    "NaN in hidden keys and values": ((1, 2, 2, 40, 140, 16, 15), {"causal": True, "nan_from": 120}),
    "NaN in masked keys and values": ((1, 2, 1, 40, 140, 16, 15), {"mask": 0.3, "nan_from": 133}),
    "all at once": (
        (2, 4, 2, 45, 180, 24, 17),
        {
            "causal": True, "window": (60, None), "kv_lengths": [180, 95], "mask": 0.8, "bias": True, "softcap": 4.0,
            "alibi_slopes": True, "sinks": True, "scale": 0.3,
        },
    ),
}  # fmt: skip


def draw(case, dtype):
    """(query, key, value) and the options of `sdpa.reference.attention`."""
    (B, H, G, M, N, D, E), given = CASES[case]
    options = dict(given)
    random = np.random.default_rng(1)
    dtype, kv_dtype = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    query = random.standard_normal((B, H, M, D)).astype(dtype)
    key, value = (random.standard_normal(shape).astype(kv_dtype) for shape in ((B, G, N, D), (B, G, N, E)))
    if options.get("mask") == "padding":
        options["mask"] = np.broadcast_to(np.arange(N) < np.array([N, 20])[:B, None, None, None], (B, H, M, N))
    elif "mask" in options:
        options["mask"] = random.random((B, H, M, N)) < options["mask"]
    if "bias" in options:
        bias = random.standard_normal((B, H, M, N)).astype(dtype)
        options["bias"] = np.where(random.random(bias.shape) < 0.1, dtype(-INF), bias)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = random.random((B, H))
    if "sinks" in options:
        options["sinks"] = random.standard_normal((B, H))
    if "nan_from" in options:
        start = options.pop("nan_from")
        key[:, :, start:], value[:, :, start:] = NAN, INF
        if "mask" in options:
            options["mask"][..., start:] = False
    for name in ("q_offset", "kv_lengths"):
        if name in options:
            options[name] = np.array(options[name], np.int64)
    return (query, key, value), options


STORED = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # sdpa_dtype


def written(arrays, options, weights):
    """The problem as the driver reads it."""
    query, key, value = arrays
    problem = Problem(*arrays, **options)
    optional = {
        "mask": problem.mask,
        "bias": problem.bias,
        "begin_shift": problem.begin_shift,
        "end_shift": problem.end_shift,
        "q_offset": problem.q_offset,
        "kv_lengths": problem.kv_lengths,
        "sinks": problem.sinks,
        "alibi_slopes": problem.alibi_slopes,
    }
    (B, H, M, D), (_, G, N, E) = query.shape, value.shape
    integers = [STORED[query.dtype.name], STORED[key.dtype.name], B, H, G, M, N, D, E, weights]
    integers += [array is not None for array in optional.values()]
    numbers = [options.get("scale", D**-0.5), options.get("softcap", 0)]
    parts = [np.array(integers, np.int64), np.array(numbers, np.float64), *arrays]
    parts += [array for array in optional.values() if array is not None]
    return b"".join(part.tobytes() for part in parts)  # in C order, whatever their strides


def check(command, case, dtype, *, weights=False):
    """Runs the driver on the named problem and compares what it says with the oracle."""
    arrays, options = draw(case, dtype)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the driver frees nothing but scratch
    run = subprocess.run(command, input=written(arrays, options, weights), capture_output=True, env=environment)
    assert run.returncode == 0 and not run.stderr, run.stderr.decode(errors="replace")
    exact, exact_lse = reference.attention(*arrays, **options, return_lse=True)
    if weights:
        exact = reference.attention_weights(*arrays[:2], **options)
    dtype, lse_dtype = arrays[0].dtype, arithmetic(arrays[0].dtype)
    size = exact.size * dtype.itemsize
    result = np.frombuffer(run.stdout[:size], dtype).astype(lse_dtype).reshape(exact.shape)
    lse = np.frombuffer(run.stdout[size:], lse_dtype).reshape(exact_lse.shape)
    wide = {"rtol": 1e-5, "atol": 4e-6} if lse_dtype != float64 else {"rtol": 1e-12, "atol": 1e-13}
    half = {"rtol": 1.1 * eps(dtype), "atol": eps(dtype)}
    np.testing.assert_allclose(result, exact, **wide if dtype == lse_dtype else half)
    np.testing.assert_allclose(lse, exact_lse, **wide)


def build(folder, compiler, isas, flags):
    """The driver and the kernels, with the flags that setup.py has for each instruction set."""
    known = runpy.run_path(str(ROOT / "setup.py"))["ISAS"]
    flags = ["-std=c11", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", *flags]
    have = [f"-DSDPA_HAVE_{isa}" for isa in isas]
    jobs = [
        (
            ROOT / "csrc/kernel.c",
            [f"-DSDPA_ISA_{isa}", f"-DSDPA_REAL_BYTES={size}", f"-DSDPA_FEW_ROWS={few}", *isa_flags],
        )
        for isa, isa_flags, variants in [
            *((isa, known[isa].flags, known[isa].variants) for isa in isas),
            ("baseline", [], list(itertools.product((4, 8), (0, 1)))),
        ]
        for size, few in variants
    ]
    jobs += [(source, have) for source in (ROOT / "csrc/dispatch.c", ROOT / "csrc/task.c", ROOT / "tests/arm/driver.c")]

    def compile_one(number, source, more):
        subprocess.run([compiler, *flags, *more, "-c", source, "-o", folder / f"{number}.o"], check=True)
        return folder / f"{number}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: compile_one(job[0], *job[1]), enumerate(jobs)))
    subprocess.run([compiler, *flags, *objects, "-o", folder / "driver", "-lm"], check=True)
    return str(folder / "driver")


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """The command that runs the driver on a simulated Arm CPU."""
    for tool, package in ((ARM_CC, "gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"), (QEMU, "qemu-user")):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (Debian: {package})")
    return [QEMU, build(tmp_path_factory.mktemp("arm"), ARM_CC, ["neon"], ["-O2", "-static"])]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The command that runs the driver on this CPU, with every access and every operation checked."""
    folder = tmp_path_factory.mktemp("sanitized")
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    probe = subprocess.run([CC, *flags, folder / "probe.c", "-o", folder / "probe"], capture_output=True)
    if probe.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"{CC} has no address and undefined-behaviour sanitizers here")
    return [build(folder, CC, [isa for isa in sdpa.kernels() if isa != "baseline"], flags)]


DTYPES = {**WIDE, "float16": float16, "bfloat16": bfloat16, **MIXED}
# The cases that read and write in ways of their own.  What comes between is the same for all dtypes.
READING = ["one", "tails", "two key blocks", "grouped heads", "causal", "bias", "all at once"]
READING += [case for case in CASES if "NaN" in case]


def each(isas, cases=None):
    """For each of the two engines of the instruction sets, each dtype and the cases (None: those worth it)."""
    runs = {}
    for isa, few_rows, (name, dtype) in itertools.product(isas, ("0", "1"), DTYPES.items()):
        if isa == PAIRS_OF_BFLOAT16 and (name, few_rows) != ("bfloat16", "0"):
            continue  # it is like the next instruction set in all else
        for case in cases or (CASES if name in WIDE else ["tails", "all at once"] if name in MIXED else READING):
            runs[f"{isa}-{'few' if few_rows == '1' else 'many'} rows-{name}-{case}"] = isa, few_rows, dtype, case
    return pytest.mark.parametrize("isa, few_rows, dtype, case", runs.values(), ids=runs)


ARM_ISAS = ["neon", "baseline"]


@each(ARM_ISAS)
def test_arm(arm, isa, few_rows, dtype, case):
    check([*arm, isa, few_rows, "1"], case, dtype)


@each(ARM_ISAS, ["all at once"])
def test_arm_weights(arm, isa, few_rows, dtype, case):
    check([*arm, isa, few_rows, "1"], case, dtype, weights=True)


@each(ARM_ISAS, ["causal"])
def test_arm_other_cuts(arm, isa, few_rows, dtype, case):
    check([*arm, isa, few_rows, "16"], case, dtype)


@each(sdpa.kernels())
def test_sanitized(sanitized, isa, few_rows, dtype, case):
    check([*sanitized, isa, few_rows, "1"], case, dtype)


@each(sdpa.kernels(), ["all at once"])
def test_sanitized_weights(sanitized, isa, few_rows, dtype, case):
    check([*sanitized, isa, few_rows, "1"], case, dtype, weights=True)


@each(sdpa.kernels(), ["causal"])
def test_sanitized_other_cuts(sanitized, isa, few_rows, dtype, case):
    check([*sanitized, isa, few_rows, "16"], case, dtype)
