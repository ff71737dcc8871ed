"""How large a ratio is and how sure, from a few pairs of measurements.

The interval is that of the sign test: it lies between the r-th smallest and the r-th largest ratio, with the largest r
for which the median of all ratios that could be measured is inside in at least 95 of 100 such experiments.  That is a
matter of coin tosses (a ratio is above the median or below), so it holds for any distribution and any number from 6 on:
with 9 ratios r is 2, 96 %, and one that a disturbance spoiled does not count.  A bootstrap of so few values covers less
than it says, and Student's t wants a normal distribution, which minima and the luck of addresses do not have.
"""

import math
import statistics
from typing import NamedTuple

CONFIDENCE = 0.95
FEWEST = 6  # ratios, of which the smallest and the largest are far enough apart: 1 - 2 / 2**6 is 0.97


class Ratio(NamedTuple):
    """The median of some ratios, and an interval for the median of all."""

    median: float
    low: float
    high: float

    @property
    def reach(self):
        """How far the interval goes from 1, as a factor."""
        return max(self.high, 1 / self.low)


def ratio_of(samples):
    """The Ratio that some samples show; fewer than FEWEST leave the interval open."""
    median = math.exp(statistics.median(map(math.log, samples)))
    rank = rank_of(len(samples))
    if rank == 0:
        return Ratio(median, 0.0, math.inf)
    ordered = sorted(samples)
    return Ratio(median, ordered[rank - 1], ordered[-rank])


def rank_of(count):
    """The largest rank with CONFIDENCE; 0 if there is none."""
    return max((rank for rank in range(1, count // 2 + 1) if covered(count, rank) >= CONFIDENCE), default=0)


def covered(count, rank):
    """The probability that the median lies between the rank-th smallest and the rank-th largest of `count` samples."""
    return 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count


def differs(ratio, control):
    """Whether a ratio is outside noise: its interval is on one side of 1, and its median farther from 1 than the
    interval of the control goes, on either side.  The control is the ratio of two things that are the same."""
    one_side = ratio.low > 1 or ratio.high < 1
    return one_side and max(ratio.median, 1 / ratio.median) > control.reach
