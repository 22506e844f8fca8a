"""What a stack's magnitudes allow: the scale it needs to fit into fp16, and the proof that this rests on."""

from __future__ import annotations

import dataclasses
import math

import torch

from .places import FP16_MAX, Headroom, Magnitude, Scaling
from .scaling import DATA_MARGIN, SCALED, overflows, proposed
from .stacks import Stack

# Below this, fp16 loses bits.
_SMALLEST_NORMAL = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a stack can be kept within fp16.

    Attributes:
        rests_on: "weights", "data", or "" where nothing shows that the scaled stack fits, scores and logits aside.
        others_rest_on: the same for what rescaling does not reach, scores and logits among it.
        scaling: what to rescale by; 1 where the stack fits as it is, `None` where nothing is known.
        margin_bits: the bits that the scaling leaves at least.
        why_not: what was considered first, or in vain, and why it does not do, as sentences.
    """

    rests_on: str
    others_rest_on: str
    scaling: Scaling | None
    margin_bits: float
    why_not: tuple[str, ...] = ()


def decide(stack: Stack, *headrooms: Headroom) -> Decision:
    """The first of the headrooms by which a stack fits into fp16, rescaled where it must be.

    A bound from the weights counts as it is, what was observed with `DATA_MARGIN` bits to spare.
    """
    scaling: Scaling | None = None
    margin, why_not = 0.0, list[str]()
    others = next((each.source for each in headrooms if _others_fit(stack, each)), "")
    for headroom in headrooms:
        margin = margin_of(headroom)
        found = proposed(headroom, stack.name, margin)
        objection = _objection(stack, headroom, found, margin)
        if not objection:
            return Decision(headroom.source, others, found, margin, tuple(why_not))
        why_not.append(f"by the {headroom.source}: {objection}")
        scaling = found or scaling
    return Decision("", others, scaling, margin, tuple(why_not))


def margin_of(headroom: Headroom) -> float:
    """The bits that must be left, by what a headroom rests on."""
    return DATA_MARGIN if headroom.source == "data" else 0.0


def rescalable(magnitude: Magnitude) -> bool:
    """Whether rescaling reaches it."""
    return magnitude.place in SCALED and not magnitude.fixed


def smallest_scale(stack: Stack) -> float:
    """The smallest scale that leaves a typical embedding of a stack among fp16's normal numbers."""
    weight = getattr(stack.embedding, "weight", None)
    if stack.entry != "tokens" or weight is None or weight.is_meta or not weight.numel():
        return _SMALLEST_NORMAL
    typical = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float32)) / math.sqrt(weight.numel())
    return _SMALLEST_NORMAL / typical if typical > 0 else 1.0


def _others_fit(stack: Stack, headroom: Headroom) -> bool:
    limit = FP16_MAX / 2 ** margin_of(headroom)
    others = [each for each in headroom.of(stack.name) if not rescalable(each)]
    return bool(others) and stack.name not in headroom.unproven and all(each.value <= limit for each in others)


def _objection(stack: Stack, headroom: Headroom, scaling: Scaling | None, margin: float) -> str:
    """Why nothing can be decided by a headroom; empty if it can."""
    if stack.name in headroom.unproven:
        return headroom.unproven[stack.name]
    if scaling is None:
        return "a magnitude that rescaling would change is infinite, or none is known"
    if scaling.stream < min(1.0, smallest_scale(stack)):
        return f"a scale of 2^{math.log2(scaling.stream):.0f} would be needed, at which small values lose bits"
    beyond = overflows(headroom, stack.name, scaling, margin)
    if beyond:
        worst = max(beyond, key=lambda each: each.under(scaling))
        spare = f", and {margin:.0f} bits are to spare" if margin else ""
        return f"the {worst.place.value} of block {worst.layer} may reach {worst.value:.3g}{spare}, at any scale"
    return ""
