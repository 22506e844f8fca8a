"""Which of the patches that were asked for go onto which stacks of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import nn

from .classwide import process_wide
from .findings import Survey
from .headroom.places import UNSCALED, Scaling
from .headroom.stacks import Stack
from .install import Setup, setup_on
from .parts import Parts
from .patch import Patch, StackPatch, State
from .planning import Evidence, Verdict, check_proven, judge, without_proof
from .registry import Selection, check_conflict, rival

Verdicts = Mapping[Stack, Verdict]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The patches to be applied, and what was said of each and of every stack.

    Attributes:
        parts: the model.
        surveys: what each patch found in its classes.
        named: the patches that were asked for by their own name.
        patches: those to be applied to at least one stack, or whatever the stack.
        verdicts: for each patch that depends on the stack, what was said of every stack.
    """

    parts: Parts
    surveys: Mapping[Patch, Survey]
    named: frozenset[str]
    patches: list[Patch] = dataclasses.field(default_factory=list)
    verdicts: dict[Patch, Verdicts] = dataclasses.field(default_factory=dict)

    def setup(self, module: nn.Module, cls: type) -> Setup:
        """What a module will have; what rests on a proof is judged anew."""
        setup, stack = setup_on(module), self.parts.stack(module)
        rescaled = stack is not None and self._is_rescaled(stack)
        setup = setup.without(setup.proven if rescaled else setup.proven & set(self.verdicts))
        for patch in self.patches:
            verdict = self._verdict(patch, module, cls)
            if verdict.state is State.APPLIES:
                setup = setup.plus(patch, scaling=verdict.scaling, proven=verdict.proven)
        return setup

    def _is_rescaled(self, stack: Stack) -> bool:
        given = (verdicts[stack] for verdicts in self.verdicts.values() if stack in verdicts)
        scalings = {verdict.scaling for verdict in given if verdict.state is State.APPLIES} - {None}
        return bool(scalings - {self.parts.scaling(stack)})

    def _verdict(self, patch: Patch, module: nn.Module, cls: type) -> Verdict:
        if not self.parts.has_place(patch, module, cls, self.surveys[patch]) or patch in process_wide(cls):
            return Verdict(State.ABSENT)
        stack = self.parts.stack(module)
        found = self.verdicts[patch].get(stack) if stack is not None else None
        if found is None:
            # A module outside every stack has no proof.
            found = Verdict(State.UNSAFE if patch.unsafe_alone and patch.name not in self.named else State.APPLIES)
        return found


def choose(parts: Parts, selection: Selection, surveys: Mapping[Patch, Survey], evidence: Evidence) -> Choice:
    """The patches to be applied: all that are named, and those of the presets that nothing speaks against.

    Raises:
        ConflictError, ScaleError, UnprovenError, UnexpectedSourceError, SourceUnavailableError, ForeignForwardError:
            for a patch that was named.
    """
    choice, on = Choice(parts, surveys, selection.named), parts.on()
    scaled = {stack: parts.scaling(stack) for stack in parts.every_stack}
    for patch in _in_order(selection):
        found, named = surveys[patch], patch.name in selection.named
        if named and found.refusal is not None and patch not in on:
            raise found.refusal
        if found.state is not State.APPLIES:
            continue
        if named:
            check_conflict(patch, on)
        elif not _scales(patch) and rival(patch, [*on, *choice.patches]) is not None:
            continue
        verdicts = _verdicts(patch, choice, scaled, evidence)
        if named:
            check_proven(patch, verdicts)
        choice.verdicts[patch] = verdicts
        if _anywhere(patch, verdicts.values(), named):
            choice.patches.append(patch)
        applies = ((stack, verdict.scaling) for stack, verdict in verdicts.items() if verdict.state is State.APPLIES)
        scaled |= {stack: scaling for stack, scaling in applies if scaling is not None}
    return choice


def _in_order(selection: Selection) -> list[Patch]:
    """Named ones first: where two exclude each other, the one that was asked for stays.

    But what scales comes before all, since a proof is of the scaled stack.
    """
    return sorted(selection.patches, key=lambda patch: (not _scales(patch), patch.name not in selection.named))


def _anywhere(patch: Patch, verdicts: Iterable[Verdict], named: bool) -> bool:
    states = {verdict.state for verdict in verdicts}
    return State.APPLIES in states if states else named or not (patch.unsafe_alone or _scales(patch))


def _verdicts(patch: Patch, choice: Choice, scaled: Mapping[Stack, Scaling], evidence: Evidence) -> Verdicts:
    """What can be said of a patch that depends on the stack; nothing for one that does not."""
    if not (patch.unsafe_alone or isinstance(patch, StackPatch)):
        return {}
    parts, named = choice.parts, patch.name in choice.named
    places = [module for module, cls in parts.modules if parts.has_place(patch, module, cls, choice.surveys[patch])]
    stacks = dict.fromkeys(stack for module in places if (stack := parts.stack(module)) is not None)
    if named and not patch.needs_proof and not _scales(patch):
        # Its name is enough; a proof may cost seconds.
        return {stack: Verdict(State.APPLIES) for stack in stacks}
    held_back = _held_back(patch, choice) if not named else None
    found = {}
    for stack in stacks:
        if held_back is not None and stack not in held_back:
            found[stack] = Verdict(State.NEEDLESS, f"not where {_first(patch)} is enough")
        elif (other := _rival_on(stack, patch, choice)) is not None:
            found[stack] = Verdict(State.CONFLICT, f"cannot be on one stack with {other.name}: remove that first")
        else:
            found[stack] = judge(patch, stack, scaled[stack], evidence)
            if _takes_no_proof(patch, found[stack], named) and not _has_fallback(patch, stack, choice, evidence):
                found[stack] = without_proof(found[stack])
    return found


def _rival_on(stack: Stack, patch: Patch, choice: Choice) -> Patch | None:
    """What is on a stack, or will be, that cannot share it with a patch that scales."""
    said = choice.verdicts.items()
    chosen = (each for each, verdicts in said if stack in verdicts and verdicts[stack].state is State.APPLIES)
    return rival(patch, [*setup_on(stack.module).patches, *chosen]) if _scales(patch) else None


def _takes_no_proof(patch: Patch, verdict: Verdict, named: bool) -> bool:
    """Whether a stack may be rescaled though nothing proves that it is enough.

    Upstream's checks stay on a half-precision stream, so nothing is lost; on an fp32 one they do not act.
    """
    scaled = verdict.state is State.UNSAFE and verdict.scaling is not None and verdict.scaling.stream < 1
    return scaled and (named or not (isinstance(patch, StackPatch) and patch.wide))


def _has_fallback(patch: Patch, stack: Stack, choice: Choice, evidence: Evidence) -> bool:
    """Whether another patch of the selection has a proof where this one has none."""
    others = (each for each, found in choice.surveys.items() if found.state is State.APPLIES)
    fallbacks = (each for each in others if _first(each) == patch.name)
    return any(judge(each, stack, UNSCALED, evidence).state is State.APPLIES for each in fallbacks)


def _held_back(patch: Patch, choice: Choice) -> set[Stack] | None:
    """The stacks that a fallback is for; `None` for a patch that is none here."""
    first = next((each for each in choice.surveys if each.name == _first(patch)), None)
    if first is None:
        return None
    said = choice.verdicts.get(first, {})
    return {stack for stack, verdict in said.items() if verdict.state in (State.UNSAFE, State.CONFLICT)}


def _first(patch: Patch) -> str:
    return patch.fallback_for if isinstance(patch, StackPatch) else ""


def _scales(patch: Patch) -> bool:
    return isinstance(patch, StackPatch) and bool(patch.scales)
