"""Tests the wheel of this system: python tests/builds/installed.py dist [--numpy VERSION] [--tests attention cache]

It is installed into an environment of its own, from the wheels of a folder and not built, with NumPy and what the tests
need; then a part of the tests runs there, or those that --tests names.  A Python without a GIL stays without one,
whatever the tests need.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "ml_dtypes", "setuptools"]
# What reaches all of the compiled part in a minute.
TESTS = [
    "attention/test_threads.py",
    "attention/test_from_many_threads.py",
    "attention/test_kernels.py",
    "attention/test_edges.py",
    "layer",
    "cache/test_paged.py",
]
OPTIONS = ["--cover=0", "--hypothesis-profile=few", "-nauto", "--dist=loadfile", "-q", "-k", "not simulated_cpu"]
SAY = "import platform, numpy, sdpa; print(platform.python_version(), 'NumPy', numpy.__version__, sdpa.build_info())"


def install(folder, wheels, numpy):
    """A Python that has the library."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary=sdpa"]
    # The index may have another sdpa: only that of the folder will do.
    subprocess.run([*pip, "--no-deps", "--no-index", "--find-links", wheels, "sdpa"], check=True)
    subprocess.run([*pip, f"numpy=={numpy}" if numpy else "numpy>=1.25", *TOOLS], check=True)
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--numpy", help="its version; the newest")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files and folders of tests/; what takes a minute")
    args = parser.parse_args()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SDPA_", "OMP_", "PYTHONPATH"))}
    clean |= {"PYTHON_GIL": "0"} if sysconfig.get_config_var("Py_GIL_DISABLED") else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        folder = Path(folder)
        python = install(folder / "venv", args.wheels.resolve(), args.numpy)
        # Not the working tree, where the tests would find another sdpa.
        for name in ("tests", "pyproject.toml", "setup.py"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, folder / name)
        subprocess.run([python, "-c", SAY], cwd=folder, env=clean, check=True)
        tests = [f"tests/{name}" for name in args.tests]
        sys.exit(subprocess.run([python, "-m", "pytest", *tests, *OPTIONS], cwd=folder, env=clean).returncode)


if __name__ == "__main__":
    main()
