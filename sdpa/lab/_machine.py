"""Where the numbers come from."""

import platform
from pathlib import Path

import numpy as np

from .._runtime import threads
from .._runtime.kernels import build_info


def machine():
    """The machine, and the versions that ran on it: name -> text."""
    built = build_info()
    return {
        "machine": f"{_cpu()}, {built['machine']}, {platform.system()}",
        "threads": str(threads.count()),
        "sdpa": f"{built['version']}, kernel {built['kernel']}",
        "NumPy": np.__version__,
        "Python": platform.python_version(),
    }


def _cpu(path="/proc/cpuinfo"):
    """The name of the CPU, where the system tells."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or "CPU"
