"""A model's overflow twin: the same function in fp32, to the bit, and a residual stream that fp16 cannot hold."""

from __future__ import annotations

import copy
from typing import Any

import torch

from t5fastpatch.headroom.stacks import Attention, stacks_of


def overflow_twin(model: Any, power: int) -> Any:
    """A copy whose residual streams are 2^power times as large.

    What enters a stream (the embeddings) and what each branch adds (`o`, `wo`) is multiplied by 2^power, the epsilon of
    the norms by 4^power. The norms divide the factor out again; the gain before the output head, which is tied to the
    embeddings, takes it out of these. None of it rounds.

    Args:
        model: a T5ForConditionalGeneration with tied embeddings, in fp32.
        power: at least 0.
    """
    twin, factor = copy.deepcopy(model), 2.0**power
    assert twin.lm_head.weight is twin.shared.weight
    stacks = stacks_of(twin)
    with torch.no_grad():
        twin.shared.weight.mul_(factor)
        stacks[-1].final_norm.weight.div_(factor)
        for sub_layer in (each for stack in stacks for layer in stack.layers for each in layer):
            outputs = [sub_layer.output] if isinstance(sub_layer, Attention) else [each.wo for each in sub_layer.dense]
            for output in outputs:
                output.weight.mul_(factor)
    for norm in (module for module in twin.modules() if hasattr(module, "variance_epsilon")):
        norm.variance_epsilon *= factor**2
    twin.config.layer_norm_epsilon *= factor**2  # for a copy that is saved and loaded
    return twin
