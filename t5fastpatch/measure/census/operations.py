"""What PyTorch dispatches: which operations are views, casts, synchronisations, and what each is recorded as."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# A copy nowhere, but without the alias annotation in its schema.
_UNMARKED_VIEWS = frozenset({"_unsafe_view"})
# Marked as a view, but the one trace of `torch.tensor(...)`: new storage, filled from Python data.
_LITERAL = "lift_fresh"
# These wait for a result without carrying `torch.Tag.data_dependent_output`.
_UNMARKED_SYNCS = frozenset({"equal", "allclose", "is_nonzero"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation, as a census counts it.

    Attributes:
        name: `"mul.Tensor"`, or a composite's name.
        dtype: of the result, `"float16"` say; of what is read where the result is no tensor.
        bytes_read: see `traffic.traffic`.
        bytes_written: see `traffic.traffic`.
        flops: of a matrix product, a multiplication and an addition being two; 0 of anything else.
        is_cast: whether it is a copy into another dtype.
        is_host_scalar: whether it makes a zero-dimensional CPU tensor of a Python number.
    """

    name: str
    dtype: str
    bytes_read: int
    bytes_written: int
    flops: int = 0
    is_cast: bool = False
    is_host_scalar: bool = False

    @property
    def is_kernel(self) -> bool:
        """Whether a device has something to do; an allocation moves no byte, nor does anything on an empty tensor.

        A host scalar counts, since CUDA fills most of them with a kernel.
        """
        return self.bytes_read + self.bytes_written > 0


def full_name(op: torch._ops.OpOverload) -> str:
    """`"mul.Tensor"`; outside of `aten` with the namespace, `"library::name.default"`."""
    namespace, name = op._schema.name.split("::")
    overload = f"{name}.{op._schema.overload_name or 'default'}"
    return overload if namespace == "aten" else f"{namespace}::{overload}"


def base_name(op: torch._ops.OpOverload) -> str:
    """The name without namespace and overload."""
    name: str = op._schema.name.split("::")[1]
    return name


def is_query(op: torch._ops.OpOverload) -> bool:
    """Whether it only asks for a property, the device say, as tensors without data do through the dispatcher."""
    return op.namespace == "prim"


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether the result is another look at an argument's storage."""
    if base_name(op) in _UNMARKED_VIEWS:
        return True
    aliases = [argument.alias_info for argument in op._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases) and base_name(op) != _LITERAL


def is_cast(op: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> bool:
    """Whether it is a copy into another dtype."""
    match base_name(op):
        case "_to_copy":
            return bool(args[0].dtype != result.dtype)
        case "copy_" | "copy":
            return bool(args[0].dtype != args[1].dtype)
    return False


def is_sync(op: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> bool:
    """Whether the host waits for a result on a device."""
    name = base_name(op)
    if name in _INDEXING:
        return _waits_for_mask(args)
    if name == "_to_copy":
        return bool(args[0].device.type != "cpu" and result.device.type == "cpu")
    tags = op.tags
    return name in _UNMARKED_SYNCS or torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _waits_for_mask(args: tuple[Any, ...]) -> bool:
    """Whether indexing, `(self, indices)` or `(self, indices, values)`, must first count a mask's elements."""
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    # One value that lies on the host is filled in under the mask, wherever the mask has elements.
    filled = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
    return masked and not filled


def is_host_scalar(op: torch._ops.OpOverload, result: Any) -> bool:
    """Whether it makes a zero-dimensional CPU tensor of a Python number."""
    made = base_name(op) in ("scalar_tensor", _LITERAL)
    return made and bool(result.dim() == 0 and result.device.type == "cpu")
