from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from t5fastpatch.measure.timing import Entry, Limits, Prepare, Samples, interleave, stopwatch_for

SECONDS = {"slow": 0.3, "fast": 0.1, "middle": 0.2}


class FakeTime:
    """Calls take the seconds they are named for, and nothing else takes any."""

    def __init__(self, seconds: dict[str, float] = SECONDS) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self.entries: dict[str, Entry] = {name: self._entry(name, each) for name, each in seconds.items()}

    def stopwatch(self, call: Callable[[], object]) -> float:
        started = self.now
        call()
        return self.now - started

    def clock(self) -> float:
        return self.now

    def _entry(self, name: str, seconds: float) -> Entry:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds

        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            yield lambda: call

        return entered

    def interleave(self, rounds: int, seed: int = 0, **limits: float) -> Samples:
        # Nothing is noise here: every interval is narrow from the start.
        limits = {"width": -1, **limits}
        chosen = Limits(rounds, **limits)  # type: ignore[arg-type]
        return interleave(self.entries, self.stopwatch, next(iter(self.entries)), chosen, seed=seed, clock=self.clock)


def test_known_ratios_are_recovered() -> None:
    samples = FakeTime().interleave(8)
    assert samples.ratio("fast", "slow").median == pytest.approx(1 / 3)
    assert samples.ratio("slow", "middle").median == pytest.approx(1.5)
    assert samples.median("middle") == pytest.approx(0.2)


def test_every_variant_runs_once_per_round_in_an_order_that_the_seed_decides() -> None:
    def rounds(seed: int) -> list[list[str]]:
        time = FakeTime()
        time.interleave(6, seed=seed)
        timed = time.calls[2 * len(SECONDS) :]
        return [timed[start : start + 3] for start in range(0, len(timed), 3)]

    orders = rounds(seed=0)
    assert len(orders) == 6
    assert all(sorted(order) == sorted(SECONDS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert rounds(seed=0) == orders != rounds(seed=1)


def test_all_are_warmed_up_first() -> None:
    time = FakeTime()
    time.interleave(2)
    assert time.calls[:6] == ["slow", "slow", "fast", "fast", "middle", "middle"]


def test_short_calls_are_made_several_times_after_one_that_is_not_timed() -> None:
    time = FakeTime({"short": 0.005})
    samples = time.interleave(3)
    assert samples.calls == 4
    assert len(time.calls) == 2 + 3 * (1 + 4)
    assert samples.seconds["short"] == pytest.approx([0.005] * 3)


def test_the_budget_ends_the_rounds_but_not_before_the_least_number() -> None:
    # A round takes 0.6 s, the warm-up 1.2 s.
    samples = FakeTime().interleave(20, min_rounds=5, time_budget=5.0)
    assert (samples.rounds, samples.stopped) == (7, "time")
    assert FakeTime().interleave(20, min_rounds=4, time_budget=0.0).rounds == 4
    assert FakeTime().interleave(3, time_budget=0.0).rounds == 3
    samples = FakeTime().interleave(6)
    assert (samples.rounds, samples.stopped) == (6, "rounds")


def test_narrow_intervals_end_the_rounds_but_not_before_the_least_number() -> None:
    samples = FakeTime().interleave(20, width=0.01)
    assert (samples.rounds, samples.stopped) == (8, "interval")
    assert FakeTime().interleave(20, width=0.01, min_rounds=12).rounds == 12


def test_garbage_is_not_collected_during_a_round() -> None:
    seen = []

    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        yield lambda: lambda: seen.append((gc.isenabled(), gc.get_freeze_count() > frozen))

    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    interleave({"only": entered}, lambda call: (call(), 1.0)[1], "only", Limits(rounds=2))
    assert seen[2:] == [(False, True), (False, True)]
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_on_cuda_the_events_are_recorded_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]
    recorded: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(current[-1])

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(str(which))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert stopwatch_for(torch.device("cuda:1"))(lambda: recorded.append("call")) == 0.25
    assert recorded == ["cuda:1", "call", "cuda:1"]


def test_progress_is_told_after_each_variant_of_each_round() -> None:
    steps = []
    time = FakeTime()
    interleave(time.entries, time.stopwatch, "slow", Limits(rounds=4), advance=lambda: steps.append(1))
    assert len(steps) == 4 * 3
