"""Patches on upstream's classes themselves, for the whole process: what the environment variable switches on.

A source patch exchanges the code of upstream's innermost function, so every wrapper and every reference to it stays
good, whoever holds it. A forward patch replaces the class attribute.
"""

from __future__ import annotations

from types import FunctionType

from .families import Family
from .findings import family_classes, finding, survey, transformers_version
from .install import LOCK, new_function, uncovered
from .patch import ForwardPatch, Patch, State, depends_on_weights
from .registry import Selection, rival
from .report import Report, Row
from .rewrite import ORIGINAL_CODE, ORIGINAL_FORWARD, innermost, rewrap, upstream_function

_on: dict[type, tuple[Patch, ...]] = {}


def process_wide(cls: type) -> tuple[Patch, ...]:
    """The patches that are on an upstream class."""
    return _on.get(cls, ())


def enable(family: Family, selection: Selection) -> Report:
    """Puts patches on a family's classes. What does not apply, or is unsafe and not named, is only reported.

    Raises:
        ConflictError, ForeignForwardError, UnexpectedSourceError: and no class is changed.
    """
    with LOCK:
        classes = family_classes(family)
        plan = {cls: list(process_wide(cls)) for cls in classes}
        rows = []
        # Named ones first: where two exclude each other, the one that was asked for stays.
        for patch in sorted(selection.patches, key=lambda patch: patch.name not in selection.named):
            found = survey(patch, classes)
            state, why = found.state, str(found.refusal or "")
            other = rival(patch, (each for on in plan.values() for each in on))
            if state is State.APPLIES and depends_on_weights(patch, patch.name in selection.named):
                why = "decided for each model that from_pretrained loads"
            elif state is State.APPLIES and other is not None:
                state, why = State.CONFLICT, f"cannot be on together with {other.name}"
            elif state is State.APPLIES:
                state = State.ON
                for cls in found.classes:
                    plan[cls] += [patch] if patch not in plan[cls] else []
            rows.append(Row(patch.name, state, found.sites, 0, patch.contract.value, why))
        changes = {cls: tuple(on) for cls, on in plan.items() if tuple(on) != process_wide(cls)}
        # Every function is made, and every class looked at, before the first one changes.
        functions = {cls: (upstream_function(cls), new_function(cls, on)) for cls, on in changes.items()}
        for cls, (upstream, function) in functions.items():
            _put(cls, changes[cls], upstream, function)
        return Report(family.name, transformers_version(), tuple(rows))


def _put(cls: type, patches: tuple[Patch, ...], upstream: FunctionType, function: FunctionType | None) -> None:
    for patch in uncovered(patches):
        for name, member in finding(patch, cls).members.items():
            setattr(cls, name, member)
    if function is not None:
        _put_forward(cls, patches, upstream, function)
    _on[cls] = patches


def _put_forward(cls: type, patches: tuple[Patch, ...], upstream: FunctionType, function: FunctionType) -> None:
    if any(isinstance(patch, ForwardPatch) for patch in patches):
        wrapped = rewrap(upstream, innermost(upstream), function)
        ORIGINAL_FORWARD[cls] = upstream, wrapped
        cls.forward = wrapped  # type: ignore[attr-defined]
    else:
        inner = innermost(upstream)
        ORIGINAL_CODE.setdefault(inner, inner.__code__)
        inner.__code__ = function.__code__
