"""`sdpa.lab` as a module, and `python -m sdpa lab`."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from support.processes import run_python

import sdpa
from sdpa import __main__ as command_line
from sdpa import lab
from sdpa._report import drawing, terminal
from sdpa.lab import _command, _gaps, _steps, _variance
from sdpa.lab._experiment import VERDICTS


def verdicts(run):
    numbers = run()
    experiment = next(one for one in lab.EXPERIMENTS if one.run is run)
    return [finding.verdict for finding in experiment.findings(numbers)]


def test_lab_is_imported_when_asked_for():
    code = "import sys, sdpa; before = 'sdpa.lab' in sys.modules; sdpa.lab.gaps; "
    assert run_python(code + "print(before, 'sdpa.lab' in sys.modules, 'lab' in dir(sdpa))") == "False True True"
    assert run_python("from sdpa import *; print(lab.__name__)") == "sdpa.lab"
    with pytest.raises(AttributeError, match="module 'sdpa' has no attribute 'labs'"):
        sdpa.labs  # noqa: B018


def test_lab_does_not_import_matplotlib():
    code = "import sys, sdpa; sdpa.lab.gaps(); sdpa.lab.steps(); print('matplotlib' in sys.modules)"
    assert run_python(code) == "False"


# The command line.

FEW = ["--dims", "2,8", "--products", "50", "--seeds", "3"]


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """The command line in this process, in an empty folder: exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["sdpa", "lab", *arguments])
        monkeypatch.setenv("COLUMNS", "110")
        code = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def two_experiments(monkeypatch):
    monkeypatch.setattr(_command, "EXPERIMENTS", (_gaps.EXPERIMENT, _steps.EXPERIMENT))


def test_one_experiment_prints_its_tables_and_findings(call, tmp_path):
    code, out, err = call("variance", *FEW)
    assert code == 0
    assert err.startswith("1 of 1: variance, ")
    for text in ("Variance grows with the dimension", "Var(q·k) = d_k", "Var(q·k / √d_k)", "verdict"):
        assert text in out
    assert re.search(r"^8 +\d+\.\d+ ± ", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 110
    assert not list(tmp_path.iterdir())


def test_one_experiment_writes_what_is_asked(call, tmp_path):
    code, out, _ = call("variance", *FEW, "--html", "v.html", "--json", "v.json")
    assert code == 0
    page = (tmp_path / "v.html").read_text(encoding="utf-8")
    assert str(tmp_path / "v.html") in out and str(tmp_path / "v.json") in out
    assert "python -m sdpa lab variance --dims 2,8 --products 50 --seeds 3 --html variance.html" in page
    assert "sdpa.lab.variance(dims=(2, 8), products=50, seeds=3)" in page
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["experiments"]["variance"]
    numbers = lab.variance(dims=(2, 8), products=50, seeds=3)
    assert record["options"] == {"dims": [2, 8], "products": 50, "seeds": 3}
    assert record["numbers"]["bare"]["mean"] == numbers.bare.mean.tolist()
    assert [one["verdict"] for one in record["findings"]] == [
        finding.verdict for finding in _variance.findings(numbers)
    ]


def test_options_before_the_name_hold_as_well(call, tmp_path):
    assert call("--html", "a.html", "--json", "a.json", "gaps")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "a.json"}


def test_all_experiments(call, two_experiments, tmp_path):
    code, out, err = call()
    assert code == 0
    assert [line[:12] for line in err.splitlines()] == ["1 of 2: gaps", "2 of 2: step"]
    summary, page = out.split("\n\nThe page: ")
    assert page.strip() == str(tmp_path / "sdpa-lab.html")
    header, _, *rows = summary.splitlines()
    assert header.split() == ["experiment", "claim", "measured", "verdict"]
    assert [row.split()[0] for row in rows if row[:1].strip()] == ["gaps", "steps"]
    words = [row.rsplit("  ", 1)[-1].strip() for row in rows]
    expected = [VERDICTS[verdict] for run in (lab.gaps, lab.steps) for verdict in verdicts(run)]
    assert [word for word in words if word in VERDICTS.values()] == expected
    assert max(map(len, rows)) <= 110


def test_no_page(call, two_experiments, tmp_path):
    assert call("--no-html")[0] == 0
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(call, two_experiments, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "available", lambda: False)
    code, out, _ = call()
    assert code == 0 and "Figures need matplotlib: pip install matplotlib" in out
    page = (tmp_path / "sdpa-lab.html").read_text(encoding="utf-8")
    assert "<svg" not in page and "<figure" not in page and page.count("<table>") == 4
    assert "pip install" in page


USAGE = {
    "not a number": (["variance", "--dims", "2,x"], "argument --dims: 'x' is not a whole number"),
    "not whole": (["variance", "--seeds", "2.5"], "argument --seeds: '2.5' is not a whole number"),
    "not finite": (["gaps", "--widest", "nan"], "argument --widest: 'nan' is not a finite number"),
    "out of bounds": (["variance", "--dims", "4,0"], "argument --dims: dims is (4, 0): each must be 1 or more"),
    "of two": (["steps", "--width", "9", "--heads", "2"], "argument --width, --heads: width is 9: it must be"),
    "of a default": (["heads", "--counts", "5"], "argument --counts: counts has 5 heads: width, which is 12288, must"),
    "of another default": (["heads", "--projected", "5"], "argument --projected: projected has 5 heads: width, which"),
    "for defaults": (["heads", "--width", "9"], "argument --width: counts has 12 heads: width, which is 9, must"),
    "unknown": (["variance", "--points", "3"], "unrecognized arguments: --points"),
    "no experiment": (["nothing"], "invalid choice: 'nothing'"),
    "no folder": (
        ["gaps", "--html", "missing/a.html"],
        "argument --html: 'missing/a.html' is in a folder that does not",
    ),
    "a folder": (["gaps", "--json", "."], "argument --json: '.' is a folder"),
    "both": (["--html", "a.html", "--no-html"], "argument --no-html: not allowed with argument --html"),
    "one after the other": (["--no-html", "gaps", "--html", "a.html"], "not allowed with argument --no-html"),
}


@pytest.mark.parametrize("arguments, text", USAGE.values(), ids=USAGE)
def test_usage_errors(arguments, text, call, tmp_path):
    code, out, err = call(*arguments)
    assert code == 2 and not out
    assert text in err
    assert not list(tmp_path.iterdir())


def test_faults_of_an_experiment_are_not_usage_errors(call, monkeypatch):
    def fault(**options):
        raise ValueError("something else")

    monkeypatch.setattr(_variance, "check_sizes", fault)
    with pytest.raises(ValueError, match="something else"):
        call("variance", "--seeds", "3")


def test_help_lists_the_experiments(call):
    _, out, _ = call("--help")
    for experiment in lab.EXPERIMENTS:
        assert re.search(rf"^ +{experiment.name}\s+\S", out, re.MULTILINE)
    _, out, _ = call("variance", "--help")
    assert "--dims N,..." in out and "default 1,4,16,64,256,1024,4096" in out


def test_as_a_process(tmp_path):
    """The folder is kept free of pages, and stdout of progress; a terminal without √ is no error."""
    run = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "sdpa", "lab", "gaps", "--points", "5"],
        capture_output=True,
        env={"PYTHONPATH": str(command_line.__file__).rsplit("/sdpa/", 1)[0], "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert b"ln(N ? 1)" in run.stdout and b"1 of 1" not in run.stdout


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = terminal.Progress(3)
    progress.begin("first")
    progress.end(0.1)
    progress.begin("second")
    assert list(progress([10, 20])) == [10, 20]
    err = capsys.readouterr().err
    assert "1 of 3 first" in err and f"2 of 3 second       {'█' * 10}{'░' * 10}" in err and f"{'█' * 20} " in err
    progress.end(0.2)
    assert capsys.readouterr().err == "\r\033[K"


def test_tables_fit_the_terminal(monkeypatch):
    for columns, widest in (("40", 60), ("100", 100), ("500", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = terminal.table(("name", "text"), [("a", "word " * 80), ("b", "short")]).splitlines()
        assert max(map(len, lines)) <= widest and sum("word" in line for line in lines) > 2
    assert terminal.plain("<p>d<sub>k</sub>&lt;2<sup>3</sup>\n x</p>") == "d_k<2^3 x"


def test_json_has_no_numbers_that_are_not():
    given = {"a": np.array([1.5, np.inf, np.nan], np.float32), "b": (-np.inf, np.int64(3), "text", None, True)}
    assert _command._plain(given) == {"a": [1.5, "inf", "nan"], "b": ["-inf", 3, "text", None, True]}


def test_json_has_no_digits_that_float32_has_not():
    given = np.random.default_rng(0).standard_normal((100, 10), np.float32)
    plain = _command._plain(given)
    np.testing.assert_array_equal(np.array(plain, np.float32), given)
    assert _command._plain(np.float32(0.1)) == 0.1 and len(json.dumps(plain)) < 14 * given.size


def test_readers_of_options():
    assert _command._reader((0.5,))[0]("1,2.5") == (1.0, 2.5)
    assert _command._reader((1, 2.5))[0]("1.5") == (1.5,)
    assert _command._reader((1, 2))[0]("3") == (3,)
    with pytest.raises(argparse.ArgumentTypeError, match="'' is not a whole number"):
        _command._reader((1,))[0]("3,")
