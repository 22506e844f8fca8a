"""`wo_half`: the feed-forward's `wo` in the dtype of the rest of the model.

`from_pretrained(dtype=torch.float16)` keeps `wo` in fp32 for the sake of its overflows, and with it, by promotion, the
product and the whole residual stream. Where there is a proof that nothing overflows there is no need to. The fp32
weights stay at hand, on the CPU, if half precision does not hold them to the bit: `state_dict` has them, and `remove`
brings them back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..headroom.stacks import FeedForward, Stack
from ..patch import Contract, Part, Role, StackPatch

_KEPT = "t5fastpatch_wo"  # plain attribute of the dense module: the fp32 weight, where half precision lost some of it


def half_dtype(dense: Any) -> Any:
    """The half dtype of a dense module whose `wo` alone is fp32; `None` for any other."""
    wo = getattr(dense.wo, "weight", None)
    other = getattr(dense.wi_0 if hasattr(dense, "wi_0") else dense.wi, "weight", None)
    if (
        type(dense.wo) is not nn.Linear
        or type(wo) is not nn.Parameter
        or wo.dtype is not torch.float32
        or other is None
    ):
        return None
    return other.dtype if other.dtype in (torch.float16, torch.bfloat16) else None


def needless(stack: Stack) -> str:
    """Why a stack has nothing for the patch to do."""
    parts = (part for layer in stack.layers for part in layer)
    dense: list[Any] = [each for part in parts if isinstance(part, FeedForward) for each in part.dense]
    if any(each.wo.weight.is_meta for each in dense if half_dtype(each)):
        return "wo is offloaded"
    if any(half_dtype(each) or hasattr(each, _KEPT) for each in dense):
        return ""
    return "wo is no fp32 linear in a half-precision feed-forward"


def attach(dense: Any) -> None:
    """Brings `wo` to half precision, and keeps what is lost."""
    dtype = half_dtype(dense)
    if dtype is None:
        return
    full = dense.wo.weight.data
    half = full.to(dtype)
    setattr(dense, _KEPT, None if torch.equal(half.float(), full) else full.cpu())
    dense.wo.weight.data = half
    if dense.wo.bias is not None:
        dense.wo.bias.data = dense.wo.bias.data.to(dtype)


def detach(dense: Any) -> None:
    """Brings back the fp32 `wo`, to the bit."""
    if _KEPT not in vars(dense):
        return
    kept, weight = vars(dense).pop(_KEPT), dense.wo.weight
    weight.data = weight.data.float() if kept is None else kept.to(weight.device)


def state_dict(self: Any, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
    """Upstream's, with the fp32 `wo`."""
    found = nn.Module.state_dict(self, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
    name = f"{prefix}wo.weight"
    if _KEPT in vars(self) and name in found and not keep_vars:
        kept = vars(self)[_KEPT]
        found[name] = found[name].float() if kept is None else kept.to(found[name].device)
    return found


PATCH = StackPatch(
    name="wo_half",
    summary="the feed-forward's fp32 wo in a half-precision model -> half precision",
    contract=Contract.ROUNDING,
    parts={Role.FEED_FORWARD: Part(members={"state_dict": state_dict})},
    unsafe_alone="wo is in fp32 because its product may overflow fp16",
    needs_proof=True,
    needless=needless,
    attach=attach,
    detach=detach,
)
