"""The named workloads that every benchmark of this project runs: one table, a row per case.

Sizes: B batch, H query heads, G key/value heads, M queries, N keys, D size of a head.
The work of a case is counted as if its visible region were a continuous area: causal square cases are half
of the full ones, a window of W keys is a band of M*W - W*W/2.  Padding and random masks do not reduce it.
"""

import fnmatch
import zlib
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
# Matrix products of M x N x D multiply-adds in each kind of work.  "backward" is a step of training: the result, and
# then the gradients of query, key and value, which take the scores anew and four products more.  "layer" is attention
# of x (B, M, H * D) to itself between the projections of a layer, which `flops` adds.
PRODUCTS = {"forward": 2, "backward": 7, "layer": 2}

SHRUNK_LENGTH = 67  # a prime, and more than four vectors of 16
KEEP_BYTES = 400 << 20  # of prepared workloads: a worker drops what is beyond, the oldest first


@dataclass(frozen=True)
class Workload:
    """One row of the table for one dtype."""

    case: str
    B: int
    H: int
    G: int
    M: int
    N: int
    D: int
    causal: bool = False
    window: int | None = None  # keys a query may see, itself included; implies causal
    hiding: str | None = None  # a key of HIDING: the mask or bias drawn for it
    dtype_name: str = "fp32"
    kind: str = "forward"

    @property
    def name(self):
        return f"{self.case}-{self.dtype_name}"

    @property
    def dtype(self):
        return DTYPES[self.dtype_name]

    @property
    def scores(self):
        """Scores that must be computed, over all batches and heads."""
        area = self.M * self.N
        if self.window is not None:
            area = self.M * self.window - self.window**2 / 2
        elif self.causal:
            area -= self.M**2 / 2
        return self.B * self.H * area

    @property
    def flops(self):
        projections = 2 * self.B * self.M * self._weights if self.kind == "layer" else 0
        return PRODUCTS[self.kind] * 2 * self.scores * self.D + projections

    @property
    def width(self):
        """Of x, where this is a layer."""
        return self.H * self.D

    @property
    def _weights(self):
        return self.width * (2 * self.width + 2 * self.G * self.D)

    @property
    def bytes(self):
        """What must be read or written at least once: query, key, value, out, mask or bias; and the gradients.  By a
        layer: x, out and the weights."""
        if self.kind == "layer":
            return (2 * self.B * self.M * self.width + self._weights) * self.dtype.itemsize
        arrays = 2 * self.B * self.H * self.M * self.D * self.dtype.itemsize + self.kv_bytes
        return arrays * (2 if self.kind == "backward" else 1) + self._hiding_bytes

    @property
    def kv_bytes(self):
        """Of key and value."""
        return 2 * self.B * self.G * self.N * self.D * self.dtype.itemsize

    @property
    def result_bytes(self):
        """Of the result, of a layer too, and of gradients."""
        out = self.B * self.H * self.M * self.D * self.dtype.itemsize
        return 2 * out + self.kv_bytes if self.kind == "backward" else out

    @property
    def limited_by_memory(self):
        """With one query there is too little arithmetic for what is read."""
        return self.M == 1

    @property
    def _hiding_bytes(self):
        return HIDING[self.hiding].bytes(self) if self.hiding else 0

    @property
    def options(self):
        """The options of `sdpa.attention` that need no arrays."""
        if self.window is not None:
            return {"window": (self.window - 1, 0)}
        return {"causal": True} if self.causal else {}

    def shrunk(self):
        """The same kind of work on little: fewer batches, heads, queries and keys.  All else stays, and which of the
        lengths is the longer."""
        G = min(self.G, 2)
        M, N = (SHRUNK_LENGTH,) * 2
        if self.M < self.N:
            M = min(self.M, SHRUNK_LENGTH // 3)
        elif self.M > self.N:
            N = SHRUNK_LENGTH // 3
        window = self.window and SHRUNK_LENGTH // 4
        return replace(self, B=min(self.B, 2), H=self.H // self.G * G, G=G, M=M, N=N, window=window)

    def draw(self):
        """The arrays and options of a call, `sdpa.attention(*arrays, **options)`; of a layer what draw_layer gives."""
        if self.kind == "layer":
            return self.draw_layer(), {}
        rng = np.random.default_rng(zlib.crc32(self.case.encode()))
        shapes = [(self.B, self.H, self.M, self.D)] + 2 * [(self.B, self.G, self.N, self.D)]
        single = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        arrays = tuple(array.astype(self.dtype, copy=False) for array in single)
        hiding = {HIDING[self.hiding].option: HIDING[self.hiding].draw(self, rng)} if self.hiding else {}
        return arrays, {**self.options, **hiding}

    def draw_layer(self):
        """x (B, M, W), the weights (3 W, W) and (3 W) of the projection to query, key and value, and those (W, W) and
        (W) of the one from the heads, such that the elements of queries and keys have a variance of 1."""
        rng = np.random.default_rng(zlib.crc32(self.case.encode()))
        outs = self.width + 2 * self.G * self.D
        x = rng.standard_normal((self.B, self.M, self.width), dtype=np.float32)
        weights = [
            rng.standard_normal(shape, dtype=np.float32) * np.float32(self.width**-0.5)
            for shape in ((outs, self.width), (outs,), (self.width, self.width), (self.width,))
        ]
        return [array.astype(self.dtype, copy=False) for array in (x, *weights)]

    def draw_gradient(self):
        """For "backward": the gradient of the result, (B, H, M, D)."""
        rng = np.random.default_rng(zlib.crc32(f"gradient of {self.case}".encode()))
        return rng.standard_normal((self.B, self.H, self.M, self.D), dtype=np.float32).astype(self.dtype, copy=False)

    def bound(self, machine, read_seconds=None):
        """Seconds below which no implementation can be expected on this machine."""
        return machine.bound(self.flops, self.scores, self.bytes, self.dtype, read_seconds)


class PaddingMask:
    """Boolean (B, 1, 1, N): sequences of a batch between half and all of the keys long."""

    option = "mask"

    @staticmethod
    def bytes(workload):
        return workload.B * workload.N

    @staticmethod
    def draw(workload, rng):
        lengths = rng.integers(workload.N // 2, workload.N + 1, size=(workload.B, 1, 1, 1))
        return np.arange(workload.N) < lengths


class RandomMask:
    """Boolean (1, 1, M, N), half of it True, and at least the diagonal."""

    option = "mask"

    @staticmethod
    def bytes(workload):
        return workload.M * workload.N

    @staticmethod
    def draw(workload, rng):
        mask = rng.random((1, 1, workload.M, workload.N), dtype=np.float32) < 0.5
        return mask | np.eye(workload.M, workload.N, dtype=bool)


class RandomBias:
    """Float (1, H, M, N), as learned relative positions are."""

    option = "bias"

    @staticmethod
    def bytes(workload):
        return workload.H * workload.M * workload.N * workload.dtype.itemsize

    @staticmethod
    def draw(workload, rng):
        shape = (1, workload.H, workload.M, workload.N)
        return rng.standard_normal(shape, dtype=np.float32).astype(workload.dtype, copy=False)


HIDING = {"pad": PaddingMask, "random": RandomMask, "bias": RandomBias}

CASES = [
    # case                        B   H   G      M      N    D
    Workload("prefill-512-full", 1, 8, 8, 512, 512, 64),
    Workload("prefill-512-causal", 1, 8, 8, 512, 512, 64, causal=True),
    Workload("prefill-2048-full", 1, 8, 8, 2048, 2048, 64),
    Workload("prefill-2048-causal", 1, 8, 8, 2048, 2048, 64, causal=True),
    Workload("prefill-4096-d128-full", 1, 8, 8, 4096, 4096, 128),
    Workload("prefill-4096-d128-causal", 1, 8, 8, 4096, 4096, 128, causal=True),
    Workload("gqa-1024-d128-full", 1, 32, 8, 1024, 1024, 128),
    Workload("gqa-1024-d128-causal", 1, 32, 8, 1024, 1024, 128, causal=True),
    Workload("bert", 8, 12, 12, 128, 128, 64),
    Workload("vit-197", 8, 12, 12, 197, 197, 64),
    Workload("clip-77", 8, 12, 12, 77, 77, 64, causal=True),
    Workload("odd-1000-full", 1, 8, 8, 1000, 1000, 64),
    Workload("odd-1000-causal", 1, 8, 8, 1000, 1000, 64, causal=True),
    *(Workload(f"hdim-{dim}", 1, 8, 8, 1024, 1024, dim) for dim in (32, 64, 80, 96, 128, 192, 256)),
    Workload("decode-4k", 1, 32, 8, 1, 4096, 128),
    Workload("decode-4k-mha", 1, 32, 32, 1, 4096, 128),
    Workload("decode-32k", 1, 32, 8, 1, 32768, 128),
    Workload("decode-b4-8k", 4, 32, 8, 1, 8192, 128),
    Workload("decode-short", 1, 32, 8, 1, 256, 128),
    Workload("chunk-16", 1, 32, 8, 16, 8192, 128, causal=True),
    Workload("chunk-64", 1, 32, 8, 64, 8192, 128, causal=True),
    Workload("tiny", 1, 1, 1, 3, 3, 64),
    Workload("small-32", 1, 4, 4, 32, 32, 64),
    Workload("cross-77", 2, 8, 8, 4096, 77, 40),
    Workload("cross-512x1500", 4, 8, 8, 448, 1500, 64),
    Workload("mask-pad", 4, 12, 12, 384, 384, 64, hiding="pad"),
    Workload("mask-bool", 1, 8, 8, 1024, 1024, 64, hiding="random"),
    Workload("mask-add", 1, 8, 8, 1024, 1024, 64, hiding="bias"),
    Workload("window-512", 1, 8, 8, 4096, 4096, 64, window=512),
    Workload("long-8192-full", 1, 4, 4, 8192, 8192, 64),
    Workload("long-8192-causal", 1, 4, 4, 8192, 8192, 64, causal=True),
    Workload("long-16384", 1, 2, 2, 16384, 16384, 64, causal=True),
    Workload("bwd-1024-full", 1, 8, 8, 1024, 1024, 64, kind="backward"),
    Workload("bwd-1024-causal", 1, 8, 8, 1024, 1024, 64, causal=True, kind="backward"),
    Workload("bwd-bert", 8, 12, 12, 128, 128, 64, kind="backward"),
    Workload("bwd-gqa-1024-causal", 1, 16, 4, 1024, 1024, 128, causal=True, kind="backward"),
    Workload("layer-b8-128", 8, 12, 12, 128, 128, 64, kind="layer"),
    Workload("layer-1024", 1, 12, 12, 1024, 1024, 64, kind="layer"),
]

DOUBLE = ["prefill-2048-full", "prefill-2048-causal"]
FLOAT16 = [
    "prefill-512-full", "prefill-512-causal", "prefill-2048-full", "prefill-2048-causal",
    "prefill-4096-d128-full", "prefill-4096-d128-causal", "gqa-1024-d128-full", "gqa-1024-d128-causal",
    "bert", "vit-197", "clip-77", "odd-1000-full", "odd-1000-causal",
    "decode-4k", "decode-4k-mha", "decode-32k", "decode-b4-8k", "decode-short", "chunk-16", "chunk-64",
    "cross-77", "mask-pad", "mask-bool", "mask-add", "window-512",
]  # fmt: skip
BFLOAT16 = [*FLOAT16, "tiny", *(case.case for case in CASES if case.case.startswith(("hdim-", "bwd-", "layer-")))]

OTHERS = {"fp64": DOUBLE, "bf16": BFLOAT16, "fp16": FLOAT16}  # the cases that are run in other dtypes too
WORKLOADS = {workload.name: workload for workload in CASES}
for dtype_name, names in OTHERS.items():
    WORKLOADS |= {w.name: w for w in (replace(case, dtype_name=dtype_name) for case in CASES if case.case in names)}

# Families in which one size grows: {family: {size: workload}}.  All that are prepared at once fit in a worker.
SWEEPS = {
    "length": {n: Workload(f"length-{n}", 1, 2, 2, n, n, 64, causal=True) for n in (2**i for i in range(16))},
    "head-size": {
        dim: Workload(f"head-size-{dim}", 1, 8, 8, 1024, 1024, dim)
        for dim in (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
    },
    "context": {n: Workload(f"context-{n}", 1, 16, 2, 1, n, 128) for n in (128 * 4**i for i in range(6))},
}
NAMED = WORKLOADS | {workload.name: workload for family in SWEEPS.values() for workload in family.values()}


def batches(workloads, limit=KEEP_BYTES):
    """The workloads in their order, as few lists as a worker can prepare at once."""
    lists, total = [[]], 0
    for workload in workloads:
        total += workload.bytes
        if lists[-1] and total > limit:
            lists.append([])
            total = workload.bytes
        lists[-1].append(workload)
    return lists


def select(patterns, dtypes=None):
    """The workloads whose name contains or matches one of the comma-separated patterns, in one of these dtypes; all for
    None."""
    unknown = [part for part in parts(patterns) if not any(matches(name, part) for name in WORKLOADS)]
    if unknown:
        raise SystemExit(f"no workload matches {', '.join(map(repr, unknown))}; there are: {', '.join(WORKLOADS)}")
    chosen = [
        workload
        for name, workload in WORKLOADS.items()
        if matches(name, patterns) and (dtypes is None or workload.dtype_name in dtypes)
    ]
    if not chosen:
        raise SystemExit(f"no workload matches {patterns!r} in {', '.join(dtypes)}; there are: {', '.join(WORKLOADS)}")
    return chosen


def matches(name, patterns):
    return patterns is None or any(part in name or fnmatch.fnmatch(name, part) for part in parts(patterns))


def parts(patterns):
    return [] if patterns is None else [part for part in patterns.split(",") if part] or [patterns]
