"""What hosted CI runs: commands that there are, which a developer can run as well."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(workflow):
    """Each line that a step runs, with one of the values of the matrix in place of each name."""
    text = workflow.read_text(encoding="utf-8")
    lists = {name: values.split(", ") for name, values in re.findall(r"^ +(\w+): \[(.*)\]$", text, re.MULTILINE)}
    for block in re.findall(r"^( +)- run: ?(.*(?:\n\1 {2,}.*)*)", text, re.MULTILINE):
        step = block[1].lstrip()
        lines = [" ".join(step[1:].split())] if step.startswith(">") else step.lstrip("|").strip().splitlines()
        for line in lines:
            used = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", line)
            for value in lists[used[0]] if used else [""]:
                yield re.sub(r"\$\{\{ .*? \}\}", value.strip('"'), line.strip())


ALL = [(workflow.name, command) for workflow in WORKFLOWS for command in commands(workflow)]
MADE = sorted({shlex.split(command)[1] for _, command in ALL if command.startswith("make ")})


def test_there_are_workflows():
    assert [workflow.stem for workflow in WORKFLOWS] == ["test", "wheels"]
    assert {"lint", "test", "wheels", "test-builds"} <= set(MADE)


@pytest.mark.parametrize("target", MADE)
def test_targets_are_those_of_the_makefile(target):
    """Their recipes are read, too, where make is installed."""
    assert f"make {target} " in MAKEFILE, f"make help does not name {target}"
    phony = MAKEFILE.partition(".PHONY:")[2].replace("\\\n", " ").split()
    assert target in phony
    if shutil.which("make"):
        read = subprocess.run(["make", "-n", "-C", ROOT, target], capture_output=True, text=True)
        assert read.returncode == 0, read.stderr


@pytest.mark.parametrize("workflow, command", ALL)
def test_commands_are_known(workflow, command):
    """make, scripts of this repository, and what installs a system's packages."""
    words = shlex.split(command)
    for word in words:
        assert "/" not in word or not word.endswith(".py") or (ROOT / word).exists(), f"there is no {word}"
    assert words[0] in ("make", "python", "docker", "sudo")


def test_the_index_trusts_only_the_job_that_publishes():
    text = (ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8")
    jobs = re.split(r"\n  (?=[\w-]+:\n)", text.partition("\njobs:")[2])
    allowed = [job.split(":")[0].strip() for job in jobs if "id-token: write" in job]
    assert allowed == ["publish"] and text.count("id-token") == 1
    publish = next(job for job in jobs if job.startswith("publish"))
    assert "refs/tags/v" in publish and "needs: [test, musl]" in publish and "secrets." not in text
