"""`bias_hoist`: position bias and mask merged once per stack call, not once per layer.

SDPA takes one additive mask. Upstream's SDPA function makes it of position bias and mask in every layer, batch x heads
x query_length x key_length elements each time, and copies it to be contiguous. But all layers of T5 share one bias and
one mask.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..bypass import transformed
from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method
from ..shared_masks import SharedMasks, laid_out, shareable

_merged = SharedMasks()


@functools.cache
def upstream() -> ModuleType:
    """The module of transformers' SDPA function, which old releases lack."""
    return importlib.import_module("transformers.integrations.sdpa_attention")


def hoisted(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function with one merged mask for all layers; any other than upstream's for SDPA as it is."""
    if transformed() or attention is not upstream().sdpa_attention_forward:
        return attention
    return sdpa_with_shared_mask


def sdpa_with_shared_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Upstream's SDPA function behind the attention interface, given the merged mask where layers may share it.

    Args:
        query, key, value: shape (batch, heads, length, d).
        attention_mask: bool (true: attend) or additive; shape (batch, 1 or heads, query_length, key_length).
        is_causal: whether queries see earlier keys only if there is no mask; by default, what the module says.
        position_bias: added to the scores; shape (1 or batch, heads, query_length, key_length).

    Returns:
        The output, shape (batch, query_length, heads, d), and `None` for the attention weights.
    """
    attend: Callable[..., tuple[Tensor, None]] = upstream().sdpa_attention_forward
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    # A causal call with more keys than queries, upstream crops to as many.
    cropped = causal and key.shape[2] > query.shape[2]
    if position_bias is not None and not cropped and shareable(position_bias, attention_mask):
        merge = functools.partial(_merge, position_bias, attention_mask, causal, query, key)
        attention_mask = _merged.get(merge, position_bias, attention_mask, (causal, key.dtype))
        position_bias = None
    return attend(module, query, key, value, attention_mask, is_causal=is_causal, position_bias=position_bias, **kwargs)


def _merge(bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    # The bias is a permuted view, and so would be what is made of it: better to copy the bias than that.
    merged: Tensor = upstream().create_position_bias_mask(bias.contiguous(), mask, causal, query, key)
    return laid_out(merged)


def edits(method: Method) -> list[Edit]:
    """Puts `hoisted` around the attention function that gets a position bias.

    Raises:
        UnexpectedSourceError: upstream's SDPA function treats masks and biases otherwise than known.
    """
    calls = [
        node.func
        for node in ast.walk(method.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and any(keyword.arg == "position_bias" for keyword in node.keywords)
    ]
    if calls:
        check_upstream(upstream().sdpa_attention_forward)
    return [method.replace(call, f"self.t5fastpatch_hoisted({call.id})") for call in calls]


@functools.cache
def check_upstream(attend: Callable[..., Any]) -> None:
    """Runs upstream's SDPA function beside ours; the bits must be the same.

    Raises:
        UnexpectedSourceError: they are not, or it does not merge by a function of its own.
    """
    merge = getattr(upstream(), "create_position_bias_mask", None)
    known = ["position_bias", "attention_mask", "is_causal", "query", "key"]
    if merge is None or list(inspect.signature(merge).parameters) != known:
        raise UnexpectedSourceError("sdpa_attention_forward does not merge by create_position_bias_mask")
    with torch.inference_mode():
        for arguments, options in _trials():
            theirs, _ = attend(nn.Identity(), *arguments, **options)
            ours, _ = sdpa_with_shared_mask(nn.Identity(), *arguments, **options)
            if not torch.equal(theirs, ours):
                raise UnexpectedSourceError("sdpa_attention_forward takes a mask otherwise than a position bias")


def _trials() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Small calls: a decoding step, as many queries as keys, fewer; each kind of mask; causal and not."""
    batch, heads, width = 2, 2, 4
    for queries, keys in ((1, 3), (3, 3), (2, 4)):
        key = (
            torch.linspace(-9.0, 9.0, batch * heads * keys * width, device="cpu").sin().view(batch, heads, keys, width)
        )
        bias = torch.linspace(-5.0, 5.0, queries * keys * heads, device="cpu").sin().view(1, queries, keys, heads)
        bias = bias.permute(0, 3, 1, 2)
        additive = bias[:, :1].expand(batch, -1, -1, -1)
        for mask in (None, additive, additive > 0, torch.zeros_like(additive, dtype=torch.bool)):
            for causal in (False, True):
                options = {"scaling": 1.0, "is_causal": causal, "position_bias": bias}
                yield (key[:, :, :queries], key, key.flip(2), mask), options


PATCH = SourcePatch(
    name="bias_hoist",
    summary="position bias and mask merged in every layer's SDPA -> once per stack call",
    contract=Contract.EXACT,
    role=Role.ATTENTION,
    edits=edits,
    sites=1,
    members={"t5fastpatch_hoisted": staticmethod(hoisted)},
)
