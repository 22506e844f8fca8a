"""`t5fastpatch run`: a script or module under `T5FASTPATCH`, where Python's start-up hooks are not available."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader

from .autopatch import VARIABLE, activate
from .errors import NotFoundError
from .registry import check_names, names_of


def check(target: str, *, module: bool, patches: str | None) -> None:
    """Checks what is asked for, before the program starts; whether there is a module, running it will tell.

    Raises:
        NotFoundError: there is no such script.
        UnknownPatchError: `patches` has a name that is no patch's and no preset's.
    """
    check_names(names_of(patches or "safe"))
    if not module and not os.path.exists(target):
        hint = "" if target.endswith(".py") else f"; for a module say -m {target}"
        raise NotFoundError(f"there is no script {target!r}{hint}")


def run(target: str, args: Sequence[str], *, module: bool = False, patches: str | None = None) -> None:
    """Runs `target` as Python would: `sys.argv`, `sys.path[0]` and `__main__` are its own.

    Args:
        target: the path of a script (or of a folder or zip file with a `__main__.py`), or the name of a module.
        args: its arguments.
        module: whether `target` is a module's name, as for `python -m`.
        patches: the value for `T5FASTPATCH`; `None` leaves what the environment has, or else `safe`.

    Raises:
        Whatever the program raises.
    """
    os.environ[VARIABLE] = patches or os.environ.get(VARIABLE) or "safe"
    activate()
    sys.argv = [target, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target) or target.endswith(".pyc") or zipfile.is_zipfile(target):
        runpy.run_path(os.path.abspath(target), run_name="__main__")
    else:
        _run_script(os.path.abspath(target))


def _run_script(path: str) -> None:
    """Unlike `runpy.run_path`, leaves `sys.argv[0]` as given and `__main__` in place for what runs at exit."""
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    exec(code, vars(main))
