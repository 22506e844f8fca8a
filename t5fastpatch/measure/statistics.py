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
# For the width alone, after every round.
FEW_RESAMPLES = 500
CONFIDENCE = 0.95
# A table has a dozen rows and more: at 95% it would claim an effect where there is none in every second table.
CLAIM = 0.99
# With fewer, all lie on one side of 1 by chance more often than one time in a hundred: 2 / 2**7.
LEAST_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A median of ratios with its 95% confidence interval; below 1 is faster than the baseline.

    Attributes:
        median: of the ratios round by round.
        low: the interval's lower end.
        high: its upper end.
        measurable: whether the 99% interval, and so this one too, leaves 1 out, over enough rounds to tell.
    """

    median: float
    low: float
    high: float
    measurable: bool

    def __str__(self) -> str:
        if self.low <= 1 <= self.high:
            return "no measurable effect"
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]" + ("" if self.measurable else ", unclear")


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
    medians = resampled_medians(ratios, resampled(len(ratios), seed))
    return Ratio(float(numpy.median(ratios)), *judged(medians, len(ratios), nothing=1.0))


def judged(estimates: Array, rounds: int, nothing: float) -> tuple[float, float, bool]:
    """The 95% interval of bootstrapped estimates, and whether an effect is claimed.

    It is where the 99% interval leaves out the value that stands for none, over enough rounds to tell.

    Args:
        estimates: float64, one per resample.
        rounds: how many rounds each was taken over, 2 or more.
        nothing: 1 for a ratio, 0 for a saving.
    """
    low, high = interval(estimates, rounds, CONFIDENCE)
    least, most = interval(estimates, rounds, CLAIM)
    return low, high, rounds >= LEAST_ROUNDS and not least <= nothing <= most


def widest(seconds: Mapping[str, Sequence[float]], baseline: str) -> float:
    """The width of the widest 95% interval of the ratios to `baseline`."""
    rounds = len(seconds[baseline])
    drawn = resampled(rounds, 0, FEW_RESAMPLES)
    ratios = (numpy.asarray(mine) / numpy.asarray(seconds[baseline]) for mine in seconds.values())
    intervals = (interval(resampled_medians(each, drawn), rounds, CONFIDENCE) for each in ratios)
    return max(high - low for low, high in intervals)


def resampled(rounds: int, seed: int, resamples: int = RESAMPLES) -> Array:
    """Rounds drawn with replacement: int64, resamples x rounds."""
    return numpy.random.default_rng(seed).integers(0, rounds, (resamples, rounds))


def resampled_medians(ratios: Array, drawn: Array) -> Array:
    """The median of each resample; `numpy.median` takes several times as long for many short rows."""
    rows = numpy.sort(ratios[drawn], axis=1)
    middle = rows.shape[1] // 2
    return rows[:, middle] if rows.shape[1] % 2 else (rows[:, middle - 1] + rows[:, middle]) / 2


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
    "Handbook of Mathematical Functions", 26.7.5); at 97.5% and 99.5% low by less than a thousandth from 5
    degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
