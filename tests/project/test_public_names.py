"""What is public does not change unnoticed."""

import inspect

import public_names
import pytest
from public_names import FILE, MODULES, lines_of, section, sections_of

CHANGED = "what is public has changed: run `python tests/project/public_names.py`, and see Stability in CONTRIBUTING.md"


@pytest.mark.parametrize("name", MODULES)
def test_names_signatures_and_errors_are_those_of_the_list(name):
    found = section(name)
    if found is None:
        pytest.skip(f"what {name} adapts is not installed")
    assert sections_of(FILE.read_text()).get(name) == found, CHANGED


def test_the_list_shows_each_change():
    class Cache:
        def __init__(self, size, *, keep=0): ...
        def append(self, key): ...
        def _inner(self): ...
        @property
        def length(self): ...

    Cache.__module__ = "sdpa.anything"
    assert list(lines_of("Cache", Cache)) == ["Cache: class(size, *, keep=0)", "    append(self, key)", "    length"]
    assert list(lines_of("f", lambda a, *, b=None: a)) == ["f(a, *, b=None)"]
    assert list(lines_of("inspect", inspect)) == ["inspect: module"]


def test_the_command_writes_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(public_names, "FILE", tmp_path / "names.txt")
    monkeypatch.setattr(public_names, "section", lambda name: None if name in public_names.ADAPTERS else section(name))
    (tmp_path / "names.txt").write_text("[sdpa.torch]\nraises nothing\nold(x)\n")
    public_names.main()
    written = sections_of((tmp_path / "names.txt").read_text())
    assert written["sdpa.torch"] == ["[sdpa.torch]", "raises nothing", "old(x)"]
    assert written["sdpa"] == section("sdpa")
