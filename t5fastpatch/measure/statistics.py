"""Ratios of times with bootstrap intervals, fit for a machine whose clock swings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..errors import T5FastPatchError

Array = Any

RESAMPLES = 4000
CONFIDENCE = 0.95
# A table has a dozen rows and more: at 95% it would claim an effect where there is none in every second table.
CLAIM = 0.99


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A median of ratios with its 95% confidence interval; below 1 is faster than the baseline.

    Attributes:
        median: of the ratios round by round.
        low: the interval's lower end.
        high: its upper end.
        measurable: whether the 99% interval, and so this one too, leaves 1 out.
    """

    median: float
    low: float
    high: float
    measurable: bool

    def __str__(self) -> str:
        if not self.measurable:
            return "no measurable effect"
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio_of(seconds: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """The median of the ratios round by round, with its bootstrap interval.

    Args:
        seconds: one figure per round.
        baseline: the baseline's figures of the same rounds.
        seed: of the resampling.

    Raises:
        T5FastPatchError: there are fewer than two rounds, or the lengths differ.
    """
    if len(seconds) != len(baseline) or len(seconds) < 2:
        raise T5FastPatchError(f"a ratio takes two rounds or more of both, not {len(seconds)} and {len(baseline)}")
    ratios = numpy.asarray(seconds) / numpy.asarray(baseline)
    medians = numpy.median(ratios[resampled(len(ratios), seed)], axis=1)
    low, high = interval(medians, len(ratios), CONFIDENCE)
    least, most = interval(medians, len(ratios), CLAIM)
    return Ratio(float(numpy.median(ratios)), low, high, not least <= 1 <= most)


def widest(seconds: Mapping[str, Sequence[float]], baseline: str) -> float:
    """The width of the widest 95% interval of the ratios to `baseline`."""
    ratios = (ratio_of(mine, seconds[baseline]) for mine in seconds.values())
    return max(ratio.high - ratio.low for ratio in ratios)


def resampled(rounds: int, seed: int) -> Array:
    """Rounds drawn with replacement: int64, resamples x rounds."""
    return numpy.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))


def interval(estimates: Array, rounds: int, confidence: float) -> tuple[float, float]:
    """The expanded percentile interval of bootstrapped estimates.

    The plain percentile interval is too narrow for few rounds, by a factor of sqrt((n - 1) / n) and as a normal
    distribution is narrower than Student's; both are made up for by taking percentiles further out (Hesterberg, "What
    Teachers Should Know About the Bootstrap", 2015, section 5.3).

    Args:
        estimates: float64, one per resample.
        rounds: how many rounds each was taken over, 2 or more.
        confidence: 0.95, say.
    """
    normal = statistics.NormalDist()
    outside = normal.cdf(-math.sqrt(rounds / (rounds - 1)) * student_quantile(1 - (1 - confidence) / 2, rounds - 1))
    low, high = numpy.quantile(estimates, [outside, 1 - outside])
    return float(low), float(high)


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution, by its expansion around the normal one's (Abramowitz and Stegun,
    "Handbook of Mathematical Functions", 26.7.5); low by at most a few per cent from 5 degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
