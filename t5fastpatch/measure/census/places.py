"""Where in a program something happens: the module that runs, and the line of Python."""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# Their modes stand between the caller and torch.
_WATCHERS = frozenset({f"{__package__}.counting", f"{__package__}.fake"})


class ModulePath:
    """Follows which module's forward runs, inside a `with` block; leaves no hook behind.

    Args:
        model: gives the paths their names, as in `model.named_modules()`, `""` for itself. Of modules outside of it,
            and of all without it, the path begins with the class of the outermost module that is called.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names = {} if model is None else {module: name for name, module in model.named_modules()}
        self._running: list[str] = []

    @property
    def current(self) -> str:
        """The path of the innermost module that runs; `""` outside of any."""
        return self._running[-1] if self._running else ""

    def __enter__(self) -> ModulePath:
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            # The module that raises ends as well.
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            root = type(module).__name__
            inner = {each: f"{root}.{name}" if name else root for name, each in module.named_modules()}
            self._names = inner | self._names
        self._running.append(self._names[module])

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        self._running.pop()


def calling_line() -> str:
    """The innermost line of Python outside of torch and of what watches it: `"modeling_t5.py:123 forward"`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed_over(frame):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_passed_over(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name in _WATCHERS or name.partition(".")[0] == "torch"
