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

from .headroom.stacks import Stack
from .rescaling import is_plain

# For each module whose weights lie side by side, all of them as one matrix. Not on the module, which would be copied
# and pickled with it.
_matrices: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The linears of a module that read one input.

    Attributes:
        names: the ways in which families call them, each in the order in which the weights lie.
    """

    names: tuple[tuple[str, ...], ...]

    def linears(self, module: nn.Module) -> list[Any]:
        """The module's own, plain or not; none for a module of another kind."""
        submodules = module._modules
        for names in self.names:
            if all(name in submodules for name in names):
                return [submodules[name] for name in names]
        return []

    def attach(self, module: nn.Module) -> None:
        """Lays the weights side by side, to the bit, where they can lie so; needs memory for one more of this module's.

        Gradients, optimizers and whatever else holds the parameters stay good: these are the same objects.
        """
        linears = self.linears(module)
        if not _can_lie_together(linears):
            return
        matrix = torch.cat([linear.weight.data for linear in linears])
        storage, size = matrix.untyped_storage(), matrix.nbytes // len(linears)
        for index, linear in enumerate(linears):
            own = storage[index * size : (index + 1) * size]
            linear.weight.data = matrix.new_empty(0).set_(own, 0, linear.weight.shape)
        _matrices[module] = matrix

    def detach(self, module: nn.Module) -> None:
        """Gives each weight memory of its own again, to the bit."""
        if _matrices.pop(module, None) is not None:
            for linear in self.linears(module):
                linear.weight.data = linear.weight.data.clone()

    def needless(self, stack: Stack) -> str:
        """Why a stack has nothing to join."""
        for module in stack.module.modules():
            if module in _matrices or _can_lie_together(self.linears(module)):
                return ""
        return f"no {' and '.join(self.names[0])} that are plain linears"

    def matrix(self, module: nn.Module, *inputs: torch.Tensor | None) -> torch.Tensor | None:
        """The weights of all linears, one above the other, if upstream's products of these inputs may be taken as one.

        Not where somebody listens or has put something else in a linear's place, where gradients are wanted, under
        autocast, which keeps its casts of parameters only, and in what is traced or compiled, which would take the
        place of the weights for granted.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        matrix = _matrices.get(module)
        if matrix is None:
            return None
        linears = self.linears(module)
        if not _lie_in(matrix, linears):
            # Other weights have come since: this must not keep the memory of those that were.
            _matrices.pop(module, None)
            return None
        given = [x for x in inputs if x is not None]
        usual = all(type(x) is torch.Tensor for x in given) and all(is_plain(linear) for linear in linears)
        if not usual or torch.is_autocast_enabled(matrix.device.type):
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *(each.weight for each in linears))):
            return None
        return matrix

    @property
    def members(self) -> Mapping[str, Any]:
        """What keeps the weights side by side in a module that is moved, cast or copied."""

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            _matrices.pop(module, None)
            nn.Module._apply(module, *args, **kwargs)
            self.attach(module)
            return module

        def __setstate__(module: nn.Module, state: dict[str, Any]) -> None:
            nn.Module.__setstate__(module, state)
            self.attach(module)

        return {"_apply": _apply, "__setstate__": __setstate__}


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
        and not (weight.is_inference() or (weight.device.type == "cpu" and weight.is_shared()))
        for weight in weights
    )


def _lie_in(matrix: torch.Tensor, linears: Sequence[Any]) -> bool:
    """Whether the weights are still where they were laid."""
    address, size = matrix.data_ptr(), matrix.nbytes // len(linears) if linears else 0
    shape = (matrix.shape[0] // len(linears), matrix.shape[1]) if linears else ()
    for linear in linears:
        weight = getattr(linear, "weight", None)
        if not (
            type(weight) is nn.Parameter
            and weight.data_ptr() == address
            and weight.shape == shape
            and weight.dtype is matrix.dtype
            and weight.is_contiguous()
        ):
            return False
        address += size
    return bool(linears)
