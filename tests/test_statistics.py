from __future__ import annotations

import random

import pytest
from scipy import stats

from t5fastpatch import T5FastPatchError
from t5fastpatch.measure.statistics import Ratio, ratio_of, student_quantile, widest


def noisy(mean: float, seed: int, rounds: int = 30) -> list[float]:
    generator = random.Random(seed)
    return [mean * generator.lognormvariate(0, 0.05) for _ in range(rounds)]


def test_a_known_ratio_lies_in_the_interval_under_noise() -> None:
    ratio = ratio_of(noisy(0.8, seed=1), noisy(1.0, seed=2))
    assert ratio.low < 0.8 < ratio.high < 1
    assert ratio.low < ratio.median < ratio.high
    assert ratio.measurable


def test_drift_between_rounds_cancels() -> None:
    drift = [1 + round for round in range(10)]
    ratio = ratio_of([0.5 * each for each in drift], drift)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_a_variant_beside_itself_has_no_measurable_effect() -> None:
    ratio = ratio_of(noisy(1.0, seed=1), noisy(1.0, seed=2))
    assert ratio.low < 1 < ratio.high
    assert str(ratio) == "no measurable effect"


def test_an_effect_is_printed_with_its_interval() -> None:
    assert str(Ratio(0.8, 0.75, 0.85, measurable=True)) == "0.80 [0.75, 0.85]"
    assert str(Ratio(0.99, 0.95, 1.0, measurable=False)) == "no measurable effect"
    assert str(Ratio(0.95, 0.92, 0.99, measurable=False)) == "0.95 [0.92, 0.99], unclear"


def test_five_rounds_claim_nothing_that_chance_gives_one_time_in_sixteen() -> None:
    # All on one side: 2 of 32 cases, where a claim at 99% may be wrong in 1 of 100. With eight rounds it is 2 of 256.
    five, eight = [0.99, 0.98, 0.97, 0.99, 0.98], [0.99, 0.98, 0.97, 0.99, 0.98, 0.97, 0.96, 0.98]
    assert not ratio_of(five, [1.0] * 5).measurable
    assert ratio_of(eight, [1.0] * 8).measurable


def test_the_same_seed_gives_the_same_interval() -> None:
    mine, other = noisy(1.0, seed=1), noisy(1.0, seed=2)
    assert ratio_of(mine, other, seed=3) == ratio_of(mine, other, seed=3)


def test_a_ratio_takes_two_rounds_of_both() -> None:
    with pytest.raises(T5FastPatchError, match="two rounds"):
        ratio_of([1.0], [1.0])
    with pytest.raises(T5FastPatchError, match="two rounds"):
        ratio_of([1.0, 1.0], [1.0, 1.0, 1.0])


def test_the_widest_interval_is_that_of_the_noisiest() -> None:
    seconds = {"base": [1.0] * 10, "steady": [0.9] * 10, "noisy": noisy(0.9, seed=1, rounds=10)}
    ratio = ratio_of(seconds["noisy"], seconds["base"])
    assert widest(seconds, "base") == pytest.approx(ratio.high - ratio.low, rel=0.3)
    assert widest({"base": [1.0] * 10, "steady": [0.9] * 10}, "base") == 0


@pytest.mark.parametrize("freedom", [4, 7, 19, 59])
@pytest.mark.parametrize("probability", [0.975, 0.995])
def test_students_quantile_is_close(freedom: int, probability: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=3e-3)
