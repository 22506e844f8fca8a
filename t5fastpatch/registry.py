"""What a patch is, which patches there are, and what a selection of names means."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import re
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
from .messages import say
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

    STACK = "stack"
    BLOCK = "block"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"
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
            edits = list(self.edits(method))
            if not edits:
                return Finding(State.UPSTREAM)
            if len(edits) != self.sites:
                raise UnexpectedSourceError(f"number of places found: {len(edits)}, expected: {self.sites}")
            method.edited(edits, self.name)  # whether there can be such a function
        except UnexpectedSourceError as error:
            return Finding(State.REFUSED, refusal=error)
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


def register(patch: Patch) -> Patch:
    """Adds a patch to the registry, and gives it back.

    Raises:
        InvalidPatchError: it is no patch, a part of it is of the wrong type, or its name is no lower-case identifier or
            is taken.
    """
    _check_patch(patch)
    if patch.name in (*BUILTIN, *PRESETS) or patch.name in _registered:
        raise InvalidPatchError(f"there is a patch or preset called {patch.name!r} already: choose another name")
    _registered[patch.name] = patch
    return patch


def get_patch(name: str) -> Patch:
    """The patch of that name; one that another package offers is imported now.

    Raises:
        UnknownPatchError: there is none; the message gives the nearest name.
        InvalidPatchError: another package offers it, and it cannot be loaded.
    """
    if name in BUILTIN:
        patch: Patch = importlib.import_module(f"{__package__}.patches.{name}").PATCH
        return patch
    if name not in _registered:
        if name not in _entry_points():
            raise UnknownPatchError(_unknown(name, patch_names()))
        _load(_entry_points()[name])
    return _registered[name]


def patch_names() -> list[str]:
    """The names of all patches: built in, registered, and offered by other packages. Imports none of them."""
    return list(dict.fromkeys([*BUILTIN, *_registered, *_entry_points()]))


def list_patches() -> list[Patch]:
    """All patches; one of another package that cannot be loaded is left out, with a line on stderr."""
    patches = []
    for name in patch_names():
        try:
            patches.append(get_patch(name))
        except InvalidPatchError as error:
            say(str(error))
    return patches


@dataclasses.dataclass(frozen=True)
class Selection:
    """What was asked for: the patches, and which of them by their own name."""

    patches: tuple[Patch, ...]
    named: frozenset[str]


def check_names(names: Iterable[str]) -> None:
    """Raises `UnknownPatchError` for the first name that is neither a patch's nor a preset's."""
    known = [*patch_names(), *PRESETS]
    for name in names:
        if name not in known:
            raise UnknownPatchError(_unknown(name, known))


def names_of(patches: str | Iterable[str] | None) -> list[str]:
    """The names in an argument that takes one, several (in a list or with commas) or, as `None`, the preset `safe`.

    Raises:
        WrongTypeError: it holds something else.
    """
    names = ["safe"] if patches is None else patches
    if isinstance(names, str):
        names = names.replace(",", " ").split()
    if not isinstance(names, Iterable):
        raise WrongTypeError(f"patches takes a name, a list of names or None, not {type(patches).__name__}")
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise WrongTypeError(f"patches takes names (str), not {type(name).__name__}: {name!r}")
    return names


def select(patches: str | Iterable[str] | None) -> Selection:
    """What a selection of patches means.

    Args:
        patches: names of patches or presets, one or many, or `None` for the preset `safe`. `safe` stands for every
            patch that is safe alone, `all` for every patch. What is unsafe alone is applied only when it is named.

    Raises:
        WrongTypeError: not a name, not names.
        UnknownPatchError: a name that is no patch's and no preset's.
        ConflictError: two patches that are named exclude each other.
    """
    names = names_of(patches)
    check_names(names)
    named = [get_patch(name) for name in patch_names() if name in names]
    for index, patch in enumerate(named):
        check_conflict(patch, named[:index])
    preset = list_patches() if set(PRESETS) & set(names) else []
    added = [patch for patch in preset if patch not in named and ("all" in names or not patch.unsafe_alone)]
    order = patch_names()
    chosen = sorted([*named, *added], key=lambda patch: order.index(patch.name))
    return Selection(tuple(chosen), frozenset(patch.name for patch in named))


def rival(patch: Patch, others: Iterable[Patch]) -> Patch | None:
    """The first of the other patches that cannot be on one model with `patch`.

    A patch that replaces a whole forward leaves nothing in it for another.
    """
    for other in (each for each in others if each is not patch):
        whole = patch.role is other.role and (isinstance(patch, ForwardPatch) or isinstance(other, ForwardPatch))
        if whole or patch.name in other.conflicts or other.name in patch.conflicts:
            return other
    return None


def check_conflict(patch: Patch, others: Iterable[Patch]) -> None:
    """Raises `ConflictError` where `patch` cannot be on one model with the others."""
    other = rival(patch, others)
    if other is not None:
        raise ConflictError(f"{patch.name} and {other.name} cannot be on one model: leave one out, or remove it first")


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no patch is called {name!r:.80}: {hint}there are {', '.join(known)}"


def _check_patch(patch: Patch) -> None:
    if not isinstance(patch, SourcePatch | ForwardPatch):
        raise InvalidPatchError(f"{patch!r} is neither a SourcePatch nor a ForwardPatch")
    if not isinstance(patch.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", patch.name):
        raise InvalidPatchError(f"{patch.name!r} is no name for a patch: use a lower-case identifier")
    types = {"summary": str, "contract": Contract, "role": Role, "conflicts": frozenset, "unsafe_alone": str}
    for field, expected in types.items():
        if not isinstance(getattr(patch, field), expected):
            raise InvalidPatchError(f"{patch.name}: {field} must be a {expected.__name__}")
    calls = ("edits",) if isinstance(patch, SourcePatch) else ("forward", "upstream_has_it", "objection")
    for field in calls:
        if not callable(getattr(patch, field)):
            raise InvalidPatchError(f"{patch.name}: {field} must be a function")
    if isinstance(patch, SourcePatch) and not (isinstance(patch.sites, int) and patch.sites >= 1):
        raise InvalidPatchError(f"{patch.name}: sites is the number of edits a method must give, at least 1")


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    try:
        found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        return {each.name: each for each in found if each.name not in (*BUILTIN, *PRESETS)}
    except Exception as error:  # some package's metadata cannot be read
        say(f"patches of other packages are left out: {error}")
        return {}


def _load(entry_point: importlib.metadata.EntryPoint) -> None:
    try:
        patch = entry_point.load()
        _check_patch(patch)
    except (Exception, SystemExit) as error:
        raise InvalidPatchError(
            f"the patch {entry_point.name!r} of {entry_point.value} cannot be loaded: {error}"
        ) from error
    if patch.name != entry_point.name:
        raise InvalidPatchError(f"{entry_point.value} offers {patch.name!r} under the name {entry_point.name!r}")
    _registered[patch.name] = patch
