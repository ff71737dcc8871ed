"""Packed sequences: counts, options, and how a result is judged."""

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from sdpa import reference
from sdpa._runtime import kernels
from support.accuracy import allowed, arithmetic, exactly, plainly, units
from support.draw import float16, float32, float64, inf, rng
from support.kernels import PAIRS_OF_BFLOAT16
from support.layouts import LAYOUTS

Q_COUNTS, K_COUNTS = (3, 0, 40, 1, 5, 0, 19), (7, 4, 140, 33, 0, 0, 19)


def cumulative(counts):
    return np.cumsum([0, *counts])


def draw_packed(q_counts=Q_COUNTS, k_counts=K_COUNTS, H=4, G=2, D=20, E=12, dtype=float32, seed=0):
    """query, key, value, and the arguments that say where sequences begin."""
    normal = rng(seed).standard_normal
    query, others = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    T, U = sum(q_counts), sum(k_counts)
    arrays = [normal(s).astype(of) for s, of in (((T, H, D), query), ((U, G, D), others), ((U, G, E), others))]
    return arrays, dict(cu_seqlens_q=cumulative(q_counts), cu_seqlens_k=cumulative(k_counts))


def judge_packed(out, lse, query, key, value, *, factor=2, floor=4, **options):
    """`out` and `lse` are as accurate as NumPy in the dtype of the arithmetic."""
    dtype, wide, plain = query.dtype.type, arithmetic(query.dtype), plainly(query.dtype)
    exact, exact_lse = reference.attention_varlen(query, key, value, return_lse=True, dtype=exactly(dtype), **options)
    naive, naive_lse = reference.attention_varlen(query, key, value, return_lse=True, dtype=plain, **options)
    scale = reference.attention_varlen(query, key, np.abs(value), dtype=exactly(dtype), **options)
    assert out.dtype == dtype and lse.dtype == wide and out.shape == exact.shape and lse.shape == exact_lse.shape
    rounded = dtype == bfloat16 and kernels.default.name in PAIRS_OF_BFLOAT16
    assert units(out, exact, scale, dtype) <= allowed(units(naive, exact, scale, plain), dtype, rounded, factor, floor)
    blind = np.isneginf(exact_lse)
    assert (np.isneginf(lse) == blind).all() and (out[blind] == 0).all()
    seen = [np.where(blind, 0, x) for x in (lse, exact_lse, naive_lse)]
    size = 1 + np.abs(seen[1])
    assert units(seen[0], seen[1], size, wide) <= factor * units(seen[2], seen[1], size, plain) + floor


# Options for H = 4, S sequences with `k` keys each, T queries, L keys of the longest.
OPTIONS = {
    "nothing": lambda T, L, k: {},
    "causal": lambda T, L, k: dict(causal=True),
    "window": lambda T, L, k: dict(window=(9, 2)),
    "window of the past": lambda T, L, k: dict(window=(20, -2)),
    "open window": lambda T, L, k: dict(window=(None, 3)),
    "window, causal": lambda T, L, k: dict(window=(9, None), causal=True),
    "offset": lambda T, L, k: dict(q_offset=2, causal=True),
    "offset per sequence": lambda T, L, k: dict(q_offset=np.arange(len(k)) * 3 - 5, window=(8, 1)),
    "huge offset": lambda T, L, k: dict(q_offset=2**62, window=(2**62, None)),
    "length": lambda T, L, k: dict(kv_lengths=min(k), causal=True),
    "lengths": lambda T, L, k: dict(kv_lengths=np.array(k) // 2, causal=True),
    "lengths of all": lambda T, L, k: dict(kv_lengths=list(k)),
    "mask": lambda T, L, k: dict(mask=rng(1).random((4, T, L)) < 0.6),
    "mask of keys": lambda T, L, k: dict(mask=rng(2).random(L) < 0.6),
    "mask of rows": lambda T, L, k: dict(mask=rng(3).random((T, 1)) < 0.6),
    "bias": lambda T, L, k: dict(bias=rng(4).standard_normal((4, T, L))),
    "bias of keys": lambda T, L, k: dict(bias=rng(8).standard_normal(L).astype(np.float16)),
    "bias of heads": lambda T, L, k: dict(bias=rng(5).standard_normal((4, 1, L)).astype(np.float32)),
    "bias that hides": lambda T, L, k: dict(bias=np.where(rng(6).random((T, L)) < 0.4, -inf, 0.5)),
    "scale": lambda T, L, k: dict(scale=0.3),
    "softcap": lambda T, L, k: dict(softcap=1.5),
    "sinks": lambda T, L, k: dict(sinks=np.linspace(-3, 6, 4)),
    "alibi": lambda T, L, k: dict(alibi_slopes=np.linspace(-0.05, 0.5, 4)),
    "alibi per sequence": lambda T, L, k: dict(alibi_slopes=rng(7).random((len(k), 4)), causal=True),
    "alibi, offset": lambda T, L, k: dict(alibi_slopes=np.full(4, 0.1), q_offset=-3),
}
EVERYTHING = (
    "mask of keys", "bias", "window", "lengths", "scale", "softcap", "sinks", "alibi per sequence",
    "offset per sequence",
)  # fmt: skip


def options_for(query, k_counts, *names):
    together = {}
    for name in names:
        together |= OPTIONS[name](len(query), max(k_counts), k_counts)
    return together


# Rows are computed by the same engine, whatever else is in the call, where all sequences have few or all have many.
ALIKE = {
    "few": ((1, 2, 1, 0, 2), (300, 2, 17, 5, 0)),
    "many": ((40, 33, 70), (40, 200, 33)),
}


COUNTS = st.integers(0, 6) | st.sampled_from([0, 0, 1, 1, 15, 16, 17, 33, 65, 129])
SIDE = st.none() | st.integers(-3, 8) | st.sampled_from([-140, 40, 130, 2**40, -(2**62)])


@st.composite
def packed_problems(choose):
    """The arrays, where sequences begin, and any combination of options."""
    S = choose(st.integers(0, 6))
    q_counts, k_counts = (tuple(choose(st.lists(COUNTS, min_size=S, max_size=S))) for _ in range(2))
    G = choose(st.integers(1, 3))
    H, D, E = G * choose(st.integers(1, 4)), choose(st.integers(1, 20)), choose(st.integers(0, 20))
    dtype = choose(st.sampled_from([float32, float64, float16, bfloat16, (float32, bfloat16)]))
    arrays, where = draw_packed(q_counts, k_counts, H, G, D, E, dtype, choose(st.integers(0, 99)))
    arrays = [
        choose(st.sampled_from([np.ascontiguousarray, np.asfortranarray, LAYOUTS["heads inside"]]))(x) for x in arrays
    ]
    T, L, r = sum(q_counts), max(k_counts, default=0), rng(choose(st.integers(0, 99)))
    optional = dict(
        mask=st.just(r.random(choose(st.sampled_from([(H, T, L), (T, L), (L,), (H, 1, 1)]))) < 0.7),
        bias=st.just(r.standard_normal(choose(st.sampled_from([(H, T, L), (T, 1), (H, 1, L), ()])))),
        causal=st.booleans(),
        window=st.none() | st.tuples(SIDE, SIDE),
        q_offset=st.integers(-70, 140) | st.just(r.integers(-70, 140, S)),
        kv_lengths=st.just(min(k_counts, default=0)) | st.just(r.integers(0, np.array(k_counts, int) + 1)),
        scale=st.none() | st.floats(-2, 2),
        softcap=st.none() | st.floats(0.1, 50),
        sinks=st.just(r.standard_normal(H)) | st.just(r.standard_normal((S, H))),
        alibi_slopes=st.just(r.random(H)) | st.just(r.random((S, H))),
        threads=st.none() | st.integers(1, 3),
    )
    return arrays, where, choose(st.fixed_dictionaries({}, optional=optional))


A = np.ones((6, 4, 8), float32)  # query
K = np.ones((9, 2, 8), float32)
V = np.ones((9, 2, 5), float32)
QS, KS = [0, 2, 6], [0, 9, 9]

ERRORS = {
    "query of two axes": (ValueError, r"query has shape \(6, 4\): .*three axes", dict(query=A[..., 0])),
    "key of integers": (TypeError, "key has dtype int64", dict(key=np.ones((9, 2, 8), int))),
    "key wider": (TypeError, "value has dtype float64.*not be wider than query", dict(value=V.astype(float64))),
    "halves meet": (TypeError, "must not meet", dict(key=K.astype(float16), value=V.astype(bfloat16))),
    "other sizes": (ValueError, r"\(6, 4, 8\) and key \(9, 2, 7\): the last axes", dict(key=K[..., :7])),
    "other values": (ValueError, r"key has shape \(9, 2, 8\) and value \(8, 2, 5\)", dict(value=V[:8])),
    "heads": (ValueError, "query has 3 heads and key has 2", dict(query=A[:, :3])),
    "no end": (ValueError, r"cu_seqlens_q is \[0, 2, 5\]: .*to the 6 rows of query", dict(cu_seqlens_q=[0, 2, 5])),
    "no start": (ValueError, r"cu_seqlens_q is \[1, 2, 6\]: it must go from 0", dict(cu_seqlens_q=[1, 2, 6])),
    "falling": (ValueError, r"cu_seqlens_k is \[0, 10, 9\]: .*never falling", dict(cu_seqlens_k=[0, 10, 9])),
    "below 0": (ValueError, "cu_seqlens_k.*never falling", dict(cu_seqlens_k=[0, -1, 9])),
    "two axes": (ValueError, r"cu_seqlens_q has shape \(1, 3\)", dict(cu_seqlens_q=[QS])),
    "nothing": (ValueError, r"cu_seqlens_q has shape \(0,\)", dict(cu_seqlens_q=[])),
    "one number": (ValueError, r"cu_seqlens_q has shape \(\)", dict(cu_seqlens_q=6)),
    "fractions": (TypeError, "cu_seqlens_q has dtype float64", dict(cu_seqlens_q=[0.0, 6.0])),
    "booleans": (TypeError, "cu_seqlens_q has dtype bool", dict(cu_seqlens_q=[False, True])),
    "unequal": (ValueError, "cu_seqlens_q has 2 numbers and cu_seqlens_k 3", dict(cu_seqlens_q=[0, 6])),
    "no keys' lengths": (ValueError, "query has 6 rows and key 9: without cu_seqlens_k", dict(cu_seqlens_k=None)),
    "mask of floats": (TypeError, "mask has dtype float64.*bias", dict(mask=np.ones((6, 9)))),
    "mask of all keys": (ValueError, r"mask has shape \(5, 9\).*\(4, 6, 9\)", dict(mask=np.ones((5, 9), bool))),
    "bias of booleans": (TypeError, "bias has dtype bool.*mask", dict(bias=np.ones((6, 9), bool))),
    "bias too long": (ValueError, r"bias has shape \(6, 8\).*\(4, 6, 9\)", dict(bias=np.ones((6, 8)))),
    "lengths": (ValueError, r"kv_lengths are \[9, 1\].*\[9 0\]", dict(kv_lengths=[9, 1])),
    "length": (ValueError, "kv_lengths are 1", dict(kv_lengths=1)),
    "length below 0": (ValueError, "kv_lengths are -1", dict(kv_lengths=-1)),
    "many lengths": (ValueError, r"kv_lengths has shape \(3,\).*\(2,\)", dict(kv_lengths=[0, 0, 0])),
    "offsets": (ValueError, r"q_offset has shape \(3,\).*\(2,\)", dict(q_offset=[0, 0, 0])),
    "offset of a fraction": (TypeError, "q_offset has dtype float64", dict(q_offset=0.5)),
    "causal": (TypeError, "causal is 1", dict(causal=1)),
    "window": (TypeError, "window is 3", dict(window=3)),
    "scale": (TypeError, "scale is 'x'", dict(scale="x")),
    "softcap": (ValueError, "softcap is 0", dict(softcap=0)),
    "sinks": (ValueError, r"sinks has shape \(3,\)", dict(sinks=np.ones(3))),
    "slopes": (ValueError, r"alibi_slopes has shape \(3, 4\)", dict(alibi_slopes=np.ones((3, 4)))),
    "threads": (ValueError, "threads is 0", dict(threads=0)),
    "out of a shape": (ValueError, r"out has shape \(6, 4, 8\)", dict(out=np.zeros((6, 4, 8), float32))),
    "out of a dtype": (ValueError, "dtype float16", dict(out=np.zeros((6, 4, 5), np.float16))),
}
