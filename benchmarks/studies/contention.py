"""What processes that share CPUs cost each other: python -m benchmarks.studies.contention

Each process calls attention again and again, with as many threads as there are CPUs.  Printed are medians of a call in
ms: of one process alone, of two at once, and what a fair share would be, which is twice the time alone.  libgomp's
threads spin while they wait, a few milliseconds long, and take the CPU from the other process; each row sets its
environment variables otherwise.
"""

import argparse
import os
import statistics
import subprocess
import sys

SETTINGS = {
    "as it is": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)} for count in (100, 1000, 10_000, 100_000)},
    "one thread each": {"SDPA_NUM_THREADS": "1"},
}
WORK = """
import statistics, sys, time
import numpy as np, sdpa
rows, seconds, gap = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
x = np.random.default_rng(0).standard_normal((1, 8, rows, 64)).astype(np.float32)
for _ in range(20):
    sdpa.attention(x, x, x)
print("ready", flush=True)
sys.stdin.readline()
times, end = [], time.perf_counter() + seconds
while time.perf_counter() < end:
    time.sleep(gap) if gap else None
    begin = time.perf_counter()
    sdpa.attention(x, x, x)
    times.append(time.perf_counter() - begin)
print(1e3 * statistics.median(times))
"""


def medians(processes, environment, *numbers):
    """Of each of so many processes at once."""
    command = [sys.executable, "-c", WORK, *map(str, numbers)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    workers = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    for worker in workers:
        worker.stdout.readline()
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    return [float(worker.communicate()[0]) for worker in workers]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[48, 192, 768])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between calls")
    args = parser.parse_args()
    print(f"{'rows':>5}  {'setting':26}{'alone':>9}{'two':>9}{'two / fair share':>18}")
    for rows in args.rows:
        fair = None
        for name, environment in SETTINGS.items():
            (alone,) = medians(1, environment, rows, args.seconds, args.gap)
            both = statistics.mean(medians(2, environment, rows, args.seconds, args.gap))
            fair = fair or 2 * alone
            print(f"{rows:5}  {name:26}{alone:9.3f}{both:9.3f}{both / fair:18.2f}", flush=True)


if __name__ == "__main__":
    main()
