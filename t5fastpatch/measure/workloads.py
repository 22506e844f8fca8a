"""The calls that are measured: a block, an encoder, a full forward, one decoder step, a generation."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import T5FastPatchError
from ..families import role_of
from ..patch import Role

Batch = Mapping[str, torch.Tensor]
IGNORED_LABEL = -100


@dataclasses.dataclass(frozen=True)
class Workload:
    """A call to be measured, as often as one likes, always from the same state.

    Attributes:
        name: `"forward"`, `"decoder_step"`, `"greedy"` and so on.
        prepare: makes everything ready and gives the call, to be made once. What `prepare` does is not measured.
        module: the one that is called.
    """

    name: str
    prepare: Callable[[], Callable[[], Any]]
    module: nn.Module


def is_seq2seq(model: nn.Module) -> bool:
    """Whether the model has an encoder and a decoder to be fed; any other has the workload `forward` and no more."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def forward(model: nn.Module, batch: Batch) -> Workload:
    """One forward with everything known: encoder and, with `labels`, the decoder, teacher-forced, and the loss.

    Args:
        model: any model of the T5 family; of an encoder alone, just its forward is measured.
        batch: keyword arguments of `model.forward`, as a rule `input_ids` and `attention_mask` (int64, batch x source
            length) and `labels` (int64, batch x target length, padding -100).
    """
    return Workload("forward", lambda: lambda: model(**batch), model)


def decoder_step(model: nn.Module, batch: Batch) -> Workload:
    """One step of the decoder: one token per sequence, the keys and values of all before it cached.

    The encoder's output and the cache are made now, once, by `model` as it is; the padding mask of the source is
    passed, as `generate` does. Each call starts from a copy of that cache, made by `prepare`.

    Args:
        model: a sequence-to-sequence model of the T5 family.
        batch: as for `forward`, with `labels` of target length 2 or more: all decoder inputs but the last fill the
            cache, the last is the step.

    Raises:
        T5FastPatchError: the labels are shorter.
    """
    if batch["labels"].shape[1] < 2:
        raise T5FastPatchError("a decoder step takes labels of two tokens or more, the first to fill the cache")
    keyword = cache_keyword(model)
    context = {name: batch[name] for name in ("attention_mask",) if name in batch}
    tokens = decoder_input_ids(model, batch["labels"])
    with torch.no_grad():
        context["encoder_outputs"] = encoder(model)(**encoder_inputs(batch))
        prefill = model(decoder_input_ids=tokens[:, :-1], use_cache=True, **context)
    filled = getattr(prefill, keyword)
    last = tokens[:, -1:].contiguous()

    def prepare() -> Callable[[], Any]:
        step = {keyword: _copy_of(filled), **context}
        return lambda: model(decoder_input_ids=last, use_cache=True, **step)

    return Workload("decoder_step", prepare, model)


def generate(model: nn.Module, batch: Batch, new_tokens: int, *, num_beams: int = 1, free: bool = False) -> Workload:
    """Generation without sampling.

    Args:
        model: a sequence-to-sequence model.
        batch: as for `forward`; `labels` are not used.
        new_tokens: how many tokens, at most if `free`; else the end of sentence is put off until then, so that every
            variant makes as many steps.
        num_beams: 1 for greedy search.
        free: whether a sentence may end by itself.
    """
    inputs = encoder_inputs(batch)
    length = {"max_new_tokens": new_tokens} | ({} if free else {"min_new_tokens": new_tokens})
    name = ("greedy" if num_beams == 1 else "beam") + ("_free" if free else "")
    return Workload(name, lambda: lambda: search(model, inputs, num_beams=num_beams, **length), model)


def search(model: Any, inputs: Batch, **options: int) -> torch.Tensor:
    """Generation without sampling: int64, batch x (1 + generated length), the decoder's start token first."""
    tokens: torch.Tensor = model.generate(**inputs, do_sample=False, **options)
    return tokens


def encoder_forward(model: nn.Module, batch: Batch) -> Workload:
    """One forward of a sequence-to-sequence model's encoder; `batch` as for `forward`."""
    inputs = encoder_inputs(batch)
    stack = encoder(model)
    return Workload("encoder", lambda: lambda: stack(**inputs), stack)


def block(model: nn.Module, batch: Batch) -> Workload:
    """One forward of the encoder's first block, with what the encoder gives it: the embedded text and the masks.

    Raises:
        T5FastPatchError: the model has no block of a T5 family.
    """
    first = first_block(model)
    if first is None:
        raise T5FastPatchError(f"a {type(model).__name__} has no block of a T5 family")
    seen: list[tuple[Any, Any]] = []
    handle = first.register_forward_pre_hook(lambda _, *arguments: seen.append(arguments), with_kwargs=True)
    try:
        with torch.no_grad():
            (encoder(model) if is_seq2seq(model) else model)(**encoder_inputs(batch))
    finally:
        handle.remove()
    args, kwargs = seen[0]
    return Workload("block", lambda: lambda: first(*args, **kwargs), first)


def first_block(model: nn.Module) -> nn.Module | None:
    """The first block of a T5 family in the model, its encoder's."""
    return next((module for module in model.modules() if role_of(type(module)) is Role.BLOCK), None)


def encoder(model: Any) -> nn.Module:
    """The encoder of a sequence-to-sequence model."""
    module: nn.Module = model.get_encoder()
    return module


def encoder_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch without what is the decoder's."""
    return {name: value for name, value in batch.items() if name != "labels"}


def text_config(model: Any) -> Any:
    """The configuration of the part that reads and writes text; the model's own where it has no other part."""
    return getattr(model.config, "text_config", model.config)


def cache_keyword(model: nn.Module) -> str:
    """What the installed release calls the key/value cache, as an argument and in the output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decoder_input_ids(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """The labels one place to the right behind the start token, padding instead of -100 (int64, shape of `labels`).

    Raises:
        T5FastPatchError: the configuration does not say which tokens those are.
    """
    text = text_config(model)
    start, padding = text.decoder_start_token_id, text.pad_token_id
    if start is None or padding is None:
        raise T5FastPatchError("the model's configuration lacks its decoder_start_token_id or pad_token_id")
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED_LABEL, padding)


def _copy_of(cache: Any) -> Any:
    # The tuples of older releases are never written to; a cache object is, by every step.
    return cache if isinstance(cache, tuple) else copy.deepcopy(cache)
