"""Patches that make Hugging Face T5 models run in half precision as they should, each on its own switch."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import apply, patched, remove, status
    from .errors import (
        ConflictError,
        ForeignForwardError,
        InvalidPatchError,
        MetaDeviceError,
        NotAppliedError,
        NotFoundError,
        NothingToPatchError,
        NotT5Error,
        ScaleError,
        SourceUnavailableError,
        T5FastPatchError,
        UnexpectedSourceError,
        UnknownPatchError,
        UnprovenError,
        WrongTypeError,
    )
    from .headroom.check import check
    from .patch import Contract, ForwardPatch, MethodPatch, Role, SourcePatch, StackPatch, State
    from .registry import list_patches, register

__version__ = "0.1.0"

__all__ = [
    "ConflictError",
    "Contract",
    "ForeignForwardError",
    "ForwardPatch",
    "InvalidPatchError",
    "MetaDeviceError",
    "MethodPatch",
    "NotAppliedError",
    "NotFoundError",
    "NotT5Error",
    "NothingToPatchError",
    "Role",
    "ScaleError",
    "SourcePatch",
    "SourceUnavailableError",
    "StackPatch",
    "State",
    "T5FastPatchError",
    "UnexpectedSourceError",
    "UnknownPatchError",
    "UnprovenError",
    "WrongTypeError",
    "apply",
    "check",
    "list_patches",
    "patched",
    "register",
    "remove",
    "status",
]

# Imported at first use: the start-up hook imports this package in every process, and must not pull in torch.
_MODULES = dict.fromkeys(("apply", "patched", "remove", "status"), "engine")
_MODULES["check"] = "headroom.check"
_MODULES |= dict.fromkeys(("Contract", "ForwardPatch", "MethodPatch", "Role"), "patch")
_MODULES |= dict.fromkeys(("SourcePatch", "StackPatch", "State"), "patch")
_MODULES |= dict.fromkeys(("list_patches", "register"), "registry")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if os.environ.get("T5FASTPATCH"):
    importlib.import_module(f"{__name__}.autopatch").activate()
