"""Tables, targets, charts and documents, from a made-up result file whose numbers are known."""

import itertools
import json
import os
import re
import xml.etree.ElementTree

import pytest

from benchmarks import compare, targets
from benchmarks.measure import libraries, runner
from benchmarks.report import chart, figures, page, publish, report, rows, tables
from benchmarks.studies import sweeps
from benchmarks.tests.test_workloads import ZEN4
from benchmarks.workloads import KEEP_BYTES, NAMED, SWEEPS, WORKLOADS, batches, select

# Milliseconds: the bound, then those of implementations; a wrong result is negative.
TIMES = {
    "bert-fp32": {"bound": 0.8, "sdpa": 1, "torch": 4, "torch_math": 2, "ncnn": 3},
    "vit-197-fp32": {"bound": 1.8, "sdpa": 2, "torch": 4, "ncnn": 1, "ort_attn": -1.5},
    "clip-77-bf16": {"bound": 1, "sdpa": 2, "torch": 16},
    "decode-32k-fp32": {"bound": 2, "sdpa": 4, "read": 2, "ncnn": 6},
}


def result(workload, implementation, milliseconds):
    error = 1.0 if milliseconds > 0 else 3.0
    seconds = abs(milliseconds) * 1e-3
    return {
        "workload": workload, "implementation": implementation, "error": error, "allowed": 2.0, "unsupported": "",
        "disturbed": 1, "minimum": seconds, "median": 1.5 * seconds, "samples": 7,
    }  # fmt: skip


def line(size, workload, **milliseconds):
    seconds = {name: time * 1e-3 for name, time in milliseconds.items()}
    bound = seconds.pop("bound")
    return {"size": size, "workload": workload, "flops": 1e9, "bound": bound, "times": seconds}


@pytest.fixture
def measured():
    return {
        "date": "2001-02-03", "commit": "abc1234", "compiler": "cc 1.2", "kernel": "default", "load": 0.25,
        "versions": {"python": "3.99", "torch": "9.8"}, "machine": ZEN4.describe(),
        "bounds": {name: times["bound"] * 1e-3 for name, times in TIMES.items()},
        "read_bytes": {"decode-32k-fp32": 10**8},
        "results": [
            result(workload, name, time) for workload, times in TIMES.items() for name, time in times.items()
            if name != "bound"
        ],
        "sweeps": {
            "about": {},
            "families": {
                "length": [
                    line(n, f"length-{n}", bound=n, sdpa=2 * n, torch=3 * n, torch_math=5 * n) for n in (1, 2, 4)
                ],
                "head-size": [line(n, f"head-size-{n}", bound=1, sdpa=2, ncnn=3) for n in (16, 32)],
                "threads": [line(n, "prefill-2048-causal-fp32", bound=2 / n, sdpa=3 / n, torch=4) for n in (1, 2)],
                "context": [line(n, f"context-{n}", bound=n, read=n, sdpa=2 * n) for n in (128, 512)],
                "memory": {"sdpa": {"64": 0, "1024": 2e6}, "torch": {"64": 3e6, "1024": None}},
            },
        },
    }  # fmt: skip


def cells(table, row):
    """{header: cell} of the row that begins so."""
    return dict(zip(table.header, next(one for one in table.rows if one[0] == row), strict=True))


# Tables.


def test_a_library_counts_with_its_best_right_implementation(measured):
    shown = cells(report.times(measured), "bert-fp32")
    assert shown == {
        "workload": "bert-fp32", "bound": "0.8", "sdpa": "1", "ncnn": "3", "PyTorch": "2", "of the bound": "0.80",
        "over the best peer": "2.00",
    }  # fmt: skip
    assert "ONNX Runtime" not in report.times(measured).header  # which was wrong


def test_the_best_of_a_row_is_marked(measured):
    table = report.times(measured)
    marked = {table.rows[i][0]: table.header[j] for i, j in table.best}
    assert marked == {"bert-fp32": "sdpa", "vit-197-fp32": "ncnn", "clip-77-bf16": "sdpa", "decode-32k-fp32": "sdpa"}
    assert re.search(r"^vit-197-fp32 +1\.8 +2 +1\* +4 +0\.90 +0\.50$", report.as_text(table), re.MULTILINE)
    assert "| vit-197-fp32 | 1.8 | 2 | **1** | 4 |" in report.as_markdown(table)


def test_a_wrong_result_of_ours_is_told_and_never_the_best(measured):
    wrong = next(one for one in measured["results"] if one["implementation"] == "sdpa")
    wrong["error"] = float("nan")
    table = report.times(measured)
    assert cells(table, "bert-fp32")["sdpa"] == "1 WRONG"
    assert (0, table.header.index("PyTorch")) in table.best
    assert "sdpa on bert-fp32: nan WRONG" in report.text(measured)


def test_geometric_means(measured):
    means = cells(report.times(measured), "geometric mean")
    assert means["of the bound"] == "0.65"  # (0.8 · 0.9 · 0.5 · 0.5) ^ 1/4
    assert means["over the best peer"] == "1.86"  # (2 · 0.5 · 8 · 1.5) ^ 1/4
    assert means["ncnn"] == "1.31 ×"  # (3 · 0.5 · 1.5) ^ 1/3
    torch = cells(report.means(measured), "PyTorch")
    assert torch == {
        "library": "PyTorch", "geometric mean": "3.17 ×", "least": "2.00 × (bert-fp32)", "ahead on": "3 of 3",
        "most": "8.00 × (clip-77-bf16)",
    }  # fmt: skip
    assert rows.geometric_mean([2, 8, float("nan")]) == pytest.approx(4)
    assert cells(report.means(measured), "ncnn")["ahead on"] == "2 of 3"


def test_details_hold_every_result(measured):
    shown = cells(report.details(measured), "vit-197-fp32")
    assert shown["the others"] == "ort_attn 1.5 (error 3e+00), torch 4" and shown["best peer"] == "ncnn"
    assert cells(report.details(measured), "decode-32k-fp32")["GB/s"] == "25 of 50"


def test_errors_stand_next_to_times(measured):
    table = report.errors(measured)
    assert cells(table, "vit-197-fp32") == {
        "workload": "vit-197-fp32", "sdpa": "1.0e+00", "ncnn": "1.0e+00", "ONNX Runtime": "3.0e+00 WRONG",
        "PyTorch": "1.0e+00",
    }  # fmt: skip
    assert report.as_text(table) in report.text(measured)
    assert report.as_markdown(table) in report.markdown(measured)


def test_what_peers_could_not_do_is_told(measured):
    nothing = {"workload": "bert-fp32", "implementation": "jax", "unsupported": "ModuleNotFoundError: no jax"}
    crashed = {"workload": "bert-fp32", "implementation": "ncnn", "unsupported": f"{rows.ENDED} with status -11"}
    once = {"workload": "bert-fp32", "implementation": "torch", "unsupported": "Unsupported: a mask"}
    for one in (nothing, {**nothing, "implementation": "mlx"}, crashed, once):
        measured["results"].append({**one, "error": float("nan"), "allowed": float("nan"), "disturbed": 0})
    told = [
        "ort_attn is wrong, and does not count, on vit-197-fp32 (error 3.0e+00 of 2.0e+00)",
        "ncnn failed on bert-fp32 (its process ended with status -11)",
        "not measured: jax, mlx (ModuleNotFoundError: no jax)",
    ]
    assert report.left_out(measured) == told
    assert report.text(measured).endswith("\n".join(told)) and f"* {told[0]}\n" in report.markdown(measured)


def test_a_table_too_wide_for_the_terminal_goes_on_below(monkeypatch):
    cells = [
        ("name", "of the bound", "x", "over the best peer"),
        ("first", "1", "2", "3"),
        ("second", "0.25", "3", "4"),
    ]
    expected = """
        of the      over the
name     bound  x  best peer
first        1  2          3
second    0.25  3          4"""
    assert tables.text(cells, width=28) == expected[1:]
    narrow = """
        of the
name     bound  x
first        1  2
second    0.25  3

         over the
name    best peer
first           3
second          4"""
    assert tables.text(cells, width=27) == narrow[1:]
    monkeypatch.setenv("COLUMNS", "27")
    assert tables.text(cells) == narrow[1:]
    assert tables.text([("", "only the header")], width=5) == "  only the\n    header"


def test_files_are_joined(measured, tmp_path):
    later = {**measured, "bounds": {"bert-fp32": 5e-4}, "results": [result("bert-fp32", "sdpa", 0.5)], "commit": "def"}
    later.pop("sweeps")
    for name, content in ("a.json", measured), ("b.json", later):
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    both = rows.read([tmp_path / "a.json", tmp_path / "b.json"])
    first, *others = rows.rows_of(both)
    assert (first.name, first.share, first.best) == ("bert-fp32", 1.0, None)
    assert both["commit"] == "def (bert), abc1234 (the rest)"
    assert len(others) == 3 and both["sweeps"] == measured["sweeps"]
    last = {**later, "bounds": {"vit-197-fp32": 5e-4}, "results": [], "commit": "0123"}
    assert rows.joined([both, last])["commit"] == "0123 (vit), def (bert), abc1234 (the rest)"


def test_what_was_measured_on_nothing_of_ours(measured):
    measured["results"] = [one for one in measured["results"] if one["implementation"] != "sdpa"]
    assert "bert-fp32" in report.text(measured) and not report.aims(measured).rows
    assert "<svg" not in page.page({**measured, "sweeps": {}})


# Targets.


def test_targets_are_hit_or_missed(measured):
    verdicts = {one.row.name: one for one in targets.verdicts(rows.rows_of(measured))}
    missed = {name: (one.share_missed, one.lead_missed) for name, one in verdicts.items()}
    assert missed == {
        "bert-fp32": (True, False), "vit-197-fp32": (False, True), "clip-77-bf16": (False, False),
        "decode-32k-fp32": (True, False),
    }  # fmt: skip
    assert cells(report.aims(measured), "clip-77-bf16")[""] == "hit"
    assert cells(report.aims(measured), "vit-197-fp32")[""] == "missed"
    losses = report.losses(measured)
    assert [row[0] for row in losses.rows] == ["bert-fp32", "vit-197-fp32", "decode-32k-fp32"]
    assert losses.rows[1][1:8] == ("0.90", "0.88", "0.50 ×", "1.12 ×", "", "", "ncnn")
    assert losses.rows[1][-1] == targets.reason_of("vit-197-fp32") and "13 vectors" in losses.rows[1][-1]


def test_targets_are_judged_as_they_are_shown():
    row = rows.Row("bert-fp32", 0.8751, {"minimum": 1.0}, None, [])
    [verdict] = targets.verdicts([row])
    assert verdict.target.share == 0.88 and verdict.hit
    assert not targets.verdicts([row._replace(bound=0.8749)])[0].hit


def times_of(**milliseconds):
    """Rows of what took so long."""
    names = {name.replace("_", "-"): time for name, time in milliseconds.items()}
    return [rows.Row(name, 1e-6, {"minimum": time * 1e-3}, None, []) for name, time in names.items()]


def test_targets_in_microseconds():
    short, long = (targets.verdicts(times_of(tiny_fp32=time))[0] for time in (0.0019, 0.0021))
    assert short.hit and long.time_missed and not long.hit
    assert report.other_target(long) == ("2.1 µs", "2 µs")


def test_targets_beside_float32():
    _, near = targets.verdicts(times_of(odd_1000_full_fp32=1.0, odd_1000_full_fp16=1.05))
    _, far = targets.verdicts(times_of(odd_1000_full_fp32=1.0, odd_1000_full_fp16=1.06))
    assert near.hit and far.of_float32_missed and not far.hit
    assert report.other_target(far) == ("1.06 of float32", "1.05")
    [alone] = targets.verdicts(times_of(odd_1000_full_fp16=1.0))
    assert alone.hit  # there is nothing to compare with


@pytest.mark.parametrize("patterns", [targets.TARGETS, targets.REASONS], ids=["targets", "reasons"])
def test_each_entry_is_the_one_of_some_workload(patterns):
    """None stands behind another that takes all of its workloads."""
    found = {targets.target_of(name).workloads for name in WORKLOADS}
    if patterns is targets.REASONS:
        found = {targets.reason_of(name) for name in WORKLOADS}
    assert {entry[-1] if patterns is targets.REASONS else entry.workloads for entry in patterns} <= found


def test_files_are_shown_again(measured, tmp_path, capsys):
    """Without measuring."""
    pytest.importorskip("matplotlib")
    (tmp_path / "a.json").write_text(json.dumps(measured), encoding="utf-8")
    files = {name: tmp_path / f"a.{name}" for name in ("html", "markdown")}
    compare.main(["--from", str(tmp_path / "a.json"), *(f"--{name}={file}" for name, file in files.items())])
    assert capsys.readouterr().out == f"{report.text(measured)}\n"
    assert files["html"].read_text(encoding="utf-8") == page.page(measured)
    assert files["markdown"].read_text(encoding="utf-8") == report.markdown(measured)


# Peers by name.


def test_libraries_of_peers():
    assert libraries.library_of("ort_mha@2") == "onnxruntime" and libraries.title_of("ov_fold") == "OpenVINO"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--peers", "torch,pytorch"], "argument --peers: 'pytorch' is neither a peer nor a library; there are: numpy"),
        (["--dtypes", "fp32,int8"], "argument --dtypes: 'int8' is not one of fp32, fp64, bf16, fp16"),
        (["--kernel", "avx9"], "argument --kernel: no kernel named 'avx9' on this CPU; there are: "),
        (["--rounds", "0"], "argument --rounds: 0 is less than 1"),
        (["--rounds", "few"], "argument --rounds: invalid count value: 'few'"),
        (["--seconds", "-1"], "argument --seconds: -1 is no duration"),
        (["--html", "missing/a.html"], "argument --html: 'missing/a.html' is in a folder that does not exist"),
    ],
)
def test_usage_errors(options, message, capsys):
    with pytest.raises(SystemExit) as end:
        compare.main(options, prog="python -m sdpa bench")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"python -m sdpa bench: error: {message}" in error


def test_the_kernel_of_the_environment_is_told(monkeypatch):
    monkeypatch.setenv("SDPA_KERNEL", "baseline")
    assert compare.parse_arguments([], "bench").kernel == "baseline"
    monkeypatch.delenv("SDPA_KERNEL")
    assert compare.parse_arguments([], "bench").kernel is None


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "a.json cannot be read: .*No such file"),
        ("{nonsense", "a.json cannot be read: Expecting"),
        ("[]", "a.json is no result file"),
        ('{"sweeps": {"families": {}}}', "no file of .*a.json is of benchmarks.compare"),
    ],
)
def test_files_that_hold_no_results(content, message, tmp_path):
    if content is not None:
        (tmp_path / "a.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        compare.main(["--from", str(tmp_path / "a.json")])


def test_what_is_not_there_is_unknown():
    assert compare.first_line("no-such-command", "--version") == "unknown"


def test_workloads_of_some_dtypes():
    assert [one.name for one in select("tiny,bwd-bert", ["bf16"])] == ["tiny-bf16", "bwd-bert-bf16"]
    with pytest.raises(SystemExit, match="no workload matches 'tiny' in fp64"):
        select("tiny", ["fp64"])


def test_batches_fit_in_a_worker():
    every = list(WORKLOADS.values())
    lists = batches(every)
    assert [workload for batch in lists for workload in batch] == every and len(lists) > 2
    assert all(len(batch) == 1 or sum(workload.bytes for workload in batch) <= KEEP_BYTES for batch in lists)
    for batch, after in itertools.pairwise(lists):  # each ends where one more would have been too much
        assert sum(workload.bytes for workload in [*batch, after[0]]) > KEEP_BYTES
    assert [len(batch) for batch in batches(every[:3], limit=1)] == [1, 1, 1]


# Charts, the page and the documents.

CHARTS = [
    "bound-fp32", "bound-bf16", "lead-fp32", "lead-bf16", "length", "length-in-rate", "threads", "head-size", "context",
    "memory",
]  # fmt: skip


def test_a_chart_for_all_that_was_measured(measured):
    assert list(publish.figures_of(measured)) == CHARTS
    del measured["sweeps"]["families"]["memory"]
    assert list(publish.figures_of(measured)) == CHARTS[:-1]
    del measured["sweeps"]
    assert list(publish.figures_of(measured)) == CHARTS[:4]


def drawn_lines(figure, measured):
    [axes] = figure.draw(measured).axes
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_charts_show_the_numbers(measured):
    pytest.importorskip("matplotlib")
    lines = figures.lines(measured)
    length = drawn_lines(lines["length"], measured)
    assert list(length) == ["bound", "sdpa", "PyTorch"]
    assert dict(length["PyTorch"]) == pytest.approx({1: 3, 2: 6, 4: 12})
    assert dict(drawn_lines(lines["threads"], measured)["sdpa"]) == pytest.approx({1: 1000 / 3, 2: 2000 / 3})
    context = drawn_lines(lines["context"], measured)
    assert list(context) == ["bound", "sdpa"] and context["sdpa"][0] == pytest.approx((128, 1 / 0.256))
    assert drawn_lines(lines["memory"], measured) == {"sdpa": [(64, 0.01), (1024, 2)], "PyTorch": [(64, 3)]}
    [axes] = figures.shares(measured)["bound-fp32"].draw(measured).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.8, 0.9, 0.5])


def test_the_page_holds_all_tables_and_figures(measured):
    pytest.importorskip("matplotlib")
    text = page.page(measured)
    assert re.findall(r'<svg role="img" aria-label="([^"]*)"', text) == [
        figure.caption for figure in publish.figures_of(measured).values()
    ]
    assert "<td><strong>1</strong></td>" in text and "1.86 × as fast" in text and "0.65 of the bound" in text
    assert "ahead on 3 of 4 workloads" in text and targets.reason_of("vit-197-fp32") in text
    for fact in (
        "abc1234",
        "cc 1.2",
        "2001-02-03",
        "torch 9.8",
        "0.25 in the minute before",
        "Zen 4: avx512, 2 threads",
    ):
        assert fact in text
    assert not re.search(r"https?:|<script|<link|@import|\ssrc=|url\((?!#)", text)


def test_the_page_without_matplotlib(measured, monkeypatch):
    monkeypatch.setattr(page.drawing, "available", lambda: False)
    text = page.page(measured)
    assert "<svg" not in text and "pip install" in text and "1.86 × as fast" in text


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A folder with the documents that numbers are put into."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).write_text(f"before\n{chart.BEGIN}\nold\n{chart.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    return tmp_path


def test_what_is_published(measured, published):
    pytest.importorskip("matplotlib")
    documents = publish.documents(measured)
    expected = ["README.md", "docs/speed.svg", "docs/speed.json", "docs/sweeps.json"]
    expected += [*(f"docs/charts/{name}.svg" for name in CHARTS), "docs/speed.html"]
    assert list(documents) == [*expected, "benchmarks/results.md", "benchmarks/README.md"]
    row = "| 8 | 12 | 128 | 128 | 64 | full | float32 | 1 ms | PyTorch 2 ms | 2.00 × | 0.80 |"
    assert row in documents["README.md"]
    losses = documents["benchmarks/README.md"]
    assert losses.startswith("before\n") and losses.endswith("after\n") and "old" not in losses
    assert report.as_markdown(report.times(measured)) in losses
    assert "| vit-197-fp32 | 0.90 | 0.88 | 0.50 × | 1.12 × |  |  | ncnn | 197 rows are" in losses
    assert all(f"(../docs/charts/{name}.svg)" in losses for name in CHARTS)
    assert report.as_markdown(report.errors(measured)) in documents["benchmarks/results.md"]
    assert "* load 0.25 before, 13 slices disturbed" in documents["benchmarks/results.md"]
    for path, text in documents.items():
        if path.endswith(".svg"):
            assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    # What is stored gives the same documents again.
    stored = [json.loads(documents[name]) for name in ("docs/speed.json", "docs/sweeps.json")]
    assert publish.documents(rows.joined(stored)) == documents


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_forced_kernel_has_results_of_its_own(measured, published):
    pytest.importorskip("matplotlib")
    run, forced_run = published / "run.json", published / "forced.json"
    run.write_text(json.dumps(measured), encoding="utf-8")
    publish.main([str(run)])
    slower = [result | {"minimum": 2 * result["minimum"]} for result in measured["results"] if "minimum" in result]
    forced = {name: value for name, value in measured.items() if name != "sweeps"}
    forced |= {"kernel": "avx2", "results": slower}
    forced_run.write_text(json.dumps(forced), encoding="utf-8")
    before = contents(published)
    assert f"{publish.CHARTS}/{CHARTS[0]}.svg" in before
    publish.main([str(forced_run)])
    after = contents(published)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() == {"docs/speed-avx2.json", "benchmarks/results-avx2.md"}
    text = after["benchmarks/results-avx2.md"].decode()
    assert "| bert-fp32 | 0.40 | 0.80 | 0.50 |" in text
    assert "| geometric mean |  |  | 0.50 |" in text


def test_the_documents_show_what_was_published():
    pytest.importorskip("matplotlib")
    files = [file for name in ("speed", "sweeps") if (file := publish.ROOT / f"docs/{name}.json").exists()]
    measured = rows.read(files)
    if "load" not in measured:
        pytest.skip("docs/speed.json was written before there was benchmarks.report.publish")
    documents = publish.documents(measured)
    for name in ("README.md", "docs/speed.svg", "benchmarks/results.md", "benchmarks/README.md"):
        assert documents[name] == (publish.ROOT / name).read_text(encoding="utf-8")
    for forced in publish.ROOT.glob("docs/speed-*.json"):
        for name, text in publish.documents(rows.read([forced])).items():
            assert text == (publish.ROOT / name).read_text(encoding="utf-8")
    drawn = {path for path in documents if path.startswith(publish.CHARTS)}
    assert drawn == {f"{publish.CHARTS}/{file.name}" for file in (publish.ROOT / publish.CHARTS).glob("*.svg")}


def test_publishing_needs_a_run(tmp_path, capsys):
    (tmp_path / "sweeps.json").write_text(json.dumps({"sweeps": {"families": {}}}), encoding="utf-8")
    with pytest.raises(SystemExit):
        publish.main([str(tmp_path / "sweeps.json")])
    assert "none of the files is of benchmarks.compare" in capsys.readouterr().err


# Sweeps.


def test_all_of_a_family_can_be_prepared_at_once():
    for family in SWEEPS.values():
        assert sum(workload.bytes for workload in family.values()) <= KEEP_BYTES
    assert len(NAMED) == len(WORKLOADS) + sum(map(len, SWEEPS.values()))


def test_sizes_of_sweeps():
    assert list(SWEEPS["length"])[::15] == [1, 32768] and {16, 64, 256} <= set(SWEEPS["head-size"])
    assert list(SWEEPS["context"])[::5] == [128, 131072]
    assert [sweeps.thread_counts(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("family", ["length", "threads"])
def test_a_sweep_of_little(family, monkeypatch):
    monkeypatch.setattr(sweeps.machine, "measure", lambda isa: ZEN4)
    monkeypatch.setitem(SWEEPS, "length", {n: SWEEPS["length"][n] for n in (1, 4)})
    monkeypatch.setattr(sweeps, "ON_THREADS", WORKLOADS["tiny-fp32"])
    points = sweeps.measure(["numpy"], rounds=1, seconds=0.02, families=[family])[family]
    assert [point["size"] for point in points] == ([1, 4] if family == "length" else sweeps.thread_counts())
    assert all(point["times"].keys() == {"sdpa", "numpy"} for point in points)
    assert all(min(point["times"].values()) > 0 < point["bound"] for point in points)


def test_the_bound_of_some_threads_is_their_share():
    alone, all_of_them = (sweeps.point(1, WORKLOADS["bert-fp32"], ZEN4, {}, share) for share in (0.5, 1))
    assert alone["bound"] == 2 * all_of_them["bound"] > 0


def test_sweeps_of_an_unknown_family(capsys):
    with pytest.raises(SystemExit):
        sweeps.parse_arguments(["--only", "depth", "--json", "a.json"])
    assert "argument --only: 'depth' is not one of length, head-size, context, threads" in capsys.readouterr().err


# Disturbances.


@pytest.mark.parametrize(
    "seconds, disturbed",
    [
        ({"available": 0.07, "own": 0.07, "others": 0.0, "waited": 0.001}, False),
        ({"available": 0.1, "own": 0.08, "others": 0.01, "waited": 0.025}, True),  # another process on one CPU
        ({"available": 0.1, "own": 0.1, "others": 0.01, "waited": 0.5}, False),  # many threads that use all there is
        ({"available": 0.1, "own": 0.05, "others": 0.0, "waited": 0.02}, False),  # or that wait for each other
        ({"available": 1.0, "own": 0.9, "others": 0.08, "waited": 0.0}, True),  # the hypervisor took it
        ({"available": 1.0, "own": 0.9, "others": 0.06, "waited": 0.0}, False),
    ],
)
def test_a_disturbed_slice(seconds, disturbed):
    assert runner.is_disturbed(**seconds) == disturbed


# The time left.


def test_the_time_left(monkeypatch):
    clock = iter([100.0, 104.0, 106.0])
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(clock))
    left = runner.TimeLeft(planned=10, later=5)
    assert left() == 15
    left.took(2)
    assert left() == 2 * 8 + 5  # two seconds for each that was planned
    left.took(8)
    assert left() == 5


@pytest.mark.parametrize("seconds, text", [(None, ""), (31.4, ", 31 s left"), (200, ", 3 min left")])
def test_the_time_left_in_words(seconds, text):
    assert runner.time_left(seconds) == text


def test_some_cpus_are_given_to_a_process():
    every = os.sched_getaffinity(0)
    with runner.on_cpus({min(every)}):
        assert os.sched_getaffinity(0) == {min(every)}
    assert os.sched_getaffinity(0) == every
