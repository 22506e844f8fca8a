"""Fair shares: what each of several overlapping patches contributes to what all of them save together.

A set of patches is worth the fraction of the baseline's time that it saves. A patch's share is its Shapley value in
that game, the mean of what it adds to those put on before it, over all orders (Shapley, "A Value for n-Person Games",
1953). The shares add up to what all save together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from .statistics import judged, resampled, resampled_medians

Coalition = frozenset[str]
Order = tuple[str, ...]

EXACT_UP_TO = 5
SAMPLED_ORDERS = 12


@dataclasses.dataclass(frozen=True)
class Share:
    """A saving, as a fraction of the baseline's time, with its 95% interval.

    Attributes:
        share: a patch's Shapley value, or the saving of all.
        low: the interval's lower end; from the rounds of timing alone.
        high: its upper end.
        measurable: whether the 99% interval leaves 0 out, over enough rounds to tell.
        sampling_error: standard error of having taken some orders only; `None` where all were taken.
    """

    share: float
    low: float
    high: float
    measurable: bool
    sampling_error: float | None = None


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The shares of patches that are on together.

    Attributes:
        saved: what all save together: the sum of the shares.
        shares: by patch.
        orders: how many orders the shares are means over.
        exact: whether those are all orders there are.
    """

    saved: Share
    shares: Mapping[str, Share]
    orders: int
    exact: bool


def orders_for(patches: Sequence[str], seed: int = 0) -> list[Order]:
    """The orders in which patches are put on: all of them up to five patches, else twelve, of which every second is the
    one before it backwards: that evens out what comes early and what comes late."""
    if len(patches) <= EXACT_UP_TO:
        return list(itertools.permutations(patches))
    shuffler = random.Random(seed)
    forward = [tuple(shuffler.sample(list(patches), len(patches))) for _ in range(SAMPLED_ORDERS // 2)]
    return [order for each in forward for order in (each, each[::-1])]


def coalitions(orders: Sequence[Order]) -> list[Coalition]:
    """Every set of patches that comes up in the orders, small ones first; the empty set too."""
    found = dict.fromkeys(frozenset(order[:size]) for order in orders for size in range(len(order) + 1))
    return sorted(found, key=lambda each: (len(each), sorted(each)))


def shapley(value: Mapping[Coalition, Any], orders: Sequence[Order]) -> dict[str, Any]:
    """The mean of what each player adds to those before it.

    Args:
        value: of each coalition in `coalitions(orders)`: numbers, or arrays of one shape.
        orders: of the players, one or more.
    """
    return {player: sum(_added(value, order, player) for order in orders) / len(orders) for player in sorted(orders[0])}


def attribution(seconds: Mapping[Coalition, Sequence[float]], orders: Sequence[Order], seed: int = 0) -> Attribution:
    """The shares, from the time of each coalition.

    Args:
        seconds: by coalition, one figure per round, the same index being the same round; the empty set is the baseline.
        orders: `orders_for(patches)`.
        seed: of the resampling of rounds.
    """
    baseline = seconds[frozenset()]
    rounds = len(baseline)
    drawn = resampled(rounds, seed)
    saved, resampled_saved = {}, {}
    for coalition in coalitions(orders):
        ratios = numpy.asarray(seconds[coalition]) / numpy.asarray(baseline)
        saved[coalition] = 1 - float(numpy.median(ratios))
        resampled_saved[coalition] = 1 - resampled_medians(ratios, drawn)
    shares, estimates = shapley(saved, orders), shapley(resampled_saved, orders)
    exact = len(orders) == math.factorial(len(orders[0]))
    everything = frozenset(orders[0])
    return Attribution(
        _share(saved[everything], resampled_saved[everything], rounds, None),
        {
            patch: _share(shares[patch], estimates[patch], rounds, None if exact else _error(saved, orders, patch))
            for patch in orders[0]
        },
        len(orders),
        exact,
    )


def _added(value: Mapping[Coalition, Any], order: Order, player: str) -> Any:
    before = order[: order.index(player)]
    return value[frozenset((*before, player))] - value[frozenset(before)]


def _share(share: float, estimates: Any, rounds: int, sampling_error: float | None) -> Share:
    return Share(float(share), *judged(estimates, rounds, nothing=0.0), sampling_error)


def _error(value: Mapping[Coalition, float], orders: Sequence[Order], patch: str) -> float:
    """Standard error over the pairs of an order and its reverse, which are not independent of each other."""
    pairs = zip(orders[::2], orders[1::2], strict=True)
    means = [(_added(value, one, patch) + _added(value, other, patch)) / 2 for one, other in pairs]
    error: float = statistics.stdev(means) / math.sqrt(len(means))
    return error
