"""Where a figure was measured."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__

Fact = str | int | float | None


def environment(device: torch.device) -> dict[str, Fact]:
    """Versions, device, threads, platform, clocks and load, by name; what the system does not tell is left out."""
    return {**fixed_environment(device), **_state(device)}


def fixed_environment(device: torch.device) -> dict[str, Fact]:
    """The part of the environment that does not change while a program runs."""
    libraries = ("transformers", "numpy", "sacrebleu", "accelerate", "triton")
    return {
        "t5fastpatch": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version for name in libraries if (version := _version(name))},
        **({"cuda": torch.version.cuda} if device.type == "cuda" else {}),
        "device": str(device),
        "device_name": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def device_name(device: torch.device) -> str:
    """The model name of the GPU or CPU, as far as the system tells it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    names = _cpu_facts("model name")
    return names[0] if names else platform.processor() or platform.machine()


def _state(device: torch.device) -> dict[str, Fact]:
    """The load of the last minute (processes that want to run) and the clocks in MHz."""
    facts: dict[str, Fact] = {}
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    if clocks := [float(each) for each in _cpu_facts("cpu MHz")]:
        facts["cpu_mhz"] = round(max(clocks))
    if device.type == "cuda":
        # NVIDIA's management library, which it takes, may be missing or may not say, with errors of its own.
        with contextlib.suppress(Exception):
            facts["gpu_mhz"] = torch.cuda.clock_rate(device)
    return facts


def _cpu_facts(name: str) -> list[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
