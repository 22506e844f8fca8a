"""`gelu`: the tanh approximation of GELU, which upstream writes out in eight ops, as PyTorch's one.

gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn
from transformers.activations import NewGELUActivation

from ..bypass import may_bypass
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method


def has_written_out_gelu(feed_forward: nn.Module) -> bool:
    return type(getattr(feed_forward, "act", None)) is NewGELUActivation


def activation(self: Any, hidden_states: torch.Tensor) -> Any:
    """The feed-forward's activation of its hidden states, in their dtype; shape (batch, length, d_ff).

    Upstream's own where it is another one, where somebody's hooks are on it, and under autocast, which on some devices
    gives upstream's power, and so the result, in fp32.
    """
    act = self.act
    if (
        type(act) is not NewGELUActivation
        or not may_bypass(act)
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        return act(hidden_states)
    return nn.functional.gelu(hidden_states, approximate="tanh")


def edits(method: Method) -> list[Edit]:
    """Hands the calls of `self.act` to `activation`."""
    calls = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call)]
    return [method.replace(call.func, "self.t5fastpatch_act") for call in calls if ast.unparse(call.func) == "self.act"]


PATCH = SourcePatch(
    name="gelu",
    summary="gelu_new written out in eight ops -> F.gelu(approximate='tanh')",
    contract=Contract.ROUNDING,
    role=Role.FEED_FORWARD,
    edits=edits,
    sites=1,
    members={"t5fastpatch_act": activation},
    where=has_written_out_gelu,
)
