"""How many threads are used, and that threads and processes of the caller do no harm."""

import math
import os
import platform
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.accuracy import assert_same_bits
from support.draw import draw
from support.processes import run_python

import sdpa
from sdpa import _core
from sdpa._runtime import threads as _threads

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_threads = pytest.mark.skipif(_core.THREADS == "none", reason="built without threads")
needs_openmp = pytest.mark.skipif(_core.THREADS != "openmp", reason="built without OpenMP")
needs_pool = pytest.mark.skipif(_core.THREADS != "pool", reason="the threads are those of OpenMP")
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="there is no /proc to count threads in")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in "SDPA_NUM_THREADS", "OMP_NUM_THREADS":
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "environment, given, expected",
    [
        (dict(SDPA_NUM_THREADS="3"), None, 3),
        (dict(OMP_NUM_THREADS="5"), None, 5),
        (dict(SDPA_NUM_THREADS="3", OMP_NUM_THREADS="5"), None, 3),
        (dict(SDPA_NUM_THREADS="3", OMP_NUM_THREADS="5"), 2, 2),
        (dict(SDPA_NUM_THREADS="bad"), 2, 2),
        (dict(OMP_NUM_THREADS="4,2"), None, 4),
        (dict(OMP_NUM_THREADS=" 4 "), None, 4),
        (dict(SDPA_NUM_THREADS="", OMP_NUM_THREADS="5"), None, 5),
    ],
    ids=str,
)
def test_order_of_precedence(monkeypatch, environment, given, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _threads.count(given) == expected
    assert sdpa.explain(*draw(8, 8, 8, 64, 512), threads=given).threads == expected


@pytest.mark.parametrize("value", ["bad", "0", "-2", "1.5", "2 threads"])
def test_a_bad_number_of_ours_is_an_error(monkeypatch, value):
    monkeypatch.setenv("SDPA_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"SDPA_NUM_THREADS is '{value}'.*1 or more"):
        sdpa.attention(*draw(8, 8, 8, 64, 512))


@pytest.mark.parametrize("value", ["bad", "0", "-2", ""])
def test_a_bad_number_of_others_is_ignored(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert _threads.count() == _threads.usable_cpus()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity():
    code = """
import os, sdpa
cpus = sorted(os.sched_getaffinity(0))
for n in range(1, len(cpus) + 1):
    os.sched_setaffinity(0, cpus[:n])
    print(n == sdpa._runtime.threads.usable_cpus() == sdpa._runtime.threads.count() == sdpa.build_info()["usable_cpus"])
"""
    if _threads.cpu_quota() < len(os.sched_getaffinity(0)):
        pytest.skip("a CPU quota binds tighter than affinity here")
    assert set(run_python(code).split()) == {"True"}


PINNING = [
    dict(OMP_PROC_BIND="true"), dict(OMP_PROC_BIND="close"), dict(OMP_PROC_BIND="spread"), dict(OMP_PLACES="cores"),
    dict(GOMP_CPU_AFFINITY="CPUS"),
]  # fmt: skip


@needs_threads
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize("environment", PINNING, ids=str)
def test_pinned_threads(environment):
    """OpenMP pins the thread that imports this library to one CPU; the process still has all that it had.  A pool of
    our own pins nothing."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == 1 or _threads.cpu_quota() < len(cpus):
        pytest.skip("there is one CPU, or a CPU quota binds tighter than affinity here")
    environment = {name: value.replace("CPUS", " ".join(map(str, cpus))) for name, value in environment.items()}
    code = COUNT + "print(sdpa._runtime.threads.count(), sdpa.build_info()['usable_cpus'], 1 + started(2000))"
    expected = f"{len(cpus)} {len(cpus)} {len(cpus)}"
    assert run_python(code, **environment) == expected


def files(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    "limits, quota",
    [
        ({}, math.inf),
        ({"": "max 100000"}, math.inf),
        ({"a/b": "max 100000"}, math.inf),
        ({"a/b": "200000 100000"}, 2),
        ({"a/b": "150000 100000"}, 2),
        ({"a/b": "10000 100000"}, 1),
        ({"a": "300000 100000", "a/b": "max 100000"}, 3),
        ({"a": "100000 100000", "a/b": "400000 100000"}, 1),
        ({"": "200000 50000"}, 4),
        ({"a/b": "nonsense"}, math.inf),
        ({"c": "100000 100000"}, math.inf),
    ],
    ids=str,
)
def test_quota_of_control_groups_2(tmp_path, limits, quota):
    for group, text in limits.items():
        files(tmp_path / "root" / group, cpu__max=text)
    files(tmp_path, own="0::/a/b")
    assert _threads.cpu_quota(tmp_path / "root", tmp_path / "own") == quota


@pytest.mark.parametrize(
    "group, limit, quota",
    [("a/b", "250000", 3), ("a", "100000", 1), ("", "200000", 2), ("a/b", "-1", math.inf), ("c", "100000", math.inf)],
)
def test_quota_of_control_groups_1(tmp_path, group, limit, quota):
    files(tmp_path / "root" / "cpu,cpuacct" / group, cpu__cfs_quota_us=limit, cpu__cfs_period_us="100000")
    files(tmp_path / "root" / "memory" / "a/b", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    files(tmp_path, own="5:memory:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b")
    assert _threads.cpu_quota(tmp_path / "root", tmp_path / "own") == quota


def test_no_control_groups(tmp_path):
    assert _threads.cpu_quota(tmp_path, tmp_path / "nothing") == math.inf


def test_the_tighter_of_quota_and_affinity(monkeypatch):
    monkeypatch.setattr(_threads, "_QUOTA", 1)
    assert _threads.usable_cpus() == 1
    monkeypatch.setattr(_threads, "_QUOTA", math.inf)
    assert _threads.usable_cpus() >= 1


def test_any_number_of_threads():
    arrays = draw(1, 2, 2)
    expected = sdpa.attention(*arrays, threads=1)
    for threads in (2, 7, 10**30):
        assert_same_bits(sdpa.attention(*arrays, threads=threads), expected)


def test_calls_from_eight_python_threads_at_once(kernel):
    problems = [draw(1, 2, 1, 100 + n, 300, 16, 16, seed=n) for n in range(8)]
    expected = [sdpa.attention(*arrays, causal=True, threads=1) for arrays in problems]
    start = threading.Barrier(8)

    def work(n):
        start.wait(30)
        return [sdpa.attention(*problems[n], causal=True, threads=1 + n % 3) for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        for results, right in zip(pool.map(work, range(8)), expected):
            for result in results:
                assert_same_bits(result, right)


@pytest.mark.parametrize("options", [{}, dict(softcap=1.0)], ids=["short way", "long way"])
def test_the_gil_is_released(options, monkeypatch):
    """Another thread counts.  It gets the GIL only when somebody lets go of it: nobody is interrupted."""
    monkeypatch.setenv("SDPA_NUM_THREADS", "1")
    arrays = draw(1, 8, 8, 512, 1024, 64, 64)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    try:
        sys.setswitchinterval(100)
        thread.start()
        before = counted[0]
        for _ in range(5):
            sdpa.attention(*arrays, **options)
        during = counted[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert during > 5


START = """
import os, signal, sys, threading
import numpy as np, sdpa
x = np.random.default_rng(0).standard_normal((1, 4, 300, 32)).astype(np.float32)
def right(threads=3):
    return bool((sdpa.attention(x, x, x, threads=threads) == expected).all())
def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that hangs dies of it
        os._exit(0 if work() else 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
expected = sdpa.attention(x, x, x, threads=1)
"""

FORKS = {
    "before any parallel call": "print(in_child(right))",
    "after a parallel call": "right(); print(in_child(right), in_child(right)); assert right()",
    "after a call without options": """
os.environ['SDPA_NUM_THREADS'] = '2'
sdpa.attention(x, x, x)
print(in_child(right))""",
    "at once, and none is asked for": """
os.environ['SDPA_NUM_THREADS'] = '2'
right(None)
print(*[right(None) and in_child(lambda: right(None)) for _ in range(3)])""",
    "of a fork": "right(); print(in_child(lambda: right() and in_child(right) == 0))",
    "of a fork that was parallel": "print(in_child(lambda: right() and in_child(right) == 0))",
    "and threads in the child": """
right()
def work():
    results = []
    threads = [threading.Thread(target=lambda: results.append(right())) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results == [True] * 3 and right()
print(in_child(work))""",
    "from another thread": """
right()
results = []
thread = threading.Thread(target=lambda: results.append(right() and in_child(right)))
thread.start()
thread.join()
print(*results)""",
    "while another thread computes": """
stop = threading.Event()
def work():
    while not stop.is_set():
        right()
thread = threading.Thread(target=work)
thread.start()
print(*[in_child(right) for _ in range(5)])
stop.set()
thread.join()""",
    "of multiprocessing": """
import multiprocessing
right()
with multiprocessing.get_context('fork').Pool(2) as pool:
    print(*[0 if same else 1 for same in pool.map_async(right, [2, 3, 1, 2]).get(timeout=30)])""",
}


@needs_fork
@pytest.mark.parametrize("code", FORKS.values(), ids=FORKS)
def test_fork(code):
    assert set(run_python(START + code).split()) == {"0"}


COUNT = """
import os, time, numpy as np, sdpa
def started(M, seconds=0, **options):
    before = len(os.listdir('/proc/self/task'))
    x = np.ones((1, 2, M, 64), np.float32)
    sdpa.attention(x, x, x, **options)
    time.sleep(seconds) if seconds else None  # threads that OpenMP lets go take some time to end
    return len(os.listdir('/proc/self/task')) - before
"""


@needs_proc
@needs_threads
def test_small_calls_start_no_threads():
    code = COUNT + "print(started(8), started(8, scale=1.0), started(8, threads=1), started(2000))"
    assert run_python(code, SDPA_NUM_THREADS="2") == "0 0 0 1"


@needs_proc
@needs_threads
def test_a_small_call_that_comes_alone_starts_no_threads():
    """Those that follow at once do, as waking threads is worth while for many."""
    code = COUNT + "print(started(60), sum(started(60) for _ in range(1000)))"
    assert run_python(code, SDPA_NUM_THREADS="2", OMP_WAIT_POLICY="active") == "0 1"
    if _core.THREADS == "openmp":
        assert run_python(code, SDPA_NUM_THREADS="2", OMP_WAIT_POLICY="passive") == "0 0"


@needs_proc
@needs_threads
def test_one_thread_starts_none():
    assert run_python(COUNT + "print(started(1000))", SDPA_NUM_THREADS="1") == "0"


@needs_proc
@needs_threads
@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_limit_of_processes(room):
    """OpenMP would end the process where it cannot start a thread.  With room for fewer, fewer compute; with no limit
    any more, all."""
    code = (
        COUNT
        + f"""
import resource
user = 54321  # root knows no limit
if os.getuid() == 0:
    try:
        os.setuid(user)
    except OSError:
        print("no other user")
        raise SystemExit
mine = [entry for entry in os.scandir("/proc") if entry.name.isdecimal() and entry.stat().st_uid == os.getuid()]
now = sum(len(os.listdir(entry.path + "/task")) for entry in mine)
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (now + {room}, hard))
limited = [started(2000, threads=8) for _ in range(5)]
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
print(*limited, started(2000, threads=8))
"""
    )
    printed = run_python(code)
    if printed == "no other user":
        pytest.skip("root may not become another user here")
    assert printed == f"{room} 0 0 0 0 {7 - room}"


@needs_proc
@needs_threads
def test_a_larger_team_each_time():
    code = COUNT + "print(*[started(2000, 0.2, threads=n) for n in (2, 4, 3, 3, 8, 1, 8)])"
    assert run_python(code) == ("1 2 0 0 4 0 0" if _core.THREADS == "pool" else "1 2 -1 0 5 0 0")


@needs_proc
@needs_threads
def test_a_team_stays_for_calls_with_less_work():
    """Threads that OpenMP lets go are started again for the next large call; the pool keeps its own."""
    code = (
        COUNT
        + """
print(*[started(n, 0.2 * (n == 40)) for n in (2000, 40, 2000, 8, 2000)])
os.environ["SDPA_NUM_THREADS"] = "2"
print(started(2000, 0.2))
"""
    )
    found = run_python(code, SDPA_NUM_THREADS="4").split()
    assert found == ["3", "0", "0", "0", "0", "0" if _core.THREADS == "pool" else "-2"]


@needs_proc
@needs_openmp
def test_the_state_of_openmp_is_not_changed():
    code = """
import ctypes, numpy as np, sdpa
paths = {line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line}
omp = [lib for lib in map(ctypes.CDLL, paths) if hasattr(lib, 'omp_get_max_threads')]
def state():
    return [[f() for f in (lib.omp_get_max_threads, lib.omp_get_dynamic, lib.omp_get_max_active_levels)] for lib in omp]
before = state()
x = np.ones((1, 8, 300, 32), np.float32)
for threads in (3, 1, 2):
    sdpa.attention(x, x, x, threads=threads)
print(len(omp) > 0, state() == before)
"""
    assert run_python(code, OMP_NUM_THREADS="5") == "True True"


@needs_proc
@needs_pool
def test_calls_at_once_share_the_threads():
    """There are as many as the largest call asked for, however many call."""
    before = "import os\nbefore_any = len(os.listdir('/proc/self/task'))"
    calls = """
from concurrent.futures import ThreadPoolExecutor
callers = 6
with ThreadPoolExecutor(callers) as pool:
    list(pool.map(lambda _: started(600, threads=3), range(60)))
    print(len(os.listdir('/proc/self/task')) - before_any - callers)
"""
    assert run_python(before + COUNT + calls, OPENBLAS_NUM_THREADS="1") == "2"


@needs_fork
@needs_proc
@needs_pool
def test_a_forked_child_has_threads_of_its_own():
    work = "lambda: right() and started(2000, threads=4) > 0 and len(os.listdir('/proc/self/task')) == 4"
    assert run_python(START + COUNT + f"right(); print(in_child({work}))") == "0"


BORROW = """
import ctypes
try:
    ctypes.CDLL("libgomp.so.1")
except OSError:
    print("no libgomp")
    raise SystemExit
"""


def run_borrowing(code):
    printed = run_python(BORROW + code)
    if printed == "no libgomp":
        pytest.skip("there is no libgomp to borrow threads from")
    return printed


@needs_proc
@needs_pool
@pytest.mark.skipif(sys.platform != "linux", reason="threads are borrowed on Linux alone")
def test_threads_of_a_libgomp_that_is_loaded_are_borrowed():
    """It has others for each thread that calls it, where the pool has the same for all."""
    code = """
from concurrent.futures import ThreadPoolExecutor
print(started(2000, threads=4), started(2000, threads=4))
with ThreadPoolExecutor(1) as other:
    other.submit(int).result()
    print(other.submit(started, 2000, threads=4).result())
"""
    assert run_borrowing(COUNT + code).split() == ["3", "0", "3"]


@needs_fork
@needs_pool
def test_a_forked_child_borrows_no_threads():
    """They would be waited for without end; also where the parent had not called before."""
    in_both = "right(); print(in_child(right))"
    assert run_borrowing(START + in_both) == "0"
    used_by_others = """
gomp = ctypes.CDLL("libgomp.so.1")
gomp.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda of: None), None, 3, 0)
print(in_child(lambda: right() and right()))
"""
    assert run_borrowing(START + used_by_others) == "0"


@needs_pool
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number that means upward is that of x86-64")
def test_all_threads_round_as_the_caller_does():
    code = """
import ctypes, ctypes.util, numpy as np, sdpa
x = np.random.default_rng(0).standard_normal((1, 4, 300, 32)).astype(np.float32)
def results():
    return [sdpa.attention(x, x, x, threads=threads) for threads in (1, 2, 2, 2)]
nearest = results()
ctypes.CDLL(ctypes.util.find_library("m")).fesetround(0x800)
upward = results()
print(*[bool((one == same[0]).all()) for same in (nearest, upward) for one in same])
print(bool((nearest[0] == upward[0]).all()))
"""
    assert run_python(code).split() == ["True"] * 8 + ["False"]


@needs_proc
@needs_pool
def test_signals_are_for_the_threads_of_the_program():
    code = """
import os, signal, numpy as np, sdpa
before = set(os.listdir('/proc/self/task'))
x = np.ones((1, 2, 2000, 64), np.float32)
sdpa.attention(x, x, x, threads=3)
def blocked(task, number):
    lines = dict(line.split(':', 1) for line in open(f'/proc/self/task/{task}/status'))
    return int(lines['SigBlk'], 16) >> number - 1 & 1
workers = set(os.listdir('/proc/self/task')) - before
print(*[blocked(task, number) for task in sorted(workers) for number in (signal.SIGINT, signal.SIGSEGV)])
"""
    assert run_python(code) == "1 0 1 0"
