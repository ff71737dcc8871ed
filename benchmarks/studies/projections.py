"""What computes the projections of a layer best: kernels of this library, or NumPy's BLAS, on how many threads.

python -m benchmarks.studies.projections --update # half a minute; writes the tables into benchmarks/README.md
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sdpa
from benchmarks.measure import variants
from benchmarks.measure.variants import Comparison, Variant
from benchmarks.workloads import WORKLOADS
from sdpa._layer.linear import Linear


def blas_threads(count):
    """A context in which NumPy's BLAS uses so many threads; None: as it does by itself."""
    if count is None:
        return contextlib.nullcontext()
    import threadpoolctl

    return threadpoolctl.threadpool_limits(count, user_api="blas")


def on_blas(weight, bias):
    return lambda x: x @ weight.T + bias


def projection_variants(workload):
    """The projection to query, key and value alone."""
    x, weight, bias, *_ = workload.draw()
    for label, project, count in ways(weight, bias):
        yield Variant(label, lambda project=project, count=count: with_blas(count, project, x))


def layer_variants(workload):
    """Both projections around attention."""
    x, in_weight, in_bias, out_weight, out_bias = workload.draw()
    B, M, H, D = workload.B, workload.M, workload.H, workload.D

    def layer(project_in, project_out):
        heads = project_in(x).reshape(B, M, 3, H, D)
        out = sdpa.attention(*(heads[:, :, i].swapaxes(1, 2) for i in range(3)))
        return project_out(out.swapaxes(1, 2).reshape(B, M, H * D))

    for (label, project_in, count), (_, project_out, _) in zip(
        ways(in_weight, in_bias), ways(out_weight, out_bias), strict=True
    ):
        yield Variant(label, lambda pair=(project_in, project_out), count=count: with_blas(count, layer, *pair))


def ways(weight, bias):
    yield "kernels of this library", Linear(weight, bias), None
    yield "NumPy's BLAS, as it is", on_blas(weight, bias), None
    yield "NumPy's BLAS on one thread", on_blas(weight, bias), 1


def with_blas(count, function, *arguments):
    with blas_threads(count):
        return function(*arguments)


COMPARISONS = [
    Comparison(f"{name}-{case}", f"{title}, {case}", lambda make=make, case=case: make(WORKLOADS[case]))
    for case in ("layer-b8-128-fp32", "layer-1024-fp32")
    for name, title, make in (
        ("projection", "The projection to query, key and value", projection_variants),
        ("layer", "Projection, attention, projection", layer_variants),
    )
]

if __name__ == "__main__":
    variants.main(COMPARISONS, "benchmarks.studies.projections", __doc__)
