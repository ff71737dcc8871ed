"""The experiment on additive attention, at reduced sizes."""

import io
import tracemalloc

import numpy as np
import pytest
from support.draw import rng
from support.experiments import scaled, verdicts

from sdpa import reference
from sdpa.lab import _additive
from sdpa.lab._additive import ADDITIVE, BARE, DOT, NUMPY_ADDITIVE, NUMPY_DOT, ROOT, USUAL, WIDE, additive
from sdpa.lab._experiment import FALSE, HELD, PARTLY
from sdpa.lab._measures import sharpness

SMALL = dict(dims=(4, 16, 128, 4096), tokens=32, features=48, lengths=(64, 256), seeds=4)


@pytest.fixture(scope="module")
def numbers():
    return additive(**SMALL)


def test_numbers_are_those_of_the_oracle():
    numbers, normal = additive(dims=(16,), tokens=12, features=8, lengths=(4,), seeds=1), rng(0)
    v = normal.standard_normal(8) / np.sqrt(8)
    query, key = normal.standard_normal((2, 12, 16))
    w_query, w_key = normal.standard_normal((2, 8, 16)) / 4
    value, grad_out = normal.standard_normal((2, 12, 64))
    grad_out /= np.linalg.norm(grad_out, axis=-1, keepdims=True)
    for kind, factor in (USUAL, 1), (WIDE, 4):
        sums = factor * ((query @ w_query.T)[:, None] + key @ w_key.T)
        scores = (v * np.tanh(sums)).sum(axis=-1)
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        largest, _, effective, _ = sharpness(weights)
        by_weight = grad_out @ value.T
        by_score = weights * (by_weight - (weights * by_weight).sum(axis=-1, keepdims=True))
        by_query = (by_score[..., None] * v / np.cosh(sums) ** 2).sum(axis=1) @ (factor * w_query)
        expected = np.abs(scores).max(), largest.mean(), effective.mean(), np.linalg.norm(by_query, axis=-1).mean()
        fields = numbers.largest_score, numbers.largest, numbers.effective, numbers.gradient
        np.testing.assert_allclose([field[kind, 0, 0] for field in fields], expected, rtol=1e-9)
        assert numbers.slope[kind - USUAL, 0, 0] == pytest.approx(np.mean(1 / np.cosh(sums) ** 2), rel=1e-9)
    for kind, scale in (BARE, 1), (ROOT, 0.25):
        weights = reference.attention_weights(query, key, scale=scale)
        assert numbers.largest[kind, 0, 0] == pytest.approx(weights.max(axis=-1).mean(), rel=1e-9)
        assert numbers.largest_score[kind, 0, 0] == pytest.approx(np.abs(scale * query @ key.T).max(), rel=1e-9)
    assert numbers.bound == pytest.approx(np.abs(v).sum())


def test_numpy_computes_the_same():
    query, key, value = rng(0).standard_normal((3, 9, 6))
    w_query, w_key, v = *rng(1).standard_normal((2, 5, 6)), rng(2).standard_normal(5)
    out = _additive.numpy_mean(_additive.numpy_scores(query @ w_query.T, key @ w_key.T, v), value)
    np.testing.assert_allclose(
        out, reference.additive_attention(query, key, value, w_query, w_key, v), rtol=1e-12, atol=1e-14
    )
    out = _additive.numpy_mean(query @ key.T / np.sqrt(6), value)
    np.testing.assert_allclose(out, reference.attention(query, key, value), rtol=1e-12, atol=1e-14)


def test_scores_are_bounded(numbers):
    assert (numbers.largest_score[[USUAL, WIDE]] <= numbers.bound).all()
    assert (numbers.largest_score[BARE, -1] > 2.5 * 64).all()  # about 3.4 times 64: of 1024 normal numbers


def test_slopes(numbers):
    """1/√(π d_k) where d_k is large: what is left at 128 is of the order 1/d_k.  At variance 2 it is the integral."""
    np.testing.assert_allclose(numbers.slope[1, 2:].mean(axis=-1), 1 / np.sqrt(np.pi * numbers.dims[2:]), rtol=0.08)
    sums = np.linspace(-20, 20, 20001)
    expected = (np.exp(-(sums**2) / 4) / np.cosh(sums) ** 2).sum() * (sums[1] - sums[0]) / np.sqrt(4 * np.pi)
    np.testing.assert_allclose(numbers.slope[0, 2:].mean(axis=-1), expected, rtol=0.05)


def test_gradients_grow(numbers):
    """With W of variance 1 like the columns of W_Q times the root mean square of the slopes, √d_k / d_k^(1/4)."""
    means = numbers.gradient.mean(axis=-1)
    assert means[WIDE, -1] / means[WIDE, 2] == pytest.approx(32**0.25, rel=0.15)
    assert means[USUAL, -1] / means[USUAL, 2] == pytest.approx(1, rel=0.15)


def test_memory(numbers):
    """NumPy's has all sums, the library none of the arrays with M · N numbers that both would have."""
    pairs = 4 * numbers.lengths**2
    assert (numbers.peak[NUMPY_ADDITIVE] > numbers.features * pairs).all()
    assert (numbers.peak[NUMPY_DOT] > pairs).all()
    assert (numbers.peak[ADDITIVE] < numbers.peak[NUMPY_ADDITIVE]).all()
    assert numbers.peak[ADDITIVE, -1] < 0.2 * numbers.features * pairs[-1]
    assert (numbers.peak[[ADDITIVE, DOT]] >= 4 * numbers.size * numbers.lengths).all()  # the result
    assert (numbers.seconds > 0).all()


def test_peak_is_that_of_the_call():
    """Also where somebody traces already, who goes on."""

    def allocate(array):
        return np.empty(2**20, np.uint8)

    for _ in "twice":
        _, peak = _additive.cost(allocate, (np.zeros(1),))
        assert 2**20 <= peak < 2**20 + 10000
    tracemalloc.start()
    try:
        kept = np.ones(2**21, np.uint8)
        _, peak = _additive.cost(allocate, (np.zeros(1),))
        assert 2**20 <= peak < 2**20 + 10000 and tracemalloc.is_tracing() and kept.all()
    finally:
        tracemalloc.stop()


def test_runs_are_alike_and_pass_their_seeds_through_progress(numbers):
    seen = []
    again = additive(**SMALL, progress=lambda seeds: seen.extend(seeds) or seeds)
    assert seen == [0, 1, 2, 3]
    for name in set(numbers._fields) - {"seconds", "peak"}:
        np.testing.assert_array_equal(getattr(numbers, name), getattr(again, name))


def test_verdicts(numbers):
    """But for the last, which is of times."""
    assert verdicts(_additive, numbers)[:6] == [HELD, HELD, FALSE, HELD, FALSE, PARTLY]


FALSIFIED = {  # number of the finding: the verdict, and the numbers that give it
    "no bound": (0, FALSE, lambda n: dict(bound=n.bound / 10)),
    "sharper with d_k": (1, FALSE, lambda n: dict(effective=scaled(n.effective, np.s_[:, -1], 0.5))),
    "sharper with wide W": (1, PARTLY, lambda n: dict(effective=scaled(n.effective, (WIDE, -1), 0.5))),
    "flat": (2, HELD, lambda n: dict(multiplied=n.multiplied * 0.1)),
    "other slopes": (3, FALSE, lambda n: dict(slope=n.slope * 2)),
    "no gradients": (4, HELD, lambda n: dict(gradient=scaled(n.gradient, (WIDE, -1), 1e-3))),
    "nobody builds": (5, FALSE, lambda n: dict(peak=n.peak * 1e-3)),
    "both build": (5, HELD, lambda n: dict(peak=np.full_like(n.peak, 10**9))),
    "as fast": (6, FALSE, lambda n: dict(seconds=np.ones_like(n.seconds))),
    "slower in NumPy": (6, PARTLY, lambda n: dict(seconds=scaled(np.ones_like(n.seconds), NUMPY_ADDITIVE, 3))),
    "slower": (6, HELD, lambda n: dict(seconds=scaled(np.ones_like(n.seconds), [ADDITIVE, NUMPY_ADDITIVE], 3))),
}


@pytest.mark.parametrize("finding, verdict, change", FALSIFIED.values(), ids=FALSIFIED)
def test_falsified(numbers, finding, verdict, change):
    assert verdicts(_additive, numbers._replace(**change(numbers)))[finding] == verdict


def test_any_dims():
    numbers = additive(dims=(8, 2), tokens=4, lengths=(8,), seeds=1)
    assert all(finding.measured for finding in _additive.EXPERIMENT.findings(numbers))


def test_tables_are_even(numbers):
    for table in _additive.tables(numbers):
        assert len(table.rows) in (2, 4) and {len(row) for row in table.rows} == {len(table.header)}


def test_figures_draw(numbers):
    pytest.importorskip("matplotlib")
    for figure in _additive.EXPERIMENT.figures:
        drawn = figure.draw(numbers)
        drawn.savefig(io.BytesIO(), format="svg")
        assert len(drawn.axes[0].lines) >= 3 and figure.caption


@pytest.mark.parametrize(
    "wrong",
    [dict(dims=()), dict(dims=(0,)), dict(tokens=1), dict(features=0), dict(lengths=(0,)), dict(size=0), dict(seeds=0)],
    ids=str,
)
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        additive(**wrong)
