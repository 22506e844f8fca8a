"""Bytes that an operation must move and floating-point operations that it must make, from its arguments and result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .operations import base_name

# Storage is set aside, nothing is written to it.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# They replace what they write to without reading it.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_"})
# From the table, the argument named here, only the rows asked for are read: as many bytes as are written.
_GATHERS = {"embedding": "weight", "index": "self", "index_select": "self", "gather": "self"}
# Into the table, `self`, only as much is written as the argument named here holds.
_SCATTERS = {"index_copy_": "source", "index_put_": "values", "_index_put_impl_": "values"}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The least that an operation moves, each byte of its arguments once, as with a cache that holds all of it.

    Attributes:
        read: bytes of storage that the tensor arguments cover.
        written: bytes of storage that the results cover, those written in place among them.
    """

    read: int
    written: int


def traffic(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Traffic:
    """The bytes that an operation, no view, reads and writes.

    A broadcast tensor counts with the elements it really has, an argument given twice counts once, a gather reads the
    rows it gathers, and what is changed in place is both read and written.
    """
    name = base_name(op)
    if name in _ALLOCATIONS:
        return Traffic(0, 0)
    arguments = op._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
    changed = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    unread = {argument.name for argument in arguments if argument.is_out}
    if name in _OVERWRITES:
        unread |= changed
    if name in _SCATTERS:
        return Traffic(covered(_without(given, {"self"})), covered([given[_SCATTERS[name]]]))
    written = covered([result, *(given[each] for each in changed & given.keys())])
    if name in _GATHERS:
        return Traffic(covered(_without(given, {_GATHERS[name]})) + written, written)
    return Traffic(covered(_without(given, unread)), written)


def covered(values: Iterable[Any]) -> int:
    """Bytes of storage that the tensors among `values`, and in lists among them, cover.

    A tensor and its transpose are the same bytes and count once; views that overlap otherwise count each.
    """
    return sum({_place(tensor): _size(tensor) for tensor in strided(values)}.values())


def strided(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values`, and in lists among them, that lie in one storage."""
    leaves = tree_leaves(list(values))
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.layout is torch.strided]


def _without(given: dict[str, Any], names: set[str]) -> list[Any]:
    return [value for name, value in given.items() if name not in names]


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of the dimensions that lead to other elements: one of stride 0 only repeats them."""
    return sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if stride and size > 1)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel() > 0, *_steps(tensor)


def _size(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    elements = math.prod(size for _, size in _steps(tensor))
    # Windows that overlap share elements.
    extent = 1 + sum((size - 1) * stride for stride, size in _steps(tensor))
    return min(elements, extent) * tensor.element_size()


def flops(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a matrix product or convolution, by PyTorch's own formulas; 0 of anything else."""
    formula = flop_registry.get(op._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Of the two products of `scaled_dot_product_attention`, whose arguments it takes."""
    shapes = [(1,) * (4 - each.dim()) + tuple(each.shape) for each in (query, key, value)]
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
