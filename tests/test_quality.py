from __future__ import annotations

import math

import pytest
import torch

from t5fastpatch.measure.quality import OutputTally, agreement, trimmed


def test_generations_end_with_the_end_of_sentence() -> None:
    tokens = torch.tensor([[0, 5, 6, 1, 0], [0, 5, 0, 7, 8], [0, 1, 0, 0, 0], [0, 5, 0, 0, 0]])
    assert trimmed(tokens, end=1, padding=0) == [[5, 6, 1], [5, 0, 7, 8], [1], [5]]


def test_agreement_is_over_the_longer_generation() -> None:
    assert agreement([[5, 6, 1]], [[5, 6, 1]]) == 1.0
    assert agreement([[5, 6, 1], [7]], [[5, 1], [7, 8]]) == 2 / 5
    assert agreement([[]], [[]]) == 1.0


def test_differences_are_taken_at_valid_positions_only() -> None:
    tally = OutputTally()
    mine = torch.tensor([[[1.0, 2.0], [9.0, 9.0]]])
    tally.add(mine, torch.tensor([[[1.5, 2.0], [0.0, 0.0]]]), torch.tensor([[True, False]]))
    tally.add(mine, mine, torch.tensor([[True, True]]))
    quality = tally.quality()
    assert (quality.max_difference, quality.mean_difference, quality.nonfinite) == (0.5, 0.5 / 6, 0)


def test_halves_are_compared_and_scored_in_fp32() -> None:
    half, exact = torch.tensor([[[1.0, 3.0]]]).half(), torch.tensor([[[1.0001, 3.0]]])
    tally = OutputTally()
    tally.add(half, exact, torch.tensor([[True]]))
    tally.add_loss(half, torch.tensor([[0]]))
    quality = tally.quality()
    assert quality.max_difference == pytest.approx(1e-4, rel=1e-2)
    assert quality.loss == pytest.approx(2 + math.log1p(math.exp(-2)), rel=1e-6)


def test_the_loss_is_a_mean_over_the_tokens_of_all_batches() -> None:
    tally = OutputTally()
    logits = torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]])
    tally.add(logits, logits, torch.tensor([[True, True, True]]))
    tally.add_loss(logits, torch.tensor([[1, 1, -100]]))
    tally.add_loss(logits, torch.tensor([[-100, -100, 1]]))
    expected = sum(math.log1p(math.exp(-each)) for each in (1, 2, 3)) / 3
    assert tally.quality().loss == pytest.approx(expected, rel=1e-6)
