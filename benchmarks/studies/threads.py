"""What a build's threads cost: python -m benchmarks.studies.threads openmp=build/openmp/lib pool=build/pool/lib

Each argument is a name and a folder that holds the package as it was built: SDPA_THREADS=pool python setup.py build
--build-lib build/pool/lib makes one.  Printed are times of a call of attention in ms, the builds by turns: the median
of the calls, in the best of the rounds.  Where several processes or callers share the CPUs, the median says nothing:
one that spins has fast calls while it holds them, and the others wait.  There it is the mean, and the time that one
call in a hundred exceeds, as the medians of the rounds.

"two" are two processes on the same CPUs, "torch" and "sklearn" one that calls those libraries between any two calls, in
the time that is measured, and "callers" so many Python threads at once.  A situation whose library is missing is left
out.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys

WORK = """
import os, statistics, sys, time
rows, threads, beside = int(sys.argv[1]), int(sys.argv[5]), sys.argv[4]
seconds, gap = float(sys.argv[2]), float(sys.argv[3])
other = lambda: None
import numpy as np
if beside == "torch":
    import torch
    a = torch.randn(192, 192)
    other = lambda: a @ a
elif beside == "sklearn":
    from sklearn.metrics import pairwise_distances_argmin
    a = np.random.default_rng(0).standard_normal((512, 16))
    other = lambda: pairwise_distances_argmin(a, a)
import sdpa
x = np.random.default_rng(0).standard_normal((1, 8, rows, 64)).astype(np.float32)
def measure(times):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(gap) if gap else None
        begin = time.perf_counter()
        sdpa.attention(x, x, x)
        other()
        times.append(time.perf_counter() - begin)
for _ in range(20):
    sdpa.attention(x, x, x)
    other()
if beside == "fork":
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        sys.stdout.write(open(read).read())
        sys.exit()
    os.dup2(write, 1)
else:
    print("ready", flush=True)
    sys.stdin.readline()
times = []
if threads > 1:
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(measure, [times] * threads))
else:
    measure(times)
if beside == "fork":
    print("ready")
times.sort()
ninety_nine = times[len(times) * 99 // 100]
print(*[1e3 * number for number in (statistics.median(times), statistics.mean(times), ninety_nine)], flush=True)
os._exit(0)
"""
# rows, seconds between calls, what is beside, processes, Python threads, environment
SITUATIONS = {
    "small": (32, 0, "", 1, 1, {}),
    "small, after 1 ms": (32, 1e-3, "", 1, 1, {}),
    "medium": (192, 0, "", 1, 1, {}),
    "large": (1024, 0, "", 1, 1, {}),
    "small, two": (48, 0, "", 2, 1, {}),
    "medium, two": (192, 0, "", 2, 1, {}),
    "large, two": (1024, 0, "", 2, 1, {}),
    "medium, 4 callers": (192, 0, "", 1, 4, {}),
    "medium, child of a fork": (192, 0, "fork", 1, 1, {}),
    "medium, OMP_PROC_BIND": (192, 0, "", 1, 1, {"OMP_PROC_BIND": "true"}),
    "large, child of a fork": (1024, 0, "fork", 1, 1, {}),
    "large, OMP_PROC_BIND": (1024, 0, "", 1, 1, {"OMP_PROC_BIND": "true"}),
    "small, torch": (32, 0, "torch", 1, 1, {}),
    "medium, torch": (192, 0, "torch", 1, 1, {}),
    "large, torch": (1024, 0, "torch", 1, 1, {}),
    "medium, torch, bound": (192, 0, "torch", 1, 1, {"OMP_PROC_BIND": "true"}),
    "small, sklearn": (32, 0, "sklearn", 1, 1, {}),
    "medium, sklearn": (192, 0, "sklearn", 1, 1, {}),
    "large, sklearn": (1024, 0, "sklearn", 1, 1, {}),
    "medium, one thread": (192, 0, "", 1, 1, {"SDPA_NUM_THREADS": "1"}),
}


def measure(folder, seconds, rows, gap, beside, processes, threads, environment):
    """Median, mean and 99th percentile of each of the processes, which begin together."""
    command = [sys.executable, "-c", WORK, *map(str, (rows, seconds, gap, beside, threads))]
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=variables)
    workers = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    for worker in workers:
        worker.stdout.readline()
    for worker in workers:
        worker.stdin.write("\n" if beside != "fork" else "")
        worker.stdin.flush()
    # Not by communicate(), which misses what came together with the first line.
    found = [tuple(map(float, worker.stdout.read().split())) for worker in workers]
    for worker in workers:
        worker.wait()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--only", default="", help="situations whose names have this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    args = parser.parse_args()
    builds = dict(build.split("=", 1) for build in args.builds)
    print(f"{'ms of a call':28}" + "".join(f"{name:>10}" for name in builds))
    for situation, how in SITUATIONS.items():
        _, _, beside, processes, threads, _ = how
        missing = beside in ("torch", "sklearn") and not importlib.util.find_spec(beside)
        if args.only not in situation or missing:
            continue
        found = {name: [] for name in builds}
        for _ in range(args.rounds):
            for name, folder in builds.items():
                found[name] += measure(folder, args.seconds, *how)
        shared = processes > 1 or threads > 1
        rows = {", mean": (1, statistics.median), ", 99 %": (2, statistics.median)} if shared else {"": (0, min)}
        for what, (which, choose) in rows.items():
            numbers = [choose(times[which] for times in of_build) for of_build in found.values()]
            print(f"{situation + what:28}" + "".join(f"{number:10.3f}" for number in numbers), flush=True)


if __name__ == "__main__":
    main()
