"""A model run as its unpatched self in fp32, whatever it is held in, and left as it was.

The weights stay where they are: each operation widens what it gets in half precision, so that no more than one
operation's operands are ever held in fp32 beside the model. Upstream's questions about dtypes are answered accordingly:
it would cast to half precision, or clamp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..install import exchange_classes, own_class, patches_on

HALVES = (torch.float16, torch.bfloat16)
# Reading these needs no values.
_PROPERTIES = frozenset(
    ("__get__", "__set__", "__hash__", "dim", "is_contiguous", "is_floating_point", "numel", "size", "stride")
)


class InFloat32(TorchFunctionMode):
    """Every operation of PyTorch in fp32, for as long as the `with` block lasts; no tensor seems to be in half."""

    def __init__(self, device_types: frozenset[str]) -> None:
        super().__init__()
        self._device_types = device_types
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Lets operations be as they are."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return _widened(func(*args))
        if func.__name__ in _PROPERTIES:
            return func(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for each in self._device_types:
                if torch.is_autocast_enabled(each):  # by the caller, or by a wrapper around a forward
                    stack.enter_context(torch.autocast(each, enabled=False))
            if func is F.embedding:  # picks rows: widening the whole table first would give the same
                return _widened(func(*args, **kwargs))
            return func(*_widened(args), **_widened(kwargs))


@contextlib.contextmanager
def as_reference(root: nn.Module) -> Iterator[None]:
    """Within it, calls of the model are in fp32 and in eval mode, without gradients and without the patches of this one
    model, with no attention but eager or SDPA.

    Parameters and buffers are not touched. Patches, modes and the attention implementation are put back, also after an
    exception.

    Raises:
        ForeignForwardError: a patched module's class has been derived from since.
    """
    mode = InFloat32(frozenset(each.device.type for each in root.parameters()) - {"meta"})
    with contextlib.ExitStack() as stack:
        for prepare in (_unpatched, _evaluating, _visible_attention):
            stack.enter_context(prepare(root))
        for context in (_hooks_outside(root, mode), _not_compiled(), torch.no_grad(), mode):
            stack.enter_context(context)
        yield


def _widened(value: Any) -> Any:
    """Tensors and dtypes of half precision in fp32, in containers too; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALVES else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALVES else value
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return {name: _widened(each) for name, each in value.items()} if type(value) is dict else value


@contextlib.contextmanager
def _unpatched(root: nn.Module) -> Iterator[None]:
    before = [(module, type(module)) for module in root.modules() if patches_on(module)]
    exchange_classes([(module, own_class(module)) for module, _ in before])
    try:
        yield
    finally:
        exchange_classes(before)


@contextlib.contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in root.modules()]
    try:
        root.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _visible_attention(root: nn.Module) -> Iterator[None]:
    """Attention whose queries and keys PyTorch sees: eager in place of kernels, which would not take fp32 either."""
    held = {id(config): config for module in root.modules() for config in _configurations(getattr(module, "config", 0))}
    before = [(config, config._attn_implementation) for config in held.values()]
    changed = [(config, kind) for config, kind in before if kind not in (None, "eager", "sdpa")]
    try:
        for config, _ in changed:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, kind in changed:  # the parts after the whole, which sets them too
            config._attn_implementation = kind


def _configurations(config: Any) -> Iterator[Any]:
    if hasattr(config, "_attn_implementation"):
        yield config
        for name in getattr(config, "sub_configs", ()):
            yield from _configurations(getattr(config, name, None))


@contextlib.contextmanager
def _hooks_outside(root: nn.Module, mode: InFloat32) -> Iterator[None]:
    """Accelerate's hooks, which bring weights and take them away, see the weights' own dtypes."""
    before = {module: module._hf_hook for module in root.modules() if hasattr(module, "_hf_hook")}
    try:
        for module, hook in before.items():
            module._hf_hook = _Outside(hook, mode)  # type: ignore[assignment]
        yield
    finally:
        for module, hook in before.items():
            module._hf_hook = hook


class _Outside:
    """A hook of accelerate's that runs outside of the mode."""

    def __init__(self, hook: Any, mode: InFloat32) -> None:
        self.no_grad = hook.no_grad
        self._hook = hook
        self._mode = mode

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._mode.paused():
            return self._hook.pre_forward(*args, **kwargs)

    def post_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._mode.paused():
            return self._hook.post_forward(*args, **kwargs)


def _not_compiled() -> contextlib.AbstractContextManager[Any]:
    set_stance = getattr(torch.compiler, "set_stance", None)  # PyTorch 2.6
    return contextlib.nullcontext() if set_stance is None else set_stance("force_eager")
