"""What may be on a stack: patches that need a proof of headroom, and the scales that give one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import ScaleError, UnprovenError, WrongTypeError
from .headroom.places import FP16_MAX, Headroom, Place, Scaling, bits
from .headroom.scaling import DATA_MARGIN, overflows, proposed
from .headroom.stacks import Stack
from .patch import Patch, StackPatch, State

# Below this a typical entry of the stream would leave fp16's normal numbers, and lose bits.
_SMALLEST_ENTRY = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What can be said of a patch and a stack.

    Attributes:
        state: `APPLIES`, `NEEDLESS` or `UNSAFE`.
        why: a sentence.
        scaling: the stack's scaling under the patch, for one that scales.
        proven: whether it may be on because of a proof.
    """

    state: State
    why: str = ""
    scaling: Scaling | None = None
    proven: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of a model's magnitudes; found out when it is first asked for.

    Attributes:
        stacks: the model's stacks, by the root that holds them.
        batches: inputs to observe, or `None`.
        scale: "auto", or the power of two that was asked for.
    """

    stacks: Mapping[nn.Module, Sequence[Stack]]
    batches: Sequence[Any] | None = None
    scale: float | str = "auto"

    @functools.cached_property
    def _headrooms(self) -> dict[Stack, list[tuple[Headroom, float]]]:
        """For each stack what is known of it, the best first, each with the bits that must be left."""
        from .headroom.data import observe
        from .headroom.weights import bound

        if self.batches is not None and len(self.stacks) > 1:
            raise WrongTypeError("batches are inputs of one model: apply to each part by itself")
        known: dict[Stack, list[tuple[Headroom, float]]] = {}
        for root, stacks in self.stacks.items():
            found = [(bound(root, stacks), 0.0)]
            found += [] if self.batches is None else [(observe(root, self.batches, stacks), DATA_MARGIN)]
            known |= dict.fromkeys(stacks, found)
        return known

    def of(self, stack: Stack) -> list[tuple[Headroom, float]]:
        """The headrooms that know the stack, the bound from the weights first."""
        return [(each, margin) for each, margin in self._headrooms[stack] if any(each.of(stack.name))]

    def unproven(self, stack: Stack) -> str:
        """Why the weights give no proof for the stack; empty if they do."""
        said = (each.unproven.get(stack.name, "") for each, _ in self._headrooms[stack])
        return next(filter(None, said), "")


def judge(patch: Patch, stack: Stack, now: Scaling, evidence: Evidence) -> Verdict:
    """Whether `patch` may be on a stack that is scaled as `now` says.

    Raises:
        ScaleError: the scale that was asked for is none, or this stack cannot have it.
    """
    if isinstance(patch, StackPatch) and patch.scales:
        return _scaled(patch, stack, evidence)
    needless = patch.needless(stack) if isinstance(patch, StackPatch) else ""
    if needless:
        return Verdict(State.NEEDLESS, needless)
    return _proven(patch, stack, now, evidence) if patch.unsafe_alone else Verdict(State.APPLIES)


def _scaled(patch: StackPatch, stack: Stack, evidence: Evidence) -> Verdict:
    if evidence.scale != "auto":
        scaling = _as_given(evidence.scale, stack, wide=patch.wide)
        why = f"scale {_power(scaling.stream)} as given; {_after(stack, scaling, evidence)}"
        return Verdict(State.APPLIES, why, scaling)
    smallest = ""
    for headroom, margin in evidence.of(stack):
        complete = headroom.source == "data" or not evidence.unproven(stack) or patch.wide
        found = proposed(headroom, stack.name, margin, patch.scales, wide=patch.wide) if complete else None
        if found is None:
            continue
        if found.stream < _smallest_scale(stack) and not patch.wide:
            smallest = (
                f"the bound from the {headroom.source} asks for a scale of {_power(found.stream)}, at which half "
            )
            smallest += "precision loses bits of small values: give batches, or a scale"
            continue
        if found.stream == 1.0 and not patch.wide:
            return Verdict(State.NEEDLESS, f"fits as it is, {_after(stack, found, evidence)}")
        return Verdict(State.APPLIES, f"scale {_power(found.stream)}; {_after(stack, found, evidence)}", found)
    return Verdict(State.UNSAFE, smallest or f"no proof ({evidence.unproven(stack)}): give batches, or a scale")


def _proven(patch: Patch, stack: Stack, now: Scaling, evidence: Evidence) -> Verdict:
    why = f"no proof of headroom ({evidence.unproven(stack) or 'nothing is known of this stack'})"
    for headroom, margin in evidence.of(stack):
        if headroom.source == "weights" and evidence.unproven(stack) and not now.wide:
            continue
        beyond = overflows(headroom, stack.name, now, margin)
        if not beyond:
            return Verdict(State.APPLIES, f"safe: {_after(stack, now, evidence)}", proven=True)
        worst = max(beyond, key=lambda each: each.under(now))
        why = f"{worst.place.value} may reach {worst.under(now):.3g} by the {headroom.source}, fp16 holds 65504"
    return Verdict(State.UNSAFE, why)


def _after(stack: Stack, scaling: Scaling, evidence: Evidence) -> str:
    """The largest checked magnitude after scaling, per source."""
    said = []
    for headroom, _ in evidence.of(stack):
        values = [
            each.under(scaling) for each in headroom.of(stack.name) if each.place not in (Place.SCORES, Place.LOGITS)
        ]
        largest = max(values, default=math.inf)
        said.append(f"at most {largest:.3g} by the {headroom.source} ({bits(largest):.1f} bits left)")
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
    if factor > 1 or largest * factor > FP16_MAX or (largest and largest * factor < _SMALLEST_ENTRY):
        raise ScaleError(
            f"a scale of {_power(factor)} does not fit the weights of {stack.name}: it is at most 1, and must leave "
            f"their largest embedding, {largest:.3g}, between {_power(_SMALLEST_ENTRY)} and 65504"
        )
    return Scaling(factor, factor, wide)


def _smallest_scale(stack: Stack) -> float:
    """The smallest scale that leaves a stack's embeddings among fp16's normal numbers."""
    table = getattr(stack.embedding, "weight", None)
    if stack.entry != "tokens" or table is None or table.is_meta or not table.numel():
        return _SMALLEST_ENTRY
    typical = float(torch.linalg.vector_norm(table.detach(), dtype=torch.float32)) / math.sqrt(table.numel())
    return _SMALLEST_ENTRY / typical if typical > 0 else 1.0


def _largest_entry(stack: Stack) -> float:
    table = getattr(stack.embedding, "weight", None)
    if table is None or table.is_meta or not table.numel():
        return 0.0
    return float(table.detach().abs().max())


def _power(factor: float) -> str:
    return f"2^{round(math.log2(factor))}"


def reasons(verdicts: Mapping[Stack, Verdict]) -> str:
    """What is to be said of a patch, stack by stack, or once where it is the same for all."""
    said = dict.fromkeys(verdict.why for verdict in verdicts.values())
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{stack.name}: {verdict.why}" for stack, verdict in verdicts.items() if verdict.why)


def check_proven(patch: Patch, verdicts: Mapping[Stack, Verdict]) -> None:
    """Raises `UnprovenError` where a patch may be on no stack for want of a proof."""
    if verdicts and {verdict.state for verdict in verdicts.values()} == {State.UNSAFE}:
        raise UnprovenError(f"{patch.name}: {reasons(verdicts)}")
