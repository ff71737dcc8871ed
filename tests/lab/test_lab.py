"""The laboratory: the numbers of its experiments, and its verdicts."""

import inspect

import numpy as np
import pytest

import sdpa
from sdpa import lab
from sdpa._report import drawing, statistics
from sdpa.lab import _sentence, _steps, _variance, _words
from sdpa.lab._experiment import FALSE, HELD, PARTLY, check_lists, check_sizes

BY_NAME = {experiment.name: experiment for experiment in lab.EXPERIMENTS}


def verdicts(experiment, numbers):
    return [finding.verdict for finding in experiment.findings(numbers)]


# Step by step.


@pytest.fixture(scope="module")
def steps():
    return lab.steps()


def test_steps_have_the_shapes_of_the_notes(steps):
    assert steps.tokens == ("Love", "Apple", "phones")
    expected = {
        "embeddings": (3, 512), "w_query": (512, 64), "w_key": (512, 64), "w_value": (512, 64), "query": (3, 64),
        "key": (3, 64), "value": (3, 64), "dots": (3, 3), "scores": (3, 3), "weights": (3, 3), "out": (3, 64),
        "head_weights": (8, 3, 3), "heads": (8, 3, 64), "concatenated": (3, 512), "w_out": (512, 512),
        "projected": (3, 512),
    }  # fmt: skip
    assert {name: getattr(steps, name).shape for name in expected} == expected


def test_steps_follow_from_each_other(steps):
    exact = {name: value.astype(np.float64) for name, value in steps._asdict().items() if hasattr(value, "astype")}
    close = dict(atol=1e-4, rtol=0)  # float32 sums of 512 products
    for made, matrix in (("query", "w_query"), ("key", "w_key"), ("value", "w_value")):
        np.testing.assert_allclose(steps._asdict()[made], exact["embeddings"] @ exact[matrix], **close)
    np.testing.assert_allclose(steps.scores, exact["query"] @ exact["key"].T / 8, **close)
    np.testing.assert_allclose(steps.weights, np.exp(steps.scores) / np.exp(steps.scores).sum(1)[:, None], **close)
    np.testing.assert_allclose(steps.out, sdpa.reference.attention(steps.query, steps.key, steps.value), **close)
    np.testing.assert_allclose(steps.heads[0], steps.out, **close)
    np.testing.assert_array_equal(steps.concatenated[:, 64:128], steps.heads[1])
    np.testing.assert_allclose(steps.projected, exact["concatenated"] @ exact["w_out"], **close)


def test_steps_findings(steps):
    experiment = BY_NAME["steps"]
    assert verdicts(experiment, steps) == [HELD] * 4
    assert verdicts(experiment, steps._replace(difference=0.1)) == [FALSE, HELD, HELD, HELD]
    assert verdicts(experiment, steps._replace(weights=steps.weights * 1.1)) == [HELD, FALSE, HELD, HELD]
    assert verdicts(experiment, steps._replace(out=steps.out[:2])) == [HELD, HELD, FALSE, HELD]
    assert verdicts(experiment, steps._replace(projected_difference=0.1)) == [HELD, HELD, HELD, FALSE]


def test_first_numbers():
    assert _steps.start(np.array([[-0.0004, 1.25], [-2.0, 9]])) == "0.000, 1.250, −2.000"


def test_steps_options():
    numbers = lab.steps(width=24, heads=3, seed=7)
    assert numbers.heads.shape == (3, 3, 8) and numbers.projected.shape == (3, 24)
    assert not np.array_equal(numbers.weights, lab.steps(width=24, heads=3, seed=8).weights)
    with pytest.raises(ValueError, match="width is 10: it must be a multiple of heads, which is 4"):
        lab.steps(width=10, heads=4)


def test_embeddings_follow_their_rule():
    """The CRC-32 of "123456789" is the check value by which descriptions of the code are recognised."""
    digits, again, other = _words.embed(["123456789", "123456789", "Love"], 512)
    np.testing.assert_array_equal(digits, again)
    np.testing.assert_array_equal(digits, np.random.default_rng(0xCBF43926).standard_normal(512, np.float32))
    assert abs(np.corrcoef(digits, other)[0, 1]) < 5 / 512**0.5


# Variance.


@pytest.fixture(scope="module")
def variance():
    return lab.variance(dims=(1, 16, 256), products=1000, seeds=6)


def test_variance_is_the_dimension(variance):
    # The variance of a sample of n has the relative error √(2/n), √(8/n) at d_k = 1: 0.037 at most of 6000; 5 of them.
    np.testing.assert_allclose(variance.bare.mean / variance.dims, 1, atol=0.19)
    np.testing.assert_allclose(variance.scaled.mean, variance.bare.mean / variance.dims, rtol=1e-5)
    assert (variance.bare.low < variance.bare.mean).all() and (variance.bare.mean < variance.bare.high).all()


def test_variance_of_multiples(variance):
    np.testing.assert_allclose(variance.by_factor.mean, np.square(variance.factors), rtol=1e-5)


def test_variance_where_assumptions_fail(variance):
    np.testing.assert_allclose(variance.shifted.mean, 1.5, atol=0.25)  # (1 + 1/4)² - 1/16
    np.testing.assert_allclose(variance.correlated.mean, [1, 0.99 + 0.16, 0.99 + 2.56], rtol=0.2)


def test_histograms_are_densities(variance):
    # Of what lies within 4 units: all but a share of 6e-5 of a normal one, 4e-3 of a product of two.
    np.testing.assert_allclose((variance.scaled_density * np.diff(variance.scaled_edges)).sum(1), 1, rtol=1e-9)
    np.testing.assert_allclose((variance.density * np.diff(variance.edges)).sum(1), 1, rtol=1e-9)
    middle = (variance.scaled_edges[1:] + variance.scaled_edges[:-1]) / 2
    normal = np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(variance.scaled_density[2], normal, atol=0.08)  # 5 √(0.4 / 6000 / width 0.1)... of 0.026


def test_dot_is_the_product():
    q, k = np.random.default_rng(0).standard_normal((2, 50, 33), np.float32)
    exact = (q.astype(float) * k).sum(axis=1)
    np.testing.assert_allclose(_variance.dot(q, k, scale=1), exact, atol=1e-5)
    np.testing.assert_allclose(_variance.dot(q, k), exact / 33**0.5, atol=1e-5)


def test_variance_findings(variance):
    experiment = BY_NAME["variance"]
    assert verdicts(experiment, variance) == [HELD, HELD, HELD, FALSE, FALSE]
    double = statistics.Band(*(2 * x for x in variance.bare))
    assert verdicts(experiment, variance._replace(bare=double))[0] == FALSE
    assert verdicts(experiment, variance._replace(scaled=variance.bare))[1] == FALSE
    assert verdicts(experiment, variance._replace(by_factor=double))[2] == FALSE
    assert verdicts(experiment, variance._replace(shifted=variance.scaled))[3] == HELD
    assert verdicts(experiment, variance._replace(correlated=variance.scaled))[4] == HELD


# Gaps.


@pytest.fixture(scope="module")
def gaps():
    return lab.gaps(keys=(2, 16, 500), points=33)


def test_gaps_to_the_digits_of_the_notes(gaps):
    percent = [[f"{100 * weight:.2f}" for weight in weights] for weights in gaps.weights]
    assert [f"{weight:.2f}" for weight in gaps.weights[0]] == ["0.98", "0.02"]
    assert percent[1] == ["26.89", "73.11"]
    assert percent[2] == ["0.01", "99.99"]
    assert percent[3] == ["100.00", "0.00", "0.00"]
    assert gaps.scores == ((7, 3), (4, 5), (1, 10), (25, 2, -3))


def test_largest_weight_by_gap(gaps):
    expected = 1 / (1 + np.subtract(gaps.keys, 1)[:, None] * np.exp(-gaps.gaps))
    np.testing.assert_allclose(gaps.largest, expected, rtol=1e-12)
    np.testing.assert_allclose(gaps.needed, np.log([1, 15, 499]))
    assert gaps.shifted < 1e-12
    assert gaps.leak == pytest.approx(1e12 * np.exp(-23), rel=1e-5)


def test_gaps_findings(gaps):
    experiment = BY_NAME["gaps"]
    assert verdicts(experiment, gaps) == [HELD, HELD, HELD, HELD, PARTLY, HELD, PARTLY]
    for i in range(4):
        wrong = [weights + 0.01 * (j == i) for j, weights in enumerate(gaps.weights)]
        assert verdicts(experiment, gaps._replace(weights=tuple(wrong)))[i] == FALSE
    one_hot = (*gaps.weights[:3], np.array([1.0, 0, 0]))
    assert verdicts(experiment, gaps._replace(weights=one_hot, leak=0.0))[4] == HELD
    assert verdicts(experiment, gaps._replace(shifted=0.1))[5] == FALSE
    assert verdicts(experiment, gaps._replace(largest=np.ones_like(gaps.largest)))[6] == HELD
    assert verdicts(experiment, gaps._replace(largest=np.zeros_like(gaps.largest)))[6] == FALSE


def test_gaps_options(gaps):
    assert lab.gaps(widest=3.0, points=4).gaps.tolist() == [0, 1, 2, 3]
    for widest in (0.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"widest is .*: it must be above 0, and finite"):
            lab.gaps(widest=widest)


# A sentence.


@pytest.fixture(scope="module")
def sentence():
    return lab.sentence()


def test_sentence_weights(sentence):
    assert " ".join(sentence.tokens) == "The dog chased the ball because it was fast"
    for weights in (sentence.bare, sentence.scaled):
        assert weights.shape == (4, 9, 9)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    # Both are softmaxes of the same scores, one divided by √64.
    bare, scaled = (np.log(np.maximum(w, 1e-30)) for w in (sentence.bare, sentence.scaled))
    gap = [x[0, 0] - x[0, 0, sentence.bare[0, 0].argmax()] for x in (bare, scaled)]
    np.testing.assert_allclose(gap[0], 8 * gap[1], rtol=1e-3, atol=1e-3)


def test_sentence_measures(sentence):
    assert (sentence.bare_largest.mean > sentence.scaled_largest.mean + 0.3).all()
    assert (sentence.bare_keys.mean < 2).all() and (sentence.scaled_keys.mean > 5).all()
    assert sentence.same_place == 1


def test_effective_keys():
    weights = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_allclose(_sentence.effective_keys(weights), [1, 2, 4])


def test_sentence_findings(sentence):
    experiment = BY_NAME["sentence"]
    assert verdicts(experiment, sentence)[:3] == [HELD, HELD, HELD]
    bare, scaled = sentence.bare_largest, sentence.scaled_largest
    assert verdicts(experiment, sentence._replace(bare_largest=scaled))[0] == FALSE
    assert verdicts(experiment, sentence._replace(scaled_largest=bare))[1] == FALSE
    assert verdicts(experiment, sentence._replace(same_place=0.9))[2] == FALSE
    for share, verdict in ((0.2, FALSE), (0.48, PARTLY), (0.9, HELD)):
        assert verdicts(experiment, sentence._replace(at_meant=share))[3] == verdict


# What all experiments have in common.


@pytest.mark.parametrize("given, error", [((0,), ValueError), ((), ValueError), ((1.5,), TypeError), (64, TypeError)])
def test_check_lists(given, error):
    with pytest.raises(error, match=r"dims is .*: (it|each) must"):
        check_lists(dims=given)


@pytest.mark.parametrize("given, error", [(1, ValueError), (2.0, TypeError), ((2,), TypeError)])
def test_check_sizes(given, error):
    with pytest.raises(error, match=r"keys is .*: it must be"):
        check_sizes(2, keys=given)


RULES = {
    "no dims": (lambda: lab.variance(dims=()), ValueError, "dims is empty"),
    "dims of 0": (lambda: lab.variance(dims=(4, 0)), ValueError, r"dims is \(4, 0\): each must be 1 or more"),
    "dims of text": (lambda: lab.variance(dims=(4, "8")), TypeError, "dims is .*: it must be a tuple of whole numbers"),
    "one seed": (lambda: lab.variance(seeds=1), ValueError, "seeds is 1: it must be 2 or more"),
    "half a seed": (lambda: lab.sentence(seeds=2.5), TypeError, "seeds is 2.5: it must be a whole number"),
    "true": (lambda: lab.steps(heads=True), TypeError, "heads is True"),
    "a seed below 0": (lambda: lab.steps(seed=-1), ValueError, "seed is -1: it must be 0 or more"),
    "a gap of text": (lambda: lab.gaps(widest="3"), TypeError, "widest is '3': it must be a number"),
    "a gap that is infinite": (lambda: lab.gaps(widest=np.inf), ValueError, "widest is inf: it must be above 0, and"),
    "one rate": (lambda: lab.training(rates=0.1), TypeError, "rates is 0.1: it must be a tuple of numbers"),
    "rates of text": (lambda: lab.training(rates=("1",)), TypeError, r"rates is \('1',\): it must be a tuple"),
    "a rate of NaN": (lambda: lab.training(rates=(np.nan,)), ValueError, r"rates is \(nan,\): each must be above 0"),
    "no factors": (lambda: lab.cosine(factors=()), ValueError, "factors is empty"),
    "one factor": (lambda: lab.cosine(factors=3), TypeError, "factors is 3: it must be a tuple of numbers"),
    "a temperature of True": (lambda: lab.cosine(temperature=True), TypeError, "temperature is True: it must be a"),
    "one key": (lambda: lab.gaps(keys=(1,)), ValueError, r"keys is \(1,\): each must be 2 or more"),
}


@pytest.mark.parametrize("call, error, text", RULES.values(), ids=RULES)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", BY_NAME)
def test_experiments_are_what_the_framework_expects(name):
    experiment = BY_NAME[name]
    assert getattr(lab, name) is experiment.run and name in lab.__all__
    parameters = inspect.signature(experiment.run).parameters
    assert parameters["progress"].default is iter
    assert all(one.kind is one.KEYWORD_ONLY for one in parameters.values())
    for default in experiment.options.values():
        numbers = default if isinstance(default, tuple) else (default,)
        assert numbers and {type(number) for number in numbers} <= {int, float}
    assert 1 <= len(experiment.figures) <= 5
    assert "\n" not in experiment.title and experiment.reason.lstrip().startswith("<p>")


@pytest.mark.parametrize("name", ["steps", "variance", "gaps", "sentence"])
def test_numbers_are_the_same_twice_and_progress_sees_the_loop(name, request):
    numbers, seen = request.getfixturevalue(name), []
    options = {
        "variance": dict(dims=(1, 16, 256), products=1000, seeds=6),
    }
    options["gaps"] = dict(keys=(2, 16, 500), points=33)
    again = BY_NAME[name].run(**options.get(name, {}), progress=lambda items: seen.extend(items) or items)
    assert len(seen) > 2
    for first, second in zip(numbers, again):
        np.testing.assert_equal(first, second)


@pytest.mark.parametrize("name", ["steps", "variance", "gaps", "sentence"])
def test_tables_and_figures(name, request):
    """Rows fit their header, and each figure draws something for the width of a phone."""
    numbers, experiment = request.getfixturevalue(name), BY_NAME[name]
    for table in experiment.tables(numbers):
        assert table.rows and all(len(row) == len(table.header) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    with drawing.style():
        for figure in experiment.figures:
            drawn = figure.draw(numbers)
            assert drawn.get_figwidth() * drawing.DOTS_PER_INCH <= 361
            assert any(axes.has_data() for axes in drawn.axes)


def test_band():
    band = statistics.band([[1, 5], [2, 5], [3, 5]])
    np.testing.assert_allclose(band.mean, [2, 5])
    np.testing.assert_allclose(band.high - band.mean, [4.303 / 3**0.5, 0])  # Student's t with 2 degrees of freedom
    assert statistics.agrees(band, [4.9, 5]) and not statistics.agrees(band, [7.1, 5])
    assert statistics.shown(statistics.Band(*np.array([4138.2, 4036.1, 4240.3]))) == "4138 ± 102"
    assert statistics.shown(statistics.Band(*np.array([[2, 0.97883], [1, 0.95], [3, 1.0027]])), 1) == "0.979 ± 0.024"
    assert statistics.shown(statistics.Band(*np.ones(3))) == "1.0000 ± 0.0000"
