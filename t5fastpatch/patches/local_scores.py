"""`local_scores`: the scores of LongT5's local and transient-global attention in fp32, in fp16 models.

Upstream masks with -1e10, which is -inf in fp16, the dtype of the scores: a block of nothing but padding has no finite
score, its softmax is NaN, and the next layer spreads that to the blocks beside it. Scores above 65504 are infinite too.
All that follows takes its dtype from the scores, so it is enough that these are fp32.
"""

from __future__ import annotations

import ast

import torch

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..scores import wide_scores

_EQUATION = "...qhd,...khd->...hqk"


def local_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """q.k within blocks: in fp32 if they are fp16, in their own dtype otherwise.

    Args:
        query: shape (batch, blocks, block_length, heads, d).
        key: shape (batch, blocks, key_length, heads, d).

    Returns:
        Shape (batch, blocks, heads, block_length, key_length).
    """
    if query.dtype == torch.float16:
        return wide_scores(query.transpose(-3, -2), key.transpose(-3, -2))
    return torch.einsum(_EQUATION, query, key)


def edits(method: Method) -> list[Edit]:
    """Puts `local_scores` in the place of the einsum of queries and keys.

    Raises:
        UnexpectedSourceError: the weights are not cast to the values' dtype afterwards.
    """
    found = []
    for node in ast.walk(method.tree):
        match node:
            case ast.Call(args=[ast.Constant(value=equation), ast.Name(id=query), ast.Name(id=key)]) if (
                equation == _EQUATION and ast.unparse(node.func) == "torch.einsum"
            ):
                found.append(method.replace(node, f"self.t5fastpatch_local_scores({query}, {key})"))
    if found and "attn_weights = attn_weights.type(value_states.dtype)" not in map(ast.unparse, ast.walk(method.tree)):
        raise UnexpectedSourceError("the attention's weights are not cast to the dtype of the values")
    return found


PATCH = SourcePatch(
    name="local_scores",
    summary="scores of LongT5's local attention in fp16, with -1e10 for padding -> in fp32, which holds it",
    contract=Contract.EXACT_IN_FP32,
    role=Role.ATTENTION,
    edits=edits,
    sites=1,
    members={"t5fastpatch_local_scores": staticmethod(local_scores)},
)
