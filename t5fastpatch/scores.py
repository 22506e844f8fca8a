"""Attention scores in fp32, from a product in half precision.

T5 does not divide q.k by sqrt(d_kv), so a score may be larger than fp16's largest number, 65504, though q and k are
not. Here the product is multiplied by 2^-12 while it is still in its fp32 accumulator (`alpha` of `torch.baddbmm`),
rounded to fp16, and multiplied back in fp32. So scores up to 2^12 * 65504, some 2.7e8, are finite. Those from 1/4 on
have fp16's relative rounding, as without the factor; smaller ones are off by 2^-13 at most.
"""

from __future__ import annotations

from typing import Any

import torch

from .bypass import differentiates_otherwise

_SCALE = 2.0**-12

# A mask holds fp16's smallest number, or that and a bias; nothing else is anywhere near it.
MASKED = torch.finfo(torch.float16).min / 2


def attention_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """q.k, shape (..., query_length, key_length): in fp32 if they are fp16, in their own dtype otherwise."""
    if query.dtype == torch.float16:
        return wide_scores(query, key)
    return torch.matmul(query, key.transpose(-1, -2))


def wide_bias(bias: torch.Tensor) -> torch.Tensor:
    """A mask or bias; in fp32 if it is fp16, and then with fp32's smallest number for what is masked."""
    if bias.dtype != torch.float16:
        return bias
    return bias.float().masked_fill(bias < MASKED, torch.finfo(torch.float32).min)


def wide_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """q.k for each query and key, in fp32.

    Args:
        query: shape (..., query_length, d), fp16.
        key: shape (..., key_length, d), fp16; its leading dimensions expand to the query's.

    Returns:
        Shape (..., query_length, key_length), fp32, in memory of its own.
    """
    key = key.expand(*query.shape[:-2], *key.shape[-2:])
    if differentiates_otherwise():  # of which `_Product` has no rules
        return query.float() @ key.float().transpose(-1, -2)
    if torch.is_grad_enabled():
        scores: torch.Tensor = _Product.apply(query, key)  # type: ignore[no-untyped-call]
        return scores
    return _product(query, key)


class _Product(torch.autograd.Function):
    """The product with the gradient of one without a factor.

    Of its own, the factor that follows the rounding to fp16 would multiply gradients in fp16.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key)
        return _product(query, key)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = ctx.saved_tensors
        grad = grad.to(query.dtype)
        return grad @ key, grad.transpose(-1, -2) @ query


def _product(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    rows, columns = query.flatten(0, -3), key.flatten(0, -3).transpose(1, 2)
    # With beta 0 the first argument is not read, but a compiler may multiply it by beta: not an empty tensor.
    scaled = torch.baddbmm(rows[:1, :1, :1], rows, columns, beta=0, alpha=_SCALE)
    return scaled.view(*query.shape[:-1], key.shape[-2]).float().mul_(1 / _SCALE)
