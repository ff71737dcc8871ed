"""The experiment on overflow, at reduced sizes."""

import io

import numpy as np
import pytest
from support.draw import rng
from support.experiments import verdicts

from sdpa.lab import _overflow
from sdpa.lab._experiment import FALSE, HELD, PARTLY
from sdpa.lab._overflow import BARE, DOUBLE, FORMULA, HALF, KERNELS, ROOT, SHIFTED, SINGLE, overflow

SMALL = dict(dims=(4, 64, 4096, 262144), queries=16, calls=30, seeds=2)
KINDS = np.float16, np.float32, np.float64


@pytest.fixture(scope="module")
def numbers():
    return overflow(**SMALL)


def changed(array, index, number):
    array = array.copy()
    array[index] = number
    return array


def test_where_exp_ends(numbers):
    """ln(65504), ln((2 - 2^-23) 2^127), ln((2 - 2^-52) 2^1023); below, half of the smallest: 2^-25, 2^-150, 2^-1075."""
    np.testing.assert_allclose(numbers.limits, [11.0899, 88.7228, 709.7827], atol=1e-4)
    np.testing.assert_allclose(numbers.highest, numbers.limits, rtol=4e-4)
    np.testing.assert_allclose(numbers.lowest, np.log(2) * np.array([-25, -150, -1075]), rtol=4e-4)


def test_where_sums_end(numbers):
    """ln 2, ln 512 and ln 65536 earlier, which in float16 is below 0."""
    earlier = numbers.limits[:, None] - numbers.highest_equal
    np.testing.assert_allclose(earlier, np.tile(np.log([2, 512, 65536]), (3, 1)), atol=0.008)
    assert numbers.highest_equal[HALF, -1] < 0
    assert np.isnan(_overflow.by_formula(np.full(65536, np.float16(12)))).all()
    assert (_overflow.by_formula(np.full(65536, np.float16(1))) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_last_right(kind):
    """Next to each other: 5 is right and the number after it is not."""
    assert _overflow.last_right(lambda x: x <= 5, kind) == 5
    after = _overflow.last_right(lambda x: x < 5, kind)
    assert after == np.nextafter(kind(5), kind(0))


def test_failures():
    rows = np.array([[0.5, 0.5], [0, 0], [np.nan, 1], [np.inf, 0], [0.25, 0.75]])
    assert _overflow.fails(rows).tolist() == [False, True, True, True, False]
    assert _overflow.right(np.zeros(8, np.float32)) and not _overflow.right(np.full(8, np.float32(-200)))


def test_three_ways_are_one_where_none_fails():
    scores = rng(0).standard_normal((5, 20))
    exact = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    for weights in _overflow.weights_by_all(scores):
        np.testing.assert_allclose(weights, exact, rtol=1e-14)


def test_errors_are_in_units_of_eps():
    scores = np.log(np.array([[1.0, 3.0], [1.0, 1.0], [1.0, 1.0]]))
    weights = np.array([[0.25, 0.75], [0.5, 0.5], [0, 0]])
    assert _overflow.farthest(weights, scores) < 1
    assert _overflow.farthest(weights + 8 * 2.0**-52 * (weights == 0.5), scores) == pytest.approx(8, abs=1)
    assert np.isnan(_overflow.farthest(weights[2:], scores[2:]))


def test_random_scores_fail_as_expected(numbers):
    """The largest of 512 is about 3.5 √d_k, and the limits are passed at d_k = 10, 630 and 40000."""
    bare = numbers.failed[BARE, FORMULA].mean(axis=-1)
    np.testing.assert_array_equal(bare[:, 1:], [[1, 1, 1], [0, 1, 1], [0, 0, 1]])
    assert bare[HALF, 0] < 0.3
    assert (numbers.failed[ROOT, FORMULA] == 0).all()
    assert (numbers.failed[:, [SHIFTED, KERNELS]] == 0).all()


def test_errors(numbers):
    """Those of the kernels are never NaN; of the formula where all queries fail, and only there."""
    assert (numbers.error[[SHIFTED, KERNELS]] < 16).all()
    np.testing.assert_array_equal(np.isnan(numbers.error[FORMULA]), numbers.failed[BARE, FORMULA] == 1)


def test_scores_of_the_right_size():
    """Of variance d_k, whatever their query: half of the float32 queries fail where 3.5 √d_k is 88.7, at 630."""
    near = overflow(dims=(300, 1300), queries=200, calls=1, seeds=1).failed[BARE, FORMULA, SINGLE, :, 0]
    assert near[0] < 0.1 and near[1] > 0.9


def test_any_queries_and_keys_do(numbers):
    assert not numbers.not_finite.any() and not numbers.outside.any()
    assert (numbers.largest_score > [1e6, 1e25, 1e200]).all()
    assert np.isnan(numbers.too_wide)


@pytest.mark.parametrize(
    "wrong, found", [(np.nan, (5, 0)), (np.inf, (5, 5)), (100.0, (0, 5))], ids=["NaN", "infinite", "no mean"]
)
def test_fuzz_sees_what_is_wrong(monkeypatch, wrong, found):
    def broken(query, key, value, **options):
        return np.full((len(query), value.shape[1]), wrong), np.zeros(len(query))

    monkeypatch.setattr(_overflow.sdpa, "attention", broken)
    assert _overflow.fuzz(rng(0), 5, np.float32, 1e3)[:2] == found


def test_runs_are_alike_and_pass_their_seeds_through_progress(numbers):
    seen = []
    again = overflow(**SMALL, progress=lambda seeds: seen.extend(seeds) or seeds)
    assert seen == [0, 1]
    for one, other in zip(numbers, again):
        np.testing.assert_array_equal(one, other)


def test_verdicts(numbers):
    assert verdicts(_overflow, numbers) == [HELD, HELD, HELD, PARTLY, HELD, PARTLY, HELD]


FALSIFIED = {  # number of the finding: the verdict, and the numbers that give it
    "elsewhere": (0, FALSE, lambda n: dict(highest=n.highest + 1)),
    "near, as said": (0, PARTLY, lambda n: dict(highest=n.highest * np.array([1, 1.00001, 1]))),
    "sums no earlier": (1, FALSE, lambda n: dict(highest_equal=np.tile(n.highest[:, None], 3))),
    "nothing below": (2, FALSE, lambda n: dict(below=n.below & False)),
    "none overflows": (3, FALSE, lambda n: dict(failed=n.failed * 0)),
    "all overflow": (3, HELD, lambda n: dict(failed=changed(n.failed, (BARE, FORMULA), 1))),
    "float16 is no cure": (4, PARTLY, lambda n: dict(failed=changed(n.failed, (ROOT, FORMULA, HALF), 0.1))),
    "no cure": (4, FALSE, lambda n: dict(failed=changed(n.failed, (ROOT, FORMULA), 0.1))),
    "kernels": (5, HELD, lambda n: dict(too_wide=1.0)),
    "no kernels": (5, FALSE, lambda n: dict(not_finite=np.array([0, 1, 0]))),
    "no means": (5, FALSE, lambda n: dict(outside=np.array([0, 0, 1]))),
    "no kernels at random": (5, FALSE, lambda n: dict(failed=changed(n.failed, (BARE, KERNELS, DOUBLE, 0), 0.1))),
    "kernels are off": (6, PARTLY, lambda n: dict(error=changed(n.error, (KERNELS, SINGLE, 0), 40))),
    "all are off": (6, FALSE, lambda n: dict(error=n.error + 40)),
}


@pytest.mark.parametrize("finding, verdict, change", FALSIFIED.values(), ids=FALSIFIED)
def test_falsified(numbers, finding, verdict, change):
    assert verdicts(_overflow, numbers._replace(**change(numbers)))[finding] == verdict


def test_first_failed(numbers):
    np.testing.assert_array_equal(_overflow.first_failed(numbers, BARE), [64, 4096, 262144])
    np.testing.assert_array_equal(_overflow.first_failed(numbers, ROOT), [np.inf] * 3)
    turned = numbers._replace(dims=numbers.dims[::-1], failed=numbers.failed[:, :, :, ::-1])
    np.testing.assert_array_equal(_overflow.first_failed(turned, BARE), [64, 4096, 262144])


def test_tables_are_even(numbers):
    for table in _overflow.tables(numbers):
        assert len(table.rows) >= 3 and {len(row) for row in table.rows} == {len(table.header)}


def test_figures_draw(numbers):
    pytest.importorskip("matplotlib")
    for figure in _overflow.EXPERIMENT.figures:
        drawn = figure.draw(numbers)
        drawn.savefig(io.BytesIO(), format="svg")
        assert len(drawn.axes[0].lines) >= 4 and figure.caption


@pytest.mark.parametrize("wrong", [dict(dims=()), dict(dims=(0,)), dict(keys=1), dict(calls=0), dict(seeds=0)], ids=str)
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        overflow(**wrong)
