"""The memory of a call: adapters that take a known number of bytes, and what must not grow with the length."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import memory
from benchmarks.measure.runner import Process
from benchmarks.report import tables
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.attention import Attention

MB = 1 << 20
SMALL = Attention("small", 1, 4, 4, 128, 128, 64)
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say peaks")


def touched(nbytes):
    return np.ones(nbytes, np.uint8)


def result_of(workload):
    return touched(workload.result_bytes)


def one_array(workload):
    """60 MB beside its inputs."""
    inputs = touched(10 * MB)

    def call():
        extra = touched(60 * MB)
        return inputs, extra, result_of(workload)

    return call, None


def one_after_the_other(workload):
    """40 MB, freed, and 40 MB again."""

    def call():
        for _ in range(2):
            touched(40 * MB)
        return result_of(workload)

    return call, None


def small_blocks(workload):
    """32 MB in blocks that malloc does not give back by itself."""

    def call():
        blocks = [touched(64 << 10) for _ in range(512)]
        return blocks, result_of(workload)

    return call, None


def kept_array(workload):
    """20 MB that the first call makes and the others use, and 30 MB in each."""
    kept = {}

    def call():
        kept.setdefault("array", touched(20 * MB if workload == SMALL else MB))
        extra = touched(30 * MB)
        return extra, result_of(workload)

    return call, None


def arrays_for_checks(workload):
    """30 MB that only the function for checks holds, 20 MB in a call."""
    held = touched(30 * MB)
    return lambda: (touched(20 * MB), result_of(workload)), lambda: held


def large_result(workload):
    """Nothing but the result."""
    return lambda: result_of(workload), None


LONG = Attention("long", 1, 8, 8, 1 << 14, 1, 64)


@pytest.mark.parametrize(
    ("adapter", "workload", "extra", "kept"),
    [
        (one_array, SMALL, 60, 0),
        (one_after_the_other, SMALL, 40, 0),
        (small_blocks, SMALL, 32, 0),
        (kept_array, SMALL, 50, 20),
        (arrays_for_checks, SMALL, 20, 0),
        (large_result, LONG, 0, 0),
    ],
)
def test_known_bytes_are_found(adapter, workload, extra, kept):
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        usage = fresh.apply(memory.usage, (adapter, workload))
    assert usage.extra / MB == pytest.approx(extra, rel=0.03, abs=1)
    assert usage.kept / MB == pytest.approx(kept, rel=0.03, abs=1)


def test_memory_does_not_grow_with_the_scores():
    """The scores of the longer are 32 MB more."""
    taken = memory.against_length(["sdpa", "numpy"], [128, 1024])
    scores = {length: 8 * length**2 * 4 for length in (128, 1024)}
    assert abs(taken["sdpa"][1024] - taken["sdpa"][128]) < 1.5 * MB
    growth = taken["numpy"][1024] - taken["numpy"][128]
    assert growth == pytest.approx(scores[1024] - scores[128], rel=0.2)


def test_what_cannot_be_done_has_no_memory():
    assert "no backward" in memory.measure("numpy", WORKLOADS["bwd-1024-full-fp32"])["unsupported"]
    assert memory.against_length(["numpy"], [1 << 20]) == {"numpy": {1 << 20: None}}


@pytest.mark.parametrize("form", [tables.text, tables.markdown])
def test_the_table(form):
    results = [
        {"workload": "bert-fp32", "implementation": "sdpa", "memory": {"extra": -2048, "kept": 0}},
        {"workload": "bert-fp32", "implementation": "torch", "memory": {"extra": 24_000_000, "kept": 20_000_000}},
        {"workload": "tiny-fp32", "implementation": "torch", "memory": {"unsupported": "too small"}},
        {"workload": "tiny-fp32", "implementation": "sdpa", "memory": {"extra": 2_000_000, "kept": 3_000_000}},
        {"workload": "tiny-fp32", "implementation": "read"},
    ]
    [table] = memory.sections(results, form)
    lines = [line.replace("|", " ").split() for line in table.splitlines()]
    assert lines[0] == ["extra", "MB", "arrays", "MB", "sdpa", "torch"]
    assert ["bert-fp32", f"{WORKLOADS['bert-fp32'].bytes / 1e6:.1f}", "0.0", "24.0", "(20.0", "kept)"] in lines
    assert ["tiny-fp32", "0.0", "2.0", "(2.0", "kept)"] in lines
    assert memory.sections(results[4:], form) == []


def test_a_process_says_where_its_library_is_from():
    process = Process("sdpa", {})
    try:
        assert Path(process.ask(do="origin")["origin"]) == Path(memory.__file__).resolve().parents[2]
    finally:
        process.close()
