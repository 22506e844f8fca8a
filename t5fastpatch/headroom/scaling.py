"""Which powers of two a stack is scaled by, and whether what results cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .places import FP16_MAX, Headroom, Magnitude, Place, Scaling
from .stacks import Attention, FeedForward, Stack

DATA_MARGIN = 3.0  # bits that what was observed must stay below what fp16 holds
DATA_MARGIN_WANTED = 6.0  # and does, where that costs no bits: hidden products have long tails
SCALED = frozenset({Place.STREAM, Place.ATTENTION, Place.FEED_FORWARD, Place.HIDDEN})
SPARED = 4  # bits that an unproven scale stays above the smallest: at the border errors grow by a third
# Infinite scores make NaN with stock's checks as without, and nothing is added to infinite logits.
CHECKED = SCALED | {Place.GATE, Place.PROJECTIONS}
_IN_EVERY_BLOCK = CHECKED - {Place.GATE}  # which only gated feed-forwards have

# Below this fp16 loses bits.
SMALLEST_NORMAL = 2.0**-14


def margin_of(headroom: Headroom) -> float:
    """The bits that must be left, by what a headroom rests on."""
    return DATA_MARGIN if headroom.source == "data" else 0.0


def fit(
    stack: Stack, headroom: Headroom, places: Collection[Place] = SCALED, *, wide: bool = False
) -> tuple[Scaling | None, str]:
    """The scaling by which a headroom says that a stack fits into fp16, and what speaks against it.

    Args:
        stack: the stack.
        headroom: what is known of it.
        places: those that are to fit.
        wide: whether the residual stream is in fp32.

    Returns:
        As `proposed`, with the margin of the headroom, and for data more where that costs nothing; and the objection,
        empty if there is none.
    """
    if missing(stack, headroom, wide=wide):
        return None, headroom.unproven.get(stack.name, f"the {headroom.source} do not say all of this stack")
    margin, smallest = margin_of(headroom), smallest_scale(stack)
    found = proposed(headroom, stack.name, margin, places, wide=wide)
    if found is None:
        return None, f"by the {headroom.source} a magnitude is infinite"
    if found.stream < smallest:
        scale = f"2^{math.log2(found.stream):.0f}"
        return found, f"by the {headroom.source} a scale of {scale} is needed, at which small values lose bits"
    more = proposed(headroom, stack.name, DATA_MARGIN_WANTED if margin else 0.0, places, wide=wide)
    return (more if more is not None and more.stream >= smallest else found), ""


def harmless(stack: Stack, *, wide: bool = False) -> Scaling | None:
    """A scaling that costs a stack no bits, though nothing says that it is enough.

    Returns:
        `SPARED` bits above the smallest; `None` where what enters is not known, or a product is not plain, whose input
        would be scaled instead and lose bits itself.
    """
    parts = (part for layer in stack.layers for part in layer)
    linears = [linear for part in parts for linear in _scaled_linears(part)]
    if stack.entry != "tokens" or not all(type(linear) is nn.Linear for linear in linears):
        return None
    power = min(0, math.ceil(math.log2(smallest_scale(stack))) + SPARED)
    return Scaling(2.0**power, 2.0**power, wide)


def _scaled_linears(part: Attention | FeedForward) -> list[Any]:
    if isinstance(part, Attention):
        return [part.output]
    every: list[Any] = list(part.dense)
    return [linear for dense in every for linear in (getattr(dense, "wi_1", None) or dense.wi, dense.wo)]


def missing(stack: Stack, headroom: Headroom, *, wide: bool = False) -> bool:
    """Whether a headroom leaves out a place of some block, the residual stream of a wide stack aside."""
    wanted = _IN_EVERY_BLOCK - {Place.STREAM} if wide else _IN_EVERY_BLOCK
    known = {(each.layer, each.place) for each in headroom.of(stack.name)}
    return not known.issuperset((layer, place) for layer in range(len(stack.layers)) for place in wanted)


def smallest_scale(stack: Stack) -> float:
    """The smallest scale, at most 1, that leaves a typical embedding of a stack among fp16's normal numbers."""
    table = embeddings_of(stack)
    if stack.entry != "tokens" or table is None:
        return SMALLEST_NORMAL
    typical = float(torch.linalg.vector_norm(table, dtype=torch.float32)) / math.sqrt(table.numel())
    return min(1.0, SMALLEST_NORMAL / typical) if typical > 0 else 1.0


def embeddings_of(stack: Stack) -> torch.Tensor | None:
    """A stack's table of embeddings, (entries, d_model); `None` if there is none, or its values are not at hand."""
    table = getattr(stack.embedding, "weight", None)
    if table is None or table.is_meta or isinstance(table, FakeTensor) or not table.numel():
        return None
    values: torch.Tensor = table.detach()
    return values


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
