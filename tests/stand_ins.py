"""Small seeded models of the shapes that the guides are for, with a residual stream that outgrows fp16."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers

SIZES = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_heads": 4, "num_layers": 4}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
LARGE = 20_000.0  # by which one channel of each feed-forward's output is larger than the others


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A model in miniature."""

    model: str
    config: str
    options: dict[str, Any]

    def save(self, folder: Path) -> Path:
        """The model in fp32, with a tokenizer."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**SIZES, **self.options, decoder_start_token_id=0)
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".wo.weight"):
                    parameter[0] *= LARGE
                elif name.endswith((".wi.weight", ".wi_1.weight")):
                    parameter *= 8
        model.save_pretrained(folder)
        tiny.save_tokenizer(folder)
        return folder


STAND_INS = {
    "flan-t5-on-t4": StandIn("T5ForConditionalGeneration", "T5Config", GATED),
    "diffusion-text-encoder": StandIn("T5EncoderModel", "T5Config", GATED),
    "prott5-embeddings": StandIn("T5EncoderModel", "T5Config", {}),
    "mt5-fine-tuning": StandIn("MT5ForConditionalGeneration", "MT5Config", GATED),
}
