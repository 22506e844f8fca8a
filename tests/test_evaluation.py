from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import save_model

from t5fastpatch.measure.cells import Cell
from t5fastpatch.measure.evaluation import Evaluation, batch_count
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.quality import Quality
from t5fastpatch.measure.subject import Subject, attention_of, batches, load
from t5fastpatch.measure.variants import Variant

FP32, FP16 = Variant("stock fp32", Precision.FP32), Variant("stock fp16", Precision.FP16)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    subject = load(str(save_model(tmp_path_factory.mktemp("t5"))), "cpu")
    # References of several lengths, so that some labels are padding.
    subject.sentences = [
        dataclasses.replace(each, target=" ".join([each.target or ""] * (1 + number % 3)))
        for number, each in enumerate(subject.sentences)
    ]
    return subject


@pytest.fixture(scope="module")
def cell(subject: Subject) -> Cell:
    return Cell("results", "results", "fp16", attention_of(subject.fp32), False, 4, 16, 8, "sentences")


@pytest.fixture(scope="module")
def found(subject: Subject, cell: Cell) -> dict[str, Quality]:
    again = Variant("again", Precision.FP16)
    steps: list[int] = []
    with torch.no_grad():
        found = Evaluation(subject, cell, [FP32, FP16, again]).run(None, lambda: steps.append(1))
    assert len(steps) == 3 * batch_count(subject, cell, None)
    return found


def test_every_variant_is_compared_with_fp32(found: dict[str, Quality]) -> None:
    assert found["stock fp32"].max_difference == 0
    assert found["stock fp16"].max_difference > 0
    assert found["again"] == found["stock fp16"]


def test_the_differences_are_those_at_the_labels(subject: Subject, cell: Cell, found: dict[str, Quality]) -> None:
    differences, losses = [], []
    for group in batches(subject.sentences, cell.batch_size):
        batch = subject.batch(group, cell.source_length, cell.target_length)
        with torch.no_grad():
            exact, half = (subject.model(each)(**batch).logits.float() for each in (Precision.FP32, Precision.FP16))
        valid = batch["labels"] != -100
        assert not valid.all()
        differences.append((half - exact).abs()[valid].flatten())
        losses.append(-half.log_softmax(-1)[valid].gather(1, batch["labels"][valid][:, None]).flatten())
    quality = found["stock fp16"]
    assert quality.max_difference == torch.cat(differences).max().item()
    assert quality.mean_difference == pytest.approx(torch.cat(differences).double().mean().item())
    assert quality.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_batches_are_counted_as_they_are_made(subject: Subject, cell: Cell) -> None:
    assert batch_count(subject, cell, None) == len(list(batches(subject.sentences, 4))) == 3
    assert batch_count(subject, cell, 4) == 1
    assert batch_count(Subject("random weights", subject.fp32), cell, None) == 2
