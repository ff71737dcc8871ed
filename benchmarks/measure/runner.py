"""Times implementations against each other: each in a process of its own, all but one of them stopped.

Idle threads of one library may spin, and the OpenMP runtimes of two do not share a process: hence processes
and SIGSTOP.  A slice in which the CPUs did other work, or the hypervisor took them away, is repeated.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.measure import oracle
from benchmarks.measure.adapting import THREADS
from benchmarks.measure.reading import READ
from benchmarks.report.rows import ENDED, is_right

ROOT = Path(__file__).resolve().parents[2]
THREAD_VARIABLES = ("SDPA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TICKS = os.sysconf("SC_CLK_TCK")

REPEATS = 3  # of a disturbed slice, before it is taken as it is
DISTURBED = 0.05  # of the CPU time of a slice, spent by others
WAITING = 0.002  # seconds: the process that asks and the system itself take some, too
SLICE_SECONDS = (0.01, 0.5)
PACE = 1e11  # operations per second, to plan by
OUTCLASSED = 4  # times slower than the best when first run: measured in the first round only


@dataclass
class Result:
    """One implementation on one workload; `unsupported` says why there are no samples."""

    workload: str
    implementation: str
    error: float = float("nan")
    allowed: float = float("nan")
    unsupported: str = ""
    disturbed: int = 0
    estimate: float = float("inf")
    samples: list = field(default_factory=list, repr=False)

    @property
    def minimum(self):
        return min(self.samples, default=float("inf"))

    @property
    def median(self):
        return statistics.median(self.samples) if self.samples else float("inf")

    def duration(self, seconds):
        """Of a slice of so many seconds: at least one call."""
        return max(seconds, self.estimate)

    def as_json(self):
        names = ("workload", "implementation", "error", "allowed", "unsupported", "disturbed")
        known = {name: getattr(self, name) for name in names}
        if self.samples:
            known |= {"minimum": self.minimum, "median": self.median, "samples": len(self.samples)}
        return known


class Process:
    """A worker, stopped except inside `ask`.

    name : of an implementation; `name@2` is the same on two CPUs.
    folder : where it looks first for what it imports.
    """

    def __init__(self, name, environment, folder=ROOT):
        self.implementation, _, threads = name.partition("@")
        self._cpus = sorted(os.sched_getaffinity(0))[: int(threads or THREADS)]
        self._environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(len(self._cpus))), **environment}
        self._folder = folder
        self._process = None

    def ask(self, **request):
        """The answer to a request; a worker that dies answers `unsupported` and is started anew next time."""
        if self._process is None:
            self._start()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            self._process = None
            return {"unsupported": f"{ENDED} with status {status}"}
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def cpu_seconds(self):
        if self._process is None:
            return 0.0
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def waited_seconds(self):
        """For how long its threads were ready to run and did not, because others had the CPUs; 0 where the system does
        not say."""
        if self._process is None:
            return 0.0
        waited = 0
        for file in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waited += int(file.read_text().split()[1])
        return waited / 1e9

    def close(self):
        if self._process is not None:
            with self._process:  # which closes its pipes and waits
                self._process.kill()

    def _start(self):
        with on_cpus(self._cpus):  # which the process inherits
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measure.worker", self.implementation],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )


@contextlib.contextmanager
def on_cpus(cpus):
    """This process may use only these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def end_workers_on_termination():
    """SIGTERM leaves this process as an exception does, so that the stopped workers are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def all_cpu_seconds():
    """CPU time spent by everybody, and stolen by the hypervisor, since the start of the system."""
    user, nice, system, _idle, _iowait, *interrupts_and_steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts_and_steal))) / TICKS


def slice_of(process, workload, seconds):
    """(answer, whether others used the CPUs meanwhile)."""
    everybody, own, waited = all_cpu_seconds(), process.cpu_seconds(), process.waited_seconds()
    start = time.perf_counter()
    answer = process.ask(do="measure", workload=workload.name, seconds=seconds)
    available = (time.perf_counter() - start) * THREADS
    own, waited = process.cpu_seconds() - own, process.waited_seconds() - waited
    others = all_cpu_seconds() - everybody - own
    return answer, is_disturbed(available, own, others, waited)


def is_disturbed(available, own, others, waited):
    """Whether others took a share of the CPU time that was available to a slice.

    /proc/stat counts in ticks, of which a short slice has one or two: what others used shows in long ones only.  How
    long the threads of the worker had to wait is known in nanoseconds; but with more threads than CPUs they wait for
    each other, too: while they use all there is, or while no tick is that of others.
    """
    lost = min(waited, available - own) if others > 0 else 0
    return others > DISTURBED * available + 2 / TICKS or lost > DISTURBED * available + WAITING


def quiet_slice_of(process, workload, seconds):
    """(answer, how often others disturbed it): of a slice that is repeated while they do."""
    for attempt in range(1, REPEATS + 1):
        answer, disturbed = slice_of(process, workload, seconds)
        if not disturbed:
            return answer, attempt - 1
        if attempt < REPEATS:
            time.sleep(0.1)
    return answer, REPEATS


class Comparison:
    """`results[workload name][implementation]`, filled by `prepare` and then `measure`."""

    def __init__(self, workloads, implementations, environments, progress):
        self.workloads = workloads
        self.results = {workload.name: {} for workload in workloads}
        self._processes = {name: Process(name, environments.get(name, {})) for name in implementations}
        self._progress = progress

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes.values():
            process.close()

    def prepare(self, later=0):
        """Have each implementation set up each workload, and check what it computes; `later`: seconds that what follows
        will take, for the time left."""
        left = TimeLeft(len(self._processes) * sum(map(preparation, self.workloads)), later)
        with tempfile.TemporaryDirectory() as folder:
            check = Path(folder) / "check.npz"
            for workload in self.workloads:
                self._progress(f"checking {workload.name}", left())
                oracle.save(check, workload.expected())
                for name, process in self._processes.items():
                    self._progress(f"checking {workload.name}: {name}", left())
                    file = None if name == READ else str(check)  # which compares what it read itself
                    answer = process.ask(do="prepare", workload=workload.name, check=file)
                    self.results[workload.name][name] = Result(workload.name, name, **answer)
                    left.took(preparation(workload))

    def measure(self, rounds, seconds, later=0):
        """Time all pairs in turn, `rounds` times, in about so many seconds altogether."""
        turns = [(number, workload) for number in range(rounds) for workload in self.workloads]
        first = [result for workload in self.workloads for result in self._contenders(workload, first=True)]
        each = float(np.clip(seconds / max(1, rounds * len(first)), *SLICE_SECONDS))
        planned = [result.duration(each) for turn in turns for result in self._contenders(turn[1], first=turn[0] == 0)]
        left = TimeLeft(sum(planned), later)
        for number, workload in turns:
            contenders = self._contenders(workload, first=number == 0)
            turn = number % max(1, len(contenders))
            for result in contenders[turn:] + contenders[:turn]:
                self._progress(f"round {number + 1} of {rounds}: {workload.name}", left())
                self._slice(workload, result, each)
                left.took(result.duration(each))

    def _contenders(self, workload, first):
        """The results to add to: of all that can do it the first time, then without the outclassed."""
        able = [result for result in self.results[workload.name].values() if not result.unsupported]
        right = (one.estimate for one in able if one.implementation != READ and is_right(vars(one)))
        limit = OUTCLASSED * min(right, default=0)
        return [r for r in able if first or r.estimate <= limit or r.implementation.partition("@")[0] in ("sdpa", READ)]

    def _slice(self, workload, result, seconds):
        answer, disturbed = quiet_slice_of(self._processes[result.implementation], workload, seconds)
        result.disturbed += disturbed
        result.unsupported = answer.get("unsupported", "")
        result.samples += answer.get("samples", [])


class TimeLeft:
    """The seconds that a plan still takes, if the rest goes on as what was done so far; `later`: what comes after."""

    def __init__(self, planned, later=0):
        self._planned, self._later, self._done = planned, later, 0.0
        self._start = time.perf_counter()

    def took(self, planned):
        self._done += planned

    def __call__(self):
        pace = (time.perf_counter() - self._start) / self._done if self._done else 1
        return pace * max(0, self._planned - self._done) + self._later


def preparation(workload):
    """About how many seconds an implementation takes for it: a few calls, and drawing the arrays."""
    return 0.3 + 4 * workload.flops / PACE + workload.bytes / 1e9


@contextlib.contextmanager
def progress_line(stream):
    """A function that shows what is being done, and the seconds left if given, on one line, if someone is watching."""
    watched = stream.isatty()

    def show(text, left=None):
        if watched:
            stream.write(f"\r\033[K{text}{time_left(left)}")
            stream.flush()

    yield show
    show("")


def time_left(seconds):
    if seconds is None:
        return ""
    return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"
