"""What may be on a stack: patches that need a proof of headroom, and the scales that give one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import ScaleError, UnprovenError, WrongTypeError
from .headroom.beside import beside
from .headroom.places import FP16_MAX, Headroom, Scaling, bits
from .headroom.scaling import CHECKED, SMALLEST_NORMAL, embeddings_of, fit, harmless, margin_of, missing, overflows
from .headroom.stacks import Stack
from .patch import Patch, StackPatch, State


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What can be said of a patch and a stack.

    Attributes:
        state: `APPLIES`, `NEEDLESS` or `UNSAFE`.
        why: a sentence.
        scaling: the stack's scaling, under a patch that scales; of an unsafe verdict, what may be had without proof.
        proven: whether it may be on because of a proof.
        assumes: what the figures behind it take for granted, as sentences.
    """

    state: State
    why: str = ""
    scaling: Scaling | None = None
    proven: bool = False
    assumes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of a model's magnitudes; found out when it is first asked for.

    Attributes:
        stacks: the model's stacks, by the root that holds them.
        batches: inputs to observe, or `None`.
        scale: "auto", or the power of two that was asked for.
    """

    stacks: Mapping[nn.Module, Sequence[Stack]]
    batches: Iterable[Any] | None = None
    scale: float | str = "auto"

    @functools.cached_property
    def _headrooms(self) -> dict[Stack, list[Headroom]]:
        from .headroom.data import observe
        from .headroom.steady import bound_of

        if self.batches is not None and len(self.stacks) > 1:
            raise WrongTypeError("batches are inputs of one model: apply to each part by itself")
        known: dict[Stack, list[Headroom]] = {}
        for root, stacks in self.stacks.items():
            found = [bound_of(root, stacks)]
            if self.batches is not None:
                seen = observe(root, self.batches, stacks)
                found = [beside(found[0], seen), seen]
            known |= dict.fromkeys(stacks, found)
        return known

    def of(self, stack: Stack) -> list[Headroom]:
        """What is known of a stack, the bound from its weights first."""
        return self._headrooms[stack]


def judge(patch: Patch, stack: Stack, now: Scaling, evidence: Evidence) -> Verdict:
    """Whether `patch` may be on a stack that is scaled as `now` says.

    Raises:
        ScaleError: the scale that was asked for is none, or this stack cannot have it.
    """
    objection = patch.objection(stack) if isinstance(patch, StackPatch) else ""
    if objection:
        return Verdict(State.UNSAFE, objection)
    if isinstance(patch, StackPatch) and patch.scales:
        return _scaled(patch, stack, evidence)
    needless = patch.needless(stack) if isinstance(patch, StackPatch) else ""
    if needless:
        return Verdict(State.NEEDLESS, needless)
    return _proven(patch, stack, now, evidence) if patch.unsafe_alone else Verdict(State.APPLIES)


def _scaled(patch: StackPatch, stack: Stack, evidence: Evidence) -> Verdict:
    if not math.isfinite(_largest_entry(stack)):
        return Verdict(State.UNSAFE, "its embeddings hold NaN or infinity")
    if evidence.scale != "auto":
        scaling = _as_given(evidence.scale, stack, wide=patch.wide)
        why = f"scale {_power(scaling.stream)} as given; {_after(stack, scaling, evidence)}"
        return Verdict(State.APPLIES, why, scaling)
    if not patch.wide and _is_bfloat16(stack):
        return Verdict(State.NEEDLESS, "bfloat16 holds what fp32 holds")
    objections = []
    for headroom in evidence.of(stack):
        found, objection = fit(stack, headroom, patch.scales, wide=patch.wide)
        if objection or found is None:
            objections.append(objection)
        elif found.stream == 1.0 and not patch.wide:
            return Verdict(State.NEEDLESS, f"fits as it is, {_after(stack, found, evidence)}")
        else:
            why = f"scale {_power(found.stream)}, {_after(stack, found, evidence)}"
            return Verdict(State.APPLIES, why, found, assumes=tuple(headroom.assumes.get(stack.name, ())))
    why = f"{'; '.join(objections)}: give batches, or a scale"
    return Verdict(State.UNSAFE, why, harmless(stack, wide=patch.wide))


def without_proof(verdict: Verdict) -> Verdict:
    """The verdict by which a stack is rescaled as far as costs nothing, though nothing says that this is enough."""
    assert verdict.scaling is not None
    return Verdict(State.APPLIES, f"scale {_power(verdict.scaling.stream)}, no proof: {verdict.why}", verdict.scaling)


def standing(patch: Patch, stack: Stack, now: Scaling, evidence: Evidence) -> Verdict:
    """What can be said of a patch that is on a stack, at the scale that is on it."""
    if isinstance(patch, StackPatch) and patch.scales:
        return Verdict(State.APPLIES, f"scale {_power(now.stream)}, {_after(stack, now, evidence)}")
    return _proven(patch, stack, now, evidence) if patch.unsafe_alone else Verdict(State.APPLIES)


def _proven(patch: Patch, stack: Stack, now: Scaling, evidence: Evidence) -> Verdict:
    if _is_bfloat16(stack):
        needed = State.APPLIES if isinstance(patch, StackPatch) else State.NEEDLESS
        return Verdict(needed, "bfloat16 holds what fp32 holds", proven=needed is State.APPLIES)
    objections = []
    for headroom in evidence.of(stack):
        if missing(stack, headroom, wide=now.wide):
            objections.append(
                f"no proof of headroom by the {headroom.source} ({headroom.unproven.get(stack.name, '')})"
            )
            continue
        beyond = overflows(headroom, stack.name, now, margin_of(headroom))
        if not beyond:
            why, assumes = f"safe, {_after(stack, now, evidence)}", tuple(headroom.assumes.get(stack.name, ()))
            return Verdict(State.APPLIES, why, proven=True, assumes=assumes)
        worst = max(beyond, key=lambda each: each.under(now))
        reach = f"{worst.place.value} may reach {worst.under(now):.3g} by the {headroom.source}"
        objections.append(f"{reach}, fp16 holds 65504")
    return Verdict(State.UNSAFE, "; ".join(objections))


def _is_bfloat16(stack: Stack) -> bool:
    dtypes = {each.dtype for each in stack.module.parameters() if each.dim() > 1}
    return torch.bfloat16 in dtypes and dtypes <= {torch.bfloat16, torch.float32}


def _after(stack: Stack, scaling: Scaling, evidence: Evidence) -> str:
    """The largest magnitude after scaling that an overflow check would see, by what is known."""
    said = []
    for headroom in evidence.of(stack):
        values = [each.under(scaling) for each in headroom.of(stack.name, *CHECKED)]
        if values and not missing(stack, headroom, wide=scaling.wide):
            left = f"{bits(max(values)):.1f} bits left"
            said.append(f"at most {max(values):.3g} by the {headroom.source} ({left})")
    return ", ".join(said) or "nothing is known of its magnitudes"


def _as_given(scale: object, stack: Stack, *, wide: bool) -> Scaling:
    """The scaling that a number means.

    Raises:
        ScaleError: it is no power of two, or this stack's embeddings would overflow, or vanish, under it.
    """
    number = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale) and scale > 0
    if not number or math.frexp(scale)[0] != 0.5:  # type: ignore[arg-type]
        raise ScaleError(f'a scale is a positive power of two, 2**-5 say, or "auto", not {scale!r}')
    factor = float(scale)  # type: ignore[arg-type]
    largest = _largest_entry(stack)
    if factor > 1 or largest * factor > FP16_MAX or (largest and largest * factor < SMALLEST_NORMAL):
        raise ScaleError(
            f"a scale of {_power(factor)} does not fit the weights of {stack.name}: it is at most 1, and must leave "
            f"their largest embedding, {largest:.3g}, between {_power(SMALLEST_NORMAL)} and 65504"
        )
    return Scaling(factor, factor, wide)


def _largest_entry(stack: Stack) -> float:
    table = embeddings_of(stack)
    return 0.0 if table is None else float(table.abs().max())


def _power(factor: float) -> str:
    return f"2^{round(math.log2(factor))}"


def reasons(verdicts: Mapping[Stack, Verdict]) -> str:
    """What is to be said of a patch, stack by stack, or once where it is the same for all."""
    said = dict.fromkeys(verdict.why for verdict in verdicts.values())
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{stack.name}: {verdict.why}" for stack, verdict in verdicts.items() if verdict.why)


def assumptions(said: Iterable[Mapping[Stack, Verdict]]) -> tuple[str, ...]:
    """What the verdicts by which something applies take for granted, each sentence with the stacks it is about."""
    found: dict[str, dict[str, None]] = {}
    for verdicts in said:
        for stack, verdict in verdicts.items():
            for assumed in verdict.assumes if verdict.state is State.APPLIES else ():
                found.setdefault(assumed, {})[stack.name] = None
    return tuple(f"{assumed} ({', '.join(names)})" for assumed, names in found.items())


def check_proven(patch: Patch, verdicts: Mapping[Stack, Verdict]) -> None:
    """Raises `UnprovenError` where a patch may be on no stack for want of a proof."""
    if verdicts and {verdict.state for verdict in verdicts.values()} == {State.UNSAFE}:
        raise UnprovenError(f"{patch.name}: {reasons(verdicts)}")
