"""The table of workloads against bounds worked out independently, its arrays against its sizes, the judging of errors,
and every command once, on little."""

import dataclasses
import json

import numpy as np
import pytest

import sdpa
from benchmarks import compare
from benchmarks.measure import machine, oracle, probe, reading, runner, variants, worker
from benchmarks.measure.adapting import Unsupported
from benchmarks.measure.machine import Machine
from benchmarks.measure.probe import COPY_PIECES, READ_PATTERNS, Probe
from benchmarks.peers import IMPLEMENTATIONS, PEERS, adapter_of
from benchmarks.peers.numpy import numpy_peer
from benchmarks.peers.torch import torch_peer
from benchmarks.report import report, rows
from benchmarks.report.report import with_text_between
from benchmarks.studies import accuracy, caches, projections
from benchmarks.workloads import DTYPES, WORKLOADS, restored, select
from benchmarks.workloads.attention import Attention, Backward, Layer
from benchmarks.workloads.layers import FeedForward, Linear, Norm
from sdpa import reference

ZEN4 = Machine(
    cpu="Zen 4",
    isa="avx512",
    lanes=16,
    threads=2,
    clock=3.7e9,
    fma_float32=232e9,
    fma_float64=116e9,
    fma_bfloat16=464e9,
    fma_float32_one_thread=116e9,
    fma_float64_one_thread=58e9,
    fma_bfloat16_one_thread=232e9,
    softmax=6.5e9,
    dram_read=60e9,
    l3_read=194e9,
    l3_bytes=32 << 20,
)

ZEN4_BOUNDS_MS = {
    "prefill-512-full-fp32": 2.48,
    "prefill-512-full-bf16": 1.32,
    "prefill-512-full-fp16": 2.48,
    "prefill-512-causal-fp32": 1.24,
    "prefill-512-causal-bf16": 0.659,
    "prefill-512-causal-fp16": 1.24,
    "prefill-2048-full-fp32": 39.6,
    "prefill-2048-full-bf16": 21.1,
    "prefill-2048-full-fp16": 39.6,
    "prefill-2048-causal-fp32": 19.8,
    "prefill-2048-causal-bf16": 10.6,
    "prefill-2048-causal-fp16": 19.8,
    "prefill-4096-d128-full-fp32": 306,
    "prefill-4096-d128-full-bf16": 158,
    "prefill-4096-d128-causal-fp32": 153,
    "prefill-4096-d128-causal-bf16": 79.2,
    "gqa-1024-d128-full-fp32": 76.6,
    "gqa-1024-d128-full-bf16": 39.6,
    "gqa-1024-d128-full-fp16": 76.6,
    "gqa-1024-d128-causal-fp32": 38.3,
    "gqa-1024-d128-causal-bf16": 19.8,
    "gqa-1024-d128-causal-fp16": 38.3,
    "bert-fp32": 1.86,
    "bert-bf16": 0.989,
    "bert-fp16": 1.86,
    "vit-197-fp32": 4.4,
    "vit-197-bf16": 2.34,
    "clip-77-fp32": 0.336,
    "clip-77-bf16": 0.179,
    "odd-1000-full-fp32": 9.44,
    "odd-1000-full-bf16": 5.03,
    "odd-1000-causal-fp32": 4.72,
    "odd-1000-causal-bf16": 2.52,
    "hdim-32-fp32": 5.27,
    "hdim-32-bf16": 2.96,
    "hdim-64-fp32": 9.9,
    "hdim-64-bf16": 5.27,
    "hdim-80-fp32": 12.2,
    "hdim-80-bf16": 6.43,
    "hdim-96-fp32": 14.5,
    "hdim-96-bf16": 7.59,
    "hdim-128-fp32": 19.2,
    "hdim-128-bf16": 9.9,
    "hdim-192-fp32": 28.4,
    "hdim-192-bf16": 14.5,
    "hdim-256-fp32": 37.7,
    "hdim-256-bf16": 19.2,
    "decode-4k-fp32": 0.56,
    "decode-4k-bf16": 0.155,
    "decode-4k-fp16": 0.299,
    "decode-4k-mha-fp32": 2.24,
    "decode-4k-mha-bf16": 1.12,
    "decode-4k-mha-fp16": 1.12,
    "decode-32k-fp32": 4.47,
    "decode-32k-bf16": 2.24,
    "decode-b4-8k-fp32": 4.48,
    "decode-b4-8k-bf16": 2.24,
    "decode-b4-8k-fp16": 2.4,
    "decode-short-fp32": 0.0187,
    "decode-short-bf16": 0.00967,
    "decode-3000-g5-fp32": 0.274,
    "decode-b4-2k-d64-fp32": 0.155,
    "decode-short-b4-d64-fp32": 0.0151,
    "decode-short-mha-fp32": 0.00814,
    "decode-cross-1500-fp32": 0.0475,
    "decode-cross-b4-1024-fp32": 0.0866,
    "decode-cross-2000-fp32": 0.106,
    "speculate-2-fp32": 0.299,
    "speculate-4-fp32": 0.599,
    "speculate-8-fp32": 1.2,
    "speculate-5-mha-fp32": 0.29,
    "chunk-16-fp32": 9.57,
    "chunk-16-bf16": 4.95,
    "chunk-64-fp32": 38.2,
    "chunk-64-bf16": 19.7,
    "tiny-fp32": 1.58e-05,
    "tiny-bf16": 7.92e-06,
    "small-32-fp32": 0.00483,
    "cross-77-fp32": 3.87,
    "cross-77-bf16": 2.13,
    "cross-512x1500-fp32": 25.4,
    "mask-pad-fp32": 8.36,
    "mask-pad-bf16": 4.45,
    "mask-bool-fp32": 9.9,
    "mask-bool-bf16": 5.27,
    "mask-add-fp32": 9.9,
    "mask-add-bf16": 5.27,
    "window-512-fp32": 18.6,
    "window-512-bf16": 9.89,
    "window-128-8192-fp32": 9.82,
    "window-200-3000-fp32": 10.6,
    "many-16-fp32": 0.619,
    "many-32-fp32": 0.989,
    "many-64-fp32": 2.48,
    "swin-49-fp32": 0.386,
    "swin-49-b256-fp32": 1.16,
    "long-8192-full-fp32": 317,
    "long-8192-causal-fp32": 158,
    "long-16384-fp32": 317,
    "bwd-1024-full-fp32": 33,
    "bwd-1024-causal-fp32": 16.5,
    "bwd-1024-causal-bf16": 8.42,
    "bwd-bert-fp32": 6.2,
    "bwd-gqa-1024-causal-fp32": 65.4,
    "bwd-64-d32-fp32": 2.11,
    "bwd-50-fp32": 1.89,
    "layer-32-fp32": 0.17,
    "layer-b2-20-fp32": 0.209,
    "layer-b8-128-fp32": 22.7,
    "layer-b8-128-bf16": 11.4,
    "layer-1024-fp32": 35.7,
    "layer-1024-bf16": 18.3,
    "linear-1-4096-fp32": 4.48,
    "linear-1-768x3072-fp32": 0.0488,
    "linear-1-1024-fp32": 0.0217,
    "linear-4-4096-fp32": 4.48,
    "linear-4-768x3072-fp32": 0.0814,
    "linear-4-1024-fp32": 0.0362,
    "linear-16-4096-fp32": 9.26,
    "linear-16-768x3072-fp32": 0.325,
    "linear-16-1024-fp32": 0.145,
    "linear-7-1000x2600-fp32": 0.157,
    "linear-1024-gelu-fp32": 20.8,
    "ffn-bert-1-fp32": 0.0974,
    "ffn-llama-1-fp32": 0.577,
    "ffn-bert-16-fp32": 0.651,
    "ffn-llama-16-fp32": 1.19,
    "ffn-bert-128-fp32": 5.21,
    "ffn-llama-128-fp32": 9.55,
    "ffn-bert-1024-fp32": 41.7,
    "ffn-llama-1024-fp32": 76.4,
    "norm-layer-1024x768-fp32": 0.0649,
    "norm-layer-8192x1024-fp32": 2.24,
    "norm-layer-1x4096-fp32": 0.000338,
    "norm-rms-1024x768-fp32": 0.0649,
    "norm-rms-8192x1024-fp32": 2.24,
    "norm-rms-1x4096-fp32": 0.000338,
    "model-bert-base-8x128-fp32": 772,
    "model-bert-base-1x128-fp32": 96.5,
    "model-bert-base-3x77-fp32": 172,
    "model-minilm-32x64-lengths-fp32": 140,
    "model-minilm-8x256-fp32": 211,
    "model-minilm-1x16-fp32": 1.48,
    "model-llama-prefill-512-fp32": 627,
    "model-llama-token-512-fp32": 11.4,
    "model-llama-token-4096-fp32": 12.9,
    "model-llama-5-tokens-999-fp32": 13.2,
    "hf-bert-base-8x128-fp32": 772,
    "hf-llama-token-2048-fp32": 8.76,
    "hf-llama-token-4096-fp32": 9.32,
}


@pytest.mark.parametrize("name", ZEN4_BOUNDS_MS)
def test_bound_is_the_known_one(name):
    assert WORKLOADS[name].bound(ZEN4) * 1e3 == pytest.approx(ZEN4_BOUNDS_MS[name], rel=0.0051)  # of three digits


def test_every_float32_workload_has_a_known_bound():
    assert {name for name in WORKLOADS if name.endswith("-fp32")} <= set(ZEN4_BOUNDS_MS)


@pytest.mark.parametrize("dtype_name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", ["bert", "clip-77", "mask-pad", "mask-bool", "mask-add"])
def test_drawn_arrays_have_the_stated_bytes(case, dtype_name):
    workload = WORKLOADS[f"{case}-{dtype_name}"]
    assert workload.dtype == DTYPES[dtype_name]
    arrays, options = workload.draw()
    drawn = [*arrays, *(option for option in options.values() if isinstance(option, np.ndarray))]
    assert all(array.dtype == workload.dtype for array in arrays)
    out = arrays[0].nbytes
    assert sum(array.nbytes for array in drawn) + out == workload.bytes


def test_a_workload_survives_json():
    for workload in WORKLOADS.values():
        assert restored(json.loads(json.dumps(workload.as_json()))) == workload


def test_two_draws_are_equal():
    first, second = (WORKLOADS["small-32-fp32"].draw()[0] for _ in range(2))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)


def test_float64_takes_twice_as_long():
    single = WORKLOADS["prefill-2048-full-fp32"]
    double = dataclasses.replace(single, dtype_name="fp64")
    assert double.bound(ZEN4) == pytest.approx(2 * single.bound(ZEN4))


def test_bfloat16_multiplies_at_its_own_rate():
    single, half = (WORKLOADS[f"prefill-2048-full-{dtype_name}"] for dtype_name in ("fp32", "bf16"))
    saved = single.flops * (1 / ZEN4.fma_float32 - 1 / ZEN4.fma_bfloat16)
    assert half.bound(ZEN4) == pytest.approx(single.bound(ZEN4) - saved)


def test_float16_multiplies_as_float32():
    single, half = (WORKLOADS[f"prefill-2048-full-{dtype_name}"] for dtype_name in ("fp32", "fp16"))
    assert half.bound(ZEN4) == single.bound(ZEN4)


@pytest.mark.parametrize("dtype_name", ["bf16", "fp16"])
def test_half_types_read_half_as_much(dtype_name):
    single, half = (WORKLOADS[f"decode-4k-mha-{name}"] for name in ("fp32", dtype_name))
    assert half.bound(ZEN4) == pytest.approx(single.bound(ZEN4) / 2)


@pytest.mark.parametrize("isa", ["baseline", "avx2", None])
def test_a_machine_is_measured_by_any_vectors(monkeypatch, isa):
    for rate in ("DRAM", "L3"):
        monkeypatch.setattr(machine, f"{rate}_BYTES_PER_THREAD", 1 << 20)
    monkeypatch.setattr(probe, "ROUND_SECONDS", 1e-4)
    here = machine.measure(isa)
    rates = {name: rate for name, rate in dataclasses.asdict(here).items() if isinstance(rate, float)}
    assert all(rate > 0 for rate in rates.values())
    for line in ("float32 FMA", "float64 FMA", "bfloat16 FMA", "softmax", "DRAM read", "L3 read"):
        assert f"\n{line}" in here.describe()


def test_where_no_cache_of_the_third_level_is_known_memory_is_read():
    unknown = dataclasses.replace(ZEN4, l3_bytes=0)
    assert unknown.bound(0, 0, 60e6, np.float32) == 1e-3 > ZEN4.bound(0, 0, 30e6, np.float32)


@pytest.mark.parametrize(
    "size, shared, cpus, expected",
    [
        ("32768K", "0-1", [0, 1], 6 << 20),
        ("16384K", "0-15", list(range(16)), 768 << 10),
        ("16384K", "0-3,8", [0, 8], 6 << 20),
        ("16384K", "0-7,16-23", list(range(32)), 768 << 10),  # the others have another such cache
        (None, None, [0, 1], 6 << 20),
    ],
)
def test_what_all_threads_read_fits_in_the_third_level_cache(monkeypatch, tmp_path, size, shared, cpus, expected):
    monkeypatch.setattr(machine, "CACHE", tmp_path)
    if size:
        (tmp_path / "size").write_text(f"{size}\n")
        (tmp_path / "shared_cpu_list").write_text(f"{shared}\n")
    assert machine.l3_bytes_per_thread(cpus) == expected


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_is_needed(monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(probe.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(SystemExit, match="is there a C compiler"):
        machine.measure()


def test_the_rate_of_bfloat16_is_told_where_there_is_one():
    assert "bfloat16 FMA as float32" in ZEN4.describe()
    assert "bfloat16 FMA    464.0 GFLOP/s" in dataclasses.replace(ZEN4, isa="avx512_bf16").describe()


TINY = Attention("tiny", 2, 4, 2, 67, 67, 16, causal=True)


def error_of(adapter, workload):
    """(the error of a peer, the largest that passes)."""
    call, result = adapter(workload)
    return oracle.judge(worker.outputs(result(call())), workload.expected())


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_what_numpy_gives_passes(dtype_name):
    error, allowed = error_of(numpy_peer, dataclasses.replace(TINY, dtype_name=dtype_name))
    assert error <= allowed


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_what_torch_gives_passes(dtype_name):
    pytest.importorskip("torch")
    error, allowed = error_of(torch_peer, dataclasses.replace(TINY, dtype_name=dtype_name))
    assert error <= allowed


@pytest.mark.parametrize(("better", "worse"), [("fp64", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")])
def test_what_a_narrower_type_gives_does_not_pass(better, worse):
    workload = dataclasses.replace(TINY, dtype_name=better)
    arrays, options = workload.draw()
    [(rows, exact, limit)] = workload.expected()
    given = oracle.attention(workload, rows, arrays, options, DTYPES[worse])
    assert np.abs(given - exact).max() > limit


@pytest.mark.parametrize("dtype_name", ["bf16", "fp16"])
def test_naive_results_of_half_types_are_of_these_types(dtype_name):
    workload = dataclasses.replace(TINY, dtype_name=dtype_name)
    out = oracle.attention(workload, oracle.sample_rows(workload.M), *workload.draw(), workload.dtype)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, out.astype(workload.dtype).astype(np.float32))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 2.0}, {"has_bias": True}, {"factor": 8}], ids=str
)
def test_the_table_of_errors(options):
    inputs = accuracy.Inputs("few", M=5, N=7 - 2 * ("causal" in options), D=8, plain=True, **options)
    text = accuracy.markdown({"float32": {inputs: accuracy.measure(inputs, np.dtype(np.float32), seeds=2)}}, seeds=2)
    for names in accuracy.alike(accuracy.measure(inputs, np.dtype(np.float32), seeds=2)):
        assert f"| few | {names} |" in text
        assert f"| float32 | {names} |" in text


def test_errors_are_counted_in_units():
    tally = accuracy.Tally()
    tally.add(np.array([1, 3], np.float32), np.array([1.0, 2.0]), np.array([0.5, 0.5]))
    assert tally.max == 2 and tally.rms == pytest.approx(2**0.5)


def test_text_is_put_between_two_lines():
    assert with_text_between("a\nBEGIN\nold\nEND\nz", "BEGIN", "new", "END") == "a\nBEGIN\nnew\nEND\nz"
    with pytest.raises(ValueError, match="in this order"):
        with_text_between("END BEGIN", "BEGIN", "new", "END")


def test_select_takes_parts_of_names_and_patterns():
    assert [workload.name for workload in select("small,decode-?k-fp32")] == ["decode-4k-fp32", "small-32-fp32"]
    assert [workload.name for workload in select("small,")] == ["small-32-fp32"] and len(select("")) == len(WORKLOADS)
    with pytest.raises(SystemExit, match="no workload matches 'nothing'; there are: prefill"):
        select("small,nothing")


# Reading, the bound of what memory limits.


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(reading, "TUNING_SECONDS", 0)


@pytest.mark.parametrize("pattern", READ_PATTERNS, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_word_is_read_once(pattern, threads):
    """Lengths below and above a step of all places, from places that are on a cache line and that are not."""
    probe = Probe()
    if not probe.has_threads:
        pytest.skip("the C compiler has no OpenMP")
    words = np.random.default_rng(0).integers(0, 2**64, size=20_000, dtype=np.uint64)
    for arrays in ([words[1:2]], [words[3:300], words[5:6]], [words[1:], words[8:]]):
        expected = sum(int(array.sum(dtype=np.uint64)) for array in arrays) % 2**64
        assert probe.reading(arrays, threads, *pattern)() == expected


@pytest.mark.parametrize("dtype_name", ["fp32", "bf16", "fp16"])
def test_reading_is_a_call_on_keys_and_values(dtype_name):
    workload = Attention("one", 2, 4, 2, 1, 99, 16, dtype_name=dtype_name)
    call, _ = reading.read_peer(workload)
    assert sum(array.nbytes for array in call.arrays) == workload.read_bytes
    assert call() == call()


def test_only_what_memory_limits_is_read():
    for name, workload in WORKLOADS.items():
        few_rows = (isinstance(workload, (Linear, FeedForward)) and workload.rows <= 16) or "-token" in name
        assert workload.limited_by_memory == (name.startswith(("decode-", "speculate-", "norm-")) or few_rows)
    with pytest.raises(Unsupported, match="memory limits only"):
        reading.read_peer(TINY)


@pytest.mark.parametrize("rows", [1, 1000])
def test_copying_is_a_call_on_the_rows(rows):
    workload = Norm("some", rows, 33)
    call, _ = reading.copy_peer(workload)
    arrays, to = call.arrays
    assert sum(array.nbytes for array in (*arrays, *to)) == workload.read_bytes
    arrays[0][...] = 5
    call()
    assert (to[0] == 5).all()


@pytest.mark.parametrize("piece", COPY_PIECES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_byte_is_copied(piece, threads):
    probe = Probe()
    if not probe.has_threads:
        pytest.skip("the C compiler has no OpenMP")
    arrays = [np.random.default_rng(0).integers(0, 256, size, np.uint8) for size in (0, 1, 100, 20_001)]
    to = [np.zeros(array.size + 1, np.uint8) for array in arrays]
    probe.copying(to, arrays, threads, piece)()
    for copied, array in zip(to, arrays, strict=True):
        np.testing.assert_array_equal(copied, np.append(array, 0))


def test_the_time_of_reading_is_the_bound():
    workload = WORKLOADS["decode-32k-fp32"]
    assert workload.bound(ZEN4, read_seconds=4e-3) == 4e-3
    assert workload.bound(ZEN4, read_seconds=1e-6) == workload.flops / ZEN4.fma_float32 + workload.scores / 13e9


def test_the_rates_of_reading_are_shown():
    results = [
        {"workload": "w", "implementation": name, "minimum": time, "median": time, "error": 0, "allowed": 0}
        for name, time in {"sdpa": 2e-3, "read": 1e-3, "ncnn": 1.5e-3}.items()
    ]
    [row] = rows.rows_of({"bounds": {"w": 1e-3}, "read_bytes": {"w": 10**8}, "results": results})
    cells = dict(zip(report.HEADER, report.detail(row), strict=True))
    assert cells["GB/s"] == "50 of 100" and cells["best peer"] == "ncnn" and cells["the others"] == ""
    assert (row.share, row.lead) == (0.5, 0.75)


def test_reading_and_what_is_wrong_outclass_nobody():
    workload = WORKLOADS["decode-short-fp32"]
    run = runner.Comparison([workload], [], {}, None)
    times = {"read": 1.0, "sdpa": 9.0, "near": 8.0, "far": 33.0, "wrong": 2.0}
    run.results[workload.name] = {
        name: runner.Result(workload.name, name, error=float(name == "wrong"), allowed=0.5, estimate=time)
        for name, time in times.items()
    }
    contenders = [result.implementation for result in run._contenders(workload, first=False)]
    assert contenders == ["read", "sdpa", "near", "wrong"]


# Gradients.

BACKWARD = Backward("tiny", 2, 4, 2, 67, 67, 16, causal=True)


@pytest.fixture
def backward():
    if not hasattr(reference, "attention_backward"):
        pytest.skip("there is no reference.attention_backward")
    return BACKWARD


def test_gradients_are_seven_products(backward):
    assert backward.flops == 3.5 * TINY.flops and backward.bytes == 2 * TINY.bytes


def test_one_kind_needs_an_adapter_of_its_own():
    with pytest.raises(Unsupported, match="no backward"):
        adapter_of(PEERS["numpy"], BACKWARD)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", ["sdpa", "torch", "torch_math"])
def test_gradients_pass(backward, name, dtype_name):
    if name == "sdpa" and not hasattr(sdpa, "attention_backward"):
        pytest.skip("there is no attention_backward")
    if name != "sdpa":
        pytest.importorskip("torch")
    workload = dataclasses.replace(backward, dtype_name=dtype_name)
    error, allowed = error_of(adapter_of(IMPLEMENTATIONS[name], workload), workload)
    assert error <= allowed


@pytest.mark.parametrize("index", range(4))
def test_a_wrong_gradient_does_not_pass(backward, index):
    arrays, options = backward.draw()
    checks = backward.expected()
    outputs = oracle.gradients(backward, arrays, options, np.float32)
    error, allowed = oracle.judge(outputs, checks)
    assert error <= allowed
    outputs[index][-1, -1, -1, -1] += 1e-3
    error, allowed = oracle.judge(outputs, checks)
    assert error > allowed


# Layers.

LAYER = Layer("tiny", 2, 4, 4, 67, 67, 16)


def test_a_layer_multiplies_by_its_weights():
    projections = 2 * (2 * 67) * (4 * 64 * 64)
    assert LAYER.flops == 4 * 2 * 4 * 67 * 67 * 16 + projections
    assert sum(array.nbytes for array in LAYER.draw()) == LAYER.bytes - (2 * 67 - 4) * 64 * 4


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", ["sdpa", "numpy", "torch", "torch_mha", "ort_attn", "ort_mha", "openvino"])
def test_layers_pass(name, dtype_name):
    if name not in ("sdpa", "numpy"):
        pytest.importorskip(PEERS[name].library)
    workload = dataclasses.replace(LAYER, dtype_name=dtype_name)
    try:
        error, allowed = error_of(adapter_of(IMPLEMENTATIONS[name], workload), workload)
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert error <= allowed


@pytest.mark.parametrize("index", range(1, 5))
def test_a_layer_with_another_weight_does_not_pass(monkeypatch, index):
    checks = LAYER.expected()
    arrays = LAYER.draw()
    assert np.less_equal(*oracle.judge([oracle.layer(LAYER, arrays, np.float32)], checks))
    arrays[index][..., -1] += 0.01
    assert not np.less_equal(*oracle.judge([oracle.layer(LAYER, arrays, np.float32)], checks))


@pytest.mark.parametrize("make", [projections.projection_variants, projections.layer_variants])
def test_projections_are_measured(make):
    pytest.importorskip("threadpoolctl")
    measured = variants.measure(variants.Comparison("some", "a title", lambda: make(LAYER)), rounds=1, seconds=0.01)
    assert len(measured["variants"]) == 3 and "BLAS on one thread" in variants.text_table(measured)


@pytest.mark.parametrize("make", [projections.projection_variants, projections.layer_variants])
def test_all_ways_to_project_give_the_same(make):
    pytest.importorskip("threadpoolctl")
    first, *others = make(LAYER)
    for other in others:
        np.testing.assert_allclose(other.call(), first.call().reshape(other.call().shape), atol=1e-5)


def test_what_is_expected_survives_a_file(tmp_path):
    checks = TINY.expected()
    oracle.save(tmp_path / "check.npz", checks)
    [(rows, exact, allowed)] = oracle.load(tmp_path / "check.npz")
    np.testing.assert_array_equal(exact, checks[0].exact)
    assert rows[-1] == TINY.M - 1 and allowed == checks[0].allowed


def test_a_result_that_is_not_a_number_does_not_pass():
    checks = TINY.expected()
    error, allowed = oracle.judge([np.full((TINY.B, TINY.H, TINY.M, TINY.D), np.nan)], checks)
    assert not error <= allowed


# Commands.


def test_compare_with_reading_and_a_peer(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare.machine, "measure", lambda isa: ZEN4)
    file = tmp_path / "result.json"
    options = ["--only", "decode-short-fp32", "--peers", "numpy", "--seconds", "0.1", "--rounds", "1", "--mem"]
    compare.main([*options, "--json", str(file)])
    printed = capsys.readouterr().out
    assert "geometric mean" in printed and "extra MB" in printed
    [row] = rows.rows_of(rows.read([file, file]))
    cells = dict(zip(report.HEADER, report.detail(row), strict=True))
    assert cells["best peer"] == "numpy" and cells["sdpa ms"] and "WRONG" not in cells["error"]
    if Probe().has_threads:
        assert " of " in cells["GB/s"]


SMALL_CACHES = {
    "int8": lambda: caches.int8_variants(64),
    "paged": lambda: caches.paged_variants(256),
    "step": lambda: caches.step_variants(np.dtype(np.float32), 8),
    "growing": lambda: caches.growing_variants(DTYPES["bf16"], 8, steps=4),
    "mixed": lambda: caches.mixed_variants((1, 20), (3, 9)),
}


@pytest.mark.parametrize("name", SMALL_CACHES)
def test_caches_are_measured(name):
    measured = variants.measure(variants.Comparison(name, "a title", SMALL_CACHES[name]), rounds=2, seconds=0.01)
    json.dumps(measured)
    labels = [variant["label"] for variant in measured["variants"]]
    for table in (variants.text_table(measured), variants.markdown_table(measured)):
        assert "a title" in table and all(label in table for label in labels)


@pytest.mark.parametrize("name", SMALL_CACHES)
def test_caches_that_are_compared_give_the_same(name):
    first, *others = SMALL_CACHES[name]()
    for _ in range(2 * first.steps):
        first.before()
        expected = packed(first.call())
        for other in others:
            other.before()
            np.testing.assert_allclose(packed(other.call()), expected, atol=0.02 if name == "int8" else 1e-5)


def packed(out):
    """Results of sequences as the rows of one array, in float32."""
    out = np.concatenate(out, axis=1).swapaxes(0, 1) if isinstance(out, list) else out
    return out.astype(np.float32)


def test_minimum_and_median_are_of_each_step():
    variant = variants.Variant("cycle", None, steps=2, samples=[1.0, 10.0, 3.0, 20.0, 2.0, 60.0])
    assert variant.minimum == 5.5 and variant.median == 11.0


def test_all_comparisons_have_a_name_of_their_own():
    names = [comparison.name for comparison in caches.COMPARISONS]
    assert len(set(names)) == len(names)
    assert [comparison.name for comparison in variants.selected(caches.COMPARISONS, "paged,mixed")] == [
        "paged-4096", "paged-32768", "mixed",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="no comparison matches"):
        variants.selected(caches.COMPARISONS, "nothing")


# int8.


@pytest.mark.parametrize("group", [32, 128])
def test_the_table_of_errors_of_int8(group):
    inputs = accuracy.Inputs("few", M=5, N=70, D=128, group=group)
    tallies = accuracy.measure(inputs, accuracy.INT8, seeds=2)
    assert 0 < tallies["NumPy"].rms < 1
    text = accuracy.markdown({"int8": {inputs: tallies}}, seeds=2)
    for names, kernel in accuracy.alike(tallies).items():
        assert f"| int8 | {names} |" in text
        assert 0.1 < accuracy.ratios(tallies, kernel, "NumPy")[0] <= 1.01
