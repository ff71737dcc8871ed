"""The simulation of many threads, by numbers worked out by hand; and what it says of some workloads."""

import numpy as np
import pytest

from benchmarks.measure.libraries import OURS
from benchmarks.peers import IMPLEMENTATIONS, adapter_of
from benchmarks.studies import scaling
from benchmarks.workloads import WORKLOADS
from sdpa import _core
from sdpa._runtime import threads as _threads


@pytest.fixture(autouse=True)
def many_threads(monkeypatch):
    monkeypatch.setattr(_threads, "MOST", max(scaling.THREADS))
    monkeypatch.setenv("SDPA_NUM_THREADS", "1")


@pytest.mark.parametrize(
    "threads, sharing, chunk, work, last",
    [
        (1, "by chunks", 1, [3, 1, 2], 6),
        (2, "by chunks", 1, [3, 1, 1, 1], 3),
        (2, "by chunks", 1, [1, 1, 1, 3], 4),
        (2, "by chunks", 2, [1, 1, 1, 3], 4),
        (3, "by chunks", 1, [5, 1], 5),
        (2, "equally", 1, [1, 1, 5, 1, 1], 7),
        (2, "neighbours", 1, [1, 1, 1, 1, 1, 1], 3),
        (2, "neighbours", 1, [3, 3, 1, 1, 1, 1], 7),
    ],
)
def test_when_the_last_thread_ends(threads, sharing, chunk, work, last):
    assert scaling.longest(_core.Region(threads, sharing, chunk, np.array(work, float))) == last


def test_what_is_said_of_a_workload():
    one = scaling.Scaled(WORKLOADS["decode-4k-fp32"], 6.4e-3, {1: 1.0, 64: 0.8, 128: 0.5})
    assert one.enough(128) and not one.enough(129)
    assert one.time(64) == pytest.approx(6.4e-3 / 51.2)
    assert one.demand(64) == pytest.approx(51.2 * one.demand(1))
    assert one.missed() == [64, 128]
    assert scaling.format_share(one, 64) == "**0.80**" and scaling.format_share(one, 1) == "1.00"
    assert scaling.format_share(one._replace(seconds=1e-3), 64) == "(0.80)"


# Of each kind of work one that has 50 µs for each of so many threads.
@pytest.mark.parametrize(
    "name, most",
    [
        ("prefill-2048-full-fp32", 192), ("prefill-2048-causal-fp32", 192), ("gqa-1024-d128-causal-bf16", 128),
        ("bert-fp32", 32), ("window-512-fp32", 128), ("decode-32k-fp32", 64), ("decode-b4-8k-bf16", 32),
        ("chunk-64-fp32", 64), ("bwd-1024-full-fp32", 64), ("bwd-1024-causal-fp32", 8), ("bwd-bert-bf16", 64),
        ("linear-1024-gelu-fp32", 128), ("ffn-bert-128-fp32", 16),
    ],
)  # fmt: skip
def test_threads_have_work(name, most):
    workload = WORKLOADS[name]
    call, _ = adapter_of(IMPLEMENTATIONS[OURS], workload)(workload)
    for threads in (count for count in scaling.THREADS if count <= most):
        assert scaling.busy_share(call, threads) >= scaling.aim(threads), threads


def test_the_document_has_places_for_the_tables(tmp_path, monkeypatch):
    document = tmp_path / "scaling.md"
    document.write_text(scaling.DOCUMENT.read_text())
    monkeypatch.setattr(scaling, "DOCUMENT", document)
    monkeypatch.setattr(scaling, "CHART", document.with_suffix(".svg"))
    results = [scaling.Scaled(WORKLOADS[scaling.CHARTED[0]], 1e-3, {1: 1.0, 64: 0.9})]
    scaling.write(results, (1, 64))
    assert "| decode-4k-bf16 | 1 | 1.00 | (0.90) |" in document.read_text()
    assert "<svg" in document.with_suffix(".svg").read_text()
