"""Caches over ranks: this starts mpiexec, and the workers beside this file hold the checks."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.models import bytes_tokenizer, write_model
from support.problems import examples
from support.ranks import MPIEXEC, WITH_RANKS, environment, run_ranks

import sdpa
from sdpa.distributed._blocks import BLOCK, Blocks

HERE = Path(__file__).parent


@WITH_RANKS
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_anything_that_happens_to_a_cache_against_the_oracle(ranks):
    run_ranks(ranks, str(HERE / "any_cache.py"), str(examples(25)))


@WITH_RANKS
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_wrong_calls_files_and_ranks_that_fail(ranks, tmp_path):
    run_ranks(ranks, str(HERE / "caching.py"), str(tmp_path))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_blocks(size):
    blocks, lengths = [Blocks(rank, size) for rank in range(size)], np.arange(5 * BLOCK * size)
    held = np.stack([each.held(lengths) for each in blocks])
    assert (held.sum(axis=0) == lengths).all() and (held.max(axis=0) - held.min(axis=0)).max() <= BLOCK
    assert all(each.held(int(n)) == of_rank[n] for each, of_rank in zip(blocks, held) for n in lengths)
    places = [each.position(np.arange(of_rank[-1])) for each, of_rank in zip(blocks, held)]
    assert sorted(np.concatenate(places)) == lengths[:-1].tolist()
    for window in (0, 1, BLOCK, 3 * BLOCK + 5, BLOCK * size):
        of_windows = held[:, window:] - held[:, : len(lengths) - window]
        assert (of_windows.max(axis=1) == blocks[0].most_of(window)).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder without a window, and one with; and a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    found = [write_model(folder / kind, kind) for kind in ("llama", "mistral")]
    bytes_tokenizer(found[0])
    return found


@WITH_RANKS
@pytest.mark.parametrize("ranks", [2])
def test_generate_gives_the_tokens_of_one_process(folders, ranks):
    prompt = " ".join(map(str, range(2, 22)))
    for folder, options in zip(folders, ([], ["--cache", "int8", "--temperature", "1.5", "--seed", "3"])):
        command = ["-m", "sdpa", "generate", folder, prompt, "--ids", "--tokens", "17"]
        alone = run_ranks(1, *map(str, command), *options)
        assert run_ranks(ranks, *map(str, command), *options) == alone and len(alone.split()) == 17
    drawn = run_ranks(ranks, *map(str, command), "--temperature", "1.5")  # each rank would draw others
    assert len(drawn.split()) == 17
    text = [*map(str, ("-m", "sdpa", "generate", folders[0], "abc", "--tokens", "9"))]
    assert run_ranks(ranks, *text) == run_ranks(1, *text)


@WITH_RANKS
def test_generate_says_once_what_is_wrong(folders, tmp_path):
    for arguments in (
        [tmp_path, "3"], [folders[0], "x"], [folders[0], "3", "--cache", "int4"], [folders[0], "3", "--tokens", "-1"],
        [folders[0], "3", "--threads", "0"],
    ):  # fmt: skip
        command = [MPIEXEC, "-n", "2", sys.executable, "-m", "sdpa", "generate", *map(str, arguments), "--ids"]
        done = subprocess.run(command, env=environment(), timeout=60, capture_output=True, text=True)
        assert done.returncode and not done.stdout and done.stderr.count("generate: error: ") == 1


def test_a_decoder_makes_caches_of_a_communicator(folders):
    MPI = pytest.importorskip("mpi4py.MPI")
    model = sdpa.models.load(folders[1])
    caches = model.new_caches(1, comm=MPI.COMM_SELF, dtype="float16")
    assert isinstance(caches[0], sdpa.distributed.KVCache)
    assert caches[0].window == 5 and caches[0].dtype == np.float16
    prompt = np.arange(2, 20)
    expected = list(model.generate(prompt, 9, caches=model.new_caches(1, dtype="float16")))
    assert list(model.generate(prompt, 9, caches=caches)) == expected


def test_the_simulation(capsys, monkeypatch):
    """It plans as the library does: the work of all steps is that of the whole call, and zigzag balances it."""
    from benchmarks.studies import distributed as study

    work, machine = study.Work(1000), study.Machine(1e9, 1e12, 1e12, 0)
    alone = study.Plan(work, 1, "contiguous")
    assert alone.flops.sum() == 4 * 8 * 64 * 1000 * 1001 / 2 and not alone.sent.any()
    for layout, most in (("contiguous", 2), ("zigzag", 1.05)):
        plan = study.Plan(work, 7, layout)
        assert plan.flops.sum() == alone.flops.sum() and 1 <= plan.balance <= most
        assert 0 < plan.sent.sum() <= 6 * 1000 * work.row
        assert plan.time(machine) * 7 >= alone.time(machine)
        assert plan.time(machine) <= plan.time(machine._replace(bandwidth=1e6))
    monkeypatch.setattr("sys.argv", ["distributed", "--simulate", "--length", "4096"])
    study.main()
    assert "| 256 | zigzag | 1.0" in capsys.readouterr().out


def test_the_tables_of_the_document_are_whole():
    from benchmarks.studies import distributed as study

    text = study.DOCUMENT.read_text(encoding="utf-8")
    for name in ("simulated", "decoding", "measured", "steps"):
        _, _, rest = text.partition(f"<!-- begin: {name} -->\n")
        table, end, _ = rest.partition(f"<!-- end: {name} -->")
        assert end and table.count("|") > 20
