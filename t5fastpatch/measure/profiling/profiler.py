"""Profiling with `torch.profiler`."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..timing import Entry, Prepare, stopwatch_for
from . import events as events_of
from .events import OpEvent
from .module_ranges import PREFIX, module_ranges
from .profile import Kernel, Op, Profile, combined
from .tensor_cores import uses_tensor_cores
from .turns import in_turn

CALL = PREFIX + "call"
_NO_KERNELS = ("Memcpy", "Memset")
_NORMS, _REPETITIONS = 10, 10
Key = TypeVar("Key")
Value = TypeVar("Value")


def profile_variants(variants: Mapping[str, Entry], device: torch.device, *, calls: int = 20) -> dict[str, Profile]:
    """Profiles a call of each variant, all of them in turn, under `torch.no_grad()`.

    On a CPU the profiler's own cost (see `cost_of_an_event`) is taken off each op. Of compiled functions only the
    kernels are seen, as `other`.

    Args:
        variants: by name, as for `timing.interleave`; what they prepare is no part of the profile.
        device: where they run.
        calls: how many of each are profiled; as many again are timed without the profiler.

    Raises:
        Whatever a call raises.
    """
    stopwatch = stopwatch_for(device)
    event_cost = cost_of_an_event() if device.type == "cpu" else 0.0

    def measure(name: str, prepare: Prepare) -> Profile:
        wall = stopwatch(prepare())
        return summary(_recorded(prepare(), device).events(), device.type, wall, event_cost)

    with torch.no_grad():
        return {name: combined(found) for name, found in in_turn(variants, calls, measure).items()}


def profile_call(prepare: Prepare, device: torch.device, *, calls: int = 20) -> Profile:
    """Profiles one call, as `profile_variants` does."""
    return profile_variants({"": lambda: contextlib.nullcontext(prepare)}, device, calls=calls)[""]


def write_trace(prepare: Prepare, device: torch.device, file: Path) -> None:
    """Writes the Chrome trace of one call, after one that warms it up; https://ui.perfetto.dev shows it."""
    with torch.no_grad():
        prepare()()
        _recorded(prepare(), device).export_chrome_trace(str(file))


def _recorded(call: Callable[[], object], device: torch.device) -> Any:
    with module_ranges(), _profiler(device) as profiler:
        with torch.profiler.record_function(CALL):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return profiler


@functools.cache
def cost_of_an_event() -> float:
    """Seconds that the profiler adds to an op for each op inside it, on this machine.

    Without it a norm in one op of many parts looks dearer on a CPU than one written out in Python, though it is not.
    The figure is the time of such a norm with the profiler less that without, by the number of its ops.
    """
    rows = torch.ones(8, 64, dtype=torch.float16)

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(_NORMS):
            torch.nn.functional.rms_norm(rows, (64,))
        return time.perf_counter() - started

    with torch.no_grad():
        seconds()
        without = min(seconds() for _ in range(_REPETITIONS))
        with _profiler(rows.device) as profiler:
            within = min(seconds() for _ in range(_REPETITIONS))
    return max(0.0, within - without) / (len(profiler.events()) / _REPETITIONS)


def _profiler(device: torch.device) -> Any:
    # Else PyTorch announces each start on stderr; it reads this at its first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=True)


def summary(events: Iterable[Any], device: str, wall: float, event_cost: float = 0.0) -> Profile:
    """The profile of one call.

    Args:
        events: the `FunctionEvent`s of `torch.profiler.profile.events()`; what is not in the range `CALL` is left out.
        device: `"cpu"` or `"cuda"`.
        wall: of the `Profile`.
        event_cost: seconds that are taken off an op on a CPU for each op inside it.
    """
    call = next(event for event in events if event.name == CALL and events_of.is_range(event))
    found = list(events_of.ops(call))
    seconds_of = _host_seconds if device == "cpu" else _device_seconds
    ops = _grouped(((op.category, op.name), seconds_of(op, event_cost)) for op in found)
    kernels = _grouped(kernel for op in found for kernel in _kernels(op))
    profile = Profile(
        device,
        1,
        wall,
        tuple(Op(*key, len(seconds), sum(seconds)) for key, seconds in ops.items()),
        tuple(Kernel(*key, len(seconds), sum(seconds)) for key, seconds in kernels.items()),
        events_of.launches(call),
        events_of.waits(call),
    )
    return combined([profile])


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    grouped: dict[Key, list[Value]] = {}
    for key, value in pairs:
        grouped.setdefault(key, []).append(value)
    return grouped


def _host_seconds(op: OpEvent, event_cost: float) -> float:
    return max(0.0, op.seconds - op.inner * event_cost)


def _device_seconds(op: OpEvent, event_cost: float) -> float:
    return sum(seconds for _, seconds in op.kernels)


def _kernels(op: OpEvent) -> Iterator[tuple[tuple[str, str, bool], float]]:
    for name, seconds in op.kernels:
        if not name.startswith(_NO_KERNELS):
            yield (op.category, name, uses_tensor_cores(name)), seconds
