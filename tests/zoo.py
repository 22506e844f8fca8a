"""A tiny seeded model of each family, and inputs for it, on every supported release."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
SPECIAL = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}


def ids(length: int, seed: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def right_padded(length: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return mask


def text_inputs(length: int = 16) -> dict[str, Any]:
    return {"input_ids": ids(length, 1), "attention_mask": right_padded(length)}


def udop_inputs() -> dict[str, Any]:
    corners = torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(4)) / 2
    return {**text_inputs(), "bbox": torch.cat([corners, corners + 0.4], dim=-1)}


def pix2struct_inputs() -> dict[str, Any]:
    patches = torch.randn(2, 16, 4 * 4 * 3 + 2, generator=torch.Generator().manual_seed(4))
    patches[:, :, :2] = torch.arange(1, 17)[None, :, None] % 5 + 1  # rows and columns, from 1
    return {"flattened_patches": patches, "attention_mask": right_padded(16)}


def t5_like(family: str, prefix: str, **more: Any) -> Any:
    config = getattr(transformers, f"{prefix}Config")
    return config(**{**COMMON, **SPECIAL, **more})


def pix2struct_config(**more: Any) -> Any:
    text = dict(vocab_size=VOCABULARY, hidden_size=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **SPECIAL, **more)
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8, "num_hidden_layers": 2}
    vision |= dict(num_attention_heads=4, patch_size=4, seq_len=16, **more)
    return transformers.Pix2StructConfig(text_config=text, vision_config=vision, **SPECIAL)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to build a model of a family."""

    name: str
    family: str
    model: str
    config: Callable[..., Any]
    inputs: Callable[[], dict[str, Any]] = text_inputs

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0, **more: Any) -> Any:
        """The model in fp32 and eval mode; weights as large as a trained model's, norm gains away from 1."""
        if not hasattr(transformers, self.model):
            pytest.skip(f"transformers {transformers.__version__} has no {self.model}")
        torch.manual_seed(seed)
        model = getattr(transformers, self.model)(self.config(**more)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 2.0)
        return model

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Skips where stock itself cannot run, or does not give a number."""
        if self.family == "switch_transformers" and transformers.__version__ == "5.0.0" and dtype != torch.float32:
            pytest.skip("stock Switch of 5.0.0 mixes fp32 and half in its router and raises")

    def batch(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Inputs and labels; float inputs in `dtype`."""
        inputs = self.inputs()
        if self.name == "longt5-local" and dtype == torch.float16:
            # Stock fills masked scores with -1e10, which is -inf in fp16: a block of padding alone becomes NaN.
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        return {**inputs, "labels": ids(6, 3)}


def block_arguments(block: Any, length: int) -> dict[str, Any]:
    """What a block of some releases wants beside its input, called by itself."""
    wanted = inspect.signature(block.forward).parameters
    return {"cache_position": torch.arange(length)} if "cache_position" in wanted else {}


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
KINDS = [
    Kind("t5", "t5", "T5ForConditionalGeneration", functools.partial(t5_like, "t5", "T5")),
    Kind("t5-v1.1", "t5", "T5ForConditionalGeneration", functools.partial(t5_like, "t5", "T5", **GATED)),
    Kind("mt5", "mt5", "MT5ForConditionalGeneration", functools.partial(t5_like, "mt5", "MT5", **GATED)),
    Kind("umt5", "umt5", "UMT5ForConditionalGeneration", functools.partial(t5_like, "umt5", "UMT5", **GATED)),
    Kind(
        "longt5-local",
        "longt5",
        "LongT5ForConditionalGeneration",
        functools.partial(t5_like, "longt5", "LongT5", encoder_attention_type="local", local_radius=7),
    ),
    Kind(
        "longt5-global",
        "longt5",
        "LongT5ForConditionalGeneration",
        functools.partial(
            t5_like,
            "longt5",
            "LongT5",
            encoder_attention_type="transient-global",
            local_radius=7,
            global_block_size=4,
        ),
    ),
    Kind(
        "switch",
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        functools.partial(
            t5_like, "switch_transformers", "SwitchTransformers", num_experts=4, num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1, expert_capacity=16, router_jitter_noise=0.0,
        ),
    ),
    Kind("pix2struct", "pix2struct", "Pix2StructForConditionalGeneration", pix2struct_config, pix2struct_inputs),
    Kind("udop", "udop", "UdopForConditionalGeneration", functools.partial(t5_like, "udop", "Udop"), udop_inputs),
    Kind(
        "pop2piano",
        "pop2piano",
        "Pop2PianoForConditionalGeneration",
        functools.partial(t5_like, "pop2piano", "Pop2Piano"),
    ),
]  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}
