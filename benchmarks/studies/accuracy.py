"""How exact each kernel is in each dtype, next to NumPy and PyTorch in the same dtype.  README.md explains the tables.

python -m benchmarks.studies.accuracy                                          # prints the tables
python -m benchmarks.studies.accuracy --dtypes float16,bfloat16 --seeds 2      # some of them, soon
python -m benchmarks.studies.accuracy --update                                 # writes them into benchmarks/README.md
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sdpa
from benchmarks import compare, workloads
from benchmarks.measure import machine, oracle
from benchmarks.peers.torch import torch_result, torch_tensor
from benchmarks.report import report
from sdpa._runtime import kernels as _kernels

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = (
    "<!-- begin: python -m benchmarks.studies.accuracy --update -->",
    "<!-- end: benchmarks/studies/accuracy.py -->",
)
INT8 = np.dtype(np.int8)  # of a cache, under queries of float32
DTYPES = {dtype.name: dtype for dtype in [*workloads.DTYPES.values(), INT8]}
HEADS = 4
HEADER = ["inputs", "kernel", "RMS", "max", "RMS ÷ NumPy", "max ÷ NumPy", "RMS ÷ PyTorch", "max ÷ PyTorch"]
SUMMARY = ["dtype", "kernel", "RMS ÷ NumPy", "max ÷ NumPy", "RMS ÷ PyTorch, plain", "RMS ÷ PyTorch, all"]


class Inputs(NamedTuple):
    """Query, key and value with normal elements, and the options of a call."""

    label: str
    M: int = 512
    N: int = 512
    D: int = 64
    factor: int = 1  # of the query: how much wider than usual the scores spread
    causal: bool = False
    softcap: float | None = None
    has_bias: bool = False
    plain: bool = False  # nothing but normal elements: what PyTorch is to be matched on
    group: int = 32  # of a cache of int8: the numbers that share a scale

    def draw(self, dtype, seed):
        """Arrays (HEADS, M or N, D) and options, which `sdpa.attention` takes."""
        normal = np.random.default_rng(seed).standard_normal
        query, key, value = (normal((HEADS, length, self.D)) for length in (self.M, self.N, self.N))
        arrays = [array.astype(dtype) for array in (query * self.factor, key, value)]
        options = {"causal": self.causal} if self.causal else {}
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.has_bias:
            options["bias"] = (2 * normal((HEADS, self.M, self.N))).astype(dtype)
        return arrays, options


INPUTS = [
    Inputs("full", plain=True),
    Inputs("full, D = 128", D=128, plain=True),
    Inputs("causal", causal=True, plain=True),
    Inputs("causal, D = 128", D=128, causal=True, plain=True),
    Inputs("scores 8 times as large", factor=8),
    Inputs("1 query, 20000 keys", M=1, N=20000),
    Inputs("64 queries, 20000 keys", M=64, N=20000),
    Inputs("softcap 5 of scores 4 times as large", factor=4, softcap=5.0),
    Inputs("bias of deviation 2", has_bias=True),
]
# Of a cache of int8: each of these is a cache that is filled, and then all queries at once.
CACHE_INPUTS = [
    Inputs("full"),
    *(Inputs(f"full, D = 128, a scale for {group}", D=128, group=group) for group in (32, 64, 128)),
    Inputs("causal, D = 128", D=128, causal=True),
    Inputs("scores 8 times as large, D = 128", D=128, factor=8),
    *(Inputs(f"1 query, 20000 keys, D = 128, a scale for {group}", 1, 20000, 128, group=group) for group in (32, 128)),
]


def inputs_of(dtype):
    return CACHE_INPUTS if dtype == INT8 else INPUTS


class Tally:
    """The errors of one implementation over several seeds, and which bits it gave."""

    def __init__(self):
        self.count, self.squares, self.max, self.digest = 0, 0.0, 0.0, hashlib.sha256()

    def add(self, out, exact, unit):
        errors = (np.abs(out.astype(exact.dtype) - exact) / unit).astype(np.float64)
        self.count += errors.size
        self.squares += float(np.square(errors).sum())
        self.max = max(self.max, float(errors.max()))
        self.digest.update(out.tobytes())

    @property
    def rms(self):
        return math.sqrt(self.squares / self.count)


# ------------------------------------------------------------------------------------------------- implementations


def by_definition(arrays, options, dtype):
    """All heads by the oracle, in `dtype`."""
    bias, length, keys = options.get("bias"), arrays[0].shape[1], arrays[1].shape[1]
    seen = np.tri(length, keys, keys - length, dtype=bool) if "causal" in options else None
    return np.stack([
        oracle.head(
            *(array[h] for array in arrays),
            dtype,
            bias=None if bias is None else bias[h],
            softcap=options.get("softcap"),
            seen=seen,
        )
        for h in range(HEADS)
    ])  # fmt: skip


def by_torch(arrays, options):
    import torch

    bias = options.get("bias")
    return torch_result(
        torch.nn.functional.scaled_dot_product_attention(
            *(torch_tensor(array[None]) for array in arrays),
            attn_mask=None if bias is None else torch_tensor(bias[None]),
            is_causal="causal" in options,
        )
    )[0]


def by_kernel(name, arrays, options):
    with forced(name):
        return sdpa.attention(*arrays, **options)


def by_row(arrays, options):
    """What plain int8 costs: each key and each value rounded to 255 steps of a scale of its own, all else float32."""
    query, *cached = arrays
    return by_definition([query, *map(rounded_by_row, cached)], options, np.float32)


def rounded_by_row(array):
    scale = np.abs(array).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(array / scale) * scale


def by_cache(name, arrays, options, group):
    """The kernel of this name on a cache of int8."""
    query, key, value = (array[None] for array in arrays)
    cache = sdpa.KVCache(1, HEADS, key.shape[-1], dtype=INT8, group=group)
    cache.append(key, value)
    with forced(name):
        return cache.attend(query, **{"causal": False, **options})[0]


@contextlib.contextmanager
def forced(name):
    """All calls use the kernel of this name."""
    default, _kernels.default = _kernels.default, _kernels.find(name)
    try:
        yield
    finally:
        _kernels.default = default


def implementations(inputs, dtype):
    """{name: function of arrays and options} of all that can be given these inputs."""
    if dtype == INT8:
        kernels = {name: functools.partial(by_cache, name, group=inputs.group) for name in sdpa.kernels()}
        return {"NumPy": by_row, **kernels}
    known = {"NumPy": lambda arrays, options: by_definition(arrays, options, dtype)}
    if inputs.softcap is None and importlib.util.find_spec("torch"):
        known["PyTorch"] = by_torch
    for name in sdpa.kernels():
        known[name] = lambda arrays, options, name=name: by_kernel(name, arrays, options)
    return known


# ------------------------------------------------------------------------------------------------------- measuring


def measure(inputs, dtype, seeds):
    """{implementation: Tally}, the errors in units of eps * sum of p |v|.

    For int8, eps is 1 / 127 and |v| that of the largest number of the value: one step, if they all share a scale.
    """
    wide = np.longdouble if dtype == np.float64 else np.float64
    drawn, eps = (np.float32, 1 / 127) if dtype == INT8 else (dtype, ml_dtypes.finfo(dtype).eps)
    known = implementations(inputs, dtype)
    tallies = {name: Tally() for name in known}
    for seed in range(seeds):
        arrays, options = inputs.draw(drawn, seed)
        exact = by_definition(arrays, options, wide)
        query, key, value = (array.astype(wide) for array in arrays)
        terms = np.abs(value)
        if dtype == INT8:
            terms[...] = terms.max(axis=-1, keepdims=True)
        unit = wide(eps) * by_definition((query, key, terms), options, wide)
        for name, function in known.items():
            tallies[name].add(function(arrays, options), exact, unit)
    return tallies


def alike(*measured):
    """{names of kernels that gave the same bits in all of these: one of them}."""
    groups = {}
    for name in sdpa.kernels():
        groups.setdefault(tuple(tallies[name].digest.digest() for tallies in measured), []).append(name)
    return {", ".join(names): names[0] for names in groups.values()}


# --------------------------------------------------------------------------------------------------------- reporting


def ratios(tallies, kernel, peer):
    """(RMS, max) of a kernel over those of a peer; NaN where the peer was not run."""
    ours, theirs = tallies[kernel], tallies.get(peer)
    return (math.nan, math.nan) if theirs is None else (ours.rms / theirs.rms, ours.max / theirs.max)


def worst(pairs):
    """The largest of each of the ratios that are known."""
    return [max((ratio for ratio in column if not math.isnan(ratio)), default=math.nan) for column in zip(*pairs)]


def fixed(ratio):
    """With three digits: the question is whether a ratio is above 1."""
    return "" if math.isnan(ratio) else f"{ratio:.3f}"


def detail_rows(measured):
    for inputs, tallies in measured.items():
        for names, kernel in alike(tallies).items():
            errors = [f"{tallies[kernel].rms:.3g}", f"{tallies[kernel].max:.3g}"]
            compared = [*ratios(tallies, kernel, "NumPy"), *ratios(tallies, kernel, "PyTorch")]
            yield [inputs.label, names, *errors, *map(fixed, compared)]


def summary_rows(dtype, measured):
    for names, kernel in alike(*measured.values()).items():
        numpy = worst(ratios(tallies, kernel, "NumPy") for tallies in measured.values())
        torch = {inputs: ratios(tallies, kernel, "PyTorch") for inputs, tallies in measured.items()}
        plain, _ = worst(pair if inputs.plain else (math.nan, math.nan) for inputs, pair in torch.items())
        anything, _ = worst(torch.values())
        yield [dtype, names, *map(fixed, (*numpy, plain, anything))]


def table(header, rows, texts):
    """Markdown; the first `texts` columns are text, the others numbers."""
    rule = ["---"] * texts + ["---:"] * (len(header) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def markdown(results, seeds):
    """The worst ratios of all, and then each dtype in full."""
    parts = [table(SUMMARY, (row for name, measured in results.items() for row in summary_rows(name, measured)), 2)]
    for name, measured in results.items():
        parts.append(f"<details><summary>{name}</summary>")
        parts.append(table(HEADER, detail_rows(measured), 2))
        parts.append("</details>")
    return "\n\n".join([*parts, facts(seeds)])


def facts(seeds):
    versions = ", ".join(f"{name} {version}" for name, version in compare.versions(["torch"]).items())
    commit = compare.first_line("git", "describe", "--always", "--dirty", "--tags")
    compiler = compare.first_line("cc", "--version")
    return (
        f"{datetime.date.today().isoformat()}, commit {commit}, {compiler}; {machine.cpu_name()}; {versions}."
        f"\nEach number is of {seeds} draws of {HEADS} heads."
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="how many draws of each inputs")
    parser.add_argument("--update", action="store_true", help="write the tables into benchmarks/README.md")
    arguments = parser.parse_args()
    arguments.dtypes = arguments.dtypes.split(",")
    if unknown := set(arguments.dtypes) - set(DTYPES):
        parser.error(f"no dtype {', '.join(sorted(unknown))}; there are: {', '.join(DTYPES)}")
    return arguments


def main():
    arguments = parse_arguments()
    results = {
        name: {inputs: measure(inputs, DTYPES[name], arguments.seeds) for inputs in inputs_of(DTYPES[name])}
        for name in arguments.dtypes
    }
    text = markdown(results, arguments.seeds)
    print(text)
    if arguments.update:
        document = README.read_text(encoding="utf-8")
        README.write_text(report.with_text_between(document, BEGIN, text, END), encoding="utf-8")


if __name__ == "__main__":
    main()
