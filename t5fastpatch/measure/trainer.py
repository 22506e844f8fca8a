"""The level of `Seq2SeqTrainer.evaluate` with `predict_with_generate`: what its users see of half precision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from ..engine import apply
from ..errors import T5FastPatchError
from ..extra import require
from .memory import Memory, bracket
from .quality import bleu, trimmed
from .subject import Sentence
from .timing import Entry, Prepare
from .workloads import IGNORED_LABEL

FULL_EVAL = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """How the Trainer evaluates.

    Attributes:
        batch_size: sentences per batch, which come in the order given.
        max_source_length: longest source, in tokens; the rest is cut off.
        max_target_length: longest reference and longest generation, in tokens; as in `generate`, a generation's start
            token counts.
        num_beams: 1 is greedy.
        label_smoothing: the Trainer's `label_smoothing_factor`, which smooths the loss of an evaluation as well.
        full_eval: `"fp16"` for `fp16_full_eval`, `"bf16"` for `bf16_full_eval`, `None` for neither.
        fixed_length: whether every generation is as long as the longest may be.
    """

    batch_size: int = 8
    max_source_length: int = 128
    max_target_length: int = 128
    num_beams: int = 1
    label_smoothing: float = 0.0
    full_eval: str | None = None
    fixed_length: bool = False


@dataclasses.dataclass(frozen=True)
class TrainerEvaluation:
    """What one call of `evaluate` gave.

    Attributes:
        runtime: the Trainer's own, in seconds: data, generation, loss and metrics.
        samples_per_second: the Trainer's own.
        loss: the Trainer's own: the mean over the batches of each one's mean over its tokens. Older releases give a
            shorter last batch less weight.
        bleu: sacreBLEU of the generations against the whole references.
        gen_len: mean generated length in tokens, the end of sentence included.
        memory: by stage: `"load"`, `"cast"` (to half precision where that is asked for, and to the device) and
            `"evaluate"`.
    """

    runtime: float
    samples_per_second: float
    loss: float
    bleu: float
    gen_len: float
    memory: Mapping[str, Memory]


@dataclasses.dataclass(frozen=True)
class TrainerLevel:
    """Evaluations of one model by the Trainer, with any patches. Like any Trainer's, they seed the global generators.

    Attributes:
        load: gives a new copy of the model on each call; the Trainer casts the very model it gets.
        tokenizer: the model's.
        sentences: all with references.
        settings: how to evaluate.
        device: the CPU, or the first CUDA device, which is the one that the Trainer takes.

    Raises:
        T5FastPatchError: accelerate or sacrebleu is missing, there are no sentences, a sentence has no reference, or
            there is no such `full_eval` or device here.
    """

    load: Callable[[], Any]
    tokenizer: Any
    sentences: Sequence[Sentence]
    settings: EvaluationSettings
    device: torch.device

    def __post_init__(self) -> None:
        for library in ("accelerate", "sacrebleu"):
            require(library)
        if not self.sentences or any(sentence.target is None for sentence in self.sentences):
            raise T5FastPatchError("the Trainer's loss and BLEU take sentences, each with a reference (target)")
        if self.settings.full_eval not in FULL_EVAL:
            raise T5FastPatchError(f"full_eval is 'fp16', 'bf16' or None, not {self.settings.full_eval!r}")
        if self.device not in (torch.device("cpu"), torch.device("cuda"), torch.device("cuda:0")):
            raise T5FastPatchError(f"the Trainer takes cpu or cuda:0, not {self.device}: set CUDA_VISIBLE_DEVICES")

    def evaluate(self, patches: Sequence[str] = ()) -> TrainerEvaluation:
        """Loads a copy of the model, patches it, has the Trainer cast and evaluate it, and gives what came out.

        Args:
            patches: names, for `t5fastpatch.apply`; none for the stock model.

        Raises:
            As `t5fastpatch.apply`.
        """
        with self.evaluator(patches) as evaluate:
            return evaluate()

    def entry(self, patches: Sequence[str], keep: Callable[[TrainerEvaluation], object]) -> Entry:
        """The evaluation as `timing.interleave` takes it; `keep` is called with what each one gave."""

        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            with self.evaluator(patches) as evaluate:
                yield lambda: lambda: keep(evaluate())

        return entered

    @contextlib.contextmanager
    def evaluator(self, patches: Sequence[str] = ()) -> Iterator[Callable[[], TrainerEvaluation]]:
        """As long as the `with` block lasts there is a copy of the model, and a call that evaluates it.

        One batch has been evaluated by then: else whichever variant comes first would pay for all that is set up in
        the process once.

        Raises:
            As `t5fastpatch.apply`.
        """
        # A Trainer and its model are a cycle: without this, those of the evaluation before may still be in memory.
        gc.collect()
        model, loading = bracket(self.load, self.device)
        if patches:
            apply(model, list(patches))
        # As the Trainer does at the start of an evaluation, which then finds it done; here it can be bracketed alone.
        dtype = FULL_EVAL[self.settings.full_eval]
        _, casting = bracket(lambda: model.to(device=self.device, dtype=dtype), self.device)
        with tempfile.TemporaryDirectory() as folder:
            trainer = self._trainer(model, folder)
            trainer.evaluate(self._rows[: self.settings.batch_size], **self._generation)

            def evaluate() -> TrainerEvaluation:
                metrics, evaluating = bracket(lambda: trainer.evaluate(self._rows, **self._generation), self.device)
                figures = {name: float(metrics[f"eval_{name}"]) for name in _FIGURES}
                return TrainerEvaluation(**figures, memory={"load": loading, "cast": casting, "evaluate": evaluating})

            yield evaluate

    def _trainer(self, model: Any, folder: str) -> Any:
        trainer_class = transformers.Seq2SeqTrainer
        takes = inspect.signature(trainer_class.__init__).parameters
        collator = transformers.DataCollatorForSeq2Seq(self.tokenizer, label_pad_token_id=IGNORED_LABEL)
        trainer = trainer_class(
            model=model,
            args=_arguments(self.settings, self.device, folder),
            # Of copies, since the collator of older releases pads the labels of the rows themselves.
            data_collator=lambda rows: collator([dict(row) for row in rows]),
            compute_metrics=functools.partial(self._metrics, model.config),
            **{"processing_class" if "processing_class" in takes else "tokenizer": self.tokenizer},
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    @functools.cached_property
    def _rows(self) -> list[dict[str, list[int]]]:
        settings = self.settings
        sources = self._tokens([each.task + each.source for each in self.sentences], settings.max_source_length)
        labels = self._tokens([each.target or "" for each in self.sentences], settings.max_target_length)
        columns = zip(sources["input_ids"], sources["attention_mask"], labels["input_ids"], strict=True)
        return [dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in columns]

    def _tokens(self, texts: list[str], max_length: int) -> Any:
        return self.tokenizer(texts, truncation=True, max_length=max_length)

    @property
    def _generation(self) -> dict[str, Any]:
        longest = self.settings.max_target_length
        shortest = {"min_length": longest} if self.settings.fixed_length else {}
        return {"max_length": longest, "num_beams": self.settings.num_beams, "do_sample": False, **shortest}

    def _metrics(self, config: Any, prediction: Any) -> dict[str, float]:
        tokens = torch.from_numpy(prediction.predictions)
        # Which the Trainer fills up with, where one batch's generations are shorter than another's.
        tokens = tokens.masked_fill(tokens == IGNORED_LABEL, config.pad_token_id)
        rows = trimmed(tokens, config.eos_token_id, config.pad_token_id)
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        # Of the one batch that warms up, or of all.
        targets = [sentence.target or "" for sentence in self.sentences[: len(rows)]]
        return {"bleu": bleu(texts, targets), "gen_len": sum(map(len, rows)) / len(rows)}


_FIGURES = [field.name for field in dataclasses.fields(TrainerEvaluation) if field.name != "memory"]


def _arguments(settings: EvaluationSettings, device: torch.device, folder: str) -> Any:
    arguments_class = transformers.Seq2SeqTrainingArguments
    takes = inspect.signature(arguments_class).parameters
    arguments = arguments_class(
        output_dir=folder,
        predict_with_generate=True,
        per_device_eval_batch_size=settings.batch_size,
        label_smoothing_factor=settings.label_smoothing,
        disable_tqdm=True,
        # The one in force; older releases would set it to "info" without.
        log_level=logging.getLevelName(transformers.utils.logging.get_verbosity()).lower(),
        report_to="none",
        dataloader_pin_memory=device.type == "cuda",
        **{"use_cpu" if "use_cpu" in takes else "no_cuda": device.type == "cpu"},
    )
    # Else a batch would be spread over all GPUs that there are.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    # Set here, since older releases refuse `fp16_full_eval` on a CPU, and check it at construction alone.
    arguments.fp16_full_eval = settings.full_eval == "fp16"
    arguments.bf16_full_eval = settings.full_eval == "bf16"
    return arguments
