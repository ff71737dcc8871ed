"""Every adapter that is installed, once on every workload, shrunk: what it computes, and that it can do what it should.

Each runs in a process of its own, as in a comparison.  What is listed here is what the versions in README.md can do.
"""

import argparse
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.measure import trial
from benchmarks.measure.probe import Probe
from benchmarks.measure.reading import READ
from benchmarks.peers import IMPLEMENTATIONS, PEERS, select_peers
from benchmarks.workloads import DTYPES, WORKLOADS
from benchmarks.workloads.attention import Attention, Backward


class Able(NamedTuple):
    """The workloads that an adapter can do: by kind, by dtype, and of those the ones for which `suits` holds."""

    kinds: str
    dtypes: str
    suits: Callable = lambda workload: True
    rough: str = ""  # the dtypes that it takes, but does not compute in well enough to count

    def does(self, workload):
        return workload.kind in self.kinds.split() and workload.dtype_name in self.dtypes and self.suits(workload)


def has_as_many_key_heads(workload):
    return workload.H == workload.G


def looks_back_only(workload):
    return workload.M <= workload.N and (workload.causal or workload.window is not None or workload.M == 1)


def is_grouped_and_full(workload):
    return workload.H > workload.G and not workload.causal


def fits_vllm(workload):
    return not workload.hiding and workload.D != 40


def is_timed_by_reading(workload):
    return workload.limited_by_memory and Probe().has_threads


FORMULAS = "linear feed_forward norm encoder decoder"
# Models of transformers, where that is installed.
ACCELERATED = "accelerated_encoder accelerated_decoder" if importlib.util.find_spec("transformers") else ""
ABLE = {
    "sdpa": Able(f"forward backward layer {FORMULAS} {ACCELERATED}", "fp32 fp64 bf16 fp16"),
    READ: Able(f"forward {FORMULAS} accelerated_decoder", "fp32 bf16 fp16", is_timed_by_reading),
    "numpy": Able(f"forward layer {FORMULAS}", "fp32 fp64 bf16 fp16"),
    "torch": Able(f"forward backward layer {FORMULAS} {ACCELERATED}", "fp32 fp64 bf16 fp16"),
    "torch_math": Able("forward backward", "fp32 fp64 bf16 fp16"),
    "torch_flex": Able("forward", "fp32 bf16 fp16"),
    "torch_mha": Able("layer", "fp32 bf16"),
    "ort_attn": Able("forward layer", "fp32 fp64 fp16", rough="fp64"),
    "ort_mha": Able("forward layer", "fp32 fp16", has_as_many_key_heads),
    "ort_gqa": Able("forward", "fp32 fp16", looks_back_only),
    "ort": Able(FORMULAS, "fp32"),
    "openvino": Able(f"forward layer {FORMULAS}", "fp32 bf16 fp16"),
    "ov_fold": Able("forward", "fp32 bf16 fp16", is_grouped_and_full),
    "ncnn": Able("forward", "fp32 bf16"),
    "jax": Able("forward backward layer", "fp32 fp64 bf16", rough="fp64"),
    "vllm": Able("forward", "fp32 bf16 fp16", fits_vllm),
    "zentorch": Able("forward", "fp32 fp64 bf16 fp16"),
    "keras": Able("forward backward", "fp32 fp64 bf16 fp16", rough="fp16"),
    "mlx": Able("forward backward", "fp32 fp64 bf16 fp16", rough="fp64"),
    "paddle": Able("forward backward", "fp32 fp64", has_as_many_key_heads),
}
ROUGH_ERROR = {"fp64": 1e-6, "fp16": 2e-2}  # what passes where a dtype is rough: that of the next narrower one


def test_what_each_adapter_can_do_is_known():
    assert list(ABLE) == list(IMPLEMENTATIONS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return trial.expect(WORKLOADS.values(), tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_adapter_does_what_it_can(name, expected):
    peer = IMPLEMENTATIONS[name]
    if not peer.installed:
        pytest.skip(f"{peer.library} is not installed")
    wrong = {}
    for workload, answer in trial.trials(name, expected):
        if not as_expected(ABLE[name], WORKLOADS[workload], answer):
            wrong[workload] = trial.verdict(answer)
    assert not wrong


def as_expected(able, workload, answer):
    if "unsupported" in answer:
        return not able.does(workload)
    passes = answer["allowed"]
    if workload.dtype_name in able.rough:
        passes = max(passes, ROUGH_ERROR[workload.dtype_name])
    return able.does(workload) and answer["error"] <= passes


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_shrunk_workload_is_small(name):
    whole, small = WORKLOADS[name], WORKLOADS[name].shrunk()
    assert type(small) is type(whole)
    for same in ("case", "dtype", "limited_by_memory"):
        assert getattr(small, same) == getattr(whole, same)
    assert small.flops < 1e8 and small.bytes < 1e7


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if isinstance(workload, Attention)])
def test_shrunk_attention_is_of_the_same_kind(name):
    whole, small = WORKLOADS[name], WORKLOADS[name].shrunk()
    for same in ("D", "causal", "hiding"):
        assert getattr(small, same) == getattr(whole, same)
    assert small.options.keys() == whole.options.keys()
    assert small.H * whole.G == whole.H * small.G and (small.B > 1) == (whole.B > 1)
    assert np.sign(small.M - small.N) == np.sign(whole.M - whole.N)
    assert small.window is None or small.window < small.N
    assert small.scores <= 2 * 8 * 67 * 67


def test_what_an_adapter_cannot_do_is_answered():
    workload = Backward("some", 1, 1, 1, 3, 3, 8, causal=True)
    [(_, answer)] = trial.trials("numpy", {"some": (workload, None)})
    assert "no backward" in answer["unsupported"] and trial.verdict(answer).startswith("cannot: ")


def test_a_wrong_result_is_called_wrong():
    assert trial.verdict({"error": 2.0, "allowed": 1.0}).startswith("WRONG")
    assert trial.verdict({"error": float("nan"), "allowed": 1.0}).startswith("WRONG")
    assert trial.verdict({"error": 1.0, "allowed": 1.0}).startswith("right")


# Selection.


def test_a_peer_is_selected_by_its_name():
    assert select_peers("torch") == ["torch"] and select_peers("openvino") == ["openvino"]
    assert select_peers("jax,ort_mha,jax") == ["ort_mha", "jax"]


def test_all_peers_of_a_library_are_selected_by_its_name():
    assert select_peers("onnxruntime") == ["ort_attn", "ort_mha", "ort_gqa", "ort"]


def test_peers_are_selected_by_patterns():
    assert select_peers("torch*") == ["torch", "torch_math", "torch_flex", "torch_mha"]
    assert select_peers("*") == list(PEERS) and select_peers("") == []


def test_an_unknown_peer_is_refused():
    message = r"'nothing' is neither a peer nor a library; there are: numpy, torch, .*; of numpy, torch, "
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        select_peers("numpy,nothing")


def test_compare_takes_libraries():
    names = compare.implementations(compare.parse_arguments(["--peers", "onnxruntime"], "compare"))
    assert names == ["sdpa", READ, "ort_attn", "ort_mha", "ort_gqa", "ort"]


def test_versions_are_of_what_is_imported():
    known = compare.versions(["sdpa", "numpy"])
    assert known["numpy"] == np.__version__ and set(known) == {"python", "numpy"}


def test_the_trial_prints_a_line_for_each_workload(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trial", "numpy,ort_gqa", "--only", "tiny-fp32,bwd-bert-fp32"])
    monkeypatch.setitem(IMPLEMENTATIONS, "ort_gqa", PEERS["ort_gqa"]._replace(library="no_such_library"))
    trial.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("numpy: tiny-fp32: right") and lines[1].startswith("numpy: bwd-bert-fp32: cannot")
    assert lines[2:] == ["ort_gqa: no_such_library is not installed"]


def test_all_dtypes_are_tried():
    assert {workload.dtype_name for workload in WORKLOADS.values()} == set(DTYPES)
