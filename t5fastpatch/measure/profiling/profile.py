"""A profile of a call: the ops it makes, and on CUDA the kernels, by category."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from .categories import CATEGORIES
from .events import INTO


@dataclasses.dataclass(frozen=True)
class Op:
    """An op that Python code called, with all that PyTorch called for it.

    Attributes:
        category: one of `CATEGORIES`.
        name: without `aten::`; a cast, of a norm too, with its dtypes, `"to fp16 -> fp32"`.
        calls: how often, per call of the whole.
        seconds: per call of the whole: of host time on a CPU, of its kernels' time on CUDA.
    """

    category: str
    name: str
    calls: float
    seconds: float

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from other ops."""
        return self.category, self.name


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A CUDA kernel.

    Attributes:
        category: that of the op that launched it.
        name: as CUDA gives it.
        tensor_cores: whether it runs on them, by its name.
        calls: how often, per call of the whole.
        seconds: on the device, per call of the whole.
    """

    category: str
    name: str
    tensor_cores: bool
    calls: float
    seconds: float

    @property
    def key(self) -> tuple[str, str, bool]:
        """What tells it from other kernels."""
        return self.category, self.name, self.tensor_cores


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a call spends its time on: seconds are the median over several, numbers the mean.

    Attributes:
        device: `"cpu"` or `"cuda"`: whose time it is.
        calls: how many were profiled.
        wall: seconds of a call without the profiler, the median of as many. On a CPU what the ops leave of it is
            Python's; on CUDA, in that time the device waits for the host.
        ops: by falling time.
        kernels: by falling time; none on a CPU.
        launches: kernel launches by the host, per call; 0 on a CPU.
        waits: calls of CUDA's synchronising functions, per call; 0 on a CPU.
    """

    device: str
    calls: int
    wall: float
    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...] = ()
    launches: float = 0.0
    waits: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all ops, per call."""
        return sum(op.seconds for op in self.ops)

    def by_category(self) -> dict[str, float]:
        """Seconds per call, by each of `CATEGORIES`; they add up to `seconds`."""
        return {name: sum(op.seconds for op in self.ops if op.category == name) for name in CATEGORIES}

    def calls_by_category(self) -> dict[str, float]:
        """Ops per call, kernels on CUDA, by each of `CATEGORIES`."""
        counted: Sequence[Op | Kernel] = self.kernels if self.device == "cuda" else self.ops
        return {name: sum(each.calls for each in counted if each.category == name) for name in CATEGORIES}

    def casts(self) -> tuple[float, float]:
        """How many casts there are and their seconds, per call, those of norms too."""
        casts = [op for op in self.ops if INTO in op.name]
        return sum(op.calls for op in casts), sum(op.seconds for op in casts)

    def tensor_core_shares(self) -> tuple[float, float]:
        """Which part of the kernels, and of their time, is on tensor cores; 0 and 0 where there are none."""
        every, on_them = self.kernels, [kernel for kernel in self.kernels if kernel.tensor_cores]
        if not every:
            return 0.0, 0.0
        return (
            sum(kernel.calls for kernel in on_them) / sum(kernel.calls for kernel in every),
            sum(kernel.seconds for kernel in on_them) / sum(kernel.seconds for kernel in every),
        )

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain dicts, lists, strings and numbers."""
        (casts, cast_seconds), (kernels, kernel_seconds) = self.casts(), self.tensor_core_shares()
        return {
            **dataclasses.asdict(self),
            "seconds": self.seconds,
            "by_category": self.by_category(),
            "calls_by_category": self.calls_by_category(),
            "casts": {"calls": casts, "seconds": cast_seconds},
            "tensor_cores": {"kernels": kernels, "seconds": kernel_seconds},
        }


def combined(profiles: Sequence[Profile]) -> Profile:
    """Several profiles of the same call as one: the mean of the numbers, the median of the seconds."""
    return Profile(
        profiles[0].device,
        len(profiles),
        statistics.median(profile.wall for profile in profiles),
        tuple(Op(*each) for each in _per_call([profile.ops for profile in profiles])),
        tuple(Kernel(*each) for each in _per_call([profile.kernels for profile in profiles])),
        statistics.fmean(profile.launches for profile in profiles),
        statistics.fmean(profile.waits for profile in profiles),
    )


def _per_call(calls: Sequence[Sequence[Op | Kernel]]) -> list[tuple[Any, ...]]:
    """The fields of the same op or kernel over all calls, the longest first; where it is not, it takes no time."""
    found: dict[tuple[Any, ...], list[Op | Kernel]] = {}
    for each in (each for call in calls for each in call):
        found.setdefault(each.key, []).append(each)
    figures = [
        (
            *key,
            sum(each.calls for each in same) / len(calls),
            statistics.median([*(each.seconds for each in same), *[0.0] * (len(calls) - len(same))]),
        )
        for key, same in found.items()
    ]
    return sorted(figures, key=lambda each: -each[-1])
