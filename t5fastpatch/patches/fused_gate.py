"""`fused_gate`: the two hidden products of a gated feed-forward, `wi_0` and `wi_1`, as one.

On a rescaled stack one of them has a factor, and they stay separate where it is not 1. The patches that rescale change
the same calls, so this one brings what they put there.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from ..fusion import Fusion
from ..patch import Contract, Part, Role, StackPatch
from ..rescaling import hidden_product, leave_feed_forward, replaced_calls
from ..rewrite import Edit, Method

_FUSION = Fusion((("wi_0", "wi_1"),))


class HiddenProducts:
    """Stands in for a gated feed-forward's hidden linears in one forward.

    Each takes states of shape (batch, length, d_model) and gives shape (batch, length, d_ff), a view of the product
    with both weights.
    """

    def __init__(self, linears: list[Any], matrix: torch.Tensor) -> None:
        self.linears = linears
        self.matrix = matrix

    def wi_0(self, states: torch.Tensor) -> torch.Tensor:
        self.states = states
        gate, self.linear = nn.functional.linear(states, self.matrix).chunk(2, -1)
        return gate

    def wi_1(self, states: torch.Tensor) -> Any:
        return self.linear if states is self.states else self.linears[1](states)


def hidden_products(self: Any, states: torch.Tensor) -> Any:
    """What has the hidden linears: the module itself where their products are to stay separate."""
    matrix = _FUSION.matrix(self, states) if self.t5fastpatch_hidden == 1.0 else None
    return self if matrix is None else HiddenProducts(_FUSION.linears(self), matrix)


def edits(method: Method) -> list[Edit]:
    """Has the hidden linears called on what `hidden_products` gives, and scales what the rescaling patches scale.

    Raises:
        UnexpectedSourceError: the forward has `wi_0`, and calls its linears otherwise than known.
    """
    if not any(isinstance(node, ast.Attribute) and node.attr == "wi_0" for node in ast.walk(method.tree)):
        return []
    texts = {
        "self.wi_0": "(t5fastpatch_linears := self.t5fastpatch_hidden_products({x})).wi_0({x})",
        "self.wi_1": "self.t5fastpatch_product(t5fastpatch_linears.wi_1, {x})",
        "self.wo": "self.t5fastpatch_leave({linear}, {x})",
    }
    return replaced_calls(method, texts, 3)


PATCH = StackPatch(
    name="fused_gate",
    summary="a gated feed-forward's two hidden products -> one",
    contract=Contract.ROUNDING,
    parts={
        Role.FEED_FORWARD: Part(
            edits,
            3,
            optional=True,
            members={
                "t5fastpatch_hidden_products": hidden_products,
                "t5fastpatch_product": hidden_product,
                "t5fastpatch_leave": leave_feed_forward,
                **_FUSION.members,
            },
        )
    },
    covers=frozenset({"residual_rescale", "residual_fp32"}),
    needless=_FUSION.needless,
    attach=_FUSION.attach,
    detach=_FUSION.detach,
)
