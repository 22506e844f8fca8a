"""Memory of one stage of the work, on the host and on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

_PROCESS = Path("/proc/self")


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a stage added to the memory that was in use at its start, in bytes.

    Attributes:
        host_delta: resident memory of the process at the stage's end, less that at its start.
        host_peak: the most that was resident at any time of the stage, less what was at its start. What the process
            had kept of freed memory, and takes again, is resident all along and counts in neither.
        device_delta: memory that PyTorch's tensors take on the device at the end, less that at the start.
        device_peak: the most that they took at any time of the stage, less what they took at its start.

    The host's two are `None` but on Linux, the device's two but on CUDA.
    """

    host_delta: int | None
    host_peak: int | None
    device_delta: int | None
    device_peak: int | None


def bracket(stage: Callable[[], T], device: torch.device) -> tuple[T, Memory]:
    """Runs a stage and says what memory it took; nothing is sampled meanwhile, so its timing is not disturbed.

    The kernel's and PyTorch's high-water marks are reset at the start, for whoever else reads them too.

    Args:
        stage: what to run.
        device: where it runs, beside the host.

    Returns:
        What `stage` returns, and its memory.
    """
    host, on_device = _host(), _device(device)
    result = stage()
    return result, Memory(*host(), *on_device())


_Reading = Callable[[], tuple[int | None, int | None]]
"""Gives the delta and the peak since the reading was begun."""


def _host() -> _Reading:
    try:
        # "5" resets the peak alone (proc_pid_clear_refs(5)); not every kernel and sandbox lets it.
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return lambda: (None, None)
    start = _status("VmRSS")

    def read() -> tuple[int, int]:
        return _status("VmRSS") - start, max(_status("VmHWM") - start, 0)

    return read


def _status(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


def _device(device: torch.device) -> _Reading:
    if device.type != "cuda":
        return lambda: (None, None)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    return lambda: (torch.cuda.memory_allocated(device) - start, torch.cuda.max_memory_allocated(device) - start)
