"""`residual_rescale`: a residual stream that carries s h instead of h, s a power of two that fp16 can hold it at."""

from __future__ import annotations

from ..headroom.places import Place
from ..patch import Contract, StackPatch
from ..rescaling import enter_half, objection, parts

PATCH = StackPatch(
    name="residual_rescale",
    summary="the residual stream and the hidden products -> the same at a smaller power-of-two scale",
    contract=Contract.EXACT_IN_FP32,
    parts=parts(enter_half),
    objection=objection,
    scales=frozenset({Place.STREAM, Place.ATTENTION, Place.FEED_FORWARD, Place.HIDDEN}),
    conflicts=frozenset({"residual_fp32"}),
)
