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
    storages = _LiveStorages()
    with storages:
        fn()
    return storages.peak


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._foreign: dict[int, StorageWeakRef] = {}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._drop_dead()
        for storage, _ in _storages((args, kwargs)):
            if storage.cdata not in self._live:
                self._foreign[storage.cdata] = storage
        result = func(*args, **(kwargs or {}))
        for storage, size in _storages(result):
            if storage.cdata not in self._foreign:
                self._live[storage.cdata] = storage, size
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _drop_dead(self) -> None:
        self._live = {key: each for key, each in self._live.items() if not _is_dead(each[0])}
        self._foreign = {key: each for key, each in self._foreign.items() if not _is_dead(each)}


def _is_dead(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _storages(tree: Any) -> list[tuple[StorageWeakRef, int]]:
    """The storages of the tensors in arguments or results, and their sizes in bytes."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]  # type: ignore[no-untyped-call]
