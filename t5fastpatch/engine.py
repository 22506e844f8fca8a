"""apply, remove, patched, status: patches on one model, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .choosing import Choice, Verdicts, choose
from .classwide import process_wide
from .errors import ForeignForwardError, NotAppliedError, NothingToPatchError
from .families import family_of, role_of
from .findings import Survey, transformers_version
from .install import LOCK, Setup, check_forward, exchange_classes, patched_class, patches_on, setup_on
from .parts import Parts
from .patch import Patch, StackPatch, State
from .planning import Evidence, assumptions, reasons, standing
from .proof import guard
from .registry import PRESETS, Selection, check_names, list_patches, names_of, rival, select
from .report import Report, Row


def apply(
    model: Any,
    patches: str | Iterable[str] | None = None,
    *,
    scale: float | str = "auto",
    batches: Iterable[Any] | None = None,
) -> Report:
    """Puts patches on the T5 parts of one model, in place; patches that are on already stay on.

    Args:
        model: a module of the T5 family or one that contains some; or an object that holds such modules: a diffusion
            pipeline (`components`), a pipeline or trainer of transformers (`model`).
        patches: names of patches and presets; `None` for the preset `safe`: whatever is safe for this model as loaded.
            A patch that is unsafe alone is applied where a stack (an encoder, a decoder) has a proof of headroom, or by
            name.
        scale: for the patches that rescale: "auto" for the power of two nearest to 1 that gives every stack headroom,
            by the bound from its weights or by what the batches show; or a power of two, taken as given.
        batches: inputs that the model is run on to see its magnitudes, each a dict of keyword arguments, or input ids
            of shape (batch, length). What they show counts, with a margin of 6 bits where
            that costs none and of 3 at least, where the weights prove too little.

    Returns:
        A row for each patch of the selection. A patch that upstream made superfluous, that has no place in this model
        or, when not named, cannot be applied here, is a row and no error.

    Raises:
        UnknownPatchError, InvalidPatchError, WrongTypeError, ConflictError: for the selection.
        ScaleError: for the scale.
        NotT5Error: the model has no T5 part.
        NothingToPatchError: none of the patches has a place in the model.
        MetaDeviceError: the model has no weights yet.
        UnprovenError: a named patch needs a proof that no stack of the model has.
        ForeignForwardError, SourceUnavailableError, UnexpectedSourceError: upstream's code is not what a named patch
            knows. The model is then exactly as it was, as after any other error.
    """
    with LOCK, _disable_current_modes():
        selection = select(patches)
        parts = Parts.of(model)
        parts.check_device()
        selection = _with_what_rests(selection, parts)
        surveys = parts.surveys(selection.patches)
        evidence = Evidence(parts.stacks, batches, scale)
        choice = choose(parts, selection, surveys, evidence)
        _check_some_effect(choice, selection)
        setups = [(module, cls, choice.setup(module, cls)) for module, cls in parts.modules]
        _change(setups)
        guard((module for module, _, setup in setups if setup.proven), parts.watched())
        return _report(parts, surveys, choice.verdicts)


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
        parts = Parts.of(model)
        own = {patch.name: patch for module, _ in parts.modules for patch in patches_on(module)}
        names = ["all"] if patches is None else names_of(patches)
        check_names(name for name in names if name not in own)
        presets = [PRESETS[name] for name in names if name in PRESETS]
        chosen = (patch for patch in own.values() if patch.name in names or any(has(patch) for has in presets))
        unwanted = set(chosen)
        if not unwanted:
            wide = {patch.name for patch in parts.on()} - set(own)
            hint = "; what T5FASTPATCH put on stays for the life of the process" if wide else ""
            what = "any patch to remove" if set(names) & set(PRESETS) else ", ".join(names)
            raise NotAppliedError(f"this {parts.name} does not have {what}{hint}")
        if any(isinstance(patch, StackPatch) and patch.scales for patch in unwanted):
            # What rests on a proof rests on the scale.
            unwanted |= {patch for module, _ in parts.modules for patch in setup_on(module).proven}
        _change((module, cls, setup_on(module).without(unwanted)) for module, cls in parts.modules)
        return _report(parts, parts.surveys(sorted(unwanted, key=lambda patch: patch.name)), {})


@contextlib.contextmanager
def patched(
    model: Any,
    patches: str | Iterable[str] | None = None,
    *,
    scale: float | str = "auto",
    batches: Iterable[Any] | None = None,
) -> Iterator[Report]:
    """Patches on for the length of a `with` block, which then takes off those that it put on.

    Raises:
        As `apply`.
    """
    with LOCK:
        before = {id(module): setup_on(module) for module, _ in Parts.of(model).modules}
        report = apply(model, patches, scale=scale, batches=batches)
        changed = [
            (module, cls, before[id(module)], setup_on(module))
            for module, cls in Parts.of(model).modules
            if setup_on(module) != before[id(module)]
        ]
    try:
        yield report
    finally:
        with LOCK:
            _put_back(changed)


def status(model: Any) -> Report:
    """What each patch has to say of a model: applies, already upstream, on, and so on. Changes nothing.

    Raises:
        NotT5Error, WrongTypeError: as for `apply`.
    """
    parts = Parts.of(model)
    surveys = parts.surveys(list_patches())
    evidence = Evidence(parts.stacks)
    verdicts = dict(choose(parts, select("all"), surveys, evidence).verdicts)
    for patch in (each for each in parts.on() if each in verdicts):
        stacks = [stack for stack in parts.every_stack if patch in parts.patches_within(stack)]
        verdicts[patch] = {stack: standing(patch, stack, parts.scaling(stack), evidence) for stack in stacks}
    return _report(parts, surveys, verdicts)


def _report(parts: Parts, surveys: Mapping[Patch, Survey], verdicts: Mapping[Patch, Verdicts]) -> Report:
    families = dict.fromkeys(family.name for _, cls in parts.modules if (family := family_of(cls)))
    rows = tuple(_row(parts, patch, found, verdicts.get(patch, {})) for patch, found in surveys.items())
    assumes = assumptions(verdicts.values())
    return Report(f"{parts.name} ({', '.join(families)})", transformers_version(), rows, assumes)


def _row(parts: Parts, patch: Patch, found: Survey, verdicts: Verdicts) -> Row:
    on = [module for module, cls in parts.modules if patch in (*patches_on(module), *process_wide(cls))]
    places = [module for module, cls in parts.modules if parts.has_place(patch, module, cls, found)] or on
    if on:
        state, notes = State.ON, _notes_on(parts, patch, on, places)
    elif found.state is State.APPLIES and not places:
        state, notes = State.NEEDLESS, ["no module of this model has what it replaces"]
    else:
        state, notes = _state_off(parts, patch, found, verdicts)
    strangers = sum(role_of(cls) in patch.roles for _, cls in parts.strangers)
    notes += [f"modules with a forward of their own, left alone: {strangers}"] if strangers else []
    why = "; ".join(filter(None, [str(found.refusal or ""), reasons(verdicts), *notes]))
    return Row(patch.name, state, found.sites, len(places), patch.contract.value, why)


def _notes_on(parts: Parts, patch: Patch, on: Sequence[nn.Module], places: Sequence[nn.Module]) -> list[str]:
    proven = all(patch in setup_on(module).proven for module in on)
    wide = any(patch in process_wide(cls) for _, cls in parts.modules)
    some = f"on {len(on)} of {len(places)} modules" if len(on) < len(places) else ""
    return ["" if proven else patch.unsafe_alone, "process-wide" if wide else "", some]


def _state_off(parts: Parts, patch: Patch, found: Survey, verdicts: Verdicts) -> tuple[State, list[str]]:
    """The state of a patch that is not on, and what there is to say beside its verdicts."""
    states = {verdict.state for verdict in verdicts.values()}
    if found.state is not State.APPLIES:
        return found.state, []
    if not states and (other := rival(patch, parts.on())) is not None:
        return State.CONFLICT, [f"cannot be on one model with {other.name}"]
    if State.APPLIES in states or not (states or patch.unsafe_alone):
        return State.APPLIES, []
    if State.CONFLICT in states:
        return State.CONFLICT, []
    if states == {State.NEEDLESS}:
        return State.NEEDLESS, []
    return State.UNSAFE, [patch.unsafe_alone]


def _with_what_rests(selection: Selection, parts: Parts) -> Selection:
    """The selection, and what rests on a proof, which is judged again where the scale it is a proof of may change."""
    if not any(isinstance(patch, StackPatch) and patch.scales for patch in selection.patches):
        return selection
    resting = dict.fromkeys(patch for module, _ in parts.modules for patch in setup_on(module).proven)
    return dataclasses.replace(selection, patches=tuple(dict.fromkeys((*selection.patches, *resting))))


def _check_some_effect(choice: Choice, selection: Selection) -> None:
    """Raises where the selection asks for something and nothing comes of it."""
    parts, found = choice.parts, choice.surveys.values()
    verdicts = [verdict for said in choice.verdicts.values() for verdict in said.values()]
    settled = any(each.state is State.UPSTREAM for each in found)
    settled = settled or any(verdict.state is State.NEEDLESS for verdict in verdicts)
    if choice.patches or settled or set(selection.patches) & set(parts.on()):
        return
    for each in found:
        if each.refusal is not None:
            raise each.refusal
    names = ", ".join(patch.name for patch in selection.patches) or "an empty selection"
    raise NothingToPatchError(
        f"{names} changes nothing in this {parts.name} (transformers {transformers_version()}): "
        "see t5fastpatch.status(model)"
    )


def _put_back(changed: Iterable[tuple[nn.Module, type, Setup, Setup]]) -> None:
    """Gives each module the setup it had, or at least takes off what was added, if more has been done to it since.

    What does not let itself be changed stays; then the others are changed, and it is said.
    """
    failure: ForeignForwardError | None = None
    for module, cls, before, after in changed:
        now, added = setup_on(module), set(after.patches) - set(before.patches)
        try:
            _change([(module, cls, before if now == after else now.without(added).at(before.scaling))], check=False)
        except ForeignForwardError as error:
            failure = error
    if failure is not None:
        raise failure


def _change(wanted: Iterable[tuple[nn.Module, type, Setup]], *, check: bool = True) -> None:
    """Gives each module its setup: first every new class is made, then all are exchanged, or none."""
    classes = []
    for module, cls, setup in wanted:
        wide = process_wide(cls)
        if setup == setup_on(module):
            continue
        if check:
            _check_forward(module, setup.patches)
        classes.append((module, patched_class(module, setup, wide)))
    exchange_classes(classes)


def _check_forward(module: nn.Module, patches: Iterable[Patch]) -> None:
    try:
        check_forward(module)
    except ForeignForwardError as error:
        names = ", ".join(patch.name for patch in patches) or "remove"
        raise ForeignForwardError(f"{names}: {error}") from None
