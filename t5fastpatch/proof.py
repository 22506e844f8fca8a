"""Takes off what rests on a proof of headroom once the weights that were proven may no longer be there."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from .classwide import process_wide
from .findings import upstream_class
from .install import LOCK, exchange_classes, patched_class, setup_on
from .messages import say

# For every module of a proven model, the modules that rest on the proof.
_resting: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def guard(resting: Iterable[nn.Module], model: Iterable[nn.Module]) -> None:
    """Watches a model: loading weights, or putting a module or parameter into its place, withdraws the proof.

    What changes a weight in place goes unseen: an optimizer, or a load into a single linear or embedding by itself.
    So does what compiled code puts into place.

    Args:
        resting: the modules with patches that rest on the proof.
        model: every module whose weights it is a proof of.
    """
    group = weakref.WeakSet(resting)
    if group:
        _watch()
        for module in model:
            # What rested on it before goes with it still: a decoder, where its encoder is proven again by itself.
            group |= _resting.get(module, weakref.WeakSet())
            _resting[module] = group


def guard_copy(module: nn.Module, memo: dict[Any, Any]) -> None:
    """Watches what a module's copy holds; all that are copied in one go, and so share a memo, share the proof."""
    group = memo.setdefault(__name__, weakref.WeakSet())
    if setup_on(module).proven:
        group.add(module)
    if group:
        for each in module.modules():
            _resting[each] = group


def withdraw(*modules: nn.Module) -> None:
    """Takes the patches that rest on a proof off these modules, and off all that share it with one of them."""
    with LOCK:
        sharing = {each for module in modules for each in (module, *_resting.get(module, ()))}
        resting = [each for each in sharing if setup_on(each).proven]
        if not resting:
            return
        names = sorted({patch.name for each in resting for patch in setup_on(each).proven})
        exchange_classes([(each, _class_without_proof(each)) for each in resting])
    why = "new weights or modules have no proof of headroom; apply again for one, scales stay"
    say(f"{', '.join(names)} taken off: {why}")


def _class_without_proof(module: nn.Module) -> type[nn.Module]:
    setup, upstream = setup_on(module), upstream_class(type(module))
    assert upstream is not None
    return patched_class(module, setup.without(setup.proven), process_wide(upstream))


@functools.cache
def _watch() -> None:
    """PyTorch calls these at each registration, in any module of the process; they look up one key."""

    def registered(module: nn.Module, name: str, value: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a compiler would guard on every model of the process
        # Switch's router puts its own classifier back at every call; a resized embedding comes back with a new table.
        same = value is module._modules.get(name) or value is module._parameters.get(name)
        if module in _resting and (not same or isinstance(value, nn.Embedding)):
            # What comes may be a part of another proven model, or a copy of one.
            withdraw(module, *([value] if isinstance(value, nn.Module) else []))

    registration.register_module_module_registration_hook(registered)
    registration.register_module_parameter_registration_hook(registered)
