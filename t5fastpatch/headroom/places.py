"""The places of a model that can overflow in fp16, their magnitudes, and what rescaling makes of these."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from enum import Enum

FP16_MAX = 65504.0


class Place(str, Enum):
    """Where a magnitude is taken; each is the largest absolute value of a tensor."""

    STREAM = "residual stream"
    PROJECTIONS = "attention projections"  # queries, keys and values
    SCORES = "attention scores"
    ATTENTION = "attention output"
    GATE = "feed-forward gate"  # act(wi_0 x), which no rescaling reaches
    HIDDEN = "hidden product"  # what wo reads
    FEED_FORWARD = "feed-forward output"
    LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What is on a stack: powers of two that multiply its sums and its hidden products.

    Attributes:
        stream: the factor of the residual stream and of all that is added to it.
        hidden: the part of it that already multiplies the hidden product, between `stream` and 1.
        wide: whether the residual stream itself is in fp32.
    """

    stream: float = 1.0
    hidden: float = 1.0
    wide: bool = False


UNSCALED = Scaling()


@dataclasses.dataclass(frozen=True)
class Magnitude:
    """The largest absolute value at one place of one block.

    Attributes:
        stack: the stack's name.
        layer: the block's number from 0; `None` for what stands before or behind the blocks.
        place: what is measured.
        value: an upper bound, or what was observed; in the units of the unscaled model.
        fixed: whether rescaling leaves it as it is: hidden products of an activation that is neither gated nor ReLU.
    """

    stack: str
    layer: int | None
    place: Place
    value: float
    fixed: bool = False

    def under(self, scaling: Scaling) -> float:
        """Its value in a stack with this scaling; 0 where the scaled tensor is in fp32."""
        if self.place is Place.STREAM:
            return 0.0 if scaling.wide else self.value * scaling.stream
        if self.place in (Place.ATTENTION, Place.FEED_FORWARD):
            return self.value * scaling.stream
        if self.place is Place.HIDDEN and not self.fixed:
            return self.value * scaling.hidden
        return self.value


def bits(value: float) -> float:
    """The headroom of a magnitude in bits, log2(65504 / value); negative where fp16 cannot hold it."""
    if not math.isfinite(value):
        return -math.inf
    return math.inf if value == 0 else math.log2(FP16_MAX / value)


@dataclasses.dataclass(frozen=True)
class Headroom:
    """Magnitudes of a model, and what they rest on.

    Attributes:
        source: "weights" (an upper bound for every input) or "data" (what was observed).
        magnitudes: one per stack, block and place.
        assumes: per stack, what the figures take for granted, as sentences.
        unproven: per stack, why there is no proof for it; its magnitudes may be missing.
    """

    source: str
    magnitudes: tuple[Magnitude, ...]
    assumes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    unproven: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, stack: str, *places: Place) -> Iterator[Magnitude]:
        """The magnitudes of one stack at these places, or at all."""
        return (each for each in self.magnitudes if each.stack == stack and (not places or each.place in places))
