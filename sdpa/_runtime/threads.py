"""How many threads a call uses."""

import math
import operator
import os
import threading
from pathlib import Path

from .. import _core

MOST = max(64, 4 * (os.cpu_count() or 1))  # more threads would only wait for each other

_orphan = None  # the thread that a forked child began with


def count(threads=None, sharing=1):
    """`threads` if given, else SDPA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs this process may use, which it
    shares evenly with the other processes of the same work: `sharing` of them, itself included."""
    number = _wanted(threads, sharing)
    # A forked child has none of its parent's threads, but libgomp in the child waits for them, whoever started them.
    return 1 if _core.THREADS == "openmp" and _orphan is not None and _orphan == threading.get_ident() else number


def _wanted(threads, sharing):
    if threads is not None:
        try:
            number = operator.index(None if isinstance(threads, bool) else threads)
        except TypeError:
            raise TypeError(f"threads is {threads!r}: it must be a whole number of 1 or more, or None") from None
        if number < 1:
            raise ValueError(f"threads is {threads}: it must be 1 or more, or None")
        return min(number, MOST)
    own = os.environ.get("SDPA_NUM_THREADS")
    if own:
        if not own.isdecimal() or int(own) < 1:
            raise ValueError(f"SDPA_NUM_THREADS is {own!r}: it must be a whole number of 1 or more")
        return min(int(own), MOST)
    shared = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number per nesting level
    if shared.isdecimal() and int(shared) > 0:
        return min(int(shared), MOST)
    return max(1, usable_cpus() // sharing)


def usable_cpus():
    """The number of CPUs that the affinity and the CPU quota of the control group leave to this process."""
    if _PINNED:
        allowed = _PINNED
    elif hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, _QUOTA))


def cpu_quota(root="/sys/fs/cgroup", own_group="/proc/self/cgroup"):
    """The CPU quota in whole CPUs, rounded up; infinite if there is none.  It reads both versions of control groups.  A
    group is bound by the tightest quota of its ancestors."""
    try:
        lines = Path(own_group).read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = Path(root, controllers) if controllers else Path(root)
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == base.parent:
                break
            quota = min(quota, _quota_of(folder))
    return quota


def _quota_of(folder):
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return math.ceil(int(limit) / int(period)) if limit not in ("max", "-1") else math.inf
    except (OSError, ValueError):
        return math.inf


def _after_fork_in_child():
    global _orphan
    _orphan = threading.get_ident()
    _core.know_threads(_orphan, forked=True)


# With OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY, OpenMP pins threads, this one among them.  The affinity of this
# thread is then one CPU, so we ask OpenMP how many CPUs it found.
_PINNED = _core.know_threads(threading.main_thread().ident or 0)
_QUOTA = cpu_quota()  # read once: the quota seldom changes, and reading it takes longer than a small call
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
