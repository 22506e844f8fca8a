"""Ranges in a profile that say which module an op belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...families import role_of
from ...patch import Role

PREFIX = "t5fastpatch::"
"""What the name of each range begins with; a role's value or `ELSEWHERE` follows."""
ELSEWHERE = "elsewhere"


class _Ranges:
    """Opens a range where a norm or a block begins, and where a block goes into one of its layers."""

    def __init__(self) -> None:
        self._open: list[tuple[str, contextlib.AbstractContextManager[Any]]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        role = role_of(type(module))
        if role in (Role.NORM, Role.BLOCK):
            self._push(role.value)
        elif self._open and self._open[-1][0] == Role.BLOCK.value:
            self._push(ELSEWHERE)
        else:
            self._open.append(("", contextlib.nullcontext()))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop()[1].__exit__(None, None, None)

    def _push(self, name: str) -> None:
        scope: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(PREFIX + name)
        scope.__enter__()
        self._open.append((name, scope))


@contextlib.contextmanager
def module_ranges() -> Iterator[None]:
    """Marks, as long as the `with` block lasts, what every T5 module of the process does while a profiler records.

    An op inside `"norm"` belongs to an RMS norm. One inside `"block"`, and in none of the ranges within it, is done by
    a block itself and not by one of its layers. Other ops are in `ELSEWHERE` or in no range.
    """
    ranges = _Ranges()
    handles = [
        torch_module.register_module_forward_pre_hook(ranges.enter),
        torch_module.register_module_forward_hook(ranges.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
