"""pytest-benchmark over the table of workloads; `pytest benchmarks --benchmark-disable` is a smoke test."""

import numpy as np
import pytest

import sdpa
from benchmarks.measure.adapting import Unsupported
from benchmarks.measure.worker import outputs
from benchmarks.peers import IMPLEMENTATIONS, adapter_of
from benchmarks.workloads import WORKLOADS

SMOKE_BYTES = 1e8  # to be drawn
SMOKE_FLOPS = 2e10  # two seconds for the plainest kernel on one core


@pytest.mark.parametrize("name", WORKLOADS)
def bench_attention(benchmark, name):
    workload = WORKLOADS[name] if benchmark.enabled else affordable(WORKLOADS[name])
    if workload.kind == "backward" and not hasattr(sdpa, "attention_backward"):
        pytest.skip("there is no attention_backward")
    try:
        call, result = adapter_of(IMPLEMENTATIONS["sdpa"], workload)(workload)
    except Unsupported as error:  # for want of a library that it works with
        pytest.skip(str(error))
    benchmark.group = name
    benchmark.extra_info |= {"flops": workload.flops, "scores": workload.scores, "bytes": workload.bytes}
    for out in outputs(result(benchmark(call))):
        assert np.isfinite(out.astype(np.float32)).all()


def affordable(workload):
    """The workload, or a shrunk one where it would take more than seconds."""
    return workload if workload.flops <= SMOKE_FLOPS and workload.bytes <= SMOKE_BYTES else workload.shrunk()
