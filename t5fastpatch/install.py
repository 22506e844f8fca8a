"""How new forwards get onto one module, and off again.

As in `torch.nn.utils.parametrize`, the module gets a subclass of its own class. There is one subclass per class and set
of patches, built from upstream's source each time, so that equal modules share one (torch.compile counts classes) and
no edit is made on top of another. The subclass pickles as upstream's class, and copies as itself.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from .errors import ConflictError, ForeignForwardError, UnexpectedSourceError
from .findings import finding, transformers_version, upstream_class
from .headroom.places import UNSCALED, Scaling
from .patch import Finding, Patch, StackPatch, State
from .rewrite import Method, innermost, rewrap, upstream_function

# Whatever changes classes or models holds it.
LOCK = threading.RLock()

# By the upstream function too, since other code may exchange it. Those of other people's classes, which may be made by
# the model (FSDP's, parametrized ones), live as long as something has them.
_Key = tuple[type, "Setup", tuple[Patch, ...], types.FunctionType]
_subclasses: dict[_Key, type[nn.Module]] = {}
_passing_subclasses: MutableMapping[_Key, type[nn.Module]] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is on one module, process-wide patches aside.

    Attributes:
        patches: the patches, in the order of their names.
        scaling: the powers of two that its stack is scaled by, where a patch scales.
        proven: those of the patches that are on because of a proof of headroom.
    """

    patches: tuple[Patch, ...] = ()
    scaling: Scaling = UNSCALED
    proven: frozenset[Patch] = frozenset()

    def plus(self, patch: Patch, *, scaling: Scaling | None = None, proven: bool = False) -> Setup:
        """The same with one patch more; one that is on already, whatever is known of the weights, rests on no proof."""
        # By name, so that equal sets give equal classes.
        patches = tuple(sorted({*self.patches, patch}, key=lambda each: each.name))
        resting = proven and (patch in self.proven or patch not in self.patches)
        rests = self.proven | {patch} if resting else self.proven - {patch}
        return Setup(patches, scaling or self.scaling, rests)

    def without(self, patches: Collection[Patch]) -> Setup:
        """The same without some patches; without its scale where none is left that scales."""
        kept = tuple(patch for patch in self.patches if patch not in patches)
        return Setup(kept, UNSCALED, self.proven - set(patches)).at(self.scaling)

    def at(self, scaling: Scaling) -> Setup:
        """The same at another scale, if one of its patches scales."""
        scaled = any(isinstance(patch, StackPatch) and patch.scales for patch in self.patches)
        return dataclasses.replace(self, scaling=scaling if scaled else UNSCALED)


def setup_on(module: nn.Module) -> Setup:
    """What this one module has."""
    setup = getattr(type(module), "t5fastpatch", None)
    return setup if isinstance(setup, Setup) else Setup()


def patches_on(module: nn.Module) -> tuple[Patch, ...]:
    """The patches that this one module has, process-wide ones aside."""
    return setup_on(module).patches


def new_function(cls: type, patches: Sequence[Patch]) -> types.FunctionType | None:
    """The innermost forward for an upstream class under `patches`; `None` where they leave it alone.

    Raises:
        ConflictError: a patch replaces the whole forward that another one changes.
        UnexpectedSourceError: a patch does not apply to the class, or two patches change the same lines.
    """
    patches = uncovered(patches)
    findings = [_applicable(patch, cls) for patch in patches]
    label = ", ".join(patch.name for patch in patches)
    forwards = [found.forward for found in findings if found.forward is not None]
    edits = [edit for found in findings for edit in found.edits]
    if len(forwards) > 1 or (forwards and edits):
        raise ConflictError(f"{label} cannot share the forward of {cls.__name__}, which one replaces: leave one out")
    if forwards:
        (forward,) = forwards
        assert isinstance(forward, types.FunctionType)
        return forward
    return Method.of(cls).edited(edits, label) if edits else None


def uncovered(patches: Sequence[Patch]) -> list[Patch]:
    """Those of one class's patches whose work none of the others does as well."""
    covered = {name for patch in patches for name in patch.covers}
    return [patch for patch in patches if patch.name not in covered]


def patched_class(module: nn.Module, setup: Setup, process_wide: Sequence[Patch]) -> type[nn.Module]:
    """The class that gives a module exactly this setup (no patch: its own class), whatever it has now.

    `process_wide` are the patches that its upstream class has for the whole process; they stay.

    Raises:
        ForeignForwardError, ConflictError, UnexpectedSourceError: there can be no such class.
    """
    base = own_class(module)
    return _subclass(base, setup, tuple(process_wide)) if setup.patches else base


def exchange_classes(classes: Sequence[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Gives each module its class; after an error each has the one it had."""
    before = [(module, type(module)) for module, _ in classes]
    done = 0
    try:
        for module, cls in classes:
            _exchange_class(module, cls)
            done += 1
    except BaseException:
        for module, cls in before[: done + 1]:
            _exchange_class(module, cls)
        raise


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without our subclass.

    Raises:
        ForeignForwardError: another class has been derived from our subclass since.
    """
    cls = type(module)
    if patches_on(module) and "t5fastpatch" in vars(cls):
        base: type[nn.Module] = cls.__bases__[0]
        return base
    if patches_on(module):
        raise ForeignForwardError(
            f"{cls.__name__} has been derived from a patched class (fully_shard does that): its patches can no longer "
            "be changed; patch before wrapping, and remove before unwrapping"
        )
    return cls


def check_forward(module: nn.Module) -> None:
    """Raises `ForeignForwardError` where the module has a forward of its own that would hide a patched one.

    The message begins with the class; the caller says which patch.
    """
    if parametrize.is_parametrized(module):
        raise ForeignForwardError(
            f"this {type(module).__name__} is parametrized: remove the parametrization, apply, and parametrize again"
        )
    instance = vars(module)
    names = [name for name in ("_old_forward", "forward") if name in instance]
    # accelerate's hooks put a wrapper on the instance, and what it wraps under `_old_forward`.
    if names and not _is_bound(instance[names[0]], module, type(module)):
        raise ForeignForwardError(
            f"this {type(module).__name__} has a forward of its own ({instance[names[0]]!r:.80}), so a patched one "
            f"would not run (transformers {transformers_version()}): undo that other patch, then apply"
        )


def _applicable(patch: Patch, cls: type) -> Finding:
    found = finding(patch, cls)
    if found.state is not State.APPLIES:
        raise UnexpectedSourceError(
            f"{patch.name} does not apply to {cls.__name__}: {found.refusal or found.state.value}"
        )
    return found


def _is_bound(forward: object, module: nn.Module, cls: type) -> bool:
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(cls, "forward", None)
    )


def _exchange_class(module: nn.Module, after: type[nn.Module]) -> None:
    before = type(module)
    if after is before:
        return
    had = patches_on(module)
    module.__class__ = after
    # The bound methods of the former class's forward that the instance keeps.
    for name in ("_old_forward", "forward"):
        if _is_bound(vars(module).get(name), module, before):
            setattr(module, name, types.MethodType(after.forward, module))
    has = patches_on(module)
    # The weights that they make are real, and outlive the mode that the caller is in.
    with torch.inference_mode(False), _disable_current_modes():
        for patch in (*had, *has):
            if patch not in has:
                patch.detach(module)
            elif patch not in had:
                patch.attach(module)


def _subclass(base: type[nn.Module], setup: Setup, process_wide: tuple[Patch, ...]) -> type[nn.Module]:
    upstream = upstream_class(base)
    assert upstream is not None
    outer = upstream_function(upstream)
    key = (base, setup, process_wide, outer)
    known = _subclasses if base is upstream else _passing_subclasses
    if key not in known:
        patches = list(dict.fromkeys((*process_wide, *setup.patches)))
        derived: type[nn.Module] = _derive(base, setup, _namespace(upstream, patches, outer))
        known[key] = derived
        return derived  # a weak mapping alone would not keep it
    return known[key]


def _namespace(upstream: type, patches: Sequence[Patch], outer: types.FunctionType) -> dict[str, Any]:
    """What the patches put into a class derived from upstream's."""
    new = new_function(upstream, patches)
    forward = outer if new is None else rewrap(outer, innermost(outer), new)
    findings = [_applicable(patch, upstream) for patch in uncovered(patches)]
    for found in findings:
        forward = forward if found.around is None else found.around(forward)
    members = {name: member for found in findings for name, member in found.members.items()}
    return members if forward is outer else {"forward": forward, **members}


def _derive(base: type[nn.Module], setup: Setup, made: dict[str, Any]) -> Any:
    namespace = {
        **made,
        "t5fastpatch": setup,
        "t5fastpatch_stream": setup.scaling.stream,
        "t5fastpatch_hidden": setup.scaling.hidden,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_load_from_state_dict": _without_proof(base),
    }
    try:
        derived: Any = type(base.__name__, (base,), dict(namespace))
    except Exception as error:
        raise ForeignForwardError(f"{base.__qualname__} does not let itself be derived from: {error!r}") from error
    forward = made.get("forward", derived.forward)
    if derived.forward is not forward and derived.forward.__code__ is forward.__code__:
        # Deriving wraps forward for gradient checkpointing, as upstream's class did already: once is enough.
        derived = type(base.__name__, (base,), {**namespace, "forward": forward.__wrapped__})
    _teach_copying(derived, base)
    return derived


def _without_proof(base: type[nn.Module]) -> Callable[..., None]:
    """How a module takes new weights: without the patches, its own or others', that rest on a proof of the old ones."""

    def load(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        from .proof import withdraw  # which exchanges classes itself

        withdraw(self)
        base._load_from_state_dict(self, *args, **kwargs)

    return load


def _teach_copying(derived: Any, base: type) -> None:
    """Copies of an instance stay patched; its pickle names upstream's class, for readers without this package."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        constructor, args, *state = super(derived, self).__reduce_ex__(protocol)
        for patch in (each for each in patches_on(self) if isinstance(each, StackPatch)):
            state[:1] = [patch.unpatched(self, each) for each in state[:1]]
        # pickle insists that `copyreg.__newobj__` gets the instance's own class; `object.__new__` does the same.
        constructor = object.__new__ if constructor is copyreg.__newobj__ else constructor  # type: ignore[attr-defined]
        return (constructor, tuple(base if arg is derived else arg for arg in args), *state)

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        inherited = getattr(super(derived, self), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        new = _clone(self, derived, lambda state: copy.deepcopy(state, memo), memo)
        from .proof import guard_copy  # which exchanges classes itself

        guard_copy(new, memo)
        return new

    def shallow(self: nn.Module) -> Any:
        return _clone(self, derived, lambda state: state, {})

    for name, function in (("__reduce_ex__", reduce), ("__deepcopy__", deepcopy), ("__copy__", shallow)):
        setattr(derived, name, function)


def _clone(module: Any, derived: type, copied: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A new module of the same class, with a copy of the state."""
    cls: Any = type(module)
    memo[id(module)] = new = cls.__new__(cls)
    if cls is derived:
        # Not `__dict__`: a compiled call, which is bound to the original, is not part of the state.
        new.__setstate__(copied(module.__getstate__()))
    else:
        # A class derived from ours, a parametrized one say, which forbids pickling and is copied by its `__dict__`.
        new.__dict__.update(copied(module.__dict__))
    return new
