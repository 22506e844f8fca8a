"""Which patches there are, and what a selection of names means."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping

from .errors import ConflictError, InvalidPatchError, UnknownPatchError, WrongTypeError
from .messages import say
from .patch import Contract, ForwardPatch, MethodPatch, Patch, Role, SourcePatch, StackPatch

ENTRY_POINT_GROUP = "t5fastpatch.patches"
BUILTIN = (
    "residual_rescale",
    "residual_fp32",
    "wo_half",
    "skip_inf_check",
    "sdpa",
    "softmax_dtype",
    "layer_norm",
    "eager_scores",
    "local_scores",
    "gelu",
    "bucket_cache",
    "wo_without_weight",
    "bias_hoist",
    "cross_bias_skip",
    "static_decode",
    "fused_qkv",
    "fused_gate",
    "mask_sync",
)


def _any(patch: Patch) -> bool:
    return True


def _fast(patch: Patch) -> bool:
    return not (isinstance(patch, StackPatch) and patch.wide)


def _accurate(patch: Patch) -> bool:
    return not (isinstance(patch, StackPatch) and patch.scales and not patch.wide)


def _exact(patch: Patch) -> bool:
    return patch.contract is Contract.EXACT


PRESETS: Mapping[str, Callable[[Patch], bool]] = {
    "safe": _any,
    "all": _any,
    "fast": _fast,
    "accurate": _accurate,
    "exact": _exact,
}


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
        patches: names of patches or presets, one or many, or `None` for the preset `safe`. A preset stands for
            candidates: `safe` and `all` for every patch, `fast` for those that keep the residual stream in half
            precision, `accurate` for those that keep it in fp32, `exact` for those that change no bit. What is applied
            of them is what is safe on the model; what is unsafe alone needs a proof of headroom, or its name.

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
    presets = [PRESETS[name] for name in names if name in PRESETS]
    added = [patch for patch in (list_patches() if presets else []) if any(has(patch) for has in presets)]
    order = patch_names()
    chosen = sorted(dict.fromkeys([*named, *added]), key=lambda patch: order.index(patch.name))
    return Selection(tuple(chosen), frozenset(patch.name for patch in named))


def rival(patch: Patch, others: Iterable[Patch]) -> Patch | None:
    """The first of the other patches that cannot be on one model with `patch`.

    A patch that replaces a whole forward leaves nothing in it for another.
    """
    for other in (each for each in others if each is not patch):
        whole = isinstance(patch, ForwardPatch) or isinstance(other, ForwardPatch)
        if (
            (whole and patch.rewritten & other.rewritten)
            or patch.name in other.conflicts
            or other.name in patch.conflicts
        ):
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
    calls = {
        SourcePatch: ("edits",),
        ForwardPatch: ("forward", "upstream_has_it", "objection"),
        MethodPatch: ("lacks",),
        StackPatch: (),
    }
    if not isinstance(patch, tuple(calls)):
        names = " nor a ".join(kind.__name__ for kind in calls)
        raise InvalidPatchError(f"{patch!r} is neither a {names}")
    if not isinstance(patch.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", patch.name):
        raise InvalidPatchError(f"{patch.name!r} is no name for a patch: use a lower-case identifier")
    types: dict[str, type] = {"summary": str, "contract": Contract, "conflicts": frozenset, "unsafe_alone": str}
    types["covers"] = frozenset
    types |= {"parts": dict} if isinstance(patch, StackPatch) else {"role": Role}
    for field, expected in types.items():
        if not isinstance(getattr(patch, field), expected):
            raise InvalidPatchError(f"{patch.name}: {field} must be a {expected.__name__}")
    calls = {SourcePatch: ("edits", "where"), ForwardPatch: ("forward", "upstream_has_it", "objection"), StackPatch: ()}
    for field in calls[type(patch)]:
        if not callable(getattr(patch, field)):
            raise InvalidPatchError(f"{patch.name}: {field} must be a function")
    if isinstance(patch, SourcePatch):
        counts = patch.sites if isinstance(patch.sites, tuple) else (patch.sites,)
        if not counts or not all(isinstance(count, int) and count >= 1 for count in counts):
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
