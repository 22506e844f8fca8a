"""What a proof may read: upstream's own modules with plain weights; for anything else the reason why there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import T5FastPatchError
from ..findings import upstream_class
from ..patch import Role
from .places import FP16_MAX
from .stacks import Attention, Stack, role

# |act(x)| <= |x| for each of these.
_SHRINKING = {
    "FastGELUActivation",
    "GELU",
    "GELUActivation",
    "GELUTanh",
    "Identity",
    "LinearActivation",
    "NewGELUActivation",
    "PytorchGELUTanh",
    "QuickGELUActivation",
    "ReLU",
    "SiLU",
    "SiLUActivation",
    "Tanh",
}
_KNOWN_CODE = ("torch.nn.modules.", "transformers.activations")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NoProofError(T5FastPatchError, ValueError):
    """A stack holds something that no bound is known for; the message is the reason."""


class Names:
    """The paths of a model's modules, for messages."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = {id(module): path for path, module in root.named_modules()}

    def of(self, module: nn.Module) -> str:
        """Its path in the model, or its class name where it is the model."""
        return self._paths.get(id(module)) or type(module).__name__


def check_code(stack: Stack, names: Names) -> None:
    """Sees to it that a stack runs upstream's code and nothing else, patched by this package or not.

    Raises:
        NoProofError: some module is of another class, or has a forward of its own; a block is not made as T5's are.
    """
    for module in stack.module.modules():
        cls = type(module)
        if upstream_class(cls) is None and not f"{cls.__module__}.".startswith(_KNOWN_CODE):
            raise NoProofError(f"{names.of(module)} is a {cls.__name__}, which is not the family's own")
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            raise NoProofError(f"{names.of(module)} has a forward of its own")
    for number, layer in enumerate(stack.layers):
        kinds = [isinstance(each, Attention) and (each.cross or "self") for each in layer]
        if kinds.count(False) != 1 or kinds.count("self") != 1:
            raise NoProofError(f"block {number} is not one self-attention and one feed-forward")


def weight_of(linear: nn.Module, names: Names) -> torch.Tensor:
    """The weight of a plain product without bias.

    Returns:
        (out, in), as it is stored.

    Raises:
        NoProofError: it is not a plain nn.Linear, it has a bias, or no weight that fp16 can hold.
    """
    if type(linear) is not nn.Linear or linear.bias is not None:
        what = f"a {type(linear).__name__}" if type(linear) is not nn.Linear else "an nn.Linear with a bias"
        raise NoProofError(f"{names.of(linear)} is {what}, not a plain nn.Linear without bias")
    weight = _read(linear, names)
    if weight.shape != (linear.out_features, linear.in_features):
        raise NoProofError(f"the weight of {names.of(linear)} is not there in full")
    return weight


def gain_of(norm: nn.Module, names: Names) -> torch.Tensor:
    """The gain of an RMS norm of the family.

    Returns:
        (d_model,), absolute values in fp64.

    Raises:
        NoProofError: it is another norm, or its output can pass fp16's largest number.
    """
    if role(norm) is not Role.NORM:
        raise NoProofError(f"{names.of(norm)} is a {type(norm).__name__}, not the family's RMS norm")
    gain = wide(_read(norm, names)).abs()
    largest = float(gain.max()) * len(gain) ** 0.5
    if largest > FP16_MAX / 2:
        raise NoProofError(f"the output of {names.of(norm)} can reach {largest:.4g}")
    return gain


def table_of(embedding: nn.Module, names: Names) -> torch.Tensor:
    """The table of a plain nn.Embedding, (entries, width), in the dtype it has.

    Raises:
        NoProofError: it is none, or its table is not a plain floating one.
    """
    if type(embedding) is not nn.Embedding:
        raise NoProofError(f"{names.of(embedding)} is a {type(embedding).__name__}, not a plain nn.Embedding")
    return _stored(embedding, names)


def check_activation(dense: Any, names: Names) -> None:
    """Sees to it that a feed-forward's activation does not enlarge.

    Raises:
        NoProofError: it is not known to satisfy |act(x)| <= |x|.
    """
    cls = type(dense.act)
    if cls.__name__ not in _SHRINKING or not f"{cls.__module__}.".startswith(_KNOWN_CODE):
        raise NoProofError(f"{names.of(dense)} has an activation ({cls.__name__}) that is not known to shrink")


def enlargement(dropout: Any) -> float:
    """By how much dropout enlarges what it keeps in training, 1 / (1 - p).

    Args:
        dropout: a probability, a module that has one, or `None`.

    Raises:
        NoProofError: p is 1 or more.
    """
    probability = float(dropout if isinstance(dropout, (int, float)) else getattr(dropout, "p", 0.0))
    if probability >= 1:
        raise NoProofError(f"a dropout of {probability:g} leaves nothing to bound in training")
    return 1 / (1 - probability)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp64, on its own device unless that has no fp64, as Apple's GPUs."""
    return tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


def _read(module: nn.Module, names: Names) -> torch.Tensor:
    weight = _stored(module, names)
    low, high = torch.aminmax(weight)
    largest = float(torch.maximum(-low, high))
    if not largest <= FP16_MAX:
        what = f"{largest:.4g}, which fp16 cannot hold" if largest < torch.inf else "NaN or infinity"
        raise NoProofError(f"the weight of {names.of(module)} holds {what}")
    return weight


def _stored(module: nn.Module, names: Names) -> torch.Tensor:
    """The weight as it is, from where accelerate keeps it if it is offloaded."""
    weight: Any = module.weight
    if weight.is_meta:
        hook: Any = getattr(module, "_hf_hook", None)
        hooks = getattr(hook, "hooks", [hook])
        maps = [each.weights_map for each in hooks if getattr(each, "weights_map", None) is not None]
        if not maps:
            raise NoProofError("its weights are on the meta device")
        weight = maps[0]["weight"]
    if type(weight) not in (nn.Parameter, torch.Tensor) or weight.dtype not in _FLOATING or weight.numel() == 0:
        raise NoProofError(f"the weight of {names.of(module)} is not a plain floating tensor")
    tensor: torch.Tensor = weight.detach()
    return tensor
