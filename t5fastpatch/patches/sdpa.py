"""`sdpa`: attention that is written out, as PyTorch's `scaled_dot_product_attention`.

Releases before 5.15 multiply, add the bias, take the softmax in fp32, drop out and multiply again: seven kernels, and
tensors of batch x heads x queries x keys after each. Fused kernels do it in one pass, with the scores in fp32.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..scores import MASKED, attention_scores, wide_bias

_PRODUCT = "torch.matmul(query_states, key_states.transpose(3, 2))"
_SUM = "scores += position_bias_masked"
_SOFTMAX = (
    "attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)",
    "attn_weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)",
)
_DROPOUT = "attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)"
_HEAD_MASK = "if layer_head_mask is not None:\n    attn_weights = attn_weights * layer_head_mask"
# Pix2Struct's images: no infinities, which fp32 scores and a mask without a bias do not have.
_FLOOR = "scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))"
_OUTPUT = "torch.matmul(attn_weights, value_states)"


def masked_bias(position_bias: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The position bias with the mask, as every layer's attention takes it.

    In fp16 the sum could be -inf or not, and fused kernels have no finite number for a row of -inf. So what is masked
    is -inf, except in a row that is masked altogether: that one has no mask.

    Args:
        position_bias: shape (1, heads, query_length, key_length).
        mask: the smallest number of its dtype, or 0; its shape expands to (batch, 1, query_length, key_length).
        dtype: that of the queries, which fused kernels ask for; another than the bias's under autocast.

    Returns:
        Shape (batch, heads, query_length, key_length), in `dtype`, contiguous: some kernels would copy it each time.
    """
    if dtype == torch.float16 or mask.dtype != dtype:
        masked = mask < MASKED
        mask = mask.masked_fill(masked, -torch.inf).masked_fill(masked.all(-1, keepdim=True), 0)
    return (position_bias.contiguous() + mask).to(dtype)


def attention(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor,
    head_mask: torch.Tensor | None,
    output_attentions: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with the scores unscaled, as T5 has it, and a bias added to them.

    Written out where the weights themselves are wanted; and in training on a CPU, where PyTorch has no fused kernel
    with dropout or a gradient of the bias, and writes it out at greater length.

    Args:
        query, key, value: shape (batch, heads, length, d).
        position_bias: with the mask; shape (1 or batch, heads, query_length, key_length).
        head_mask: multiplied with the weights; expands to (batch, heads, query_length, key_length).

    Returns:
        The output, shape (batch, heads, query_length, d), and the weights if `output_attentions`.
    """
    unfused = query.device.type == "cpu" and (self.training or position_bias.requires_grad)
    if output_attentions or head_mask is not None or unfused:
        scores = attention_scores(query, key)
        scores += wide_bias(position_bias)
        weights = nn.functional.softmax(scores, dim=-1, dtype=scores.dtype).type_as(value)
        weights = nn.functional.dropout(weights, p=self.dropout, training=self.training)
        if head_mask is not None:
            weights = weights * head_mask
        return torch.matmul(weights, value), weights
    dropout = self.dropout if self.training else 0.0
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=position_bias.to(query.dtype), dropout_p=dropout, scale=1.0
    )
    return output, None


def edits(method: Method) -> list[Edit]:
    """Puts `attention` in the place of all that stands between the product with the keys and that with the values.

    The first product gives way to the queries: what follows reads only the dtype and the device of the scores. The mask
    goes into the position bias by `masked_bias`; Pix2Struct's attention to images has a bias that is a mask already.

    Raises:
        UnexpectedSourceError: the forward multiplies queries and keys, and the rest is not as known.
    """
    nodes = list(ast.walk(method.tree))
    products = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node) == _PRODUCT]
    if not products:
        return []
    arguments = {argument.arg for argument in method.tree.args.args}
    if "output_attentions" not in arguments:
        raise UnexpectedSourceError("the attention weights are returned whether they are asked for or not")
    head_mask = "layer_head_mask" if "layer_head_mask" in arguments else None
    outputs = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node) == _OUTPUT]
    first, last = _weights(method)
    operands = f"query_states, key_states, value_states, position_bias_masked, {head_mask}, output_attentions"
    indent = " " * first.col_offset
    call = f"{indent}attention, attn_weights = self.t5fastpatch_attention({operands})"
    return [
        *(method.replace(product, "query_states") for product in products),
        *(method.replace(*each) for each in _masked_biases(nodes)),
        Edit(first.lineno, last.end_lineno or last.lineno, (call,)),
        *(method.replace(output, "attention") for output in outputs),
    ]


def _weights(method: Method) -> tuple[ast.stmt, ast.stmt]:
    """The first and the last of the statements that make the attention weights of the scores."""
    body = method.tree.body
    spelled = [ast.unparse(statement) for statement in body]
    known = (_SUM, *_SOFTMAX, _DROPOUT, _HEAD_MASK, _FLOOR)
    steps = [index for index, text in enumerate(spelled) if text in known]
    texts = [spelled[index] for index in steps]
    in_one = bool(steps) and steps == list(range(steps[0], steps[-1] + 1)) and spelled[steps[0]] == _SUM
    if not in_one or _DROPOUT not in texts or not set(texts) & set(_SOFTMAX) or _OUTPUT not in spelled[steps[-1] + 1]:
        raise UnexpectedSourceError("the scores are not followed by bias, softmax, dropout and product with the values")
    inside = {node for index in steps for node in ast.walk(body[index])}
    others = (node for node in ast.walk(method.tree) if node not in inside)
    for node in others:
        match node:
            case ast.Attribute(value=ast.Name(id="scores"), attr=attr) if attr not in ("dtype", "device"):
                raise UnexpectedSourceError(f"the scores are used for something else: {ast.unparse(node)}")
    return body[steps[0]], body[steps[-1]]


def _masked_biases(nodes: list[ast.AST]) -> list[tuple[ast.expr, str]]:
    """Each sum of the position bias and a mask, and what takes its place."""
    found: list[tuple[ast.expr, str]] = []
    for node in nodes:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="position_bias")],
                value=ast.BinOp(left=ast.Name(id="position_bias"), op=ast.Add(), right=ast.Name(id=mask)) as total,
            ):
                found.append((total, f"self.t5fastpatch_masked_bias(position_bias, {mask}, scores.dtype)"))
    return found


PATCH = SourcePatch(
    name="sdpa",
    summary="attention written out -> scaled_dot_product_attention, with scale 1 and the position bias",
    contract=Contract.ROUNDING,
    role=Role.ATTENTION,
    edits=edits,
    sites=(3, 4),
    members={"t5fastpatch_masked_bias": staticmethod(masked_bias), "t5fastpatch_attention": attention},
    covers=frozenset({"eager_scores", "softmax_dtype"}),
)
