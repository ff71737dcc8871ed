"""The laboratory: experiments of any small sizes find the same with the oracle in place of the library, and pictures
show the weights that they are given."""

import importlib.util
import warnings
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draw import rng
from support.problems import PROPERTY, examples

import sdpa
from sdpa import lab, reference
from sdpa.lab._experiment import FALSE, HELD, PARTLY

FEW, SOME = st.integers(1, 3), st.integers(2, 9)
DIMS = st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True).map(sorted).map(tuple)
SEEDS = st.integers(2, 3)


def sizes(**strategies):
    return st.fixed_dictionaries(strategies)


def multiples(whole, part, **strategies):
    """`whole` is a multiple of `part`."""
    drawn = sizes(**{part: FEW, whole: st.integers(1, 5)}, **strategies)
    return drawn.map(lambda given: given | {whole: 2 * given[whole] * given[part]})


EXPERIMENTS = {
    "additive": sizes(dims=DIMS, tokens=SOME, features=SOME, lengths=st.tuples(SOME), size=SOME, seeds=SEEDS),
    "cosine": sizes(dims=DIMS, keys=SOME, queries=SOME, dim=SOME, seeds=SEEDS),
    "gaps": sizes(keys=st.tuples(SOME, st.integers(10, 40)), widest=st.floats(0.5, 20), points=SOME),
    "gradients": sizes(dims=DIMS, tokens=SOME, seeds=SEEDS),
    "heads": sizes(counts=st.sampled_from([(1, 2), (1, 3, 6), (2, 4, 12)]), keys=SOME, queries=SOME, projected=FEW)
    .map(lambda given: given | dict(width=24, projected=given["counts"][0], seeds=2)),
    "overflow": sizes(dims=DIMS, keys=SOME, queries=SOME, calls=FEW, seeds=FEW),
    "saturation": sizes(dims=DIMS, keys=SOME, queries=SOME, heads=FEW, seeds=SEEDS),
    "sentence": sizes(head_dim=SOME, heads=FEW, seeds=SEEDS),
    "steps": multiples("width", "heads", seed=st.integers(0, 99)),
    "training": multiples("width", "heads", steps=FEW, pairs=st.integers(2, 4), batch=FEW, seeds=SEEDS),
    "variance": sizes(dims=DIMS, products=SOME, seeds=SEEDS),
}  # fmt: skip
# Seconds and bytes that a call took, and errors that are those of rounding.
OF_THE_LIBRARY = {"additive.seconds", "additive.peak", "overflow.error", "overflow.too_wide"}


def numbers_of(found, name):
    """(name, array) of all numbers in what an experiment returns."""
    if isinstance(found, tuple):
        for field, part in zip(getattr(found, "_fields", range(len(found))), found):
            yield from numbers_of(part, f"{name}.{field}")
    elif not isinstance(found, str | None) and name not in OF_THE_LIBRARY:
        yield name, np.asarray(found, float)


@settings(PROPERTY, max_examples=examples(100))
@given(st.data(), st.sampled_from(list(EXPERIMENTS)))
def laboratory(data, name):
    options = data.draw(EXPERIMENTS[name])
    oracle = {one: getattr(reference, one) for one in {*sdpa.__all__} & {*reference.__all__}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes for which there is nothing to divide by
        found = getattr(lab, name)(**options)
        with mock.patch.multiple(sdpa, **oracle):
            expected = getattr(lab, name)(**options)
        experiment = next(one for one in lab.EXPERIMENTS if one.name == name)
        assert {finding.verdict for finding in experiment.findings(found)} <= {HELD, PARTLY, FALSE}
    numbers = list(zip(numbers_of(found, name), numbers_of(expected, name), strict=True))
    assert len(numbers) > 3
    for (field, one), (_, exact) in numbers:
        np.testing.assert_allclose(one, exact, rtol=1e-3, atol=1e-4, err_msg=field)


@settings(PROPERTY, max_examples=examples(40))
@given(SOME, SOME, FEW, st.integers(0, 99))
def heatmaps(M, N, H, number):
    query, key = rng(number).standard_normal((H, M, 4)), rng(number + 1).standard_normal((H, N, 4))
    weights = sdpa.attention_weights(query, key)
    figure = lab.heatmap(weights, range(M), key_tokens=range(N), titles=[f"map {h}" for h in range(H)])
    maps = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    for h in range(H):
        shown = maps.pop(f"map {h}").collections[0].get_array()
        np.testing.assert_array_equal(shown.reshape(M, N), weights[h])
    assert not maps


PROPERTIES = {"laboratory": laboratory}
if importlib.util.find_spec("matplotlib"):
    PROPERTIES["heatmaps"] = heatmaps
