"""What is measured: a model in fp32 and in half precision, its tokenizer and sentences for it."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import NotFoundError, NotT5Error, T5FastPatchError
from ..loading import checked_name, first_line, one_line_errors
from .workloads import IGNORED_LABEL, is_seq2seq

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
HELD_OUT = "heldout.jsonl"
HALF_DTYPES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A held-out sentence with its task prefix and, where there is one, its reference."""

    task: str
    source: str
    target: str | None


@dataclasses.dataclass(frozen=True)
class Subject:
    """The one fp32 and the one half-precision model of an ablation, both on `device` in evaluation mode."""

    name: str
    fp32: Any
    half: Any
    tokenizer: Any
    device: torch.device

    @property
    def seq2seq(self) -> bool:
        """Whether there is a decoder."""
        return is_seq2seq(self.fp32)

    @property
    def half_name(self) -> str:
        """`"fp16"` or `"bf16"`."""
        return "bf16" if self.half.dtype is torch.bfloat16 else "fp16"

    def batch(self, sentences: Sequence[Sentence], max_source_length: int, max_target_length: int) -> Batch:
        """The sentences as tensors on the device, padded to the longest: `input_ids` and `attention_mask` (int64,
        batch x source length) and, for a decoder, `labels` (int64, batch x target length, padding -100), which are
        the source again where a sentence has no reference."""
        batch = self._tokens([each.task + each.source for each in sentences], max_source_length)
        if self.seq2seq:
            targets = self._tokens([each.target or each.source for each in sentences], max_target_length)
            batch["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, IGNORED_LABEL)
        return batch

    def _tokens(self, texts: list[str], max_length: int) -> Batch:
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        return {name: tokens[name].to(self.device) for name in ("input_ids", "attention_mask")}


def load(model: str | None, dtype: str, device: str) -> Subject:
    """Loads the model twice, in fp32 and cast from there as `.half()` casts.

    Args:
        model: a local directory or a name on the hub; `None` for the embedded model.
        dtype: a key of `HALF_DTYPES`.
        device: as for `torch.device`.

    Raises:
        T5FastPatchError: there is no such model, dtype or device, or the model is not one of text to text.
    """
    half_dtype, place = _half_dtype(dtype), _device(device)
    name = str(DEMO_MODEL) if model is None else checked_name(model)
    with one_line_errors(name):
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        fp32 = _class_for(config).from_pretrained(name).float().eval().to(place)
    _check_tokenizer(name, tokenizer, config)
    half = copy.deepcopy(fp32).to(half_dtype)
    return Subject("the embedded model" if model is None else model, fp32, half, tokenizer, place)


def held_out(model: str | None) -> list[Sentence]:
    """The held-out sentences in the model's own directory, else those of the embedded model."""
    path = _held_out_path(model)
    if not path.is_file():
        raise T5FastPatchError(f"no held-out sentences: there is no {path}")
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        records = [json.loads(line) for line in lines if line.strip()]
        sentences = [Sentence(record.get("task", ""), record["source"], record.get("target")) for record in records]
    except (ValueError, KeyError, AttributeError) as error:
        raise T5FastPatchError(f"{path} does not hold one object a line with a source: {error!r}") from error
    if not sentences:
        raise T5FastPatchError(f"no held-out sentences: {path} is empty")
    return sentences


def held_out_source(model: str | None) -> str:
    """Where the held-out sentences are from, in words."""
    return "the embedded model's" if _held_out_path(model).parent == DEMO_MODEL else str(_held_out_path(model))


def _held_out_path(model: str | None) -> Path:
    own = Path(model or DEMO_MODEL).expanduser() / HELD_OUT
    return own if own.is_file() else DEMO_MODEL / HELD_OUT


def shuffled(sentences: Sequence[Sentence], seed: int) -> list[Sentence]:
    """The sentences in an order that the seed decides."""
    return random.Random(seed).sample(list(sentences), len(sentences))


def batches(sentences: Sequence[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Batches of like length, so that little is padded."""
    by_length = sorted(sentences, key=lambda each: len(each.source))
    for start in range(0, len(by_length), size):
        yield by_length[start : start + size]


def _check_tokenizer(name: str, tokenizer: Any, config: Any) -> None:
    # transformers makes up a tokenizer of its own where a folder has none.
    if Path(name).is_dir() and not any(Path(name).glob("*token*")) and not any(Path(name).glob("*.model")):
        raise NotFoundError(f"{name!r} has no tokenizer files")
    if len(tokenizer) > config.vocab_size:
        raise T5FastPatchError(
            f"the tokenizer of {name!r} has {len(tokenizer)} pieces, its model only {config.vocab_size} embeddings"
        )


def _half_dtype(name: str) -> torch.dtype:
    if name not in HALF_DTYPES:
        raise T5FastPatchError(f"no half-precision dtype is called {name!r}: there are {', '.join(HALF_DTYPES)}")
    return HALF_DTYPES[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise T5FastPatchError(f"no device {name!r} here: {first_line(error)}") from error
    if device.type not in ("cpu", "cuda"):
        raise T5FastPatchError(f"times are taken on cpu and cuda, not on {name!r}")
    return device


def _class_for(config: Any) -> Any:
    """The class to load: that of an encoder, or whichever generates text from text."""
    name = (getattr(config, "architectures", None) or [""])[0]
    if name.endswith("EncoderModel") and hasattr(transformers, name):
        return getattr(transformers, name)
    if name and not name.endswith("ForConditionalGeneration"):
        raise NotT5Error(f"a {name} is not measured: an encoder or a model for conditional generation is")
    return transformers.AutoModelForSeq2SeqLM
