"""`softmax_dtype`: the attention's softmax in the dtype of its scores.

Upstream casts the scores to fp32, takes the softmax and casts back. The softmax kernels accumulate in fp32 for half
inputs anyway, so both casts, and a tensor of twice the width, buy at most the last rounding.
"""

from __future__ import annotations

import ast

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method


def edits(method: Method) -> list[Edit]:
    """Puts `softmax(scores, dim=d, dtype=scores.dtype)` for each softmax that goes through fp32 and back.

    Known are `softmax(scores.float(), dim=d).type_as(scores)` and
    `softmax(scores, dim=d, dtype=torch.float32).type_as(scores)`, for any name in the place of `scores`.

    The dtype is given, though it is the input's, since autocast would take the softmax in fp32 without it.

    Raises:
        UnexpectedSourceError: the method has another softmax, and casts to fp32 that may belong to it.
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
                matched.add(node)
    inside = {node for softmax in matched for node in ast.walk(softmax)}
    others = [node for node in ast.walk(method.tree) if node not in inside]
    if any(map(_is_softmax, others)) and any(map(_is_cast, others)):
        where = next(node for node in others if _is_softmax(node))
        raise UnexpectedSourceError(f"a softmax and a cast that are not known: {ast.unparse(where)}")
    return found


def _is_softmax(node: ast.AST) -> bool:
    """Whether a node calls a softmax, by any spelling."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return "softmax" in name.lower()


def _through_fp32(call: ast.Call, scores: str) -> bool:
    """Whether `call` is one of the two known spellings of an fp32 softmax over `scores`."""
    if getattr(call.func, "attr", "") != "softmax" or len(call.args) != 1:
        return False
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if "dim" not in keywords:
        return False
    del keywords["dim"]
    argument = ast.unparse(call.args[0])
    return (argument, keywords) in ((f"{scores}.float()", {}), (scores, {"dtype": "torch.float32"}))


def _is_cast(node: ast.AST) -> bool:
    """Whether a node casts, or names a dtype to cast to."""
    match node:
        case ast.Attribute(attr="float" | "double" | "type_as" | "float32" | "float64") | ast.keyword(arg="dtype"):
            return True
    return False


PATCH = SourcePatch(
    name="softmax_dtype",
    summary="softmax(x.float()).type_as(x) -> a softmax in x's own dtype",
    contract=Contract.ROUNDING,
    role=Role.ATTENTION,
    edits=edits,
    sites=1,
)
