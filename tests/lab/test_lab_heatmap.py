"""`sdpa.lab.heatmap`: anybody's weights as a picture."""

import numpy as np
import pytest

import sdpa
from sdpa import lab
from sdpa._report import drawing


def test_heatmap_shades_each_weight():
    weights = sdpa.attention_weights(*np.random.default_rng(0).standard_normal((2, 3, 4, 8)))
    figure = lab.heatmap(weights, list("abcd"))
    maps = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in maps] == ["head 1", "head 2", "head 3"]
    for axes, expected in zip(maps, weights):
        np.testing.assert_array_equal(axes.collections[0].get_array().reshape(4, 4), expected)
        assert axes.yaxis_inverted()
    assert [label.get_text() for label in maps[0].get_yticklabels()] == list("abcd")


HEATMAPS = {
    "one": ((5, 5), {}),
    "heads": ((3, 5, 5), {"titles": ["a", "b", "c"]}),
    "a batch of one": ((1, 2, 5, 5), {}),
    "other keys": ((5, 9), {"key_tokens": range(9)}),
    "long": ((5, 5000), {"key_tokens": range(5000)}),
}


@pytest.mark.parametrize("shape, options", HEATMAPS.values(), ids=HEATMAPS)
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_heatmap_is_saved(shape, options, kind, tmp_path):
    weights = np.full(shape, 1 / shape[-1], np.float32)
    lab.heatmap(weights, list("abcde"), **options).savefig(tmp_path / f"weights.{kind}")
    assert (tmp_path / f"weights.{kind}").stat().st_size > 1000


def test_heatmap_of_narrow_types():
    from ml_dtypes import bfloat16

    for dtype in (bfloat16, np.float16, np.float64, np.int64, bool):
        lab.heatmap(np.eye(2).astype(dtype), ["a", "b"])


SQUARE = np.full((2, 2), 0.5)
WRONG_MAPS = {
    "a string": ((SQUARE, "ab"), {}, TypeError, "tokens is the string 'ab'"),
    "a vector": ((SQUARE[0], ["a", "b"]), {}, ValueError, r"weights has shape \(2,\): it must be \(M, N\)"),
    "two batches": ((np.ones((2, 1, 2, 2)), ["a", "b"]), {}, ValueError, r"weights has shape \(2, 1, 2, 2\)"),
    "nothing": ((np.ones((0, 0)), []), {}, ValueError, r"weights has shape \(0, 0\)"),
    "complex": ((SQUARE * 1j, ["a", "b"]), {}, TypeError, "weights has dtype complex128"),
    "text": ((np.array([["a"]]), ["a"]), {}, TypeError, "weights has dtype <U1"),
    "scores": ((SQUARE * 7, ["a", "b"]), {}, ValueError, "weights holds 3.5: weights are from 0 to 1"),
    "below 0": ((SQUARE - 1, ["a", "b"]), {}, ValueError, "weights holds -0.5"),
    "NaN": ((SQUARE * np.nan, ["a", "b"]), {}, ValueError, "weights holds nan"),
    "few tokens": ((SQUARE, ["a"]), {}, ValueError, "tokens has 1 entries: weights has 2 queries"),
    "no keys": ((SQUARE[:1], ["a"]), {}, ValueError, "weights has 1 queries and 2 keys: key_tokens must be given"),
    "few keys": ((SQUARE, ["a", "b"]), {"key_tokens": ["a"]}, ValueError, "key_tokens has 1 entries: .* 2 keys"),
    "titles": ((SQUARE, ["a", "b"]), {"titles": ["a", "b"]}, ValueError, "titles has 2 entries: weights has 1 heads"),
}


@pytest.mark.parametrize("arguments, options, error, text", WRONG_MAPS.values(), ids=WRONG_MAPS)
def test_wrong_heatmaps(arguments, options, error, text):
    with pytest.raises(error, match=text):
        lab.heatmap(*arguments, **options)


def test_heatmap_without_matplotlib(monkeypatch):
    monkeypatch.setattr(drawing, "available", lambda: False)
    with pytest.raises(ImportError, match="heatmap needs matplotlib: pip install matplotlib"):
        lab.heatmap(SQUARE, ["a", "b"])
