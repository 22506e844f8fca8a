"""A census of one call: operations, traffic, matrix products and synchronisations, as PyTorch dispatches them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .operations import Operation, full_name, is_cast, is_host_scalar, is_query, is_sync, is_view
from .places import ModulePath, calling_line
from .traffic import attention_flops, covered, flops, strided, traffic
from .work import Census, Work

_BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized", "mkldnn", "onednn"})
_NORM = "rms_norm"
_ATTENTION = "scaled_dot_product_attention"


def census(fn: Callable[[], object], model: nn.Module | None = None) -> Census:
    """Counts what `fn()` does, called once under `torch.no_grad()`.

    Operations that a library registered are expanded into what they call; one that calls nothing PyTorch sees is one
    operation. A compiled function runs eagerly here: judge it by its kernels instead.

    Args:
        fn: the call.
        model: the model in it, so that modules have their paths in it; without it, paths begin with the class of the
            outermost module that `fn` calls.

    Raises:
        Whatever `fn` raises.
    """
    with ModulePath(model) as path:
        tally = _Tally(path)
        with torch.no_grad(), _Operations(tally), _Composites(tally):
            fn()
    return Census.of(dict(tally.by_module))


class _Tally:
    def __init__(self, path: ModulePath) -> None:
        self.by_module: defaultdict[str, Work] = defaultdict(Work)
        self._path = path
        self._inside_composite = False
        self._syncs_known = False

    @property
    def _here(self) -> Work:
        return self.by_module[self._path.current]

    @property
    def leaf_ops(self) -> int:
        return sum(work.leaf_ops for work in self.by_module.values())

    def count(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if is_query(op):
            return
        if is_sync(op, args, result) and not self._syncs_known:
            self.count_sync()
        if is_view(op):
            self._here.views[full_name(op)] += 1
            return
        self._here.leaf_by_op[full_name(op)] += 1
        if not self._inside_composite:
            self._here.operations[_operation(op, args, kwargs, result)] += 1

    def count_sync(self) -> None:
        self._here.sync_sites[calling_line()] += 1

    def count_composite(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        products = attention_flops(*args, **kwargs) if name == _ATTENTION else 0
        moved = covered([args, kwargs]), covered([result])
        self._here.operations[Operation(name, _dtype(result), *moved, products)] += 1

    @contextlib.contextmanager
    def composite(self) -> Iterator[None]:
        self._inside_composite = True
        try:
            yield
        finally:
            self._inside_composite = False

    @contextlib.contextmanager
    def syncs_known(self) -> Iterator[None]:
        self._syncs_known = True
        try:
            yield
        finally:
            self._syncs_known = False


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
        self._tally.count(func, args, kwargs, result)
        return result

    def _expand(self, func: Any, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._tally.leaf_ops
        key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device.type))
        with self:
            # Called as usual it would come back here; sent on to the device's kernel it does not.
            result = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        if self._tally.leaf_ops == before:
            self._tally.count(func, args, kwargs, result)
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
        if func is F.scaled_dot_product_attention:
            return self._composite(_ATTENTION, func, args, kwargs)
        if func in (F.rms_norm, torch.rms_norm) and _is_one_kernel(*args, **kwargs):
            return self._composite(_NORM, func, args, kwargs)
        if func is torch.Tensor.tolist:
            return self._call_with_sync(True, func, args, kwargs)
        if func is F.one_hot:
            # The CPU reads the indices to check them, CUDA only to find out the number of classes.
            return self._call_with_sync(_classes(*args, **kwargs) < 0, func, args, kwargs)
        return func(*args, **kwargs)

    def _call_with_sync(self, waits: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if waits:
            self._tally.count_sync()
        with self._tally.syncs_known():
            return func(*args, **kwargs)

    def _composite(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._tally.composite():
            result = func(*args, **kwargs)
        self._tally.count_composite(name, args, kwargs, result)
        return result


def _operation(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation:
    moved = traffic(op, args, kwargs, result)
    return Operation(
        full_name(op),
        _dtype(result, args),
        moved.read,
        moved.written,
        flops(op, args, kwargs, result),
        is_cast(op, args, result),
        is_host_scalar(op, result),
    )


def _dtype(*values: Any) -> str:
    return next((str(each.dtype).removeprefix("torch.") for each in strided(values)), "")


def _is_one_kernel(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> bool:
    # PyTorch takes its slow composite on CUDA too where the dtypes differ.
    return weight is None or weight.dtype == input.dtype


def _classes(input: torch.Tensor, num_classes: int = -1) -> int:
    return num_classes


def _device(args: tuple[Any, ...]) -> torch.device | None:
    return next((each.device for each in args if isinstance(each, torch.Tensor)), None)
