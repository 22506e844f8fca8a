"""Variants taken in turn, so that a machine that slows down slows them all."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from .timing import Entry, Prepare

Result = TypeVar("Result")


def in_turn(
    variants: Mapping[str, Entry], rounds: int, measure: Callable[[str, Prepare], Result]
) -> dict[str, list[Result]]:
    """Measures every variant once a round.

    Each time the variant is called once before, as the one before it has left its own data in the processor's caches.
    A round more, the first, warms everything up and is left out. Garbage is collected between the calls, not in them.

    Args:
        variants: by name.
        rounds: how many.
        measure: is given a variant's name and its `prepare`.
    """
    results: dict[str, list[Result]] = {name: [] for name in variants}
    with _garbage_left():
        for _ in range(1 + rounds):
            for name, entry in variants.items():
                gc.collect()
                with entry() as prepare:
                    prepare()()
                    results[name].append(measure(name, prepare))
    return {name: found[1:] for name, found in results.items()}


@contextlib.contextmanager
def _garbage_left() -> Iterator[None]:
    """Garbage is collected when asked for only, and old objects not looked at."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
