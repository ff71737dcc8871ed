"""Tests the wheel for Windows on this Linux machine, under Wine: python tests/builds/windows.py [-k linear]

There is no Python for Windows on the package index, but a package that brings one along for programs made with it
(panda3d: its libraries of Python 3.11).  With the modules of a Python 3.11 of this machine, and a python.exe of three
lines, it is a whole one.  The wheel comes from dist/ (make wheels); further arguments go to pytest.  Wine has one
process at a time here, and no processes with fewer rights.  Where something is missing, the script says what.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from targets import PIP, TARGETS, ZIG, import_library, settings_of
from wheels import find_pythons

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "windows"
VERSION, BRINGS_PYTHON = "3.11", "panda3d==1.10.16"
# The last NumPy that gets along with what Wine 8 has of the C library, which lacks functions of complex numbers.
TOOLS = ["numpy==1.26.4", "ml_dtypes<0.5", "pytest", "hypothesis", "setuptools", "colorama"]
START = """
#include <wchar.h>
extern __declspec(dllimport) int Py_Main(int, wchar_t **);
int wmain(int count, wchar_t **arguments) { return Py_Main(count, arguments); }
"""
TESTS = ["attention", "backward", "cache", "layer", "oracle"]
# Other programs, and what Windows has not.
UNFIT = ["test_memory", "interrupt", "simulated_cpu", "saved", "folder", "thread", "environment", "wrong_name", "fork"]
UNFIT += ["signals", "killed", "load_sees"]  # which Wine does not end, so that they run on


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit()


def fetch(*arguments):
    platforms = ["--platform=win_amd64", f"--python-version={VERSION}", "--only-binary=:all:"]
    subprocess.run([*PIP, *arguments[:1], *platforms, *arguments[1:]], check=True)


def make_python(folder):
    """A python.exe for Windows, with its libraries and modules beside it."""
    here = find_pythons([VERSION]).get(VERSION)
    if not here:
        skip(f"there is no Python {VERSION} whose modules could serve")
    libraries = folder / "DLLs"
    libraries.mkdir(parents=True)
    fetch("download", "--no-deps", "--dest", str(folder), BRINGS_PYTHON)
    (package,) = folder.glob("panda3d*.whl")
    with zipfile.ZipFile(package) as archive:
        for member in archive.infolist():
            if member.filename.startswith("deploy_libs/") and member.filename.endswith((".dll", ".pyd")):
                name = Path(member.filename).name
                # What Wine has of its own is older, or newer, than Python asks for; the C library is Wine's.
                if not name.lower().startswith(("api-ms", "tcl", "tk", "ucrt")):
                    place = folder if name.endswith(".dll") else libraries
                    (place / name).write_bytes(archive.read(member))
    package.unlink()
    settings, _ = settings_of(here)
    unwanted = shutil.ignore_patterns("site-packages", "lib-dynload", "__pycache__", "test", "idlelib", "config-*")
    shutil.copytree(settings["LIBDEST"], folder / "Lib", ignore=unwanted)
    (folder / "python.c").write_text(START)
    link = import_library(folder, VERSION, settings).split()
    compiler = [*ZIG.split(), "cc", "-target", TARGETS["win-amd64"].zig, "-municode", "-O2"]
    subprocess.run([*compiler, folder / "python.c", "-o", folder / "python.exe", *link], check=True)
    site = folder / "Lib" / "site-packages"
    fetch("install", "--target", str(site), *TOOLS)
    return site


def main():
    if not shutil.which("wine"):
        skip("wine is not installed (Debian: wine wine64)")
    tag = VERSION.replace(".", "")
    wheels = list((ROOT / "dist").glob(f"sdpa-*-cp{tag}-cp{tag}-win_amd64.whl"))
    if not wheels:
        skip("there is no wheel for Windows in dist/ (make wheels)")
    python = FOLDER / "python"
    if not (python / "ready").exists():
        shutil.rmtree(python, ignore_errors=True)
        make_python(python)
        (python / "ready").touch()
    site = python / "Lib" / "site-packages"
    shutil.rmtree(site / "sdpa", ignore_errors=True)
    zipfile.ZipFile(wheels[-1]).extractall(site)
    work = FOLDER / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(ROOT / "tests", work / "tests")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / name, work)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SDPA_", "OMP_"))}
    environment |= {"WINEPREFIX": str(FOLDER / "wine"), "WINEDEBUG": "-all", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-p", "no:cacheprovider", "--cover=0", "--hypothesis-profile=few", "-k", f"not ({' or '.join(UNFIT)})"]
    tests = [f"tests/{name}" for name in TESTS]

    def in_wine(*arguments):
        """What it prints goes through a pipe: Wine takes no file for a terminal."""
        command = ["wine", python / "python.exe", "-m", *arguments]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with subprocess.Popen(command, cwd=work, env=environment, **pipes) as process:
            for line in process.stdout:
                print(line.decode(errors="replace").rstrip(), flush=True)
        return process.returncode

    sys.exit(in_wine("sdpa", "info") or in_wine("pytest", "-q", *options, *(sys.argv[1:] or tests)))


if __name__ == "__main__":
    main()
