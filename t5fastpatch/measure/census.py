"""A census of one call: operations, casts and host synchronisations, counted as PyTorch dispatches them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# A copy nowhere, but without the alias annotation in its schema.
_UNMARKED_VIEWS = frozenset({"_unsafe_view"})
# Marked as a view, but the one trace of `torch.tensor(...)`: new storage, filled from Python data.
_LITERAL = "lift_fresh"
# These wait for a result without carrying `torch.Tag.data_dependent_output`.
_UNMARKED_SYNCS = frozenset({"equal", "allclose", "is_nonzero"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized", "mkldnn", "onednn"})


@dataclasses.dataclass(frozen=True)
class Census:
    """What one call did.

    Attributes:
        by_op: operations by name (`"mul.Tensor"`), views left out; `rms_norm` and `scaled_dot_product_attention`
            count as one operation each, as they are one kernel on CUDA.
        leaf_by_op: the same with those two decomposed into what this device runs.
        casts: copies into another dtype, `_to_copy` and `copy_`; those inside the two composites are not counted.
        syncs: where the host waits for a result on a device: `.item()`, `bool()`, `.tolist()`, `nonzero`, indexing
            with a boolean mask, `torch.equal` and the like. They are counted on any device, the CPU too; copies to
            the host only where there is another device to copy from.
        host_scalars: those of the operations that make a zero-dimensional CPU tensor of a Python number. With the
            model on CUDA, the ones that follow their neighbours' device are filled there by a kernel.
    """

    by_op: Counter[str]
    leaf_by_op: Counter[str]
    casts: int
    syncs: int
    host_scalars: int

    @property
    def ops(self) -> int:
        """Operations, views left out, the two composites as one each."""
        return self.by_op.total()

    @property
    def leaf_ops(self) -> int:
        """Operations, views left out, the two composites decomposed."""
        return self.leaf_by_op.total()

    def difference(self, other: Census) -> dict[str, int]:
        """By name, how many more of an operation this census has than `other`; equal counts are left out."""
        names = sorted({*self.by_op, *other.by_op})
        return {name: more for name in names if (more := self.by_op[name] - other.by_op[name])}

    def to_dict(self) -> dict[str, Any]:
        """The census as plain dicts and numbers, operations by falling count."""
        return {
            "ops": self.ops,
            "leaf_ops": self.leaf_ops,
            "casts": self.casts,
            "syncs": self.syncs,
            "host_scalars": self.host_scalars,
            "by_op": dict(self.by_op.most_common()),
            "leaf_by_op": dict(self.leaf_by_op.most_common()),
        }


def census(fn: Callable[[], object]) -> Census:
    """Counts what `fn()` does, called once under `torch.no_grad()`.

    Operations that a library registered are expanded into what they call; one that calls nothing PyTorch sees is one
    operation. A compiled function runs eagerly here: judge it by its kernels instead.

    Raises:
        Whatever `fn` raises.
    """
    tally = _Tally()
    with torch.no_grad(), _Operations(tally), _Composites(tally):
        fn()
    return Census(tally.by_op, tally.leaf_by_op, tally.casts, tally.syncs, tally.host_scalars)


@dataclasses.dataclass
class _Tally:
    by_op: Counter[str] = dataclasses.field(default_factory=Counter)
    leaf_by_op: Counter[str] = dataclasses.field(default_factory=Counter)
    casts: int = 0
    syncs: int = 0
    host_scalars: int = 0
    inside_composite: bool = False
    syncs_known: bool = False

    def count(self, op: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        if _is_sync(op, args, result) and not self.syncs_known:
            self.syncs += 1
        if _is_view(op):
            return
        name = _name(op)
        self.leaf_by_op[name] += 1
        if self.inside_composite:
            return
        self.by_op[name] += 1
        self.casts += _is_cast(op, args, result)
        self.host_scalars += _is_host_scalar(op, result)

    @contextlib.contextmanager
    def composite(self, name: str) -> Iterator[None]:
        self.by_op[name] += 1
        self.inside_composite = True
        try:
            yield
        finally:
            self.inside_composite = False

    @contextlib.contextmanager
    def call_with_syncs(self, syncs: int) -> Iterator[None]:
        self.syncs += syncs
        self.syncs_known = True
        try:
            yield
        finally:
            self.syncs_known = False


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tally: _Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _BUILTIN_NAMESPACES and (device := _device(args)) is not None:
            return self._expand(func, device, args, kwargs)
        result = func(*args, **kwargs)
        self._tally.count(func, args, result)
        return result

    def _expand(self, func: Any, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._tally.leaf_by_op.total()
        key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device.type))
        with self:
            # Called as usual it would come back here; sent on to the device's kernel it does not.
            result = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        if self._tally.leaf_by_op.total() == before:
            self._tally.count(func, args, result)
        return result


class _Composites(TorchFunctionMode):
    """Sees the calls that the dispatcher splits, or never gets to see."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if func is F.scaled_dot_product_attention:
            scope = self._tally.composite("scaled_dot_product_attention")
        elif func in (F.rms_norm, torch.rms_norm) and _is_one_kernel(*args, **kwargs):
            scope = self._tally.composite("rms_norm")
        elif func is torch.Tensor.tolist:
            scope = self._tally.call_with_syncs(1)
        elif func is F.one_hot:
            # The CPU reads the indices to check them, CUDA only to find out the number of classes.
            scope = self._tally.call_with_syncs(int(_classes(*args, **kwargs) < 0))
        with scope:
            return func(*args, **kwargs)


def _is_one_kernel(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> bool:
    # PyTorch takes its slow composite on CUDA too where the dtypes differ.
    return weight is None or weight.dtype == input.dtype


def _classes(input: torch.Tensor, num_classes: int = -1) -> int:
    return num_classes


def _name(op: torch._ops.OpOverload) -> str:
    namespace, name = op._schema.name.split("::")
    overload = f"{name}.{op._schema.overload_name or 'default'}"
    return overload if namespace == "aten" else f"{namespace}::{overload}"


def _base_name(op: torch._ops.OpOverload) -> str:
    name: str = op._schema.name.split("::")[1]
    return name


def _is_view(op: torch._ops.OpOverload) -> bool:
    if _base_name(op) in _UNMARKED_VIEWS:
        return True
    aliases = [argument.alias_info for argument in op._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases) and _base_name(op) != _LITERAL


def _is_cast(op: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> bool:
    match _base_name(op):
        case "_to_copy":
            return bool(args[0].dtype != result.dtype)
        case "copy_" | "copy":
            return bool(args[0].dtype != args[1].dtype)
    return False


def _is_sync(op: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> bool:
    name = _base_name(op)
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


def _is_host_scalar(op: torch._ops.OpOverload, result: Any) -> bool:
    made = _base_name(op) in ("scalar_tensor", _LITERAL)
    return made and bool(result.dim() == 0 and result.device.type == "cpu")


def _device(args: tuple[Any, ...]) -> torch.device | None:
    return next((each.device for each in args if isinstance(each, torch.Tensor)), None)
