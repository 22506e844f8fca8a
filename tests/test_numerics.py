"""Half precision on models that overflow fp16: what docs/numerics.md claims, on small models and few sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numerics
import pytest
import torch
from numerics import ACCURATE, CLAMPED, DEFAULT, FAST, FP32_WO, STOCK_BF16, Figures, Row, Trial, Way, quotients, sound
from planted import Planted
from twin import overflow_twin

from t5fastpatch.measure.quality import Quality
from t5fastpatch.measure.subject import load

PATCHED = (FAST, ACCURATE, DEFAULT)
WAYS = (CLAMPED, FP32_WO, STOCK_BF16, *PATCHED)
# The attention's outputs, an eighth of it, fit: else stock's fp32 `wo` gives no number to compare with.
PEAK = 2e5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are so small that two threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rows: list[Row] = []
    for kind in numerics.KINDS:
        planted = Planted(*kind, depth=2, peak=PEAK)
        trial = Trial(planted)
        rows.append((planted, trial.peak(), {way: trial.run(way) for way in WAYS}))
    return rows


# A rounding may flip a router's choice, and with it the output: Switch is only asked to be finite.
@pytest.fixture(scope="module")
def smooth(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row[0].kind != "switch"]


def of(rows: list[Row], way: Way) -> list[Figures]:
    return [found[way] for _, _, found in rows]


def test_the_models_reach_their_peak_and_stock_fp16_is_ruined_by_it(rows: list[Row]) -> None:
    assert all(PEAK / 2 < peak < PEAK * 8 for _, peak, _ in rows)
    assert min(quotients(rows, CLAMPED, STOCK_BF16)) > 4


@pytest.mark.parametrize("way", PATCHED, ids=str)
def test_patched_everything_is_finite(rows: list[Row], way: Way) -> None:
    assert [each.nonfinite for each in of(rows, way)] == [0] * len(numerics.KINDS)


@pytest.mark.parametrize("way", PATCHED, ids=str)
def test_patched_fp16_is_four_times_nearer_to_fp32_than_bf16(smooth: list[Row], way: Way) -> None:
    gains = quotients(smooth, STOCK_BF16, way)
    assert len(gains) == len(smooth)
    assert min(gains) >= 4


def test_accurate_is_no_further_from_fp32_than_an_fp32_wo(smooth: list[Row]) -> None:
    losses = quotients(sound(smooth), ACCURATE, FP32_WO)
    assert len(losses) >= 8
    assert statistics.geometric_mean(losses) <= 1


def test_figures_of_nothing_finite_are_none() -> None:
    found = numerics.figures(torch.full((2, 3), torch.nan), torch.ones(2, 3))
    assert found == Figures(nonfinite=1.0)


def test_figures_are_relative_to_the_references_spread() -> None:
    reference = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    found = numerics.figures(reference * 1.5, reference)
    assert found.mean == pytest.approx(0.75 / reference.std().item())
    assert found.cosine_min == pytest.approx(1)
    assert found.agreement == 1


def test_in_fp32_the_twin_is_the_embedded_model_to_the_bit() -> None:
    subject = load(None, "cpu")
    batch = subject.batch(subject.sentences[:16], 64, 64)
    with torch.no_grad():
        ordinary = subject.fp32(**batch, output_hidden_states=True)
        twin = overflow_twin(subject.fp32, 13)(**batch, output_hidden_states=True)
    assert torch.equal(ordinary.logits, twin.logits)
    assert torch.equal(ordinary.encoder_last_hidden_state, twin.encoder_last_hidden_state)
    assert torch.equal(ordinary.decoder_hidden_states[-2] * 2**13, twin.decoder_hidden_states[-2])
    assert twin.decoder_hidden_states[-2].abs().max() > 3 * torch.finfo(torch.float16).max


@pytest.fixture(scope="module")
def twins() -> dict[str, Quality]:
    return numerics.of_twins((13,), samples=16)


def test_patched_the_twin_is_the_ordinary_model_in_fp16(twins: dict[str, Quality]) -> None:
    fp32, fp16 = twins["ordinary, stock fp32"], twins[f"ordinary, {CLAMPED}"]
    stock = twins[f"twin 2^13, {CLAMPED}"]
    assert twins["twin 2^13, stock fp32"] == fp32
    assert abs(stock.loss - fp32.loss) > 100 * abs(fp16.loss - fp32.loss)
    for way in (FAST, DEFAULT):
        patched = twins[f"twin 2^13, {way}"]
        assert patched.nonfinite == 0
        assert abs(patched.loss - fp32.loss) < 1e-3
        assert abs(patched.gen_len - fp32.gen_len) <= 0.5
        assert abs(patched.bleu - fp32.bleu) <= 2
