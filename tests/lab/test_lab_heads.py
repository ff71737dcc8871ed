"""The experiments on the size of a head and on cosines, at reduced sizes."""

import io

import numpy as np
import pytest
from support.draw import rng
from support.experiments import scaled, verdicts

from sdpa import reference
from sdpa.lab import _cosine, _heads
from sdpa.lab._cosine import FIXED, NORMED, ROOT, cosine
from sdpa.lab._experiment import FALSE, HELD, PARTLY
from sdpa.lab._heads import BARE, MODEL, heads
from sdpa.lab._measures import sharpness

HEADS = dict(counts=(1, 12, 96), width=1536, keys=256, projected=12, seeds=6)
COSINE = dict(dims=(1, 16, 128, 2048), keys=256, factors=(1, 4, 16), seeds=6)


@pytest.fixture(scope="module")
def split():
    return heads(**HEADS)


@pytest.fixture(scope="module")
def angles():
    return cosine(**COSINE)


@pytest.mark.parametrize("module, name", [(_heads, "split"), (_cosine, "angles")])
def test_figures_draw(module, name, request):
    pytest.importorskip("matplotlib")
    numbers = request.getfixturevalue(name)
    for figure in module.EXPERIMENT.figures:
        drawn = figure.draw(numbers)
        drawn.savefig(io.BytesIO(), format="svg")
        assert drawn.axes[0].lines and figure.caption


@pytest.mark.parametrize("module, name", [(_heads, "split"), (_cosine, "angles")])
def test_tables_are_even(module, name, request):
    for table in module.EXPERIMENT.tables(request.getfixturevalue(name)):
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}


@pytest.mark.parametrize(
    "run, options",
    [(heads, dict(counts=(2, 4), width=64, projected=4)), (cosine, dict(dims=(4, 16), queries=8))],
    ids=["heads", "cosine"],
)
def test_runs_are_alike_and_pass_their_seeds_through_progress(run, options):
    seen = []

    def progress(items):
        seen.extend(items)
        return iter(items)

    for one, other in zip(run(**options, seeds=3, progress=progress), run(**options, seeds=3)):
        np.testing.assert_array_equal(one, other)
    assert len(seen) == 3


# Heads.


def test_heads_of_the_oracle():
    numbers, normal = heads(counts=(4,), width=64, keys=40, queries=8, projected=4, seeds=1), rng(0)
    query, key = normal.standard_normal((8, 16), np.float32), normal.standard_normal((40, 16), np.float32)
    assert numbers.dims.tolist() == [16]
    assert numbers.variance[0, 0] == pytest.approx((query.astype(float) @ key.T).var(), rel=1e-5)
    for i, scale in enumerate((1, 1 / 4, 1 / 8)):
        exact = sharpness(reference.attention_weights(query, key, scale=scale))
        found = numbers.largest[i, 0, 0], numbers.effective[i, 0, 0]
        np.testing.assert_allclose(found, [exact.largest.mean(), exact.effective.mean()], rtol=1e-5)


def test_variance_is_the_size_of_a_head(split):
    """The mean square length of 384 queries of size 16 is 16 give or take 2 %, of longer ones less."""
    assert split.dims.tolist() == [1536, 128, 16]
    np.testing.assert_allclose(split.variance.mean(axis=-1), split.dims, rtol=0.06)
    squares = _heads.scaled_variance(split).mean(axis=-1)
    np.testing.assert_allclose(squares[ROOT + 1], 1, rtol=0.06)
    np.testing.assert_allclose(squares[MODEL], 1 / split.heads, rtol=0.06)


def test_sharpness_of_heads(split):
    """N e^(-s²/2) keys count, s² = 1 and 1/heads; with one head the two scales are one."""
    share = split.effective.mean(axis=-1) / split.keys
    np.testing.assert_allclose(share[_heads.ROOT], np.exp(-0.5), rtol=0.05)
    np.testing.assert_allclose(share[MODEL, 1:], np.exp(-0.5 / split.heads[1:]), rtol=0.005)
    np.testing.assert_array_equal(split.largest[MODEL, 0], split.largest[_heads.ROOT, 0])


def test_projection(split):
    """6 times 2 heads of 64 x 128 elements with variance 1, which share x, of 64 x 1536, and 12 times 64² products."""
    np.testing.assert_allclose(split.element_variance.mean(axis=-1), 1, rtol=0.03)
    assert split.projected_variance.mean() == pytest.approx(128, rel=0.06)


def test_numbers_of_tables():
    given = 0.00131, 1.0021, 127.7447, 1025.36, 12313.47
    assert [_heads.four_digits(x) for x in given] == ["0.0013", "1.002", "127.7", "1025", "12313"]


def test_verdicts_of_heads(split):
    assert verdicts(_heads, split) == [HELD] * 5


FALSIFIED = {  # number of the finding: the verdict, and the numbers that give it
    "variance of the model": (0, FALSE, lambda n: dict(variance=np.full_like(n.variance, n.width))),
    "sharper with fewer": (1, FALSE, lambda n: dict(effective=scaled(n.effective, (_heads.ROOT, 0), 0.5))),
    "sharp by √d": (2, PARTLY, lambda n: dict(effective=scaled(n.effective, MODEL, 0.5))),
    "sharp by √d, other variance": (
        2, FALSE, lambda n: dict(effective=scaled(n.effective, MODEL, 0.5), variance=n.variance * 2),
    ),
    "no saturation": (3, PARTLY, lambda n: dict(largest=scaled(n.largest, BARE, 0.5))),
    "saturation of small heads": (3, FALSE, lambda n: dict(largest=scaled(n.largest, BARE, 0.5)[:, ::-1])),
    "elements of other variance": (4, PARTLY, lambda n: dict(element_variance=n.element_variance * 1.2)),
    "and products": (
        4, FALSE,
        lambda n: dict(element_variance=n.element_variance * 1.2, projected_variance=n.projected_variance * 1.4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("finding, verdict, change", FALSIFIED.values(), ids=FALSIFIED)
def test_falsified_heads(split, finding, verdict, change):
    assert verdicts(_heads, split._replace(**change(split)))[finding] == verdict


@pytest.mark.parametrize("options", [dict(counts=(12, 7)), dict(projected=7)], ids=str)
def test_heads_that_do_not_divide(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} has 7 heads: width, which is 12288, must be"):
        heads(**options)


@pytest.mark.parametrize("wrong", [dict(counts=(0,)), dict(width=0), dict(keys=1), dict(projected=0), dict(seeds=0)])
def test_wrong_sizes_of_heads(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        heads(**wrong)


# Cosines.


def test_cosines(angles):
    """Root mean square 1/√d_k, exactly 1 at d_k = 1.  The cosines of 64 queries and 256 keys are uncorrelated: the mean
    of 6 times so many is 0 give or take their deviation / √(6 · 64 · 256)."""
    root = np.sqrt(angles.dims)
    np.testing.assert_allclose(angles.spread.mean(axis=-1) * root, 1, rtol=0.02)
    np.testing.assert_allclose(angles.spread[0], 1, rtol=1e-6)
    np.testing.assert_allclose(angles.mean.mean(axis=-1) * root, 0, atol=4 / np.sqrt(6 * 64 * 256))
    assert angles.mismatch < 1e-6


def test_lengths(angles):
    """Mean √(2/π) at d_k = 1, and √d_k (1 - 1/(4 d_k)) from then on; variance of the lengths 1/2 (1 - 1/(4 d_k))."""
    dims = angles.dims[1:]
    assert angles.length[0].mean() == pytest.approx(np.sqrt(2 / np.pi), rel=0.06)
    np.testing.assert_allclose(angles.length[1:].mean(axis=-1), 1 - 1 / (4 * dims), rtol=0.02)
    np.testing.assert_allclose(angles.length_spread[1:].mean(axis=-1) * np.sqrt(2 * dims), 1, rtol=0.06)


def test_sharpness_of_rules(angles):
    """N e^(-s²/2) keys count; s = 1 for the first two, 10/√d_k for the third."""
    share = angles.effective.mean(axis=-1) / angles.keys
    np.testing.assert_allclose(share[ROOT, 2:], np.exp(-0.5), rtol=0.04)
    np.testing.assert_allclose(share[NORMED, 2:], np.exp(-0.5), rtol=0.04)
    np.testing.assert_allclose(share[FIXED, 2:], np.exp(-50 / angles.dims[2:]), rtol=0.04)


def test_aligned_keys(angles):
    """e^t beside N numbers with mean e^(1/2), t = √d_k; and no weight above 1 / (1 + (N - 1) e^(-2t))."""
    expected = 1 / (1 + (angles.keys + 63) * np.exp(0.5 - np.sqrt(angles.dims[1:])))
    np.testing.assert_allclose(angles.aligned[NORMED, 1:].mean(axis=-1), expected, rtol=0.1)
    bound = 1 / (1 + (angles.keys - 1) * np.exp(-2 * np.sqrt(angles.dims)))
    assert (angles.largest[NORMED] <= bound[:, None]).all()


def test_lengths_have_no_influence_on_cosines(angles):
    """Factors that are powers of 2 change no bit."""
    for field in (angles.grown_largest, angles.grown_effective):
        for rule in (NORMED, FIXED):
            np.testing.assert_array_equal(field[rule], field[rule, :1].repeat(3, axis=0))
    assert (angles.grown_effective[ROOT].mean(axis=-1) < [200, 2, 1.5]).all()
    assert (angles.grown_largest[ROOT, -1] > 0.95).all()


def test_growth_is_a_scale():
    """q and k times 3 are scores times 9."""
    numbers = cosine(dims=(4,), dim=16, keys=40, queries=8, factors=(3,), seeds=1)
    normal = rng(0)
    normal.standard_normal(48 * 4, np.float32)  # those of `dims`
    query, key = normal.standard_normal((8, 16), np.float32), normal.standard_normal((40, 16), np.float32)
    exact = sharpness(reference.attention_weights(query, key, scale=9 / 4)).effective.mean()
    assert numbers.grown_effective[ROOT, 0, 0] == pytest.approx(exact, rel=1e-4)


def test_temperature():
    cold, warm = (cosine(dims=(64,), seeds=1, temperature=t) for t in (1, 20))
    assert cold.effective[FIXED, 0, 0] > 10 * warm.effective[FIXED, 0, 0]
    fitting = cosine(dims=(64,), seeds=1, temperature=8)
    np.testing.assert_array_equal(fitting.effective[FIXED], fitting.effective[NORMED])


def test_verdicts_of_cosine(angles):
    assert verdicts(_cosine, angles) == [HELD] * 5 + [FALSE] * 2


TURNED = {
    "no identity": (0, FALSE, lambda n: dict(mismatch=0.1)),
    "other deviation": (1, PARTLY, lambda n: dict(spread=n.spread * 1.1)),
    "other deviation and mean": (1, FALSE, lambda n: dict(spread=n.spread * 1.1, mean=n.mean + 1)),
    "other lengths": (2, PARTLY, lambda n: dict(length=n.length * 2)),
    "lengths that spread": (2, FALSE, lambda n: dict(length=n.length * 2, length_spread=n.length_spread * 2)),
    "not the same": (3, FALSE, lambda n: dict(effective=scaled(n.effective, NORMED, 1.5))),
    "not the same at 1": (3, PARTLY, lambda n: dict(effective=scaled(n.effective, (NORMED, 0), 1.5))),
    "1/√d_k keeps": (4, PARTLY, lambda n: dict(grown_effective=scaled(n.grown_effective, ROOT, 100))),
    "normalising does not": (4, PARTLY, lambda n: dict(grown_effective=scaled(n.grown_effective, (NORMED, -1), 0.5))),
    "any temperature": (5, HELD, lambda n: dict(effective=np.full_like(n.effective, 100))),
    "bounded": (6, HELD, lambda n: dict(aligned=n.aligned * 0.5)),
}


@pytest.mark.parametrize("finding, verdict, change", TURNED.values(), ids=TURNED)
def test_falsified_cosine(angles, finding, verdict, change):
    assert verdicts(_cosine, angles._replace(**change(angles)))[finding] == verdict


@pytest.mark.parametrize("dims", [(4,), (64,), (128, 1)], ids=str)
def test_any_dims(dims):
    numbers = cosine(dims=dims, keys=16, queries=8, seeds=1, factors=(2,))
    assert all(finding.measured for finding in _cosine.EXPERIMENT.findings(numbers))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(dims=(0,)),
        dict(keys=1),
        dict(temperature=0.0),
        dict(factors=(1, 0)),
        dict(factors=()),
        dict(dim=0),
        dict(seeds=0),
    ],
)
def test_wrong_options_of_cosine(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        cosine(**wrong)
