"""The libraries that only the measuring and its reports need."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import T5FastPatchError


def require(module: str, extra: str = "ablate") -> ModuleType:
    """Imports a module of one of the package's extras.

    Raises:
        T5FastPatchError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.split(".")[0]
        raise T5FastPatchError(f'{missing} is not installed: pip install "t5fastpatch[{extra}]"') from error
