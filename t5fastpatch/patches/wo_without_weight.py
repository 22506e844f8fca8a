"""`wo_without_weight`: a feed-forward whose `wo` has no `.weight`, as some quantized linears have none.

Upstream casts the hidden states to the dtype of `wo.weight` and raises `AttributeError` where there is no such thing.
Such a module knows by itself what dtype it computes in.
"""

from __future__ import annotations

import ast

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method


def edits(method: Method) -> list[Edit]:
    """Lets the cast to `self.wo.weight.dtype` depend on there being a `self.wo.weight`, asked before anything else.

    Raises:
        UnexpectedSourceError: the weight is read outside of that statement.
    """
    casts = [node for node in ast.walk(method.tree) if isinstance(node, ast.If) and _reads_weight(node.test)]
    inside = {node for cast in casts for node in ast.walk(cast)}
    for node in ast.walk(method.tree):
        if isinstance(node, ast.Attribute) and node not in inside and _is_weight(node):
            raise UnexpectedSourceError(f"line {node.lineno} reads self.wo.weight outside of the known cast")
    found = []
    for cast in casts:
        match cast.test:
            case ast.BoolOp(op=ast.And(), values=[first, *_]) if not cast.orelse:
                # A dynamically quantized linear's `weight` is a method.
                there = 'isinstance(getattr(self.wo, "weight", None), torch.Tensor)'
                found.append(method.replace(first, f"{there} and {ast.unparse(first)}"))
            case _:
                raise UnexpectedSourceError(f"line {cast.lineno} asks for the weight in another way")
    return found


def _reads_weight(test: ast.expr) -> bool:
    return any(map(_is_weight, ast.walk(test)))


def _is_weight(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "self.wo.weight"


PATCH = SourcePatch(
    name="wo_without_weight",
    summary="the cast to wo.weight's dtype -> only where wo has a weight",
    contract=Contract.EXACT,
    role=Role.FEED_FORWARD,
    edits=edits,
    sites=1,
)
