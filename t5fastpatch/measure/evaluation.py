"""The results of every variant over all sentences, batch by batch, beside those of the stock model in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .bench import Bench
from .quality import OutputTally, Quality, trimmed, with_generation
from .settings import Settings
from .subject import Batch, Sentence, Subject, batches
from .variants import STOCK_FP32, Variant
from .workloads import IGNORED_LABEL, encoder_inputs, greedy


class Evaluation:
    """Results of several variants.

    Args:
        subject: the models.
        bench: makes a variant the one that runs.
        settings: batch size and lengths.
        variants: what to evaluate; `"stock fp32"` comes first and is the reference.
    """

    def __init__(self, subject: Subject, bench: Bench, settings: Settings, variants: Sequence[Variant]) -> None:
        assert variants[0].name == STOCK_FP32
        self._subject = subject
        self._bench = bench
        self._settings = settings
        self._variants = variants
        self._tallies = {variant.name: OutputTally() for variant in variants}
        self._generated: dict[str, list[list[int]]] = {variant.name: [] for variant in variants}
        self._scored = False
        self._added_memory = {variant.name: 0 for variant in variants}

    def run(self, sentences: Sequence[Sentence], advance: Callable[[], object]) -> dict[str, Quality]:
        """The results by variant; `advance` is called after each variant of each batch."""
        self._scored = all(sentence.target is not None for sentence in sentences)
        ordered: list[Sentence] = []
        for each in batches(sentences, self._settings.batch_size):
            ordered += each
            batch = self._subject.batch(each, self._settings.max_source_length, self._settings.max_new_tokens)
            reference: torch.Tensor | None = None
            for variant in self._variants:
                with self._bench.model_of(variant) as model, self._peak_memory(variant):
                    outputs = self._add_outputs(variant, model, batch, reference)
                    self._add_generation(variant, model, batch)
                reference = outputs if reference is None else reference
                advance()
        return {variant.name: self._quality(variant, ordered) for variant in self._variants}

    def peak_memory(self, variant: Variant) -> int | None:
        """On CUDA, the bytes of the variant's model and the most that a batch added to them."""
        if self._subject.device.type != "cuda":
            return None
        with self._bench.model_of(variant) as model:
            own: int = model.get_memory_footprint()
        return own + self._added_memory[variant.name]

    def _add_outputs(self, variant: Variant, model: Any, batch: Batch, reference: torch.Tensor | None) -> torch.Tensor:
        tally = self._tallies[variant.name]
        if not self._subject.seq2seq:
            outputs: torch.Tensor = model(**batch).last_hidden_state
            valid = batch["attention_mask"].bool()
        else:
            outputs = model(**batch).logits
            valid = batch["labels"] != IGNORED_LABEL
            if self._scored:
                tally.add_loss(outputs, batch["labels"])
        tally.add(outputs, outputs if reference is None else reference, valid)
        return outputs

    def _add_generation(self, variant: Variant, model: Any, batch: Batch) -> None:
        if self._subject.seq2seq:
            tokens = greedy(model, encoder_inputs(batch), max_new_tokens=self._settings.max_new_tokens)
            self._generated[variant.name] += trimmed(tokens, model.config.eos_token_id, model.config.pad_token_id)

    def _quality(self, variant: Variant, sentences: Sequence[Sentence]) -> Quality:
        quality = self._tallies[variant.name].quality()
        if not self._subject.seq2seq:
            return quality
        rows = self._generated[variant.name]
        texts = self._subject.tokenizer.batch_decode(rows, skip_special_tokens=True)
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
