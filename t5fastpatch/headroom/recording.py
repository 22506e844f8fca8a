"""The largest magnitude at every place of a model, taken by hooks while it runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .places import Magnitude, Place
from .stacks import Attention, FeedForward, Stack

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.einsum, torch.bmm)
_SDPA = nn.functional.scaled_dot_product_attention
_SOFTMAXES = (nn.functional.softmax, torch.softmax, torch.Tensor.softmax, _SDPA)


class Peaks:
    """The largest absolute values so far, by key, kept on their devices so that nothing waits for them."""

    def __init__(self) -> None:
        self._values: dict[Any, torch.Tensor] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def __getitem__(self, key: Any) -> float:
        """What was taken, infinite where any of it was NaN; 0 where nothing was."""
        value = float(self._values.get(key, 0.0))
        return math.inf if math.isnan(value) else value

    def take(self, key: Any, value: torch.Tensor) -> None:
        """Takes note of a tensor."""
        if value.numel():
            peak, known = _peak(value), self._values.get(key)
            self._values[key] = peak if known is None else torch.maximum(known.to(peak.device), peak)


class Recorder(contextlib.ExitStack):
    """Hooks at every place of the stacks of a model, for as long as the `with` block lasts.

    Attributes:
        scores: the mode that takes note of the attention scores, to be entered after any other.
    """

    def __init__(self, root: nn.Module, stacks: Sequence[Stack], peaks: Peaks) -> None:
        super().__init__()
        self.scores = Scores(peaks)
        self._peaks = peaks
        for stack in stacks:
            self._hook_stack(stack)
        for table in dict.fromkeys(table for stack in stacks for table in _tables(stack.module)):
            self._take_output(table, table)
        for stack, head in _heads(root, stacks):
            self._take_output(head, (stack.name, None, Place.LOGITS))

    def _hook_stack(self, stack: Stack) -> None:
        # What a norm reads is the residual stream behind the sub-layer before it.
        before: int | None = None
        for layer, sub_layers in enumerate(stack.layers):
            for each in sub_layers:
                self._take_input(each.norm, (stack.name, before, Place.STREAM))
                before = layer
                if isinstance(each, Attention):
                    self._hook_attention(stack.name, layer, each)
                else:
                    self._hook_feed_forward(stack.name, layer, each)
        self._take_input(stack.final_norm, (stack.name, before, Place.STREAM))

    def _hook_attention(self, stack: str, layer: int, attention: Attention) -> None:
        def begin(module: nn.Module, args: Any) -> None:
            self.scores.begin(module)

        self.callback(attention.module.register_forward_pre_hook(begin).remove)
        for projection in (attention.query, attention.key, attention.value):
            self._take_output(projection, (stack, layer, Place.PROJECTIONS))
        self._take_output(attention.output, (stack, layer, Place.ATTENTION))

    def _hook_feed_forward(self, stack: str, layer: int, feed_forward: FeedForward) -> None:
        for dense in feed_forward.dense:
            if hasattr(dense, "wi_0"):
                self._take_output(dense.wi_0, (stack, layer, Place.GATE))
            self._take_output(dense.wi_1 if hasattr(dense, "wi_1") else dense.wi, (stack, layer, Place.HIDDEN))
            self._take_input(dense.wo, (stack, layer, Place.HIDDEN))
            self._take_output(dense.wo, (stack, layer, Place.FEED_FORWARD))

    def _take_input(self, module: Any, key: Any) -> None:
        def hook(module: nn.Module, args: Any) -> None:
            self._peaks.take(key, args[0])

        self.callback(module.register_forward_pre_hook(hook).remove)

    def _take_output(self, module: Any, key: Any) -> None:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self._peaks.take(key, output)

        self.callback(module.register_forward_hook(hook).remove)


class Scores(TorchFunctionMode):
    """Takes note of the last product before the softmax, or inside of SDPA, once an attention's forward has begun."""

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()
        self._peaks = peaks
        self._attention: nn.Module | None = None
        self._product: torch.Tensor | None = None

    def begin(self, attention: nn.Module) -> None:
        """The forward of an attention begins."""
        self._attention, self._product = attention, None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._attention is not None and func is _SDPA:
            query, key, *_ = args
            self._product = _peak(query @ key.transpose(-2, -1))
        if self._product is not None and func in _SOFTMAXES:
            self._peaks.take(self._attention, self._product)
            self._attention = self._product = None
        result = func(*args, **(kwargs or {}))
        if self._attention is not None and func in _PRODUCTS:
            self._product = _peak(result)
        return result


def magnitudes(stacks: Iterable[Stack], peaks: Peaks) -> Iterator[Magnitude]:
    """What was taken, in the order of stacks, blocks and places."""
    for stack in stacks:
        for layer in (None, *range(len(stack.layers))):
            sub_layers = () if layer is None else stack.layers[layer]
            for place in Place:
                key = (stack.name, layer, place)
                taken = [peaks[key]] if key in peaks else []
                if place is Place.SCORES:
                    taken = list(_scores(stack, sub_layers, peaks))
                if taken:
                    fixed = place is Place.HIDDEN and hidden_is_fixed(sub_layers)
                    yield Magnitude(stack.name, layer, place, max(taken), fixed)


def hidden_is_fixed(sub_layers: Iterable[Attention | FeedForward]) -> bool:
    """Whether rescaling cannot reach a block's hidden products: their activation is neither gated nor ReLU."""
    dense = [dense for each in sub_layers if isinstance(each, FeedForward) for dense in each.dense]
    return not all(hasattr(each, "wi_0") or isinstance(getattr(each, "act", None), nn.ReLU) for each in dense)


def _scores(stack: Stack, sub_layers: Iterable[Attention | FeedForward], peaks: Peaks) -> Iterator[float]:
    """Of each attention the largest product plus the largest position bias."""
    for each in sub_layers:
        if isinstance(each, Attention) and each.module in peaks:
            # Its own tables, or those that its stack shares.
            tables = [] if each.cross else _tables(each.module) or _tables(stack.module)
            yield peaks[each.module] + sum(peaks[table] for table in tables)


def _tables(module: nn.Module) -> list[nn.Module]:
    """The tables of position biases in a module."""
    return [each for name, each in module.named_modules() if name.endswith("relative_attention_bias")]


def _heads(root: nn.Module, stacks: Sequence[Stack]) -> Iterator[tuple[Stack, nn.Module]]:
    """What gives logits, with the last stack whose output it reads: the decoder's, where there is one."""
    for holder in root.modules():
        head = getattr(holder, "lm_head", None)
        if isinstance(head, nn.Module):
            inside = set(holder.modules())
            yield from [(stack, head) for stack in stacks if stack.module in inside][-1:]


def _peak(value: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, NaN where there is one."""
    low, high = torch.aminmax(value.detach())
    return torch.maximum(-low, high)
