"""A release, up to its publication: `make release`.  It checks what can be checked, runs `.ci/run`, builds what is to
be published, and tags the commit.  It publishes nothing, and says what is left to do.

    python .ci/release.py --check     only what takes no time: what is still missing before a release
"""

import argparse
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
NEXT = """{tag} is tagged here, and published nowhere.  What is left to do:

  1. Read `git show {tag}` and the new section of CHANGELOG.md once more.
  2. git push origin {branch} {tag}
  3. Publish: {publish}
  4. In a clean environment: pip install sdpa=={version} && python -m sdpa info && python -m sdpa demo
  5. Raise the version in pyproject.toml, sdpa/__init__.py and CITATION.cff, and begin `## <next> (unreleased)` in
     CHANGELOG.md.

To take it back before the push: git tag -d {tag}"""


def found(pattern, file, root=ROOT):
    """What the pattern's group finds in a file, or None."""
    match = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
    return match and match[1]


def versions(root):
    """The version by the file that says it."""
    return {
        "pyproject.toml": found(r'^version = "(.*)"$', "pyproject.toml", root),
        "sdpa/__init__.py": found(r'^__version__ = "(.*)"$', "sdpa/__init__.py", root),
        "CITATION.cff": found(r"^version: (.*)$", "CITATION.cff", root),
        "CHANGELOG.md": found(r"^## (\S+)", "CHANGELOG.md", root),
    }


def problems(root=ROOT):
    """What is missing before a release, as sentences."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.strip()

    said = versions(root)
    version = said["pyproject.toml"] or "?"
    for file, other in said.items():
        if other != version:
            yield f"{file} says version {other}, and pyproject.toml {version}"
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"the version is {version}: it must be three numbers"
    date = found(r"^## \S+ \((.*)\)$", "CHANGELOG.md", root)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date or ""):
        yield f"CHANGELOG.md has ({date}) where it must have the date of the release, such as (2026-12-31)"
    elif found(r"^date-released: (.*)$", "CITATION.cff", root) != date:
        yield f"CITATION.cff must have the line `date-released: {date}`, the date in CHANGELOG.md"
    if not found(r'^\[project\.urls\]\nRepository = "(https://.*)"$', "pyproject.toml", root):
        yield (
            "pyproject.toml does not say where the repository is, so that the links of the README lead nowhere on the "
            'package index: write [project.urls], and below it Repository = "https://…"'
        )
    saved = Path("tests/cache/saved", ".".join(version.split(".")[:2]))
    if not (root / saved).is_dir():
        yield f"{saved} is missing: `python tests/cache/saved/make.py` writes it"
    builds = wheels_of(root)
    for python in sorted(set(builds.VERSIONS) - set(builds.find_pythons(builds.VERSIONS))):
        yield f"there is no Python {python} here, for which a release has wheels"
    if changes := git("status", "--porcelain"):
        yield f"the working tree has changes:\n{changes}"
    if (branch := git("branch", "--show-current")) != BRANCH:
        yield f"the branch is {branch}: it must be {BRANCH}"
    if git("tag", "--list", f"v{version}"):
        yield f"there is a tag v{version}: raise the version, or remove the tag if it was never published"


def wheels_of(root):
    """The module that builds wheels: for which versions of Python, for which systems, and what they are called."""
    sys.path.insert(0, str(root / "tests/builds"))
    try:
        return importlib.import_module("wheels")
    finally:
        del sys.path[0]


def unlike(folder, version, builds):
    """What a release lacks among the files of dist/, and what it must not have, as sentences."""
    tags = [builds.tags_of(name, python) for name in builds.TARGETS for python in builds.VERSIONS]
    expected = {f"sdpa-{version}.tar.gz", *(f"sdpa-{version}-{tag}.whl" for tag in tags)}
    there = {file.name for file in folder.glob("*")}
    return [f"dist/ lacks {name}" for name in sorted(expected - there)] + [
        f"dist/ has {name}, which is not of this release" for name in sorted(there - expected)
    ]


def run(*command):
    print("==", *command, flush=True)
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"{' '.join(command)} failed: nothing is tagged")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    arguments = parser.parse_args()
    missing = list(problems())
    for problem in missing:
        print(f"* {problem}")
    if missing or arguments.check:
        print(f"{len(missing)} {'thing is' if len(missing) == 1 else 'things are'} missing before a release")
        return 1 if missing else 0
    run(".ci/run")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for target in ("wheels", "sdist"):
        run("make", target)
    version = versions(ROOT)["pyproject.toml"]
    if faults := unlike(ROOT / "dist", version, wheels_of(ROOT)):
        sys.exit("\n".join([*faults, "nothing is tagged"]))
    if again := list(problems()):
        sys.exit(f"the tests have left something: {again}")
    tag = f"v{version}"
    run("git", "tag", "--annotate", tag, "--message", f"Version {version}; CHANGELOG.md says what is new")
    hosted = list((ROOT / ".github/workflows").glob("*.yml")) if (ROOT / ".github/workflows").is_dir() else []
    publishes = any("pypi" in file.read_text().lower() for file in hosted)
    publish = "the hosted workflow does, when the tag arrives there" if publishes else "`twine upload` what is in dist/"
    print(NEXT.format(tag=tag, version=version, branch=BRANCH, publish=publish))
    return 0


if __name__ == "__main__":
    sys.exit(main())
