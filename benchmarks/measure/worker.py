"""The process in which one implementation is run: it answers one JSON line for each JSON line it reads.

prepare(workload, check) -> error, the error that passes, and a first estimate of the seconds of a call, or why it is
    unsupported
trial(sizes, check) -> the same without the estimate, of a workload given by its fields
measure(workload, seconds) -> seconds per call of many samples
memory(sizes) -> the memory of a call: of a workload given by its fields
origin() -> the folder that the library under test was imported from
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import sdpa
from benchmarks.measure import memory, oracle
from benchmarks.peers import IMPLEMENTATIONS, adapter_of
from benchmarks.workloads import KEEP_BYTES, NAMED, restored

SAMPLE_SECONDS = 100e-6  # short calls are timed several at a time, so that reading the clock does not count
WARM_SECONDS = 0.02  # before a slice the threads are woken by calls for so long


class Worker:
    def __init__(self, implementation):
        self._implementation = IMPLEMENTATIONS[implementation]
        self._prepared = {}  # workload name -> (call, result, expected seconds)

    def prepare(self, workload, check):
        """`check`: a file of what is expected; None where there is nothing to compare."""
        call, result, expected_seconds = self._get(workload)
        return {**judged(call, result, check), "estimate": expected_seconds}

    def trial(self, sizes, check):
        workload = restored(sizes)
        call, result = adapter_of(self._implementation, workload)(workload)
        call()
        return judged(call, result, check)

    def measure(self, workload, seconds):
        call, _, expected_seconds = self._get(workload)
        number = max(1, int(SAMPLE_SECONDS / expected_seconds))
        for _ in range(min(100, int(WARM_SECONDS / expected_seconds))):
            call()
        samples = []
        gc.disable()
        end = time.perf_counter() + seconds
        while not samples or time.perf_counter() < end:
            samples.append(sample(call, number))
        gc.enable()
        return {"samples": samples}

    def memory(self, sizes):
        workload = restored(sizes)
        return memory.usage(adapter_of(self._implementation, workload), workload)._asdict()

    def origin(self):
        return {"origin": str(Path(sdpa.__file__).resolve().parents[1])}

    def _get(self, name):
        if name not in self._prepared:
            self._make_room(NAMED[name].bytes)
            workload = NAMED[name]
            call, result = adapter_of(self._implementation, workload)(workload)
            call()
            self._prepared[name] = call, result, estimate(call)
        return self._prepared[name]

    def _make_room(self, nbytes):
        while self._prepared and nbytes + sum(NAMED[name].bytes for name in self._prepared) > KEEP_BYTES:
            del self._prepared[next(iter(self._prepared))]


def judged(call, result, check):
    error, allowed = (0.0, 0.0) if check is None else oracle.judge(outputs(result(call())), oracle.load(check))
    return {"error": error, "allowed": allowed}


def outputs(result):
    """The arrays of a result: of most workloads one, of others a tuple of several."""
    return result if isinstance(result, tuple) else (result,)


def sample(call, number):
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def estimate(call):
    """Seconds of a call: the least of a few, the first of which still set things up."""
    samples = [sample(call, 1), sample(call, 1)]
    while len(samples) < 50 and sum(samples) < WARM_SECONDS:
        samples.append(sample(call, 1))
    return min(samples)


def serve(worker, requests, answers):
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as problem:
            text = str(problem).strip().splitlines() or [""]
            answer = {"unsupported": f"{type(problem).__name__}: {text[0][:200]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main():
    # What libraries print must not reach the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Worker(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
