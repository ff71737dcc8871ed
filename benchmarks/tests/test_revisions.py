"""The comparison of two revisions: its statistics on numbers with known answers, building, and a run on this tree."""

import json
import math
import subprocess

import numpy as np
import pytest

from benchmarks.measure import runner
from benchmarks.revisions import __main__ as revisions
from benchmarks.revisions import bits, building, paired
from benchmarks.workloads import WORKLOADS, select

# How sure a ratio is.


def test_intervals_cover_what_coin_tosses_say():
    assert [paired.rank_of(count) for count in (2, 5, 6, 8, 9, 12)] == [0, 0, 1, 1, 2, 3]
    assert paired.covered(6, 1) == 1 - 2 / 64
    assert paired.covered(9, 2) == 1 - 2 * (1 + 9) / 512
    assert paired.rank_of(paired.FEWEST) == 1 and paired.rank_of(paired.FEWEST - 1) == 0


def test_an_interval_is_between_samples():
    assert paired.ratio_of([0.3, 0.9, 0.1, 0.5, 0.7, 0.2, 0.6, 0.8, 0.4]) == pytest.approx((0.5, 0.2, 0.8))


def test_few_samples_leave_the_interval_open():
    assert paired.ratio_of([0.5] * 5) == pytest.approx((0.5, 0.0, math.inf))


def test_one_spoiled_sample_does_not_count():
    assert paired.ratio_of([0.9] * 8 + [50.0]) == pytest.approx((0.9, 0.9, 0.9))


def test_the_median_of_a_skewed_distribution_is_inside_as_often_as_said():
    """A process with bad luck is slower by more than one with good luck is faster."""
    draws = np.exp(np.random.default_rng(7).exponential(size=(4000, 9)))
    inside = [low <= 2.0 <= high for _, low, high in map(paired.ratio_of, draws)]  # exp of the median, log 2
    assert np.mean(inside) == pytest.approx(paired.covered(9, 2), abs=0.01)


@pytest.mark.parametrize(
    ("ratio", "control", "expected"),
    [
        ((0.90, 0.88, 0.92), (1.00, 0.98, 1.02), True),
        ((1.10, 1.05, 1.20), (1.00, 0.98, 1.02), True),
        ((0.99, 0.97, 1.01), (1.00, 0.999, 1.001), False),  # 1 is inside
        ((0.97, 0.96, 0.98), (1.00, 0.99, 1.04), False),  # the control went up as far as this went down
        ((1.03, 1.02, 1.04), (0.98, 0.95, 1.01), False),
        ((0.50, 0.00, math.inf), (1.00, 1.00, 1.00), False),  # an open interval claims nothing
    ],
)
def test_a_difference_is_outside_noise(ratio, control, expected):
    assert paired.differs(paired.Ratio(*ratio), paired.Ratio(*control)) is expected


def row(name, base, again, new, **more):
    minima = {revisions.BASE: base, revisions.AGAIN: again, revisions.NEW: new}
    return revisions.Row(WORKLOADS[name], minima, **more)


NOISE = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]
TWO = row("tiny-fp32", [1.0] * 6, NOISE, [2.0] * 6)
HALF = row("bert-fp32", [1.0] * 6, NOISE, [0.5] * 6)
SAME = row("clip-77-fp32", [1.0] * 6, NOISE, NOISE)


def test_ratios_are_of_the_same_start():
    """Where the machine is half as fast from the fourth start on, nothing is seen of it."""
    pace = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    paced = row("tiny-fp32", pace, pace, [0.9 * p for p in pace])
    assert paced.ratios == pytest.approx([0.9] * 6) and paced.controls == [1.0] * 6


@pytest.mark.parametrize(("measured", "expected"), [(TWO, "slower"), (HALF, "faster"), (SAME, "")])
def test_the_table_says_what_changed(measured, expected):
    header, cells, total = revisions.table([measured])
    assert len(header) == len(cells) == len(total)
    assert cells[0] == measured.workload.name and cells[-1] == total[-1] == expected


def test_the_last_row_is_the_geometric_mean():
    *_, total = revisions.table([TWO, HALF, SAME])
    assert float(total[3]) == pytest.approx(1.0, abs=0.01) and total[-1] == ""


def test_what_only_one_revision_has_is_told():
    missing = row("layer-1024-fp32", [], [], [], trouble="not in BASE: AttributeError")
    both = {role: building.Revision("v1", runner.ROOT) for role in revisions.ROLES}
    measured = revisions.as_json(both, [TWO, missing], starts=6)
    assert json.loads(json.dumps(measured))["verdicts"] == {"tiny-fp32": "slower"}
    for form in (revisions.text, revisions.markdown):
        assert "layer-1024-fp32 not in BASE: AttributeError" in form(measured, [TWO, missing])


def test_all_orders_take_turns():
    used = [order for start in range(3) for order in list(next_orders(start))]
    assert sorted(used) == sorted(revisions.ORDERS)


def next_orders(start):
    for order, _ in zip(revisions.orders_from(start), range(revisions.ROUNDS)):
        yield order


def test_the_typical_workloads_exist():
    names = revisions.TYPICAL.split(",")
    assert set(names) <= set(WORKLOADS) and len(select(revisions.TYPICAL)) == len(names)


# Runs, of this tree against itself.


def quiet(_):
    pass


def test_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(building, "revision", lambda name, progress: building.Revision(str(name), runner.ROOT))
    files = tmp_path / "change.json", tmp_path / "change.md"
    options = ["--only", "tiny-fp32", "--starts", "6", "--seconds", "0.1"]
    monkeypatch.setattr("sys.argv", ["revisions", "v1", *options, "--json", str(files[0]), "--markdown", str(files[1])])
    revisions.main()
    [measured] = json.loads(files[0].read_text())["rows"]
    assert all(len(found) == 6 and min(found) > 0 for found in measured["minima"].values())
    assert "| tiny-fp32 |" in files[1].read_text()
    assert "HEAD None against BASE v1" in capsys.readouterr().out


def test_too_few_starts_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["revisions", "v1", "--starts", "5"])
    with pytest.raises(SystemExit):
        revisions.main()
    assert "at least 6" in capsys.readouterr().err


def test_a_base_without_a_function_is_no_error(tmp_path):
    """The package found first has `attention` alone, and takes its parts from the real one."""
    (tmp_path / "sdpa").mkdir()
    source = f"__path__.append({str(runner.ROOT / 'sdpa')!r})\nfrom ._attention.forward import attention\n"
    (tmp_path / "sdpa" / "__init__.py").write_text(source)
    folders = {revisions.BASE: tmp_path, revisions.AGAIN: tmp_path, revisions.NEW: runner.ROOT}
    chosen = [WORKLOADS["tiny-fp32"], WORKLOADS["layer-b8-128-fp32"]]
    tiny, layer = revisions.measure(folders, chosen, 1, 0.01, quiet)
    assert tiny.done and [len(found) for found in tiny.minima.values()] == [1, 1, 1]
    assert not layer.done and layer.trouble.startswith("not in BASE: AttributeError")


def test_another_library_than_the_one_in_the_folder_is_not_measured(tmp_path):
    folders = dict.fromkeys(revisions.ROLES, tmp_path)
    with pytest.raises(SystemExit, match="cannot be measured"):
        revisions.measure(folders, [WORKLOADS["tiny-fp32"]], 1, 0.01, quiet)


def test_a_wrong_result_is_told():
    assert revisions.trouble_of(revisions.NEW, {"error": 1e-6, "allowed": 1e-5}) == ""
    for error in (1e-3, math.nan):
        assert "WRONG in HEAD" in revisions.trouble_of(revisions.NEW, {"error": error, "allowed": 1e-5})


# Building.

SETUP = """
from pathlib import Path
Path("build").mkdir()
Path("sdpa/built").write_text(Path("sdpa/source").read_text())
"""


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """A repository that is built by copying a file."""
    root = tmp_path / "repository"
    (root / "sdpa").mkdir(parents=True)
    (root / "benchmarks").mkdir()
    for name, content in {"setup.py": SETUP, "sdpa/source": "one", "README": "", "benchmarks/this": ""}.items():
        (root / name).write_text(content)
    (root / ".gitignore").write_text("build/\n")
    monkeypatch.setattr(building, "ROOT", root)
    monkeypatch.setattr(building, "BUILT", root / "build" / "revisions")
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message=one"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def test_a_revision_is_built_once(repository):
    told = []
    first, second = (building.revision("HEAD", told.append) for _ in range(2))
    assert first == second and told == [f"building {first.name}"]
    assert (first.folder / "sdpa" / "built").read_text() == "one"
    assert not (first.folder / "benchmarks").exists()
    assert [path.name for path in building.BUILT.iterdir()] == [first.folder.name]


def test_the_working_tree_is_built_as_it_is(repository):
    base = building.revision("HEAD", quiet)
    (repository / "README").write_text("not compiled")
    assert building.revision(None, quiet) == building.Revision(f"{base.name}-dirty", base.folder)
    (repository / "sdpa" / "source").write_text("two")
    (repository / "sdpa" / "untracked").write_text("")
    new = building.revision(None, quiet)
    assert (new.folder / "sdpa" / "built").read_text() == "two" and (new.folder / "sdpa" / "untracked").exists()
    status = subprocess.run(["git", "diff", "--cached", "--quiet"], cwd=repository, check=False)
    assert status.returncode == 0  # nothing was added to the index


def test_other_flags_are_another_build(repository, monkeypatch):
    base = building.revision("HEAD", quiet)
    monkeypatch.setenv("CFLAGS", "-O1")
    assert building.revision("HEAD", quiet).folder != base.folder


def test_what_cannot_be_built_leaves_nothing(repository):
    (repository / "setup.py").write_text("raise SystemExit('no compiler')")
    with pytest.raises(SystemExit, match="no compiler"):
        building.revision(None, quiet)
    assert list(building.BUILT.iterdir()) == []


def test_an_unknown_revision_is_told(repository):
    with pytest.raises(SystemExit, match="nowhere"):
        building.revision("nowhere", quiet)


# Bits.


def test_a_revision_gives_the_bits_that_it_gave():
    said = []
    assert bits.compare([runner.ROOT, runner.ROOT], ["baseline"], len(bits.MAKERS), 0, said.append)
    assert said == [f"baseline: {len(said_of(0))} results, 0 differ"]


def test_other_numbers_give_other_bits():
    ours, others = said_of(0), said_of(1)
    assert {name for name, _ in ours} == {name for name, _ in others}
    assert not set(ours.values()) & set(others.values()) - {"None"}
    assert bits.differences(ours, {**ours, next(iter(ours)): "another"}) == [next(iter(ours))]


def said_of(seed):
    return bits.digests_of(runner.ROOT, "baseline", len(bits.MAKERS), seed)


def test_nan_is_nan_whatever_its_bits():
    one, other = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert bits.digest(np.array([one, 1])) == bits.digest(np.array([other, 1]))
    assert bits.digest(np.float32([0, 1])) != bits.digest(np.float32([-0.0, 1]))
