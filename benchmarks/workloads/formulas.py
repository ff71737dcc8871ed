"""Workloads that are formulas of a few operations: projections, norms, whole models.

A formula is written once, in terms of Pieces; with those of a library it computes, or makes a graph for that library's
compiler; with those of the oracle it gives what is right.
"""

import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import oracle
from benchmarks.workloads.workload import Workload
from sdpa import reference


class Pieces:
    """The operations of formulas.  A library brings those without a body here, and the others where it has them whole.

    Variables are whatever the library computes with; weights what it made of arrays by `weight`.
    """

    def variable(self, name, array):
        """An input of the formula."""
        raise NotImplementedError

    def weight(self, array):
        return array

    def linear(self, x, weight, bias=None, activation=None):
        """activation(x W^T + bias)"""
        raise NotImplementedError

    def add(self, x, y):
        raise NotImplementedError

    def multiply(self, x, y):
        raise NotImplementedError

    def layer_norm(self, x, weight, bias, eps):
        raise NotImplementedError

    def rms_norm(self, x, weight, eps):
        raise NotImplementedError

    def norm(self, x, weight, bias, eps):
        """Models with a bias centre the rows, those without do not."""
        return self.rms_norm(x, weight, eps) if bias is None else self.layer_norm(x, weight, bias, eps)

    def added_norm(self, x, residual, weight, bias, eps):
        """(the norm of x + residual, x + residual)"""
        total = self.add(x, residual)
        return self.norm(total, weight, bias, eps), total

    def feed_forward(self, x, up, down, gate=None, activation="gelu"):
        """`up`, `down` and `gate` are a weight and a bias each."""
        if gate is None:
            return self.linear(self.linear(x, *up, activation), *down)
        return self.linear(self.multiply(self.linear(x, *gate, activation), self.linear(x, *up)), *down)

    def rows(self, table, ids):
        raise NotImplementedError

    def last(self, x):
        """The last row of each sequence, (B, 1, E)."""
        raise NotImplementedError

    def split(self, x, heads):
        """(B, S, heads * D) to (B, heads, S, D)"""
        raise NotImplementedError

    def merged(self, x):
        raise NotImplementedError

    def turned(self, x, cos, sin):
        """The rotary embedding of (B, H, S, D) by tables (S, D / 2), arrays of float64."""
        raise NotImplementedError

    def joined(self, past, new):
        """Along the axis of keys."""
        raise NotImplementedError

    def attention(self, query, key, value, causal, lengths):
        """`lengths`: an input (B), or None; the last query sees the last key."""
        raise NotImplementedError

    def self_attention(self, x, projections, heads, kv_heads, causal=False, lengths=None, rotary=None, past=None):
        """`projections`: weight and bias to query, key and value; `rotary`: if heads are turned, cos and sin for all
        positions, and the first position of x; `past`: the keys and values before."""
        query, key, value = (self.linear(x, *projection) for projection in projections)
        query, key, value = self.split(query, heads), self.split(key, kv_heads), self.split(value, kv_heads)
        if rotary is not None:
            cos, sin, begin = rotary
            query, key = (self.turned(heads, cos[begin:], sin[begin:]) for heads in (query, key))
        if past is not None:
            key, value = self.joined(past[0], key), self.joined(past[1], value)
        return self.merged(self.attention(query, key, value, causal, lengths))


class ArrayPieces(Pieces):
    """What needs no arithmetic, of NumPy arrays."""

    def variable(self, name, array):
        return array

    def rows(self, table, ids):
        return table[ids]

    def last(self, x):
        return x[:, -1:]

    def split(self, x, heads):
        B, S, width = x.shape
        return x.reshape(B, S, heads, width // heads).swapaxes(1, 2)

    def merged(self, x):
        B, H, S, D = x.shape
        return x.swapaxes(1, 2).reshape(B, S, H * D)

    def joined(self, past, new):
        return np.concatenate([past.astype(new.dtype, copy=False), new], axis=2)


class Oracle(ArrayPieces):
    """Those of `sdpa.reference`, each rounded to `dtype`."""

    def __init__(self, dtype):
        self._dtype = dtype

    def linear(self, x, weight, bias=None, activation=None):
        return self._rounded(reference.Linear(weight, bias, activation=activation)(x, dtype=self._dtype))

    def add(self, x, y):
        return self._rounded(self._rounded(x) + self._rounded(y))

    def multiply(self, x, y):
        return self._rounded(x * y)

    def layer_norm(self, x, weight, bias, eps):
        return self._rounded(reference.layer_norm(x, weight, bias, eps=eps, dtype=self._dtype))

    def rms_norm(self, x, weight, eps):
        return self._rounded(reference.rms_norm(x, weight, eps=eps, dtype=self._dtype))

    def turned(self, x, cos, sin):
        return self._rounded(reference.rotary(x, None, cos=cos, sin=sin, dtype=self._dtype))

    def attention(self, query, key, value, causal, lengths):
        out = reference.attention(query, key, value, causal=causal, kv_lengths=lengths, dtype=self._dtype)
        return self._rounded(out)

    def _rounded(self, array):
        return oracle.rounded(array, self._dtype)


@dataclass(frozen=True)
class Formula(Workload):
    """A workload given by `formula`, of inputs and weights that `draw` gives."""

    @abstractmethod
    def draw(self):
        """({name: input}, {name: weight})"""

    @abstractmethod
    def formula(self, pieces, inputs, weights):
        """The arrays of the result, as variables, in a tuple."""

    def prepared(self, pieces):
        """Inputs and weights as these pieces take them."""
        inputs, weights = self.draw()
        given = {name: pieces.variable(name, array) for name, array in inputs.items()}
        return given, {name: pieces.weight(array) for name, array in weights.items()}

    def outputs(self, pieces):
        """The result, as variables of these pieces."""
        return self.formula(pieces, *self.prepared(pieces))

    def comparable(self, *arrays):
        """The result as it is compared: of some workloads, not all of the rows count."""
        return arrays

    def expected(self):
        exact, naive = (self.comparable(*self.outputs(Oracle(dtype))) for dtype in (np.float64, self.dtype))
        return [self._expected(*pair) for pair in zip(exact, naive, strict=True)]

    def _expected(self, exact, naive):
        """The terms of the last sums are as large as the result, as `draw` draws weights."""
        rows = oracle.sample_rows(exact.shape[-2])
        limit = oracle.allowed(exact, naive, np.abs(exact).max())
        return oracle.Expected(rows, exact[..., rows, :], limit)

    @property
    def rng(self):
        return np.random.default_rng(zlib.crc32(self.case.encode()))

    @property
    def read_bytes(self):
        """Of the weights."""
        return self.weight_count * self.dtype.itemsize

    @property
    @abstractmethod
    def weight_count(self):
        """Numbers in the weights by which something is multiplied."""

    def to_read(self):
        return list(self.draw()[1].values())


def drawn_weight(rng, outs, ins, dtype):
    """(outs, ins), such that what it makes of numbers with a variance of 1 has that, too."""
    return drawn(rng, (outs, ins), dtype, 1 / math.sqrt(ins))


def drawn(rng, shape, dtype, scale=1.0, mean=0.0):
    array = rng.standard_normal(shape, dtype=np.float32)
    array *= np.float32(scale)
    array += np.float32(mean)
    return array.astype(dtype, copy=False)
