"""Builds `probe.c` for the widest vectors this CPU has, and runs its loops on all CPUs at once."""

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import subprocess
import tempfile
import threading
import time
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("probe.c")

# Instruction sets by machine, widest first: floats to a vector and compiler flags.
BASELINE = {"baseline": (4, [])}
ISAS = {
    "x86_64": {
        "amx": (16, ["-mavx512f", "-mfma", "-mamx-tile", "-mamx-bf16"]),
        "avx512_bf16": (16, ["-mavx512f", "-mavx512bf16", "-mfma"]),
        "avx512": (16, ["-mavx512f", "-mfma"]),
        "avx2": (8, ["-mavx2", "-mfma"]),
        **BASELINE,
    }
}
# Elements of a dtype that an instruction multiplies for each float32 that it would.
DENSITY = {"float32": 1, "float64": 1 / 2, "bfloat16": 2}

# 64 keys x 4 vectors of rows: with AVX-512 16 KB of scores and 16 KB of weights, within a first-level cache.
SOFTMAX_KEYS = 64
FMA_VECTORS = 48 * 1024  # a multiple of the accumulators of each loop
CLOCK_STEPS = 16 * 4096
# How memory may be read: places at once, and bytes from there to what is prefetched.  GB/s of two cores of a Zen 5
# server over 268 MB: 1 place without prefetch 90, 8192 ahead 108; 2 places, 2048 or 8192 ahead 109; 4 places, 2048
# ahead 108; 8 places 60 to 100; 16 places 77.  Not used: threads that take turns every 64 KB, 92, or every 4 KB, 73;
# prefetch to the second level or past the caches, the same as to the first.  From the third level all are within 20 %,
# and none is always the best.
READ_PATTERNS = tuple(itertools.product((1, 2, 4, 8), (0, 2048, 8192)))
COPY_PIECES = 4096, 1 << 62  # bytes at a time

ROUND_SECONDS = 0.01
ROUNDS = 12


class Probe:
    """The compiled loops.  Each method returns a rate per second, all of `cpus` working at once."""

    def __init__(self, only=None):
        """`only` names the instruction set to use instead of the widest; an unknown name changes nothing."""
        self.isa, self.lanes, self._library = _load(only)

    def clock(self, cpus):
        """Cycles: dependent additions, one each."""
        return _best_rate(lambda: self._library.probe_clock, CLOCK_STEPS, cpus, CLOCK_STEPS)

    def fma(self, dtype, cpus):
        """Floating-point operations in multiply-adds on registers.

        Where no instruction multiplies bfloat16, its rate is that of float32, to which it must be widened.
        """
        if dtype == "bfloat16" and not self.has_bfloat16:
            dtype = "float32"
        function = getattr(self._library, f"probe_fma_{dtype}")
        return _best_rate(lambda: function, FMA_VECTORS * self.lanes * DENSITY[dtype] * 2, cpus, FMA_VECTORS)

    @property
    def has_bfloat16(self):
        return hasattr(self._library, "probe_fma_bfloat16")

    def softmax(self, cpus):
        """Scores put through maximum, exponential and sum, from and to the first-level cache."""
        size = SOFTMAX_KEYS * 4 * self.lanes

        def prepare():
            scores, weights, sums = _aligned(size), _aligned(size), _aligned(4 * self.lanes)
            scores[:] = np.random.default_rng(0).standard_normal(size) * 8
            return lambda count: self._library.probe_softmax(
                count, SOFTMAX_KEYS, *map(_address, (scores, weights, sums))
            )

        return _best_rate(prepare, size, cpus)

    def read(self, nbytes, cpus):
        """Bytes read when each CPU reads `nbytes` of its own, in the best of several patterns."""
        data = [_aligned(nbytes // 4) for _ in cpus]
        for array in data:
            array[:] = 1

        def pattern_rate(streams, ahead):
            free = iter(data)

            def prepare():
                address = _address(next(free))
                return lambda count: self._library.probe_read(count, nbytes, address, streams, ahead)

            return _best_rate(prepare, nbytes, cpus, rounds=4)

        return max(itertools.starmap(pattern_rate, READ_PATTERNS))

    @property
    def has_threads(self):
        return hasattr(self._library, "probe_read_together")

    def reading(self, arrays, threads, streams, ahead):
        """A function that reads all of the arrays with threads of its own, and returns the sum of their words of 8
        bytes, modulo 2**64."""
        count = len(arrays)
        addresses = (c_void_p * count)(*map(_address, arrays))
        sizes = (c_int64 * count)(*(array.nbytes for array in arrays))
        numbers = map(c_int64, (threads, streams, ahead))  # converted once, not in each call
        call = functools.partial(self._library.probe_read_together, c_int64(count), addresses, sizes, *numbers)
        call.arrays = arrays  # which live as long as the call
        return call

    def copying(self, to, arrays, threads, piece):
        """A function that copies the arrays to others, so many bytes at a time."""
        count = len(arrays)
        places = [(c_void_p * count)(*map(_address, each)) for each in (to, arrays)]
        sizes = (c_int64 * count)(*(array.nbytes for array in arrays))
        numbers = map(c_int64, (threads, piece))
        call = functools.partial(self._library.probe_copy_together, c_int64(count), *places, sizes, *numbers)
        call.arrays = arrays, to
        return call


def _load(only):
    """(name, lanes, library) of the widest instruction set that this compiler and this CPU have."""
    known = ISAS.get(platform.machine(), BASELINE)
    for isa, (lanes, flags) in ({only: known[only]} if only in known else known).items():
        flags = ["-O2", f"-DLANES={lanes}", *flags]
        path = _build(isa, [*flags, "-fopenmp"]) or _build(isa, flags)
        if path is not None:
            library = _declare(ctypes.CDLL(str(path)))
            if library.probe_supported():
                return isa, lanes, library
    raise RuntimeError("benchmarks/measure/probe.c does not build here: is there a C compiler? (CC names it)")


def _build(isa, flags):
    """The shared library, built once per source and flags; None where the compiler lacks the instructions."""
    command = [os.environ.get("CC", "cc"), *flags, "-shared", "-fPIC"]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"sdpa-probe-{os.getuid()}-{isa}-{key}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run([*command, str(SOURCE), "-o", str(part)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        part.replace(path)
    return path


def _declare(library):
    signatures = {
        "probe_clock": [c_int64],
        "probe_fma_float32": [c_int64],
        "probe_fma_float64": [c_int64],
        "probe_fma_bfloat16": [c_int64],
        "probe_softmax": [c_int64, c_int64, c_void_p, c_void_p, c_void_p],
        "probe_read": [c_int64, c_int64, c_void_p, c_int64, c_int64],
        "probe_read_together": [c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64],
        "probe_copy_together": [c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64],
    }
    for name in ("probe_read", "probe_read_together"):
        if hasattr(library, name):
            getattr(library, name).restype = c_uint64
    for name, types in signatures.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = types
    return library


def _aligned(size):
    """Uninitialised float32 on a page boundary."""
    raw = np.empty(size + 1024, np.float32)
    start = -_address(raw) % 4096 // 4
    return raw[start : start + size]


def _address(array):
    return array.ctypes.data


def _best_rate(prepare, amount, cpus, count=1, rounds=ROUNDS):
    """The best rate of several rounds; in each, every CPU runs `prepare()(n * count)`: n * amount of work."""
    loops = [prepare() for _ in cpus]
    repeat = _repeats(loops[0], count)
    return max(len(cpus) * repeat * amount / _together(loops, cpus, repeat * count) for _ in range(rounds))


def _repeats(loop, count):
    """How often `count` fits in a round."""
    repeat = 1
    while True:
        start = time.perf_counter()
        loop(repeat * count)
        seconds = time.perf_counter() - start
        if seconds > ROUND_SECONDS / 2:
            return repeat
        repeat *= 2


def _together(loops, cpus, count):
    """Seconds until the last of the threads, each bound to a CPU, has run its loop."""
    barrier = threading.Barrier(len(loops))
    spans = []

    def work(loop, cpu):
        os.sched_setaffinity(0, {cpu})
        barrier.wait()
        start = time.perf_counter()
        loop(count)
        spans.append((start, time.perf_counter()))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(loops, cpus, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)
