"""What the patches find in upstream's classes: the answer before the act."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Iterable
from types import FunctionType

from torch.utils._python_dispatch import _disable_current_modes

from .errors import T5FastPatchError, UnexpectedSourceError
from .families import Family, family_of, role_of
from .patch import Finding, Patch, State
from .rewrite import Method, upstream_function

# By the function too, since other code may exchange it.
_found: dict[tuple[Patch, FunctionType], Finding] = {}


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a patch finds in a set of upstream classes.

    Attributes:
        state: `APPLIES`, `UPSTREAM`, `ABSENT` (no class plays the patch's role, or those that do lack what it needs) or
            `REFUSED` (by any of the classes).
        classes: the classes it applies to.
        sites: the places in their sources that would change.
        refusal: the error to raise for a refusal.
        why: what the classes lack.
    """

    state: State
    classes: frozenset[type] = frozenset()
    sites: int = 0
    refusal: T5FastPatchError | None = None
    why: str = ""


def survey(patch: Patch, classes: Iterable[type]) -> Survey:
    """Asks `patch` about each of the upstream classes."""
    found = {cls: finding(patch, cls) for cls in dict.fromkeys(classes) if role_of(cls) in patch.roles}
    for cls, each in found.items():
        if each.refusal is not None:
            message = (
                f"{patch.name} on {cls.__name__}, transformers {transformers_version()}: {each.refusal}. "
                "Leave the patch out there, and please report it"
            )
            refusal = type(each.refusal)(message)
            refusal.__cause__ = each.refusal.__cause__
            return Survey(State.REFUSED, refusal=refusal)
    applies = frozenset(cls for cls, each in found.items() if each.state is State.APPLIES)
    states = {each.state for each in found.values()}
    state = next((each for each in (State.APPLIES, State.UPSTREAM) if each in states), State.ABSENT)
    lacking = "; ".join(dict.fromkeys(each.why for each in found.values() if each.why))
    return Survey(state, applies, sum(found[cls].sites for cls in applies), why=lacking)


def finding(patch: Patch, cls: type) -> Finding:
    """What `patch` finds in the forward of an upstream class; what cannot be read or judged is a refusal."""
    role = role_of(cls)
    assert role is not None
    try:
        key = patch, upstream_function(cls)
        if key in _found:
            return _found[key]
        # What a patch tries out must run for real, whatever mode the caller is in: fake tensors, a census.
        with _disable_current_modes():
            found = patch.find(Method.of(cls), role)
        # A refusal is not remembered: the next look may find its cause mended.
        return _found.setdefault(key, found) if found.refusal is None else found
    except T5FastPatchError as error:
        return Finding(State.REFUSED, refusal=error)
    except Exception as error:
        refusal = UnexpectedSourceError(f"the patch failed over it ({error!r})")
        refusal.__cause__ = error  # a fault in the patch itself: its author wants the traceback
        return Finding(State.REFUSED, refusal=refusal)


def upstream_class(cls: type) -> type | None:
    """The class of a T5 family whose forward an instance of `cls` runs, or `None`.

    A subclass that brings a forward of its own runs no code of upstream's to change.
    """
    providers = [base for base in inspect.getmro(cls) if "forward" in vars(base)]
    for index, base in enumerate(providers):
        if family_of(base) is not None and not _is_patched(base):
            pairs = itertools.pairwise(providers[: index + 1])
            return base if all(_keeps_forward(upper, lower, base) for upper, lower in pairs) else None
    return None


def _is_patched(cls: type) -> bool:
    return "t5fastpatch" in vars(cls)


def _keeps_forward(cls: type, below: type, upstream: type) -> bool:
    """Whether a class runs the forward of the class `below` it, and so that of `upstream`, patched or not."""
    # Recent releases wrap the forward of whatever derives from a layer once more, as they did upstream's.
    wrapper, code = vars(cls)["forward"], getattr(vars(upstream)["forward"], "__code__", None)
    wraps_below = getattr(wrapper, "__wrapped__", None) is vars(below)["forward"]
    return _is_patched(cls) or (wraps_below and wrapper.__code__ is code)


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
