"""Which powers of two a stack is scaled by, and whether what results cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Collection

from .places import FP16_MAX, Headroom, Magnitude, Place, Scaling

DATA_MARGIN = 3.0  # bits that what was observed must stay below what fp16 holds
SCALED = frozenset({Place.STREAM, Place.ATTENTION, Place.FEED_FORWARD, Place.HIDDEN})
# Infinite scores make NaN with stock's checks as without, and nothing is added to infinite logits.
CHECKED = SCALED | {Place.GATE, Place.PROJECTIONS}


def proposed(
    headroom: Headroom, stack: str, margin_bits: float = 0.0, places: Collection[Place] = SCALED, *, wide: bool = False
) -> Scaling | None:
    """The scaling nearest to 1 that brings a stack's magnitudes under 65504.

    Args:
        headroom: magnitudes of the unscaled model.
        stack: the stack's name.
        margin_bits: what must be left at least, in bits.
        places: those that are to fit.
        wide: whether the residual stream is in fp32.

    Returns:
        `hidden`, the largest power of two, at most 1, under which every hidden product that takes a scale fits, and
        `stream`, the largest, at most `hidden`, under which the sums and the branches do. `None` where a magnitude is
        not finite, or none is known.
    """
    found = [each for each in headroom.of(stack, *places) if not each.fixed]
    if not found or not all(math.isfinite(each.value) for each in found):
        return None
    hidden = _largest_power([each for each in found if each.place is Place.HIDDEN], margin_bits)
    stream = _largest_power([each for each in found if each.place is not Place.HIDDEN], margin_bits)
    return Scaling(min(stream, hidden), hidden, wide)


def overflows(headroom: Headroom, stack: str, scaling: Scaling, margin_bits: float = 0.0) -> list[Magnitude]:
    """The magnitudes that may leave fp16 under a scaling, scores and logits aside: these the checks do not mend."""
    limit = FP16_MAX / 2**margin_bits
    return [each for each in headroom.of(stack, *CHECKED) if not each.under(scaling) <= limit]


def _largest_power(magnitudes: list[Magnitude], margin_bits: float) -> float:
    largest = max((each.value for each in magnitudes), default=0.0) * 2**margin_bits
    mantissa, exponent = math.frexp(largest / FP16_MAX)
    return 2.0 ** min(0, (mantissa == 0.5) - exponent)
