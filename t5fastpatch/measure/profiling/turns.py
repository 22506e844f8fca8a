"""Variants taken in turn, so that a machine that slows down slows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..garbage import no_collection, old_objects_set_aside
from ..timing import Entry, Prepare

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
    with old_objects_set_aside():
        for _ in range(1 + rounds):
            for name, entry in variants.items():
                with no_collection(), entry() as prepare:
                    prepare()()
                    results[name].append(measure(name, prepare))
    return {name: found[1:] for name, found in results.items()}
