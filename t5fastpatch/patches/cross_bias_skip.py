"""`cross_bias_skip`: cross-attention without its position bias, which is zero.

T5 has no position bias between decoder and encoder, but upstream gives its attention one of zeros. Merged with the
padding mask it has batch x heads x query_length x key_length elements; and where there is no mask it stands for one,
which keeps SDPA from its flash kernels.
"""

from __future__ import annotations

import ast
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..shared_masks import SharedMasks, laid_out, shareable, transformed

_additive = SharedMasks()


def needs_no_zeros(attention: Any, is_cross_attention: bool) -> bool:
    """Whether an attention module gets along without a position bias of zeros.

    Not while it checkpoints gradients, for which upstream lets the zeros have some; nor with an attention function
    that is not transformers' own, eager or SDPA, and may rely on a bias.
    """
    implementation = attention.config._attn_implementation
    checkpoints = attention.training and getattr(attention, "gradient_checkpointing", False)
    return is_cross_attention and not checkpoints and (implementation == "eager" or _is_sdpa(implementation))


def _is_sdpa(implementation: str | None) -> bool:
    # Whatever is registered under that name runs.
    registered = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    upstream = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    return implementation == "sdpa" and registered["sdpa"] is upstream


def mask_alone(attention: Any, mask: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask that does without a bias what this one did beside zeros; where there is a bias, as it is.

    Args:
        mask: bool (true: attend) or additive; shape (batch, 1, 1 or query_length, key_length).
        query: shape (batch, heads, query_length, d).

    Returns:
        For SDPA, a bool mask as 0 and the smallest number of the query's dtype. SDPA itself would make minus infinity
        of it, and where a row is masked altogether attend to nothing; upstream attends to everything there.
    """
    if mask is None or position_bias is not None or attention.config._attn_implementation == "eager":
        return mask
    if mask.dtype != torch.bool:
        return mask.to(torch.promote_types(mask.dtype, query.dtype))
    make = functools.partial(_zero_or_lowest, mask, query.dtype)
    return make() if transformed() or not shareable(mask) else _additive.get(make, mask, None, query.dtype)


def _zero_or_lowest(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return laid_out(torch.where(mask, zero, torch.finfo(dtype).min))


def edits(method: Method) -> list[Edit]:
    """Leaves out the zeros, or makes a row of them.

    Where an attention function gets mask and bias, its bias is `None` and its mask the one to do without. Where the
    forward does the work itself, as releases before 5.15 do, it adds them up, for all heads; there the zeros have one
    query instead of all, and what the sum adds to the scores is broadcast.

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
    calls = [
        node
        for node in ast.walk(method.tree)
        if isinstance(node, ast.Call) and any(keyword.arg == "position_bias" for keyword in node.keywords)
    ]
    if not calls:
        (shape,) = zeros.args
        assert isinstance(shape, ast.Tuple)
        return [method.replace(shape.elts[2], "1")]
    match calls:
        case [
            ast.Call(args=[ast.Name(id="self"), ast.Name(id=query), ast.Name(), ast.Name(), ast.Name(id=mask) as given])
        ]:
            known = any(
                isinstance(node, ast.Name) and node.id == "is_cross_attention" for node in ast.walk(method.tree)
            )
            if known:
                condition = "self.t5fastpatch_needs_no_zeros(is_cross_attention)"
                return [
                    method.replace(zeros, f"None if {condition} else {ast.unparse(zeros)}"),
                    method.replace(given, f"self.t5fastpatch_mask_alone({mask}, position_bias, {query})"),
                ]
    raise UnexpectedSourceError(
        "position bias and mask are not handed to one attention function behind queries, keys, values"
    )


PATCH = SourcePatch(
    name="cross_bias_skip",
    summary="cross-attention's position bias of zeros -> none, the mask alone",
    contract=Contract.ROUNDING,
    role=Role.ATTENTION,
    edits=edits,
    sites=(1, 2),
    members={"t5fastpatch_needs_no_zeros": needs_no_zeros, "t5fastpatch_mask_alone": mask_alone},
)
