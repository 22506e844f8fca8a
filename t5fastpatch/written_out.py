"""Attention that is written out in upstream's forward, as releases before 5.15 have it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Product:
    """`scores = torch.matmul(query, key.transpose(3, 2))`."""

    statement: ast.Assign
    scores: str
    query: str
    key: str


def products(tree: ast.AST) -> Iterator[Product]:
    """The products of queries and keys in a method."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(
                    targets=[ast.Name(id=scores)],
                    value=ast.Call(
                        args=[
                            ast.Name(id=query),
                            ast.Call(func=ast.Attribute(value=ast.Name(id=key), attr="transpose")),
                        ]
                    ) as call,
                ) as statement
            ):
                spellings = (f"torch.matmul({query}, {key}.transpose({dims}))" for dims in ("3, 2", "-1, -2"))
                if ast.unparse(call) in spellings:
                    yield Product(statement, scores, query, key)


def masked_sums(tree: ast.AST) -> Iterator[tuple[ast.BinOp, ast.Name]]:
    """The sums of a position bias and a mask, with the mask: what comes to be the position bias of all layers."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id="position_bias")],
                value=ast.BinOp(left=ast.Name(id="position_bias"), op=ast.Add(), right=ast.Name() as mask) as total,
            ):
                yield total, mask
