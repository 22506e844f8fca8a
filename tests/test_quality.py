from __future__ import annotations

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
