"""pytest-benchmark over the table of workloads; `pytest benchmarks --benchmark-disable` is a smoke test."""

import dataclasses

import numpy as np
import pytest

import sdpa
from benchmarks.workloads import WORKLOADS

SMOKE_FLOPS = 2e10  # two seconds for the plainest kernel on one core


@pytest.mark.parametrize("name", WORKLOADS)
def bench_forward(benchmark, name):
    workload = WORKLOADS[name] if benchmark.enabled else shortened(WORKLOADS[name])
    arrays, options = workload.draw()
    benchmark.group = name
    benchmark.extra_info |= {"flops": workload.flops, "scores": workload.scores, "bytes": workload.bytes}
    out = benchmark(sdpa.attention, *arrays, **options)
    assert np.isfinite(out.astype(np.float32)).all()


def shortened(workload):
    """The workload with lengths halved until it is a matter of seconds."""
    while workload.flops > SMOKE_FLOPS:
        workload = dataclasses.replace(workload, M=workload.M // 2, N=workload.N // 2)
    return workload
