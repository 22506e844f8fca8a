from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from t5fastpatch.measure import memory
from t5fastpatch.measure.memory import Memory, bracket

CPU = torch.device("cpu")
MEGABYTE = 2**20
SIZE = 64 * MEGABYTE
# Python's own objects, and the pages that the kernel counts in batches.
TOLERANCE = 6 * MEGABYTE

on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux has the high-water mark")


def written(size: int) -> torch.Tensor:
    """That many bytes, each written to: what is only reserved is not resident.

    Mapped for themselves: the allocator may give out pages that earlier tests have left resident.
    """
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)


@on_linux
def test_what_a_stage_keeps_is_in_its_delta_and_its_peak() -> None:
    kept, found = bracket(lambda: written(SIZE), CPU)
    assert kept.numel() == SIZE
    assert found.host_delta == pytest.approx(SIZE, abs=TOLERANCE)
    assert found.host_peak == pytest.approx(SIZE, abs=TOLERANCE)


@on_linux
def test_what_a_stage_frees_is_in_its_peak_only() -> None:
    _, found = bracket(lambda: written(SIZE)[0].item(), CPU)
    assert found.host_delta == pytest.approx(0, abs=TOLERANCE)
    assert found.host_peak == pytest.approx(SIZE, abs=TOLERANCE)


@on_linux
def test_what_was_there_before_is_freed_with_a_negative_delta_and_no_peak() -> None:
    held = [written(SIZE)]
    _, found = bracket(held.clear, CPU)
    assert found.host_delta == pytest.approx(-SIZE, abs=TOLERANCE)
    assert found.host_peak == pytest.approx(0, abs=TOLERANCE)


@on_linux
def test_the_peak_of_an_earlier_stage_does_not_count() -> None:
    bracket(lambda: written(2 * SIZE)[0].item(), CPU)
    _, found = bracket(lambda: written(SIZE)[0].item(), CPU)
    assert found.host_peak == pytest.approx(SIZE, abs=TOLERANCE)


def test_without_the_high_water_mark_nothing_is_said_of_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "none")
    assert bracket(lambda: 3, CPU) == (3, Memory(None, None, None, None))


def test_on_cuda_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use: Iterator[int] = iter([100, 130])
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(in_use))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 190)
    _, found = bracket(lambda: None, torch.device("cuda"))
    assert (found.device_delta, found.device_peak) == (30, 90)
    assert asked == [torch.device("cuda")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_a_gpu_s_peak_and_delta() -> None:
    device = torch.device("cuda")
    kept, found = bracket(lambda: torch.ones(SIZE, device=device)[: SIZE // 4].clone(), device)
    assert kept.is_cuda
    assert (found.device_delta, found.device_peak) == (SIZE, 5 * SIZE)


def test_an_error_of_the_stage_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        bracket(lambda: 1 // 0, CPU)
