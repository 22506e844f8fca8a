"""The instrument itself: what it claims where there is nothing, and whether it finds what is known to be there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5LayerNorm

import t5fastpatch
from t5fastpatch import Contract, ForwardPatch, Role
from t5fastpatch.measure import timing
from t5fastpatch.measure.attribution import attribution, coalitions, orders_for
from t5fastpatch.measure.statistics import Ratio
from t5fastpatch.measure.timing import Entry, Limits, Prepare, interleave, stopwatch_for

REPETITIONS = 100
# The baseline, a change that changes nothing, and delays of 3, 10 and 30 per cent.
EFFECTS = {"baseline": 1.0, "nothing": 1.0, "delay_3": 1.03, "delay_10": 1.1, "delay_30": 1.3}


def entry(call: Callable[[], object]) -> Entry:
    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        yield lambda: call

    return entered


@dataclasses.dataclass
class NoisyMachine:
    """A machine whose clock drifts, jitters and now and then is busy with something else; time is only counted."""

    generator: random.Random
    jitter: float
    interruptions: float
    now: float = 0.0
    drift: float = 0.0

    def work(self, seconds: float) -> None:
        self.drift += self.generator.gauss(0, 0.003)
        factor = math.exp(self.generator.gauss(0, self.jitter) + self.drift)
        if self.generator.random() < self.interruptions:
            factor *= 1 + self.generator.expovariate(2)
        self.now += seconds * factor

    def stopwatch(self, call: Callable[[], object]) -> float:
        started = self.now
        call()
        return self.now - started

    def clock(self) -> float:
        return self.now


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage takes no time on a machine where time is only counted."""
    for name in ("old_objects_set_aside", "no_collection"):
        monkeypatch.setattr(timing, name, contextlib.nullcontext)


def simulated(repetition: int, jitter: float, interruptions: float, limits: Limits) -> dict[str, Ratio]:
    machine = NoisyMachine(random.Random(repetition), jitter, interruptions)
    entries = {name: entry(functools.partial(machine.work, 0.05 * effect)) for name, effect in EFFECTS.items()}
    samples = interleave(entries, machine.stopwatch, "baseline", limits, seed=repetition, clock=machine.clock)
    return {name: samples.ratio(name, "baseline", repetition) for name in EFFECTS}


def turning(turns: int) -> Callable[..., torch.Tensor]:
    """A norm's forward that only turns a loop."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        for _ in range(turns):
            pass
        return hidden_states

    return forward


@pytest.fixture
def norm() -> Any:
    """A norm, and for each effect a patch that makes it a busy loop of a known number of turns.

    So many that the call of the module, which does not grow with them, counts for next to nothing.
    """
    for name, effect in EFFECTS.items():
        forward = turning(round(30_000 * effect))
        t5fastpatch.register(
            ForwardPatch(name, "", Contract.ROUNDING, Role.NORM, forward, lambda _: False, lambda _: "")
        )
    return T5LayerNorm(4)


def real(norm: Any, repetition: int) -> dict[str, Ratio]:
    """Patches put on and taken off for every sample, as the ablation does it, on the real clock."""
    x = torch.ones(1, 4)

    def variant(name: str) -> Entry:
        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            with t5fastpatch.patched(norm, [name]):
                yield lambda: lambda: norm(x)

        return entered

    entries = {name: variant(name) for name in EFFECTS}
    limits = Limits(rounds=8, width=0)
    samples = interleave(entries, stopwatch_for(torch.device("cpu")), "baseline", limits, seed=repetition)
    return {name: samples.ratio(name, "baseline", repetition) for name in EFFECTS}


def holds(ratio: Ratio, effect: float) -> bool:
    return ratio.low <= effect <= ratio.high


def check(results: list[dict[str, Ratio]]) -> None:
    assert len(results) == REPETITIONS
    silent = sum(not result["nothing"].measurable for result in results)
    assert silent >= 95
    found = Counter(
        name
        for result in results
        for name, effect in EFFECTS.items()
        if result[name].low <= effect <= result[name].high
    )
    assert min(found[name] for name in ("delay_3", "delay_10", "delay_30")) >= 90, found


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("jitter", "interruptions"), [(0.005, 0.02), (0.02, 0.08), (0.05, 0.1)], ids=["quiet", "busy", "wild"]
)
def test_on_a_simulated_machine(jitter: float, interruptions: float) -> None:
    check([simulated(repetition, jitter, interruptions, Limits()) for repetition in range(REPETITIONS)])


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "limits", [Limits(rounds=8), Limits(rounds=40, width=0.05)], ids=["least rounds", "stopped by width"]
)
def test_whatever_ends_the_rounds(limits: Limits) -> None:
    check([simulated(repetition, 0.02, 0.05, limits) for repetition in range(REPETITIONS)])


def test_patches_on_the_real_clock(norm: Any) -> None:
    check([real(norm, repetition) for repetition in range(REPETITIONS)])


@pytest.mark.usefixtures("no_collection")
def test_fair_shares_of_known_delays_lie_in_their_intervals() -> None:
    """Two patches that save 3% and 10%, and together 2% less than both."""
    saved = {frozenset(): 0.0, frozenset("a"): 0.03, frozenset("b"): 0.1, frozenset("ab"): 0.11}
    shares = {"a": 0.02, "b": 0.09}
    orders = orders_for(["a", "b"])
    found: Counter[str] = Counter()
    for repetition in range(REPETITIONS):
        machine = NoisyMachine(random.Random(repetition), jitter=0.02, interruptions=0.05)
        entries = {
            "".join(sorted(each)): entry(functools.partial(machine.work, 0.05 * (1 - saved[each])))
            for each in coalitions(orders)
        }
        samples = interleave(entries, machine.stopwatch, "", seed=repetition, clock=machine.clock)
        seconds = {frozenset(name): figures for name, figures in samples.seconds.items()}
        result = attribution(seconds, orders, repetition)
        assert sum(share.share for share in result.shares.values()) == pytest.approx(result.saved.share, abs=1e-12)
        found.update(name for name, share in result.shares.items() if share.low <= shares[name] <= share.high)
    assert min(found[name] for name in shares) >= 90, found
