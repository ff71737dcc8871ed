"""What the documents say holds: code runs, pictures and tables are right, links lead somewhere, names are where they
are said to be."""

import doctest
import json
import re
import runpy
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

import sdpa

ROOT = Path(__file__).resolve().parents[2]
CHART = runpy.run_path(str(ROOT / "benchmarks/report/chart.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "HACKING.md", "CHANGELOG.md", "csrc/README.md", "benchmarks/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(document):
    return FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))


def headings(document):
    """The anchors of a document, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


LINKS = [
    (document, *link) for document in DOCUMENTS for link in re.findall(r"\[([^\]]*)\]\(([^)]*)\)", prose(document))
]


def test_the_python_blocks_run():
    """In their order, each with the names of those before; those with prompts print what they show."""
    names = {}
    for language, code in FENCE.findall(README):
        if language == "python":
            exec(compile(code, "README.md", "exec"), names)
        elif language == "pycon":
            example = doctest.DocTestParser().get_doctest(code, names, "README.md", "README.md", 0)
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
            assert result.attempted and not result.failed, code
            names = example.globs
    assert names


def test_the_blocks_with_torch_run():
    pytest.importorskip("torch")
    names = {}
    for language, code in FENCE.findall(README):
        if language == "py":
            exec(compile(code, "README.md", "exec"), names)
    assert names


def test_the_first_screen_has_the_two_commands_a_newcomer_needs():
    """What they need, how long they take; and make knows them."""
    screen = "\n".join(README.splitlines()[:30])
    commands = re.findall(r"^make (\w+) +# .*minutes", screen, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
    assert all(what in screen for what in ("`make`", "`python3`", "C compiler"))


def test_the_decode_loop_is_the_one_that_is_tested():
    tested = (ROOT / "tests/cache/test_decode_loop.py").read_text(encoding="utf-8")
    shown = re.findall(r"^# ---- begin[^\n]*\n(.*?)^# ---- end$", tested, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for code in shown:
        assert f"```python\n{code.strip()}\n" in README


@pytest.mark.parametrize("document, text, target", LINKS, ids=[f"{link[0]}-{link[2]}-{link[1]}" for link in LINKS])
def test_links_lead_somewhere(document, text, target):
    """Files and headings exist; a line exists; a name in backticks, if any, is in the file or the line."""
    if target.startswith("https://"):
        return
    path, _, anchor = target.partition("#")
    file = (ROOT / document).parent / path if path else ROOT / document
    assert file.exists(), target
    where = ""
    if file.suffix in {".py", ".pyx", ".pxi", ".pxd", ".pyi", ".c", ".h", ".md"}:
        where = file.read_text(encoding="utf-8")
    if line := re.fullmatch(r"L(\d+)", anchor):
        where = where.splitlines()[int(line[1]) - 1]
    elif anchor:
        assert anchor in headings(file.relative_to(ROOT)), target
    for name in re.findall(r"`(\w+)`", text):
        assert re.search(rf"\b{name}\b", where), f"{name} is not in {target}"


PICTURES = re.findall(r"<!-- picture:[^>]*-->\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
DRAWN = []  # options, matrix
for picture in PICTURES:
    head, *rows = picture.splitlines()
    starts = [found.start() for found in re.finditer(r"(?:(?<=  )|^)\S", head)]
    for begin, end in zip(starts, [*starts[1:], None]):
        DRAWN.append((head[begin:end].strip(), np.array([row[begin:end].split() for row in rows], int)))


def test_there_are_pictures():
    assert len(PICTURES) == 2 and len(DRAWN) == 9


@pytest.mark.parametrize("options, drawn", DRAWN, ids=[f"{name}-{len(matrix)}" for name, matrix in DRAWN])
def test_the_mask_pictures(options, drawn):
    options = eval(f"dict({options})")
    query, key = np.ones((drawn.shape[0], 4)), np.ones((drawn.shape[1], 4))
    np.testing.assert_array_equal(sdpa.attention_weights(query, key, **options) > 0, drawn)


def test_the_numbers_are_those_that_were_measured():
    measured = json.loads((ROOT / "docs/speed.json").read_text(encoding="utf-8"))
    assert CHART["with_numbers"](README, measured) == README
    drawn = CHART["svg"](measured)
    assert drawn == (ROOT / "docs/speed.svg").read_text(encoding="utf-8")
    xml.etree.ElementTree.fromstring(drawn)


def test_the_chart_without_peers_and_with_few_workloads():
    """What was not measured is left out."""
    measured = json.loads((ROOT / "docs/speed.json").read_text(encoding="utf-8"))
    measured["bounds"] = {"bert-fp32": measured["bounds"]["bert-fp32"]}
    measured["results"] = [result for result in measured["results"] if result["implementation"] == "sdpa"]
    drawn = CHART["svg"](measured)
    assert drawn.count('<rect class="ours"') == 2 and drawn.count('<circle class="peer"') == 1  # with the legend
    assert len(CHART["table"](measured).splitlines()) == 3


def test_the_list_of_files_of_the_kernels():
    listed = re.findall(r"\[([\w/]+\.[ch])\]\(", (ROOT / "csrc/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(
        path.relative_to(ROOT / "csrc").as_posix() for path in (ROOT / "csrc").rglob("*.[ch]")
    )


@pytest.mark.parametrize("document", DOCUMENTS[:-1])
def test_lines_are_no_longer_than_120(document):
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith(("|", "!["))]
