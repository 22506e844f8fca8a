"""Whether upstream's modules and steps may be passed over, so that nobody can tell but by the time it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules import module as registration


def may_bypass(module: nn.Module) -> bool:
    """Whether calling a module comes to its class's forward and to nothing else: no hook, no forward of its own."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    # Not vars(), which older compilers do not trace.
    return not hooks and "forward" not in module.__dict__


def is_unwatched(linear: Any) -> bool:
    """Whether a module is an nn.Linear that does what its class does, and nobody listens."""
    return type(linear) is nn.Linear and may_bypass(linear)


def gives_new_memory(linear: Any) -> bool:
    """Whether nobody else can have the result of calling a linear, so that it may be changed in place."""
    return is_unwatched(linear) and not registration._global_forward_hooks


def transformed() -> bool:
    """Whether a compiler, a tracer or a function transform is at work: its tensors are no values to be kept."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active()


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for the device of `tensor`; PyTorch does not let one ask for the meta device."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def differentiates_otherwise() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work, of which `requires_grad` tells nothing."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def runs_eagerly(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` is carried out at once, and its result may be kept for the next call."""
    return not (transformed() or tensor.is_meta or isinstance(tensor, FakeTensor))
