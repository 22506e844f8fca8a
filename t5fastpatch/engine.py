"""apply, remove, patched, status: patches on one model, all or nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .classwide import process_wide
from .errors import MetaDeviceError, NotAppliedError, NothingToPatchError, NotT5Error, WrongTypeError
from .families import FAMILIES, family_of
from .findings import Survey, survey, transformers_version, upstream_class
from .install import check_forward, patches_on, set_patches
from .registry import Patch, Selection, State, check_conflicts, list_patches, select
from .report import Report, Row

_lock = threading.RLock()
_Parts = list[tuple[nn.Module, type]]


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
        UnknownPatchError, WrongTypeError, ConflictError: for the selection.
        NotT5Error: the model has no T5 part.
        NothingToPatchError: none of the patches has a place in the model.
        MetaDeviceError: the model has no weights yet.
        ForeignForwardError, SourceUnavailableError, UnexpectedSourceError: upstream's code is not what a named patch
            knows. The model is then exactly as it was, as after any other error.
    """
    with _lock:
        selection = select(patches)
        parts = _parts(model)
        _check_device(model, parts)
        surveys = {patch: survey(patch, (cls for _, cls in parts)) for patch in selection.patches}
        chosen = [patch for patch, found in surveys.items() if _may_apply(patch, found, selection)]
        _check_some_effect(model, selection, surveys, chosen)
        check_conflicts({*chosen, *_all_on(parts)})
        _change(
            (module, cls, [*patches_on(module), *(patch for patch in chosen if cls in surveys[patch].classes)])
            for module, cls in parts
        )
        return _report(model, parts, surveys)


def remove(model: Any, patches: str | Iterable[str] | None = None) -> Report:
    """Takes patches off a model, which is then bit for bit as before: all of them, or those named.

    Returns:
        A row for each patch that was taken off.

    Raises:
        NotAppliedError: the model has no patch, or not one that is named; or only from `T5FASTPATCH`, process-wide.
        ForeignForwardError: a patched module's class has been derived from since.
        UnknownPatchError, WrongTypeError, NotT5Error: as for `apply`.
    """
    with _lock:
        parts = _parts(model)
        on = {patch for module, _ in parts for patch in patches_on(module)}
        unwanted = on if patches is None else set(select(patches).patches)
        if not unwanted or unwanted - on:
            names = ", ".join(sorted(patch.name for patch in unwanted - on)) or "any patch"
            wide = "; what T5FASTPATCH put on the whole process stays until it is unset" if _all_on(parts) - on else ""
            raise NotAppliedError(f"this {type(model).__name__} does not have {names}{wide}")
        _change((module, cls, [each for each in patches_on(module) if each not in unwanted]) for module, cls in parts)
        surveys = {patch: survey(patch, (cls for _, cls in parts)) for patch in _in_order(unwanted)}
        return _report(model, parts, surveys)


@contextlib.contextmanager
def patched(model: Any, patches: str | Iterable[str] | None = None) -> Iterator[Report]:
    """Patches on for the length of a `with` block, and then exactly those that were on before.

    Raises:
        As `apply`.
    """
    with _lock:
        before = [(module, cls, patches_on(module)) for module, cls in _parts(model)]
        report = apply(model, patches)
    try:
        yield report
    finally:
        with _lock:
            _change(before)


def status(model: Any) -> Report:
    """What each patch has to say of a model: applies, already upstream, on, and so on. Changes nothing.

    Raises:
        NotT5Error: the model has no T5 part.
    """
    parts = _parts(model)
    return _report(model, parts, {patch: survey(patch, (cls for _, cls in parts)) for patch in list_patches()})


def _parts(model: Any) -> _Parts:
    """The modules of the T5 family, each with the upstream class whose forward it runs."""
    parts = []
    for root in _roots(model):
        for module in root.modules():
            cls = upstream_class(type(module))
            if cls is not None:
                parts.append((module, cls))
    if not parts:
        raise NotT5Error(f"this {type(model).__name__} has no module of the T5 family ({', '.join(FAMILIES)})")
    return parts


def _roots(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    components = getattr(model, "components", None)
    held = list(components.values()) if isinstance(components, Mapping) else [getattr(model, "model", None)]
    roots = [each for each in held if isinstance(each, nn.Module)]
    if not roots:
        raise WrongTypeError(f"a model is a torch.nn.Module, or holds one as .model or .components: {model!r:.80}")
    return roots


def _check_device(model: Any, parts: _Parts) -> None:
    # With accelerate's offloading the weights are on the meta device between two calls, and a hook brings them.
    if not any(hasattr(module, "_hf_hook") for root in _roots(model) for module in root.modules()) and any(
        parameter.is_meta for module, _ in parts for parameter in module.parameters(recurse=False)
    ):
        raise MetaDeviceError(f"this {type(model).__name__} is on the meta device: load its weights, then apply")


def _may_apply(patch: Patch, found: Survey, selection: Selection) -> bool:
    if found.state is State.REFUSED and patch.name in selection.named:
        assert found.refusal is not None
        raise found.refusal
    return found.state is State.APPLIES and (not patch.unsafe_alone or patch.name in selection.named)


def _check_some_effect(model: Any, selection: Selection, surveys: Mapping[Patch, Survey], chosen: list[Patch]) -> None:
    """Raises where the selection asks for something and nothing comes of it."""
    if chosen or any(found.state is State.UPSTREAM for found in surveys.values()):
        return
    for found in surveys.values():
        if found.refusal is not None:
            raise found.refusal
    names = ", ".join(patch.name for patch in selection.patches) or "an empty selection"
    raise NothingToPatchError(f"{names} changes nothing in this {type(model).__name__}: see t5fastpatch.status(model)")


def _change(wanted: Iterable[tuple[nn.Module, type, Iterable[Patch]]]) -> None:
    """Gives each module its patches; after an error every module has what it had."""
    changes = []
    for module, cls, patches in wanted:
        after = tuple(_in_order(patch for patch in patches if patch not in process_wide(cls)))
        if after != patches_on(module):
            check_forward(module)
            changes.append((module, cls, patches_on(module), after))
    done = 0
    try:
        for module, cls, _, after in changes:
            set_patches(module, after, process_wide=process_wide(cls))
            done += 1
    except BaseException:
        for module, cls, before, _ in changes[: done + 1]:
            set_patches(module, before, process_wide=process_wide(cls))
        raise


def _in_order(patches: Iterable[Patch]) -> list[Patch]:
    """Each patch once, by name, so that equal sets give equal classes."""
    return sorted(set(patches), key=lambda patch: patch.name)


def _all_on(parts: _Parts) -> set[Patch]:
    return {patch for module, cls in parts for patch in (*patches_on(module), *process_wide(cls))}


def _report(model: Any, parts: _Parts, surveys: Mapping[Patch, Survey]) -> Report:
    families = {family.name: None for _, cls in parts if (family := family_of(cls))}
    rows = tuple(_row(patch, found, parts) for patch, found in surveys.items())
    return Report(f"{type(model).__name__} ({', '.join(families)})", transformers_version(), rows)


def _row(patch: Patch, found: Survey, parts: _Parts) -> Row:
    modules = [(module, cls) for module, cls in parts if cls in found.classes]
    wide = [module for module, cls in modules if patch in process_wide(cls)]
    on = [module for module, cls in modules if patch in process_wide(cls) or patch in patches_on(module)]
    state, why = found.state, str(found.refusal or "")
    if state is State.APPLIES:
        state = State.ON if on else State.UNSAFE if patch.unsafe_alone else State.APPLIES
        notes = [patch.unsafe_alone, "process-wide" if wide else ""]
        notes.append(f"on {len(on)} of {len(modules)} modules" if on and len(on) < len(modules) else "")
        why = "; ".join(filter(None, notes))
    return Row(patch.name, state, found.sites, len(modules), patch.contract.value, why)
