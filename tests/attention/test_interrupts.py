"""A signal stops a call that runs long: soon, with its memory released, and the next call works."""

import signal

import pytest
from support.processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that send signals")

# Rows that are all the same memory make problems of any size.  Each call but those of `partly` would take a minute or
# more, on any machine; where it is not stopped, the watchdog ends the child.
START = """
import faulthandler, gc, signal, threading, time, tracemalloc
import numpy as np, numpy.ma, sdpa
from sdpa import _core
from sdpa._layer.linear import Linear

def raise_it(*_):
    raise KeyboardInterrupt

def repeated(*shape, dtype=np.float32):
    return np.broadcast_to(np.ones(shape[-1], dtype), shape)

def stopped(call):
    faulthandler.dump_traceback_later(30, exit=True)
    before = tracemalloc.get_traced_memory()[0]
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        call()
        return False
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before < 50_000

def works():
    x = np.random.default_rng(0).standard_normal((1, 4, 300, 32)).astype(np.float32)
    return np.allclose(sdpa.attention(x, x, x, threads=2), sdpa.reference.attention(x, x, x), atol=1e-5)

signal.signal(signal.SIGALRM, raise_it)
works()
tracemalloc.start()
M, N, LONG = 1 << 19, 1 << 27, 1 << 38
few, many, keys = repeated(1, 8, 1, 64), repeated(1, 8, 512, 64), repeated(1, 8, N, 64)
"""

CALLS = {
    "many rows": "sdpa.attention(many, keys, keys, threads=2)",
    "many rows, one thread": "sdpa.attention(many, keys, keys, threads=1)",
    "parts of the keys": "sdpa.attention(few[:, :1], *2 * [repeated(1, 1, LONG, 64)], threads=2)",
    "few rows, one thread": "sdpa.attention(few, *2 * [repeated(1, 8, LONG, 64)], threads=1)",
    "many units": "sdpa.attention(*[repeated(1 << 18, 8, *of) for of in [(32, 64), (4096, 64), (4096, 1)]], threads=2)",
    "hidden keys": "sdpa.attention(few, *2 * [repeated(1, 8, LONG, 64)], mask=np.broadcast_to(False, LONG), threads=2)",
    "packed": "sdpa.attention_varlen(repeated(600, 8, 64), *2 * [repeated(2 * N, 8, 64)], "
    "cu_seqlens_q=[0, 90, 600], cu_seqlens_k=[0, N, 2 * N], threads=2)",
    "weights": "sdpa.attention_weights(*2 * [repeated(1, 4, 8192, 1 << 16)], threads=2)",
    "gradients": "sdpa.attention_backward(*5 * [repeated(1, 1, M, 16)], np.zeros((1, 1, M), np.float32), threads=2)",
    "gradients, one thread": "sdpa.attention_backward(*5 * [repeated(1, 1, M, 16)], np.zeros((1, 1, M), np.float32), "
    "threads=1)",
    "parts to join": "sdpa.merge(4096 * [repeated(1 << 16, 64)], 4096 * [repeated(1 << 16)])",
    "projection": "Linear(np.ones((64, 32768), np.float32))(repeated(1 << 23, 32768), threads=2)",
}


CACHES = {
    "cache": """
cache = sdpa.KVCache(1, 1, 32)
cache.append(*2 * [repeated(1, 1, M, 32)])
print(stopped(lambda: cache.attend(repeated(1, 1, M, 32), causal=False, threads=2)), works())
assert len(cache) == M and (cache.attend(repeated(1, 1, 1, 32)) == 1).all()
""",
    "pages": """
cache = sdpa.PagedKVCache(M // 64, 64, 1, 32)
one = cache.allocate()
cache.append(one, *2 * [repeated(1, M, 32)])
print(stopped(lambda: cache.attend(repeated(1, M, 32), one, causal=False, threads=2)), works())
assert cache.length(one) == M and (cache.attend(repeated(1, 1, 32), one) == 1).all()
""",
}

# Not so long that they would never end, but they leave their last rows as they were.
PARTLY = {
    "rotary": """
x = np.ones((1, 1, 16384, 1024), np.float32)  # of angles that take long
print(stopped(lambda: sdpa.rotary(x, np.arange(16384) + 2**40, out=x, threads=1)), works())
assert (x[..., -1, :] == 1).all()
""",
    "quantise": """
source = np.broadcast_to(np.float64(1), (1, 1, 1 << 22, 128))
out, scales = np.zeros(source.shape, np.int8), np.zeros((*source.shape[:-1], 1), np.float32)
print(stopped(lambda: _core.quantise(source, out, scales, 128)), works())
assert out[0, 0, 0, 0] == 127 and out[0, 0, -1, 0] == 0
""",
    "packing": """
weight, packed = np.broadcast_to(np.float32(1), (1 << 18, 2048)), []
kernel = sdpa._runtime.kernels.default
print(stopped(lambda: packed.append(_core.Panels(kernel, weight.dtype, weight, None, None, None))), works())
assert not packed
""",
}


def test_a_call_is_stopped():
    code = "".join(f"print({name!r}, stopped(lambda: {call}), works())\n" for name, call in CALLS.items())
    assert run_python(START + code, timeout=300).splitlines() == [f"{name} True True" for name in CALLS]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_handler_may_call(threads):
    """On the caller's thread, in the midst of the call; where it does not raise, that goes on."""
    code = """
x = np.random.default_rng(1).standard_normal((1, 8, 4096, 64)).astype(np.float32)
expected, handled = sdpa.attention(x, x, x, threads=THREADS), []
signal.signal(signal.SIGALRM, lambda *_: handled.append(works()))
signal.setitimer(signal.ITIMER_REAL, 0.001)
out = sdpa.attention(x, x, x, threads=THREADS)
print(handled, (out == expected).all())
"""
    assert run_python(START + code.replace("THREADS", str(threads))) == "[True] True"


def test_a_call_of_another_thread_goes_on():
    """Handlers run in Python's main thread alone, as ever."""
    code = """
x = np.random.default_rng(1).standard_normal((1, 8, 3072, 64)).astype(np.float32)
expected, outs = sdpa.attention(x, x, x), []
thread = threading.Thread(target=lambda: outs.append(sdpa.attention(x, x, x, threads=1)))
thread.start()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    time.sleep(60)
except KeyboardInterrupt:
    while not outs:
        time.sleep(0.01)
print((outs[0] == expected).all())
"""
    assert run_python(START + code) == "True"


@pytest.mark.parametrize("code", [*CACHES.values(), *PARTLY.values()], ids=[*CACHES, *PARTLY])
def test_what_there_was_is_unchanged(code):
    assert run_python(START + code) == "True True"
