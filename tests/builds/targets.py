"""What a Python of another system says to an extension that is built for it here: its headers, its settings, and on
Windows the library to link.

Python's headers are the same on all systems but for pyconfig.h, of which an extension sees little more than the sizes
of C's types.  So those of a Python of this system serve, with another pyconfig.h.  The settings are what a
cross-compiled Python has: a module that _PYTHON_SYSCONFIGDATA_NAME names.
"""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
ZIG = f"{sys.executable} -m ziglang"


class Target(NamedTuple):
    zig: str  # as zig calls it
    platform: str  # as sysconfig.get_platform() does there
    suffix: str  # of extensions, {version} without its dot
    tag: str  # of the wheel that is to be published
    numpy: str  # tags of NumPy's wheels for it, whose headers serve; Python 3.10 has only the older one
    config: str = "posix"  # which pyconfig.h
    flags: str = ""

    @property
    def arm(self):
        return self.zig.startswith("aarch64")

    def extension(self, version):
        """How names of extensions end.  Python 3.10 does not tell musl from glibc."""
        suffix = self.suffix.format(version=version.replace(".", ""))
        return suffix.replace("-musl", "-gnu") if version == "3.10" else suffix


# glibc 2.17 and musl 1.2 are the oldest that wheels are tagged for.  macOS 11 is the first that runs on Arm.
TARGETS = {
    "manylinux-x86_64": Target(
        "x86_64-linux-gnu.2.17", "linux-x86_64", ".cpython-{version}-x86_64-linux-gnu.so", "manylinux_2_17_x86_64",
        "manylinux_2_28_x86_64 manylinux_2_17_x86_64",
    ),
    "manylinux-aarch64": Target(
        "aarch64-linux-gnu.2.17", "linux-aarch64", ".cpython-{version}-aarch64-linux-gnu.so", "manylinux_2_17_aarch64",
        "manylinux_2_28_aarch64 manylinux_2_17_aarch64",
    ),
    "musllinux-x86_64": Target(
        "x86_64-linux-musl", "linux-x86_64", ".cpython-{version}-x86_64-linux-musl.so", "musllinux_1_2_x86_64",
        "musllinux_1_2_x86_64", flags="-dynamic",
    ),
    "musllinux-aarch64": Target(
        "aarch64-linux-musl", "linux-aarch64", ".cpython-{version}-aarch64-linux-musl.so", "musllinux_1_2_aarch64",
        "musllinux_1_2_aarch64", flags="-dynamic",
    ),
    "macosx-arm64": Target(
        "aarch64-macos.11.0", "macosx-11.0-arm64", ".cpython-{version}-darwin.so", "macosx_11_0_arm64",
        "macosx_11_0_arm64", "macos", "-undefined dynamic_lookup",
    ),
    "macosx-x86_64": Target(
        "x86_64-macos.11.0", "macosx-11.0-x86_64", ".cpython-{version}-darwin.so", "macosx_11_0_x86_64",
        "macosx_10_15_x86_64", "macos", "-undefined dynamic_lookup",
    ),
    "win-amd64": Target(
        "x86_64-windows-gnu", "win-amd64", ".cp{version}-win_amd64.pyd", "win_amd64", "win_amd64", "windows",
    ),
}  # fmt: skip

# What extensions see of the pyconfig.h of each system.
CONFIGS = {
    "posix": "",
    "macos": "#undef SIZEOF_PTHREAD_T\n#define SIZEOF_PTHREAD_T 8\n#define _DARWIN_C_SOURCE 1\n",
    "windows": """
#include <basetsd.h>
#include <io.h>
#include <stdio.h>
#define MS_WIN32
#define MS_WIN64
#define MS_WINDOWS
#define NT_THREADS 1
#define WITH_THREAD 1
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL 1
#define HAVE_DYNAMIC_LOADING 1
#define HAVE_ERRNO_H 1
#define HAVE_STDDEF_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_WCHAR_H 1
#define STDC_HEADERS 1
#define WITH_DOC_STRINGS 1
#define WITH_PYMALLOC 1
#define DOUBLE_IS_LITTLE_ENDIAN_IEEE754 1
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_LONG_DOUBLE 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_OFF_T 4
#define SIZEOF_TIME_T 8
#define SIZEOF_PID_T 4
#define SIZEOF_FPOS_T 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF__BOOL 1
#define ALIGNOF_LONG 4
#define ALIGNOF_SIZE_T 8
#define ALIGNOF_MAX_ALIGN_T 8
""",
}


def settings_of(python):
    """All that sysconfig says of a Python here, and its version: 3.14, or 3.14t without a GIL."""
    code = "import json, sysconfig as s; s.get_config_vars(); print(json.dumps(s.get_config_vars()))"
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    settings = json.loads(said)
    return settings, settings["py_version_short"] + settings["abiflags"]


def headers(folder, target, settings):
    """Those of the Python that has the settings, with the target's pyconfig.h."""
    copy = folder / "python"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(settings["INCLUDEPY"], copy)
    config = copy / "pyconfig.h"
    ours = config.read_text()
    if target.config == "windows":
        ours = "#define Py_GIL_DISABLED 1\n" if settings.get("Py_GIL_DISABLED") else ""
    config.write_text(f"#ifndef Py_CONFIG_H\n#define Py_CONFIG_H\n{ours}{CONFIGS[target.config]}\n#endif\n")
    return copy


def numpy_headers(folder, target, python):
    """Of the same NumPy that `python` has, whose declarations Cython reads.  What is built with NumPy 2 runs with older
    ones, too, down to the one that its headers name; the tests of wheels have the oldest."""
    said = "import numpy, sys; print(numpy.__version__, *sys.version_info[:2])"
    version, *short = subprocess.run([python, "-c", said], check=True, capture_output=True, text=True).stdout.split()
    wheels = folder / "numpy"
    found = f"numpy-{version}-*.whl"
    if not any(wheels.glob(found)):
        fetch = [*PIP, "download", "--no-deps", "--only-binary=:all:", f"--python-version={'.'.join(short)}"]
        fetch += [f"--abi=cp{''.join(short)}", *(f"--platform={tag}" for tag in target.numpy.split())]
        subprocess.run([*fetch, "--dest", wheels, f"numpy=={version}"], check=True)
    (wheel,) = wheels.glob(found)
    inside = "numpy/_core/include/"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(inside)])
    return folder / inside


def import_library(folder, version, settings):
    """Of python3xx.dll: its names, as far as the library of the same version has them here."""
    names = set()
    library = Path(settings["LIBDIR"], settings["INSTSONAME"])
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[-1].partition("@")[0]
        names |= {name} if re.match("_?Py", name) else set()
    library = f"python{version.replace('.', '')}"
    definitions = folder / f"{library}.def"
    definitions.write_text(f"LIBRARY {library}.dll\nEXPORTS\n" + "".join(f"    {name}\n" for name in sorted(names)))
    made = folder / f"lib{library}.a"
    command = [*ZIG.split(), "dlltool", "-m", "i386:x86-64", "-d", definitions, "-l", made]
    subprocess.run(command, check=True)
    return f"-L{folder} -l{library}"


def environment(folder, target, python):
    """The variables with which `python` builds for the target, and its version."""
    folder.mkdir(parents=True, exist_ok=True)
    settings, version = settings_of(python)
    found = headers(folder, target, settings)
    include = numpy_headers(folder, target, python)
    compiler = f"{ZIG} cc -target {target.zig} -I{include}"
    link = f"{compiler} -shared {target.flags}"
    if target.config == "windows":
        link += f" {import_library(folder, version, settings)}"
    suffix = target.extension(version)
    ours = {
        "CC": compiler, "LDSHARED": link, "CFLAGS": "-DNDEBUG", "OPT": "", "LDFLAGS": "",
        "CCSHARED": "" if target.config == "windows" else "-fPIC", "EXT_SUFFIX": suffix,
        "SOABI": suffix.split(".")[1], "INCLUDEPY": str(found), "CONFINCLUDEPY": str(found), "Py_ENABLE_SHARED": 0,
        "MACOSX_DEPLOYMENT_TARGET": "11.0",
    }  # fmt: skip
    (folder / "_sysconfigdata_of_target.py").write_text(f"build_time_vars = {settings | ours!r}\n")
    return {
        "_PYTHON_HOST_PLATFORM": target.platform, "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_of_target",
        "PYTHONPATH": str(folder), "CC": compiler, "LDSHARED": link,
    }, version  # fmt: skip
