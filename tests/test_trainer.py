from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import math
import platform
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import SIZES, WORDS, save_model

from t5fastpatch import T5FastPatchError, status
from t5fastpatch.measure.quality import bleu, trimmed
from t5fastpatch.measure.subject import Sentence
from t5fastpatch.measure.timing import Limits, interleave, stopwatch_for
from t5fastpatch.measure.trainer import EvaluationSettings, TrainerEvaluation, TrainerLevel
from t5fastpatch.patch import State

pytest.importorskip("accelerate")

CPU = torch.device("cpu")
BATCH = 4
LENGTH = 6
STAGES = ["load", "cast", "evaluate"]


# Whole batches, since releases differ in the weight of the loss of a shorter one.
SENTENCES = [Sentence("say: ", " ".join(WORDS[i : i + 4]), " ".join(WORDS[i : i + 1 + i % 3])) for i in range(8)]


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    """One thread is enough for tiny models, and no evaluation's collection looks at all that was ever imported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """A model that generates something: the embedding of the padding would otherwise beget more of it."""
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).float().eval()
    with torch.no_grad():
        model.shared.weight[0] = model.shared.weight[3:].mean(0)
    return model


@pytest.fixture
def level(model: Any, tokenizer: Any) -> Any:
    def make(**settings: Any) -> TrainerLevel:
        settings = {"batch_size": BATCH, "max_source_length": 16, "max_target_length": LENGTH, **settings}
        return TrainerLevel(lambda: copy.deepcopy(model), tokenizer, SENTENCES, EvaluationSettings(**settings), CPU)

    return make


def batches(tokenizer: Any) -> list[tuple[list[Sentence], Any, torch.Tensor]]:
    """Sentences, inputs and labels, batch by batch in the order given."""
    found = []
    for start in range(0, len(SENTENCES), BATCH):
        these = SENTENCES[start : start + BATCH]
        inputs = tokenizer([each.task + each.source for each in these], padding=True, return_tensors="pt")
        labels = tokenizer([each.target or "" for each in these], padding=True, return_tensors="pt")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        found.append((these, inputs, labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)))
    return found


def losses(model: Any, tokenizer: Any, smoothing: float) -> float:
    """The mean over the sentences of their batch's loss, smoothed towards the mean over the vocabulary."""
    total = 0.0
    for these, inputs, labels in batches(tokenizer):
        with torch.no_grad():
            rows = F.log_softmax(model(**inputs, labels=labels).logits, dim=-1)[labels != -100]
        likelihood = rows.gather(1, labels[labels != -100][:, None]).mean()
        total -= ((1 - smoothing) * likelihood + smoothing * rows.mean()).item() * len(these)
    return total / len(SENTENCES)


@pytest.mark.parametrize("full_eval", [None, "fp16", "bf16"])
def test_every_figure_is_there_and_finite(level: Any, full_eval: str | None) -> None:
    found = level(full_eval=full_eval, label_smoothing=0.1).evaluate()
    figures = (found.runtime, found.samples_per_second, found.loss, found.bleu, found.gen_len)
    assert all(map(math.isfinite, figures))
    assert found.runtime > 0
    assert found.gen_len > 0
    assert list(found.memory) == STAGES


@pytest.mark.parametrize("num_beams", [1, 3])
def test_in_fp32_the_trainer_generates_what_generate_does(
    level: Any, model: Any, tokenizer: Any, num_beams: int
) -> None:
    rows: list[list[int]] = []
    for _, inputs, _ in batches(tokenizer):
        tokens = model.generate(**inputs, max_length=LENGTH, num_beams=num_beams, do_sample=False)
        rows += trimmed(tokens, end=1, padding=0)
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    found = level(num_beams=num_beams).evaluate()
    assert found.gen_len == sum(map(len, rows)) / len(rows)
    assert found.bleu == bleu(texts, [sentence.target or "" for sentence in SENTENCES])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_smoothed_as_the_formula_says(level: Any, model: Any, tokenizer: Any, smoothing: float) -> None:
    expected = losses(model, tokenizer, smoothing)
    assert level(label_smoothing=smoothing).evaluate().loss == pytest.approx(expected, rel=1e-5)


def test_smoothing_changes_the_loss_and_nothing_else(level: Any) -> None:
    plain, smoothed = (level(label_smoothing=smoothing).evaluate() for smoothing in (0.0, 0.2))
    assert plain.loss != pytest.approx(smoothed.loss, rel=1e-3)
    assert (plain.bleu, plain.gen_len) == (smoothed.bleu, smoothed.gen_len)


def test_the_smoothed_loss_over_a_large_vocabulary_is_that_of_fp32(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SIZES, "vocab_size": 32128}, decoder_start_token_id=0)
    large = transformers.T5ForConditionalGeneration(config)
    found = []
    for full_eval in (None, "fp16"):
        settings = EvaluationSettings(BATCH, 16, 3, label_smoothing=0.1, full_eval=full_eval)
        found.append(TrainerLevel(lambda: copy.deepcopy(large), tokenizer, SENTENCES[:4], settings, CPU).evaluate())
    assert found[1].loss == pytest.approx(found[0].loss, rel=0.02)


def test_a_fixed_length_leaves_no_generation_shorter(level: Any) -> None:
    assert level(fixed_length=True).evaluate().gen_len == LENGTH - 1


@pytest.mark.parametrize(("full_eval", "dtype"), [(None, "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_model_runs_in_the_precision_asked_for(level: Any, model: Any, full_eval: str | None, dtype: str) -> None:
    seen = set()

    def watched() -> Any:
        mine = copy.deepcopy(model)
        for stack in (mine.encoder, mine.decoder):
            stack.block[-1].register_forward_pre_hook(lambda block, inputs: seen.add(inputs[0].dtype))
        return mine

    dataclasses.replace(level(full_eval=full_eval), load=watched).evaluate()
    assert seen == {getattr(torch, dtype)}


def test_a_patch_runs_after_the_trainer_s_cast(level: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status(model)  # whose trial of the norm would be seen as well
    dtypes = []
    upstream = F.rms_norm

    def spy(x: torch.Tensor, *args: Any) -> torch.Tensor:
        dtypes.append(x.dtype)
        return upstream(x, *args)

    monkeypatch.setattr(F, "rms_norm", spy)
    stock = level(full_eval="fp16").evaluate()
    assert dtypes == []
    patched = level(full_eval="fp16").evaluate(["layer_norm"])
    assert set(dtypes) == {torch.float16}
    assert patched.loss == pytest.approx(stock.loss, rel=0.01)


def test_a_patch_that_is_exact_changes_no_figure(level: Any) -> None:
    stock, patched = (level(full_eval="fp16").evaluate(patches) for patches in ([], ["skip_inf_check"]))
    for figure in ("loss", "bleu", "gen_len"):
        assert getattr(stock, figure) == getattr(patched, figure)


def test_the_caller_s_model_stays_as_it_was(level: Any, model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    level(full_eval="fp16").evaluate(["layer_norm"])
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype is torch.float32 for name in before)
    assert State.ON not in [row.state for row in status(model).rows]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="host memory is measured on Linux")
def give_memory_back() -> None:
    """What the tests before have left to the allocator, and would be taken again without the process growing."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def test_memory_is_bracketed_stage_by_stage(tokenizer: Any) -> None:
    config = transformers.T5Config(**{**SIZES, "vocab_size": 36000, "d_model": 512}, decoder_start_token_id=0)
    large = transformers.T5ForConditionalGeneration(config)
    give_memory_back()
    size = sum(parameter.nbytes for parameter in large.parameters())
    settings = EvaluationSettings(2, 16, 3, full_eval="bf16")
    memory = TrainerLevel(lambda: copy.deepcopy(large), tokenizer, SENTENCES[:2], settings, CPU).evaluate().memory
    load, cast, evaluate = (memory[stage] for stage in STAGES)
    assert load.host_delta == pytest.approx(size, rel=0.15)
    # The cast frees each parameter when it has its copy.
    assert cast.host_delta == pytest.approx(-size / 2, rel=0.15)
    assert cast.host_peak is not None
    assert cast.host_peak < 0.6 * size
    assert evaluate.host_peak is not None
    assert evaluate.host_peak < 0.6 * size
    assert (load.device_delta, cast.device_peak) == (None, None)


def test_no_folder_is_left_behind(level: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with level().evaluator() as evaluate:
        assert len(list(tmp_path.iterdir())) == 1
        evaluate()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), level().evaluator():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_printed_and_the_log_level_stays(level: Any, capfd: pytest.CaptureFixture[str]) -> None:
    verbosity = transformers.utils.logging.get_verbosity()
    level(full_eval="fp16").evaluate()
    assert transformers.utils.logging.get_verbosity() == verbosity
    assert capfd.readouterr() == ("", "")


def test_an_evaluation_does_not_keep_the_model_of_the_one_before(level: Any, model: Any) -> None:
    loaded: list[Any] = []

    def load() -> Any:
        loaded.append(weakref.ref(mine := copy.deepcopy(model)))
        return mine

    watched = dataclasses.replace(level(), load=load)
    gc.disable()
    try:
        watched.evaluate()
        with watched.evaluator():
            assert [each() is None for each in loaded] == [True, False]
    finally:
        gc.enable()


def test_evaluations_can_be_timed_in_shuffled_rounds(level: Any) -> None:
    kept: dict[str, list[TrainerEvaluation]] = {"fp32": [], "fp16": []}
    levels = {"fp32": level(), "fp16": level(full_eval="fp16")}
    entries = {name: levels[name].entry([], kept[name].append) for name in levels}
    samples = interleave(entries, stopwatch_for(CPU), "fp16", Limits(rounds=2))
    assert samples.rounds == 2
    for name in levels:
        assert len(kept[name]) >= 2
        assert len({(each.loss, each.bleu, each.gen_len) for each in kept[name]}) == 1


def test_sentences_without_references_are_refused(model: Any, tokenizer: Any) -> None:
    for sentences in ([], [Sentence("", "the page", None)]):
        with pytest.raises(T5FastPatchError, match="each with a reference"):
            TrainerLevel(lambda: model, tokenizer, sentences, EvaluationSettings(), CPU)


def test_an_unknown_precision_is_refused(level: Any) -> None:
    with pytest.raises(T5FastPatchError, match=r"full_eval is 'fp16', 'bf16' or None, not 'fp8'"):
        level(full_eval="fp8")


def test_a_device_that_the_trainer_would_not_take_is_refused(model: Any, tokenizer: Any) -> None:
    with pytest.raises(T5FastPatchError, match="set CUDA_VISIBLE_DEVICES"):
        TrainerLevel(lambda: model, tokenizer, SENTENCES, EvaluationSettings(), torch.device("cuda:1"))


def test_a_missing_library_names_the_extra(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(T5FastPatchError, match=r"accelerate is not installed: .*t5fastpatch\[ablate\]"):
        level()
