"""Garbage collection held still while something is measured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Collections look at new objects only; else each would go through every object of every imported module."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected now, and not in the `with` block."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
