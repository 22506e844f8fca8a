"""What a patch is, which patches there are, and what a selection of names means."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from .errors import (
    ConflictError,
    InvalidPatchError,
    T5FastPatchError,
    UnexpectedSourceError,
    UnknownPatchError,
    WrongTypeError,
)
from .rewrite import Edit, Method

ENTRY_POINT_GROUP = "t5fastpatch.patches"
BUILTIN = ("skip_inf_check", "softmax_dtype", "layer_norm")
PRESETS = ("safe", "all")


class Contract(str, Enum):
    """How a patched model's results relate to the stock model's."""

    EXACT = "exact"
    ROUNDING = "rounding"
    EXACT_IN_FP32 = "exact-in-fp32"


class Role(str, Enum):
    """The part a class plays in a T5 model; families.py says which class plays it in which family."""

    BLOCK = "block"
    ATTENTION = "attention"
    NORM = "norm"


class State(str, Enum):
    """What can be said of a patch and a model, or a class."""

    ON = "on"
    APPLIES = "applies"
    UPSTREAM = "already upstream"
    ABSENT = "absent"
    UNSAFE = "unsafe"
    REFUSED = "refused"
    CONFLICT = "conflicts"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a patch found in one upstream method.

    Attributes:
        state: `APPLIES`, `UPSTREAM` or `REFUSED`.
        edits: the edits to the method's source, for a patch on code inside a method.
        forward: the function to stand in the method's place, for a patch on a whole small module.
        refusal: for a refusal, the error that says what was found instead.
    """

    state: State
    edits: tuple[Edit, ...] = ()
    forward: Callable[..., Any] | None = None
    refusal: T5FastPatchError | None = None

    @property
    def sites(self) -> int:
        """How many places in upstream's source change."""
        return len(self.edits) + (self.forward is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """A patch: a pattern in one kind of upstream class, and what takes its place.

    Use `SourcePatch` or `ForwardPatch`.

    Attributes:
        name: a lower-case identifier.
        summary: one line, what replaces what.
        contract: how the patched result relates to stock's.
        role: the classes it looks at.
        conflicts: names of patches that cannot be on the same model.
        unsafe_alone: why the patch must be asked for by name; empty where it need not be.
    """

    name: str
    summary: str
    contract: Contract
    role: Role
    conflicts: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    unsafe_alone: str = dataclasses.field(default="", kw_only=True)

    def find(self, method: Method) -> Finding:
        """Looks for the pattern in one method; never changes anything."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class SourcePatch(Patch):
    """A patch on code inside a method.

    Attributes:
        edits: gives the edits for a method, or raises `UnexpectedSourceError` where the source is like the pattern
            but not the pattern. No edits means that upstream no longer has it.
        sites: how many edits a method must give.
    """

    edits: Callable[[Method], list[Edit]]
    sites: int

    def find(self, method: Method) -> Finding:
        """As `Patch.find`; a count other than `sites` or none is a refusal."""
        try:
            edits = self.edits(method)
        except UnexpectedSourceError as error:
            return Finding(State.REFUSED, refusal=error)
        if not edits:
            return Finding(State.UPSTREAM)
        if len(edits) != self.sites:
            wrong = UnexpectedSourceError(f"the pattern stands there {len(edits)} times, not {self.sites}")
            return Finding(State.REFUSED, refusal=wrong)
        return Finding(State.APPLIES, edits=tuple(edits))


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPatch(Patch):
    """A patch that brings its own forward for a whole small module.

    Attributes:
        forward: the new method, a module-level function with upstream's signature.
        upstream_has_it: whether upstream's method does already what the patch does.
        objection: why the new forward may not stand in for upstream's here, found by running both; empty if it may.
    """

    forward: Callable[..., Any]
    upstream_has_it: Callable[[Method], bool]
    objection: Callable[[Method], str]

    def find(self, method: Method) -> Finding:
        """As `Patch.find`; an objection is a refusal."""
        if self.upstream_has_it(method):
            return Finding(State.UPSTREAM)
        why = self.objection(method)
        if why:
            return Finding(State.REFUSED, refusal=UnexpectedSourceError(why))
        return Finding(State.APPLIES, forward=self.forward)


_registered: dict[str, Patch] = {}
_entry_points_read = False


def register(patch: Patch) -> Patch:
    """Adds a patch to the registry, and gives it back.

    Raises:
        InvalidPatchError: it is no patch, its name is no lower-case identifier, or the name is taken.
    """
    if not isinstance(patch, SourcePatch | ForwardPatch):
        raise InvalidPatchError(f"{patch!r} is neither a SourcePatch nor a ForwardPatch")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", patch.name):
        raise InvalidPatchError(f"{patch.name!r} is no name for a patch: use a lower-case identifier")
    if patch.name in (*BUILTIN, *PRESETS) or patch.name in _registered:
        raise InvalidPatchError(f"there is a patch or preset called {patch.name!r} already: choose another name")
    if isinstance(patch, SourcePatch) and patch.sites < 1:
        raise InvalidPatchError(f"{patch.name}: sites is the number of edits a method must give, at least 1")
    _registered[patch.name] = patch
    return patch


def unregister(name: str) -> None:
    """Takes a registered patch away; models that have it keep it.

    Raises:
        UnknownPatchError: no patch of that name was registered.
    """
    if name not in _registered:
        raise UnknownPatchError(f"no patch called {name!r} was registered")
    del _registered[name]


def get_patch(name: str) -> Patch:
    """The patch of that name.

    Raises:
        UnknownPatchError: there is none; the message gives the nearest name.
    """
    if name in BUILTIN:
        patch: Patch = importlib.import_module(f"{__package__}.patches.{name}").PATCH
        return patch
    _read_entry_points()
    if name not in _registered:
        raise UnknownPatchError(_unknown(name))
    return _registered[name]


def patch_names() -> list[str]:
    """The names of all patches, built in and registered. Imports no patch of ours, and so not torch."""
    _read_entry_points()
    return [*BUILTIN, *_registered]


def list_patches() -> list[Patch]:
    """All patches, built in and registered, those of the entry-point group `t5fastpatch.patches` included."""
    return [get_patch(name) for name in patch_names()]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What was asked for: the patches, and which of them by their own name."""

    patches: tuple[Patch, ...]
    named: frozenset[str]


def check_names(names: Iterable[str]) -> None:
    """Raises `UnknownPatchError` for the first name that is neither a patch's nor a preset's."""
    known = (*patch_names(), *PRESETS)
    for name in names:
        if name not in known:
            raise UnknownPatchError(_unknown(name))


def select(patches: str | Iterable[str] | None) -> Selection:
    """What a selection of patches means.

    Args:
        patches: names of patches or presets, one or many, or `None` for the preset `safe`. Both presets stand for
            every patch; what is unsafe alone is applied only when it is named (`all` puts it in the report, `safe`
            leaves it out).

    Raises:
        WrongTypeError: not a name, not names.
        UnknownPatchError: a name that is no patch's and no preset's.
        ConflictError: two of the patches exclude each other.
    """
    names = ["safe"] if patches is None else [patches] if isinstance(patches, str) else patches
    if not isinstance(names, Iterable):
        raise WrongTypeError(f"patches takes a name, a list of names or None, not {type(patches).__name__}")
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise WrongTypeError(f"patches takes names (str), not {type(name).__name__}: {name!r}")
    check_names(names)
    chosen = []
    for patch in list_patches():
        by_preset = "all" in names or ("safe" in names and not patch.unsafe_alone)
        if patch.name in names or by_preset:
            chosen.append(patch)
    check_conflicts(chosen)
    return Selection(tuple(chosen), frozenset(names) - set(PRESETS))


def check_conflicts(patches: Iterable[Patch]) -> None:
    """Raises `ConflictError` where two of the patches exclude each other."""
    patches = list(patches)
    names = {patch.name for patch in patches}
    for patch in patches:
        for other in sorted(patch.conflicts & names):
            raise ConflictError(f"{patch.name} and {other} cannot be on one model: leave one of them out")


def _unknown(name: str) -> str:
    known = [*patch_names(), *PRESETS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no patch is called {name!r}: {hint}there are {', '.join(known)}"


def _read_entry_points() -> None:
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        # A broken third-party plugin must not take this package, or the host program, down with it.
        try:
            register(entry_point.load())
        except Exception as error:
            print(f"t5fastpatch: entry point {entry_point.name!r} left out: {error}", file=sys.stderr)
