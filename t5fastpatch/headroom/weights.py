"""The bound from the weights: how large anything in a model can become, for every input there is."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import NotT5Error
from . import sublayers
from .places import FP16_MAX, Headroom, Magnitude, Place
from .plain import Names, NoProofError, check_code, enlargement, table_of
from .stacks import Attention, FeedForward, Stack, stacks_of
from .sublayers import Bounds, Normed

_SUM_ROUNDED = 1 + 2.0**-11


def bound(root: nn.Module, stacks: Sequence[Stack] | None = None) -> Headroom:
    """Bounds the largest absolute value at every place of a model, for all token inputs at once.

    An RMS norm before each sub-layer bounds what this can add, so the residual stream is at most the largest embedding
    and the sum of these bounds. They hold for the weights as they are now, in fp32 and fp16 (`sublayers` says how
    rounding is counted), in eval and in training mode with the present dropout, for patched models as for others, and
    are the figures of the unscaled model. Nothing runs but products of weights: one sub-layer after the other is read
    in fp64, on the device where it lies.

    Args:
        root: the model.
        stacks: its stacks, or `None` for all.

    Returns:
        One magnitude for each stack, block and place, with source "weights". `unproven` names the stacks of which
        something cannot be bounded: their magnitudes, or those of their residual stream, are then missing.

    Raises:
        NotT5Error: the model has no stack of the T5 family.
    """
    found = stacks_of(root) if stacks is None else list(stacks)
    if not found:
        raise NotT5Error(f"this {type(root).__name__} has no encoder or decoder of the T5 family to bound")
    names = Names(root)
    magnitudes: list[Magnitude] = []
    assumes, unproven = {}, {}
    with _modes_aside():
        for stack in found:
            one = _OfStack(root, stack, names)
            with one.reasons():
                one.read()
            magnitudes += one.magnitudes
            if one.why:
                unproven[stack.name] = "; ".join(one.why)
            assumes[stack.name] = tuple(one.assumes)
    return Headroom("weights", tuple(magnitudes), assumes, unproven)


@contextlib.contextmanager
def _modes_aside() -> Iterator[None]:
    """The figures are numbers, in the dtypes and on the devices that are asked for, whatever mode the caller is in."""
    with torch.no_grad(), torch.device("cpu"), _disable_current_modes(), contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class _OfStack:
    """The bounds of one stack."""

    def __init__(self, root: nn.Module, stack: Stack, names: Names) -> None:
        self.root, self.stack, self.names = root, stack, names
        self.magnitudes: list[Magnitude] = []
        self.assumes = ["products are summed in fp32, and there are at most 65,536 keys"]
        self.why: list[str] = []

    @contextlib.contextmanager
    def reasons(self) -> Iterator[None]:
        """Keeps the reason why something has no bound."""
        try:
            yield
        except NoProofError as error:
            self.why.append(str(error))

    def read(self) -> None:
        """Reads the sub-layers, then what enters the residual stream, then the head."""
        check_code(self.stack, self.names)
        self._assume()
        branches = []
        for number, layer in enumerate(self.stack.layers):
            bounds = [self._sub_layer(each) for each in layer]
            self._add_places(number, bounds)
            branches.append([each.branch.cpu() for each in bounds])
        with self.reasons():
            self._add_stream(branches)
        with self.reasons():
            self._add_logits()

    def _assume(self) -> None:
        if self.stack.source is not None:
            self.assumes.append(f"what cross-attention reads comes from {self.stack.source.name}")
        if self.stack.decoder:
            self.assumes.append("keys and values in a cache were made by the model itself, a prefix's are not")

    def _sub_layer(self, sub_layer: Attention | FeedForward) -> Bounds:
        if isinstance(sub_layer, FeedForward):
            return sublayers.feed_forward(sub_layer, self.names)
        bias = 0.0 if sub_layer.cross else _largest_bias(self.stack, sub_layer, self.names)
        return sublayers.attention(sub_layer, self._reads(sub_layer), bias, self.names)

    def _reads(self, sub_layer: Attention) -> list[Normed]:
        """What keys and values are made of."""
        if sub_layer.cross:
            if self.stack.source is None:
                raise NoProofError("its cross-attention reads an encoder that is not of its family")
            return [final_state(self.stack.source, self.names)]
        # LongT5's transient-global attention norms the sums of blocks of states once more.
        aggregates = getattr(sub_layer.module, "global_input_layer_norm", None)
        states = Normed.by(sub_layer.norm, self.names)
        if aggregates is None:
            return [states]
        module: Any = sub_layer.module
        largest = float(states.largest.max()) * module.global_block_size
        if not largest <= FP16_MAX:
            raise NoProofError(f"sums of blocks of normed states can reach {largest:.3g}")
        return [states, Normed.by(aggregates, self.names)]

    def _add(self, layer: int | None, place: Place, value: float, fixed: bool = False) -> None:
        self.magnitudes.append(Magnitude(self.stack.name, layer, place, value, fixed))

    def _add_places(self, number: int, bounds: list[Bounds]) -> None:
        for place in Place:
            values = [each.largest[place] for each in bounds if place in each.largest]
            if values:
                self._add(number, place, max(values), place is Place.HIDDEN and any(each.fixed for each in bounds))

    def _add_stream(self, branches: list[list[torch.Tensor]]) -> None:
        if self.stack.entry != "tokens":
            raise NoProofError(f"{self.stack.entry} enter its residual stream, which its weights do not bound")
        if self.stack.embedding is None:
            raise NoProofError("it has no table of embeddings, so anything may enter its residual stream")
        largest = float(table_of(self.stack.embedding, self.names).abs().max())
        if not largest < torch.inf:
            raise NoProofError(f"the table {self.names.of(self.stack.embedding)} holds NaN or infinity")
        self.assumes.append(f"what enters is its own embeddings, or a caller's of at most {largest:.9g}")
        stream = torch.tensor(largest * enlargement(_dropout(self.stack)) * _SUM_ROUNDED, dtype=torch.float64)
        self._add(None, Place.STREAM, float(stream))
        for number, added in enumerate(branches):
            for branch in added:
                stream = (stream + branch) * _SUM_ROUNDED
            self._add(number, Place.STREAM, float(stream.max()))

    def _add_logits(self) -> None:
        for holder in self.root.modules():
            owns = holder is self.stack.module or getattr(holder, "decoder", None) is self.stack.module
            head = getattr(holder, "lm_head", None)
            if owns and isinstance(head, nn.Module):
                state = final_state(self.stack, self.names)
                if _scales_logits(holder):
                    state = dataclasses.replace(state, radius=state.radius * len(state.gain) ** -0.5)
                self._add(None, Place.LOGITS, sublayers.head_logits(head, state, self.names))


def final_state(stack: Stack, names: Names) -> Normed:
    """A stack's output: its final norm's, and dropout."""
    return Normed.by(stack.final_norm, names, enlargement(_dropout(stack)))


def _dropout(stack: Stack) -> Any:
    return getattr(stack.module, "dropout", None)


def _largest_bias(stack: Stack, attention: Attention, names: Names) -> float:
    """The most that a position bias can add to a score: the first block's tables serve those that have none."""
    first = next(each for each in stack.layers[0] if isinstance(each, Attention))
    own = _tables(attention.module) or _tables(first.module)
    # UDOP's stack sums several biases.
    added = getattr(stack.module, "relative_bias", None)
    tables = own + ([each for bias in added.modules() for each in _tables(bias)] if added is not None else [])
    return sum(float(table_of(table, names).abs().max()) for table in tables)


def _tables(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if name.endswith("relative_attention_bias")]


def _scales_logits(holder: Any) -> bool:
    """Whether a head multiplies its states by d_model**-0.5: if its forward does, and its configuration asks for it."""
    try:
        source = inspect.getsource(type(holder).forward)
    except (OSError, TypeError):
        return False
    asked = "scale_decoder_outputs" if "scale_decoder_outputs" in source else "tie_word_embeddings"
    return "**-0.5" in source and f"config.{asked}" in source and bool(getattr(holder.config, asked, False))
