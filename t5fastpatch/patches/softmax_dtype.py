"""`softmax_dtype`: the attention's softmax in the dtype of its scores.

Upstream casts the scores to fp32, takes the softmax and casts back. The softmax kernels accumulate in fp32 for half
inputs anyway, so both casts, and a tensor of twice the width, buy at most the last rounding.
"""

from __future__ import annotations

import ast

from ..errors import UnexpectedSourceError
from ..registry import Contract, Role, SourcePatch
from ..rewrite import Edit, Method


def edits(method: Method) -> list[Edit]:
    """Puts `softmax(scores, dim=d, dtype=scores.dtype)` for each softmax that goes through fp32 and back.

    Known are `softmax(scores.float(), dim=d).type_as(scores)` and
    `softmax(scores, dim=d, dtype=torch.float32).type_as(scores)`, for any name in the place of `scores`.

    Raises:
        UnexpectedSourceError: another softmax with a cast stands in the method.
    """
    found = []
    matched = set()
    for node in ast.walk(method.tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Call() as softmax, attr="type_as"),
                args=[ast.Name(id=scores)],
                keywords=[],
            ) if _through_fp32(softmax, scores):
                dim = next(ast.unparse(keyword) for keyword in softmax.keywords if keyword.arg == "dim")
                text = f"{ast.unparse(softmax.func)}({scores}, {dim}, dtype={scores}.dtype)"
                found.append(method.replace(node, text))
                matched.add(softmax)
    for node in ast.walk(method.tree):
        if isinstance(node, ast.Call) and _casts_a_softmax(node) and not matched & set(ast.walk(node)):
            raise UnexpectedSourceError(f"a softmax with a cast that is not known: {ast.unparse(node)}")
    return found


def _is_softmax(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "softmax"


def _through_fp32(call: ast.Call, scores: str) -> bool:
    """Whether `call` is one of the two known spellings of an fp32 softmax over `scores`."""
    if not _is_softmax(call) or len(call.args) != 1:
        return False
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if "dim" not in keywords:
        return False
    del keywords["dim"]
    argument = ast.unparse(call.args[0])
    return (argument, keywords) in ((f"{scores}.float()", {}), (scores, {"dtype": "torch.float32"}))


def _casts_a_softmax(call: ast.Call) -> bool:
    """Whether `call` is a softmax with a cast in its arguments, or a cast of a softmax."""
    casts = ("float", "to", "type", "type_as", "double", "half", "bfloat16")
    if _is_softmax(call):
        arguments = [node for argument in call.args for node in ast.walk(argument)]
        cast_inside = any(isinstance(node, ast.Attribute) and node.attr in casts for node in arguments)
        return cast_inside or any(keyword.arg == "dtype" for keyword in call.keywords)
    return isinstance(call.func, ast.Attribute) and call.func.attr in casts and _is_softmax(call.func.value)


PATCH = SourcePatch(
    name="softmax_dtype",
    summary="softmax(x.float()).type_as(x) -> a softmax in x's own dtype",
    contract=Contract.ROUNDING,
    role=Role.ATTENTION,
    edits=edits,
    sites=1,
)
