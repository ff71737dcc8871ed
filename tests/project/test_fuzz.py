"""The fuzzers find what is planted, say how to find it again, and end."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from support.processes import ROOT, run_python


def fuzz(*arguments):
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_a_round_of_each_target_that_is_named():
    code, printed = fuzz("--minutes", "0", "--seed", "3", "--only", "merge,like torch,paged,commands")
    assert code == 0 and printed.endswith("0 failures\n")
    for name in ("merge", "like torch", "paged", "commands"):
        assert re.search(rf"^{name} +1 ", printed, re.MULTILINE)


def test_every_kernel_is_drawn():
    names = run_python(
        "import tests.fuzz; from tests.fuzz.kernels import *\nprint({use_kernel(n) for n in range(99)} == {*KERNELS})"
    )
    assert names == "True"


def test_wrong_names():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--only", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--only has nothing: it must be of attention, weights" in done.stderr


# A worker whose targets are these.
TARGETS = """
import os, sys, time
import tests.fuzz
from hypothesis import given, strategies as st
from tests.fuzz import running, targets

def fails(number):
    assert number < 0, "planted"

@given(st.integers(0, 1000))
def crashes(number):
    if number > 9:
        os.abort()

def stays(number):
    time.sleep(1000)

def brief(number):
    time.sleep(2)

targets.TARGETS.clear()
targets.TARGETS |= {"well": lambda number: None, "fails": fails, "crashes": lambda number: crashes(), "stays": stays}
targets.TARGETS |= {"brief": brief}
"""
WORKER = TARGETS + "running.worker(sys.argv[1].split(','), 5, 1, 0)"
WATCH = """
import sys, time, types
import tests.fuzz
from tests.fuzz import running
{before}
tally = running.Tally()
command = lambda names, attempt: [sys.executable, "-c", {worker!r}, ",".join(names)]
again = lambda name, seed: ["python", "-c", {repeat!r}, name]
running.HANG = 20
running.watch([command], {names!r}, tally, again, hang={hang})
print(*tally.lines(), sep="\\n")
print(tally.failures, "failures")
"""
REPEAT = "print('Trying example: crashes(\\n    number=10,\\n)')"


def watched(*names, before="", hang=4):
    code = WATCH.format(worker=WORKER, names=list(names), repeat=REPEAT, before=before, hang=hang)
    return run_python(code, timeout=120)


def test_a_failure_is_printed_with_its_seed_and_the_others_go_on():
    printed = watched("fails", "well")
    assert "==== fails failed, seed 5, kernel" in printed and "AssertionError: planted" in printed
    assert re.search(r"^well +1 ", printed, re.MULTILINE) and printed.endswith("1 failures")


def test_a_crash_is_a_failure_with_its_last_example():
    printed = watched("crashes", "well")
    assert (
        "==== crashes failed, seed 5" in printed and "code -6" in printed and "Fatal Python error: Aborted" in printed
    )
    assert "---- the last example:" in printed and "number=10" in printed
    assert "3 failures" in printed  # then it is left alone
    assert re.search(r"^well +", printed, re.MULTILINE)


def test_a_round_without_end_is_a_failure():
    printed = watched("stays")
    assert "==== stays failed, seed 5" in printed and "had no end" in printed and "time.sleep" not in printed.split()[0]


# A clock that goes on by an hour each time that the watcher looks.
SLEPT = """
looks = []
def later():
    looks.append(1)
    return time.monotonic() + 3600 * len(looks)
running.time = types.SimpleNamespace(monotonic=later)
"""


def test_a_machine_that_slept_is_no_round_without_end():
    printed = watched("brief", before=SLEPT, hang=60)
    assert printed.endswith("0 failures") and re.search(r"^brief +1 ", printed, re.MULTILINE)


def test_what_is_printed_finds_the_failure_again():
    code = "from tests.fuzz.__main__ import again; import shlex; print(shlex.join(again('like torch', 12)))"
    command = shlex.split(run_python(code))
    assert command[:3] == ["python", "-m", "tests.fuzz"]
    done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "seed 12" in done.stdout


# Calls every target once, but those that start other processes, and prints which public names that has called.
CALLED = """
import importlib, inspect, sys
import tests.fuzz
from hypothesis import Phase, settings
settings.register_profile("few", max_examples=3, database=None, phases=[Phase.generate])
settings.load_profile("few")
from tests.fuzz import ranks, targets
names, called = {}, set()
for module in sys.argv[1:]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        continue
    for name in found.__all__:
        public = getattr(found, name)
        for function in vars(public).values() if inspect.isclass(public) else [public]:
            function = inspect.unwrap(getattr(function, "__func__", function))
            names[getattr(function, "__code__", None)] = f"{module}.{name}"

def note(frame, event, argument):
    called.add(names.get(frame.f_code))

for name in {*targets.TARGETS} - {*ranks.TARGETS}:
    sys.setprofile(note)
    targets.TARGETS[name](1)
    sys.setprofile(None)
called |= {f"sdpa.lab.{name}" for name in targets.laboratory.EXPERIMENTS}  # one of which is drawn each time
print(*targets.LEFT_OUT, "|", *filter(None, called))
"""
NOT_FUZZED = {
    "sdpa.Gradients": "a result",
    "sdpa.reference.KVCache": "an oracle, in whose place the state machine of caches keeps all keys itself",
}


def public_names():
    """Functions and classes, as module.name."""
    text = (ROOT / "tests/project/public_names.txt").read_text(encoding="utf-8")
    for module, lines in re.findall(r"^\[(sdpa[\w.]*)\]\n((?:.+\n)+)", text, re.MULTILINE):
        for name in re.findall(r"^(\w+)(?:\(|: class)", lines, re.MULTILINE):
            yield f"{module}.{name}"


def test_every_public_name_is_fuzzed():
    public = set(public_names())
    modules = sorted({name.rpartition(".")[0] for name in public} - {"sdpa.distributed"})
    command = [sys.executable, "-c", CALLED, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    left_out, _, called = done.stdout.partition("|")
    called = set(called.split())
    # On ranks, in other processes: by what they are started with.
    workers = ROOT / "tests/fuzz/unequal.py", ROOT / "tests/distributed/many_cases.py"
    called |= {f"sdpa.{name}" for path in workers for name in re.findall(r"\b(distributed\.\w+)", path.read_text())}
    needs = {"sdpa.torch.": "torch", "sdpa.huggingface.": "transformers", "sdpa.lab.heatmap": "matplotlib"}
    missing = {start for start, needed in needs.items() if needed in left_out.split()}
    expected = {name for name in public if not name.startswith((*missing, "sdpa.distributed.Explanation"))}
    assert expected - called == {*NOT_FUZZED}


def test_guided_by_coverage():
    pytest.importorskip("atheris", reason="atheris is not installed")
    command = [sys.executable, "-m", "tests.fuzz.guided", "--minutes", "0.05", "--only", "a cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    inputs, branches = map(int, re.search(r"^a cache +(\d+) inputs, +(\d+) branches", done.stdout).groups())
    assert inputs > 10 and branches > 100  # of the reader; without it there are some 20


@pytest.mark.slow
def test_each_target_finds_its_fault():
    """What a target cannot find it does not test."""
    without = run_python(
        "import tests.fuzz; from tests.fuzz import planted, targets\nprint({*targets.TARGETS} - {*planted.FAULTS})"
    )
    assert without == "set()"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.planted"], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"after \d+ rounds", done.stdout)) == len(done.stdout.splitlines()) > 20
