"""The C kernels without Python (arm/driver.c): built for Arm and run under qemu, and here with sanitizers."""

import itertools
import os
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from conftest import MIXED, PAIRS_OF_BFLOAT16, WIDE, arithmetic, bfloat16, eps, float16, float32, float64
from test_backward import assert_all_same, assert_struck_alike, judge, judge_packed, problem
from test_linear import assert_accurate
from test_linear import draw as draw_linear

import sdpa
from sdpa import _core, _kernels, reference

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
    # Two rows of a key/value head, so that these are few for every instruction set.
    "parts": ((2, 2, 1, 1, 2175, 16, 16), {}),
    "parts with tails": ((1, 2, 2, 2, 2305, 7, 9), {"causal": True}),
    "parts that a window cuts": ((1, 2, 2, 2, 3300, 8, 7), {"window": (1500, 3), "q_offset": [1600]}),
    "parts that lengths cut": ((4, 1, 1, 2, 3200, 6, 5), {"kv_lengths": [0, 1100, 2500, 3200], "causal": True}),
    "parts of which one is hidden": ((1, 2, 1, 1, 2300, 16, 16), {"mask": 0.3, "nan_from": 1100}),
    "parts, all at once": (
        (2, 4, 2, 1, 3100, 16, 17),
        {
            "window": (2500, 2), "kv_lengths": [3100, 2950], "mask": 0.8, "bias": True, "softcap": 4.0,
            "alibi_slopes": True, "sinks": True, "scale": 0.3, "q_offset": [3000, 2800],
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


STORED = {"int8": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}  # sdpa_dtype


OPTIONAL = ("mask", "bias", "begin_shift", "end_shift", "q_offset", "kv_lengths", "sinks", "alibi_slopes")


def run_driver(
    command, query, key, value, results, *, weights=None, lse=None, grad_lse=None, delta=None, grad_bias=None, more=(),
    scale, softcap, threads, key_scale=None, value_scale=None, group=0, q_starts=None, k_starts=None, pages=None,
    page_size=0, **given,
):  # fmt: skip
    """Fill `results`, of which some may be None, with what the driver gives for the arguments of a function of `_core`.
    weights, lse, delta and grad_bias are those of them that it must know of; `more`, the arrays that gradients take."""
    optional = [given.get(name) for name in OPTIONAL]
    columns = [x.shape[3] for x in (given["mask"], given["bias"], weights) if x is not None]
    integers = [STORED[query.dtype.name], STORED[key.dtype.name], *query.shape, *key.shape[:3]]
    integers += [0 if value is None else value.shape[3], max(columns, default=0), group]
    integers += [0 if q_starts is None else len(q_starts) - 1, 0 if pages is None else pages.shape[1]]
    integers += [array is not None for array in (weights, lse, *optional, grad_lse, delta)]
    integers += [0] * 4 if grad_bias is None else [stride != 0 for stride in grad_bias.strides]
    assert given["bias"] is None or given["bias"].dtype == query.dtype
    header = [np.array(integers, np.int64), np.array([scale, softcap], np.float64)]
    parts = [*header, query, key, value, key_scale, value_scale, *optional, q_starts, k_starts, pages, *more]
    problem = b"".join(part.tobytes() for part in parts if part is not None)  # in C order, whatever their strides
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the driver frees nothing but scratch
    run = subprocess.run(command, input=problem, capture_output=True, env=environment)
    assert run.returncode == 0 and not run.stderr, run.stderr.decode(errors="replace")
    at = 0
    for result in results:
        if result is not None:
            result[...] = np.frombuffer(run.stdout, result.dtype, result.size, at).reshape(result.shape)
            at += result.nbytes
    assert at == len(run.stdout)


def attend_by(command):
    """What takes the place of `_core.attend`."""

    def attend(kernel, query, key, *, value, out, weights, lse, **given):
        run_driver(command, query, key, value, (weights, out, lse), weights=weights, lse=lse, **given)

    return attend


def not_repeated(view):
    """Each element of what was broadcast once, to be written as it could be before."""
    once = view[tuple(slice(None if stride else 1) for stride in view.strides)]
    once.flags.writeable = True
    return once


def attend_backward_by(command):
    """What takes the place of `_core.attend_backward`."""

    def attend_backward(
        kernel, query, key, value, *, out, lse, grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias, delta,
        **given,
    ):  # fmt: skip
        assert (grad_query.dtype, grad_key.dtype, grad_value.dtype) == (query.dtype, key.dtype, value.dtype)
        results = grad_query, grad_key, grad_value, None if grad_bias is None else not_repeated(grad_bias), delta
        run_driver(
            command, query, key, value, results, more=(out, lse, grad_out, grad_lse), grad_lse=grad_lse, delta=delta,
            grad_bias=grad_bias, **given,
        )  # fmt: skip

    return attend_backward


def compare(result, exact, dtype):
    """(out, lse) with the oracle's; None for an lse: there is none."""
    wide = {"rtol": 1e-5, "atol": 4e-6} if arithmetic(dtype) != float64 else {"rtol": 1e-12, "atol": 1e-13}
    half = {"rtol": 1.1 * eps(dtype), "atol": eps(dtype)}
    out, lse = result
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(arithmetic(dtype)), exact[0], **wide if dtype == arithmetic(dtype) else half)
    if lse is not None:
        np.testing.assert_allclose(lse, exact[1], **wide)


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
    flags = ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    probe = subprocess.run([CC, *flags, folder / "probe.c", "-o", folder / "probe"], capture_output=True)
    if probe.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"{CC} has no address and undefined-behaviour sanitizers here")
    return [build(folder, CC, [isa for isa in sdpa.kernels() if isa != "baseline"], flags)]


DTYPES = {**WIDE, "float16": float16, "bfloat16": bfloat16, **MIXED}
# The cases that read and write in ways of their own.  What comes between is the same for all dtypes.
READING = ["one", "tails", "two key blocks", "grouped heads", "causal", "bias", "all at once"]
READING += [case for case in CASES if "NaN" in case]
PARTS = [case for case in CASES if case.startswith("parts")]
SHORT = [case for case in CASES if case not in PARTS]


def each(isas, cases=None):
    """For each of the two engines of the instruction sets, each dtype and the cases (None: those worth it)."""
    runs = {}
    for isa, engine, (name, dtype) in itertools.product(isas, ("many", "few"), DTYPES.items()):
        if isa == PAIRS_OF_BFLOAT16 and (name, engine) != ("bfloat16", "many"):
            continue  # it is like the next instruction set in all else
        for case in cases or (SHORT if name in WIDE else ["tails", "all at once"] if name in MIXED else READING):
            runs[f"{isa}-{engine} rows-{name}-{case}"] = isa, engine, dtype, case
    return pytest.mark.parametrize("isa, engine, dtype, case", runs.values(), ids=runs)


def check(command, case, dtype, weights=False):
    """`attention` by the driver, on the named problem, against the oracle."""
    arrays, options = draw(case, dtype)
    with mock.patch.object(_core, "attend", attend_by(command)):
        if weights:
            result = sdpa.attention_weights(*arrays[:2], **options), None
        else:
            result = sdpa.attention(*arrays, **options, return_lse=True)
    if weights:
        exact = reference.attention_weights(*arrays[:2], **options), None
    else:
        exact = reference.attention(*arrays, **options, return_lse=True)
    compare(result, exact, arrays[0].dtype)


ARM_ISAS = ["neon", "baseline"]


@each(ARM_ISAS)
def test_arm(arm, isa, engine, dtype, case):
    check([*arm, isa, engine, "1"], case, dtype)


@each(ARM_ISAS, ["all at once"])
def test_arm_weights(arm, isa, engine, dtype, case):
    check([*arm, isa, engine, "1"], case, dtype, weights=True)


@each(ARM_ISAS, ["causal"])
def test_arm_other_cuts(arm, isa, engine, dtype, case):
    check([*arm, isa, engine, "16"], case, dtype)


@each(sdpa.kernels())
def test_sanitized(sanitized, isa, engine, dtype, case):
    check([*sanitized, isa, engine, "1"], case, dtype)


@each(sdpa.kernels(), ["all at once"])
def test_sanitized_weights(sanitized, isa, engine, dtype, case):
    check([*sanitized, isa, engine, "1"], case, dtype, weights=True)


@each(sdpa.kernels(), ["causal"])
def test_sanitized_other_cuts(sanitized, isa, engine, dtype, case):
    check([*sanitized, isa, engine, "16"], case, dtype)


# Few rows and many keys: parts of the keys one after the other, and as units of their own.


def each_part(isas):
    runs = {
        f"{isa}-{name}-{case}-{threads} threads": (isa, dtype, case, threads)
        for isa, (name, dtype), case, threads in itertools.product(isas, DTYPES.items(), PARTS, ("1", "16"))
        if isa != PAIRS_OF_BFLOAT16 and (name in WIDE or case in ("parts", "parts, all at once"))
    }
    return pytest.mark.parametrize("isa, dtype, case, threads", runs.values(), ids=runs)


@each_part(ARM_ISAS)
def test_arm_parts(arm, isa, dtype, case, threads):
    check([*arm, isa, "few", threads], case, dtype, weights="all" in case and dtype in WIDE.values())


@each_part(sdpa.kernels())
def test_sanitized_parts(sanitized, isa, dtype, case, threads):
    check([*sanitized, isa, "few", threads], case, dtype, weights="all" in case and dtype in WIDE.values())


# Gradients: each head whole, and heads cut by tasks and by keys, some beside whole ones.  What the forward gives comes
# from this CPU.


def gradients_by(command, isa, call, backward=sdpa.attention_backward):
    """The gradients of one thread, whose bits are those of several."""
    results = []
    for threads in "1", "5":
        driver = attend_backward_by([*command, isa, "backward", threads])
        with mock.patch.object(_core, "attend_backward", driver):
            results.append(backward(**call))
    assert_all_same(*results)
    return results[0]


def judge_of(isa, judge, *arguments):
    """`judge` allows what the arithmetic of the kernel cannot do better."""
    with mock.patch.object(_kernels, "default", SimpleNamespace(name=isa)):
        judge(*arguments)


def without_nan(x):
    return np.where(np.isfinite(x), x, 0).astype(x.dtype)


def check_gradients(command, isa, case, dtype):
    """Where no row sees a key with NaN it has no say, and the oracle gets 0 for it."""
    arrays, options = draw(case, dtype)
    call = problem(*arrays, **options)
    grads = gradients_by(command, isa, call)
    if np.isfinite(call["out"]).all():
        judge_of(isa, judge, grads, call | {name: without_nan(call[name]) for name in ("key", "value")})
    else:
        assert_struck_alike(grads, call)


def dtype_of(isa):
    """One that each instruction set has its own arithmetic for."""
    return bfloat16 if isa == PAIRS_OF_BFLOAT16 else float32


def each_gradient(isas, wide, half, mixed):
    """The cases for each dtype."""
    runs = {}
    for isa, (name, dtype) in itertools.product(isas, DTYPES.items()):
        if isa == PAIRS_OF_BFLOAT16 and name != "bfloat16":
            continue
        for case in wide if name in WIDE else mixed if name in MIXED else half:
            runs[f"{isa}-{name}-{case}"] = isa, dtype, case
    return pytest.mark.parametrize("isa, dtype, case", runs.values(), ids=runs)


@each_gradient(["neon"], SHORT, SHORT, ["tails", "all at once"])
def test_arm_gradients(arm, isa, dtype, case):
    check_gradients(arm, isa, case, dtype)


@each_gradient(["baseline"], ["one", "tails", "all at once"], [], [])
def test_arm_gradients_in_plain_c(arm, isa, dtype, case):
    check_gradients(arm, isa, case, dtype)


@each_gradient(sdpa.kernels(), ["one", "tails", "all at once"], ["tails"], ["all at once"])
def test_sanitized_gradients(sanitized, isa, dtype, case):
    check_gradients(sanitized, isa, case, dtype)


def check_gradients_of_shared_bias(command, isa):
    """One bias for all rows, keys, heads or batches, or some of them: each is cut in its own way."""
    normal, dtype = np.random.default_rng(4).standard_normal, dtype_of(isa)
    arrays = [normal(shape).astype(dtype) for shape in ((2, 6, 25, 4), (2, 2, 530, 4), (2, 2, 530, 3))]
    for shape in (), (6, 1, 530), (2, 1, 25, 530), (1, 6, 25, 1):
        call = problem(*arrays, bias=np.asarray(normal(shape)).astype(dtype), softcap=2.5, window=(450, 3))
        judge_of(isa, judge, gradients_by(command, isa, call), call)


@pytest.mark.parametrize("isa", ARM_ISAS)
def test_arm_gradients_of_shared_bias(arm, isa):
    check_gradients_of_shared_bias(arm, isa)


@pytest.mark.parametrize("isa", sdpa.kernels())
def test_sanitized_gradients_of_shared_bias(sanitized, isa):
    check_gradients_of_shared_bias(sanitized, isa)


def check_gradients_beside_nan(command, isa):
    """What flows into rows that see nothing has no say; what flows into others reaches the keys that they see."""
    arrays, options = draw("causal, more queries than keys", dtype_of(isa))  # 90, 40
    call = problem(*arrays, **options)
    clean = gradients_by(command, isa, call)
    judge_of(isa, judge, clean, call)
    blind = call | {name: call[name].copy() for name in ("grad_out", "query", "out", "grad_lse")}
    for name in "grad_out", "query", "out", "grad_lse":
        blind[name][:, :, :50] = NAN
    assert_all_same(gradients_by(command, isa, blind), clean)
    places = {"grad_out": (0, 0, 70, 5), "query": (0, 0, 65), "value": (0, 0, 33), "key": (0, 0, 39)}
    for (name, place), garbage in itertools.product(places.items(), (NAN, INF)):
        struck = call | {name: call[name].copy()}
        struck[name][place] = garbage
        assert_struck_alike(gradients_by(command, isa, struck), struck)


@pytest.mark.parametrize("isa", ARM_ISAS)
def test_arm_gradients_beside_nan(arm, isa):
    check_gradients_beside_nan(arm, isa)


@pytest.mark.parametrize("isa", sdpa.kernels())
def test_sanitized_gradients_beside_nan(sanitized, isa):
    check_gradients_beside_nan(sanitized, isa)


# Sequences of lengths of their own: packed, and in pages.  Some have few rows, and some have many.

Q_COUNTS, K_COUNTS = (1, 0, 20, 2, 1, 3), (2200, 5, 60, 0, 37, 133)
PAGES = {"packed": None, "pages of 1": 1, "pages of 3": 3, "pages of 16": 16, "pages of 150": 150}


def draw_packed(dtype):
    """(query, key, value), where the sequences start, and options."""
    dtype, kv_dtype = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    H, G, D, E, S = 4, 2, 16, 19, len(Q_COUNTS)
    random = np.random.default_rng(2)
    starts = dict(cu_seqlens_q=np.cumsum([0, *Q_COUNTS]), cu_seqlens_k=np.cumsum([0, *K_COUNTS]))
    query = random.standard_normal((sum(Q_COUNTS), H, D)).astype(dtype)
    key, value = (random.standard_normal((sum(K_COUNTS), G, size)).astype(kv_dtype) for size in (D, E))
    pairs = H, sum(Q_COUNTS), max(K_COUNTS)
    options = dict(
        causal=True, window=(2070, 0), kv_lengths=np.array(K_COUNTS) - [50, 5, 0, 0, 7, 0],
        mask=random.random(pairs) < 0.7,
        bias=random.standard_normal(pairs).astype(dtype), scale=0.2, softcap=3.0, sinks=random.standard_normal((S, H)),
        alibi_slopes=random.random((S, H)) / 50,
    )  # fmt: skip
    return (query, key, value), starts, options


def check_packed(command, case, dtype):
    (query, key, value), starts, options = draw_packed(dtype)
    exact = reference.attention_varlen(query, key, value, **starts, **options, return_lse=True)
    with mock.patch.object(_core, "attend", attend_by(command)):
        if PAGES[case] is None:
            result = sdpa.attention_varlen(query, key, value, **starts, **options, return_lse=True)
        else:
            pages = sum(-(-count // PAGES[case]) for count in K_COUNTS)
            (_, G, D), E = key.shape, value.shape[2]
            cache = sdpa.PagedKVCache(pages, PAGES[case], G, D, value_dim=E, dtype=key.dtype)
            sequences = [cache.allocate() for _ in Q_COUNTS]
            for begin in 0, 1:  # of the tokens every second, so that the pages of sequences alternate
                counts = [(count + begin) // 2 for count in K_COUNTS]
                first = starts["cu_seqlens_k"][:-1] + begin * (np.array(K_COUNTS) // 2)
                rows = np.concatenate([at + np.arange(count) for at, count in zip(first, counts)])
                cache.append(sequences, key[rows], value[rows], cu_seqlens=np.cumsum([0, *counts]))
            del starts["cu_seqlens_k"]
            result = cache.attend(query, sequences, **starts, **options, return_lse=True)
    compare(result, exact, query.dtype)


def check_packed_gradients(command, isa):
    arrays, starts, options = draw_packed(dtype_of(isa))
    call = problem(*arrays, forward=sdpa.attention_varlen, **starts, **options)
    grads = gradients_by(command, isa, call, sdpa.attention_varlen_backward)
    judge_of(isa, judge_packed, grads, call)


@pytest.mark.parametrize("isa", ARM_ISAS)
def test_arm_packed_gradients(arm, isa):
    check_packed_gradients(arm, isa)


@pytest.mark.parametrize("isa", sdpa.kernels())
def test_sanitized_packed_gradients(sanitized, isa):
    check_packed_gradients(sanitized, isa)


def each_packed(isas):
    dtypes = ("float32", "bfloat16", "float64 over float16")
    runs = {
        f"{isa}-{name}-{case}": (isa, DTYPES[name], case) for isa, name, case in itertools.product(isas, dtypes, PAGES)
    }
    return pytest.mark.parametrize("isa, dtype, case", runs.values(), ids=runs)


@each_packed(ARM_ISAS)
def test_arm_sequences(arm, isa, dtype, case):
    check_packed([*arm, isa, "both", "1"], case, dtype)


@each_packed(sdpa.kernels())
def test_sanitized_sequences(sanitized, isa, dtype, case):
    check_packed([*sanitized, isa, "both", "16"], case, dtype)


# Numbers of 8 bits with scales.

INT8 = {  # (B, H, G, M, N, D, E), numbers with one scale, options
    "few rows": ((2, 2, 1, 1, 150, 64, 32), 32, {}),
    "few rows, tails": ((1, 2, 2, 1, 150, 40, 35), 32, {}),
    "few rows, parts": ((1, 2, 1, 1, 2300, 64, 128), 64, {"softcap": 2.0}),
    "many rows": ((2, 4, 2, 21, 150, 64, 40), 32, {"window": (30, 0)}),
    "one scale for all": ((1, 2, 1, 1, 150, 64, 64), 128, {}),
}


def check_int8(command, case, dtype):
    (B, H, G, M, N, D, E), group, options = INT8[case]
    random = np.random.default_rng(3)
    cache = sdpa.KVCache(B, G, D, value_dim=E, dtype=np.int8, group=group)
    cache.append(*(random.standard_normal((B, G, N, size)) for size in (D, E)))
    stored = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
    key, value = (x * np.repeat(scales.astype(float64), group, -1)[..., : x.shape[-1]] for x, scales in stored)
    query = random.standard_normal((B, H, M, D)).astype(dtype)
    with mock.patch.object(_core, "attend", attend_by(command)):
        result = cache.attend(query, return_lse=True, **options)
    exact = reference.attention(query, key, value, causal=True, return_lse=True, **options)
    compare(result, exact, query.dtype)


def each_int8(isas):
    dtypes = {name: dtype for name, dtype in DTYPES.items() if name not in MIXED}
    runs = {
        f"{isa}-{name}-{case}": (isa, dtype, case)
        for isa, (name, dtype), case in itertools.product(isas, dtypes.items(), INT8)
        if isa != PAIRS_OF_BFLOAT16
    }
    return pytest.mark.parametrize("isa, dtype, case", runs.values(), ids=runs)


@each_int8(ARM_ISAS)
def test_arm_int8(arm, isa, dtype, case):
    check_int8([*arm, isa, "both", "16"], case, dtype)


@each_int8(sdpa.kernels())
def test_sanitized_int8(sanitized, isa, dtype, case):
    check_int8([*sanitized, isa, "both", "16"], case, dtype)


# Projections.

LINEAR_SHAPES = [(1, 1, 1), (7, 77, 130), (20, 130, 65), (40, 64, 16)]  # (rows, ins, outs)


def each_linear(isas):
    runs = {
        f"{isa}-{name}-{shape}": (isa, dtype, shape)
        for isa, (name, dtype), shape in itertools.product(isas, DTYPES.items(), LINEAR_SHAPES)
        if name not in MIXED and (isa != PAIRS_OF_BFLOAT16 or name == "bfloat16")
    }
    return pytest.mark.parametrize("isa, dtype, shape", runs.values(), ids=runs)


def check_linear(command, isa, dtype, shape):
    """The bias is of the compute type there."""
    x, weight, bias = draw_linear(*shape, dtype)
    wide = dtype == arithmetic(dtype)
    given = bias[None, None, :, None] if wide else np.zeros((1, 1, len(bias), 0), dtype)
    y = np.empty((1, 1, shape[0], shape[2]), dtype)
    nothing = dict.fromkeys(OPTIONAL)
    command = [*command, isa, "linear", "1"]
    run_driver(command, x[None, None], weight[None, None], given, (y,), scale=1, softcap=0, threads=1, **nothing)
    assert_accurate(y[0, 0], x, weight, bias if wide else 0 * bias)


@each_linear(ARM_ISAS)
def test_arm_linear(arm, isa, dtype, shape):
    check_linear(arm, isa, dtype, shape)


@each_linear(sdpa.kernels())
def test_sanitized_linear(sanitized, isa, dtype, shape):
    check_linear(sanitized, isa, dtype, shape)
