"""`eager_scores`: eager attention's scores, bias and mask in fp32, in fp16 models.

In fp16 a score above 65504 is infinite. So is a masked one, as soon as a negative position bias is added to the mask,
which holds fp16's smallest number; a row that is masked altogether then has no finite score, and its softmax is NaN.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..scores import attention_scores, wide_bias
from ..written_out import Product, masked_sums, products


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention behind transformers' attention interface.

    Args:
        query, key, value: shape (batch, heads, length, d).
        attention_mask: added to the scores; shape (batch, 1, query_length, key_length).
        position_bias: added to the scores; shape (1 or batch, heads, query_length, key_length).

    Returns:
        The output, shape (batch, query_length, heads, d), and the attention weights.
    """
    scores = attention_scores(query, key)
    if scaling != 1.0:
        scores = scores * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + wide_bias(attention_mask)
    weights = nn.functional.softmax(scores, dim=-1)
    if query.dtype == torch.float16:
        weights = weights.type_as(value)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def edits(method: Method) -> list[Edit]:
    """Puts the functions above in the place of upstream's.

    Where the forward hands the work to `eager_attention_forward`, that is one name. Where it does the work itself,
    these are the product of queries and keys, the mask that is added to the position bias, the bias that is added to
    the scores, and the weights, which become half again before their dropout. Pix2Struct's vision attention has no
    such mask: it makes a bias of the scores' dtype.

    Raises:
        UnexpectedSourceError: the forward multiplies queries and keys, and the rest is not as known.
    """
    names = [node for node in ast.walk(method.tree) if isinstance(node, ast.Name)]
    calls = [name for name in names if name.id == "eager_attention_forward"]
    if calls:
        return [method.replace(call, "self.t5fastpatch_eager_attention") for call in calls]
    return [edit for product in products(method.tree) for edit in _written_out(method, product)]


def _written_out(method: Method, product: Product) -> list[Edit]:
    masks = [mask for _, mask in masked_sums(method.tree)]
    biases, weights, values = [], [], []
    for node in ast.walk(method.tree):
        match node:
            case ast.AugAssign(target=ast.Name(id=product.scores), op=ast.Add(), value=ast.Name() as bias):
                biases.append(bias)
            case ast.Call(func=ast.Attribute(attr="dropout"), args=[ast.Name() as dropped]):
                weights.append(dropped)
            case ast.Call(func=ast.Attribute(attr="matmul"), args=[ast.Name(), ast.Name() as value]):
                values.append(value)
    if not (len(biases) == len(weights) == len(values) == 1):
        raise UnexpectedSourceError("the scores are not followed by one bias, one dropout and one product with values")
    (dropped,), (value,) = weights, values
    return [
        method.replace(product.statement.value, f"self.t5fastpatch_scores({product.query}, {product.key})"),
        *(method.replace(each, f"self.t5fastpatch_bias({each.id})") for each in (*masks, *biases)),
        method.replace(dropped, f"{dropped.id}.type_as({value.id})"),
    ]


PATCH = SourcePatch(
    name="eager_scores",
    summary="eager attention's scores, bias and mask in fp16 -> in fp32, which holds them all",
    contract=Contract.EXACT_IN_FP32,
    role=Role.ATTENTION,
    edits=edits,
    sites=(1, 3, 4),
    members={
        "t5fastpatch_scores": staticmethod(attention_scores),
        "t5fastpatch_bias": staticmethod(wide_bias),
        "t5fastpatch_eager_attention": staticmethod(eager_attention),
    },
)
