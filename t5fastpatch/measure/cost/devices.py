"""GPUs by what their vendor says of them, for predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...errors import NotFoundError

_T4 = "NVIDIA T4 datasheet"
_V100 = "NVIDIA V100 datasheet, SXM2"
_TURING = "NVIDIA Turing GPU Architecture whitepaper, appendix A, Founders Edition"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_A100 = "NVIDIA A100 datasheet, 80 GB SXM"
_H100 = "NVIDIA H100 datasheet, SXM"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5, without sparsity"
_H200 = "NVIDIA H200 datasheet, SXM"
_SAME_CHIP = "as the H100 SXM, the same GPU: " + _HOPPER


@dataclasses.dataclass(frozen=True)
class Figure:
    """A peak rate, per second, and who says so."""

    per_second: float
    source: str


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: as in `DEVICES`.
        bandwidth: of its memory, bytes.
        rates: of matrix products without sparsity, FLOPs, by dtype: `"float32"` on the ordinary cores, `"tf32"` and the
            halves on tensor cores, accumulating in fp32. A dtype that is missing has no fast product there.
    """

    name: str
    bandwidth: Figure
    rates: Mapping[str, Figure]


def _device(name: str, bandwidth: Figure, source: str, **teraflops: float) -> Device:
    return Device(name, bandwidth, {dtype: Figure(rate * 1e12, source) for dtype, rate in teraflops.items()})


DEVICES = {
    device.name: device
    for device in (
        _device("T4", Figure(320e9, _T4), _T4, float32=8.1, float16=65),
        _device("V100", Figure(900e9, _V100), _V100, float32=15.7, float16=125),
        _device("RTX 2080 Ti", Figure(616e9, _TURING), _TURING, float32=14.2, float16=56.9),
        _device("RTX 3090", Figure(936e9, _AMPERE), _AMPERE, float32=35.6, tf32=35.6, float16=71, bfloat16=71),
        _device("A100", Figure(2039e9, _A100), _A100, float32=19.5, tf32=156, float16=312, bfloat16=312),
        _device("H100", Figure(3350e9, _H100), _HOPPER, float32=66.9, tf32=494.7, float16=989.4, bfloat16=989.4),
        _device("H200", Figure(4800e9, _H200), _SAME_CHIP, float32=66.9, tf32=494.7, float16=989.4, bfloat16=989.4),
    )
}


def device_named(name: str) -> Device:
    """The device of that name, in whatever case and with or without spaces and hyphens.

    Raises:
        NotFoundError: it is not in the table.
    """
    wanted = _plain(name)
    found = next((device for device in DEVICES.values() if wanted in (_plain(device.name), _short(device))), None)
    if found is None:
        raise NotFoundError(f"there is no device {name!r} in the table: there are {', '.join(DEVICES)}")
    return found


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")


def _short(device: Device) -> str:
    return _plain(device.name).removeprefix("rtx")
