"""Stub, until the real one comes."""

from .places import Headroom, Magnitude, Place


def bound(root, stacks=None) -> Headroom:  # type: ignore
    return Headroom(
        "weights",
        tuple(
            Magnitude(s.name, 0, p, 5e5)
            for s in stacks
            for p in (Place.STREAM, Place.HIDDEN, Place.ATTENTION, Place.FEED_FORWARD)
        ),
    )
