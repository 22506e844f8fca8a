"""Patches on upstream's classes themselves, for the whole process: what the environment variable switches on.

A source patch exchanges the code of upstream's innermost function, so every wrapper and every reference to it stays
good, whoever holds it. A forward patch replaces the class attribute.
"""

from __future__ import annotations

from types import FunctionType

from .families import Family
from .findings import family_classes, survey, transformers_version
from .install import new_function
from .registry import ForwardPatch, Patch, Selection, State
from .report import Report, Row
from .rewrite import ORIGINAL_CODE, ORIGINAL_FORWARD, innermost, upstream_function

_on: dict[type, tuple[Patch, ...]] = {}


def process_wide(cls: type) -> tuple[Patch, ...]:
    """The patches that are on an upstream class."""
    return _on.get(cls, ())


def enable(family: Family, selection: Selection) -> Report:
    """Puts patches on a family's classes. What does not apply, or is unsafe and not named, is only reported.

    Raises:
        ConflictError, ForeignForwardError, UnexpectedSourceError: and no class is changed.
    """
    classes = family_classes(family)
    plan = {cls: dict.fromkeys(process_wide(cls)) for cls in classes}
    rows = []
    for patch in selection.patches:
        found = survey(patch, classes)
        state, why = found.state, str(found.refusal or "")
        if state is State.APPLIES and patch.unsafe_alone and patch.name not in selection.named:
            state, why = State.UNSAFE, patch.unsafe_alone
        elif state is State.APPLIES:
            state = State.ON
            for cls in found.classes:
                plan[cls][patch] = None
        rows.append(Row(patch.name, state, found.sites, 0, patch.contract.value, why))
    changes = {cls: tuple(on) for cls, on in plan.items() if tuple(on) != process_wide(cls)}
    functions = {cls: new_function(cls, on) for cls, on in changes.items()}
    for cls, on in changes.items():
        _put(cls, on, functions[cls])
    return Report(family.name, transformers_version(), tuple(rows))


def disable(family: Family) -> None:
    """Gives a family's classes upstream's code back."""
    for cls in family_classes(family):
        _on.pop(cls, None)
        if cls in ORIGINAL_FORWARD:
            cls.forward, _ = ORIGINAL_FORWARD.pop(cls)  # type: ignore[attr-defined]
        upstream = innermost(upstream_function(cls))
        upstream.__code__ = ORIGINAL_CODE.pop(upstream, upstream.__code__)


def _put(cls: type, patches: tuple[Patch, ...], function: FunctionType) -> None:
    upstream = innermost(upstream_function(cls))
    if any(isinstance(patch, ForwardPatch) for patch in patches):
        ORIGINAL_FORWARD[cls] = upstream_function(cls), function
        cls.forward = function  # type: ignore[attr-defined]
    else:
        ORIGINAL_CODE.setdefault(upstream, upstream.__code__)
        upstream.__code__ = function.__code__
    _on[cls] = patches
