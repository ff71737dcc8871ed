"""`python -m sdpa`, as a user calls it."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support.processes import ROOT, run_python

import sdpa
from sdpa._commands import bench
from sdpa._commands import demo as _demo


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "sdpa", *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )


def table(shown):
    """The demo's rows by name: milliseconds of NumPy and sdpa, ratio, difference, kernel, threads."""
    pattern = re.compile(r"(\S.*?)  +\d+ x .*?  +(\S+) ms +(\S+) ms +(\S+) x +(\S+) +(\w+) +(\d+)$")
    rows = [match.groups() for match in map(pattern.match, shown.splitlines()) if match]
    return {name: (*map(float, numbers), used, int(count)) for name, *numbers, used, count in rows}


@pytest.fixture(scope="module")
def demo():
    run = command("demo", SDPA_KERNEL=sdpa.kernels()[0], SDPA_NUM_THREADS="2")
    assert run.returncode == 0, run.stderr
    return table(run.stdout)


def test_sources_that_were_not_built_say_so(tmp_path):
    """As in a clone after `pip install .`, which builds a copy elsewhere."""
    built = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(ROOT / "sdpa", tmp_path / "sdpa", ignore=built)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-m", "sdpa", "info"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode and not run.stdout
    said = f"ImportError: {tmp_path.resolve()} holds the sources of sdpa, not built for this Python: "
    assert f"{said}run `pip install -e .` there, or start Python in another folder" in run.stderr


@pytest.mark.parametrize(
    "adapter, package", [("torch", "torch"), ("huggingface", "torch"), ("huggingface", "transformers")]
)
def test_adapters_name_what_they_need(adapter, package):
    """Stand-ins take the place of what else they import."""
    code = f"""
        import sys
        sys.path.insert(0, "docs")
        from extensions import adapters
        sys.meta_path.insert(0, adapters.Finder())
        sys.modules[{package!r}] = None
        try:
            import sdpa.{adapter}
        except ModuleNotFoundError as error:
            print(error.name, error)
    """
    said = run_python(textwrap.dedent(code).replace('"docs"', repr(str(ROOT / "docs"))))
    assert said == f"{package} sdpa.{adapter} needs {package}: pip install {package}"


def test_info_shows_build_info():
    run = command("info")
    assert run.returncode == 0, run.stderr
    lines = dict(line.split(maxsplit=1) for line in run.stdout.replace("usable cpus", "usable_cpus").splitlines())
    assert lines.keys() == sdpa.build_info().keys()
    assert lines["kernels"].split(", ") == sdpa.kernels()
    assert lines["version"] == sdpa.__version__


def test_demo_has_a_row_for_each_call(demo):
    assert list(demo) == list(_demo.CALLS)


def test_demo_finds_the_numbers_of_numpy(demo):
    for name, (_, _, _, difference, _, _) in demo.items():
        assert difference < (1e-12 if "float64" in name else 1e-5)


def test_demo_ratio_is_that_of_its_times(demo):
    for numpys, ours, ratio, *_ in demo.values():
        assert ours > 0
        assert ratio == pytest.approx(numpys / ours, abs=0.06, rel=0.02 + 0.006 / ours)


def test_demo_names_the_kernel_and_the_threads_in_use(demo):
    assert {(kernel, threads) for *_, kernel, threads in demo.values()} == {(sdpa.kernels()[0], 2)}
    in_short = "from sdpa._commands import demo; demo.SECONDS = 0; demo.demo()"
    forced = table(run_python(in_short, SDPA_KERNEL="baseline", SDPA_NUM_THREADS="1"))
    assert {(kernel, threads) for *_, kernel, threads in forced.values()} == {("baseline", 1)}
    # Other arithmetic rounds otherwise, and takes longer: the numbers come from this run.
    assert [row[3] for row in forced.values()] != [row[3] for row in demo.values()] or sdpa.kernels() == ["baseline"]


def test_demo_shows_what_it_measured(monkeypatch, capsys):
    monkeypatch.setattr(_demo, "CALLS", {"one": ((1, 1, 1, 4, 4, 8), np.float32, {})})
    times = iter([0.002, 0.050])
    monkeypatch.setattr(_demo, "best_time", lambda call: next(times))
    monkeypatch.setattr(_demo, "plain_attention", lambda query, key, value: sdpa.attention(query, key, value) + 0.25)
    _demo.demo()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("one"))
    assert re.findall(r"50\.00 ms +2\.00 ms +25\.0 x +2\.5e-01", line)


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("demo", "--fast"), ("info", "more")])
def test_usage_errors(arguments):
    run = command(*arguments)
    assert run.returncode == 2
    assert not run.stdout
    assert "usage: python -m sdpa" in run.stderr
    assert "Traceback" not in run.stderr


def test_help():
    run = command("--help")
    assert run.returncode == 0
    assert all(name in run.stdout for name in ("info", "demo", "embed", "generate", "lab", "bench"))


def test_bench_has_the_options_of_the_benchmarks():
    run = command("bench", "--help")
    assert run.returncode == 0, run.stderr
    assert "usage: python -m sdpa bench" in run.stdout
    for option in ("--peers", "--only", "--dtypes", "--seconds", "--sweeps", "--json", "--html"):
        assert option in run.stdout


def test_bench_names_what_is_wrong():
    run = command("bench", "--peers", "nobody")
    assert run.returncode == 2
    assert "python -m sdpa bench: error: argument --peers: 'nobody' is neither a peer nor a library" in run.stderr


def test_bench_needs_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    with pytest.raises(SystemExit, match=r"needs the folder benchmarks/.*\nClone the repository"):
        bench.bench([])


def test_bench_needs_what_the_benchmarks_import(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'ml_dtypes'", name="ml_dtypes")

    monkeypatch.setattr(bench.importlib, "import_module", missing)
    with pytest.raises(SystemExit, match="need ml_dtypes: pip install"):
        bench.bench([])
