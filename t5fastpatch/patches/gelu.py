"""`gelu`: the tanh approximation of GELU, which upstream writes out in eight ops, as PyTorch's one.

gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).

Where no gradient is wanted, activation and gate are computed in place: the hidden states of a feed-forward are the
largest tensors of most models.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn
from transformers.activations import NewGELUActivation

from ..bypass import autocasts, gives_new_memory, may_bypass, transformed
from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method

_KNOWN = (NewGELUActivation, nn.ReLU)


def has_known_activation(feed_forward: nn.Module) -> bool:
    return type(getattr(feed_forward, "act", None)) in _KNOWN


def activation(self: Any, hidden_states: torch.Tensor) -> Any:
    """The feed-forward's activation of the product of `wi` or `wi_0`, in its dtype; shape (batch, length, d_ff).

    Upstream's own where it is another one, where somebody's hooks are on it, and under autocast, which on some devices
    gives upstream's power, and so the result, in fp32.
    """
    act = self.act
    known = type(act) in _KNOWN and may_bypass(act)
    if not known or autocasts(hidden_states):
        return act(hidden_states)
    linear = self._modules.get("wi_0") or self._modules.get("wi")
    in_place = _may_change(hidden_states) and gives_new_memory(linear)
    if type(act) is nn.ReLU:
        return torch.relu_(hidden_states) if in_place else torch.relu(hidden_states)
    if in_place:
        return torch.ops.aten.gelu_(hidden_states, approximate="tanh")
    return nn.functional.gelu(hidden_states, approximate="tanh")


def gated(self: Any, gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """The product of a gated feed-forward's two halves; each has shape (batch, length, d_ff)."""
    own = type(self.act) in _KNOWN and may_bypass(self.act) and gives_new_memory(self.wi_0)
    if own and _may_change(gate) and gate.dtype == linear.dtype:
        return gate.mul_(linear)
    return gate * linear


def _may_change(hidden_states: torch.Tensor) -> bool:
    return not (torch.is_grad_enabled() or transformed()) and type(hidden_states) is torch.Tensor


def edits(method: Method) -> list[Edit]:
    """Hands the calls of `self.act` to `activation`, and the product of the halves to `gated`.

    Raises:
        UnexpectedSourceError: the activation is not of a product with `wi` or `wi_0`, or a half is used again.
    """
    found = []
    for node in ast.walk(method.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="act") as act) if ast.unparse(act) == "self.act":
                _check_is_product(method, node)
                found.append(method.replace(act, "self.t5fastpatch_act"))
            case ast.BinOp(left=ast.Name(id="hidden_gelu" as gate), op=ast.Mult(), right=ast.Name(id=linear)):
                _check_used_once(method, linear)
                # The forward lets go of it, which is as large as the product.
                half = f"({linear}, {linear} := None)[0]"
                found.append(method.replace(node, f"self.t5fastpatch_gated({gate}, {half})"))
    return found


def _check_used_once(method: Method, name: str) -> None:
    names = [node for node in ast.walk(method.tree) if isinstance(node, ast.Name) and node.id == name]
    if sum(isinstance(node.ctx, ast.Load) for node in names) != 1:
        raise UnexpectedSourceError(f"{name} is read more than once")


def _check_is_product(method: Method, call: ast.Call) -> None:
    statements = list(map(ast.unparse, method.tree.body))
    known = (
        "hidden_gelu = self.act(self.wi_0(hidden_states))",
        "hidden_states = self.wi(hidden_states)\nhidden_states = self.act(hidden_states)",
    )
    if not any(text in "\n".join(statements) for text in known):
        raise UnexpectedSourceError(f"{ast.unparse(call)} is not of the product with wi or wi_0")


PATCH = SourcePatch(
    name="gelu",
    summary="gelu_new written out in eight ops -> F.gelu(approximate='tanh'); in place without gradients, as ReLU is",
    contract=Contract.ROUNDING,
    role=Role.FEED_FORWARD,
    edits=edits,
    sites=(1, 2),
    members={"t5fastpatch_act": activation, "t5fastpatch_gated": gated},
    where=has_known_activation,
)
