"""Products of one input with several linears, taken as one.

The weights lie side by side in memory, so that all of them are one matrix as well. Each is a slice of that matrix's
storage, and a slice of a storage is a storage of its own: to `state_dict`, safetensors, optimizers and adapters these
are the separate tensors that they were. (Views of one storage would pass for duplicates, which some savers drop.)

`fused_qkv` and `fused_gate` share these parts.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .bypass import autocasts, is_unwatched, transformed
from .headroom.stacks import Stack
from .rescaling import is_plain


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """Weights side by side.

    Attributes:
        matrix: all of them, one above the other, shape (n * out_features, in_features).
        places: the name, the linear, its parameter and the address at which the weight was laid, for each.
    """

    matrix: torch.Tensor
    places: tuple[tuple[str, nn.Linear, nn.Parameter, int], ...]

    def holds(self, module: nn.Module) -> bool:
        """Whether the module still has these linears, and these their weights where they were laid."""
        dtype, shape = self.matrix.dtype, self.places[0][2].shape
        for name, linear, weight, address in self.places:
            if (
                module._modules.get(name) is not linear
                or linear._parameters.get("weight") is not weight
                or weight.data_ptr() != address
                or weight.dtype is not dtype
                or weight.shape != shape
                or not weight.is_contiguous()
            ):
                return False
        return True

    def is_unwatched(self) -> bool:
        """Whether every linear would do no more than its product."""
        return all(is_unwatched(linear) for _, linear, _, _ in self.places)


# By module. Not on the module, which would be copied and pickled with it.
_joined: weakref.WeakKeyDictionary[nn.Module, Joined] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The linears of a module that read one input.

    Attributes:
        names: the ways in which families call them, each in the order in which the weights lie.
    """

    names: tuple[tuple[str, ...], ...]

    def linears(self, module: nn.Module) -> dict[str, Any]:
        """The module's own by name, plain or not; none for a module of another kind."""
        submodules = module._modules
        for names in self.names:
            if all(name in submodules for name in names):
                return {name: submodules[name] for name in names}
        return {}

    def attach(self, module: nn.Module) -> None:
        """Lays the weights side by side, to the bit, where they can lie so; needs memory for one more of this module's.

        Gradients, optimizers and whatever else holds the parameters stay good: these are the same objects.
        """
        linears = self.linears(module)
        if not _can_lie_together(list(linears.values())):
            return
        weights = [linear.weight.data for linear in linears.values()]
        # Not by `cat`, which autocast would cast.
        matrix = weights[0].new_empty(len(weights) * weights[0].shape[0], weights[0].shape[1])
        for part, weight in zip(matrix.chunk(len(weights)), weights):
            part.copy_(weight)
        storage, size = matrix.untyped_storage(), matrix.nbytes // len(linears)
        for index, linear in enumerate(linears.values()):
            own = storage[index * size : (index + 1) * size]
            linear.weight.data = matrix.new_empty(0).set_(own, 0, linear.weight.shape)
        places = ((name, each, each.weight, each.weight.data_ptr()) for name, each in linears.items())
        _joined[module] = Joined(matrix, tuple(places))

    def detach(self, module: nn.Module) -> None:
        """Gives each weight memory of its own again, to the bit."""
        joined = _joined.pop(module, None)
        if joined is not None and joined.holds(module):
            for _, _, weight, _ in joined.places:
                weight.data = weight.data.clone()

    def needless(self, stack: Stack) -> str:
        """Why a stack has nothing to join."""
        for module in stack.module.modules():
            linears = self.linears(module)
            if linears and (module in _joined or _can_lie_together(list(linears.values()))):
                return ""
        return f"no {', '.join(self.names[0])} that are plain linears in memory of their own"

    @property
    def members(self) -> Mapping[str, Any]:
        """What keeps the weights side by side in a module that is moved, cast or copied."""

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            _joined.pop(module, None)
            nn.Module._apply(module, *args, **kwargs)  # type: ignore[no-untyped-call]
            self.attach(module)
            return module

        def __setstate__(module: nn.Module, state: dict[str, Any]) -> None:
            nn.Module.__setstate__(module, state)  # type: ignore[no-untyped-call]
            self.attach(module)

        return {"_apply": _apply, "__setstate__": __setstate__}


def may_join() -> bool:
    """Whether products may be joined at all in what runs now.

    Not where gradients may be wanted, which are upstream's then; nor in what is compiled or traced, which would take
    the places of the weights for granted.
    """
    return not (torch.is_grad_enabled() or transformed())


def joined_weights(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The weights of a module's joined linears as one matrix, where their products with `x` may be taken as one.

    Not where somebody listens or has put something else in a linear's place; nor under autocast, which keeps its casts
    of parameters only.
    """
    joined = _joined.get(module)
    if joined is None or type(x) is not torch.Tensor or autocasts(x):
        return None
    if not joined.holds(module):
        # This must not keep the memory of weights that others have taken the place of.
        _joined.pop(module, None)
        return None
    return joined.matrix if joined.is_unwatched() else None


def _can_lie_together(linears: Sequence[Any]) -> bool:
    """Whether these are linears without bias, alike, each with a weight in memory that nobody else has a part in."""
    weights = [linear.weight for linear in linears if is_plain(linear) and linear.bias is None]
    if not weights or len(weights) != len(linears):
        return False
    first = weights[0]
    return all(
        type(weight) is nn.Parameter
        and weight.device.type in ("cpu", "cuda")
        and (weight.shape, weight.dtype, weight.device) == (first.shape, first.dtype, first.device)
        and weight.is_contiguous()
        and weight.untyped_storage().nbytes() == weight.nbytes
        and not (weight.is_inference() or (weight.device.type == "cpu" and weight.untyped_storage().is_shared()))
        for weight in weights
    )
