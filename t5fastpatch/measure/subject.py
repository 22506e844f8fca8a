"""What is measured: a model in several precisions, its tokenizer and sentences for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import NotFoundError, NotT5Error, T5FastPatchError
from ..loading import checked_name, first_line, one_line_errors
from .precision import Precision, dtype_keyword, in_precision
from .shapes import random_model
from .workloads import IGNORED_LABEL, is_seq2seq, text_config

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
HELD_OUT = "heldout.jsonl"
# The pieces below are special in T5's vocabularies: padding, end of sentence, unknown.
FIRST_PIECE = 3

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A held-out sentence with its task prefix and, where there is one, its reference."""

    task: str
    source: str
    target: str | None


class Subject:
    """A model on a device, in evaluation mode, in every precision that is asked for.

    Args:
        name: for the report.
        fp32: the model in fp32, on its device.
        tokenizer: `None` where the weights are random.
        sentences: held-out ones; none where the weights are random.
        sentences_from: where they are from, in words.
    """

    def __init__(
        self, name: str, fp32: Any, tokenizer: Any = None, sentences: Sequence[Sentence] = (), sentences_from: str = ""
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.sentences = sentences
        self.sentences_from = sentences_from
        self._models = {Precision.FP32: fp32}

    @property
    def fp32(self) -> Any:
        """The model in fp32."""
        return self._models[Precision.FP32]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.fp32.device
        return device

    @property
    def seq2seq(self) -> bool:
        """Whether there is a decoder with a cross-attention."""
        return is_seq2seq(self.fp32)

    @property
    def parameters(self) -> int:
        """How many there are, tied ones once."""
        return sum(parameter.numel() for parameter in self.fp32.parameters())

    def fingerprint(self) -> str:
        """A hash of the configuration, some of each weight, and the sentences in their order: 16 hexadecimal digits."""
        digest = hashlib.sha256(self.fp32.config.to_json_string(use_diff=True).encode())
        for name, parameter in sorted(self.fp32.named_parameters()):
            some = parameter.detach().flatten()[:: max(1, parameter.numel() // 256)].double().cpu()
            digest.update(name.encode() + some.numpy().tobytes())
        digest.update(repr(list(self.sentences)).encode())
        return digest.hexdigest()[:16]

    def model(self, precision: Precision) -> Any:
        """The model in a precision; made at the first call."""
        if precision.dtype is torch.float32:
            return self.fp32
        if precision not in self._models:
            self._models[precision] = in_precision(self.fp32, precision)
            _set_attention(self._models[precision], attention_of(self.fp32))
        return self._models[precision]

    def keep(self, precisions: Collection[Precision]) -> None:
        """Lets go of the models in any other precision but fp32."""
        kept = {*precisions, Precision.FP32}
        self._models = {precision: model for precision, model in self._models.items() if precision in kept}

    @contextlib.contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """An attention implementation, `"eager"` or `"sdpa"`, on all the models as long as the `with` block lasts."""
        before = attention_of(self.fp32)
        try:
            for model in self._models.values():
                _set_attention(model, implementation)
            yield
        finally:
            for model in self._models.values():
                _set_attention(model, before)

    def batch(self, sentences: Sequence[Sentence], max_source_length: int, max_target_length: int) -> Batch:
        """The sentences as tensors on the device, padded to the longest: `input_ids` and `attention_mask` (int64,
        batch x source length) and, for a seq2seq model, `labels` (int64, batch x target length, padding -100), which
        are the source again where a sentence has no reference."""
        batch = self._tokens([each.task + each.source for each in sentences], max_source_length)
        if self.seq2seq:
            targets = self._tokens([each.target or each.source for each in sentences], max_target_length)
            batch["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, IGNORED_LABEL)
        return batch

    def full_batch(self, batch_size: int, source_length: int, target_length: int, seed: int = 0) -> Batch:
        """As `batch`, of exactly these lengths and without padding: the held-out sentences one after another, from a
        random place on, or random pieces where there are no sentences."""
        generator = torch.Generator().manual_seed(seed)
        batch = {"input_ids": self._running_text(batch_size, source_length, generator)}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if self.seq2seq:
            batch["labels"] = self._running_text(batch_size, target_length, generator)
        return {name: tokens.to(self.device) for name, tokens in batch.items()}

    def _running_text(self, batch_size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        if not self.sentences:
            vocabulary = text_config(self.fp32).vocab_size
            return torch.randint(FIRST_PIECE, vocabulary, (batch_size, length), generator=generator)
        starts = torch.randint(0, len(self._pieces), (batch_size, 1), generator=generator)
        return self._pieces[(starts + torch.arange(length)) % len(self._pieces)]

    @functools.cached_property
    def _pieces(self) -> torch.Tensor:
        """Of all the sentences, one after another."""
        texts = [each.task + each.source for each in self.sentences]
        return torch.tensor([piece for text in self.tokenizer(texts)["input_ids"] for piece in text])

    def _tokens(self, texts: list[str], max_length: int) -> Batch:
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        return {name: tokens[name].to(self.device) for name in ("input_ids", "attention_mask")}


def subject_for(model: str | None, shape: str | None, device: str, seed: int = 0) -> Subject:
    """The model, or the one with a shape and random weights; the embedded one where neither is named.

    Raises:
        T5FastPatchError: both are named, or as `load` and `with_random_weights`.
    """
    if shape is None:
        return load(model, device, seed)
    if model is not None:
        raise T5FastPatchError("name a model or a shape, not both")
    return with_random_weights(shape, device, seed)


def load(model: str | None, device: str, seed: int = 0) -> Subject:
    """A model with its tokenizer and held-out sentences, the sentences in an order that the seed decides.

    Args:
        model: a local directory or a name on the hub; `None` for the embedded model.
        device: as for `torch.device`.
        seed: of the order of the sentences.

    Raises:
        T5FastPatchError: there is no such model or device, or the model gives neither text nor hidden states.
    """
    place = torch_device(device)
    name = str(DEMO_MODEL) if model is None else checked_name(model)
    model_as_saved, tokenizer = pretrained(name, place)
    sentences = held_out(model)
    shuffled = random.Random(seed).sample(sentences, len(sentences))
    shown = "the embedded model" if model is None else model
    return Subject(shown, model_as_saved.float(), tokenizer, shuffled, _held_out_source(model))


def pretrained(name: str, device: torch.device, dtype: torch.dtype | str | None = None) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer.

    Args:
        name: a directory or a name on the hub.
        device: where the model is to be.
        dtype: of the weights; "auto" for what they are saved in, `None` for what the release takes.

    Raises:
        T5FastPatchError: they cannot be loaded, do not go together, or give neither text nor hidden states.
    """
    options = {} if dtype is None else {dtype_keyword(): dtype}
    with one_line_errors(name):
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = _class_for(config).from_pretrained(name, **options).eval().to(device)
    _check_tokenizer(name, tokenizer, config)
    return model, tokenizer


def with_random_weights(shape: str, device: str, seed: int = 0) -> Subject:
    """A model of a known shape, without tokenizer and sentences.

    Raises:
        T5FastPatchError: there is no such shape or device.
    """
    return Subject(f"{shape} with random weights", random_model(shape, torch_device(device), seed))


def held_out(model: str | None) -> list[Sentence]:
    """The held-out sentences in the model's own directory, else those of the embedded model."""
    path = _held_out_path(model)
    if not path.is_file():
        raise T5FastPatchError(f"no held-out sentences: there is no {path}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        sentences = [_sentence(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise T5FastPatchError(f"{path} does not hold one object a line with a source: {error!r}") from error
    if not sentences:
        raise T5FastPatchError(f"no held-out sentences: {path} is empty")
    return sentences


def _sentence(record: Any) -> Sentence:
    task, source, target = record.get("task") or "", record["source"], record.get("target")
    if not all(isinstance(text, str) for text in (task, source, target or "")):
        raise ValueError(f"task, source and target are texts, not {task!r}, {source!r}, {target!r}")
    return Sentence(task, source, target)


def batches(sentences: Sequence[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Batches of like length, so that little is padded."""
    by_length = sorted(sentences, key=lambda each: len(each.source))
    for start in range(0, len(by_length), size):
        yield by_length[start : start + size]


def attention_of(model: Any) -> str:
    """The attention implementation that the model uses: `"eager"` in releases that have no other."""
    return getattr(_attention_config(model), "_attn_implementation", None) or "eager"


def attentions_of(model: Any) -> list[str]:
    """The attention implementations that can be measured."""
    switchable = getattr(model, "_supports_sdpa", False) and hasattr(model, "set_attn_implementation")
    return ["eager", "sdpa"] if switchable else [attention_of(model)]


def _attention_config(model: Any) -> Any:
    # In some releases the stacks have configurations of their own.
    return model.get_encoder().config if is_seq2seq(model) else model.config


def _set_attention(model: Any, implementation: str) -> None:
    if attention_of(model) != implementation:
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.set_attn_implementation(implementation)


def _held_out_path(model: str | None) -> Path:
    own = Path(model or DEMO_MODEL).expanduser() / HELD_OUT
    return own if own.is_file() else DEMO_MODEL / HELD_OUT


def _held_out_source(model: str | None) -> str:
    return "the embedded model's" if _held_out_path(model).parent == DEMO_MODEL else str(_held_out_path(model))


def _check_tokenizer(name: str, tokenizer: Any, config: Any) -> None:
    # transformers makes up a tokenizer of its own where a folder has none.
    if Path(name).is_dir() and not any(Path(name).glob("*token*")) and not any(Path(name).glob("*.model")):
        raise NotFoundError(f"{name!r} has no tokenizer files")
    if len(tokenizer) > config.vocab_size:
        raise T5FastPatchError(
            f"the tokenizer of {name!r} has {len(tokenizer)} pieces, its model only {config.vocab_size} embeddings"
        )
    if tokenizer.pad_token is None:
        raise T5FastPatchError(f"the tokenizer of {name!r} has no padding piece")


def torch_device(name: str) -> torch.device:
    """A device of PyTorch's.

    Raises:
        T5FastPatchError: it is not there, or neither a CPU nor a CUDA device.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise T5FastPatchError(f"no device {name!r} here: {first_line(error)}") from error
    if device.type not in ("cpu", "cuda"):
        raise T5FastPatchError(f"times are taken on cpu and cuda, not on {name!r}")
    return device


def _class_for(config: Any) -> Any:
    """The class to load: whichever makes text of text, or the very one that was saved if it gives logits or states for
    each token."""
    name = (getattr(config, "architectures", None) or [""])[0]
    if not name or name.endswith("ForConditionalGeneration"):
        if type(config) not in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            raise NotT5Error(f"a {name or type(config).__name__} is not measured: it does not make text of text alone")
        return transformers.AutoModelForSeq2SeqLM
    cls = getattr(transformers, name, None)
    gives_tokens = name.endswith(("Model", "ForCausalLM", "ForMaskedLM"))
    if cls is None or not gives_tokens or "decoder_input_ids" in inspect.signature(cls.forward).parameters:
        raise NotT5Error(f"a {name} is not measured: an encoder or a model that generates text is")
    return cls
