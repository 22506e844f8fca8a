"""How new forwards get onto one module, and off again.

As in `torch.nn.utils.parametrize`, the module gets a subclass of its own class. There is one subclass per class and set
of patches, built from upstream's source each time, so that equal modules share one (torch.compile counts classes) and
no edit is made on top of another. The subclass pickles as upstream's class, and copies as itself.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from .errors import ConflictError, ForeignForwardError, UnexpectedSourceError
from .findings import finding, upstream_class
from .registry import Finding, Patch, State
from .rewrite import Method, innermost, rewrap, upstream_function

# By the upstream function too, since other code may exchange it.
_subclasses: dict[tuple[type, tuple[Patch, ...], types.FunctionType], type] = {}


def patches_on(module: nn.Module) -> tuple[Patch, ...]:
    """The patches that this one module has, process-wide ones aside."""
    return getattr(type(module), "t5fastpatch", ())


def new_function(cls: type, patches: Sequence[Patch]) -> types.FunctionType:
    """The innermost forward for an upstream class under `patches`.

    Raises:
        ConflictError: a patch replaces the whole forward that another one changes.
        UnexpectedSourceError: a patch does not apply to the class, or two patches change the same lines.
    """
    findings = [_applicable(patch, cls) for patch in patches]
    label = ", ".join(patch.name for patch in patches)
    forwards = [found.forward for found in findings if found.forward is not None]
    if len(forwards) > 1 or (forwards and len(findings) > 1):
        raise ConflictError(f"{label} cannot share the forward of {cls.__name__}, which one replaces: leave one out")
    if forwards:
        (forward,) = forwards
        assert isinstance(forward, types.FunctionType)
        return forward
    return Method.of(cls).edited([edit for found in findings for edit in found.edits], label)


def set_patches(module: nn.Module, patches: Sequence[Patch], *, process_wide: Sequence[Patch] = ()) -> None:
    """Gives a module exactly these patches (none: its upstream class again), whatever it had before.

    `process_wide` are the patches that its upstream class has for the whole process; they stay.
    """
    before = type(module)
    base = own_class(module)
    after = _subclass(base, tuple(patches), tuple(process_wide)) if patches else base
    if after is not before:
        module.__class__ = after
        _rebind(module, before, after)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without our subclass.

    Raises:
        ForeignForwardError: another class has been derived from our subclass since.
    """
    cls = type(module)
    if "t5fastpatch" in vars(cls):
        base: type[nn.Module] = cls.__bases__[0]
        return base
    if patches_on(module):
        raise ForeignForwardError(
            f"{cls.__name__} has been derived from a patched class (fully_shard does that): its patches can no longer "
            "be changed; patch before wrapping, and remove before unwrapping"
        )
    return cls


def check_forward(module: nn.Module) -> None:
    """Raises `ForeignForwardError` where the module has a forward of its own that would hide a patched one."""
    instance = vars(module)
    names = [name for name in ("_old_forward", "forward") if name in instance]
    # accelerate's hooks put a wrapper on the instance, and what it wraps under `_old_forward`.
    if names and not _is_bound(instance[names[0]], module, type(module)):
        raise ForeignForwardError(
            f"this {type(module).__name__} has a forward of its own ({instance[names[0]]!r}), so the class's would not "
            "run: undo that other patch, then apply"
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


def _rebind(module: nn.Module, before: type, after: type) -> None:
    """Exchanges the bound methods that the instance keeps of its former class's forward."""
    for name in ("_old_forward", "forward"):
        if _is_bound(vars(module).get(name), module, before):
            setattr(module, name, types.MethodType(after.forward, module))  # type: ignore[attr-defined]


def _subclass(base: type[nn.Module], patches: tuple[Patch, ...], process_wide: tuple[Patch, ...]) -> type[nn.Module]:
    upstream = upstream_class(base)
    assert upstream is not None
    outer = upstream_function(upstream)
    key = (base, (*patches, *process_wide), outer)
    if key not in _subclasses:
        new = new_function(upstream, list(dict.fromkeys((*process_wide, *patches))))
        _subclasses[key] = _derive(base, patches, rewrap(outer, innermost(outer), new))
    return _subclasses[key]


def _derive(base: type[nn.Module], patches: tuple[Patch, ...], forward: types.FunctionType) -> Any:
    namespace = {
        "forward": forward,
        "t5fastpatch": patches,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    derived: Any = type(base.__name__, (base,), dict(namespace))
    made = derived.forward
    if made is not forward and made.__code__ is forward.__code__:
        # Deriving wraps forward for gradient checkpointing, as upstream's class did already: once is enough.
        derived = type(base.__name__, (base,), {**namespace, "forward": forward.__wrapped__})  # type: ignore[attr-defined]
    _teach_copying(derived, base)
    return derived


def _teach_copying(derived: Any, base: type) -> None:
    """Copies of an instance stay patched; its pickle names upstream's class, for readers without this package."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        constructor, args, *state = super(derived, self).__reduce_ex__(protocol)
        # pickle insists that `copyreg.__newobj__` gets the instance's own class; `object.__new__` does the same.
        constructor = object.__new__ if constructor is copyreg.__newobj__ else constructor  # type: ignore[attr-defined]
        return (constructor, tuple(base if arg is derived else arg for arg in args), *state)

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        inherited = getattr(super(derived, self), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        memo[id(self)] = new = derived.__new__(derived)
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def shallow(self: nn.Module) -> Any:
        new = derived.__new__(derived)
        new.__setstate__(self.__dict__)
        return new

    for name, function in (("__reduce_ex__", reduce), ("__deepcopy__", deepcopy), ("__copy__", shallow)):
        setattr(derived, name, function)
