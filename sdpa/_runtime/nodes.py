"""Machines with several sockets, each with memory of its own (a NUMA node): where what all threads read lies."""

import re
from pathlib import Path

from .. import _core
from . import threads

LARGE = 4 << 20  # bytes: less is soon in the caches of all


def count(root="/sys/devices/system/node"):
    """The nodes that have memory; 1 where the system does not say."""
    try:
        text = Path(root, "has_memory").read_text()
    except OSError:
        return 1
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)  # such as 0-1,4
    return max(1, sum(int(last or first) - int(first) + 1 for first, last in ranges))


COUNT = count()


def spread(array):
    """`array`, which is new and has not been touched, its pages spread over the nodes of the threads: a page lies where
    the thread runs that is the first to touch it.  With one node nothing is done, and pages cost nothing before they
    are used."""
    if COUNT > 1 and array.nbytes >= LARGE:
        _core.touch(array, threads.count())
    return array
