"""The ops in what `torch.profiler` recorded, each with its category and its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .categories import CASTS, OTHER, category
from .module_ranges import PREFIX

INTO = " -> "
"""Between the dtypes in the name of a cast."""
_USER_SCOPE = 7  # `at::RecordScope::USER_SCOPE`, that of `record_function`
_DTYPES = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32", "double": "fp64", "long int": "int64"}
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_RUNTIME = ("cuda", "cu")


@dataclasses.dataclass(frozen=True)
class OpEvent:
    """One call of an op from Python code.

    Attributes:
        name: without `aten::`; a cast, of a norm too, with its dtypes, `"to fp16 -> fp32"`.
        category: one of `CATEGORIES`.
        seconds: of host time, with all that PyTorch called for it.
        inner: how many ops PyTorch called for it.
        kernels: name and seconds of each kernel, copy and fill that it, or what it called, launched on the device.
    """

    name: str
    category: str
    seconds: float
    inner: int = 0
    kernels: tuple[tuple[str, float], ...] = ()


def ops(event: Any, within: str = "") -> Iterator[OpEvent]:
    """The ops inside a range.

    Args:
        event: the range's event, one of `torch.profiler.profile.events()`.
        within: the range, as for `categories.category`.
    """
    # Launched in the range but by no op, as Triton's kernels are; CUDA repeats the range itself among them.
    for kernel in _kernels(event):
        if kernel[0] != event.name:
            yield OpEvent(kernel[0], OTHER, 0.0, kernels=(kernel,))
    for child in event.cpu_children:
        if is_range(child):
            ours = child.name.startswith(PREFIX)
            yield from ops(child, child.name.removeprefix(PREFIX) if ours else within)
        elif not _is_runtime(child):
            yield _op(child, within)


def launches(event: Any) -> int:
    """How often the host launched a kernel, or a graph of them, in a range."""
    return sum(each.name.startswith(_LAUNCHES) for each in _tree(event))


def waits(event: Any) -> int:
    """How often the host called one of CUDA's synchronising functions in a range."""
    return sum("Synchronize" in each.name for each in _tree(event) if _is_runtime(each))


def is_range(event: Any) -> bool:
    """Whether an event is one of `record_function`, and no op."""
    return bool(event.scope == _USER_SCOPE)


def _op(event: Any, within: str) -> OpEvent:
    tree = list(_tree(event))
    copies = [_copied(each) for each in tree if each.name == "aten::copy_"]
    cast = next((pair for pair in copies if pair[0] != pair[1]), None)
    kind, kind_elsewhere = (
        category(event.name, where, copies=bool(copies), casts=cast is not None) for where in (within, "")
    )
    name = event.name.removeprefix("aten::")
    if cast is not None and kind_elsewhere == CASTS:
        name = f"{name} {cast[0]}{INTO}{cast[1]}"
    kernels = tuple(kernel for each in tree for kernel in _kernels(each))
    return OpEvent(name, kind, event.cpu_time_total / 1e6, len(tree) - 1, kernels)


def _copied(copy: Any) -> tuple[str, str]:
    """From which dtype a `copy_` copies into which."""
    # Older releases of PyTorch keep no dtypes here: there, a `_to_copy` is taken for a cast, any other copy for none.
    dtypes = getattr(copy, "input_dtypes", None)
    if not dtypes:
        return ("?", "other ?") if copy.cpu_parent.name == "aten::_to_copy" else ("?", "?")
    target, source = (_DTYPES.get(dtype, dtype) for dtype in dtypes[:2])
    return source, target


def _kernels(event: Any) -> list[tuple[str, float]]:
    return [(kernel.name, kernel.duration / 1e6) for kernel in event.kernels]


def _is_runtime(event: Any) -> bool:
    return event.name.startswith(_RUNTIME) and "::" not in event.name


def _tree(event: Any) -> Iterator[Any]:
    yield event
    for child in event.cpu_children:
        yield from _tree(child)
