"""The build: what it leaves, with which compilers it works, and that it compiles what has changed."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import sdpa
from sdpa import _core

ROOT = Path(__file__).parents[2]
CC = os.environ.get("CC", "cc")
CHECK = """
import json, numpy as np, sdpa
x = np.random.default_rng(0).standard_normal((3, 2, 300, 24), np.float32)
for kernel in sdpa.kernels():
    error = abs(sdpa.attention(x, x, x, causal=True, threads=2) - sdpa.reference.attention(x, x, x, causal=True)).max()
    assert error < 1e-5, error
    h = x.astype(np.float16)
    assert abs(sdpa.attention(h, h, h) - sdpa.reference.attention(h, h, h)).max() < 2e-3
print(json.dumps(sdpa.build_info()))
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the compilers are shell scripts here")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the build needs.  All tests build in it, so nothing of one build may survive in the next."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("sdpa", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    (copy / "sdpa/_core.c").write_text("#error what Cython made with another version of NumPy\n")
    return copy


def build(source, **environment):
    """Builds in place; returns what the compiler and setuptools said."""
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=source, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "error:" not in run.stdout, run.stdout  # what compilers say about probes
    return run.stdout


def build_info(source, python=sys.executable, **environment):
    """That the build in `source` computes the right numbers, and what it says about itself."""
    run = subprocess.run(
        [python, "-c", CHECK], cwd=source, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def compiler_without(folder, *flags):
    """A compiler that does not know the flags."""
    script = folder / f"cc-without{''.join(flags)}"
    script.write_text(f"""#!/bin/sh
for arg; do
    case $arg in {"|".join(flags)}) echo "error: unknown option $arg" >&2; exit 1 ;; esac
done
exec {CC} "$@"
""")
    script.chmod(0o755)
    return str(script)


@pytest.mark.builds
def test_compiler_without_openmp(source, tmp_path):
    """The pool stands in, with which the tests of threads run, too."""
    log = build(source, CC=compiler_without(tmp_path, "-fopenmp"))
    assert re.findall("warning: .*OpenMP.*pool", log) and "kernel is left out" not in log
    info = build_info(source)
    assert (info["openmp"], info["threads"]) == (False, "pool")
    assert info["kernels"] == sdpa.kernels()
    libraries = subprocess.run(["ldd", *source.glob("sdpa/*.so")], capture_output=True, text=True).stdout
    assert "libc.so" in libraries and "omp" not in libraries
    tests = [ROOT / "tests/attention/test_threads.py", "-p", "no:cacheprovider", "-q"]
    run = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0 and "OpenMP" not in run.stderr, run.stdout


@pytest.mark.builds
@pytest.mark.parametrize("value", ["pool", "none of these"])
def test_threads_by_name(source, value):
    if value == "pool":
        assert "warning" not in build(source, SDPA_THREADS=value)
        assert build_info(source)["threads"] == "pool"
    else:
        with pytest.raises(AssertionError, match=f"SDPA_THREADS is '{value}': it must be 'openmp' or 'pool'"):
            build(source, SDPA_THREADS=value)


@pytest.mark.builds
@pytest.mark.parametrize(
    "flag, lost",
    [
        ("-mavx512f", ["amx", "avx512_bf16", "avx512"]),
        ("-mavx512bf16", ["amx", "avx512_bf16"]),
        ("-mamx-bf16", ["amx"]),
    ],
)
def test_compiler_without_avx512(source, tmp_path, flag, lost):
    if not set(lost) & set(sdpa.kernels()):
        pytest.skip("this CPU does not run what is lost")
    log = build(source, CC=compiler_without(tmp_path, flag))
    assert sorted(re.findall("warning: .* (\\w+) kernel is left out", log)) == sorted(lost) and "OpenMP" not in log
    info = build_info(source)
    assert info["kernels"] == [kernel for kernel in sdpa.kernels() if kernel not in lost]
    assert info["threads"] == _core.THREADS


# Those that are installed are asked.  Clang 16 crashes on the kernel of AVX512-BF16, with -O1 already.
COMPILERS = [*(f"gcc-{n}" for n in range(10, 17)), *(f"clang-{n}" for n in range(13, 23) if n != 16)]


@pytest.mark.builds
@pytest.mark.parametrize("compiler", COMPILERS)
def test_other_compilers(source, compiler):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    build(source, CC=compiler, LDSHARED=f"{compiler} -shared", SDPA_WERROR="1", SDPA_THREADS="pool")
    info = build_info(source)
    assert info["threads"] == "pool"
    assert ("clang" in info["compiler"].lower()) == compiler.startswith("clang")
    assert info["kernels"] == sdpa.kernels()


@pytest.mark.builds
def test_changed_source_is_compiled(source):
    log = build(source)
    assert "warning" not in log
    assert build_info(source)["threads"] == _core.THREADS  # and none of the builds above is left
    for header in ("csrc/sdpa.h", "csrc/memory/read.h"):
        text = (source / header).read_text()
        (source / header).write_text(text + "#error changed\n")
        with pytest.raises(AssertionError, match="#error changed"):
            build(source)
        (source / header).write_text(text)


def test_source_distribution_holds_what_the_build_needs(source, tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--formats=zip", "--dist-dir", tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.zip")
    held = {name.partition("/")[2] for name in zipfile.ZipFile(archive).namelist()}
    suffixes = {".c", ".h", ".py", ".pyx", ".pxd", ".pxi", ".pyi", ".typed"}
    files = [path for folder in ("csrc", "sdpa") for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    made = {"sdpa/_core.c"}
    assert {path.relative_to(ROOT).as_posix() for path in files} - made == {
        name for name in held if name.startswith(("csrc/", "sdpa/")) and Path(name).suffix in suffixes
    }


@pytest.mark.builds
def test_wheel_needs_only_numpy(source, tmp_path):
    """An isolated build, as `pip install .` makes it, in an environment with nothing but NumPy."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run = subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], capture_output=True, text=True)
    if "Could not find a version" in run.stderr:
        pytest.skip("the build requirements cannot be fetched")
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")

    archive = zipfile.ZipFile(wheel)
    found = [path for pattern in ("*.py", "*.pyi") for path in (ROOT / "sdpa").rglob(pattern)]
    modules = {path.relative_to(ROOT).as_posix() for path in found}
    compiled = f"sdpa/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == modules | {compiled, "sdpa/py.typed"}
    metadata = archive.read(f"sdpa-{sdpa.__version__}.dist-info/METADATA").decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [re.split("[ :<>=]+", line)[1] for line in needed] == ["numpy"]

    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--quiet", wheel], check=True, capture_output=True)
    assert build_info(tmp_path, python)["kernels"] == sdpa.kernels()


def test_nothing_leaks_into_other_libraries():
    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    symbols = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert {name for name in names if not name.startswith("_")} == {"PyInit__core"}


def test_no_debug_information():
    """Python's own flags ask for it: ten times the size of the code."""
    if not shutil.which("readelf") or sys.platform != "linux":
        pytest.skip("readelf is not installed, or libraries look otherwise here")
    sections = subprocess.run(["readelf", "-SW", _core.__file__], capture_output=True, text=True, check=True).stdout
    if "asan" in subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True).stdout:
        pytest.skip("built with sanitizers")
    assert ".text" in sections and ".debug" not in sections
    assert Path(_core.__file__).stat().st_size < 4 << 20


def test_debug_information_where_asked():
    flags = {}
    for name in "SDPA_DEBUG", "SDPA_SANITIZE", "NOTHING":
        code = "import runpy; s = runpy.run_path('setup.py'); print(*s['C_FLAGS'], *s['STRIP'])"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SDPA_")} | {name: "1"}
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        flags[name] = run.stdout.split()
    assert "-g" in flags["SDPA_DEBUG"] and "-g" in flags["SDPA_SANITIZE"]
    assert "-g0" in flags["NOTHING"] and "-g0" not in flags["SDPA_DEBUG"] + flags["SDPA_SANITIZE"]
    assert "-Wl,-s" not in flags["SDPA_DEBUG"] + flags["SDPA_SANITIZE"]


# What MSVC has not got; -E keeps it, so that it is found with any compiler.
NOT_C11 = r"__builtin_\w+|__attribute__|__extension__|__asm__|__typeof__|\btypeof\b|#pragma .*|_Pragma|__int128"
MSVC_SOURCES = [(source, {}) for source in ["dispatch.c", "memory/quantise.c"]]
MSVC_SOURCES += [(path.relative_to(ROOT / "csrc").as_posix(), {}) for path in ROOT.glob("csrc/plan/*.c")]
MSVC_SOURCES += [("layer/rotary.c", {"SDPA_REAL_BYTES": size}) for size in "48"]
MSVC_SOURCES += [("kernel.c", {"SDPA_REAL_BYTES": size, "SDPA_FEW_ROWS": few}) for size in "48" for few in "01"]


@pytest.mark.parametrize("source, macros", MSVC_SOURCES, ids=str)
def test_what_msvc_compiles_is_c11(source, macros):
    """Of compilers that setup.py gives no instruction sets, it asks for this."""
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    flags = ["-std=c11", f"-I{ROOT}/csrc", "-DSDPA_ISA_baseline", *defined]
    command = [*shlex.split(CC), *flags, str(ROOT / "csrc" / source)]
    without_gnu = [*command, "-E", "-U__GNUC__", "-U__clang__"]
    seen = subprocess.run(without_gnu, capture_output=True, text=True, check=True).stdout
    ours, file = [], ""
    for line in seen.splitlines():
        marker = re.match(r'# \d+ "(.*?)"', line)
        file = marker[1] if marker else file
        ours += [line] if str(ROOT / "csrc") in file else []
    assert len(ours) > 20
    assert not re.findall(NOT_C11, "\n".join(ours))
    pedantic = ["-pedantic-errors", "-fsyntax-only", "-Werror"]
    checked = subprocess.run([*command, *pedantic], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_what_is_not_c11_stands_in_one_place():
    """Intrinsics are for compilers that have them; the headers of instruction sets may use what these have, too."""
    files = [path for path in ROOT.glob("csrc/**/*.[ch]") if not path.name.startswith(("simd_", "compiler.h"))]
    found = {path.name: re.findall(f"({NOT_C11})", path.read_text()) for path in files}
    assert {name: set(words) for name, words in found.items() if words} == {
        "dispatch.c": {"__asm__"},
        "threads.h": {"#pragma omp parallel num_threads(team->size)"},
    }


HEADERS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.h"))


def editor_flags(header, isa="baseline"):
    """With which flags clangd reads the header: those of csrc/compile_flags.txt, and what .clangd adds; or for another
    instruction set, where .clangd adds nothing.  None where the header is not for that."""
    flags = [flag.replace("-I.", f"-I{ROOT}/csrc") for flag in (ROOT / "csrc/compile_flags.txt").read_text().split()]
    added = {
        re.search("PathMatch: (.*)", part)[1]: re.search(r"Add: \[(.*)\]", part)[1].split(", ")
        for part in (ROOT / ".clangd").read_text().split("---\n")
    }

    def added_to(path):
        return [more for pattern, more in added.items() if re.fullmatch(pattern, path)]

    if isa != "baseline":
        if added_to(header) or header.endswith(NOT_FOR.get(isa, ())) or header.startswith("csrc/simd/baseline"):
            return None
        header = f"csrc/simd/{isa}.h"
    return flags + [flag for more in added_to(header) for flag in more]


NOT_FOR = {"avx512_bf16": ("singles.h",), "amx": ("singles.h", "vectors.h", "additive.h")}  # those kernels lack them


@functools.cache
def takes(*flags):
    """Whether the compiler knows the flags, and has the intrinsics of their instruction set."""
    neon, x86 = "-DSDPA_ISA_neon" in flags, any(flag.startswith("-mavx") for flag in flags)
    code = "#include <arm_neon.h>\n" if neon else "#include <immintrin.h>\n" if x86 else "int unused;\n"
    command = [*shlex.split(CC), *flags, "-fsyntax-only", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True).returncode == 0


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512_bf16", "amx"])
@pytest.mark.parametrize("header", HEADERS)
def test_headers_can_be_read_alone(header, isa):
    """As editors do: each includes what it uses."""
    flags = editor_flags(header, isa)
    if flags is None:
        pytest.skip("not for this instruction set")
    if not takes(*flags):
        pytest.skip("the compiler does not take these flags")
    command = [*shlex.split(CC), *flags, "-fsyntax-only", "-Werror", ROOT / header]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("flag", ["-march=native", "-mtune=native", "-ffast-math", "-Ofast", "-funsafe-math"])
def test_flags_that_break_wheels_or_nan_are_nowhere(flag):
    files = [ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("csrc/**/*.[ch]")]
    assert not [file.name for file in files if flag in file.read_text()]
    assert flag not in shlex.split(os.environ.get("CFLAGS", ""))
