"""Where a figure was measured."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__


def environment(device: torch.device) -> dict[str, str | int]:
    """Versions, device, threads and platform, by name."""
    libraries = ("transformers", "numpy", "scipy", "sacrebleu")
    return {
        "t5fastpatch": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version for name in libraries if (version := _version(name))},
        "device": str(device),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def device_name(device: torch.device) -> str:
    """The model name of the GPU or CPU, as far as the system tells it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
