"""Too little memory, or too few threads: an error or fewer threads, never a crash or a hang.  Each in a process of its
own, which gets less and less."""

import sys

import pytest
from support.processes import run_python

resource = pytest.importorskip("resource", reason="there are no limits to set here")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux alone")

CALLS = """
import faulthandler, os, resource, tempfile, threading
import numpy as np, sdpa
faulthandler.enable()
rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 1, 8, 700, 64), np.float32)
out, lse = sdpa.attention(query, key, value, return_lse=True, threads=1)
x, weight = rng.standard_normal((2, 800, 800), np.float32)
folder = tempfile.mkdtemp() + "/cache"

def cached(**options):
    cache = sdpa.KVCache(1, 8, 64, **options)
    cache.append(key, value)
    return cache.attend(query[:, :, :3])

def paged():
    cache = sdpa.PagedKVCache(100, 16, 8, 64)
    sequence = cache.allocate()
    cache.append(sequence, key[0], value[0])
    return cache.attend(query[0], sequence)

def saved():
    cache = sdpa.KVCache(1, 8, 64)
    cache.append(key, value)
    cache.save(folder)
    return sdpa.KVCache.load(folder).attend(query)

def packed():
    rows = [x[0].swapaxes(0, 1) for x in (query, key, value)]
    return sdpa.attention_varlen(*rows, cu_seqlens_q=[0, 300, 700], threads=8)

calls = dict(
    many=lambda: sdpa.attention(query, key, value, threads=8),
    few=lambda: sdpa.attention(query[:, :, :1], key, value, threads=8),
    weights=lambda: sdpa.attention_weights(query, key, threads=8),
    backward=lambda: sdpa.attention_backward(out, query, key, value, out, lse, threads=8),
    packed=packed, cached=cached, rounded=lambda: cached(dtype=np.int8), paged=paged, saved=saved,
    merge=lambda: sdpa.merge([out] * 3, [lse] * 3),
    linear=lambda: sdpa.Linear(weight, activation="gelu")(x, threads=8),
    feed=lambda: sdpa.FeedForward(weight, weight)(x, threads=8),
    norm=lambda: sdpa.layer_norm(x, residual=x, threads=8),
    rotary=lambda: sdpa.rotary(query, 0, threads=8),
    additive=lambda: sdpa.additive_attention(
        query[:, :, :99], key, value, weight[:9, :64], weight[:9, :64], weight[0, :9], threads=8),
)
"""
LESS = """
def used():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()

def limited(room):
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used() + (room << 20), hard))
        call()
        code = 0
    except MemoryError:
        code = 1
    finally:
        os._exit(code)

done, refused = 0, 0
call = calls[NAME]
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
# A thread needs 8 MB of addresses, and maybe 128 for its heap.
for room in [0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 24, 25, 33, 41, 60, 65, 90, 130, 140, 200, 280, 420, 3000]:
    child = os.fork()
    if child == 0:
        # The thread that a forked process begins with computes alone (see sdpa/_runtime/threads.py), others do not.
        thread = threading.Thread(target=limited, args=(room,))
        thread.start()
        thread.join()
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), (room, status)
    done, refused = done + (status == 0), refused + (status == 1)
assert status == 0
print(done, refused)
"""


NAMES = (
    "many few weights backward packed cached rounded paged saved merge linear feed norm rotary additive".split()
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_too_little_memory(name):
    """Threads included: their stacks are addresses, too.  With one heap for all threads, as each has room for much."""
    done, refused = map(int, run_python(CALLS + f"NAME = {name!r}\n" + LESS, timeout=300, MALLOC_ARENA_MAX="1").split())
    assert done and (refused or name == "few")  # which needs next to nothing
