"""The command: see the package."""

import argparse
import os
import sys
from pathlib import Path

from hypothesis import Phase, Verbosity, settings

from sdpa._runtime.threads import usable_cpus

from . import running

EXAMPLES = 10  # of a round, of each hundred that a property asks for: so a round takes a second or few


def parse():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzers; see tests/fuzz/__init__.py.")
    parser.add_argument("--minutes", type=float, default=1, help="of all targets together; 0: one round of each")
    parser.add_argument("--only", metavar="NAMES", help="some targets, by names with commas; see --list")
    parser.add_argument("--seed", type=int, help="of the first round; default: another one each time")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default: the CPUs this process may use")
    parser.add_argument("--list", action="store_true", help="the names of the targets")
    parser.add_argument("--verbose", action="store_true", help="print each example before it is run; one process")
    parser.add_argument("--worker", type=int, metavar="STRIDE", help=argparse.SUPPRESS)
    return parser, parser.parse_args()


def main():
    parser, arguments = parse()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # several processes: threads that wait must not spin
    verbosity = Verbosity.verbose if arguments.verbose else Verbosity.normal
    phases = [phase for phase in Phase if phase not in (Phase.reuse, Phase.explain)]
    settings.register_profile("fuzz", max_examples=EXAMPLES, database=None, verbosity=verbosity, phases=phases)
    settings.load_profile("fuzz")
    from .targets import LEFT_OUT, TARGETS  # whose properties ask the profile when they are imported

    if arguments.list:
        print(*TARGETS, sep="\n")
        return 0
    names = arguments.only.split(",") if arguments.only else list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"--only has {', '.join(unknown)}: it must be of {', '.join(TARGETS)}")
    if arguments.worker:
        running.worker(names, arguments.seed, arguments.worker, arguments.minutes * 60)
        return 0
    seed = int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed
    if arguments.verbose:
        for name in names:
            print(f"{name} with seed {seed}, kernel {running_kernel(seed)}", flush=True)
            TARGETS[name](seed)
        return 0
    jobs = 1 if arguments.minutes == 0 else arguments.jobs or usable_cpus()
    print(f"{len(names)} targets, {arguments.minutes:g} minutes, {jobs} processes, seed {seed}: {', '.join(names)}")
    if LEFT_OUT:
        print(f"left out, because they are not installed: the targets that need {', '.join(LEFT_OUT)}")
    tally = running.Tally()

    def command_of(job):
        def command(names, attempt):
            first = seed + job + jobs * 1_000_000 * attempt  # another one after a crash
            options = ["--only", ",".join(names), "--seed", str(first), "--minutes", str(arguments.minutes)]
            return [sys.executable, "-m", "tests.fuzz", "--worker", str(jobs), *options]

        return command

    running.watch([command_of(job) for job in range(jobs)], names, tally, again)
    print(*tally.lines(), sep="\n")
    print(f"{tally.failures} failures")
    return 1 if tally.failures else 0


def running_kernel(seed):
    from .kernels import use_kernel

    return use_kernel(seed)


def again(name, seed):
    return ["python", "-m", "tests.fuzz", "--only", name, "--seed", str(seed), "--minutes", "0"]


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(main())
