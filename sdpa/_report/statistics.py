"""Means with a confidence band."""

import math
from typing import NamedTuple

import numpy as np

# Student's t: 97.5 % quantiles for 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook, section 1.3.6.7.2).
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL_QUANTILE = 1.960


class Band(NamedTuple):
    """A mean, and the interval that holds the true one with 95 % confidence."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(samples, axis=0):
    """The mean of independent samples along an axis, with the 95 % band of Student's t."""
    samples = np.asarray(samples, np.float64)
    count = samples.shape[axis]
    mean = samples.mean(axis=axis)
    if count < 2:
        return Band(mean, mean, mean)
    quantile = QUANTILES[count - 2] if count - 2 < len(QUANTILES) else NORMAL_QUANTILE
    half = quantile * samples.std(axis=axis, ddof=1) / np.sqrt(count)
    return Band(mean, mean - half, mean + half)


def shown(band, index=()):
    """One mean of a band as "4138 ± 102": with two digits of half the width."""
    mean, half = float(band.mean[index]), float(band.high[index] - band.mean[index])
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 4
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def agrees(band, expected):
    """Whether all expected means lie in bands of twice the width: of many 95 % bands some miss, of these hardly one."""
    return bool(np.all(np.abs(band.mean - expected) <= 2 * (band.high - band.mean)))
