"""How far a variant's results are from those of the stock model in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..extra import require
from .subject import Sentence
from .workloads import IGNORED_LABEL


@dataclasses.dataclass(frozen=True)
class Quality:
    """Results over all sentences; what a model or the data cannot give is `None`.

    Attributes:
        max_difference: largest absolute difference of an output from fp32's, at valid positions: of a teacher-forced
            logit or, for an encoder alone, of an element of its last hidden state.
        mean_difference: the mean of the same.
        nonfinite: how many of those outputs are infinite or NaN.
        loss: cross entropy per token of the references, computed in fp32 from the logits.
        bleu: sacreBLEU of the greedy generations, over all tasks.
        bleu_by_task: the same for each task prefix.
        gen_len: mean generated length in tokens, the end of sentence included.
        agreement: share of places at which a generation has fp32's token, over the longer of the two.
    """

    max_difference: float
    mean_difference: float
    nonfinite: int
    loss: float | None = None
    bleu: float | None = None
    bleu_by_task: dict[str, float] | None = None
    gen_len: float | None = None
    agreement: float | None = None


class OutputTally:
    """Gathers differences and the loss, batch by batch."""

    def __init__(self) -> None:
        self._max = torch.zeros(())
        self._sum = 0.0
        self._elements = 0
        self._nonfinite = 0
        self._loss = 0.0
        self._tokens = 0

    def add(self, outputs: torch.Tensor, reference: torch.Tensor, valid: torch.Tensor) -> None:
        """Adds outputs and fp32's (batch x length x features) at the `valid` positions (bool, batch x length)."""
        mine, theirs = outputs[valid].float(), reference[valid].float()
        difference = (mine - theirs).abs()
        self._max = torch.maximum(self._max, difference.max().cpu())
        self._sum += difference.sum(dtype=torch.float64).item()
        self._elements += difference.numel()
        self._nonfinite += int((~torch.isfinite(mine)).sum())

    def add_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds the loss of logits (batch x length x vocabulary) for labels (batch x length, padding -100)."""
        flat = logits.float().flatten(0, 1)
        self._loss += F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum").item()
        self._tokens += int((labels != IGNORED_LABEL).sum())

    def quality(self) -> Quality:
        """What was gathered, without anything of a generation."""
        mean = self._sum / self._elements
        loss = self._loss / self._tokens if self._tokens else None
        return Quality(self._max.item(), mean, self._nonfinite, loss)


def trimmed(tokens: torch.Tensor, end: int, padding: int) -> list[list[int]]:
    """Generated rows without the start token and whatever follows the first end of sentence, which stays."""
    rows = []
    for row in tokens[:, 1:].tolist():
        while row and row[-1] == padding:
            row.pop()
        rows.append(row[: row.index(end) + 1] if end in row else row)
    return rows


def agreement(mine: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """The share of places with the same token, over the longer of each pair of rows."""
    same = sum(a == b for pair in zip(mine, reference, strict=True) for a, b in zip(*pair, strict=False))
    places = sum(max(map(len, pair)) for pair in zip(mine, reference, strict=True))
    return same / places if places else 1.0


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The corpus's sacreBLEU score, 0 to 100, with that library's defaults.

    Raises:
        T5FastPatchError: sacrebleu is not installed.
    """
    sacrebleu: Any = require("sacrebleu")
    # `force`: its warning on texts that look tokenized does not concern short user-interface lines.
    score: float = sacrebleu.corpus_bleu(list(hypotheses), [list(references)], force=True).score
    return score


def with_generation(
    quality: Quality,
    rows: Sequence[Sequence[int]],
    reference_rows: Sequence[Sequence[int]],
    texts: Sequence[str],
    sentences: Sequence[Sentence],
) -> Quality:
    """`quality` with everything that is said of generations: token rows, fp32's, and texts, one per sentence."""
    targets = [sentence.target for sentence in sentences if sentence.target is not None]
    scored = bool(targets) and len(targets) == len(sentences)
    return dataclasses.replace(
        quality,
        bleu=bleu(texts, targets) if scored else None,
        bleu_by_task=_bleu_by_task(texts, targets, [each.task for each in sentences]) if scored else None,
        gen_len=sum(map(len, rows)) / len(rows),
        agreement=agreement(rows, reference_rows),
    )


def _bleu_by_task(texts: Sequence[str], targets: Sequence[str], tasks: Sequence[str]) -> dict[str, float]:
    scores = {}
    for task in dict.fromkeys(tasks):
        mine = [index for index, each in enumerate(tasks) if each == task]
        scores[task.strip()] = bleu([texts[index] for index in mine], [targets[index] for index in mine])
    return scores
