"""A bound beside what was observed: where data pass it, something entered that the bound does not know of."""

from __future__ import annotations

import dataclasses

from .places import Headroom


def beside(bound: Headroom, seen: Headroom) -> Headroom:
    """The bound without the stacks in which data passed it, a caller's embeddings say; these are unproven then."""
    limits = {(each.stack, each.layer, each.place): each.value for each in bound.magnitudes}
    passed = {
        each.stack: "the batches pass the bound from the weights, so they are not what it assumes"
        for each in seen.magnitudes
        if not each.value <= limits.get((each.stack, each.layer, each.place), float("inf"))
    }
    kept = tuple(each for each in bound.magnitudes if each.stack not in passed)
    return dataclasses.replace(bound, magnitudes=kept, unproven={**bound.unproven, **passed})
