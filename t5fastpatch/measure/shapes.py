"""Models with the shape of well-known ones and random weights: what runs how fast does not depend on the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from ..errors import NotFoundError

_T5 = {"decoder_start_token_id": 0, "vocab_size": 32128}
_XXL = {
    **_T5,
    "d_model": 4096,
    "d_ff": 10240,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A class of transformers and what its configuration says beyond the defaults."""

    model: str
    config: str
    sizes: Mapping[str, Any]


SHAPES = {
    "t5-small": Shape("T5ForConditionalGeneration", "T5Config", _T5),
    "t5-base": Shape(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
    "t5-large": Shape(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    ),
    "t5-xxl-encoder": Shape("T5EncoderModel", "T5Config", {**_XXL, "num_layers": 24}),
    "t5-xxl-encoder-8": Shape("T5EncoderModel", "T5Config", {**_XXL, "num_layers": 8}),
    "mbart": Shape("MBartForConditionalGeneration", "MBartConfig", {"vocab_size": 32128, "decoder_start_token_id": 2}),
    "bert": Shape("BertModel", "BertConfig", {}),
    "gpt2": Shape("GPT2LMHeadModel", "GPT2Config", {}),
}
"""`t5-xxl-encoder-8` has 8 of its 24 layers; the last three are controls, to which no patch applies."""


def random_model(shape: str, device: torch.device, seed: int = 0, **sizes: Any) -> Any:
    """A model of a known shape in fp32 and evaluation mode, its random weights decided by the seed.

    Args:
        shape: a key of `SHAPES`.
        device: where the weights are made.
        seed: of the weights.
        sizes: of the configuration, in the place of the shape's own.

    Raises:
        NotFoundError: there is no such shape, or transformers has no class for it.
    """
    if shape not in SHAPES:
        raise NotFoundError(f"no shape is called {shape!r}: there are {', '.join(SHAPES)}")
    known = SHAPES[shape]
    config = getattr(transformers, known.config)(**{**known.sizes, **sizes})
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = getattr(transformers, known.model)(config).eval()
        # On the meta device not every release has done it.
        model.tie_weights()
        return model
