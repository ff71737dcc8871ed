"""What the tests of the engine share: kernels, arrays, layouts, and the unit in which errors are measured."""

import itertools
import os
import subprocess
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from ml_dtypes import bfloat16

import sdpa
from sdpa import _core, _kernels, reference

ROOT = Path(__file__).resolve().parent.parent
inf, nan = np.inf, np.nan
float16, float32, float64 = np.float16, np.float32, np.float64

# Which cases of a test run.


def pytest_addoption(parser):
    parser.addoption(
        "--cover", type=int, metavar="N",
        help="of each test run so many cases that each combination of N values of its parameters is in one; 0: one",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config, items):
    strength = config.getoption("cover")
    if strength is None:
        return
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in functions.values() for item in covering(cases, strength)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def covering(cases, strength):
    """Some of the cases of a test function, the same each time, that hold each combination of `strength` values of its
    parameters: first those with many that no other has, for which an order without a pattern is best."""
    parts = {}
    for case in cases:
        values = list(enumerate(case.callspec.id.split("-"))) if hasattr(case, "callspec") else []
        at_most = case.get_closest_marker("cover")
        together = min(strength, len(values), *(at_most.args if at_most else ()))
        parts[case] = set(itertools.combinations(values, together))
    cases = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    seen, kept = set(), []
    for most in range(max(map(len, parts.values())), -1, -1):
        for case in cases:
            if len(parts[case] - seen) > most:
                seen |= parts[case]
                kept.append(case)
    return kept


settings.register_profile("thorough", max_examples=100)
settings.register_profile("quick", max_examples=20)
settings.register_profile("few", max_examples=5)


def examples(count):
    """How many a property gets that has `count` of them without --hypothesis-profile."""
    return max(1, count * settings().max_examples // 100)


# A dtype, or that of query and that of key and value.
WIDE = {"float32": float32, "float64": float64}
HALF = {"float16": float16, "bfloat16": bfloat16}
MIXED = {
    "float64 over float32": (float64, float32),
    "float64 over float16": (float64, float16),
    "float64 over bfloat16": (float64, bfloat16),
    "float32 over float16": (float32, float16),
    "float32 over bfloat16": (float32, bfloat16),
}
DTYPES = WIDE | HALF | MIXED

# Kernels.  One that has its own arithmetic for bfloat16 is like the next in the list for all other dtypes.

KERNELS = {kernel.name: kernel for kernel in _core.kernels()}
PAIRS_OF_BFLOAT16 = "avx512_bf16"
WIDENING = {name: kernel for name, kernel in KERNELS.items() if name != PAIRS_OF_BFLOAT16}


@pytest.fixture(params=WIDENING.values(), ids=WIDENING)
def kernel(request, monkeypatch):
    """Every test that takes this fixture runs once per instruction set."""
    monkeypatch.setattr(_kernels, "default", request.param)
    return request.param


def on_kernels(*groups, half="every"):
    """A test that takes `kernel` and `dtype` runs for all dtypes of the groups on all kernels where they differ.  What
    depends on the arithmetic and not on how arrays are read and written needs half types on the "best" kernels only:
    bfloat16 on the best, float16 on the best that widens."""
    dtypes = {name: dtype for group in groups for name, dtype in group.items()}
    best = {"bfloat16": next(iter(KERNELS)), "float16": next(iter(WIDENING))}
    cases = {}
    for name, kernel in KERNELS.items():
        for what, dtype in dtypes.items():
            new = name in WIDENING or what == "bfloat16"
            if new and (half == "every" or name == best.get(what, name)):
                cases[f"{name}-{what}"] = kernel, dtype
    return pytest.mark.parametrize("kernel, dtype", cases.values(), ids=cases, indirect=["kernel"])


def draw(B=2, H=4, G=2, M=37, N=133, D=20, E=12, dtype=float32, seed=0):
    """Query, key and value with normal elements, of one dtype or of (query's, key's and value's)."""
    normal = np.random.default_rng(seed).standard_normal
    query, others = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    shapes = ((B, H, M, D), query), ((B, G, N, D), others), ((B, G, N, E), others)
    return [normal(shape).astype(of) for shape, of in shapes]


# Accuracy.


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def units(actual, exact, scale, dtype):
    """Largest error in roundings of `scale`, which is what the same weights give for |value|: the size of what was
    summed, element by element."""
    unit = eps(dtype) * np.maximum(scale, float(ml_dtypes.finfo(dtype).tiny))
    return float((np.abs(actual - exact) / unit).max(initial=0))


def arithmetic(dtype):
    """The dtype of scores and sums, and of lse."""
    return float64 if dtype == float64 else float32


def exactly(dtype):
    """A dtype in which the oracle's own error does not count."""
    return np.longdouble if dtype == float64 else float64


def rounds_weights(query, key, value, **options):
    """Whether the current kernel rounds the weights to bfloat16."""
    return (
        _kernels.default.name == PAIRS_OF_BFLOAT16
        and query.dtype == key.dtype == value.dtype == bfloat16
        and "many rows" in sdpa.explain(query, key, value, **options).engine
    )


def allowed(naive, dtype, rounded_weights=False, factor=2, floor=4):
    """Largest error of a result, in `units` of its dtype, where NumPy has an error of `naive`, in those of the
    arithmetic: a multiple of that plus a rounding floor.  For a half type also one rounding of the result, which is
    half a unit, and where weights are rounded one of each of them and one of their sum."""
    wide = arithmetic(dtype)
    sums = (factor * naive + floor) * eps(wide) / eps(dtype)
    return sums if dtype == wide else sums + 0.5 + (0.5 + 0.5) * rounded_weights


def judge(out, lse, query, key, value, *, oracle=reference.attention, factor=2, floor=4, **options):
    """`out` and `lse` are as accurate as NumPy in the dtype of the arithmetic."""
    dtype, wide = query.dtype.type, arithmetic(query.dtype)
    exact, exact_lse = oracle(query, key, value, return_lse=True, dtype=exactly(dtype), **options)
    naive, naive_lse = oracle(query, key, value, return_lse=True, dtype=wide, **options)
    scale = oracle(query, key, np.abs(value), dtype=exactly(dtype), **options)
    assert out.dtype == dtype and lse.dtype == wide and out.shape == exact.shape and lse.shape == exact_lse.shape
    products = oracle is reference.attention  # only these are of pairs
    rounded = dtype == bfloat16 and products and rounds_weights(query, key, value, **options)
    most = allowed(units(naive, exact, scale, wide), dtype, rounded, factor, floor)
    assert units(out, exact, scale, dtype) <= most
    blind = np.isneginf(exact_lse)
    assert (np.isneginf(lse) == blind).all() and (out[blind] == 0).all()
    seen = [np.where(blind, 0, x) for x in (lse, exact_lse, naive_lse)]
    size = 1 + np.abs(seen[1])
    assert units(seen[0], seen[1], size, wide) <= factor * units(seen[2], seen[1], size, wide) + floor


def assert_same_bits(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = f"u{actual.dtype.itemsize}"
    actual, expected = (np.ascontiguousarray(x).view(bits) for x in (actual, expected))
    np.testing.assert_array_equal(actual, expected)


# Options by name, made for B = 2, H = 4 (G = 2) and any M and N.

GEOMETRY = {
    "causal": lambda B, H, M, N: dict(causal=True),
    "window": lambda B, H, M, N: dict(window=(N // 3, 4)),
    "window of the past": lambda B, H, M, N: dict(window=(40, -2)),
    "open window": lambda B, H, M, N: dict(window=(None, 3)),
    "offset": lambda B, H, M, N: dict(q_offset=N // 2 - M // 2),
    "offset per batch": lambda B, H, M, N: dict(q_offset=np.array([N - M - 5, -2])),
    "lengths": lambda B, H, M, N: dict(kv_lengths=np.array([N // 2, max(N - 1, 0)])),
    "lengths with 0": lambda B, H, M, N: dict(kv_lengths=np.array([0, N])),
}
SEEN = {
    "mask": lambda B, H, M, N: dict(mask=rng(1).random((B, H, M, N)) < 0.6),
    "mask of keys": lambda B, H, M, N: dict(mask=rng(2).random((B, 1, 1, N)) < 0.6),
    "mask of rows": lambda B, H, M, N: dict(mask=rng(3).random((M, 1)) < 0.6),
    "mask of whole blocks": lambda B, H, M, N: dict(mask=np.arange(N) % 256 >= 128),
    "bias": lambda B, H, M, N: dict(bias=rng(4).standard_normal((B, H, M, N))),
    "bias of heads": lambda B, H, M, N: dict(bias=rng(5).standard_normal((H, 1, N)).astype(np.float32)),
    "bias that hides": lambda B, H, M, N: dict(bias=np.where(rng(6).random((M, N)) < 0.4, -inf, 0.5)),
}
SCORES = {
    "scale": lambda B, H, M, N: dict(scale=0.3),
    "scale below 0": lambda B, H, M, N: dict(scale=-0.25),
    "scale 0": lambda B, H, M, N: dict(scale=0),
    "softcap": lambda B, H, M, N: dict(softcap=1.5),
    "wide softcap": lambda B, H, M, N: dict(softcap=1e4),
    "sinks": lambda B, H, M, N: dict(sinks=np.linspace(-3, 6, H)),
    "alibi": lambda B, H, M, N: dict(alibi_slopes=np.linspace(-0.05, 0.5, H)),
    "alibi per batch": lambda B, H, M, N: dict(alibi_slopes=rng(7).random((B, H))),
}
OPTIONS = {"nothing": lambda B, H, M, N: {}} | GEOMETRY | SEEN | SCORES


def blind_lse(lse, options):
    """What the lse (..., H, M) of rows that see no key is: the sinks, or -inf."""
    sinks = options.get("sinks")
    return np.broadcast_to(-inf if sinks is None else np.asarray(sinks)[..., None], lse.shape).astype(lse.dtype)


def rng(seed):
    return np.random.default_rng(seed)


def options_for(query, key, *names):
    """The named options, for the sizes of these arrays."""
    together = {}
    for name in names:
        together |= OPTIONS[name](*query.shape[:-1], key.shape[-2])
    return together


# Layouts: each gives an array of the same shape and dtype that lies differently in memory; those that broadcast
# repeat elements, so tests compare with a contiguous copy of what they get.


def backwards(axis):
    def layout(x):
        return x if -axis > x.ndim else np.flip(np.ascontiguousarray(np.flip(x, axis)), axis)

    return layout


def every(axis, step):
    def layout(x):
        if -axis > x.ndim:
            return x
        wide = np.full(tuple(n * step if i == x.ndim + axis else n for i, n in enumerate(x.shape)), 77, x.dtype)
        view = wide[(Ellipsis, slice(None, None, step), *[slice(None)] * (-axis - 1))]
        view[...] = x
        return view

    return layout


def repeated(axis):
    def layout(x):
        return x if -axis > x.ndim or not x.shape[axis] else np.broadcast_to(x.take([0], axis), x.shape)

    return layout


def heads_inside(x):
    """As (B, S, H, D) seen as (B, H, S, D)."""
    return x if x.ndim < 3 else np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def in_records(x):
    """A field of packed records: neither aligned nor adjacent."""
    records = np.zeros(x.shape, np.dtype([("before", "u1"), ("x", x.dtype)]))
    records["x"] = x
    return records["x"]


def off_by_a_byte(x):
    """Adjacent, not aligned."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "heads inside": heads_inside,
    "Fortran order": np.asfortranarray,
    "columns backwards": backwards(-1),
    "rows backwards": backwards(-2),
    "heads backwards": backwards(-3),
    "batches backwards": backwards(-4),
    "every third column": every(-1, 3),
    "every second row": every(-2, 2),
    "one column": repeated(-1),
    "one row": repeated(-2),
    "one head": repeated(-3),
    "one batch": repeated(-4),
    "read-only": read_only,
    "in records": in_records,
    "off by a byte": off_by_a_byte,
}


# The same of the axes before the heads, for arrays (2, 3, ...) or (2, 3, 4): no one stride leads from each batch to the
# next, but in the last ones.


def with_gaps(x):
    wide = np.full((len(x), x.shape[1] + 2, *x.shape[2:]), 77, x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


LEADING = {
    "gaps": with_gaps,
    "turned": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "one axis backwards": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "one axis repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "an axis of 1": lambda x: x[:, None],
    "an axis of 1 and any stride": lambda x: np.lib.stride_tricks.as_strided(
        x, (*x.shape[:1], 1, *x.shape[1:]), (*x.strides[:1], 10007 * x.itemsize, *x.strides[1:])
    ),
}


# Other processes.


def run_python(code, timeout=60, **environment):
    """What `code` prints in a Python of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SDPA_", "OMP_"))} | environment
    paths = [str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=timeout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr}")
    return done.stdout.strip()
