"""What the documents say holds: code runs, pictures and tables are right, links lead somewhere, names are where they
are said to be."""

import ast
import collections
import doctest
import importlib.util
import json
import re
import runpy
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from support.ranks import MPIEXEC, run_ranks

import sdpa

ROOT = Path(__file__).resolve().parents[2]
CHART = runpy.run_path(str(ROOT / "benchmarks/report/chart.py"))
DOCUMENTS = [
    *(path.name for path in sorted(ROOT.glob("*.md"))),
    "csrc/README.md",
    "benchmarks/README.md",
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if "_build" not in path.parts
    ),
]
TEXTS = {document: (ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS}
README = TEXTS["README.md"]
FENCE = re.compile(r"^(```+)([^\n`]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^<!-- begin:.*?^<!-- end:[^\n]*$", re.MULTILINE | re.DOTALL)
PYTHON = "python", "pycon", "{code-cell} ipython3"
OTHER_LIBRARIES = "py"


def prose(document):
    return FENCE.sub("", TEXTS.get(document) or (ROOT / document).read_text(encoding="utf-8"))


def headings(document):
    """The anchors of a document, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def blocks(document, *languages):
    """(language, code) of the blocks in these languages.  A cell of a notebook may begin with lines like `:tags:`."""
    found = [(language.strip(), code) for _, language, code in FENCE.findall(TEXTS[document])]
    return [(language, re.sub(r"\A(:.*\n)+", "", code)) for language, code in found if language in languages]


def with_blocks(*languages):
    return [document for document in DOCUMENTS if blocks(document, *languages)]


@pytest.fixture
def without_windows(monkeypatch):
    """Figures are drawn, but not shown."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    yield
    if importlib.util.find_spec("matplotlib"):
        from matplotlib import pyplot

        pyplot.close("all")


@pytest.mark.parametrize("document", with_blocks(*PYTHON))
def test_the_python_blocks_run(document, without_windows):
    """In their order, each with the names of those before; those with prompts print what they show."""
    names = {}
    for language, code in blocks(document, *PYTHON):
        if language == "pycon":
            example = doctest.DocTestParser().get_doctest(code, names, document, document, 0)
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
            assert result.attempted and not result.failed, code
            names = example.globs
        else:
            exec(compile(code, document, "exec"), names)
    assert names


def imported(code):
    """The packages that are imported outside of functions."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("document", with_blocks(OTHER_LIBRARIES))
def test_the_blocks_with_other_libraries_run(document, tmp_path):
    """With the names of the other such blocks of the document; those for MPI on two ranks."""
    code = "\n".join(code for _, code in blocks(document, OTHER_LIBRARIES))
    needed = set(imported(code))
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing or ("mpi4py" in needed and MPIEXEC is None):
        pytest.skip(f"{document} needs {', '.join(missing) or 'mpiexec'}")
    if "mpi4py" in needed:
        (tmp_path / "page.py").write_text(code, encoding="utf-8")
        run_ranks(2, str(tmp_path / "page.py"))
    else:
        exec(compile(code, document, "exec"), {})


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_nothing_stands_twice():
    """No paragraph of some length, and no block of code."""
    parts = collections.Counter()
    for document in DOCUMENTS:
        text = GENERATED.sub("", prose(document))
        parts.update({" ".join(part.split()) for part in re.split(r"\n\n+", text) if len(part) > 100})
        parts.update({code for _, code in blocks(document, *PYTHON, OTHER_LIBRARIES) if code.count("\n") > 6})
    assert not [part for part, count in parts.items() if count > 1]


def test_the_first_screen_has_the_two_commands_a_newcomer_needs():
    """What they need, how long they take; and make knows them."""
    screen = "\n".join(README.splitlines()[:30])
    commands = re.findall(r"^make (\w+) +# .*minutes", screen, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
    assert all(what in screen for what in ("`make`", "Python 3.10", "`venv`", "C compiler"))


def test_extras_that_are_named_are_there():
    """In documents, messages and commands, whether of the library ('sdpa[lab]') or of the clone ('.[lab]')."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", project, re.MULTILINE | re.DOTALL)[1]
    extras = set(re.findall(r"^([\w-]+) = ", table, re.MULTILINE))
    python = [path for folder in ("sdpa", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    others = [path.read_text(encoding="utf-8") for path in [*python, ROOT / "Makefile"]]
    named = re.findall(r"[\"'](?:sdpa|\.)\[([\w,-]+)\]", "\n".join([project, *TEXTS.values(), *others]))
    named = {extra for names in named for extra in names.split(",")}
    assert {"huggingface", "lab", "mpi", "torch"} <= named <= extras


def test_the_commands_without_make_are_those_of_make():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = next(code for _, code in blocks("CONTRIBUTING.md", "") if "--no-build-isolation" in code).splitlines()
    requirements, install, tests = commands
    assert requirements.removeprefix("pip install ") in makefile
    assert install == "pip install --no-build-isolation -e '.[test]'"
    assert f"\ntest: $(DONE)/test\n\t{tests} $(ARGS)\n" in makefile


def test_contributing_names_all_commands_of_make():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    helped = re.findall(r"^\t@echo 'make (\S+)", makefile, re.MULTILINE)
    assert len(helped) > 20
    assert sorted(re.findall(r"^make (\S+)", TEXTS["CONTRIBUTING.md"], re.MULTILINE)) == sorted(helped)


def test_the_decode_loop_is_the_one_that_is_tested():
    tested = (ROOT / "tests/cache/test_decode_loop.py").read_text(encoding="utf-8")
    shown = re.findall(r"^# ---- begin: (\S+)\n(.*?)^# ---- end$", tested, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    for document, code in shown:
        assert f"```python\n{code.strip()}\n" in TEXTS[document]


LINKS = [
    (document, *link) for document in DOCUMENTS for link in re.findall(r"\[([^\]]*)\]\(([^)]*)\)", prose(document))
]


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
        assert anchor in headings(file.resolve().relative_to(ROOT).as_posix()), target
    for name in re.findall(r"`(\w+)`", text):
        assert re.search(rf"\b{name}\b", where), f"{name} is not in {target}"


MASKS = TEXTS["docs/how_to/masks.md"]
PICTURES = re.findall(r"<!-- picture:[^>]*-->\n```\n(.*?)^```$", MASKS, re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_are_no_longer_than_120(document):
    lines = GENERATED.sub("", TEXTS[document]).splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith(("|", "!["))]
