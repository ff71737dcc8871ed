"""Which kernel is used: the best that this CPU runs, or the one that SDPA_KERNEL names."""

import os
import platform
from pathlib import Path

from .. import _core

# Where nothing was built, the folder of the sources of _core is imported as a package without anything in it.
if not hasattr(_core, "kernels"):
    raise ImportError(
        f"{Path(__file__).resolve().parents[2]} holds the sources of sdpa, not built for this Python: "
        "run `pip install -e .` there, or start Python in another folder"
    )


def find(name):
    """The kernel called `name`, or the best for an empty name."""
    usable = _core.kernels()
    for kernel in usable:
        if not name or kernel.name == name:
            return kernel
    raise ValueError(
        f"no kernel named {name!r} on this CPU; choose one of {[kernel.name for kernel in usable]} for SDPA_KERNEL"
    )


default = find(os.environ.get("SDPA_KERNEL", ""))


def kernels():
    """Names of the kernels that this CPU runs, best first.

    >>> "baseline" in kernels()
    True
    """
    return [kernel.name for kernel in _core.kernels()]


def build_info():
    """What was built and is in use: version, kernel, kernels that this CPU runs, compiler, machine, CPUs; and whose the
    threads are, those of OpenMP ("openmp"), a pool of the library's own ("pool") or none ("none")."""
    from .. import __version__
    from .threads import usable_cpus

    return {
        "version": __version__,
        "kernel": default.name,
        "kernels": kernels(),
        "threads": _core.THREADS,
        "openmp": _core.THREADS == "openmp",
        "compiler": _core.COMPILER,
        "machine": platform.machine(),
        "usable_cpus": usable_cpus(),
    }
