"""The table of workloads against bounds worked out independently, and its arrays against its sizes."""

import dataclasses

import numpy as np
import pytest

from benchmarks.machine import Machine
from benchmarks.workloads import WORKLOADS, select

ZEN4 = Machine(
    cpu="Zen 4",
    isa="avx512",
    lanes=16,
    threads=2,
    clock=3.7e9,
    fma_float32=232e9,
    fma_float64=116e9,
    fma_float32_one_thread=116e9,
    fma_float64_one_thread=58e9,
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


@pytest.mark.parametrize("name", ["bert-fp32", "clip-77-fp32", "mask-pad-fp32", "mask-bool-fp32", "mask-add-fp32"])
def test_drawn_arrays_have_the_stated_bytes(name):
    workload = WORKLOADS[name]
    arrays, options = workload.draw()
    drawn = [*arrays, *(option for option in options.values() if isinstance(option, np.ndarray))]
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


def test_select_takes_parts_of_names_and_patterns():
    assert [workload.name for workload in select("tiny,decode-?k-fp32")] == ["decode-4k-fp32", "tiny-fp32"]
    with pytest.raises(SystemExit, match="no workload matches"):
        select("nothing")
