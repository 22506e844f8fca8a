"""The stacks of a model, read as sub-layers: what norms, what multiplies, what is added to the residual stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..families import family_of, role_of
from ..findings import upstream_class
from ..patch import Role


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention sub-layer.

    Attributes:
        norm: the RMS norm that its input goes through.
        module: upstream's attention module.
        cross: whether keys and values come from another stack's output.
        query, key, value, output: its four products, nn.Linear or what stands in their place.
        dropout: what its output goes through on the way to the residual stream, or `None`.
    """

    norm: nn.Module
    module: nn.Module
    cross: bool
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    dropout: nn.Module | None


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A feed-forward sub-layer.

    Attributes:
        norm: the RMS norm that its input goes through.
        dense: upstream's dense modules, each with `wi` or `wi_0` and `wi_1`, `act` and `wo`: one, or every expert.
        sparse: the module that routes tokens to experts, or `None`.
        dropout: what its output goes through on the way to the residual stream, or `None`.
    """

    norm: nn.Module
    dense: tuple[nn.Module, ...]
    sparse: nn.Module | None
    dropout: nn.Module | None


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """An encoder or a decoder: everything from its embeddings to its final norm.

    Attributes:
        name: the module's path in the model, "encoder" say; the model's class name where it is the model.
        family: its family's name.
        module: upstream's module.
        layers: the sub-layers of each block, in the order in which they run.
        final_norm: the norm at its end.
        decoder: whether it attends to its past only, and to another stack if it has cross-attention.
        embedding: the table of token embeddings, or `None`.
        entry: what enters the residual stream: "tokens", "images", "tokens and images" or "spectrograms".
        source: the stack whose output its cross-attention reads, or `None`.
    """

    name: str
    family: str
    module: nn.Module
    layers: tuple[tuple[Attention | FeedForward, ...], ...]
    final_norm: nn.Module
    decoder: bool
    embedding: nn.Module | None
    entry: str
    source: Stack | None

    @property
    def cross(self) -> bool:
        """Whether it has cross-attention."""
        return any(isinstance(each, Attention) and each.cross for layer in self.layers for each in layer)


def stacks_of(root: nn.Module) -> list[Stack]:
    """The stacks of the T5 family in a model, encoders before the decoders that read them."""
    found: list[Stack] = []
    modules = [(name, module) for name, module in root.named_modules() if role(module) is Role.STACK]
    for name, module in sorted(modules, key=lambda each: _is_decoder(each[1])):
        encoders = [stack for stack in found if not stack.decoder and stack.family == _family(module)]
        source = encoders[0] if _is_decoder(module) and len(encoders) == 1 else None
        found.append(_read(name or type(root).__name__, module, source))
    return found


def role(module: nn.Module) -> Role | None:
    """The role that a module plays in its family, whether it is patched or not."""
    cls = upstream_class(type(module))
    return role_of(cls) if cls is not None else None


def _read(name: str, module: nn.Module, source: Stack | None) -> Stack:
    blocks: Any = (
        getattr(module, "block", None) or getattr(module, "layer", None) or module.get_submodule("encoder.layer")
    )
    final_norm = getattr(module, "final_layer_norm", None) or module.get_submodule("layernorm")
    layers = tuple(tuple(_sub_layers(block)) for block in blocks)
    embedding = getattr(module, "embed_tokens", None)
    decoder = _is_decoder(module)
    return Stack(name, _family(module), module, layers, final_norm, decoder, embedding, _entry(module), source)


def _sub_layers(block: nn.Module) -> Iterator[Attention | FeedForward]:
    holders = {id(child): parent for parent in block.modules() for child in parent.children()}
    for name, module in block.named_modules():
        played = role(module)
        if played is Role.ATTENTION:
            yield _attention(name, module, holders[id(module)])
        elif played is Role.EXPERTS:
            dense = tuple(each for each in module.modules() if role(each) is Role.FEED_FORWARD)
            yield _feed_forward(dense, module, holders[id(module)])
        elif played is Role.FEED_FORWARD and ".experts." not in name:
            yield _feed_forward((module,), None, holders[id(module)])


def _norm_before(holder: nn.Module, part: str) -> nn.Module:
    # Pix2Struct's vision layer holds both sub-layers itself.
    norm = getattr(holder, "layer_norm", None) or getattr(holder, f"pre_{part}_layer_norm")
    assert isinstance(norm, nn.Module)
    return norm


def _feed_forward(dense: tuple[nn.Module, ...], sparse: nn.Module | None, holder: nn.Module) -> FeedForward:
    return FeedForward(_norm_before(holder, "mlp"), dense, sparse, getattr(holder, "dropout", None))


def _attention(name: str, module: nn.Module, holder: nn.Module) -> Attention:
    cross = "EncDecAttention" in name or "encoder_decoder_attention" in name
    names = ("q", "k", "v", "o") if hasattr(module, "q") else ("query", "key", "value", "output")
    query, key, value, output = (getattr(module, each) for each in names)
    norm, dropout = _norm_before(holder, "attention"), getattr(holder, "dropout", None)
    return Attention(norm, module, cross, query, key, value, output, dropout)


def _is_decoder(module: nn.Module) -> bool:
    name = type(module).__name__
    return name == "Pix2StructTextModel" or bool(getattr(module, "is_decoder", False))


def _entry(module: nn.Module) -> str:
    if _is_decoder(module):
        return "tokens"
    other = {"pix2struct": "images", "udop": "tokens and images", "pop2piano": "spectrograms"}
    return other.get(_family(module), "tokens")


def _family(module: nn.Module) -> str:
    cls = upstream_class(type(module))
    family = family_of(cls) if cls is not None else None
    assert family is not None
    return family.name
