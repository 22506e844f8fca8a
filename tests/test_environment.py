from __future__ import annotations

import pytest
import torch

from t5fastpatch.measure.environment import environment


def test_a_clock_that_nobody_tells_is_left_out_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock_rate(device: torch.device) -> int:
        raise LookupError("an error of the management library")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "clock_rate", clock_rate)
    found = environment(torch.device("cuda"))
    assert found["device_name"] == "a GPU"
    assert "gpu_mhz" not in found
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    assert environment(torch.device("cuda"))["gpu_mhz"] == 1980
