"""The bound from the weights, found once for models whose weights stay as they are."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, MutableMapping, Sequence

from torch import nn

from .places import Headroom
from .stacks import Stack
from .weights import bound

_known: contextvars.ContextVar[MutableMapping[nn.Module, Headroom] | None] = contextvars.ContextVar(
    "known", default=None
)


@contextlib.contextmanager
def steady_weights() -> Iterator[None]:
    """Inside the `with` block the caller promises that no weight changes: each model's bound is found once.

    For whoever puts patches on and takes them off many times; finding the bound takes seconds.
    """
    token = _known.set(weakref.WeakKeyDictionary())
    try:
        yield
    finally:
        _known.reset(token)


def bound_of(root: nn.Module, stacks: Sequence[Stack]) -> Headroom:
    """As `bound`, of all stacks of `root`; inside `steady_weights` what was found before."""
    known = _known.get()
    if known is None:
        return bound(root, stacks)
    if root not in known:
        known[root] = bound(root, stacks)
    return known[root]
