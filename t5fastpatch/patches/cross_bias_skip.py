"""`cross_bias_skip`: cross-attention without its position bias, which is zero.

T5 has no position bias between decoder and encoder, but upstream gives its attention one of zeros. Merged with the
padding mask it has batch x heads x query_length x key_length elements; and where there is no mask it stands for one,
which keeps SDPA from its flash kernels.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..bypass import transformed
from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..shared_masks import SharedMasks, laid_out, shareable

_TAKE_NO_BIAS = ("eager_attention_forward", "sdpa_attention_forward")

_additive = SharedMasks()


def needs_no_zeros(module: Any, is_cross_attention: bool, attention: Callable[..., Any]) -> bool:
    """Whether an attention module gets along without a position bias of zeros.

    Not while it checkpoints gradients, for which upstream lets the zeros have some; nor if the attention function is
    neither transformers' eager one nor its SDPA, and may rely on a bias.
    """
    checkpoints = module.training and getattr(module, "gradient_checkpointing", False)
    upstream = getattr(attention, "__module__", "").startswith("transformers.")
    return is_cross_attention and not checkpoints and upstream and attention.__name__ in _TAKE_NO_BIAS


def mask_alone(module: Any, mask: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask that does without a bias what this one did beside zeros; where there is a bias, as it is.

    Args:
        mask: bool (true: attend) or additive; shape (batch, 1, 1 or query_length, key_length).
        query: shape (batch, heads, query_length, d).

    Returns:
        For SDPA, a bool mask as 0 and the smallest number of the query's dtype. SDPA itself would make minus infinity
        of it, and where a row is masked altogether attend to nothing; upstream attends to everything there.
    """
    if mask is None or position_bias is not None or module.config._attn_implementation != "sdpa":
        return mask
    if mask.dtype != torch.bool:
        return mask.to(torch.promote_types(mask.dtype, query.dtype))
    make = functools.partial(_zero_or_lowest, mask, query.dtype)
    if transformed() or not shareable(mask):
        return make()
    if not module.layer_idx:
        # Unlike a bias, a mask may be the caller's, and have changed since the last forward without a trace.
        _additive.forget(mask)
    return _additive.get(make, mask, None, query.dtype)


def _zero_or_lowest(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return laid_out(torch.where(mask, zero, torch.finfo(dtype).min))


def edits(method: Method) -> list[Edit]:
    """Leaves out the zeros, or makes a row of them.

    Where an attention function gets mask and bias, its bias is `None` and its mask the one to do without. Where the
    forward does the work itself, as in releases before 5.15, zeros and mask are added up for all heads and queries, and
    then to the scores; there the zeros are for one query, and one head if none are pruned, and so the sum is as large
    as the mask.

    Raises:
        UnexpectedSourceError: the zeros are there, and the call of the attention function is not as known.
    """
    return [edit for zeros in _zeros(method.tree) for edit in _without(method, zeros)]


def _zeros(tree: ast.AST) -> list[ast.Call]:
    """The zeros of shape (1, heads, query_length, key_length) of a layer that has no relative attention bias."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.If(
                test=ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(attr="has_relative_attention_bias")),
                body=[
                    ast.Assign(
                        targets=[ast.Name(id="position_bias")],
                        value=ast.Call(func=ast.Attribute(attr="zeros"), args=[ast.Tuple(elts=[_, _, _, _])]) as zeros,
                    ),
                    *_,
                ],
            ):
                found.append(zeros)
    return found


def _without(method: Method, zeros: ast.Call) -> list[Edit]:
    nodes = list(ast.walk(method.tree))
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and any(keyword.arg == "position_bias" for keyword in node.keywords)
    ]
    if not calls:
        return [_broadcast(method, zeros.args[0])]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    chosen = {ast.unparse(node.target): node.value for node in nodes if isinstance(node, ast.AnnAssign) and node.value}
    match calls:
        case [
            ast.Call(
                func=ast.Name(id=function),
                args=[ast.Name(id="self"), ast.Name(id=query), ast.Name(), ast.Name(), ast.Name() as mask],
            )
        ] if function in chosen and "is_cross_attention" in names:
            arguments = f"is_cross_attention, {ast.unparse(chosen[function])}"
            return [
                method.replace(
                    zeros, f"None if self.t5fastpatch_needs_no_zeros({arguments}) else {ast.unparse(zeros)}"
                ),
                method.replace(mask, f"self.t5fastpatch_mask_alone({mask.id}, position_bias, {query})"),
            ]
    raise UnexpectedSourceError(
        "the attention function is not chosen by name, and called with queries, keys, values, mask"
    )


def _broadcast(method: Method, shape: ast.expr) -> Edit:
    assert isinstance(shape, ast.Tuple)
    _, heads, _, keys = map(ast.unparse, shape.elts)
    # Those of a pruned attention are picked from all heads.
    picked = any(isinstance(node, ast.Attribute) and node.attr == "pruned_heads" for node in ast.walk(method.tree))
    return method.replace(shape, f"(1, {heads if picked else 1}, 1, {keys})")


PATCH = SourcePatch(
    name="cross_bias_skip",
    summary="cross-attention's position bias of zeros -> none, the mask alone",
    contract=Contract.ROUNDING,
    role=Role.ATTENTION,
    edits=edits,
    sites=(1, 2),
    members={"t5fastpatch_needs_no_zeros": needs_no_zeros, "t5fastpatch_mask_alone": mask_alone},
)
