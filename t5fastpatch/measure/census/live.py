"""The memory that the tensors of one call take at most, counted exactly, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_live_bytes(fn: Callable[[], object]) -> int:
    """The most bytes of storage that `fn()` had made, and not yet let go of, at the end of any of its operations.

    What was there before the call does not count. What a kernel sets aside for itself is not seen: an RMS norm and an
    attention call are seen as the operations that they are here.
    """
    with _LiveStorages() as storages:
        result = fn()
    del result
    return storages.peak


class _LiveStorages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._foreign: dict[int, StorageWeakRef] = {}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._drop_dead()
        for tensor in _tensors((args, kwargs)):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage.cdata not in self._live:
                self._foreign[storage.cdata] = storage
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage.cdata not in self._foreign:
                self._live[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _drop_dead(self) -> None:
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self._foreign = {key: each for key, each in self._foreign.items() if not each.expired()}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
