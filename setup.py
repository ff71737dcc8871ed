"""Builds sdpa._core: the Cython algorithm, and csrc/kernel.c once per instruction set and compute type."""

import os
import tempfile
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.errors import CompileError, LinkError
except ImportError:
    from distutils.errors import CompileError, LinkError

# name: flags.  csrc/dispatch.c lists the same names, best first.  A compiler without the flags, or for another
# architecture, loses that row and not the build; the baseline needs nothing.
ISAS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "neon": [],
    "baseline": [],
}
PROBES = {
    "avx512": "#include <immintrin.h>\n__m512 f(__m512 a) { return _mm512_andnot_ps(a, _mm512_fmadd_ps(a, a, a)); }\n",
    "avx2": "#include <immintrin.h>\n__m256 f(__m256 a) { return _mm256_fmadd_ps(a, a, a); }\n",
    "neon": "#include <arm_neon.h>\nfloat64x2_t f(float64x2_t a) { return vfmaq_f64(a, a, a); }\n",
    "baseline": "int f(void) { return 0; }\n",
}
WARNINGS = ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("SDPA_WERROR") else [])
SANITIZE = [f"-fsanitize={os.environ['SDPA_SANITIZE']}", "-g"] if os.environ.get("SDPA_SANITIZE") else []


class BuildKernels(build_ext):
    def build_extension(self, ext):
        msvc = self.compiler.compiler_type == "msvc"
        c_flags = ["/std:c11", "/O2"] if msvc else ["-std=c11", "-O3", "-fvisibility=hidden", *SANITIZE]
        warnings = [] if msvc else WARNINGS
        ext.extra_compile_args = [*c_flags]
        ext.extra_link_args = [*SANITIZE]
        openmp = "/openmp" if msvc else "-fopenmp"
        if self.compiles("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n", [openmp], link=True):
            ext.extra_compile_args.append(openmp)
            ext.extra_link_args += [] if msvc else [openmp]
        isas = [isa for isa, flags in ISAS.items() if self.compiles(PROBES[isa], flags)]
        for isa in isas:
            for real_bytes in (4, 8):
                ext.extra_objects += self.compile_c(
                    "csrc/kernel.c",
                    f"{isa}_{real_bytes}",
                    [*c_flags, *warnings, *ISAS[isa]],
                    [(f"SDPA_ISA_{isa}", None), ("SDPA_REAL_BYTES", str(real_bytes))],
                )
        have = [(f"SDPA_HAVE_{isa}", None) for isa in isas]
        for source in ("csrc/dispatch.c", "csrc/task.c"):
            ext.extra_objects += self.compile_c(source, "common", [*c_flags, *warnings], have)
        super().build_extension(ext)

    def compile_c(self, source, folder, flags, macros):
        return self.compiler.compile(
            [source], output_dir=f"{self.build_temp}/{folder}", macros=macros, extra_postargs=flags
        )

    def compiles(self, code, flags, link=False):
        """Whether the compiler takes `code` with `flags`."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(code)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
                if link:
                    self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=flags)
            except (CompileError, LinkError):
                return False
        return True


setup(
    ext_modules=[
        Extension(
            "sdpa._core",
            ["sdpa/_core.pyx"],
            include_dirs=[numpy.get_include(), "csrc"],
            depends=[*map(str, Path("csrc").glob("*.[ch]")), "sdpa/_core.pxd"],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
