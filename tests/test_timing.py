from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterator

import pytest

from t5fastpatch import T5FastPatchError
from t5fastpatch.measure.timing import Entry, Prepare, Ratio, Samples, interleave, ratio_of

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

    def interleave(self, rounds: int, **options: float) -> Samples:
        return interleave(self.entries, self.stopwatch, rounds=rounds, clock=self.clock, **options)  # type: ignore[arg-type]


def noisy(mean: float, seed: int, rounds: int = 30) -> list[float]:
    generator = random.Random(seed)
    return [mean * generator.lognormvariate(0, 0.05) for _ in range(rounds)]


def test_known_ratios_are_recovered() -> None:
    samples = FakeTime().interleave(8)
    assert samples.ratio("fast", "slow").median == pytest.approx(1 / 3)
    assert samples.ratio("slow", "middle").median == pytest.approx(1.5)
    assert samples.median("middle") == pytest.approx(0.2)


def test_a_known_ratio_lies_in_the_interval_under_noise() -> None:
    ratio = ratio_of(noisy(0.8, seed=1), noisy(1.0, seed=2))
    assert ratio.low < 0.8 < ratio.high < 1
    assert ratio.low < ratio.median < ratio.high


def test_drift_between_rounds_cancels() -> None:
    drift = [1 + round for round in range(10)]
    ratio = ratio_of([0.5 * each for each in drift], drift)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_a_variant_beside_itself_has_no_measurable_effect() -> None:
    ratio = ratio_of(noisy(1.0, seed=1), noisy(1.0, seed=2))
    assert ratio.low < 1 < ratio.high
    assert str(ratio) == "no measurable effect"


def test_an_interval_without_1_is_printed() -> None:
    assert str(Ratio(0.8, 0.75, 0.85)) == "0.80 [0.75, 0.85]"
    assert str(Ratio(0.99, 0.95, 1.0)) == "no measurable effect"


def test_the_same_seed_gives_the_same_interval() -> None:
    mine, other = noisy(1.0, seed=1), noisy(1.0, seed=2)
    assert ratio_of(mine, other, seed=3) == ratio_of(mine, other, seed=3)


def test_a_ratio_takes_two_rounds_of_both() -> None:
    with pytest.raises(T5FastPatchError, match="two rounds"):
        ratio_of([1.0], [1.0])
    with pytest.raises(T5FastPatchError, match="two rounds"):
        ratio_of([1.0, 1.0], [1.0, 1.0, 1.0])


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
    assert FakeTime().interleave(20, budget_s=5.0).rounds == 7
    assert FakeTime().interleave(20, budget_s=0.0, min_rounds=4).rounds == 4
    assert FakeTime().interleave(3, budget_s=0.0).rounds == 3
    assert FakeTime().interleave(6).rounds == 6


def test_garbage_is_not_collected_during_a_round() -> None:
    seen = []

    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        yield lambda: lambda: seen.append(gc.isenabled())

    assert gc.isenabled()
    interleave({"only": entered}, lambda call: (call(), 1.0)[1], rounds=2)
    assert seen[2:] == [False, False]
    assert gc.isenabled()


def test_progress_is_told_after_each_variant_of_each_round() -> None:
    steps = []
    time = FakeTime()
    interleave(time.entries, time.stopwatch, rounds=4, advance=lambda: steps.append(1))
    assert len(steps) == 4 * 3


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(T5FastPatchError, match=r'scipy is not installed: pip install "t5fastpatch\[ablate\]"'):
        ratio_of([1.0, 1.0], [1.0, 1.0])
