"""Rounds in a process of their own, and who watches that process.

A round is a target with a seed, from which its kernel and all its examples follow.  The worker says which round it is
in, so that the watcher knows what ended it: a failure that the worker reports itself, a crash, or a round without end.
"""

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback

HANG = 120  # seconds that a round may take; most take a few
PASS = 3  # seconds at most between two looks of the watcher, unless it was stopped, or the machine slept
MOST_FAILURES = 3  # of a target, which is then left alone
SHOWN = 12_000  # characters of what a crash said


def work(targets, seed, stride, seconds, say):
    """Rounds of all targets, in turns by the time that each has had, with the seeds `seed`, `seed + stride`, ...  Each
    has one round at least."""
    from .kernels import use_kernel

    spent, rounds = dict.fromkeys(targets, 0.0), dict.fromkeys(targets, 0)
    end = time.monotonic() + seconds
    while spent and (time.monotonic() < end or not all(rounds[name] for name in spent)):
        name = min(spent, key=lambda name: (rounds[name] > 0, spent[name]))
        number = seed + stride * rounds[name]
        kernel = use_kernel(number)
        say(begin=name, seed=number, kernel=kernel)
        start, failure = time.monotonic(), None
        try:
            targets[name](number)
        except Exception:
            failure = traceback.format_exc()
        took = time.monotonic() - start
        spent[name] += took
        rounds[name] += 1
        say(end=name, seconds=took, failure=failure)
        if failure:
            spent[name] += HANG / MOST_FAILURES  # the others come first, as they have less time
            if spent[name] >= HANG:
                del spent[name]


def worker(names, seed, stride, seconds):
    """The process that `watch` starts."""
    import faulthandler

    from .targets import TARGETS

    faulthandler.enable()
    channel, sys.stdout = sys.stdout, sys.stderr  # what is fuzzed may print

    def say(**message):
        print(json.dumps(message), file=channel, flush=True)

    work({name: TARGETS[name] for name in names}, seed, stride, seconds, say)


class Tally:
    """What was done, and what failed."""

    def __init__(self):
        self.rounds, self.seconds, self.kernels, self.failures = {}, {}, {}, 0

    def add(self, name, kernel, seconds):
        self.rounds[name] = self.rounds.get(name, 0) + 1
        self.seconds[name] = self.seconds.get(name, 0) + seconds
        self.kernels.setdefault(name, set()).add(kernel)

    def lines(self):
        yield f"{'target':24} {'rounds':>7} {'seconds':>8}  kernels"
        for name in sorted(self.rounds):
            kernels = ", ".join(sorted(self.kernels[name]))
            yield f"{name:24} {self.rounds[name]:7} {self.seconds[name]:8.0f}  {kernels}"


def watch(commands, names, tally, again, hang=HANG):
    """Run the processes until all have ended.

    commands : functions of a list of names, that return the command of a worker of these targets.
    again : a function of a name and a seed, that returns the command to repeat a round with.
    """
    selector, running, last = selectors.DefaultSelector(), [], time.monotonic()
    for command in commands:
        running.append(_Worker(command, list(names), selector))
    while running:
        for key, _ in selector.select(timeout=1):
            key.data.read(tally, again)
        now = time.monotonic()
        passed, last = min(now - last, PASS), now
        for process in list(running):
            process.took += passed
            if process.round and process.took > hang:
                process.hung = True
                process.process.send_signal(signal.SIGABRT)
            if process.ended and not process.restart(tally, again):
                running.remove(process)


class _Worker:
    def __init__(self, command, names, selector):
        self.command, self.names, self.selector, self.crashes = command, names, selector, {}
        self._start(0)

    def _start(self, attempt):
        self.errors = tempfile.TemporaryFile()
        command = self.command(self.names, attempt)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, bufsize=0)
        self.attempt, self.round, self.took, self.ended, self.hung, self.rest = attempt, None, 0.0, False, False, b""
        self.selector.register(self.process.stdout, selectors.EVENT_READ, self)

    def read(self, tally, again):
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            self.selector.unregister(self.process.stdout)
            self.process.stdout.close()
            self.process.wait()
            self.ended = True
            return
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "begin" in said:
                self.round, self.took = (said["begin"], said["seed"], said["kernel"]), 0.0
                continue
            name, seed, kernel = self.round
            tally.add(name, kernel, said["seconds"])
            if said["failure"]:
                report(tally, name, seed, kernel, said["failure"], again)
            self.round = None

    def restart(self, tally, again):
        """Whether the process goes on in a new one, after a crash."""
        if self.process.returncode == 0:
            return False
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")
        how = "had no end" if self.hung else f"ended with code {self.process.returncode}"
        if self.round is None:
            report(tally, "the worker", 0, "", f"it {how}\n{said[:SHOWN]}", None)
            return False
        name, seed, kernel = self.round
        tally.add(name, kernel, self.took)
        report(tally, name, seed, kernel, f"the process {how}\n{said[:SHOWN]}", again, ended=True)
        self.crashes[name] = self.crashes.get(name, 0) + 1
        if self.crashes[name] >= MOST_FAILURES:
            self.names.remove(name)
        if not self.names:
            return False
        self._start(self.attempt + 1)
        return True


def report(tally, name, seed, kernel, what, again, ended=False):
    """Print a failure, and how to repeat it."""
    tally.failures += 1
    print(f"\n==== {name} failed, seed {seed}, kernel {kernel}\n{what.rstrip()}")
    if again is not None:
        print(f"---- again: {shlex.join(again(name, seed))}")
    if ended:
        print(f"---- the last example:\n{last_example(again(name, seed))}")
    print(flush=True)


def last_example(command):
    """The arguments that end a process, or that have no end, which cannot tell: those that it prints last when it
    prints all."""
    command = [sys.executable if part == "python" else part for part in command]
    with tempfile.TemporaryFile() as printed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, "--verbose"], stdout=printed, stderr=subprocess.DEVNULL, timeout=HANG)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return text[max(text.rfind("Trying"), 0) :][:SHOWN]
