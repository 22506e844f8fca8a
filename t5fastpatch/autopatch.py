"""The environment variable: `T5FASTPATCH=name,name` patches every T5 of a process, with no change to its code.

Whatever imports this package first calls `activate`: the start-up hook (a .pth file in site-packages), the program
itself, or `t5fastpatch run`. From then on each family's classes are patched when their module is imported, and no
sooner. Nothing here may break the host program: what goes wrong is one line on stderr, and the program runs unpatched.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

from .families import FAMILIES, Family
from .messages import say
from .registry import check_names

VARIABLE = "T5FASTPATCH"

_seen: list[str] = []  # what the variable held at the last call of activate
_names: list[str] = []  # what is in force: the same, unless it was wrong
_hooked = False


def requested() -> list[str]:
    """The names in the variable; commas and white space part them."""
    return os.environ.get(VARIABLE, "").replace(",", " ").split()


def activate() -> None:
    """Switches on what the variable asks for, in the families that are imported and in those that will be.

    Called again, it does nothing unless the variable has changed since; then it changes what is put on the families
    that are imported from now on.
    """
    global _seen, _names, _hooked
    names = requested()
    if names in (_seen, []):
        return
    _seen, _names = names, []
    try:
        check_names(names)
        _names = names
        if not _hooked:
            _hooked = True
            _hook_imports()
    except Exception as error:
        say(f"{VARIABLE} changes nothing: {error}")


def _hook_imports() -> None:
    import wrapt

    for family in FAMILIES.values():
        wrapt.register_post_import_hook(functools.partial(_patch, family), family.module)


def _patch(family: Family, module: ModuleType) -> None:
    if not _names:
        return
    try:
        # Imported here, for the sake of programs that never import torch.
        classwide = importlib.import_module(f"{__package__}.classwide")
        registry = importlib.import_module(f"{__package__}.registry")
        say(classwide.enable(family, registry.select(_names)).line())
        importlib.import_module(f"{__package__}.onload").patch_what_is_loaded(_names)
    except Exception as error:
        say(f"{family.name} stays unpatched: {error}")
