"""What a stack's magnitudes allow: the scale it needs to fit into fp16, and the proof that this rests on."""

from __future__ import annotations

import dataclasses

from .places import FP16_MAX, Headroom, Magnitude, Scaling
from .scaling import SCALED, fit, margin_of, overflows
from .stacks import Stack


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
        found, objection = fit(stack, headroom)
        objection = objection or _beyond(stack, headroom, found)
        if not objection:
            return Decision(headroom.source, others, found, margin, tuple(why_not))
        why_not.append(objection)
        scaling = found or scaling
    return Decision("", others, scaling, margin, tuple(why_not))


def rescalable(magnitude: Magnitude) -> bool:
    """Whether rescaling reaches it."""
    return magnitude.place in SCALED and not magnitude.fixed


def _others_fit(stack: Stack, headroom: Headroom) -> bool:
    limit = FP16_MAX / 2 ** margin_of(headroom)
    others = [each for each in headroom.of(stack.name) if not rescalable(each)]
    return bool(others) and stack.name not in headroom.unproven and all(each.value <= limit for each in others)


def _beyond(stack: Stack, headroom: Headroom, scaling: Scaling | None) -> str:
    """What overflows at any scale; empty if nothing does."""
    assert scaling is not None
    beyond = overflows(headroom, stack.name, scaling, margin_of(headroom))
    if not beyond:
        return ""
    worst = max(beyond, key=lambda each: each.under(scaling))
    margin = margin_of(headroom)
    spare = f", and {margin:.0f} bits are to spare" if margin else ""
    place = f"the {worst.place.value} of block {worst.layer}"
    return f"by the {headroom.source} {place} may reach {worst.value:.3g}{spare}, at any scale"
