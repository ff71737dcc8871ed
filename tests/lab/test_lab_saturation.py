"""The experiments on saturation and gradients, at reduced sizes."""

import io

import numpy as np
import pytest
from support.draw import rng
from support.experiments import scaled, verdicts

from sdpa import reference
from sdpa.lab import _gradients, _saturation
from sdpa.lab._experiment import FALSE, HELD, PARTLY
from sdpa.lab._gradients import BARE, LONGEST, MEAN, MEDIAN, ROOT, gradients, softmax_slopes
from sdpa.lab._measures import freezing, gap_rate, judged, sharpness
from sdpa.lab._saturation import FLAT, MODEL, saturation

SATURATION = dict(dims=(1, 16, 64, 4096), keys=128, queries=64, seeds=6)
GRADIENTS = dict(dims=(1, 16, 128, 4096), tokens=128, seeds=6)


@pytest.fixture(scope="module")
def sharp():
    return saturation(**SATURATION)


@pytest.fixture(scope="module")
def sizes():
    return gradients(**GRADIENTS)


# What the experiments share.


@pytest.mark.parametrize(
    "weights, largest, count",
    [([0.25] * 4, 0.25, 4), ([0.0, 1.0, 0.0], 1, 1), ([0.5, 0.0, 0.5], 0.5, 2)],
    ids=["equal", "one", "two"],
)
def test_sharpness(weights, largest, count):
    np.testing.assert_allclose(sharpness(weights), [largest, np.log(count), count, count], rtol=1e-15)


def test_sharpness_of_unequal_weights():
    """-(3/4) ln(3/4) - (1/4) ln(1/4) = ln 4 - (3/4) ln 3, and 9/16 + 1/16 = 5/8."""
    entropy = np.log(4) - 0.75 * np.log(3)
    np.testing.assert_allclose(sharpness([0.75, 0.25]), [0.75, entropy, np.exp(entropy), 1.6], rtol=1e-15)


def test_gap_rate():
    """The difference of two normal numbers has variance 2, and its absolute value the density 2 / √(4π) at 0; of three,
    6 ∫ φ² Φ = 3 ∫ φ², for Φ - 1/2 is odd."""
    assert gap_rate(2) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-9)
    assert gap_rate(3) == pytest.approx(1.5 / np.sqrt(np.pi), rel=1e-9)
    best = np.sort(rng(0).standard_normal((40000, 256), np.float32), axis=-1)[:, -2:]
    share = np.mean(best[:, 1] - best[:, 0] < 0.05)  # 1 - e^(-0.05 r) of 40000: 5200 pairs, give or take 70
    assert -np.log(1 - share) / 0.05 == pytest.approx(gap_rate(256), rel=0.05)


def test_freezing():
    """There N e^(-s²/2) keys are one."""
    assert 512 * np.exp(-(freezing(512) ** 2) / 2) == pytest.approx(1)


def test_judged():
    assert [judged(True, True), judged(True, np.False_), judged(False), judged(0 > 1, 1 > 2)] == [
        HELD, PARTLY, FALSE, FALSE,
    ]  # fmt: skip


# Both experiments.


@pytest.mark.parametrize("module", [_saturation, _gradients])
def test_runs_are_alike_and_pass_their_seeds_through_progress(module):
    options = dict(dims=(4, 16), seeds=3) | ({"queries": 8} if module is _saturation else {"tokens": 16})
    seen = []

    def progress(items):
        seen.extend(items)
        return iter(items)

    first, again = module.EXPERIMENT.run(**options, progress=progress), module.EXPERIMENT.run(**options)
    assert len(seen) == 3
    for one, other in zip(first, again):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dims", [(64,), (4096, 1, 16)], ids=["one", "unsorted"])
def test_any_dims(dims):
    for module, options in (_saturation, {"keys": 32}), (_gradients, {"tokens": 16}):
        numbers = module.EXPERIMENT.run(dims=dims, seeds=1, **options)
        assert all(finding.measured for finding in module.EXPERIMENT.findings(numbers))
        assert [row[0] for row in module.EXPERIMENT.tables(numbers)[0].rows] == [str(dim) for dim in dims]


@pytest.mark.parametrize("wrong", [dict(dims=(0, 4)), dict(seeds=0), dict(keys=1), dict(queries=0), dict(heads=0)])
def test_wrong_sizes_of_saturation(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        saturation(**wrong)


@pytest.mark.parametrize("wrong", [dict(dims=(-1,)), dict(seeds=0), dict(tokens=1)])
def test_wrong_sizes_of_gradients(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        gradients(**wrong)


@pytest.mark.parametrize("module, name", [(_saturation, "sharp"), (_gradients, "sizes")])
def test_figures_draw(module, name, request):
    pytest.importorskip("matplotlib")
    numbers = request.getfixturevalue(name)
    for figure in module.EXPERIMENT.figures:
        drawn = figure.draw(numbers)
        drawn.savefig(io.BytesIO(), format="svg")
        assert drawn.axes[0].lines and figure.caption


@pytest.mark.parametrize("module, name", [(_saturation, "sharp"), (_gradients, "sizes")])
def test_tables_are_even(module, name, request):
    for table in module.EXPERIMENT.tables(request.getfixturevalue(name)):
        assert len(table.rows) == 4 and {len(row) for row in table.rows} == {len(table.header)}


# Saturation.


def test_saturation_is_that_of_the_oracle():
    numbers = saturation(dims=(16,), keys=40, queries=8, heads=4, seeds=1)
    query, key = (
        rng(0).standard_normal(48 * 16, np.float32).reshape(48, 16)[rows] for rows in (slice(8), slice(8, 48))
    )
    for scale, *found in zip((1, 1 / 4, 1 / 16, 1 / 8), *(x[:, 0, 0] for x in numbers[3:7])):
        exact = sharpness(reference.attention_weights(query, key, scale=scale))
        np.testing.assert_allclose(found, [x.mean() for x in exact], rtol=1e-5)


def test_scales_that_are_the_same(sharp):
    """At d_k = 1 all of 1, 1/√d_k, 1/d_k; with one head 1/√d_k and 1/√d_model."""
    for field in (sharp.largest, sharp.entropy, sharp.effective, sharp.inverse):
        np.testing.assert_array_equal(field[BARE, 0], field[ROOT, 0])
        np.testing.assert_array_equal(field[BARE, 0], field[FLAT, 0])
    one = saturation(dims=(16,), keys=32, queries=8, heads=1, seeds=1)
    np.testing.assert_array_equal(one.largest[MODEL], one.largest[ROOT])


def test_expected_sharpness(sharp):
    """Keys that count: N e^(-s²/2), with s = 1, 1/√d_k and 1/√8.  The rest is of the order e^(s²)/N, here 2 %."""
    share = sharp.effective.mean(axis=-1) / sharp.keys
    np.testing.assert_allclose(share[ROOT, 1:], np.exp(-0.5), rtol=0.05)
    np.testing.assert_allclose(share[FLAT, 1:], np.exp(-0.5 / sharp.dims[1:]), rtol=0.005)
    np.testing.assert_allclose(share[MODEL, 1:], np.exp(-1 / 16), rtol=0.01)
    inverse = sharp.inverse.mean(axis=-1) / sharp.keys
    np.testing.assert_allclose(inverse[MODEL, 1:], np.exp(-1 / 8), rtol=0.01)


def test_frozen_weights(sharp):
    """At d_k = 4096: the entropy is (π²/6) r/s, 1 - Σp² is r/s and 1 - p is ln 2 · r/s.  Some 40 of 384 queries, which
    share keys, make that up: it is right to a third."""
    left = gap_rate(sharp.keys) / np.sqrt(4096)
    assert sharp.entropy[BARE, -1].mean() == pytest.approx(np.pi**2 / 6 * left, rel=0.35)
    assert 1 - sharp.largest[BARE, -1].mean() == pytest.approx(np.log(2) * left, rel=0.35)


def test_law_of_small_spreads(sharp):
    small = sharp.spreads <= 1
    lost = np.log(sharp.keys) - sharp.spread_entropy[small].mean(axis=-1)
    np.testing.assert_allclose(lost, sharp.spreads[small] ** 2 / 2, rtol=0.07)
    beyond = sharp.spreads > freezing(sharp.keys)
    assert (sharp.spread_entropy[beyond] > 0).all()  # where the law says less than 0


def test_reach():
    spreads, expected = np.array([1.0, 2, 3, 4]), np.ones(4)
    assert _saturation.reach(spreads, np.array([1.05, 0.95, 1.2, 1]), expected) == 2
    assert _saturation.reach(spreads, expected, expected) == 4
    assert _saturation.reach(spreads, np.array([2, 1, 1, 1]), expected) == 0


def test_verdicts_of_saturation(sharp):
    assert verdicts(_saturation, sharp) == [HELD, PARTLY, HELD, HELD, PARTLY]


FALSIFIED = {  # number of the finding: the verdict, and the numbers that give it
    "no saturation": (0, FALSE, lambda n: dict(largest=scaled(n.largest, (BARE, -1), 0.01))),
    "less saturation": (0, PARTLY, lambda n: dict(largest=scaled(n.largest, (BARE, -1), 0.9))),
    "other sharpness": (1, FALSE, lambda n: dict(effective=scaled(n.effective, ROOT, 1.3))),
    "even at 1": (1, HELD, lambda n: dict(effective=np.full_like(n.effective, n.keys * np.exp(-0.5)))),
    "not flat": (2, FALSE, lambda n: dict(effective=scaled(n.effective, FLAT, 0.1))),
    "as flat at 4096 only": (2, PARTLY, lambda n: dict(effective=scaled(n.effective, (FLAT, 1), 0.1))),
    "not flat by heads": (3, FALSE, lambda n: dict(effective=scaled(n.effective, MODEL, 0.1))),
    "flat by other heads": (3, PARTLY, lambda n: dict(heads=2)),
    "no law": (4, FALSE, lambda n: dict(spread_entropy=n.spread_entropy * 0.5)),
    "law throughout": (4, HELD, lambda n: dict(spread_entropy=np.log(n.keys) - n.spreads[:, None] ** 2 / 2)),
}


@pytest.mark.parametrize("finding, verdict, change", FALSIFIED.values(), ids=FALSIFIED)
def test_falsified_saturation(sharp, finding, verdict, change):
    assert verdicts(_saturation, sharp._replace(**change(sharp)))[finding] == verdict


# Gradients.


def test_softmax_slopes():
    weights = rng(0).dirichlet(np.ones(12), size=20)
    product, norm = softmax_slopes(weights)
    jacobian = np.einsum("mi,ij->mij", weights, np.eye(12)) - weights[:, :, None] * weights[:, None]
    np.testing.assert_allclose(norm, np.linalg.norm(jacobian, axis=(1, 2)), rtol=1e-12)
    np.testing.assert_allclose(product, weights.max(axis=-1) * (1 - weights.max(axis=-1)), rtol=1e-12)


def test_softmax_slopes_by_hand():
    """Two equal weights: four elements of ±1/4.  N equal ones: N (1/N - 1/N²)² + N (N - 1) / N⁴ = (N - 1) / N².  One of
    nearly 1, of which 1 - p would be 0: ±1e-20."""
    weights = np.array([[0.5, 0.5, 0, 0], [0.25] * 4, [1, 1e-20, 0, 0], [1, 0, 0, 0]])
    product, norm = softmax_slopes(weights)
    np.testing.assert_allclose(product, [1 / 4, 3 / 16, 1e-20, 0], rtol=1e-15)
    np.testing.assert_allclose(norm, [1 / 2, np.sqrt(3) / 4, 2e-20, 0], rtol=1e-15)


def test_lengths_are_those_of_the_oracle():
    numbers, normal = gradients(dims=(16,), tokens=24, seeds=1), rng(0)
    query, key = normal.standard_normal((2, 24, 16))
    value, grad_out = normal.standard_normal((2, 24, 64))
    grad_out /= np.linalg.norm(grad_out, axis=-1, keepdims=True)
    for i, scale in enumerate((1, 0.25)):
        weights = reference.attention_weights(query, key, scale=scale)
        by_weight = grad_out @ value.T
        by_score = weights * (by_weight - (weights * by_weight).sum(axis=-1, keepdims=True))
        for found, grad in (numbers.query, scale * by_score @ key), (numbers.key, scale * by_score.T @ query):
            lengths = np.linalg.norm(grad, axis=-1)
            expected = lengths.mean(), np.median(lengths), lengths.max()
            np.testing.assert_allclose(found[:, i, 0, 0], expected, rtol=1e-10)


def test_scaled_sizes(sizes):
    """‖J‖² = Σp² - 2Σp³ + (Σp²)², with Σp² about e/N and Σp³ about e³/N² but for terms of order 1/N of that; and every
    gradient is about as long."""
    inverse = np.e / sizes.tokens
    norm = np.sqrt(inverse - 2 * np.e**3 / sizes.tokens**2 + inverse**2)
    for field in (sizes.jacobian, sizes.query, sizes.key):
        np.testing.assert_allclose(field[MEAN, ROOT, 1:].mean(axis=-1), norm, rtol=0.09)


def test_scales_are_one_at_1(sizes):
    for field in sizes[2:]:
        np.testing.assert_array_equal(field[:, BARE, 0], field[:, ROOT, 0])


def test_bare_sizes(sizes):
    """At d_k = 4096 the mean norm of the Jacobian is r/s, the median about 2 · 2^(-s/r), the mean length of dL/dQ is
    r √(2/π); of 768 queries about 60 make the means, and the median's exponent is right to a fifth."""
    rate = gap_rate(sizes.tokens)
    assert sizes.jacobian[MEAN, BARE, -1].mean() == pytest.approx(rate / 64, rel=0.3)
    assert np.log2(sizes.jacobian[MEDIAN, BARE, -1] / 2).mean() == pytest.approx(-64 / rate, rel=0.2)
    assert sizes.query[MEAN, BARE, -1].mean() == pytest.approx(rate * np.sqrt(2 / np.pi), rel=0.3)
    assert (sizes.jacobian[LONGEST] <= 0.5).all() and (sizes.product[LONGEST] <= 0.25).all()


def test_verdicts_of_gradients(sizes):
    assert verdicts(_gradients, sizes) == [HELD, PARTLY, PARTLY, PARTLY, FALSE, HELD, HELD]


VANISHED = {
    "depends on d_k": (0, FALSE, lambda n: {f: scaled(getattr(n, f), np.s_[:, ROOT, -1], 2) for f in n._fields[2:]}),
    "dL/dK depends on d_k": (0, PARTLY, lambda n: dict(key=scaled(n.key, np.s_[:, ROOT, -1], 2))),
    "product held": (1, FALSE, lambda n: dict(product=scaled(n.product, np.s_[:, BARE, -1], 1e9))),
    "product vanished": (1, HELD, lambda n: dict(product=scaled(n.product, np.s_[:, BARE, -1], 1e-3))),
    "Jacobian held": (2, FALSE, lambda n: dict(jacobian=scaled(n.jacobian, np.s_[:, BARE, -1], 1e9))),
    "Jacobian vanished": (2, HELD, lambda n: dict(jacobian=scaled(n.jacobian, np.s_[:, BARE, -1], 1e-3))),
    "dL/dQ held": (3, FALSE, lambda n: dict(query=scaled(n.query, np.s_[:, BARE, -1], 1e9))),
    "dL/dQ vanished": (3, HELD, lambda n: dict(query=scaled(n.query, np.s_[:, BARE, -1], 1e-3))),
    "dL/dK vanished": (4, HELD, lambda n: dict(key=scaled(n.key, np.s_[:, BARE, -1], 1e-3))),
    "median of dL/dK vanished": (4, PARTLY, lambda n: dict(key=scaled(n.key, np.s_[MEDIAN, BARE, -1], 1e-3))),
    "mean fell": (5, FALSE, lambda n: dict(query=scaled(n.query, np.s_[MEAN, BARE], 0.5))),
    "none too long": (6, FALSE, lambda n: dict(query=scaled(n.query, np.s_[LONGEST, BARE], 1e-3))),
}


@pytest.mark.parametrize("finding, verdict, change", VANISHED.values(), ids=VANISHED)
def test_falsified_gradients(sizes, finding, verdict, change):
    assert verdicts(_gradients, sizes._replace(**change(sizes)))[finding] == verdict


def test_numbers_of_tables():
    given = 0.04, 0.1, 2.1, 51.3, 6.21e-7
    assert [_gradients.two_digits(x) for x in given] == ["0.040", "0.10", "2.1", "51", "6.2e-07"]


def test_where_gradients_fall_below():
    """(2 scales, D, seeds); from the end on, not at a dip."""
    bare, root = np.array([2, 0.5, 2, 0.5, 0.1]), np.ones(5)
    sizes = np.stack([bare, root])[:, :, None]
    dims = np.array([1, 2, 4, 8, 16])
    assert _gradients.first_below(sizes, dims) == 8
    assert _gradients.first_below(sizes[::-1], dims) is None
    assert _gradients.first_below(sizes[:, ::-1], dims[::-1]) == 8
