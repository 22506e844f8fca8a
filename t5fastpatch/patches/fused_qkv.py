"""`fused_qkv`: an attention's query, key and value as one product; cross-attention's key and value as another.

The three read one input in self-attention, the latter two in cross-attention, unless the cache has them already.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from ..errors import UnexpectedSourceError
from ..fusion import Fusion, joined_weights, may_join
from ..headroom.stacks import Stack
from ..patch import Contract, Part, Role, StackPatch
from ..rewrite import Edit, Method

_FUSION = Fusion((("q", "k", "v"), ("query", "key", "value")))

# What makes a forward one of cross-attention, if it has such an argument and gets it.
_OTHER_STATES = ("key_value_states", "encoder_hidden_states")


class Projections:
    """Stands in for an attention module's linears in one forward.

    Each takes states of shape (batch, length, d_model) and gives shape (batch, length, heads * d_kv), a view of the
    product of these states with all weights that are to be multiplied with them.
    """

    __slots__ = ("attention", "cross", "key_value", "states")

    def __init__(self, attention: nn.Module, cross: bool) -> None:
        self.attention = attention
        self.cross = cross
        self.states: torch.Tensor | None = None
        self.key_value: tuple[torch.Tensor, ...] = ()

    def q(self, states: torch.Tensor) -> Any:
        weights = None if self.cross else joined_weights(self.attention, states)
        if weights is None:
            return self._upstream(0, states)
        query, key, value = nn.functional.linear(states, weights).chunk(3, -1)
        self.states, self.key_value = states, (key, value)
        return query

    def k(self, states: torch.Tensor) -> Any:
        if states is not self.states:
            weights = joined_weights(self.attention, states)
            if weights is None:
                return self._upstream(1, states)
            below_query = weights[weights.shape[0] // 3 :]
            self.states, self.key_value = states, nn.functional.linear(states, below_query).chunk(2, -1)
        return self.key_value[0]

    def v(self, states: torch.Tensor) -> Any:
        if states is not self.states:
            return self._upstream(2, states)
        value = self.key_value[1]
        # From here on they live as long as upstream's do.
        self.states, self.key_value = None, ()
        return value

    def _upstream(self, index: int, states: torch.Tensor) -> Any:
        return list(_FUSION.linears(self.attention).values())[index](states)

    query, key, value = q, k, v


def projections(self: Any, other_states: torch.Tensor | None = None) -> Any:
    """What has the linears of an attention in one forward: the module itself where no products are joined."""
    return Projections(self, other_states is not None) if may_join() else self


def edits(method: Method) -> list[Edit]:
    """Has the linears called on what `projections` gives, from the query on, or from the key on where it comes first.

    Attention in blocks copies each of the three, and lets go of it; views of one product would be held until the last.

    Raises:
        UnexpectedSourceError: they are used otherwise than known.
    """
    calls = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call)]
    if any(ast.unparse(call.func) == "_split_into_blocks" for call in calls):
        return []
    for names in _FUSION.names:
        uses = {name: _uses(calls, f"self.{name}") for name in names}
        every = [node for node in ast.walk(method.tree) if isinstance(node, ast.Attribute)]
        known = sum(map(len, uses.values()))
        if not known:
            continue
        query, key, value = (uses[name] for name in names)
        found = sum(ast.unparse(node) in [f"self.{name}" for name in names] for node in every)
        if found != known or len(query) != 1 or len(key) != len(value) or not key:
            raise UnexpectedSourceError(f"uses of {', '.join(names)}: {found}, of which {known} are known")
        together = sorted((*query, *key, *value), key=lambda use: (use.lineno, use.col_offset))
        if together[0] is not query[0]:
            together.remove(query[0])
        first, *rest = together
        made = f"(t5fastpatch_linears := self.t5fastpatch_projections({_other_states(method)})).{first.attr}"
        return [
            method.replace(first, made),
            *(method.replace(each, f"t5fastpatch_linears.{each.attr}") for each in rest),
        ]
    return []


def _uses(calls: list[ast.Call], linear: str) -> list[ast.Attribute]:
    """Where a linear is called on some states, or handed to upstream's own function that does so."""
    functions = [call.func for call in calls if len(call.args) == 1 and isinstance(call.args[0], ast.Name)]
    arguments = [each for call in calls if ast.unparse(call.func) == "project" for each in call.args]
    return [
        each for each in (*functions, *arguments) if isinstance(each, ast.Attribute) and ast.unparse(each) == linear
    ]


def _other_states(method: Method) -> str:
    return next((each.arg for each in method.tree.args.args if each.arg in _OTHER_STATES), "")


def needless(stack: Stack) -> str:
    """Why a preset leaves a stack alone."""
    if all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in stack.module.parameters()):
        return "in fp32 on a CPU one product takes longer than three: by its name alone"
    return _FUSION.needless(stack)


PATCH = StackPatch(
    name="fused_qkv",
    summary="an attention's query, key and value -> one product; cross-attention's key and value -> one",
    contract=Contract.ROUNDING,
    parts={
        Role.ATTENTION: Part(
            edits, (2, 3, 5), optional=True, members={"t5fastpatch_projections": projections, **_FUSION.members}
        )
    },
    needless=needless,
    attach=_FUSION.attach,
    detach=_FUSION.detach,
)
