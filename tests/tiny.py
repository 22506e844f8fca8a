"""A tiny seeded T5, its tokenizer and sentences for it, as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

WORDS = ["the", "page", "of", "a", "user", "is", "not", "valid", "please", "enter", "your", "new", "password"]
SIZES = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def save_tokenizer(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)


def save_model(
    folder: Path, cls: Any = transformers.T5ForConditionalGeneration, scale: float = 1.0, references: bool = True
) -> Path:
    torch.manual_seed(0)
    model = cls(transformers.T5Config(**SIZES, decoder_start_token_id=0))
    with torch.no_grad():
        model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.mul_(scale)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    lines = [
        {"task": f"translate English to {language}: ", "source": " ".join(WORDS[i : i + 4]), "target": WORDS[i]}
        for i in range(5)
        for language in ("German", "French")
    ]
    if not references:
        lines = [{"source": line["source"]} for line in lines]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder
