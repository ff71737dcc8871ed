"""Other processes, and the memory of this one."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import sdpa

ROOT = Path(__file__).resolve().parents[2]


def run_python(code, timeout=60, **environment):
    """What `code` prints in a Python of its own, which imports the package that the tests import."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SDPA_", "OMP_"))} | environment
    paths = [str(Path(sdpa.__file__).parents[1]), str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=timeout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def extra_memory(query, key, value, **options):
    sdpa.attention(query, key, value, **options)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        out = sdpa.attention(query, key, value, **options)
        return tracemalloc.get_traced_memory()[1] - before - out.nbytes
    finally:
        tracemalloc.stop()
