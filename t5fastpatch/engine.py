"""apply, remove, patched, status: patches on one model, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .classwide import process_wide
from .errors import (
    ForeignForwardError,
    MetaDeviceError,
    NotAppliedError,
    NothingToPatchError,
    NotT5Error,
    WrongTypeError,
)
from .families import FAMILIES, family_of, role_of
from .findings import Survey, survey, transformers_version, upstream_class
from .install import LOCK, check_forward, exchange_classes, patched_class, patches_on
from .registry import (
    PRESETS,
    Patch,
    Selection,
    State,
    check_conflict,
    check_names,
    list_patches,
    names_of,
    rival,
    select,
)
from .report import Report, Row


def apply(model: Any, patches: str | Iterable[str] | None = None) -> Report:
    """Puts patches on the T5 parts of one model, in place; patches that are on already stay on.

    Args:
        model: a module of the T5 family or one that contains some; or an object that holds such modules: a diffusion
            pipeline (`components`), a pipeline or trainer of transformers (`model`).
        patches: names of patches and presets; `None` for the preset `safe`. A patch that is unsafe alone is applied
            only by name.

    Returns:
        A row for each patch of the selection. A patch that upstream made superfluous, that has no place in this model
        or, when not named, cannot be applied here, is a row and no error.

    Raises:
        UnknownPatchError, InvalidPatchError, WrongTypeError, ConflictError: for the selection.
        NotT5Error: the model has no T5 part.
        NothingToPatchError: none of the patches has a place in the model.
        MetaDeviceError: the model has no weights yet.
        ForeignForwardError, SourceUnavailableError, UnexpectedSourceError: upstream's code is not what a named patch
            knows. The model is then exactly as it was, as after any other error.
    """
    with LOCK:
        selection = select(patches)
        parts = _Parts.of(model)
        parts.check_device()
        surveys = parts.surveys(selection.patches)
        chosen = _choose(selection, surveys, parts.on())
        _check_some_effect(parts, selection, surveys, chosen)
        _change(
            (module, cls, [*patches_on(module), *(patch for patch in chosen if cls in surveys[patch].classes)])
            for module, cls in parts.modules
        )
        return parts.report(surveys)


def remove(model: Any, patches: str | Iterable[str] | None = None) -> Report:
    """Takes patches off a model, which is then bit for bit as before.

    Args:
        model: as for `apply`.
        patches: names; a preset stands for those of its patches that are on. `None` for all that are on.

    Returns:
        A row for each patch that was taken off.

    Raises:
        NotAppliedError: the model has none of these patches, or has them only from `T5FASTPATCH`, process-wide. One
            that `apply` found to be superfluous or absent may be named beside others that are on.
        ForeignForwardError: a patched module's class has been derived from since.
        UnknownPatchError, WrongTypeError, NotT5Error: as for `apply`.
    """
    with LOCK:
        parts = _Parts.of(model)
        own = {patch.name: patch for module, _ in parts.modules for patch in patches_on(module)}
        names = ["all"] if patches is None else names_of(patches)
        check_names(name for name in names if name not in own)
        unwanted = [patch for patch in own.values() if {"all", patch.name} & set(names)]
        unwanted += [patch for patch in own.values() if "safe" in names and not patch.unsafe_alone]
        if not unwanted:
            wide = {patch.name for patch in parts.on()} - set(own)
            hint = "; what T5FASTPATCH put on stays for the life of the process" if wide else ""
            what = "any patch to remove" if set(names) & set(PRESETS) else ", ".join(names)
            raise NotAppliedError(f"this {parts.name} does not have {what}{hint}")
        _change((module, cls, [p for p in patches_on(module) if p not in unwanted]) for module, cls in parts.modules)
        return parts.report(parts.surveys(dict.fromkeys(unwanted)))


@contextlib.contextmanager
def patched(model: Any, patches: str | Iterable[str] | None = None) -> Iterator[Report]:
    """Patches on for the length of a `with` block, which then takes off those that it put on.

    Raises:
        As `apply`.
    """
    with LOCK:
        before = {id(module): patches_on(module) for module, _ in _Parts.of(model).modules}
        report = apply(model, patches)
        added = [
            (module, cls, new)
            for module, cls in _Parts.of(model).modules
            if (new := set(patches_on(module)) - set(before[id(module)]))
        ]
    try:
        yield report
    finally:
        with LOCK:
            _take_off(added)


def status(model: Any) -> Report:
    """What each patch has to say of a model: applies, already upstream, on, and so on. Changes nothing.

    Raises:
        NotT5Error, WrongTypeError: as for `apply`.
    """
    parts = _Parts.of(model)
    return parts.report(parts.surveys(list_patches()))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The modules of the T5 family in a model, each with the upstream class whose forward it runs.

    `strangers` are modules of classes that derive from upstream's and bring a forward of their own.
    """

    name: str
    roots: list[nn.Module]
    modules: list[tuple[nn.Module, type]]
    strangers: list[tuple[nn.Module, type]]

    @classmethod
    def of(cls, model: Any) -> _Parts:
        name, roots = type(model).__name__, _roots(model)
        modules, strangers = [], []
        for module in dict.fromkeys(module for root in roots for module in root.modules()):
            upstream = upstream_class(type(module))
            if upstream is not None:
                modules.append((module, upstream))
            else:
                strangers += [(module, base) for base in inspect.getmro(type(module)) if role_of(base)][:1]
        if not modules and not strangers:
            raise NotT5Error(f"this {name} has no module of the T5 family ({', '.join(FAMILIES)})")
        return cls(name, roots, modules, strangers)

    def surveys(self, patches: Iterable[Patch]) -> dict[Patch, Survey]:
        return {patch: survey(patch, (cls for _, cls in self.modules)) for patch in patches}

    def on(self) -> list[Patch]:
        """The patches that are on any of the modules, for this model or for the process."""
        found = (patch for module, cls in self.modules for patch in (*patches_on(module), *process_wide(cls)))
        return list(dict.fromkeys(found))

    def check_device(self) -> None:
        # With accelerate's offloading the weights are on the meta device between two calls, and a hook brings them.
        hooked = any(hasattr(module, "_hf_hook") for root in self.roots for module in root.modules())
        meta = any(each.is_meta for module, _ in self.modules for each in module.parameters(recurse=False))
        if meta and not hooked:
            raise MetaDeviceError(f"this {self.name} is on the meta device: load its weights, then apply")

    def report(self, surveys: Mapping[Patch, Survey]) -> Report:
        families = dict.fromkeys(family.name for _, cls in self.modules if (family := family_of(cls)))
        every = self.on()
        rows = tuple(self._row(patch, found, every) for patch, found in surveys.items())
        return Report(f"{self.name} ({', '.join(families)})", transformers_version(), rows)

    def _row(self, patch: Patch, found: Survey, every: list[Patch]) -> Row:
        on = [module for module, cls in self.modules if patch in (*patches_on(module), *process_wide(cls))]
        places = [module for module, cls in self.modules if cls in found.classes] or on
        state, notes = found.state, [str(found.refusal or "")]
        if on:
            state = State.ON
            wide = any(patch in process_wide(cls) for _, cls in self.modules)
            notes += [patch.unsafe_alone, "process-wide" if wide else ""]
            notes.append(f"on {len(on)} of {len(places)} modules" if len(on) < len(places) else "")
        elif state is State.APPLIES and (other := rival(patch, every)) is not None:
            state = State.CONFLICT
            notes.append(f"cannot be on one model with {other.name}")
        elif state is State.APPLIES and patch.unsafe_alone:
            state = State.UNSAFE
            notes.append(patch.unsafe_alone)
        strangers = sum(role_of(cls) is patch.role for _, cls in self.strangers)
        notes.append(f"modules with a forward of their own, left alone: {strangers}" if strangers else "")
        why = "; ".join(filter(None, notes))
        return Row(patch.name, state, found.sites, len(places), patch.contract.value, why)


def _roots(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    components = getattr(model, "components", None)
    held = list(components.values()) if isinstance(components, Mapping) else [getattr(model, "model", None)]
    roots = list(dict.fromkeys(each for each in held if isinstance(each, nn.Module)))
    if not roots:
        raise WrongTypeError(
            f"a model is a torch.nn.Module, or holds one as .model or .components, not a {type(model).__name__}"
            + (": load it first" if isinstance(model, str) else "")
        )
    return roots


def _choose(selection: Selection, surveys: Mapping[Patch, Survey], on: list[Patch]) -> list[Patch]:
    """The patches to be applied: all that are named, and those of the presets that nothing speaks against."""
    chosen = []
    for patch in (patch for patch in selection.patches if patch.name in selection.named):
        found = surveys[patch]
        if found.refusal is not None and patch not in on:
            raise found.refusal
        if found.state is State.APPLIES:
            check_conflict(patch, on)
            chosen.append(patch)
    for patch in (patch for patch in selection.patches if patch.name not in selection.named):
        applies = surveys[patch].state is State.APPLIES and not patch.unsafe_alone
        if applies and rival(patch, [*on, *chosen]) is None:
            chosen.append(patch)
    return chosen


def _check_some_effect(
    parts: _Parts, selection: Selection, surveys: Mapping[Patch, Survey], chosen: list[Patch]
) -> None:
    """Raises where the selection asks for something and nothing comes of it."""
    settled = any(found.state is State.UPSTREAM for found in surveys.values())
    if chosen or settled or set(selection.patches) & set(parts.on()):
        return
    for found in surveys.values():
        if found.refusal is not None:
            raise found.refusal
    names = ", ".join(patch.name for patch in selection.patches) or "an empty selection"
    raise NothingToPatchError(
        f"{names} changes nothing in this {parts.name} (transformers {transformers_version()}): "
        "see t5fastpatch.status(model)"
    )


def _take_off(added: Iterable[tuple[nn.Module, type, set[Patch]]]) -> None:
    """Takes patches off every module that lets it, whatever has been done to them since; says so of the others."""
    failure: ForeignForwardError | None = None
    for module, cls, patches in added:
        try:
            _change([(module, cls, [each for each in patches_on(module) if each not in patches])], check=False)
        except ForeignForwardError as error:
            failure = error
    if failure is not None:
        raise failure


def _change(wanted: Iterable[tuple[nn.Module, type, Iterable[Patch]]], *, check: bool = True) -> None:
    """Gives each module its patches: first every new class is made, then all are exchanged, or none."""
    classes = []
    for module, cls, patches in wanted:
        wide = process_wide(cls)
        # By name, so that equal sets give equal classes.
        after = sorted({patch for patch in patches if patch not in wide}, key=lambda patch: patch.name)
        if tuple(after) == patches_on(module):
            continue
        if check:
            _check_forward(module, after)
        classes.append((module, patched_class(module, after, wide)))
    exchange_classes(classes)


def _check_forward(module: nn.Module, patches: Iterable[Patch]) -> None:
    try:
        check_forward(module)
    except ForeignForwardError as error:
        names = ", ".join(patch.name for patch in patches) or "remove"
        raise ForeignForwardError(f"{names}: {error}") from None
