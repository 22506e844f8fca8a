from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from tiny import save_model

import t5fastpatch
from t5fastpatch import T5FastPatchError
from t5fastpatch.cli import main
from t5fastpatch.measure import ablation, levels
from t5fastpatch.measure import workloads as workloads_module
from t5fastpatch.measure.ablation import Progress, run
from t5fastpatch.measure.bench import Bench
from t5fastpatch.measure.cells import LEVELS, Cell, grid, key_of, left_out
from t5fastpatch.measure.estimate import Cost, Estimate, in_words
from t5fastpatch.measure.levels import level_for
from t5fastpatch.measure.precision import Precision, in_precision
from t5fastpatch.measure.settings import PRESETS, Settings, preset
from t5fastpatch.measure.store import Store
from t5fastpatch.measure.subject import Subject, attention_of, attentions_of, load
from t5fastpatch.measure.trainer import EvaluationSettings, TrainerEvaluation, TrainerLevel
from t5fastpatch.measure.variants import Variant
from t5fastpatch.reports.reading import read

ONCE: dict[str, Any] = {"rounds": 2, "min_rounds": 2, "time_budget": 0, "threads": 1, "lengths": ((8, 4),)}
MICRO = ["skip_inf_check", "layer_norm", "softmax", "activation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("t5")))


@pytest.fixture(scope="module")
def subject(folder: str) -> Subject:
    return load(folder, "cpu")


@pytest.fixture(autouse=True)
def one_profiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here looks at a profile."""
    monkeypatch.setattr(levels, "PROFILED_CALLS", 1)


def workloads(cells: list[Cell]) -> list[str]:
    return [cell.workload for cell in cells]


def test_every_level_can_be_asked_for_by_name(subject: Subject) -> None:
    settings = Settings(workloads=tuple(LEVELS))
    everything = [name for level, names in LEVELS.items() for name in (names or MICRO)]
    assert workloads(grid(settings, subject, MICRO)) == everything


def test_the_full_preset_is_the_whole_grid(subject: Subject) -> None:
    cells = grid(preset("full"), subject, MICRO)
    assert {cell.batch_size for cell in cells} == {1, 4, 8, 16, 32, 64, 128}
    shapes = {(cell.source_length, cell.target_length) for cell in cells if cell.workload == "forward"}
    assert shapes == {(12, 128), (128, 128), (512, 512), (1024, 1024)}
    # tf32 is CUDA's.
    assert {cell.precision for cell in cells} == {"fp32", "fp16", "fp16_from_pretrained", "bf16"}
    assert {cell.attention for cell in cells} == set(attentions_of(subject.fp32))
    assert {cell.compiled for cell in cells} == {False, True}
    assert {cell.level for cell in cells} == set(LEVELS)
    assert len(set(cells)) == len(cells)


def test_the_report_preset_has_the_first_reports_settings(subject: Subject) -> None:
    settings = preset("report")
    assert (settings.samples, settings.batch_sizes, settings.lengths) == (100, (8, 16), ((12, 128),))
    cells = grid(settings, subject, MICRO)
    # The Trainer and the results are about sentences; whatever is only timed has full lengths.
    assert {cell.level for cell in cells if cell.text == "sentences"} == {"trainer", "results"}
    trainer = [cell for cell in cells if cell.level == "trainer"]
    assert {(cell.workload, cell.batch_size) for cell in trainer} == {
        ("evaluate", 8), ("evaluate", 16), ("evaluate_smoothed", 8), ("evaluate_smoothed", 16),
    }  # fmt: skip


def test_what_has_no_target_is_not_measured_once_for_each(subject: Subject) -> None:
    settings = Settings(workloads=("encoder", "forward"), lengths=((16, 4), (16, 8)))
    assert workloads(grid(settings, subject, [])) == ["encoder", "forward", "forward"]


def test_generations_and_the_trainer_are_not_compiled(subject: Subject) -> None:
    cells = grid(Settings(workloads=("stack", "generate", "trainer"), compiled=(True,)), subject, [])
    assert {cell.level for cell in cells} == {"stack"}


def test_what_is_left_out_is_named(subject: Subject) -> None:
    settings = Settings(workloads=("stack", "micro"), precisions=("fp16", "tf32"), attentions=("default", "eager"))
    assert left_out(settings, grid(settings, subject, MICRO), MICRO) == ["tf32"]
    random = Subject("random weights", subject.fp32)
    settings = Settings(workloads=("encoder", "trainer"))
    assert left_out(settings, grid(settings, random, MICRO), MICRO) == list(LEVELS["trainer"])


def test_a_key_is_that_of_a_cell_and_its_circumstances(subject: Subject) -> None:
    cell, other = grid(Settings(workloads=("encoder", "forward")), subject, [])
    keys = {key_of(cell, {"a": 1}), key_of(other, {"a": 1}), key_of(cell, {"a": 2}), key_of(cell, {})}
    assert len(keys) == 4
    assert key_of(cell, {"a": 1}) == key_of(dataclasses.replace(cell), {"a": 1})


def test_models_are_told_apart_by_their_weights(folder: str, subject: Subject) -> None:
    again = load(folder, "cpu")
    assert again.fingerprint() == subject.fingerprint()
    with torch.no_grad():
        again.fp32.decoder.final_layer_norm.weight[3] += 1e-3
    assert again.fingerprint() != subject.fingerprint()


def test_subjects_are_told_apart_by_their_sentences(folder: str, subject: Subject) -> None:
    again = load(folder, "cpu")
    again.sentences = [*again.sentences[:-1], dataclasses.replace(again.sentences[-1], target="another")]
    assert again.fingerprint() != subject.fingerprint()


def test_full_text_has_exactly_the_lengths_and_no_padding(subject: Subject) -> None:
    batch = subject.full_batch(3, 40, 7)
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((3, 40), (3, 7))
    assert bool((batch["attention_mask"] == 1).all())
    assert torch.equal(batch["input_ids"], subject.full_batch(3, 40, 7)["input_ids"])
    assert not torch.equal(batch["input_ids"], subject.full_batch(3, 40, 7, seed=1)["input_ids"])


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def test_each_precision_is_what_transformers_makes_of_it(folder: str, subject: Subject) -> None:
    cls = transformers.T5ForConditionalGeneration
    keyword = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    loaded = cls.from_pretrained(folder, **{keyword: torch.float16})
    ours = in_precision(subject.fp32, Precision.FP16_LOADED)
    assert dtypes(ours) == dtypes(loaded)
    assert {dtype for name, dtype in dtypes(ours).items() if name.endswith("wo.weight")} == {torch.float32}
    assert all(map(torch.equal, ours.state_dict().values(), loaded.state_dict().values()))
    assert set(dtypes(subject.model(Precision.FP16)).values()) == {torch.float16}
    assert set(dtypes(subject.model(Precision.BF16)).values()) == {torch.bfloat16}
    assert subject.model(Precision.TF32) is subject.fp32
    assert set(dtypes(subject.fp32).values()) == {torch.float32}


def test_a_batch_is_as_large_as_it_says_however_few_the_sentences(subject: Subject) -> None:
    assert len(subject.sentences) < 25
    for text in ("sentences", "full"):
        cell = Cell("stack", "forward", "fp16", attention_of(subject.fp32), False, 25, 8, 4, text)
        assert {len(each) for each in Bench(subject, cell).batch().values()} == {25}


def test_an_attention_implementation_is_on_for_a_cell_only(subject: Subject) -> None:
    before = attention_of(subject.fp32)
    for name in attentions_of(subject.fp32):
        cell = Cell("stack", "forward", "fp16", name, False, 2, 8, 4, "sentences")
        subject.keep([])
        with Bench(subject, cell) as bench:
            counts = bench.census(Variant("stock fp16", Precision.FP16))
            # A model made for the cell has it too.
            for precision in (Precision.FP16, Precision.FP16_LOADED):
                assert attention_of(subject.model(precision)) == name
        assert (counts.by_op["scaled_dot_product_attention"] > 0) == (name == "sdpa")
    assert attention_of(subject.fp32) == attention_of(subject.model(Precision.FP16)) == before


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("greedy", {"num_beams": 1, "max_new_tokens": 4, "min_new_tokens": 4}),
        ("greedy_free", {"num_beams": 1, "max_new_tokens": 4}),
        ("beam", {"num_beams": 3, "max_new_tokens": 4, "min_new_tokens": 4}),
        ("beam_free", {"num_beams": 3, "max_new_tokens": 4}),
    ],
)
def test_a_generation_has_the_beams_and_the_length_of_its_name(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, workload: str, options: dict[str, int]
) -> None:
    asked: list[dict[str, int]] = []

    def search(model: Any, inputs: Any, **options: int) -> torch.Tensor:
        asked.append(options)
        return plain_search(model, inputs, **options)

    plain_search = workloads_module.search
    monkeypatch.setattr(workloads_module, "search", search)
    cell = Cell("generate", workload, "fp32", attention_of(subject.fp32), False, 2, 8, 4, "sentences")
    stock = Variant("stock fp32", Precision.FP32)
    with torch.no_grad(), Bench(subject, cell, num_beams=3) as bench, bench.entry(stock)() as prepare:
        tokens = prepare()()
    assert asked == [options]
    assert tokens.shape[1] == 5 or workload.endswith("_free")


def test_the_micro_level_has_a_row_for_stock_and_for_the_one_patch(folder: str) -> None:
    result = run(Settings(model=folder, workloads=("micro",), **ONCE))
    said = [note.partition(" is not measured alone: ") for note in result["notes"]]
    left_out = [name for name, found, _ in said if found]
    alone = [patch.name for patch in t5fastpatch.list_patches() if patch.name not in left_out]
    assert workloads_of(result) == [*alone, "softmax", "activation"]
    assert {"skip_inf_check", "layer_norm"} <= set(alone)
    for cell in result["cells"]:
        name = cell["cell"]["workload"]
        expected = ["stock fp32", "stock fp16"] + ([name] if name in alone else [])
        assert [row["variant"] for row in cell["rows"]] == expected
    check = next(cell for cell in result["cells"] if cell["cell"]["workload"] == "skip_inf_check")
    assert [row["census"]["ops"] > 0 for row in check["rows"]] == [False, True, False]


def test_the_trainers_level_reports_what_users_see(folder: str) -> None:
    result = run(Settings(model=folder, workloads=("trainer",), samples=4, batch_sizes=(4,), **ONCE))
    assert workloads_of(result) == list(LEVELS["trainer"])
    plain, smoothed, fixed, beam = (cell["rows"] for cell in result["cells"])
    for row in (*plain, *smoothed, *fixed, *beam):
        if row["measured"]:
            assert set(row["evaluation"]) == {"runtime", "samples_per_second", "loss", "bleu", "gen_len", "memory"}
            assert set(row["evaluation"]["memory"]) == {"load", "cast", "evaluate"}
    assert smoothed[0]["evaluation"]["loss"] != pytest.approx(plain[0]["evaluation"]["loss"], rel=1e-3)
    fp32, fp16 = plain[0]["evaluation"], plain[1]["evaluation"]
    assert fp16["loss"] == pytest.approx(fp32["loss"], rel=1e-2)
    assert fp16["loss"] != fp32["loss"]


def test_the_trainers_row_of_tf32_has_its_products_in_tf32(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(level: TrainerLevel, patches: Any, keep: Any) -> Any:
        return lambda: contextlib.nullcontext(lambda: lambda: torch.backends.cuda.matmul.allow_tf32)

    monkeypatch.setattr(TrainerLevel, "entry", entry)
    cell = Cell("trainer", "evaluate", "tf32", attention_of(subject.fp32), False, 2, 8, 4, "sentences")
    for precision in (Precision.FP32, Precision.TF32):
        with (
            level_for(subject, cell, Settings(samples=2), []) as level,
            level.entry(Variant(f"stock {precision}", precision))() as prepare,
        ):
            assert prepare()() is (precision is Precision.TF32)


@pytest.mark.parametrize(
    ("precision", "dtype", "full_eval"),
    [
        (Precision.FP32, torch.float32, None),
        (Precision.FP16, torch.float32, "fp16"),
        (Precision.BF16, torch.float32, "bf16"),
        (Precision.FP16_LOADED, torch.float16, None),
    ],
    ids=str,
)
def test_the_trainer_casts_what_full_eval_casts_and_no_model_that_is_in_half_already(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, precision: Precision, dtype: torch.dtype, full_eval: str | None
) -> None:
    made: list[tuple[TrainerLevel, Any]] = []
    monkeypatch.setattr(TrainerLevel, "entry", lambda level, patches, keep: made.append((level, patches)))
    cell = Cell("trainer", "evaluate", str(precision), attention_of(subject.fp32), False, 2, 8, 4, "sentences")
    with level_for(subject, cell, Settings(samples=2), []) as level:
        level.entry(Variant("layer_norm", precision, ("layer_norm",)))
    ((trainer, patches),) = made
    assert patches == ("layer_norm",)
    assert (trainer.load().dtype, trainer.settings.full_eval) == (dtype, full_eval)


def test_the_trainers_times_are_medians_over_its_evaluations(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([TrainerEvaluation(seconds, 1 / seconds, 3.0, 0.5, 4.0, {}) for seconds in (9.0, 2.0, 4.0)])

    def entry(level: TrainerLevel, patches: Any, keep: Any) -> Any:
        return lambda: contextlib.nullcontext(lambda: lambda: keep(next(found)))

    monkeypatch.setattr(TrainerLevel, "entry", entry)
    cell = Cell("trainer", "evaluate", "fp16", attention_of(subject.fp32), False, 2, 8, 4, "sentences")
    stock = Variant("stock fp16", Precision.FP16)
    with level_for(subject, cell, Settings(samples=2), []) as level, level.entry(stock)() as prepare:
        for _ in range(3):
            prepare()()
        evaluation = level.more([stock])["stock fp16"]["evaluation"]
    assert (evaluation["runtime"], evaluation["samples_per_second"], evaluation["loss"]) == (4.0, 1 / 4, 3.0)


def workloads_of(result: Any) -> list[str]:
    return [cell["cell"]["workload"] for cell in result["cells"]]


def test_every_part_of_a_model_runs_on_text_of_exactly_the_lengths(folder: str) -> None:
    result = run(Settings(model=folder, workloads=("stack",), text="full", patches=("layer_norm",), **ONCE))
    assert workloads_of(result) == list(LEVELS["stack"])
    assert result["failures"] == []


def test_each_evaluation_is_what_its_name_says(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, EvaluationSettings] = {}
    monkeypatch.setattr(levels, "TrainerLevel", lambda *arguments: asked.__setitem__(workload, arguments[3]) or Mock())
    for workload in LEVELS["trainer"]:
        cell = Cell("trainer", workload, "fp16", attention_of(subject.fp32), False, 2, 8, 4, "sentences")
        with levels.Trainer(subject, cell, Settings(num_beams=3)) as level:
            level.entry(Variant("stock fp16", Precision.FP16))
    plain = EvaluationSettings(2, 8, 4, full_eval="fp16")
    assert asked == {
        "evaluate": plain,
        "evaluate_smoothed": dataclasses.replace(plain, label_smoothing=0.1),
        "evaluate_fixed": dataclasses.replace(plain, fixed_length=True),
        "evaluate_beam": dataclasses.replace(plain, num_beams=3),
    }


def test_a_compiled_forward_is_timed_and_leaves_nothing_behind(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo without a C++ compiler.
    monkeypatch.setattr(torch.nn.Module, "compile", eagerly_compiled)
    result = run(Settings(model=folder, workloads=("encoder",), compiled=(True,), patches=("layer_norm",), **ONCE))
    (cell,) = result["cells"]
    assert cell["cell"]["compiled"]
    assert [row["variant"] for row in cell["rows"]] == ["stock fp32", "stock fp16", "layer_norm"]
    assert all(row["seconds"] and row["census"] is None for row in cell["rows"])
    assert result["failures"] == []
    assert COMPILED
    assert all(module._compiled_call_impl is None for module in COMPILED)


COMPILED: list[Any] = []


def eagerly_compiled(module: Any, **options: Any) -> None:
    module._compiled_call_impl = torch.compile(module._call_impl, backend="eager", **options)
    COMPILED.append(module)


def test_an_interrupted_run_goes_on_where_it_was(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cells.jsonl"
    command = ["ablate", "--model", folder, "--workloads", "encoder,forward,results", "--jsonl", str(file)]
    command += ["--lengths", "8/4", "--rounds", "2", "--min-rounds", "2", "--time-budget", "0", "--threads", "1"]
    measured: list[str] = []
    stop_at = "forward"
    timed = ablation.interleave

    def interleave(*args: Any, **kwargs: Any) -> Any:
        measured.append(kwargs["advance"])
        if len(measured) == 2 and stop_at:
            raise KeyboardInterrupt
        return timed(*args, **kwargs)

    monkeypatch.setattr(ablation, "interleave", interleave)
    assert main(command) == 2
    assert f"stopped: the same command goes on from {str(file)!r}" in capsys.readouterr().err
    first = read(file)
    assert workloads_of(first) == ["encoder"]
    stop_at = ""
    assert main(command) == 0
    assert "3 cells, 1 finished already: up to about " in capsys.readouterr().err
    # The encoder was timed once, the forward begun twice.
    assert len(measured) == 3
    whole = read(file)
    assert workloads_of(whole) == ["encoder", "forward", "results"]
    assert whole["cells"][0] == first["cells"][0]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "3 cells, all finished already" in captured.err
    assert "Encoder" in captured.out
    assert len(measured) == 3


def test_other_circumstances_are_other_cells(folder: str, tmp_path: Path) -> None:
    settings = Settings(model=folder, workloads=("encoder",), patches=("layer_norm",), **ONCE)
    store = tmp_path / "cells.jsonl"
    said: list[str] = []
    for each in (settings, settings, dataclasses.replace(settings, seed=1)):
        run(each, Progress(said.append), Store(store))
    assert [line.partition(":")[0] for line in said] == ["1 cells", "1 cells, all finished already", "1 cells"]
    assert len(read(store)["cells"]) == 2


def test_a_patch_more_is_measured_anew(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model=folder, workloads=("encoder",), **ONCE)
    store = tmp_path / "cells.jsonl"
    said: list[str] = []
    monkeypatch.setattr(ablation, "list_patches", lambda: t5fastpatch.list_patches()[:1])
    run(settings, Progress(said.append), Store(store))
    monkeypatch.undo()
    run(settings, Progress(said.append), Store(store))
    assert [line.partition(":")[0] for line in said] == ["1 cells", "1 cells"]


def test_a_line_that_was_cut_off_is_measured_again_and_nothing_else_lost(folder: str, tmp_path: Path) -> None:
    settings = Settings(model=folder, workloads=("encoder", "forward"), patches=("layer_norm",), **ONCE)
    store = tmp_path / "cells.jsonl"
    run(settings, Progress(), Store(store))
    text = store.read_text(encoding="utf-8")
    store.write_text(text[:-100], encoding="utf-8")
    said: list[str] = []
    run(settings, Progress(said.append), Store(store))
    assert said[0].startswith("2 cells, 1 finished already")
    assert store.read_text(encoding="utf-8").startswith(text[:-100])
    assert workloads_of(read(store)) == ["encoder", "forward"]


def test_a_file_of_something_else_is_not_written_to(folder: str, tmp_path: Path) -> None:
    for content in ("my notes\n", '{"a": 1}\n', '{"schema": "other/1"}\n'):
        file = tmp_path / "file"
        file.write_text(content)
        with pytest.raises(T5FastPatchError, match="file"):
            Store(file)
        assert file.read_text() == content


def test_a_cell_that_cannot_run_is_a_failure_and_the_others_go_on(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Bench._make

    def make(bench: Bench, model: Any) -> Any:
        if bench._cell.workload == "encoder":
            raise RuntimeError("out of memory\nmore")
        return made(bench, model)

    monkeypatch.setattr(Bench, "_make", make)
    settings = Settings(model=folder, workloads=("encoder", "forward"), patches=("layer_norm",), **ONCE)
    result = run(settings, store=Store(tmp_path / "cells.jsonl"))
    assert workloads_of(result) == ["forward"]
    (failure,) = result["failures"]
    assert failure.startswith("encoder, 8 x 8, fp16, ")
    assert failure.endswith("RuntimeError: out of memory")
    assert read(tmp_path / "cells.jsonl")["failures"] == [failure]


def test_the_trainer_on_sentences_without_references_is_a_failure_and_the_others_go_on(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, references=False))
    result = run(Settings(model=folder, workloads=("evaluate", "encoder"), patches=("layer_norm",), **ONCE))
    assert workloads_of(result) == ["encoder"]
    (failure,) = result["failures"]
    assert "the Trainer's loss and BLEU take sentences, each with a reference" in failure


def test_a_library_that_the_trainer_lacks_is_said_before_anything_is_measured(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    said: list[str] = []
    with pytest.raises(T5FastPatchError, match="accelerate is not installed"):
        run(Settings(model=folder, workloads=("encoder", "trainer"), **ONCE), Progress(said.append))
    assert said == []


def test_every_preset_says_beforehand_how_long_it_takes(subject: Subject) -> None:
    estimate = Estimate(subject)
    seconds = {}
    for name in PRESETS:
        settings = preset(name)
        cells = grid(settings, subject, MICRO)
        seconds[name] = estimate.seconds([(cell, 6) for cell in cells], settings)
    assert 0 < seconds["quick"] < seconds["report"] < seconds["full"]


def test_an_estimate_grows_with_what_is_asked(subject: Subject) -> None:
    estimate = Estimate(subject)

    def seconds(settings: Settings, variants: int = 4) -> float:
        return estimate.seconds([(cell, variants) for cell in grid(settings, subject, MICRO)], settings)

    greedy = Settings(workloads=("greedy",), lengths=((8, 16),))
    assert seconds(greedy) < seconds(dataclasses.replace(greedy, lengths=((8, 64),)))
    assert seconds(greedy) < seconds(greedy, variants=8)
    assert seconds(greedy) < seconds(dataclasses.replace(greedy, min_rounds=40, rounds=40))


@pytest.mark.parametrize(
    ("workload", "call"),
    [
        ("forward", 1.0),
        ("decoder_step", 0.5),
        ("greedy", 1 + 16 * 0.5),
        ("evaluate", 3 * (1 + 16 * 0.5)),  # two batches, the first of them twice
    ],
)
def test_an_estimate_counts_calls_as_they_are_made(subject: Subject, workload: str, call: float) -> None:
    estimate = Estimate(subject)
    estimate._costs = {("forward", "fp16"): Cost(1.0, 0.0), ("decoder_step", "fp16"): Cost(0.5, 0.0)}
    settings = Settings(workloads=(workload,), lengths=((8, 16),), batch_sizes=(4,), samples=8, time_budget=0)
    (cell,) = grid(settings, subject, MICRO)
    assert estimate.seconds([(cell, 5)], settings) == pytest.approx((2 + settings.min_rounds) * 5 * call)
    patient = dataclasses.replace(settings, time_budget=1e6)
    assert estimate.seconds([(cell, 5)], patient) == pytest.approx((2 + settings.rounds) * 5 * call)


def test_short_calls_are_estimated_as_often_as_they_are_made(subject: Subject) -> None:
    estimate = Estimate(subject)
    estimate._costs = {("forward", "fp16"): Cost(0.005, 0.0), ("decoder_step", "fp16"): Cost(0.0, 0.0)}
    settings = Settings(workloads=("forward",), time_budget=0)
    cells = grid(settings, subject, MICRO)
    assert estimate.seconds([(cells[0], 1)], settings) == pytest.approx(0.005 * (2 + settings.min_rounds * (4 + 1)))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (42.4, "42 s"), (95, "2 min"), (5300, "88 min"), (12600, "3.5 h")]
)
def test_a_length_of_time_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_the_jsonl_and_the_json_hold_the_same_cells(folder: str, tmp_path: Path) -> None:
    json_file, jsonl = tmp_path / "result.json", tmp_path / "result.jsonl"
    command = ["ablate", "--model", folder, "--workloads", "encoder", "--lengths", "8/4", "--rounds", "2"]
    command += ["--min-rounds", "2", "--json", str(json_file), "--jsonl", str(jsonl), "--threads", "1"]
    assert main(command) == 0
    assert json.loads(json_file.read_text(encoding="utf-8"))["cells"] == read(jsonl)["cells"]
