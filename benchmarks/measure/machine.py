"""What the machine at hand can do, and the bound that follows.  `python -m benchmarks.measure.machine` prints it."""

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure.probe import Probe

L3_BYTES_PER_THREAD = 6 << 20  # far above usual second-level caches; or less, where the third-level cache is so small
L3_SHARE = 0.75  # of that cache: what the threads that share it read together, at most
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3")
DRAM_BYTES_PER_THREAD = 256 << 20


@dataclass(frozen=True)
class Machine:
    """Rates per second: multiply-adds (2 operations each) and memory by all threads, the rest by one core."""

    cpu: str
    isa: str
    lanes: int
    threads: int
    clock: float
    fma_float32: float
    fma_float64: float
    fma_bfloat16: float  # that of float32 where the instruction set has no such products
    fma_float32_one_thread: float
    fma_float64_one_thread: float
    fma_bfloat16_one_thread: float
    softmax: float
    dram_read: float
    l3_read: float
    l3_bytes: int

    def bound(self, flops, scores, nbytes, dtype, read_seconds=None):
        """Seconds: the longer of arithmetic (products, then one softmax pass) and memory.

        float16 is multiplied as float32; the softmax of both half types is that of float32.  `read_seconds`: what
        reading took, where that was measured.
        """
        name = np.dtype(dtype).name
        fma = {"float64": self.fma_float64, "bfloat16": self.fma_bfloat16}.get(name, self.fma_float32)
        softmax = self.softmax / 2 if name == "float64" else self.softmax  # half as many scores to a vector
        if read_seconds is None:
            read_seconds = nbytes / (self.l3_read if nbytes <= self.l3_bytes else self.dram_read)
        return max(flops / fma + scores / (softmax * self.threads), read_seconds)

    def best_of(self, other):
        """The higher of two measurements of the same machine."""
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        return Machine(**{name: one if isinstance(one, str) else max(one, two) for (name, one), two in pairs})

    def describe(self):
        per_cycle = self.clock * self.lanes
        pace = per_cycle / self.softmax
        return "\n".join(
            [
                f"{self.cpu}: {self.isa}, {self.threads} threads, {self.clock / 1e9:.2f} GHz",
                self._describe_fma("float32", self.fma_float32, self.fma_float32_one_thread, per_cycle),
                self._describe_fma("float64", self.fma_float64, self.fma_float64_one_thread, per_cycle / 2),
                self._describe_bfloat16(per_cycle * 2),
                f"softmax      {self.softmax / 1e9:7.2f} G scores/s and core ({pace:.1f} cycles per vector)",
                f"DRAM read    {self.dram_read / 1e9:7.1f} GB/s all threads",
                f"L3 read      {self.l3_read / 1e9:7.1f} GB/s all threads, L3 of {self.l3_bytes >> 20} MiB",
            ]
        )

    def _describe_bfloat16(self, per_cycle):
        if self.isa not in ("amx", "avx512_bf16"):
            return "bfloat16 FMA as float32"
        return self._describe_fma("bfloat16", self.fma_bfloat16, self.fma_bfloat16_one_thread, per_cycle)

    @staticmethod
    def _describe_fma(dtype, together, alone, per_cycle):
        return (
            f"{dtype} FMA {together / 1e9:8.1f} GFLOP/s all threads, {alone / 1e9:.1f} one thread"
            f" ({alone / 2 / per_cycle:.2f} vectors per cycle)"
        )


def measure(isa=None):
    """Measure the machine, by the widest vectors unless told otherwise; takes a few seconds."""
    try:
        probe = Probe(isa)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    cpus = sorted(os.sched_getaffinity(0))
    return Machine(
        cpu=cpu_name(),
        isa=probe.isa,
        lanes=probe.lanes,
        threads=len(cpus),
        clock=probe.clock(cpus[:1]),
        fma_float32=probe.fma("float32", cpus),
        fma_float64=probe.fma("float64", cpus),
        fma_bfloat16=probe.fma("bfloat16", cpus),
        fma_float32_one_thread=probe.fma("float32", cpus[:1]),
        fma_float64_one_thread=probe.fma("float64", cpus[:1]),
        fma_bfloat16_one_thread=probe.fma("bfloat16", cpus[:1]),
        softmax=probe.softmax(cpus) / len(cpus),
        dram_read=probe.read(DRAM_BYTES_PER_THREAD, cpus),
        l3_read=probe.read(l3_bytes_per_thread(cpus), cpus),
        l3_bytes=l3_size(),
    )


def cpu_name():
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def l3_size():
    """Bytes of the third-level cache; 0 where the system does not say."""
    try:
        size = (CACHE / "size").read_text()
    except OSError:
        return 0
    return int(size.strip().rstrip("K")) << 10


def l3_bytes_per_thread(cpus):
    """What one thread reads such that all of them, one on each of these CPUs, read from the third-level cache."""
    try:
        sharing = len(cpus_of((CACHE / "shared_cpu_list").read_text()) & set(cpus))
    except OSError:
        sharing = len(cpus)
    share = int(L3_SHARE * l3_size() / max(1, sharing)) >> 16 << 16
    return min(L3_BYTES_PER_THREAD, share) or L3_BYTES_PER_THREAD


def cpus_of(text):
    """Those of a list such as 0-3,8."""
    ranges = (part.partition("-") for part in text.strip().split(","))
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


if __name__ == "__main__":
    print(measure().describe())
