"""Headroom as observed on data: the largest magnitude at every place, in fp32, whatever the model is held in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import NotT5Error, T5FastPatchError, WrongTypeError
from ..install import LOCK
from ..loading import described
from .places import Headroom
from .recording import Peaks, Recorder, magnitudes
from .reference import as_reference
from .stacks import Stack, stacks_of

# Of a greedy generation, where a batch says nothing of the decoder.
NEW_TOKENS = 16
_DECODER_INPUTS = {"labels", "decoder_input_ids", "decoder_inputs_embeds"}


def observe(root: nn.Module, batches: Iterable[Any], stacks: Sequence[Stack] | None = None) -> Headroom:
    """Runs a model over batches and takes the largest absolute value at every place of every block.

    The model runs as stock does in fp32: infinities and clamps of a model that is held in half precision are not seen.
    It is left as it was, bit for bit, also after an error.

    Args:
        root: a model of the T5 family, or one that contains it; patched or not, on any device.
        batches: each a mapping of keyword arguments, passed as it is, or a tensor of input ids (int64, batch x length).
            An encoder-decoder model whose batch holds neither labels nor decoder inputs generates `NEW_TOKENS` tokens
            greedily.
        stacks: its stacks; read from the model without it.

    Returns:
        A magnitude per stack, block and place, infinite where a value is infinite or NaN in fp32 too. The residual
        stream of block `None` is what enters the first block. A feed-forward's hidden product is what `wo` reads or, if
        larger, what `wi_1` (`wi`) gives; its gate is what `wi_0` gives, before the activation. Scores are the largest
        product of a query and a key that is computed, those that a mask then hides too, plus the largest position bias:
        never below the largest sum, and above it by at most twice the bias.

    Raises:
        NotT5Error: the model has no stack of the T5 family.
        WrongTypeError: `batches`, or one of them, is not of the kind described.
        T5FastPatchError: there is no batch, or the model raises over one.
    """
    stacks = stacks_of(root) if stacks is None else stacks
    if not stacks:
        raise NotT5Error(f"this {type(root).__name__} has no stack of the T5 family")
    if isinstance(batches, Mapping | torch.Tensor | str) or not isinstance(batches, Iterable):
        raise WrongTypeError(f"batches are an iterable of batches, not a {type(batches).__name__}: put it into a list")
    generates = hasattr(root, "generate") and any(stack.cross for stack in stacks)
    peaks, count = Peaks(), 0
    for count, batch in enumerate(batches, 1):
        arguments = _arguments(root, batch, count)
        with LOCK, Recorder(root, stacks, peaks) as recorder, as_reference(root), recorder.scores:
            _call(root, arguments, count, generates and not _DECODER_INPUTS & set(arguments))
    if not count:
        raise T5FastPatchError("there is no batch to observe the model on")
    found = tuple(magnitudes(stacks, peaks))
    reached = dict.fromkeys(each.stack for each in found)
    return Headroom(
        "data",
        found,
        assumes=dict.fromkeys(reached, (f"inputs like those observed (batches: {count})",)),
        unproven={stack.name: "no batch reached it" for stack in stacks if stack.name not in reached},
    )


def _arguments(root: nn.Module, batch: Any, number: int) -> dict[str, Any]:
    if isinstance(batch, torch.Tensor):
        return {getattr(root, "main_input_name", "input_ids"): batch}
    if not isinstance(batch, Mapping):
        kind, hint = type(batch).__name__, "; tokenize texts first" if isinstance(batch, str) else ""
        raise WrongTypeError(
            f"batch {number} is a {kind}: give a dict of keyword arguments, or a tensor of input ids{hint}"
        )
    return dict(batch)


def _call(root: Any, arguments: dict[str, Any], number: int, generates: bool) -> None:
    try:
        if generates:
            root.generate(**arguments, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
        else:
            root(**arguments)
    except Exception as error:
        how = "generate from" if generates else "run on"
        hint = "; with labels or decoder_input_ids in it, nothing is generated" if generates else ""
        raise T5FastPatchError(f"the model does not {how} batch {number} ({described(error)}){hint}") from error
