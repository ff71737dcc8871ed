"""Revisions of this library, each built in a folder of its own.

A folder is named after what it is made from: the sources, the compiler, the interpreter and the flags.  So what was
built once is taken again, and two revisions with the same sources are the same folder.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure.runner import ROOT

BUILT = ROOT / "build" / "revisions"  # git ignores it, make clean removes it
SOURCES = ("csrc", "sdpa", "setup.py", "pyproject.toml")
LEFT_OUT = ("benchmarks", "docs", "tests")  # those of the working tree measure all revisions
FLAGS = ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "SDPA_SANITIZE", "SDPA_WERROR")


class Revision(NamedTuple):
    """`name`: for people, such as v0.1-3-g30f7dcc."""

    name: str
    folder: Path


def revision(name, progress, instead=None):
    """The built Revision that git knows by this name; the working tree for None.

    instead : {path: text} of files that take the place of its own
    """
    instead = instead or {}
    tree = working_tree() if name is None else git("rev-parse", "--verify", f"{name}^{{tree}}")
    described = git("describe", "--always", "--tags", *(["--dirty"] if name is None else [f"{name}^{{commit}}"]))
    folder = BUILT / key_of("\n".join([git("ls-tree", tree, "--", *SOURCES), *instead.values()]))
    if not folder.exists():
        progress(f"building {described}")
        build(tree, folder, instead)
    return Revision(described, folder)


def working_tree():
    """The tree that git would make of all files as they are, without touching its index."""
    with tempfile.TemporaryDirectory() as empty:
        index = {"GIT_INDEX_FILE": f"{empty}/index"}
        git("read-tree", "HEAD", **index)
        git("add", "--all", **index)
        return git("write-tree", **index)


def key_of(sources):
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [f"{name}={os.environ.get(name)}" for name in FLAGS]
    made_from = "\n".join([sources, said, sys.version, np.__version__, *flags])
    return hashlib.sha256(made_from.encode()).hexdigest()[:16]


def build(tree, folder, instead):
    """The files of a tree, and others instead of some of them, built in place; `folder` appears when all is done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as unfinished:
        made = Path(unfinished, folder.name)
        extract(tree, made)
        for path, text in instead.items():
            Path(made, path).write_text(text, encoding="utf-8")
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tree} could not be built by {' '.join(command)}:\n{done.stderr}")
        shutil.rmtree(made / "build")
        made.rename(folder)


def extract(tree, folder):
    paths = [f":(exclude){name}" for name in LEFT_OUT]
    archive = subprocess.run(["git", "archive", tree, "--", ".", *paths], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def git(*arguments, **environment):
    """What git says, or the end with what it complains about."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()
