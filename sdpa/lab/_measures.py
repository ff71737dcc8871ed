"""How sharp rows of weights are, and what is expected of the softmax of N independent normal scores."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ._experiment import FALSE, HELD, PARTLY

DIMS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096  # sizes of a head


class Sharpness(NamedTuple):
    """Of weights (..., N), each (...), float64."""

    largest: np.ndarray
    entropy: np.ndarray  # in nats: ln N for equal weights, 0 for a single one
    effective: np.ndarray  # exp(entropy): that many equal weights have this entropy
    inverse: np.ndarray  # 1 / Σp²: that many equal weights have this sum of squares


def sharpness(weights: np.ndarray) -> Sharpness:
    weights = np.asarray(weights, np.float64)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=-1)  # p ln p is 0 at 0
    return Sharpness(weights.max(axis=-1), entropy, np.exp(entropy), 1 / (weights**2).sum(axis=-1))


def freezing(keys: int) -> float:
    """√(2 ln N): scores with a larger standard deviation leave the weight to a few keys, however large N is."""
    return float(np.sqrt(2 * np.log(keys)))


def gap_rate(keys: int) -> float:
    """The density at 0 of the gap between the largest two of N normal numbers, N(N - 1) ∫ φ² Φ^(N - 2)."""
    normal = NormalDist()
    x = np.linspace(-10, 10, 2001)
    density, below = (np.array([function(each) for each in x]) for function in (normal.pdf, normal.cdf))
    return float(keys * (keys - 1) * (density**2 * below ** (keys - 2)).sum() * (x[1] - x[0]))


def judged(*conditions: object) -> str:
    """HELD where all of the conditions are met, PARTLY where some are."""
    met = [bool(condition) for condition in conditions]
    return HELD if all(met) else PARTLY if any(met) else FALSE
