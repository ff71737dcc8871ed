"""Everything that computes, called from many Python threads at once on the same arrays, layers and caches.

Where Python has no GIL the checks and the making of arrays run at once, too; `make test-races` watches all this with
the thread sanitizer.  What writes, such as `append`, is for one thread at a time: each has caches of its own for that.
"""

import itertools
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.draw import draw, rng
from support.options import OPTIONS, options_for
from support.processes import run_python

import sdpa

CALLERS, ROUNDS = 6, 3
QUERY, KEY, VALUE = draw(M=70, N=300, D=16, E=24)
GRAD_OUT = rng(1).standard_normal(VALUE.shape[:1] + QUERY.shape[1:3] + VALUE.shape[3:]).astype(np.float32)
X = rng(2).standard_normal((2, 60, 32)).astype(np.float32)
WEIGHT = rng(3).standard_normal((32, 32)).astype(np.float32)
COUNTS = np.array([0, 40, 41, 70])


def in_one(cache, rounds=4):
    """A cache of the thread's own: appended to, read, forked, cut."""
    results = []
    for step in range(rounds):
        cache.append(KEY[..., step : step + 1, :], VALUE[..., step : step + 1, :])
        results.append(cache.attend(QUERY[..., :1, :]))
    other = cache.fork()
    other.truncate(2)
    return [*results, other.attend(QUERY[..., :1, :])]


def in_pages():
    pool = sdpa.PagedKVCache(pages=16, page_size=4, kv_heads=2, head_dim=16, value_dim=24)
    first = pool.allocate()
    pool.append(first, KEY[0, :, :10], VALUE[0, :, :10])
    second = pool.fork(first)
    pool.append(second, KEY[0, :, 10:13], VALUE[0, :, 10:13])
    return [pool.attend(QUERY[0, :, :2], sequence) for sequence in (first, second)]


def filled():
    cache = sdpa.KVCache(batch=2, kv_heads=2, head_dim=16, value_dim=24)
    cache.append(KEY, VALUE)
    return cache


SHARED = {
    "cache": filled(),
    "layer": sdpa.MultiHeadAttention(32, 4, in_proj_weight=np.concatenate([WEIGHT] * 3), out_proj_weight=WEIGHT),
    "linear": sdpa.Linear(WEIGHT, activation="gelu"),
    "feed": sdpa.FeedForward(WEIGHT, WEIGHT, gate_weight=WEIGHT, activation="silu"),
}
FORWARD = sdpa.attention(QUERY, KEY, VALUE, causal=True, return_lse=True)
PACKED = [np.ascontiguousarray(x[0].swapaxes(0, 1)[:70]) for x in (QUERY, KEY, VALUE)]
PACKED_FORWARD = sdpa.attention_varlen(*PACKED, cu_seqlens_q=COUNTS, return_lse=True)
CALLS = {
    **{f"attention: {name}": lambda name=name: sdpa.attention(QUERY, KEY, VALUE, **options_for(QUERY, KEY, name))
       for name in OPTIONS},
    "attention_weights": lambda: sdpa.attention_weights(QUERY, KEY),
    "attention_backward": lambda: sdpa.attention_backward(GRAD_OUT, QUERY, KEY, VALUE, *FORWARD, causal=True)[:3],
    "attention_varlen": lambda: sdpa.attention_varlen(*PACKED, cu_seqlens_q=COUNTS, causal=True),
    "attention_varlen_backward": lambda: sdpa.attention_varlen_backward(
        np.ones_like(PACKED_FORWARD[0]), *PACKED, *PACKED_FORWARD, cu_seqlens_q=COUNTS)[:3],
    "additive_attention": lambda: sdpa.additive_attention(
        QUERY, KEY, VALUE, WEIGHT[:8, :16], WEIGHT[8:16, :16], WEIGHT[0, :8]),
    "explain": lambda: sdpa.explain(QUERY, KEY, VALUE, threads=2),
    "merge": lambda: sdpa.merge([FORWARD[0]] * 2, [FORWARD[1]] * 2),
    "scaled_dot_product_attention": lambda: sdpa.scaled_dot_product_attention(
        QUERY, KEY, VALUE, is_causal=True, enable_gqa=True),
    "KVCache": lambda: in_one(sdpa.KVCache(batch=2, kv_heads=2, head_dim=16, value_dim=24)),
    "KVCache, shared": lambda: SHARED["cache"].attend(QUERY),
    "KVCache of int8": lambda: in_one(sdpa.KVCache(batch=2, kv_heads=2, head_dim=16, value_dim=24, dtype="int8")),
    "PagedKVCache": in_pages,
    "MultiHeadAttention": lambda: SHARED["layer"](X, causal=True),
    "Linear": lambda: SHARED["linear"](X, threads=2),
    "FeedForward": lambda: SHARED["feed"](X, residual=X),
    "layer_norm": lambda: sdpa.layer_norm(X, WEIGHT[0], WEIGHT[1], residual=X),
    "rms_norm": lambda: sdpa.rms_norm(X, WEIGHT[0]),
    "rotary": lambda: sdpa.rotary(QUERY, np.arange(70), interleaved=True),
    "kernels": sdpa.kernels,
    "build_info": sdpa.build_info,
}  # fmt: skip


def same(one, other):
    if isinstance(one, (list, tuple)) and not isinstance(one, sdpa.Explanation):
        return len(one) == len(other) and all(map(same, one, other))
    return one.tobytes() == other.tobytes() if isinstance(one, np.ndarray) else one == other


def test_nothing_that_computes_is_missing():
    elsewhere = {"Explanation", "Gradients", "distributed", "lab", "models", "reference"}
    assert {name.partition(":")[0].partition(",")[0].partition(" of")[0] for name in CALLS} == {
        *sdpa.__all__
    } - elsewhere


@pytest.mark.parametrize("threads", [1, 3])
def test_everything_from_many_threads(threads, monkeypatch):
    """Each caller begins with another function, so that each runs beside all others."""
    monkeypatch.setenv("SDPA_NUM_THREADS", str(threads))
    expected = {name: call() for name, call in CALLS.items()}
    start = threading.Barrier(CALLERS)

    def work(caller):
        names = list(itertools.islice(itertools.cycle(CALLS), caller * 7, caller * 7 + ROUNDS * len(CALLS)))
        start.wait(60)
        return [name for name in names if not same(CALLS[name](), expected[name])]

    with ThreadPoolExecutor(CALLERS) as pool:
        assert not [wrong for names in pool.map(work, range(CALLERS)) for wrong in names]


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_nothing_switches_the_gil_on():
    """The import alone does not either, where the environment does not keep it off."""
    assert not sys._is_gil_enabled()
    assert run_python("import sys, sdpa; print(sys._is_gil_enabled())", PYTHON_GIL="") == "False"
