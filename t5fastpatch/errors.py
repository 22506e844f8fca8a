"""What can go wrong, as exceptions. Each message names the patch or class, the release and the way out."""

from __future__ import annotations

__all__ = [
    "ConflictError",
    "ForeignForwardError",
    "InvalidPatchError",
    "MetaDeviceError",
    "NotAppliedError",
    "NotFoundError",
    "NotT5Error",
    "NothingToPatchError",
    "ScaleError",
    "SourceUnavailableError",
    "T5FastPatchError",
    "UnexpectedSourceError",
    "UnknownPatchError",
    "UnprovenError",
    "WrongTypeError",
]


class T5FastPatchError(Exception):
    """Base of every error that t5fastpatch raises on purpose."""


class WrongTypeError(T5FastPatchError, TypeError):
    """An argument is not of the kind the call takes."""


class UnknownPatchError(T5FastPatchError, ValueError):
    """No patch or preset has this name."""


class InvalidPatchError(T5FastPatchError, ValueError):
    """A patch cannot be registered: a bad or taken name, or a missing part."""


class ConflictError(T5FastPatchError, ValueError):
    """Two patches cannot be on one model together."""


class NotFoundError(T5FastPatchError, FileNotFoundError):
    """There is no such model, family, script or file."""


class NotT5Error(T5FastPatchError, TypeError):
    """The object holds no module of the T5 family."""


class NothingToPatchError(T5FastPatchError, ValueError):
    """None of the patches asked for has a place in this model."""


class ScaleError(T5FastPatchError, ValueError):
    """The scale asked for is no power of two, or does not fit the weights."""


class UnprovenError(T5FastPatchError, ValueError):
    """A patch needs a proof of headroom that the model does not have."""


class NotAppliedError(T5FastPatchError, ValueError):
    """A patch to be removed is not on the model."""


class MetaDeviceError(T5FastPatchError, ValueError):
    """The model's weights are on the meta device."""


class ForeignForwardError(T5FastPatchError, RuntimeError):
    """Other code has replaced the forward that a patch would change, or wrapped its class since."""


class SourceUnavailableError(T5FastPatchError, RuntimeError):
    """The source of an upstream method cannot be read, or is not the source of the code that runs."""


class UnexpectedSourceError(T5FastPatchError, RuntimeError):
    """Upstream's source holds something like the pattern, but not exactly what the patch knows."""
