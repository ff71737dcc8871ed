"""Attention, its gradients, and attention with its projections.

Sizes: B batch, H query heads, G key/value heads, M queries, N keys, D size of a head.
The work of a case is counted as if its visible region were a continuous area: causal square cases are half
of the full ones, a window of W keys is a band of M*W - W*W/2.  Padding and random masks do not reduce it.
"""

import zlib
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from benchmarks.measure import oracle
from benchmarks.workloads.workload import SHRUNK_LENGTH, Workload

FEW_QUERIES = 8  # up to so many the bound is a loop that reads keys and values, where that takes longer than arithmetic


@dataclass(frozen=True)
class Attention(Workload):
    kind = "forward"
    products: ClassVar[int] = 2  # of M x N x D multiply-adds
    B: int
    H: int
    G: int
    M: int
    N: int
    D: int
    causal: bool = False
    window: int | None = None  # keys a query may see, itself included; implies causal
    hiding: str | None = None  # a key of HIDING: the mask or bias drawn for it

    @property
    def scores(self):
        """Over all batches and heads."""
        area = self.M * self.N
        if self.window is not None:
            area = self.M * self.window - self.window**2 / 2
        elif self.causal:
            area -= self.M**2 / 2
        return self.B * self.H * area

    @property
    def flops(self):
        return self.products * 2 * self.scores * self.D

    @property
    def bytes(self):
        """Of query, key, value, out, mask or bias."""
        return 2 * self._rows_bytes + self.read_bytes + self._hiding_bytes

    @property
    def read_bytes(self):
        """Of key and value."""
        return 2 * self.B * self.G * self.N * self.D * self.dtype.itemsize

    @property
    def result_bytes(self):
        return self._rows_bytes

    @property
    def _rows_bytes(self):
        """Of query, and of out."""
        return self.B * self.H * self.M * self.D * self.dtype.itemsize

    @property
    def limited_by_memory(self):
        return self.M <= FEW_QUERIES and self.M < self.N

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
        """Fewer batches, heads, queries and keys.  All else stays, and which of the lengths is the longer."""
        G = min(self.G, 2)
        M, N = (SHRUNK_LENGTH,) * 2
        if self.M < self.N:
            M = min(self.M, SHRUNK_LENGTH // 3)
        elif self.M > self.N:
            N = SHRUNK_LENGTH // 3
        window = self.window and SHRUNK_LENGTH // 4
        return replace(self, B=min(self.B, 2), H=self.H // self.G * G, G=G, M=M, N=N, window=window)

    def shortened(self, length):
        return replace(self, M=min(self.M, length), N=min(self.N, length))

    def draw(self):
        """The arrays and options of a call, `sdpa.attention(*arrays, **options)`."""
        rng = np.random.default_rng(zlib.crc32(self.case.encode()))
        shapes = [(self.B, self.H, self.M, self.D)] + 2 * [(self.B, self.G, self.N, self.D)]
        single = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        arrays = tuple(array.astype(self.dtype, copy=False) for array in single)
        hiding = {HIDING[self.hiding].option: HIDING[self.hiding].draw(self, rng)} if self.hiding else {}
        return arrays, {**self.options, **hiding}

    def to_read(self):
        (_, *arrays), _ = self.draw()
        return arrays

    def expected(self):
        return oracle.check_attention(self, *self.draw())


@dataclass(frozen=True)
class Backward(Attention):
    """A step of training: the result, and then the gradients of query, key and value, which take the scores anew and
    four products more."""

    kind = "backward"
    products = 7

    @property
    def bytes(self):
        return super().bytes + self.result_bytes

    @property
    def result_bytes(self):
        """Of the result and the gradients."""
        return 2 * self._rows_bytes + self.read_bytes

    def draw_gradient(self):
        """The gradient of the result, (B, H, M, D)."""
        rng = np.random.default_rng(zlib.crc32(f"gradient of {self.case}".encode()))
        return rng.standard_normal((self.B, self.H, self.M, self.D), dtype=np.float32).astype(self.dtype, copy=False)

    def expected(self):
        return oracle.check_gradients(self, *self.draw())


@dataclass(frozen=True)
class Layer(Attention):
    """Attention of x (B, M, H * D) to itself between the projections of a layer."""

    kind = "layer"

    @property
    def flops(self):
        return super().flops + 2 * self.B * self.M * self._weights

    @property
    def width(self):
        """Of x."""
        return self.H * self.D

    @property
    def _weights(self):
        return self.width * (2 * self.width + 2 * self.G * self.D)

    @property
    def bytes(self):
        """Of x, out and the weights."""
        return 2 * self._rows_bytes + self._weights * self.dtype.itemsize

    def draw(self):
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

    def expected(self):
        return oracle.check_layer(self, self.draw())


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
