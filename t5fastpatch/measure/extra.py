"""The libraries that only the measuring needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import T5FastPatchError


def require(module: str) -> ModuleType:
    """Imports a module of the extra `ablate`.

    Raises:
        T5FastPatchError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.split(".")[0]
        raise T5FastPatchError(f'{missing} is not installed: pip install "t5fastpatch[ablate]"') from error
