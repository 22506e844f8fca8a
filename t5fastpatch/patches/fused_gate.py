"""`fused_gate`: the two hidden products of a gated feed-forward, `wi_0` and `wi_1`, as one.

On a rescaled stack one of the two has a factor, so they stay separate there. The patches that rescale change the same
calls, so this one does what they would do.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from ..fusion import Fusion, joined_weights, may_join
from ..headroom.stacks import Stack
from ..patch import Contract, Part, Role, StackPatch
from ..rescaling import hidden_product, leave_feed_forward, replaced_calls
from ..rewrite import Edit, Method

_FUSION = Fusion((("wi_0", "wi_1"),))


class JoinedProducts:
    """Stands in for a gated feed-forward's linears in one forward.

    Of the hidden ones each takes states of shape (batch, length, d_model) and gives shape (batch, length, d_ff), a view
    of the product with both weights.
    """

    __slots__ = ("dense", "linear", "states", "weights")

    def __init__(self, dense: Any, weights: torch.Tensor) -> None:
        self.dense = dense
        self.weights = weights

    def wi_0(self, states: torch.Tensor) -> torch.Tensor:
        self.states = states
        gate, self.linear = nn.functional.linear(states, self.weights).chunk(2, -1)
        return gate

    def wi_1(self, states: torch.Tensor) -> Any:
        return self.linear if states is self.states else self.dense.wi_1(states)

    def wo(self, hidden: torch.Tensor) -> Any:
        return self.dense.wo(hidden)


class ScaledProducts:
    """Stands in for a gated feed-forward's linears on a rescaled stack."""

    def __init__(self, dense: Any) -> None:
        self.dense = dense

    def wi_0(self, states: torch.Tensor) -> Any:
        return self.dense.wi_0(states)

    def wi_1(self, states: torch.Tensor) -> Any:
        return hidden_product(self.dense, self.dense.wi_1, states)

    def wo(self, hidden: torch.Tensor) -> Any:
        return leave_feed_forward(self.dense, self.dense.wo, hidden)


def products(self: Any, states: torch.Tensor) -> Any:
    """What has the linears in one forward: the module itself where nothing is scaled, and nothing joined."""
    if self.t5fastpatch_stream != 1.0 or self.t5fastpatch_hidden != 1.0:
        return ScaledProducts(self)
    weights = joined_weights(self, states) if may_join() else None
    return self if weights is None else JoinedProducts(self, weights)


def edits(method: Method) -> list[Edit]:
    """Has the linears called on what `products` gives.

    Raises:
        UnexpectedSourceError: the forward has `wi_0`, and calls its linears otherwise than known.
    """
    if not any(isinstance(node, ast.Attribute) and node.attr == "wi_0" for node in ast.walk(method.tree)):
        return []
    texts = {
        "self.wi_0": "(t5fastpatch_linears := self.t5fastpatch_products({x})).wi_0({x})",
        "self.wi_1": "t5fastpatch_linears.wi_1({x})",
        "self.wo": "t5fastpatch_linears.wo({x})",
    }
    return replaced_calls(method, texts, 3)


def needless(stack: Stack) -> str:
    """Why no preset puts it on a stack."""
    return _FUSION.needless(stack) or "it buys no time on a CPU, and holds both products longer: by its name alone"


PATCH = StackPatch(
    name="fused_gate",
    summary="a gated feed-forward's two hidden products -> one",
    contract=Contract.ROUNDING,
    parts={
        Role.FEED_FORWARD: Part(edits, 3, optional=True, members={"t5fastpatch_products": products, **_FUSION.members})
    },
    covers=frozenset({"residual_rescale", "residual_fp32"}),
    needless=needless,
    attach=_FUSION.attach,
    detach=_FUSION.detach,
)
