"""The table of workloads against bounds worked out independently, its arrays against its sizes, and the judging of half
types."""

import dataclasses

import numpy as np
import pytest

from benchmarks import accuracy, oracle
from benchmarks.machine import Machine
from benchmarks.peers import numpy_peer, torch_peer
from benchmarks.report import with_text_between
from benchmarks.workloads import DTYPES, WORKLOADS, Workload, select

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
    "prefill-512-causal-fp32": 1.24,
    "prefill-2048-full-fp32": 39.6,
    "prefill-2048-causal-fp32": 19.8,
    "prefill-4096-d128-full-fp32": 306,
    "prefill-4096-d128-causal-fp32": 153,
    "gqa-1024-d128-full-fp32": 76.6,
    "gqa-1024-d128-causal-fp32": 38.3,
    "bert-fp32": 1.86,
    "vit-197-fp32": 4.4,
    "clip-77-fp32": 0.336,
    "odd-1000-full-fp32": 9.44,
    "odd-1000-causal-fp32": 4.72,
    "hdim-32-fp32": 5.27,
    "hdim-64-fp32": 9.9,
    "hdim-80-fp32": 12.2,
    "hdim-96-fp32": 14.5,
    "hdim-128-fp32": 19.2,
    "hdim-192-fp32": 28.4,
    "hdim-256-fp32": 37.7,
    "decode-4k-fp32": 0.56,
    "decode-4k-mha-fp32": 2.24,
    "decode-32k-fp32": 4.47,
    "decode-b4-8k-fp32": 4.48,
    "decode-short-fp32": 0.0187,
    "chunk-16-fp32": 9.57,
    "chunk-64-fp32": 38.2,
    "tiny-fp32": 1.58e-05,
    "small-32-fp32": 0.00483,
    "cross-77-fp32": 3.87,
    "cross-512x1500-fp32": 25.4,
    "mask-pad-fp32": 8.36,
    "mask-bool-fp32": 9.9,
    "mask-add-fp32": 9.9,
    "window-512-fp32": 18.6,
    "long-8192-full-fp32": 317,
    "long-8192-causal-fp32": 158,
    "long-16384-fp32": 317,
}


@pytest.mark.parametrize("name", ZEN4_BOUNDS_MS)
def test_bound_is_the_known_one(name):
    assert WORKLOADS[name].bound(ZEN4) * 1e3 == pytest.approx(ZEN4_BOUNDS_MS[name], rel=0.004)


def test_every_float32_workload_has_a_known_bound():
    assert {name for name in WORKLOADS if name.endswith("-fp32")} == set(ZEN4_BOUNDS_MS)


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


def test_the_rate_of_bfloat16_is_told_where_there_is_one():
    assert "bfloat16 FMA as float32" in ZEN4.describe()
    assert "bfloat16 FMA    464.0 GFLOP/s" in dataclasses.replace(ZEN4, isa="avx512_bf16").describe()


TINY = Workload("tiny", 2, 4, 2, 67, 67, 16, causal=True)


def error_of(adapter, workload):
    """(the error of a peer, the largest that passes)."""
    arrays, options = workload.draw()
    rows, exact, allowed = oracle.check(workload, arrays, options)
    call, result = adapter(workload)
    return np.abs(result(call())[:, :, rows].astype(np.float64) - exact).max(), allowed


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
    rows, exact, allowed = oracle.check(workload, arrays, options)
    given = oracle.attention(workload, rows, arrays, options, DTYPES[worse])
    assert np.abs(given - exact).max() > allowed


@pytest.mark.parametrize("dtype_name", ["bf16", "fp16"])
def test_naive_results_of_half_types_are_of_these_types(dtype_name):
    workload = dataclasses.replace(TINY, dtype_name=dtype_name)
    out = oracle.attention(workload, oracle.sample_rows(workload), *workload.draw(), workload.dtype)
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
    assert [workload.name for workload in select("tiny,decode-?k-fp32")] == ["decode-4k-fp32", "tiny-fp32"]
    with pytest.raises(SystemExit, match="no workload matches"):
        select("nothing")
