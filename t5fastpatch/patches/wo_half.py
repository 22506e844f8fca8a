"""`wo_half`: the feed-forward's `wo` in the dtype of the rest of the model.

`from_pretrained(dtype=torch.float16)` keeps `wo` in fp32 for the sake of its overflows, and with it, by promotion, the
product and the whole residual stream. Where there is a proof that nothing overflows there is no need to. The fp32
weights stay at hand, on the CPU, if half precision does not hold them to the bit: `state_dict` has them, and `remove`
brings them back.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..headroom.stacks import FeedForward, Stack
from ..patch import Contract, Part, Role, StackPatch

# Plain attribute of the dense module: the fp32 weight, `None` where half precision holds it to the bit, and that dtype.
_KEPT = "t5fastpatch_wo"


def half_dtype(dense: Any) -> Any:
    """The half dtype of a dense module whose `wo` alone is fp32; `None` for any other."""
    wo = dense.wo
    if type(wo) is not nn.Linear or type(wo.weight) is not nn.Parameter or wo.bias is not None:
        return None
    other = getattr(getattr(dense, "wi_0", None) or dense.wi, "weight", None)
    half = isinstance(other, torch.Tensor) and other.dtype in (torch.float16, torch.bfloat16)
    return other.dtype if half and wo.weight.dtype is torch.float32 else None


def needless(stack: Stack) -> str:
    """Why a stack has nothing for the patch to do."""
    parts = (part for layer in stack.layers for part in layer)
    dense: list[Any] = [each for part in parts if isinstance(part, FeedForward) for each in part.dense]
    if any(each.wo.weight.is_meta for each in dense if half_dtype(each)):
        return "wo is offloaded"
    if any(half_dtype(each) or hasattr(each, _KEPT) for each in dense):
        return ""
    return "wo is no fp32 linear in a half-precision feed-forward"


def objection(stack: Stack) -> str:
    """Why a stack cannot have the patch: a weight of `wo` is beyond its half dtype."""
    for number, layer in enumerate(stack.layers):
        every: list[Any] = [each for part in layer if isinstance(part, FeedForward) for each in part.dense]
        for dense in every:
            dtype = half_dtype(dense)
            if dtype is None or dense.wo.weight.is_meta:
                continue
            largest = float(torch.linalg.vector_norm(dense.wo.weight.detach(), torch.inf))
            if not largest <= torch.finfo(dtype).max:
                return f"wo of block {number} holds {largest:.4g}, which half precision cannot hold"
    return ""


def attach(dense: Any) -> None:
    """Brings `wo` to half precision, and keeps what is lost."""
    dtype = half_dtype(dense)
    if dtype is None:
        return
    full = dense.wo.weight.data
    dense.wo.weight.data = half = full.to(dtype)
    setattr(dense, _KEPT, (None if torch.equal(half.float(), full) else full.cpu(), dtype))


def detach(dense: Any) -> None:
    """Brings back the fp32 `wo`, to the bit."""
    if _KEPT in vars(dense):
        dense.wo.weight.data = full_weight(dense)
        delattr(dense, _KEPT)


def full_weight(dense: Any) -> torch.Tensor:
    """The fp32 weight of a `wo` in half precision: the kept one, but for what has been trained or loaded since."""
    kept, dtype = vars(dense)[_KEPT]
    weight: torch.Tensor = dense.wo.weight.data
    if kept is None:
        return weight.float()
    kept = kept.to(weight.device)
    return torch.where(kept.to(dtype) == weight, kept, weight.float())


def state_dict(self: Any, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
    """Upstream's, with the fp32 `wo`."""
    found = nn.Module.state_dict(self, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
    name = f"{prefix}wo.weight"
    if _KEPT in vars(self) and name in found and not keep_vars:
        found[name] = full_weight(self)
    return found


def unpatched(dense: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A dense module's state, for a pickle, with the fp32 `wo`."""
    if _KEPT not in state:
        return state
    wo = copy.copy(dense.wo)
    wo._parameters = {**wo._parameters, "weight": nn.Parameter(full_weight(dense), dense.wo.weight.requires_grad)}
    kept = {name: value for name, value in state.items() if name != _KEPT}
    return {**kept, "_modules": {**state["_modules"], "wo": wo}}


PATCH = StackPatch(
    name="wo_half",
    summary="the feed-forward's fp32 wo in a half-precision model -> half precision",
    contract=Contract.ROUNDING,
    parts={Role.FEED_FORWARD: Part(members={"state_dict": state_dict})},
    unsafe_alone="wo is in fp32 because its product may overflow fp16",
    needs_proof=True,
    needless=needless,
    objection=objection,
    attach=attach,
    detach=detach,
    unpatched=unpatched,
)
