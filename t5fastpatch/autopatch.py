"""The environment variable: `T5FASTPATCH=name,name` patches every T5 of a process, with no change to its code.

Whatever imports this package first calls `activate`: the start-up hook (a .pth file in site-packages), the program
itself, or `t5fastpatch run`. From then on each family's classes are patched when their module is imported, and no
sooner. Nothing here may break the host program: what goes wrong is one line on stderr, and the program runs unpatched.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType

import wrapt

from .errors import T5FastPatchError
from .families import FAMILIES, Family
from .registry import check_names

VARIABLE = "T5FASTPATCH"
QUIET = "T5FASTPATCH_QUIET"

_active = False


def requested() -> list[str]:
    """The names in the variable; commas and white space part them."""
    return os.environ.get(VARIABLE, "").replace(",", " ").split()


def activate() -> None:
    """Switches on what the variable asks for; does nothing the second time, or when it asks for nothing."""
    global _active
    names = requested()
    if _active or not names:
        return
    _active = True
    try:
        check_names(names)
    except T5FastPatchError as error:
        _say(f"{VARIABLE} changes nothing: {error}")
        return
    for family in FAMILIES.values():
        wrapt.register_post_import_hook(functools.partial(_patch, family, names), family.module)


def _patch(family: Family, names: list[str], module: ModuleType) -> None:
    try:
        # Imported here, for the sake of programs that never import torch.
        classwide = importlib.import_module(f"{__package__}.classwide")
        registry = importlib.import_module(f"{__package__}.registry")
        _say(classwide.enable(family, registry.select(names)).line())
    except Exception as error:
        _say(f"{family.name} stays unpatched: {error}")


def _say(line: str) -> None:
    if os.environ.get(QUIET, "") in ("", "0"):
        print(line if line.startswith("t5fastpatch") else f"t5fastpatch: {line}", file=sys.stderr)
