"""Where the time goes: what is measured, built and shown."""

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies import stages
from benchmarks.workloads import select

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "benchmarks/measure/stages.c"


def workload(name):
    (found,) = [one for one in select(name) if one.name == name]
    return found


def test_near_arrays_fit_and_are_the_same_work():
    for name in "decode-4k-fp32", "window-128-8192-fp32", "bert-bf16", "speculate-5-mha-fp32":
        one, small = workload(name), stages.near(workload(name))
        assert small.bytes <= stages.NEAR_BYTES and small.flops < one.flops
        assert (small.D, small.window, small.causal, small.dtype_name) == (
            one.D,
            one.window,
            one.causal,
            one.dtype_name,
        )
        assert small.H == one.H // one.G and small.N >= min(one.N, stages.FEWEST)
    assert stages.near(workload("layer-32-fp32")) is None


def test_a_line_has_shares_of_all_threads():
    found = {"name": "x", "threads": 2, "seconds": 100e-6, "stages": [20e-6, 100e-6, *[0.0] * 8], "near": 75e-6}
    assert stages.line(found) == "| x | 100 | queries 10, scores 50 | 40 | 75 |  |"


def test_aligned_copies():
    array = stages.aligned(np.arange(30.0)[3:].reshape(3, 9))
    assert array.ctypes.data % 64 == 0 and (array == np.arange(30.0)[3:].reshape(3, 9)).all()
    assert stages.aligned(None) is None


def test_stages_have_the_names_of_their_numbers():
    source = SOURCE.read_text(encoding="utf-8")
    numbers = {int(number) for number in re.findall(r"(?:timed\(\w+|spend\(\w*?)\W*(\d+)", source)}
    assert numbers == set(range(len(stages.NAMES)))
    assert f"STAGES = {stages.ROOM[0]}, MOST_THREADS = {stages.ROOM[1]}" in source


@pytest.mark.parametrize("engine", [0, 1], ids=["many rows", "few rows"])
def test_the_kernels_can_be_timed(engine, tmp_path):
    """They have the functions that are timed, with these arguments."""
    Path(tmp_path, "kernel_itself.h").write_text(Path(ROOT, "csrc/kernel.c").read_text(encoding="utf-8"))
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = ["-DSDPA_ISA_baseline", "-DSDPA_REAL_BYTES=4", f"-DSDPA_FEW_ROWS={engine}", "-std=c11", "-Werror"]
    command = [*compiler, *flags, f"-I{tmp_path}", f"-I{ROOT / 'csrc'}", "-fsyntax-only", SOURCE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
