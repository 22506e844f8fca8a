"""Time as ratios: every variant once per round, in shuffled order, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..errors import T5FastPatchError
from .extra import require

Prepare = Callable[[], Callable[[], object]]
Entry = Callable[[], AbstractContextManager[Prepare]]
"""Entered, it makes its variant the one that runs and gives the workload's `prepare`; left, it undoes that."""
Stopwatch = Callable[[Callable[[], object]], float]
"""Makes a call and gives the seconds it took."""

SAMPLE_SECONDS = 0.02
MOST_CALLS = 10
RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds per call of each variant, one figure per round; the same index is the same round.

    Attributes:
        seconds: by variant.
        calls: how many calls each figure is the mean of.
    """

    seconds: Mapping[str, Sequence[float]]
    calls: int

    @property
    def rounds(self) -> int:
        """How many rounds were run."""
        return min(map(len, self.seconds.values()))

    def median(self, variant: str) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds[variant])

    def ratio(self, variant: str, baseline: str, seed: int = 0) -> Ratio:
        """The time of `variant` over that of `baseline`, as `ratio_of` gives it."""
        return ratio_of(self.seconds[variant], self.seconds[baseline], seed)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A median of ratios with its 95% confidence interval; below 1 is faster than the baseline."""

    median: float
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if not self.measurable:
            return "no measurable effect"
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio_of(seconds: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """The median of the ratios round by round, and its percentile bootstrap interval.

    Args:
        seconds: one figure per round.
        baseline: the baseline's figures of the same rounds.
        seed: of the resampling.

    Raises:
        T5FastPatchError: scipy is missing, there are fewer than two rounds, or the lengths differ.
    """
    if len(seconds) != len(baseline) or len(seconds) < 2:
        raise T5FastPatchError(f"a ratio takes two rounds or more of both, not {len(seconds)} and {len(baseline)}")
    numpy, stats = require("numpy"), require("scipy.stats")
    ratios = [mine / other for mine, other in zip(seconds, baseline, strict=True)]
    interval = stats.bootstrap(
        (ratios,),
        numpy.median,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=numpy.random.default_rng(seed),
    ).confidence_interval
    return Ratio(statistics.median(ratios), float(interval.low), float(interval.high))


def interleave(
    variants: Mapping[str, Entry],
    stopwatch: Stopwatch,
    *,
    rounds: int,
    min_rounds: int = 5,
    budget_s: float = math.inf,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[], object] = lambda: None,
) -> Samples:
    """Times variants against each other.

    All are warmed up first. Each round then times every variant once, in an order shuffled anew, with the garbage
    collected before and not during the round. Short calls are made several times and their mean taken, after one
    that is not timed, since the variant before has left its own data in the processor's caches.

    Args:
        variants: by name.
        stopwatch: `stopwatch_for(device)`.
        rounds: how many at most.
        min_rounds: how many of them whatever the budget says.
        budget_s: seconds after which no further round is begun, warm-up included.
        seed: of the shuffling.
        clock: what the budget is read from, in seconds.
        advance: called after each variant of each round.
    """
    started = clock()
    order = list(variants)
    shuffler = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    with _old_objects_set_aside():
        calls = _calls_per_sample(_warm_up(variants, stopwatch))
        for done in range(rounds):
            if done >= min_rounds and clock() - started > budget_s:
                break
            shuffler.shuffle(order)
            with _no_garbage_collection():
                for name in order:
                    with variants[name]() as prepare:
                        seconds[name].append(_sample(prepare, stopwatch, calls))
                    advance()
    return Samples(seconds, calls)


def stopwatch_for(device: Any) -> Stopwatch:
    """The stopwatch for a `torch.device`: CUDA events around the call on CUDA, the performance counter elsewhere."""
    return _cuda_seconds if device.type == "cuda" else _host_seconds


def _warm_up(variants: Mapping[str, Entry], stopwatch: Stopwatch) -> float:
    """Runs each variant twice and gives the second run's seconds, the median over the variants."""
    second = []
    for variant in variants.values():
        with variant() as prepare:
            stopwatch(prepare())
            second.append(stopwatch(prepare()))
    return statistics.median(second)


def _calls_per_sample(seconds: float) -> int:
    return min(MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / seconds))) if seconds > 0 else MOST_CALLS


def _sample(prepare: Prepare, stopwatch: Stopwatch, calls: int) -> float:
    if calls > 1:
        prepare()()
    return statistics.fmean(stopwatch(prepare()) for _ in range(calls))


@contextlib.contextmanager
def _old_objects_set_aside() -> Iterator[None]:
    # Else each round's collection would look at every object of every imported module.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cuda_seconds(call: Callable[[], object]) -> float:
    import torch

    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000
