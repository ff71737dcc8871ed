"""Builds sdpa._core: the Cython algorithm, and csrc/kernel.c once per instruction set, compute type and engine.

SDPA_THREADS=pool takes the threads of a pool of our own and not those of OpenMP, which is the default (openmp);
SDPA_WERROR=1 makes warnings errors; SDPA_DEBUG=1 keeps what debuggers and profilers read;
SDPA_SANITIZE=address,undefined builds with sanitizers, and keeps it, too.
"""

import contextlib
import itertools
import logging
import os
import re
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

# Of what is built, which may be another system than this one: 'linux-x86_64', 'macosx-11.0-arm64', 'win-amd64'.
TARGET = sysconfig.get_platform()
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mprefer-vector-width=512"]
# What is the same for all instruction sets, types and engines.
COMMON = ["csrc/dispatch.c", "csrc/memory/quantise.c"]
COMMON += [f"csrc/plan/{name}.c" for name in ("blocks", "rows", "schedule", "scratch", "visibility")]
VARIANTS = list(itertools.product("48", "01"))  # bytes of `real`; whether few rows


class Isa(NamedTuple):
    architecture: str  # the macro that compilers for it define
    flags: list
    probe: str  # what a compiler must take
    variants: list = VARIANTS

    @property
    def question(self):
        """What csrc/dispatch.c asks the CPU: for each instruction that the flags allow.  A flag that it does not know
        fails the build."""
        features = [flag.removeprefix("-m").replace("-", "_") for flag in self.flags if "=" not in flag]
        return "&&".join(f"HAS({feature})" for feature in features) or "1"


# csrc/dispatch.c lists the same names, best first.  A compiler without the flags, or for another architecture, loses
# that row and not the build; the baseline needs nothing.
ISAS = {
    "avx512": Isa(
        "__x86_64__",
        AVX512,
        "#include <immintrin.h>\n__m512 f(__m512 a) { return _mm512_andnot_ps(a, _mm512_fmadd_ps(a, a, a)); }\n",
    ),
    "avx512_bf16": Isa(
        "__x86_64__",
        [*AVX512, "-mavx512bf16"],
        "#include <immintrin.h>\n__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }\n",
        [("4", "0"), ("4", "1")],
    ),
    "amx": Isa(
        "__x86_64__",
        [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
        "#include <immintrin.h>\nvoid f(const void *a) { _tile_loadconfig(a); _tile_dpbf16ps(0, 1, 2); }\n",
        [("4", "0")],
    ),
    "avx2": Isa(
        "__x86_64__",
        ["-mavx2", "-mfma", "-mf16c"],
        "#include <immintrin.h>\n__m256 f(__m256 a, __m128i b) { return _mm256_fmadd_ps(a, a, _mm256_cvtph_ps(b)); }\n",
    ),
    "neon": Isa(
        "__aarch64__",
        [],
        "#include <arm_neon.h>\nfloat64x2_t f(float64x2_t a) { return vfmaq_f64(a, a, a); }\n",
    ),
}
OPENMP = [  # (flags to compile, flags to link): GCC and clang, Apple's clang, MSVC
    (["-fopenmp"], ["-fopenmp"]),
    (["-Xpreprocessor", "-fopenmp"], ["-lomp"]),
    (["/openmp"], []),
]
OPENMP_PROBE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
# csrc/pool.h; fegetenv is in the library of mathematics, and dlopen in one of its own.
POOL_LIBRARIES = [] if TARGET.startswith("win") else ["-pthread", "-lm"] + ["-ldl"] * TARGET.startswith("linux")
POOL = ["-DSDPA_POOL"], POOL_LIBRARIES
# GCC takes the stack of Windows for aligned to whole vectors, which it is not (its bug 54412).  With this flag the
# assembler takes moves that need no alignment.
UNALIGNED = ["-Wa,-muse-unaligned-vector-move"]
MISALIGNS = "#if !defined(_WIN64) || !defined(__GNUC__) || defined(__clang__)\n#error not GCC for Windows\n#endif\n"

# Without contraction a product and a sum stay two roundings with every compiler: where they fuse, the source says so.
C_FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"]
if TARGET.startswith("macosx"):
    # There memcpy checks how much it copies, and clang does not vectorise loops with such a copy of one number.
    C_FLAGS += ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"]
WARNINGS = ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("SDPA_WERROR") else [])
# Python's own flags ask for debug information: ten times the size of the rest.
KEEP_NAMES = os.environ.get("SDPA_DEBUG") or os.environ.get("SDPA_SANITIZE")
C_FLAGS += ["-g"] if KEEP_NAMES else ["-g0"]
STRIP = [] if KEEP_NAMES else ["-Wl,-S", "-Wl,-x"] if TARGET.startswith("macosx") else ["-Wl,-s"]
SANITIZE = []
if os.environ.get("SDPA_SANITIZE"):
    # Python's own flags may have -fwrapv, which hides overflow, and -g, with which GCC finds where each variable is:
    # that takes it minutes in unrolled loops.  Sanitizers print lines.
    SANITIZE = [f"-fsanitize={os.environ['SDPA_SANITIZE']}", "-fno-sanitize-recover=all", "-fno-wrapv", "-O1", "-g1"]


class BuildKernels(build_ext):
    def initialize_options(self):
        super().initialize_options()
        self.cython_c_in_temp = True  # what Cython makes fits one version of NumPy, and not all that build this tree

    def build_extension(self, ext):
        msvc = self.compiler.compiler_type == "msvc"  # takes unknown flags with a warning, so it gets the baseline only
        c_flags = ["/std:c11", "/O2"] if msvc else [*C_FLAGS, *SANITIZE]
        c_flags += UNALIGNED if self.compiles(MISALIGNS) else []
        isas = [] if msvc else self.usable_isas(c_flags)
        compile_threads, link_threads = self.thread_flags(msvc)
        ext.extra_compile_args = c_flags + compile_threads
        ext.extra_link_args = SANITIZE + link_threads + ([] if msvc else STRIP)
        ext.extra_objects = self.compile_kernels(isas, c_flags if msvc else c_flags + WARNINGS)
        # The objects are new and their flags may be too, which no timestamp shows: always link.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)

    def compile_kernels(self, isas, flags):
        """csrc/ as objects, several at a time."""
        have = [(f"SDPA_HAVE_{isa}", ISAS[isa].question) for isa in isas]
        jobs = [(source, "common", flags, have) for source in COMMON]
        jobs += [("csrc/layer/rotary.c", f"rotary_{size}", flags, [("SDPA_REAL_BYTES", size)]) for size in "48"]
        for isa in ["baseline", *isas]:  # the plain one takes longest, so that it must not be begun last
            isa_flags = ISAS[isa].flags if isa in ISAS else []
            for real_bytes, few_rows in ISAS[isa].variants if isa in ISAS else VARIANTS:
                macros = [(f"SDPA_ISA_{isa}", None), ("SDPA_REAL_BYTES", real_bytes), ("SDPA_FEW_ROWS", few_rows)]
                jobs.append(("csrc/kernel.c", f"{isa}_{real_bytes}_{few_rows}", flags + isa_flags, macros))

        def compile_one(source, folder, flags, macros):
            return self.compiler.compile(
                [source],
                output_dir=f"{self.build_temp}/{folder}",
                macros=macros,
                include_dirs=["csrc"],
                extra_postargs=flags,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [path for objects in pool.map(compile_one, *zip(*jobs)) for path in objects]

    def usable_isas(self, c_flags):
        usable = []
        for name, isa in ISAS.items():
            if self.compiles(isa.probe, c_flags + isa.flags):
                usable.append(name)
            elif self.compiles(f"#ifndef {isa.architecture}\n#error another architecture\n#endif\n"):
                self.warn(f"the compiler does not take {' '.join(isa.flags)}: the {name} kernel is left out")
        return usable

    def thread_flags(self, msvc):
        """Flags to compile and to link, for the threads that SDPA_THREADS names."""
        wanted = os.environ.get("SDPA_THREADS") or "openmp"
        if wanted not in ("openmp", "pool"):
            raise ValueError(f"SDPA_THREADS is {wanted!r}: it must be 'openmp' or 'pool'")
        if wanted == "pool" and msvc:
            raise ValueError("SDPA_THREADS is 'pool', which needs GCC or clang: this is Microsoft's compiler")
        if wanted == "pool":
            return POOL
        for compile_flags, link_flags in OPENMP:
            if self.compiles(OPENMP_PROBE, compile_flags, link_flags):
                return compile_flags, link_flags
        instead = "every call will run on one thread" if msvc else "threads come from a pool of the library's own"
        self.warn(f"the compiler has no OpenMP: {instead}")
        return ([], []) if msvc else POOL

    def compiles(self, code, flags=(), link_flags=None):
        """Whether the compiler takes `code` with `flags`, and the linker `link_flags` if any."""
        with tempfile.TemporaryDirectory() as folder, silence():
            source = Path(folder, "probe.c")
            source.write_text(code)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=list(flags))
                if link_flags is not None:
                    self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=link_flags)
            except (CompileError, LinkError):
                return False
        return True


@contextlib.contextmanager
def silence():
    """What compilers say about probes, and the commands, stay out of the build's log."""
    logging.disable()
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        logging.disable(logging.NOTSET)


def description(root):
    """README.md for the package index, which shows it without the files beside it: its links and pictures lead to the
    repository, once pyproject.toml says where that is."""
    text, project = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "pyproject.toml"))
    said = dict(re.findall(r'^(version|Repository) = "(.*?)/?"$', project, re.MULTILINE))
    if "Repository" not in said:
        return text

    def whole(link):
        kind = "raw" if link[0].startswith("!") else "blob"
        return f"{link[0]}{said['Repository']}/{kind}/v{said['version']}/"

    return re.sub(r"!?\[[^\]]*\]\((?!https://|#)", whole, text)


if __name__ == "__main__":
    setup(
        long_description=description(Path(__file__).resolve().parent),
        long_description_content_type="text/markdown",
        ext_modules=[
            Extension(
                "sdpa._core",
                ["sdpa/_core.pyx"],
                include_dirs=[numpy.get_include(), "csrc"],
                define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            )
        ],
        cmdclass={"build_ext": BuildKernels},
    )
