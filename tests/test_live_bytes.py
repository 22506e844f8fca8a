"""The peak of live tensors is counted exactly."""

from __future__ import annotations

import torch

from t5fastpatch.measure.census import peak_live_bytes


def test_the_peak_is_the_most_that_is_alive_at_once() -> None:
    def fall_and_rise() -> torch.Tensor:
        a = torch.ones(1000)
        b = a * 2
        del a
        c = b + 1
        del b
        return c.view(10, 100) * weight

    weight = torch.randn(100)
    assert peak_live_bytes(fall_and_rise) == 2 * 4000


def test_views_and_what_was_there_before_take_nothing() -> None:
    weight = torch.randn(10, 100)
    assert peak_live_bytes(lambda: weight.view(100, 10).t()) == 0
    assert peak_live_bytes(lambda: weight.add_(1)) == 0
    assert peak_live_bytes(lambda: [torch.ones(10)[:1] for _ in range(5)]) == 5 * 40


def test_what_is_kept_for_the_backward_counts() -> None:
    weight = torch.randn(1000, requires_grad=True)

    def chain() -> torch.Tensor:
        return weight.exp().exp().exp()

    assert peak_live_bytes(chain) == 3 * 4000
    with torch.no_grad():
        assert peak_live_bytes(chain) == 2 * 4000
