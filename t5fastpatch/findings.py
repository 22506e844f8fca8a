"""What the patches find in upstream's classes: the answer before the act."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from types import FunctionType

from .errors import ForeignForwardError, SourceUnavailableError, T5FastPatchError
from .families import Family, family_of, role_of
from .registry import Finding, Patch, State
from .rewrite import Method, upstream_function

# By the function too, since other code may exchange it.
_found: dict[tuple[Patch, FunctionType], Finding] = {}


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a patch finds in a set of upstream classes.

    Attributes:
        state: `APPLIES`, `UPSTREAM`, `ABSENT` (no class plays the patch's role) or `REFUSED` (by any of the classes).
        classes: the classes it applies to.
        sites: the places in their sources that would change.
        refusal: the error to raise for a refusal.
    """

    state: State
    classes: frozenset[type] = frozenset()
    sites: int = 0
    refusal: T5FastPatchError | None = None


def survey(patch: Patch, classes: Iterable[type]) -> Survey:
    """Asks `patch` about each of the upstream classes."""
    found = {cls: finding(patch, cls) for cls in dict.fromkeys(classes) if role_of(cls) is patch.role}
    for cls, each in found.items():
        if each.refusal is not None:
            message = f"{patch.name} on {cls.__name__}, transformers {transformers_version()}: {each.refusal}"
            return Survey(State.REFUSED, refusal=type(each.refusal)(message))
    applies = frozenset(cls for cls, each in found.items() if each.state is State.APPLIES)
    state = State.APPLIES if applies else State.UPSTREAM if found else State.ABSENT
    return Survey(state, applies, sum(found[cls].sites for cls in applies))


def finding(patch: Patch, cls: type) -> Finding:
    """What `patch` finds in the forward of an upstream class; one that cannot be read is a refusal."""
    try:
        key = patch, upstream_function(cls)
        if key not in _found:
            _found[key] = patch.find(Method.of(cls))
        return _found[key]
    except (SourceUnavailableError, ForeignForwardError) as error:
        # Not remembered: the next look may find it mended.
        return Finding(State.REFUSED, refusal=error)


def upstream_class(cls: type) -> type | None:
    """The class of a T5 family whose forward an instance of `cls` runs, or `None`.

    A subclass that brings a forward of its own runs no code of upstream's to change.
    """
    mro = inspect.getmro(cls)
    for base in mro:
        if family_of(base) is not None and "forward" in vars(base) and "t5fastpatch" not in vars(base):
            return base if all(_keeps_forward(each, base) for each in mro[: mro.index(base)]) else None
    return None


def _keeps_forward(cls: type, upstream: type) -> bool:
    """Whether a class runs the forward of the `upstream` class it derives from, patched or not."""
    if "forward" not in vars(cls) or "t5fastpatch" in vars(cls):
        return True
    # Recent releases wrap the forward of whatever derives from a layer once more, as they did upstream's.
    wrapper, inherited = vars(cls)["forward"], super(cls, cls).forward  # type: ignore[arg-type]
    same_code = getattr(wrapper, "__code__", None) is getattr(vars(upstream)["forward"], "__code__", None)
    return same_code and getattr(wrapper, "__wrapped__", None) is inherited


def family_classes(family: Family) -> list[type]:
    """The classes of an installed family that play a role. Imports the family's module.

    Raises:
        ImportError: the installed release has no such family.
    """
    module = importlib.import_module(family.module)
    classes = [getattr(module, name, None) for names in family.roles.values() for name in names]
    return [cls for cls in classes if isinstance(cls, type) and family_of(cls) is family]


def transformers_version() -> str:
    """The installed release of transformers."""
    version: str = importlib.import_module("transformers").__version__
    return version
