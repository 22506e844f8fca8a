"""`residual_fp32`: the residual stream in fp32, the matrix products in half precision and at a scale that they hold.

What the branches add is rounded to half once, in the product, and summed in fp32. Only each product has to fit fp16,
so the scale is nearer to 1 than `residual_rescale`'s, and any entry of the stream is as good as another.
"""

from __future__ import annotations

from ..headroom.places import Place
from ..patch import Contract, StackPatch
from ..rescaling import enter_wide, objection, parts

PATCH = StackPatch(
    name="residual_fp32",
    summary="the half-precision residual stream -> an fp32 one, fed by half-precision products",
    contract=Contract.EXACT_IN_FP32,
    parts=parts(enter_wide),
    objection=objection,
    scales=frozenset({Place.ATTENTION, Place.FEED_FORWARD, Place.HIDDEN}),
    wide=True,
    fallback_for="residual_rescale",
    conflicts=frozenset({"residual_rescale"}),
)
