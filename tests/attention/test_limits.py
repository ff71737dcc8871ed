"""Too little memory, or too few threads: an error or fewer threads, never a crash or a hang.  Each in a process of its
own, which gets less and less."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from support.models import write_model
from support.processes import run_python

resource = pytest.importorskip("resource", reason="there are no limits to set here")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux alone")

CALLS = """
import errno, faulthandler, os, resource, tempfile, threading
import mmap  # what NumPy imports when it first maps a file, which takes addresses
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

rows = [x[0].swapaxes(0, 1) for x in (query, key, value)]
starts = dict(cu_seqlens_q=[0, 300, 700], cu_seqlens_k=[0, 300, 700])
packed_out, packed_lse = sdpa.attention_varlen(*rows, **starts, return_lse=True, threads=1)
embed = sdpa.MultiHeadAttention(512, 8, in_proj_weight=weight[:, :512].repeat(2, axis=0)[:1536],
                                out_proj_weight=weight[:512, :512])

def decoded():
    model = sdpa.models.load(MODEL)
    caches = model.new_caches(1)
    model(np.arange(700)[None] % 97, caches=caches)
    return model(np.array([[5]]), caches=caches)

calls = dict(
    many=lambda: sdpa.attention(query, key, value, threads=8),
    few=lambda: sdpa.attention(query[:, :, :1], key, value, threads=8),
    weights=lambda: sdpa.attention_weights(query, key, threads=8),
    backward=lambda: sdpa.attention_backward(out, query, key, value, out, lse, threads=8),
    packed=lambda: sdpa.attention_varlen(*rows, **starts, threads=8),
    packed_backward=lambda: sdpa.attention_varlen_backward(
        packed_out, *rows, packed_out, packed_lse, **starts, threads=8),
    layer=lambda: embed(x[:700, :512], causal=True, threads=8), decoded=decoded,
    torch_like=lambda: sdpa.scaled_dot_product_attention(query, key, value, attn_mask=np.tri(700, dtype=bool)),
    cached=cached, rounded=lambda: cached(dtype=np.int8), paged=paged, saved=saved,
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
    except OSError as error:
        code = 1 if error.errno == errno.ENOMEM else 3  # of a file that is mapped
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
    "many few weights backward packed packed_backward layer decoded torch_like cached rounded paged saved merge linear "
    "feed norm rotary additive"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "m", "llama", hidden_size=256, vocab_size=97)


@pytest.mark.parametrize("name", NAMES)
def test_too_little_memory(name, model):
    """Threads included: their stacks are addresses, too.  With one heap for all threads, as each has room for much."""
    code = f"MODEL, NAME = {str(model)!r}, {name!r}\n" + CALLS + LESS
    done, refused = map(int, run_python(code, timeout=300, MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="8").split())
    assert done and (refused or name == "few")  # which needs next to nothing


@contextlib.contextmanager
def control_group(controller, settings):
    """A new group with the one of the settings {file: text} that there is, as containers have; skips without one."""
    roots = [Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")]  # of version 1, and of version 2
    group = next((group for root in roots if (group := new_group(root, settings))), None)
    if group is None:
        pytest.skip("no control group can be made here")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def new_group(root, settings):
    group = root / f"sdpa-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    for file, text in settings.items():
        if (group / file).exists():
            (group / file).write_text(text)
            return group
    group.rmdir()
    return None


def test_a_quota_of_a_control_group():
    with control_group("cpu", {"cpu.cfs_quota_us": "100000", "cpu.max": "100000 100000"}) as members:
        code = f"import os; open({str(members)!r}, 'w').write(str(os.getpid())); import sdpa\n"
        assert run_python(code + "print(sdpa.build_info()['usable_cpus'])") == "1"


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_control_group_of_few_processes(most):
    """Fewer threads, however often they are asked for."""
    with control_group("pids", {"pids.max": str(most)}) as members:
        code = f"""
import os, numpy as np, sdpa
x = np.ones((1, 2, 1500, 64), np.float32)
expected = sdpa.attention(x, x, x, threads=1)
open({str(members)!r}, "w").write(str(os.getpid()))
for _ in range(3):
    assert (sdpa.attention(x, x, x, threads=8) == expected).all()
    sdpa.attention_backward(x, x, x, x, x, np.ones((1, 2, 1500), np.float32), threads=8)
    sdpa.Linear(x[0, 0].T[:, :900])(x[0, 0, :900].T, threads=8)
print(len(os.listdir("/proc/self/task")))
"""
        assert run_python(code, OPENBLAS_NUM_THREADS="1") == str(most)
