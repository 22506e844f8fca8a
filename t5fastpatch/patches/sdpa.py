"""`sdpa`: attention that is written out, as PyTorch's `scaled_dot_product_attention`.

Releases before 5.15 multiply, add the bias, take the softmax in fp32, drop out and multiply again: seven kernels, and
tensors of batch x heads x queries x keys after each. Fused kernels do it in one pass, with the scores in fp32.
"""

from __future__ import annotations

import ast
import functools
import itertools
from typing import Any

import torch
from torch import nn

from ..bypass import differentiates_otherwise, transformed
from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..scores import MASKED, attention_scores, wide_bias
from ..shared_masks import SharedMasks, shareable
from ..written_out import masked_sums, products

_infinite = SharedMasks()

_DROPOUT = "attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)"
_HEAD_MASK = "if layer_head_mask is not None:\n    attn_weights = attn_weights * layer_head_mask"
_OUTPUT = "torch.matmul(attn_weights, value_states)"


def masked_bias(position_bias: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The position bias with the mask, as the attention of every layer takes it.

    Args:
        position_bias: shape (1, heads, query_length, key_length).
        mask: the smallest number of its dtype, or 0; its shape expands to (batch, 1, query_length, key_length).
        dtype: that of the queries, which fused kernels ask for; another than the bias's under autocast.

    Returns:
        Shape (batch, heads, query_length, key_length), in `dtype`, contiguous: some kernels would copy it each time.
    """
    return (position_bias.contiguous() + _fp16_mask(mask, dtype)).to(dtype)


def given_bias(self: Any, position_bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A position bias that this layer was given, made what `masked_bias` makes of one.

    Only the first layer of a stack, which would have made one itself, can have been given another: UDOP's encoder makes
    its own, of boxes and mask.
    """
    if position_bias is None or not self.has_relative_attention_bias:
        return position_bias
    return _fp16_mask(position_bias, dtype).to(dtype).contiguous()


def _fp16_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask whose sum with a bias is to be in `dtype`; another one only where that cannot hold every such sum.

    That may then be -inf, or still be outweighed by a score; and fused kernels have no finite number for a row of -inf.
    So what is masked is -inf, except in a row that is masked altogether: that one has no mask.
    """
    if not mask.is_floating_point() or (dtype != torch.float16 and mask.dtype == dtype):
        return mask
    # The encoder's mask is the same at every decoder step, but for the view that is taken of it.
    whole = mask if mask._base is None else mask._base
    if transformed() or not shareable(whole):
        return _unmasked_or_infinite(mask)
    view = mask.shape, mask.stride(), mask.storage_offset(), mask.dtype
    return _infinite.get(functools.partial(_unmasked_or_infinite, mask), whole, None, view)


def _unmasked_or_infinite(mask: torch.Tensor) -> torch.Tensor:
    masked = mask < MASKED
    return mask.masked_fill(masked, -torch.inf).masked_fill(masked.all(-1, keepdim=True), 0)


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
    with dropout or a gradient of the bias, and writes it out at greater length. So it is under `torch.func` and forward
    mode, for which fused kernels lack derivatives.

    Args:
        query, key, value: shape (batch, heads, length, d).
        position_bias: with the mask; shape (1 or batch, heads, query_length, key_length).
        head_mask: multiplied with the weights; expands to (batch, heads, query_length, key_length).

    Returns:
        The output, shape (batch, heads, query_length, d), and the weights if `output_attentions`.
    """
    unfused = query.device.type == "cpu" and (self.training or position_bias.requires_grad)
    if output_attentions or head_mask is not None or unfused or differentiates_otherwise():
        scores = attention_scores(query, key)
        scores += wide_bias(position_bias)
        weights = nn.functional.softmax(scores, dim=-1, dtype=scores.dtype).type_as(value)
        weights = nn.functional.dropout(weights, p=self.dropout, training=self.training)
        if head_mask is not None:
            weights = weights * head_mask
        return torch.matmul(weights, value), weights
    dropout = self.dropout if self.training else 0.0
    bias = position_bias.to(query.dtype).contiguous()
    output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
    return output, None


def asked(mask: Any) -> tuple[torch.Tensor | None, bool]:
    """The mask that UMT5's attention was given, and whether its weights are asked for."""
    return (mask[0], False) if isinstance(mask, tuple) else (mask, True)


def mask_for(layer: nn.Module, mask: torch.Tensor | None, output_attentions: bool) -> Any:
    """The mask for a layer of UMT5's block: in a tuple if nobody asks for the weights.

    The layer hands it to its attention as it is, and has no other argument to say so.
    """
    understood = any(hasattr(part, "t5fastpatch_asked") for part in layer.children())
    return (mask,) if understood and not output_attentions else mask


def edits(method: Method) -> list[Edit]:
    """Puts `attention` in the place of all that stands between the product with the keys and that with the values.

    The first product gives way to the queries: what follows reads only the dtype and the device of the scores. The mask
    goes into the position bias by `masked_bias`; Pix2Struct's attention to images has a bias that is a mask already.
    UMT5's attention always returns its weights; there the block says in which call they are used.

    Raises:
        UnexpectedSourceError: the forward multiplies queries and keys, and the rest is not as known.
    """
    found = list(products(method.tree))
    if not found:
        return _layer_masks(method)
    (product,) = found
    outputs = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call) and ast.unparse(node) == _OUTPUT]
    first, last = _weights(method, product.scores)
    arguments = {argument.arg for argument in method.tree.args.args}
    sums = list(masked_sums(method.tree))
    assigned = {product.scores: product.query}
    if sums and "position_bias" in arguments:
        assigned["position_bias"] = f"self.t5fastpatch_given_bias(position_bias, {product.query}.dtype)"
    if "output_attentions" not in arguments:
        assigned["attention_mask, output_attentions"] = "*self.t5fastpatch_asked(attention_mask)"
    head_mask = "layer_head_mask" if "layer_head_mask" in arguments else None
    operands = f"{product.query}, {product.key}, value_states, {ast.unparse(first.value)}, {head_mask}"
    call = f"attention, attn_weights = self.t5fastpatch_attention({operands}, output_attentions)"
    return [
        method.replace(product.statement, f"{', '.join(assigned)} = {', '.join(assigned.values())}"),
        *(
            method.replace(total, f"self.t5fastpatch_masked_bias(position_bias, {mask.id}, {product.scores}.dtype)")
            for total, mask in sums
        ),
        Edit(first.lineno, last.end_lineno or last.lineno, (" " * first.col_offset + call,)),
        *(method.replace(output, "attention") for output in outputs),
    ]


def _weights(method: Method, scores: str) -> tuple[ast.AugAssign, ast.stmt]:
    """The first and the last of the statements that make the attention weights of the scores."""
    softmax = {
        f"attn_weights = nn.functional.softmax({scores}.float(), dim=-1).type_as({scores})",
        f"attn_weights = nn.functional.softmax({scores}, dim=-1, dtype=torch.float32).type_as({scores})",
    }
    # In Pix2Struct's attention to images, for infinities: scores in fp32 and a mask without a bias have none.
    floor = f"{scores} = torch.max({scores}, torch.tensor(torch.finfo({scores}.dtype).min))"
    known = {floor, *softmax, _DROPOUT, _HEAD_MASK}
    body = method.tree.body
    for index, first in enumerate(body):
        match first:
            case ast.AugAssign(target=ast.Name(id=target), op=ast.Add(), value=ast.Name()) if target == scores:
                steps = list(itertools.takewhile(lambda step: ast.unparse(step) in known, body[index + 1 :]))
                texts, after = {ast.unparse(step) for step in steps}, body[index + 1 + len(steps) :]
                if texts & softmax and _DROPOUT in texts and _OUTPUT in ast.unparse(after[0]):
                    _check_uses(scores, [*body[:index], *after])
                    return first, steps[-1]
    raise UnexpectedSourceError("the scores are not followed by bias, softmax, dropout and product with the values")


def _check_uses(scores: str, statements: list[ast.stmt]) -> None:
    """Raises `UnexpectedSourceError` where other statements use more of the scores than dtype and device."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == scores]
    carried = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("dtype", "device")]
    made = 1
    if len(names) != made + sum(ast.unparse(node.value) == scores for node in carried):
        raise UnexpectedSourceError("the scores are used for something else than their dtype and device")


def _layer_masks(method: Method) -> list[Edit]:
    """Puts `mask_for` around the masks for layers of a block that give weights, and are not told whether to."""
    found = []
    for node in ast.walk(method.tree):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[_, ast.Name(id="self_attn_weights" | "cross_attn_weights"), *_])],
                value=ast.Call(func=ast.Subscript() as layer, keywords=keywords),
            ):
                given = {keyword.arg: keyword.value for keyword in keywords}
                if "attention_mask" in given and "output_attentions" not in given:
                    mask = given["attention_mask"]
                    arguments = f"{ast.unparse(layer)}, {ast.unparse(mask)}, output_attentions"
                    found.append(method.replace(mask, f"self.t5fastpatch_mask_for({arguments})"))
    return found


PATCH = SourcePatch(
    name="sdpa",
    summary="attention written out -> scaled_dot_product_attention, with scale 1 and the position bias",
    contract=Contract.ROUNDING,
    role=Role.ATTENTION,
    more_roles=frozenset({Role.BLOCK}),
    edits=edits,
    sites=(2, 3, 4),
    members={
        "t5fastpatch_masked_bias": staticmethod(masked_bias),
        "t5fastpatch_given_bias": given_bias,
        "t5fastpatch_attention": attention,
        "t5fastpatch_asked": staticmethod(asked),
        "t5fastpatch_mask_for": staticmethod(mask_for),
    },
    covers=frozenset({"eager_scores", "softmax_dtype"}),
)
