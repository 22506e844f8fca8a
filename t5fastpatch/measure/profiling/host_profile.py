"""Where the host's time goes in a call, by Python function."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch

from ..timing import Entry, Prepare
from .turns import in_turn

BUILT_IN = "built-in"
"""The module of functions that are not Python; all ops of PyTorch are among them."""
_PACKAGES = "site-packages"


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the host.

    Attributes:
        module: its file, `"transformers/models/t5/modeling_t5.py"`, or `BUILT_IN`.
        name: with its line where it has one, `"forward:123"`.
        calls: per call of the whole.
        seconds: spent in it and not in what it calls, per call of the whole.
    """

    module: str
    name: str
    calls: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class HostProfile:
    """The host's time in a call: seconds are the median over several; `functions` by falling time of their own."""

    functions: tuple[Function, ...]

    @property
    def seconds(self) -> float:
        """Of all functions, per call."""
        return sum(function.seconds for function in self.functions)

    def by_module(self) -> dict[str, float]:
        """Seconds per call that are spent in each module's own functions, the longest first."""
        seconds: Counter[str] = Counter()
        for function in self.functions:
            seconds[function.module] += function.seconds  # type: ignore[assignment]
        return dict(seconds.most_common())

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain dicts, lists, strings and numbers."""
        return {**dataclasses.asdict(self), "seconds": self.seconds, "by_module": self.by_module()}


def host_profiles(variants: Mapping[str, Entry], *, calls: int = 20) -> dict[str, HostProfile]:
    """Profiles a call of each variant with cProfile, all of them in turn, under `torch.no_grad()`.

    cProfile adds to the time of every Python function, so code of many small functions looks dearer than it is.

    Args:
        variants: by name, as for `timing.interleave`; what they prepare is no part of the profile.
        calls: how many of each are profiled.

    Raises:
        Whatever a call raises.
    """

    def measure(name: str, prepare: Prepare) -> cProfile.Profile:
        profiler, call = cProfile.Profile(), prepare()
        profiler.enable()
        try:
            call()
        finally:
            profiler.disable()
        return profiler

    with torch.no_grad():
        return {name: _combined(found) for name, found in in_turn(variants, calls, measure).items()}


def _combined(profilers: Sequence[cProfile.Profile]) -> HostProfile:
    """The mean of the numbers, the median of the seconds."""
    found: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
    for profiler in profilers:
        stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        # By file, line and name: primitive calls, calls, own and cumulative seconds, and callers.
        for place, (_, count, own, _, _) in stats.items():
            found.setdefault(place, []).append((count, own))
    calls = len(profilers)
    functions = []
    for place, figures in found.items():
        # A function that a call does not come to takes no time in it.
        figures += [(0, 0.0)] * (calls - len(figures))
        counts, seconds = zip(*figures)
        functions.append(Function(*_place(*place), sum(counts) / calls, statistics.median(seconds)))
    return HostProfile(tuple(sorted(functions, key=lambda function: -function.seconds)))


def _place(file: str, line: int, name: str) -> tuple[str, str]:
    """Module and name of a function; a patched one has those of upstream's, whose lines it keeps."""
    if file == "~":
        method = re.fullmatch(r"<method '(\w+)' of '(.+)' objects>", name)
        return BUILT_IN, "{1}.{0}".format(*method.groups()) if method else re.sub(r"^<(built-in method )?|>$", "", name)
    parts = PurePath(file.partition(" [t5fastpatch")[0]).parts
    installed = parts[parts.index(_PACKAGES) + 1 :] if _PACKAGES in parts else parts[-2:]
    return "/".join(installed), f"{name}:{line}"
