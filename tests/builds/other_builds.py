"""Runs tests on other builds of the extension: `python tests/builds/other_builds.py arm` on a simulated Arm CPU, for
which the extension is cross-built, and `python tests/builds/other_builds.py sanitized` with the sanitizers of the
compiler.  `python tests/builds/other_builds.py races` runs those of threads with the thread sanitizer, on the library's
own pool.  `python tests/builds/other_builds.py arm-wheel` runs the tests of `arm` with the wheel for Arm in dist/ (make
wheels).  Further arguments go to pytest: -k linear.  `python tests/builds/other_builds.py fuzz-sanitized` runs the
fuzzers of tests/fuzz with the sanitizers; further arguments are theirs.

What is fetched and built is kept in build/arm, build/sanitized and build/races.  Where something is missing, the script
says what.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# Debian's, with all that they need; Python's packages come from where pip finds them.
SYSTEM_PACKAGES = ["python3", "libpython3-dev", "libgomp1", "libstdc++6"]
PACKAGES = ["numpy", "ml_dtypes", "pytest", "hypothesis", "setuptools"]
# What depends on the processor or reaches into memory.
FOLDERS = [ROOT / "tests" / name for name in ("attention", "backward", "cache", "layer")]
# But for what measures memory, runs against a clock, or limits the address space: an emulator and the shadow memory of
# the address sanitizer are in it, too, and where there is no room for them, the process ends.  Under an emulator also
# sizes that take long, kernels that other machines run, too, and what asks the system about threads, of which the
# emulator has its own.
UNFIT = ["test_memory", "interrupts", "simulated_cpu", "test_limits.py"]
LONG = ["larger_sizes", "everything_at_once", "any_problem", "any_sequences", "error_of_int8", "many_rows", "baseline"]
LONG += ["test_threads.py"]


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit()


def run(*command, **environment):
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode == 0


def build(folder, python, environment):
    """Puts the package into folder/lib, which it returns: what runs there imports this package."""
    library = folder / "lib"
    sources = [ROOT / "setup.py", *ROOT.glob("csrc/**/*.[ch]"), *ROOT.glob("sdpa/**/*.p*")]
    changed = max(source.stat().st_mtime for source in sources if source.suffix != ".pyc")
    built = next(library.glob("sdpa/_core.*.so"), None)
    if built is None or changed > built.stat().st_mtime:
        shutil.rmtree(library, ignore_errors=True)
        # All compile the same C, for which the simulated Python needs no Cython.
        made = run(sys.executable, "-m", "Cython.Build.Cythonize", "--quiet", "sdpa/_core.pyx")
        where = ["--build-lib", library, "--build-temp", folder / "temp"]
        command = [python, "setup.py", "--quiet", "build", *where]
        if not (made and run(*command, **environment)):
            sys.exit("the build failed")
    return library


def build_and_test(folder, python, without, arguments, build_environment, test_environment):
    return test(build(folder, python, build_environment), python, without, arguments, test_environment)


def test(library, python, without, arguments, test_environment):
    selection = [*FOLDERS, "--hypothesis-profile=few", "-k", f"not ({' or '.join(without)})"]
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *selection, *arguments]
    # Threads that wait must not spin: these tests have no CPUs to spare.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **test_environment}
    return subprocess.run(command, cwd=library, env=environment).returncode


def debian_for_arm(folder):
    """Unpacks Debian's packages, which an apt with a state of its own chooses and fetches: nothing is installed.
    Returns the path of the Python in them, which starts as one of this machine would."""
    python = folder / "root/usr/bin/python-simulated"
    if python.exists():
        return python
    state = folder / "apt"
    shutil.rmtree(folder, ignore_errors=True)
    for path in ("state/lists/partial", "cache/archives/partial"):
        (state / path).mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "", "Debug::NoLocking": 1,
        "Dir::State": state / "state", "Dir::State::status": state / "status", "Dir::Cache": state / "cache",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run(*apt, "update")  # an archive without Arm does no harm yet
    if not run(*apt, "install", "--download-only", "--yes", "--no-install-recommends", *SYSTEM_PACKAGES):
        skip("apt-get has no packages for arm64")
    for package in state.glob("cache/archives/*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    (real,) = folder.glob("root/usr/bin/python3.[0-9]*")
    version = real.name.removeprefix("python")
    platforms = [f"--platform={name}_aarch64" for name in ("manylinux_2_28", "manylinux2014")]
    site = folder / "root/usr/lib/python3/dist-packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary=:all:"]
    if not run(*pip, f"--python-version={version}", *platforms, "--target", site, *PACKAGES):
        skip("pip could not fetch packages for arm64")
    shutil.rmtree(state)
    # Named after this script, so that what Python starts by its own name is simulated, too.
    python.write_text(f"""#!/bin/sh
root=${{0%/usr/bin/*}}
exec {EMULATOR} -L "$root" -0 "$0" "$root/usr/bin/{real.name}" "$@"
""")
    python.chmod(0o755)
    return python


def python_for_arm(folder):
    if not shutil.which(EMULATOR):
        skip(f"{EMULATOR} is not installed (Debian: qemu-user)")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        skip("Python for Arm comes from packages of Debian, which apt-get and dpkg-deb are missing for")
    return debian_for_arm(folder)


# A CPU that has only what the kernel needs.  On the emulator's own, which has everything, the oracle fails: NumPy's
# product of 3 x 3 numbers in float32 warns of a division by 0, as OpenBLAS 0.3.31 computes it with SME.
ON_ARM = {"PYTHONPATH": "", "QEMU_CPU": "cortex-a72"}


def test_arm(folder, arguments):
    if not shutil.which(COMPILER):
        skip(f"{COMPILER} is not installed (Debian: gcc-aarch64-linux-gnu and libc6-dev-arm64-cross)")
    python = python_for_arm(folder)
    headers = next(folder.glob("root/usr/include/python3.*"))
    environment = {
        "CC": COMPILER, "LDSHARED": f"{COMPILER} -shared", "CPATH": f"{headers}:{headers.parent}", "PYTHONPATH": "",
        "SDPA_WERROR": "1",
    }  # fmt: skip
    return build_and_test(folder, python, UNFIT + LONG, ["--cover=0", *arguments], environment, ON_ARM)


def test_arm_wheel(folder, arguments):
    python, library = python_for_arm(folder), folder / "wheel"
    (real,) = folder.glob("root/usr/bin/python3.[0-9]*")
    tag = "cp" + real.name.removeprefix("python").replace(".", "")
    wheels = sorted((ROOT / "dist").glob(f"sdpa-*-{tag}-{tag}-manylinux*_aarch64.whl"))
    if not wheels:
        skip(f"there is no wheel of {tag} for aarch64 in dist/ (make wheels)")
    shutil.rmtree(library, ignore_errors=True)
    shutil.unpack_archive(wheels[-1], library, "zip")
    return test(library, python, UNFIT + LONG, ["--cover=0", *arguments], ON_ARM)


def of_compiler(*names):
    """Its libraries, as the value of LD_PRELOAD."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    libraries = [
        subprocess.run([*compiler, f"-print-file-name={name}.so"], capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    if not all(Path(library).is_file() for library in libraries):
        skip(f"{' '.join(compiler)} has no {'.so and '.join(names)}.so")
    return " ".join(libraries)


def sanitizers():
    """The environments to build with them, and to run what was built."""
    environment = {
        "LD_PRELOAD": of_compiler("libasan", "libubsan"),
        # Python frees nothing at its end.  What is too large to allocate is a MemoryError, as without sanitizers.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return {"SDPA_SANITIZE": "address,undefined"}, environment


def test_sanitized(folder, arguments):
    # A finding ends the process: what it says must not be captured in files that nobody reads then.
    options = ["--cover=1", "-nauto", "--capture=sys"]
    return build_and_test(folder, sys.executable, UNFIT, [*options, *arguments], *sanitizers())


def test_races(folder, arguments):
    """It sees what the compiled part of this library reads and writes, and all locks; not what Python and NumPy do in
    theirs.  OpenMP would be one of those, so the threads are those of the pool.  What forks, or counts threads, of
    which the sanitizer has one, is for other builds."""
    if not shutil.which("setarch"):
        skip("setarch is not installed: the thread sanitizer needs addresses as it knows them (Debian: util-linux)")
    library = build(folder, sys.executable, {"SDPA_SANITIZE": "thread", "SDPA_THREADS": "pool"})
    tests = [ROOT / "tests/attention" / name for name in ("test_threads.py", "test_from_many_threads.py")]
    options = ["-p", "no:cacheprovider", "--cover=1", "--capture=sys", "-k", "(from or any_number) and not fork"]
    environment = {
        **os.environ, "LD_PRELOAD": of_compiler("libtsan"), "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["setarch", "--addr-no-randomize", sys.executable, "-m", "pytest", *tests, *options, *arguments]
    return subprocess.run(command, cwd=library, env=environment).returncode


def fuzz_sanitized(folder, arguments):
    """tests.fuzz is found by the path, the package in the folder where it runs."""
    build_environment, environment = sanitizers()
    library = build(folder, sys.executable, build_environment)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-m", "tests.fuzz", *arguments], cwd=library, env=environment).returncode


COMMANDS = {
    "arm": (test_arm, "arm"),
    "arm-wheel": (test_arm_wheel, "arm"),
    "sanitized": (test_sanitized, "sanitized"),
    "races": (test_races, "races"),
    "fuzz-sanitized": (fuzz_sanitized, "sanitized"),
}


if __name__ == "__main__":
    if platform.system() != "Linux":
        skip("these builds are for Linux")
    name, *arguments = sys.argv[1:]
    command, folder = COMMANDS[name]
    sys.exit(command(ROOT / "build" / folder, arguments))
