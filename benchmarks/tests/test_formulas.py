"""Projections, norms and models: their sizes, and what passes, by the operations of each library."""

import dataclasses
import json

import numpy as np
import pytest

import sdpa
from benchmarks.measure import oracle
from benchmarks.peers import IMPLEMENTATIONS, PEERS, adapter_of
from benchmarks.tests.test_workloads import error_of
from benchmarks.workloads import checkpoints
from benchmarks.workloads.formulas import Oracle
from benchmarks.workloads.layers import FeedForward, Linear, Norm
from benchmarks.workloads.models import Decoder, Encoder, Model

FORMULAS = {
    "linear": Linear("some", 67, 33, 40, "gelu"),
    "linear again": Linear("some", 67, 33, 33, count=2),
    "feed forward": FeedForward("some", 67, 33, 40),
    "gated": FeedForward("some", 67, 33, 40, gated=True),
    "layer norm": Norm("some", 67, 33),
    "rms norm": Norm("some", 67, 33, centred=False),
    "encoder": Encoder("some", 2, 17, 2, 48, 3, 56),
    "padded encoder": Encoder("some", 3, 17, 2, 48, 3, 56, padded=True),
    "prompt": Decoder("some", 2, 9, 2, 64, 4, 56, kv_heads=2, words=100),
    "token": Decoder("some", 2, 1, 2, 64, 4, 56, kv_heads=2, words=100, cached=11),
}


PARTS = {name: workload for name, workload in FORMULAS.items() if not isinstance(workload, Model)}


@pytest.mark.parametrize("workload", PARTS.values(), ids=PARTS)
def test_drawn_arrays_of_formulas_have_the_stated_bytes(workload):
    inputs, weights = workload.draw()
    given, made = (
        sum(array.nbytes for array in arrays) for arrays in (inputs.values(), workload.outputs(Oracle(np.float32)))
    )
    assert made == workload.result_bytes
    if not isinstance(workload, Norm):  # whose weights are nothing beside its rows
        assert sum(array.nbytes for array in weights.values()) == workload.read_bytes
        given += workload.read_bytes
    assert given + made == workload.bytes


def test_what_a_token_reads():
    """All weights by which it is multiplied, and all keys and values."""
    token = FORMULAS["token"]
    matrices = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 56 * 64) + 100 * 64
    past = 2 * 2 * 2 * 2 * 11 * 16
    assert sum(array.nbytes for array in token.to_read()) == token.read_bytes == 4 * (matrices + past)


def test_padding_is_no_work():
    padded, full = FORMULAS["padded encoder"], dataclasses.replace(FORMULAS["padded encoder"], padded=False)
    assert padded.tokens == sum(padded.lengths) < full.tokens == 3 * 17 and padded.flops < full.flops
    x = np.arange(3 * 17 * 48.0).reshape(3, 17, 48)
    [rows] = padded.comparable(x)
    np.testing.assert_array_equal(rows[-1], x[2, padded.lengths[2] - 1])
    assert len(rows) == padded.tokens and min(padded.lengths) >= 8


@pytest.mark.parametrize("name", ["sdpa", "numpy", "torch", "ort", "openvino"])
@pytest.mark.parametrize("workload", FORMULAS.values(), ids=FORMULAS)
def test_formulas_pass(workload, name):
    if name not in ("sdpa", "numpy"):
        pytest.importorskip(PEERS[name].library)
    error, allowed = error_of(adapter_of(IMPLEMENTATIONS[name], workload), workload)
    assert error <= allowed


@pytest.mark.parametrize("workload", FORMULAS.values(), ids=FORMULAS)
def test_a_formula_with_another_weight_does_not_pass(workload):
    checks = workload.expected()
    inputs, weights = workload.draw()
    for name in weights:
        if name.endswith("key.bias"):
            continue  # adds the same to all scores of a row
        other = {**weights, name: weights[name] * np.float32(1.05)}
        assert not np.less_equal(
            *oracle.judge(workload.comparable(*workload.formula(Oracle(np.float32), inputs, other)), checks)
        )


@pytest.mark.parametrize("name", ["encoder", "prompt"])
@pytest.mark.parametrize("dtype_name", checkpoints.CODES)
def test_a_model_in_a_folder(name, dtype_name, tmp_path):
    """As the library reads it: with all weights, under their names."""
    workload = dataclasses.replace(FORMULAS[name], dtype_name=dtype_name)
    weights = workload.draw_weights()
    checkpoints.write(tmp_path, workload.config, weights, dtype_name)
    assert json.loads((tmp_path / "config.json").read_text()) == workload.config
    model = sdpa.models.load(tmp_path)
    assert model.dtype == workload.dtype and model.settings.layers == 2
    if name == "prompt":
        exact = sdpa.models.load(tmp_path, pieces=sdpa.reference)(**workload.draw_inputs())[:, -1]
        [checked] = workload.expected()
        np.testing.assert_allclose(exact[checked.rows], checked.exact, rtol=1e-9)
