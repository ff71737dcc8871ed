"""What `make release` finds missing, in a repository that lacks one thing after the other."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import types

import pytest
from support.processes import ROOT, run_python

FILES = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "sdpa/__init__.py", ".gitignore")
URLS = '[project.urls]\nRepository = "https://example.org/sdpa"\n'
# In place of tests/builds/wheels.py, of which a release asks this much.
WHEELS = """
VERSIONS, TARGETS = ["3.13", "3.14"], {"linux": None, "windows": None}
def find_pythons(wanted):
    return dict.fromkeys(wanted, "python")
def tags_of(name, version):
    return f"py{version}-{name}"
"""
MAKEFILE = """
wheels:
\t@echo wheels were built
\tmkdir dist
\ttouch dist/sdpa-VERSION-py3.13-linux.whl dist/sdpa-VERSION-py3.13-windows.whl dist/sdpa-VERSION-py3.14-linux.whl
\ttouch dist/sdpa-VERSION-py3.14-windows.whl
sdist:
\t@echo the source, too
\ttouch dist/sdpa-VERSION.tar.gz
"""

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".ci").is_dir(), reason="this needs git, and a working tree"
)


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheels(release, monkeypatch):
    wheels = types.ModuleType("wheels")
    exec(WHEELS, wheels.__dict__)
    monkeypatch.setattr(release, "wheels_of", lambda root: wheels)
    return wheels


@pytest.fixture
def ready(wheels, tmp_path, monkeypatch):
    """A repository that lacks nothing."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    change(tmp_path, "CHANGELOG.md", r"^## (\S+) \(.*\)$", r"## \1 (2030-01-31)")
    text = re.sub(r"^date-released:.*\n", "", (tmp_path / "CITATION.cff").read_text(), flags=re.MULTILINE)
    (tmp_path / "CITATION.cff").write_text(text + "date-released: 2030-01-31\n")
    if "[project.urls]" not in (tmp_path / "pyproject.toml").read_text():
        change(tmp_path, "pyproject.toml", r"\Z", f"\n{URLS}")
    version = re.search(r'^version = "(\d+\.\d+)', (tmp_path / "pyproject.toml").read_text(), re.MULTILINE)[1]
    (tmp_path / "tests/cache/saved" / version).mkdir(parents=True)
    (tmp_path / "tests/cache/saved" / version / "file").touch()
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path)
    return tmp_path


def git(root, *arguments):
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull})


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "All")


def change(root, file, pattern, new):
    text, count = re.subn(pattern, new, (root / file).read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    assert count == 1
    (root / file).write_text(text, encoding="utf-8")


def test_nothing_is_missing(release, ready):
    assert list(release.problems(ready)) == []


def test_versions_agree_in_the_working_tree(release):
    assert len(set(release.versions(ROOT).values())) == 1


@pytest.mark.parametrize(
    "file, pattern, new, said",
    [
        ("pyproject.toml", r'^version = ".*"', 'version = "9.9.9"', "CITATION.cff says version"),
        ("pyproject.toml", r'^version = ".*"', 'version = "9.9"', "must be three numbers"),
        ("sdpa/__init__.py", r'^__version__ = ".*"', '__version__ = "9.9.9"', "sdpa/__init__.py says version 9.9.9"),
        ("CITATION.cff", r"^version: .*", "version: 9.9.9", "CITATION.cff says version 9.9.9"),
        ("CITATION.cff", r"^date-released: .*", "", "must have the line `date-released: 2030-01-31`"),
        ("CHANGELOG.md", r"^## \S+ \(.*\)", "## 9.9.9 (2030-01-31)", "CHANGELOG.md says version 9.9.9"),
        ("pyproject.toml", r"^Repository = .*", "", "pyproject.toml does not say where the repository is"),
        ("CHANGELOG.md", r"\(2030-01-31\)", "(unreleased)", "has (unreleased) where it must have the date"),
    ],
)
def test_what_is_missing_is_said(release, ready, file, pattern, new, said):
    change(ready, file, pattern, new)
    commit(ready)
    assert any(said in problem for problem in release.problems(ready))


def test_links_of_the_package_index_lead_to_the_repository(tmp_path):
    """Those of README.md to files beside it, once there is an address."""
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if "[project.urls]" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
        assert description(ROOT) == readme
        change(tmp_path, "pyproject.toml", r"\Z", f"\n{URLS}")
    else:
        change(tmp_path, "pyproject.toml", r"^Repository = .*", URLS.splitlines()[1])
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    shown = description(tmp_path)
    assert len(re.findall(r"\]\(", shown)) == len(re.findall(r"\]\(", readme)) > 30
    assert not re.search(r"\]\((?!https://)", shown)
    assert f"](https://example.org/sdpa/blob/v{version}/docs/how_to/install.md)" in shown
    assert re.search(rf"!\[[^\]]+\]\(https://example.org/sdpa/raw/v{version}/docs/speed.svg\)", shown)


def test_each_python_must_be_there(release, ready, wheels):
    wheels.find_pythons = lambda wanted: {"3.13": "python"}
    assert list(release.problems(ready)) == ["there is no Python 3.14 here, for which a release has wheels"]


def test_the_names_of_wheels_are_those_that_are_built(release):
    """Those of tests/builds/wheels.py itself, in a Python of its own."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / ".ci")!r})
import release
from pathlib import Path
wheels = release.wheels_of(Path({str(ROOT)!r}))
print(wheels.tags_of("win-amd64", "3.14t"), wheels.tags_of("musllinux-aarch64", "3.10"))
print(len(release.unlike(Path("nothing"), "1.2.3", wheels)) == len(wheels.TARGETS) * len(wheels.VERSIONS) + 1 > 40)
"""
    assert run_python(code) == "cp314-cp314t-win_amd64 cp310-cp310-musllinux_1_2_aarch64\nTrue"


def test_the_repository_must_be_ready(release, ready):
    def only():
        (problem,) = release.problems(ready)
        return problem

    (ready / "new").touch()
    assert only() == "the working tree has changes:\n?? new"
    commit(ready)
    git(ready, "checkout", "--quiet", "-b", "other")
    assert only() == "the branch is other: it must be main"
    git(ready, "checkout", "--quiet", "main")
    shutil.rmtree(ready / "tests")
    commit(ready)
    assert "make.py` writes it" in only()
    git(ready, "checkout", "--quiet", "other")
    git(ready, "branch", "--quiet", "--force", "main", "other")
    git(ready, "checkout", "--quiet", "main")
    version = release.versions(ready)["pyproject.toml"]
    git(ready, "tag", f"v{version}")
    assert f"there is a tag v{version}" in only()


def test_nothing_is_done_while_something_is_missing(ready):
    """By the copy of the script in that repository, whose .ci/run would say that it ran."""
    (ready / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release.py", ready / ".ci")
    (ready / ".ci/run").write_text("#!/bin/sh\necho all tests ran\n")
    (ready / ".ci/run").chmod(0o755)
    version = re.search(r'^version = "(.*)"', (ready / "pyproject.toml").read_text(), re.MULTILINE)[1]
    complete = MAKEFILE.replace("VERSION", version)
    (ready / "Makefile").write_text(re.sub("\n.*3.14-windows.*", "", complete))
    (ready / "tests/builds").mkdir()
    (ready / "tests/builds/wheels.py").write_text(WHEELS)
    (ready / "dist").mkdir()
    (ready / "dist/sdpa-0.0.1.tar.gz").touch()
    commit(ready)

    def made():
        done = subprocess.run([sys.executable, ".ci/release.py"], cwd=ready, capture_output=True, text=True)
        tags = subprocess.run(["git", "tag"], cwd=ready, capture_output=True, text=True).stdout.split()
        return done.returncode, done.stdout + done.stderr, tags

    (ready / "new").touch()
    code, said, tags = made()
    assert (code, tags) == (1, []) and "all tests ran" not in said and "1 thing is missing" in said
    (ready / "new").unlink()
    (ready / ".ci/run").write_text("#!/bin/sh\nexit 1\n")
    commit(ready)
    code, said, tags = made()
    assert (code, tags) == (1, []) and "wheels were built" not in said
    (ready / ".ci/run").write_text("#!/bin/sh\necho all tests ran\n")
    commit(ready)
    git(ready, "config", "user.name", "somebody")
    git(ready, "config", "user.email", "somebody@example.org")
    code, said, tags = made()
    lacks = f"\ndist/ lacks sdpa-{version}-py3.14-windows.whl\nnothing is tagged\n"  # and the old file is gone
    assert (code, tags) == (1, []) and said.endswith(lacks)
    (ready / "Makefile").write_text(complete)
    commit(ready)
    code, said, tags = made()
    assert code == 0 and len(tags) == 1 and f"git push origin main {tags[0]}" in said
    assert said.index("all tests ran") < said.index("wheels were built") < said.index("the source, too")
    assert said.index("the source, too") < said.index("published nowhere")
