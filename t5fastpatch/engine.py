"""apply, remove, patched, status: patches on one model, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from .headroom.places import Scaling
from .headroom.stacks import Stack, stacks_of
from .install import LOCK, Setup, check_forward, exchange_classes, patched_class, patches_on, setup_on
from .patch import Patch, StackPatch, State
from .planning import Evidence, Verdict, check_proven, judge, reasons
from .proof import guard
from .registry import (
    PRESETS,
    Selection,
    check_conflict,
    check_names,
    list_patches,
    names_of,
    rival,
    select,
)
from .report import Report, Row

_Verdicts = Mapping[Stack, Verdict]


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
            of shape (batch, length). What they show counts with a margin of 3 bits, where the weights prove too little.

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
    with LOCK:
        selection = select(patches)
        parts = _Parts.of(model)
        parts.check_device()
        surveys = parts.surveys(selection.patches)
        evidence = parts.evidence(scale, batches)
        chosen = _choose(parts, selection, surveys, evidence)
        _check_some_effect(parts, selection, surveys, chosen)
        setups = [(module, cls, chosen.setup(module, cls, surveys)) for module, cls in parts.modules]
        _change(setups)
        guard((module for module, _, setup in setups if setup.proven), parts.watched())
        return parts.report(surveys, chosen.verdicts)


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
        return parts.report(parts.surveys(sorted(unwanted, key=lambda patch: patch.name)))


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
        before = {id(module): patches_on(module) for module, _ in _Parts.of(model).modules}
        report = apply(model, patches, scale=scale, batches=batches)
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
    surveys = parts.surveys(list_patches())
    return parts.report(surveys, _choose(parts, select("all"), surveys, parts.evidence("auto", None)).verdicts)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The modules of the T5 family in a model, each with the upstream class whose forward it runs.

    `strangers` are modules of classes that derive from upstream's and bring a forward of their own.
    """

    name: str
    roots: list[nn.Module]
    modules: list[tuple[nn.Module, type]]
    strangers: list[tuple[nn.Module, type]]
    stacks: dict[nn.Module, list[Stack]]

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
        return cls(name, roots, modules, strangers, {root: stacks_of(root) for root in roots})

    def evidence(self, scale: float | str, batches: Iterable[Any] | None) -> Evidence:
        return Evidence(self.stacks, None if batches is None else list(batches), scale)

    @functools.cached_property
    def _stack_of(self) -> dict[nn.Module, Stack]:
        stacks = [stack for found in self.stacks.values() for stack in found]
        return {module: stack for stack in stacks for module in stack.module.modules()}

    def stack(self, module: nn.Module) -> Stack | None:
        return self._stack_of.get(module)

    def watched(self) -> list[nn.Module]:
        """Every module whose weights a proof is about."""
        return [module for root in self.roots for module in root.modules()]

    def scaling(self, stack: Stack) -> Scaling:
        return setup_on(stack.module).scaling

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

    def report(self, surveys: Mapping[Patch, Survey], verdicts: Mapping[Patch, _Verdicts] | None = None) -> Report:
        families = dict.fromkeys(family.name for _, cls in self.modules if (family := family_of(cls)))
        every, said = self.on(), verdicts or {}
        rows = tuple(self._row(patch, found, every, said.get(patch, {})) for patch, found in surveys.items())
        return Report(f"{self.name} ({', '.join(families)})", transformers_version(), rows)

    def _row(self, patch: Patch, found: Survey, every: list[Patch], verdicts: _Verdicts) -> Row:
        on = [module for module, cls in self.modules if patch in (*patches_on(module), *process_wide(cls))]
        places = [module for module, cls in self.modules if self.has_place(patch, module, cls, found)] or on
        state, notes = found.state, [str(found.refusal or "")]
        said = {verdict.state for verdict in verdicts.values()}
        if on:
            state = State.ON
            wide = any(patch in process_wide(cls) for _, cls in self.modules)
            proven = all(patch in setup_on(module).proven for module in on)
            notes += [reasons(verdicts), "" if proven else patch.unsafe_alone, "process-wide" if wide else ""]
            notes.append(f"on {len(on)} of {len(places)} modules" if len(on) < len(places) else "")
        elif state is State.APPLIES and (other := rival(patch, every)) is not None:
            state = State.CONFLICT
            notes.append(f"cannot be on one model with {other.name}")
        elif state is State.APPLIES and said and State.APPLIES not in said:
            state = State.UNSAFE if State.UNSAFE in said else State.NEEDLESS
            notes += [reasons(verdicts), patch.unsafe_alone if state is State.UNSAFE else ""]
        elif state is State.APPLIES and patch.unsafe_alone and not said:
            state = State.UNSAFE
            notes.append(patch.unsafe_alone)
        else:
            notes.append(reasons(verdicts))
        strangers = sum(role_of(cls) in patch.roles for _, cls in self.strangers)
        notes.append(f"modules with a forward of their own, left alone: {strangers}" if strangers else "")
        why = "; ".join(filter(None, notes))
        return Row(patch.name, state, found.sites, len(places), patch.contract.value, why)

    def has_place(self, patch: Patch, module: nn.Module, cls: type, found: Survey) -> bool:
        """Whether a module is one that the patch would change."""
        if cls not in found.classes or not isinstance(patch, StackPatch):
            return cls in found.classes
        stack, role = self.stack(module), role_of(cls)
        assert role is not None
        where = patch.parts[role].where
        return stack is not None and (where is None or where(stack, module))


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


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The patches to be applied, in order, and what was said of each and of every stack."""

    parts: _Parts
    named: frozenset[str]
    patches: list[Patch]
    verdicts: dict[Patch, _Verdicts]

    def setup(self, module: nn.Module, cls: type, surveys: Mapping[Patch, Survey]) -> Setup:
        """What a module will have."""
        setup, stack = setup_on(module), self.parts.stack(module)
        for patch in self.patches:
            verdict = self.verdicts[patch].get(stack) if stack is not None else None
            if not self.parts.has_place(patch, module, cls, surveys[patch]) or patch in process_wide(cls):
                continue
            alone = State.UNSAFE if patch.unsafe_alone and patch.name not in self.named else State.APPLIES
            given = verdict or Verdict(alone)
            if given.state is not State.APPLIES:
                continue
            setup = setup.plus(patch, scaling=given.scaling, proven=given.proven)
        return setup


def _choose(parts: _Parts, selection: Selection, surveys: Mapping[Patch, Survey], evidence: Evidence) -> _Choice:
    """The patches to be applied: all that are named, and those of the presets that nothing speaks against."""
    choice, on = _Choice(parts, selection.named, [], {}), parts.on()
    # Named ones first: where two exclude each other, the one that was asked for stays. What scales comes before what
    # needs a proof, since the proof is of the scaled stack.
    order = sorted(selection.patches, key=lambda patch: (not _scales(patch), patch.name not in selection.named))
    scaled = {stack: parts.scaling(stack) for found in parts.stacks.values() for stack in found}
    for patch in order:
        named, found = patch.name in selection.named, surveys[patch]
        if named and found.refusal is not None and patch not in on:
            raise found.refusal
        if found.state is not State.APPLIES:
            continue
        if named:
            check_conflict(patch, on)
        elif rival(patch, [*on, *choice.patches]) is not None or not _wanted(patch, choice, selection):
            continue
        choice.verdicts[patch] = verdicts = _verdicts(patch, parts, surveys[patch], scaled, evidence, named)
        check_proven(patch, verdicts, selection.named)
        if not verdicts and (patch.needs_proof or (patch.unsafe_alone and not named)):
            continue
        if not verdicts or any(verdict.state is State.APPLIES for verdict in verdicts.values()):
            choice.patches.append(patch)
        scaled |= {stack: verdict.scaling for stack, verdict in verdicts.items() if verdict.scaling is not None}
    return choice


def _verdicts(
    patch: Patch,
    parts: _Parts,
    found: Survey,
    scaled: Mapping[Stack, Scaling],
    evidence: Evidence,
    named: bool,
) -> _Verdicts:
    """What can be said of a patch that depends on the stack; nothing for one that does not."""
    if not (patch.unsafe_alone or _scales(patch)):
        return {}
    places = [module for module, cls in parts.modules if parts.has_place(patch, module, cls, found)]
    stacks = dict.fromkeys(stack for module in places if (stack := parts.stack(module)) is not None)
    if named and not patch.needs_proof and not _scales(patch):
        # By name it is on whatever can be proven, and nothing has to be: a model may be large.
        return {stack: Verdict(State.APPLIES) for stack in stacks}
    return {stack: judge(patch, stack, scaled[stack], evidence) for stack in stacks}


def _scales(patch: Patch) -> bool:
    return isinstance(patch, StackPatch) and bool(patch.scales)


def _wanted(patch: Patch, choice: _Choice, selection: Selection) -> bool:
    """Whether a preset takes a patch: a fallback only where the other one was held back."""
    first = patch.fallback_for if isinstance(patch, StackPatch) else ""
    others = {each.name: each for each in selection.patches}
    if first not in others:
        return True
    verdicts = choice.verdicts.get(others[first], {})
    return any(verdict.state is State.UNSAFE for verdict in verdicts.values())


def _check_some_effect(parts: _Parts, selection: Selection, surveys: Mapping[Patch, Survey], chosen: _Choice) -> None:
    """Raises where the selection asks for something and nothing comes of it."""
    settled = any(found.state is State.UPSTREAM for found in surveys.values())
    settled = settled or any(
        each.state is State.NEEDLESS for said in chosen.verdicts.values() for each in said.values()
    )
    if chosen.patches or settled or set(selection.patches) & set(parts.on()):
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
            _change([(module, cls, setup_on(module).without(patches))], check=False)
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
