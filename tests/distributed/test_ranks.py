"""Attention over ranks: this starts mpiexec, and the workers beside this file hold the checks."""

from pathlib import Path

import numpy as np
import pytest
from support.problems import examples
from support.ranks import WITH_RANKS, positions, run_ranks

from sdpa import distributed

HERE = Path(__file__).parent
NUMBERS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])


@WITH_RANKS
@NUMBERS
def test_any_problem_against_the_oracle(ranks):
    run_ranks(ranks, str(HERE / "many_cases.py"), str(examples(60)))


@WITH_RANKS
@NUMBERS
def test_agreement(ranks):
    run_ranks(ranks, str(HERE / "agreeing.py"))


@WITH_RANKS
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("arguments", ["", "--split heads --layout contiguous", "--window 50 --dtype bfloat16 --full"])
def test_the_command(ranks, arguments):
    said = run_ranks(ranks, "-m", "sdpa", "distributed", "--length", "301", "--repeat", "1", *arguments.split())
    assert f"{ranks} rank" in said and "attention:" in said and "gradients:" in said
    differences = [float(line.split()[-1]) for line in said.splitlines()[-4:]]
    assert max(differences) < (2e-2 if "bfloat16" in arguments else 1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 100, 101])
def test_rows(length, size, layout):
    held = [distributed.rows(length, rank, size, layout) for rank in range(size)]
    assert sorted(np.concatenate(held).tolist()) == list(range(length))
    for places, expected in zip(held, positions([len(x) for x in held], layout)):
        assert places.tolist() == expected.tolist()
    assert max(map(len, held)) - min(map(len, held)) <= (1 if layout == "contiguous" else 2)


def test_rows_of_a_sequence_in_eight_chunks():
    assert distributed.rows(8, 1, 4).tolist() == [2, 3]
    assert distributed.rows(8, 1, 4, "zigzag").tolist() == [1, 6]
    assert distributed.rows(10, 0, 4, layout="zigzag").tolist() == [0, 1, 9]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((-1, 0, 1), "length is -1"), ((4, 2, 2), "rank is 2: it must be from 0 to 1"), ((4, 0, 0), "size is 0"),
        ((4, 0, 2, "spiral"), "layout is 'spiral': it must be 'contiguous' or 'zigzag'"),
    ],
)  # fmt: skip
def test_wrong_rows(arguments, said):
    with pytest.raises(ValueError, match=said):
        distributed.rows(*arguments)


def test_no_communicator():
    x = np.ones((3, 4))
    for comm in (None, 3, "world"):
        with pytest.raises(TypeError, match=r"comm is .*: it must be a communicator of mpi4py"):
            distributed.attention(comm, x, x, x)
