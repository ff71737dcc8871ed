"""Encoders against the oracle; lengths, masks, types; and vectors of texts."""

import json

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.models import ENCODERS, ids_of, words_tokenizer, write_model

import sdpa
from sdpa.models import _encoder
from sdpa.models._encoder import POOLINGS

encoders = pytest.mark.parametrize("kind", ENCODERS)
LENGTHS = np.array([12, 1, 0, 7])
REAL = np.arange(12) < LENGTHS[:, None]


@pytest.fixture(scope="module", params=ENCODERS)
def folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param) / "m", request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("bert") / "m", "bert")


def test_as_the_oracle(folder):
    ids = ids_of(4, 12)
    model, exact = sdpa.models.load(folder), sdpa.models.load(folder, pieces=sdpa.reference)
    expected = exact(ids)
    assert expected.dtype == np.float64 and model(ids).dtype == np.float32
    np.testing.assert_allclose(model(ids), expected, atol=2e-5)
    np.testing.assert_allclose(sdpa.models.load(folder, dtype=np.float64)(ids), expected, atol=1e-12)
    np.testing.assert_allclose(model.embed(ids), exact.embed(ids), atol=1e-5)


@pytest.mark.parametrize("dtype, most", [(np.float16, 0.02), (bfloat16, 0.15)])
def test_half_types(folder, dtype, most):
    ids = ids_of(2, 9)
    out = sdpa.models.load(folder, dtype=dtype)(ids)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float32), sdpa.models.load(folder)(ids), atol=most)


def test_a_sequence_does_not_depend_on_its_batch(folder):
    """Nor on padding: what is there is what the sequence gives alone."""
    ids, model = ids_of(4, 12), sdpa.models.load(folder)
    alone = np.zeros((4, 12, 48), np.float32)
    for b, length in enumerate(LENGTHS):
        alone[b, :length] = model(ids[b, :length]) if length else 0
    rows = [row[:length].tolist() for row, length in zip(ids, LENGTHS)]
    for out in (model(ids, lengths=LENGTHS), model(ids, mask=REAL), model(rows)):
        np.testing.assert_allclose(out, alone, atol=1e-5)
        assert not out[~REAL].any()
    np.testing.assert_allclose(model(ids, lengths=LENGTHS, mask=REAL[:, ::-1])[0], model(ids[:1], mask=REAL[:1])[0])
    np.testing.assert_allclose(model.embed(rows[:2]), model.embed(ids[:2], lengths=LENGTHS[:2]), atol=1e-6)
    changed = np.where(REAL, ids, 5)
    np.testing.assert_array_equal(model(changed, lengths=LENGTHS), model(ids, lengths=LENGTHS))


def test_padding_is_not_computed(bert):
    counts = []
    model = sdpa.models.load(bert)
    enter = model.layers[0].enter
    model.layers[0].enter = lambda x, threads: counts.append(len(x)) or enter(x, threads=threads)
    model(ids_of(4, 12), lengths=LENGTHS)
    model.embed(ids_of(2, 12), lengths=[3, 2])
    assert counts == [LENGTHS.sum(), 5]


def test_one_sequence_without_the_axis_of_batches(folder):
    ids, model = ids_of(9), sdpa.models.load(folder)
    np.testing.assert_array_equal(model(ids), model(ids[None])[0])
    np.testing.assert_array_equal(model(ids.tolist(), lengths=4), model(ids[None], lengths=[4])[0])
    np.testing.assert_array_equal(model.embed(ids), model.embed(ids[None])[0])
    assert model.embed([]).shape == (0, 48)
    assert model(np.zeros((0, 5), int)).shape == (0, 5, 48) and model.embed(np.zeros((0, 5), int)).shape == (0, 48)


def test_types_of_tokens(bert):
    ids, model = ids_of(2, 6), sdpa.models.load(bert)
    types = np.array([[0, 0, 1, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(model(ids, token_types=0 * types), model(ids))
    exact = sdpa.models.load(bert, pieces=sdpa.reference)
    np.testing.assert_allclose(model(ids, token_types=types), exact(ids, token_types=types), atol=2e-5)
    np.testing.assert_array_equal(model(ids[0], token_types=types[0]), model(ids, token_types=types)[0])
    assert abs(model(ids, token_types=types) - model(ids)).max() > 0.1
    short = model(ids, token_types=types, lengths=[6, 3])
    np.testing.assert_allclose(short[1, :3], model(ids[1, :3], token_types=types[1, :3]), atol=1e-5)


def test_roberta_does_not_count_padding(tmp_path):
    """As in transformers: a token that is padding stands before the first place, and those behind are not moved."""
    model = sdpa.models.load(write_model(tmp_path / "m", "roberta"))
    ids = ids_of(1, 6)
    ids[0, 2] = 1
    seen = []
    embedded = model._embedded
    model._embedded = lambda ids, places, types: seen.append(places.tolist()) or embedded(ids, places, types)
    model(ids)
    assert seen == [[0, 1, -1, 2, 3, 4]]
    assert model.longest == 40 - 2


# Pooling.


def by_hand(x, name):
    weights = np.arange(1.0, len(x) + 1)[:, None]
    return {
        "mean": lambda: x.mean(0), "mean_sqrt_len_tokens": lambda: x.sum(0) / np.sqrt(len(x)), "max": lambda: x.max(0),
        "cls": lambda: x[0], "lasttoken": lambda: x[-1], "weightedmean": lambda: (x * weights).sum(0) / weights.sum(),
    }[name]()  # fmt: skip


def write_pooling(folder, about, kind="sentence_transformers.models.Pooling"):
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": kind},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]))  # fmt: skip
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 48} | about))


NAMES = ("mean", "mean_sqrt_len_tokens", "max", "cls", "lasttoken", "weightedmean")
OLD = {
    "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "max": "max_tokens", "cls": "cls_token",
    "lasttoken": "lasttoken", "weightedmean": "weightedmean_tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_pooling_by_hand(name, tmp_path):
    folder = write_model(tmp_path / "m", "bert")
    ids, lengths = ids_of(3, 9), [9, 1, 4]
    for about in ({"pooling_mode": name}, {f"pooling_mode_{old}": old == OLD[name] for old in OLD.values()}):
        write_pooling(folder, about)
        model = sdpa.models.load(folder)
        found = model.embed(ids, lengths=lengths)
        np.testing.assert_allclose((found**2).sum(-1), 1, atol=1e-6)
        for b, length in enumerate(lengths):
            expected = by_hand(model(ids[b, :length]), name)
            np.testing.assert_allclose(found[b], expected / np.linalg.norm(expected), atol=1e-6)


def test_several_poolings_side_by_side(tmp_path):
    folder = write_model(tmp_path / "m", "bert")
    write_pooling(folder, {"pooling_mode": ["cls", "mean"]})
    model, ids = sdpa.models.load(folder), ids_of(7)
    x = model(ids)
    expected = np.concatenate([x[0], x.mean(0)])
    np.testing.assert_allclose(model.embed(ids), expected / np.linalg.norm(expected), atol=1e-6)


def test_large_batches_are_embedded_in_passes(bert, monkeypatch):
    ids, model = ids_of(7, 10), sdpa.models.load(bert)
    expected = model.embed(ids, lengths=[10, 1, 5, 10, 2, 3, 4])
    monkeypatch.setattr(_encoder, "PLACES_AT_ONCE", 25)
    np.testing.assert_allclose(model.embed(ids, lengths=[10, 1, 5, 10, 2, 3, 4]), expected, atol=1e-6)


def test_modules_that_are_not_known(tmp_path):
    folder = write_model(tmp_path / "m", "bert")
    write_pooling(folder, {}, kind="sentence_transformers.models.Dense")
    with pytest.raises(ValueError, match=r"modules.json: a module is Dense: it must be Transformer, Pooling"):
        sdpa.models.load(folder)
    for about in ({"pooling_mode": "median"}, {"pooling_mode_mean_tokens": False}):
        write_pooling(folder, about)
        with pytest.raises(ValueError, match=r"1_Pooling.config.json: pooling is .*: it must be of mean"):
            sdpa.models.load(folder)
    assert set(NAMES) <= set(POOLINGS)


# Errors.


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda m: m([[1, 97]]), ValueError, "ids are from 1 to 97: they must be from 0 to below the 97 words"),
        (lambda m: m([[-1]]), ValueError, "ids are from -1"),
        (lambda m: m([[1.0]]), TypeError, "ids have dtype float64: they must be whole numbers"),
        (lambda m: m("text"), TypeError, "ids have dtype <U4"),
        (lambda m: m(np.zeros((1, 1, 1), int)), ValueError, r"ids have shape \(1, 1, 1\)"),
        (lambda m: m(ids_of(1, 41)), ValueError, "a sequence has 41 tokens: the model has places for 40"),
        (lambda m: m(ids_of(2, 3), lengths=[1, 1, 1]), ValueError, r"lengths has shape \(3,\)"),
        (lambda m: m(ids_of(2, 3), lengths=[1, 4]), ValueError, r"lengths are \[1, 4\]: they must be from 0 to the 3"),
        (lambda m: m(ids_of(2, 3), lengths=[1.0, 2.0]), TypeError, "lengths has dtype float64"),
        (lambda m: m(ids_of(2, 3), mask=np.ones((2, 3))), TypeError, "mask has dtype float64: it must be boolean"),
        (lambda m: m(ids_of(2, 3), mask=np.ones(3, bool)), ValueError, r"mask has shape \(1, 3\)"),
        (lambda m: m(ids_of(2, 3), token_types=np.full((2, 3), 2)), ValueError, "from 0 to below 2"),
        (lambda m: m(ids_of(2, 3), token_types=np.ones((2, 3))), TypeError, "token_types have dtype float64"),
        (lambda m: m.embed(ids_of(2, 3), lengths=[1, 0]), ValueError, "sequence 1 has no token"),
        (lambda m: m.embed("text"), FileNotFoundError, "tokenizer.json is missing: .* token ids must be given"),
    ],
)
def test_what_is_wrong_is_said(call, kind, message, bert):
    with pytest.raises(kind, match=message):
        call(sdpa.models.load(bert))


def test_a_model_without_types(tmp_path):
    model = sdpa.models.load(write_model(tmp_path / "m", "distilbert"))
    with pytest.raises(ValueError, match="token_types are given: for this model they must be None"):
        model(ids_of(2, 3), token_types=np.zeros((2, 3), int))


# Texts.


def test_texts(tmp_path):
    folder = words_tokenizer(write_model(tmp_path / "m", "bert"), max_seq_length=7)
    model = sdpa.models.load(folder)
    texts = ["a cat on the mat", "the mat", "a cat on the mat on the mat"]
    assert model.tokens(texts) == [[2, 4, 5, 6, 7, 8, 3], [2, 7, 8, 3], [2, 4, 5, 6, 7, 8, 3]]
    vectors = model.embed(texts)
    np.testing.assert_allclose(vectors[1], model.embed([2, 7, 8, 3]), atol=1e-6)
    np.testing.assert_array_equal(model.embed("the mat"), model.embed(["the mat"])[0])
    assert model.tokens(["A cat"]) == [[2, 9, 5, 3]]
    lower = sdpa.models.load(words_tokenizer(folder, do_lower_case=True))
    assert lower.tokens(["A cat"]) == [[2, 4, 5, 3]]


def test_texts_without_the_package(tmp_path, monkeypatch):
    import sys

    folder = write_model(tmp_path / "m", "bert")
    (folder / "tokenizer.json").touch()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tokenizers\): without it, give token ids"):
        sdpa.models.load(folder).embed(["text"])
