"""Time as ratios: every variant once per round, in shuffled order, in one process."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from .garbage import no_collection, old_objects_set_aside
from .statistics import LEAST_ROUNDS, Ratio, ratio_of, widest

Prepare = Callable[[], Callable[[], object]]
Entry = Callable[[], AbstractContextManager[Prepare]]
"""Entered, it makes its variant the one that runs and gives the workload's `prepare`; left, it undoes that."""
Stopwatch = Callable[[Callable[[], object]], float]
"""Makes a call and gives the seconds it took."""

SAMPLE_SECONDS = 0.02
MOST_CALLS = 10


@dataclasses.dataclass(frozen=True)
class Limits:
    """When the rounds end.

    Attributes:
        rounds: how many at most.
        min_rounds: how many whatever else is said.
        width: no further round is begun once every variant's 95% interval is this narrow, as a fraction of the
            baseline's time; 0 for never.
        time_budget: nor after this many seconds, warm-up included.
    """

    rounds: int = 20
    min_rounds: int = LEAST_ROUNDS
    width: float = 0.01
    time_budget: float = math.inf


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds per call of each variant, one figure per round; the same index is the same round.

    Attributes:
        seconds: by variant.
        calls: how many calls each figure is the mean of.
        stopped: what ended the rounds: `"rounds"`, `"interval"` or `"time"`.
    """

    seconds: Mapping[str, Sequence[float]]
    calls: int
    stopped: str = "rounds"

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


def interleave(
    variants: Mapping[str, Entry],
    stopwatch: Stopwatch,
    baseline: str,
    limits: Limits = Limits(),
    *,
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
        baseline: the variant whose ratios must become narrow.
        limits: when to stop.
        seed: of the shuffling.
        clock: what the budget is read from, in seconds.
        advance: called after each variant of each round.
    """
    ends = clock() + limits.time_budget
    order = list(variants)
    shuffler = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    stopped = "rounds"
    with old_objects_set_aside():
        calls = calls_per_sample(_warm_up(variants, stopwatch))
        for done in range(limits.rounds):
            if done >= limits.min_rounds:
                if clock() > ends:
                    stopped = "time"
                    break
                if widest(seconds, baseline) <= limits.width:
                    stopped = "interval"
                    break
            shuffler.shuffle(order)
            with no_collection():
                for name in order:
                    with variants[name]() as prepare:
                        seconds[name].append(_sample(prepare, stopwatch, calls))
                    advance()
    return Samples(seconds, calls, stopped)


def stopwatch_for(device: Any) -> Stopwatch:
    """The stopwatch for a `torch.device`: CUDA events around the call on CUDA, the performance counter elsewhere."""
    return functools.partial(_cuda_seconds, device) if device.type == "cuda" else _host_seconds


def _warm_up(variants: Mapping[str, Entry], stopwatch: Stopwatch) -> float:
    """Runs each variant twice and gives the second run's seconds, the median over the variants."""
    second = []
    for variant in variants.values():
        with variant() as prepare:
            stopwatch(prepare())
            second.append(stopwatch(prepare()))
    return statistics.median(second)


def calls_per_sample(seconds: float) -> int:
    """How often a call of so many seconds is timed for one figure; one more, not timed, comes before several."""
    return min(MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / seconds))) if seconds > 0 else MOST_CALLS


def _sample(prepare: Prepare, stopwatch: Stopwatch, calls: int) -> float:
    if calls > 1:
        prepare()()
    return statistics.fmean(stopwatch(prepare()) for _ in range(calls))


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cuda_seconds(device: Any, call: Callable[[], object]) -> float:
    import torch

    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    # Events and synchronisations are those of the current device, which need not be the model's.
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000
