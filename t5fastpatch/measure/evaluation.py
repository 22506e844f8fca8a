"""The results of every variant over all sentences, batch by batch, beside those of the stock model in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .bench import model_of
from .cells import Cell
from .quality import OutputTally, Quality, trimmed, with_generation
from .subject import Batch, Sentence, Subject, batches
from .variants import STOCK_FP32, Variant
from .workloads import IGNORED_LABEL, encoder_inputs, search

# Where there are no sentences: enough random text for a difference to show.
RANDOM_BATCHES = 2


def batch_count(subject: Subject, cell: Cell, samples: int | None) -> int:
    """How many batches the results of a cell are taken over, with so many sentences at most."""
    sentences = len(subject.sentences[:samples])
    return -(-sentences // cell.batch_size) or RANDOM_BATCHES


class Evaluation:
    """Results of several variants.

    Args:
        subject: the models.
        cell: batch size and lengths.
        variants: what to evaluate; `"stock fp32"` comes first and is the reference.
    """

    def __init__(self, subject: Subject, cell: Cell, variants: Sequence[Variant]) -> None:
        assert variants[0].name == STOCK_FP32
        self._subject = subject
        self._cell = cell
        self._variants = variants
        self._tallies = {variant.name: OutputTally() for variant in variants}
        self._generated: dict[str, list[list[int]]] = {variant.name: [] for variant in variants}
        self._scored = False
        self._added_memory = {variant.name: 0 for variant in variants}

    def run(self, samples: int | None, advance: Callable[[], object]) -> dict[str, Quality]:
        """The results by variant, over so many sentences; `advance` is called after each variant of each batch."""
        sentences = list(self._subject.sentences[:samples])
        self._scored = bool(sentences) and all(sentence.target is not None for sentence in sentences)
        ordered: list[Sentence] = []
        for batch, group in self._batches(sentences):
            ordered += group
            reference: torch.Tensor | None = None
            for variant in self._variants:
                with model_of(self._subject, variant) as model, self._peak_memory(variant):
                    outputs = self._add_outputs(variant, model, batch, reference)
                    self._add_generation(variant, model, batch)
                reference = outputs if reference is None else reference
                advance()
        return {variant.name: self._quality(variant, ordered) for variant in self._variants}

    def peak_memory(self, variant: Variant) -> int | None:
        """On CUDA, the bytes of the variant's model and the most that a batch added to them."""
        if self._subject.device.type != "cuda":
            return None
        own: int = self._subject.model(variant.precision).get_memory_footprint()
        return own + self._added_memory[variant.name]

    def _batches(self, sentences: Sequence[Sentence]) -> Iterator[tuple[Batch, list[Sentence]]]:
        cell = self._cell
        for group in batches(sentences, cell.batch_size):
            yield self._subject.batch(group, cell.source_length, cell.target_length), group
        if not sentences:
            for seed in range(RANDOM_BATCHES):
                yield self._subject.full_batch(cell.batch_size, cell.source_length, cell.target_length, seed), []

    def _add_outputs(self, variant: Variant, model: Any, batch: Batch, reference: torch.Tensor | None) -> torch.Tensor:
        tally = self._tallies[variant.name]
        result = model(**batch)
        outputs: torch.Tensor = result.logits if hasattr(result, "logits") else result.last_hidden_state
        if self._subject.seq2seq:
            valid = batch["labels"] != IGNORED_LABEL
            if self._scored:
                tally.add_loss(outputs, batch["labels"])
        else:
            valid = batch["attention_mask"].bool()
        tally.add(outputs, outputs if reference is None else reference, valid)
        return outputs

    def _add_generation(self, variant: Variant, model: Any, batch: Batch) -> None:
        if self._subject.seq2seq:
            tokens = search(model, encoder_inputs(batch), num_beams=1, max_new_tokens=self._cell.target_length)
            self._generated[variant.name] += trimmed(tokens, model.config.eos_token_id, model.config.pad_token_id)

    def _quality(self, variant: Variant, sentences: Sequence[Sentence]) -> Quality:
        quality = self._tallies[variant.name].quality()
        if not self._subject.seq2seq:
            return quality
        rows = self._generated[variant.name]
        texts = self._subject.tokenizer.batch_decode(rows, skip_special_tokens=True) if sentences else []
        return with_generation(quality, rows, self._generated[STOCK_FP32], texts, sentences)

    @contextlib.contextmanager
    def _peak_memory(self, variant: Variant) -> Iterator[None]:
        if self._subject.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._subject.device)
        before = torch.cuda.memory_allocated(self._subject.device)
        yield
        added = torch.cuda.max_memory_allocated(self._subject.device) - before
        self._added_memory[variant.name] = max(added, self._added_memory[variant.name])
