"""Whether upstream's modules and steps may be passed over, so that nobody can tell but by the time it takes."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def may_bypass(module: nn.Module) -> bool:
    """Whether calling a module comes to its class's forward and to nothing else: no hook, no forward of its own."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not hooks and "forward" not in vars(module)


def runs_eagerly(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` is carried out at once, and its result may be kept for the next call.

    Not so where a compiler or a tracer records it, or where the tensor holds no data.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
