"""Odd input to the measuring commands: one line of error, and whatever can be measured is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
import zoo
from tiny import SIZES, save_model, save_tokenizer

import t5fastpatch
from t5fastpatch import T5FastPatchError, rewrite
from t5fastpatch.cli import main
from t5fastpatch.measure.ablation import run
from t5fastpatch.measure.settings import Settings
from t5fastpatch.measure.store import Store
from t5fastpatch.patch import Contract, Role, SourcePatch, State
from t5fastpatch.registry import get_patch
from t5fastpatch.reports.reading import read
from t5fastpatch.reports.schema import SCHEMA

QUICK = ["--lengths", "8/4", "--batch-size", "2", "--rounds", "2", "--threads", "1", "--workloads", "forward"]
ONCE: dict[str, Any] = {"rounds": 2, "min_rounds": 2, "threads": 1, "lengths": ((8, 4),), "batch_sizes": (2,)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("t5"))


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    return save_model(tmp_path)


@pytest.fixture
def process_wide_layer_norm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As T5FASTPATCH puts it on, which only a new process can: `status` says that it is on."""
    for place in ("t5fastpatch.measure.ablation", "t5fastpatch.measure.cost.forecast", "t5fastpatch.engine"):
        monkeypatch.setattr(f"{place}.status", with_layer_norm_on)


stock_status = t5fastpatch.status


def with_layer_norm_on(_: Any) -> Any:
    model = zoo.BY_NAME["t5"].build()
    t5fastpatch.apply(model, ["layer_norm"])
    return stock_status(model)


def error_of(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What a command that fails says; nothing else may be printed."""
    capsys.readouterr()
    assert main([str(each) for each in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    "option", ["--dtype", "--attention", "--compile", "--workloads", "--batch-size", "--lengths", "--patches"]
)
@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_list_is_an_error(capsys: pytest.CaptureFixture[str], model: Path, option: str, text: str) -> None:
    said = error_of(capsys, "ablate", "--model", model, option, text)
    assert said == f"{option} names nothing: leave it out, or say what"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-rounds", "5", "--rounds", "4"], "--min-rounds 5 is more than --rounds 4"),
        (["--min-rounds", "30"], "--min-rounds 30 is more than --rounds 20"),
        (["--batch-size", "99999999999999999999"], "'99999999999999999999' is no number from 1 to"),
        (["--threads", "100000"], "cores here: name 1 to"),
    ],
)
def test_numbers_out_of_range(capsys: pytest.CaptureFixture[str], model: Path, options: list[str], said: str) -> None:
    assert said in error_of(capsys, "ablate", "--model", model, *options)


def test_a_negative_seed_is_refused_before_anything_is_measured(model: Path) -> None:
    assert main(["ablate", "--model", str(model), "--seed", "-1"]) == 2


@pytest.mark.parametrize("option", ["--json", "--jsonl", "--html", "--markdown"])
def test_a_file_that_is_a_directory_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, option: str
) -> None:
    assert "Is a directory" in error_of(capsys, "ablate", "--model", model, *QUICK, option, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "--calls", "1", "--json"],
        ["predict", "--device", "T4", "--json"],
    ],
)
def test_profile_and_predict_say_so_too(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]) -> None:
    assert "Is a directory" in error_of(capsys, *command, tmp_path)


@pytest.mark.parametrize("command", [["ablate", "--figures"], ["profile", "--trace"]])
def test_a_folder_that_is_a_file_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").touch()
    assert "cannot write" in error_of(capsys, *command, tmp_path / "file")


def test_no_file_is_written_over_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out"
    again = tmp_path / ".." / tmp_path.name / "out"
    assert "is named twice" in error_of(capsys, "ablate", "--json", file, "--jsonl", again)
    file.write_text(json.dumps({"schema": SCHEMA}), encoding="utf-8")
    before = file.read_bytes()
    assert "is named twice" in error_of(capsys, "report", file, "--html", again)
    assert "is named twice" in error_of(capsys, "compare", file, file, "--json", file)
    assert file.read_bytes() == before


def test_checking_the_outputs_leaves_files_alone(tmp_path: Path) -> None:
    from t5fastpatch.files import check_outputs

    (tmp_path / "old").write_text("kept", encoding="utf-8")
    check_outputs(tmp_path / "old", tmp_path / "new", None)
    assert [each.name for each in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text(encoding="utf-8") == "kept"


def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    store = Store(folder / "cells.jsonl")
    (folder / "cells.jsonl").unlink()
    folder.rmdir()
    with pytest.raises(T5FastPatchError, match="cannot write"):
        store.append({})
    with pytest.raises(T5FastPatchError, match="it is no file"):
        Store(Path(os.devnull))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
        (b'{"source": 3}', "are texts"),
        (b'{"source": "page", "target": ["page"]}', "are texts"),
        (b'{"source": null}', "are texts"),
    ],
)
def test_held_out_sentences_that_are_no_text(
    capsys: pytest.CaptureFixture[str], own_model: Path, content: bytes, said: str
) -> None:
    (own_model / "heldout.jsonl").write_bytes(content)
    error = error_of(capsys, "ablate", "--model", own_model, *QUICK)
    assert "does not hold one object a line with a source" in error
    assert said in error


def test_a_task_may_be_null_and_a_text_empty(own_model: Path) -> None:
    lines = [{"task": None, "source": "", "target": "page"}, {"source": "of a page\u2028", "target": "é"}]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (own_model / "heldout.jsonl").write_text(text, encoding="utf-8")
    result = run(Settings(model=str(own_model), workloads=("forward", "results"), **ONCE))
    assert len(result["cells"]) == 2


def test_models_of_other_inputs_than_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    zoo.BY_NAME["pix2struct"].build().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    said = error_of(capsys, "ablate", "--model", tmp_path, *QUICK)
    assert said == "a Pix2StructForConditionalGeneration is not measured: it does not make text of text alone"


def test_a_model_without_a_start_token_fails_cell_by_cell(tmp_path: Path) -> None:
    config = transformers.T5Config(**SIZES)
    config.decoder_start_token_id = None
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    result = run(Settings(model=str(tmp_path), workloads=("encoder", "decoder_step"), **ONCE))
    assert [cell["cell"]["workload"] for cell in result["cells"]] == ["encoder"]
    assert len(result["failures"]) == 1
    assert "decoder_start_token_id" in result["failures"][0]


def test_the_last_header_of_a_store_has_the_failures(tmp_path: Path) -> None:
    lines = [{"source": "", "target": ""}]
    own = save_model(tmp_path)
    (own / "heldout.jsonl").write_text(json.dumps(lines[0]), encoding="utf-8")
    file = tmp_path / "cells.jsonl"
    settings = Settings(model=str(own), workloads=("encoder", "decoder_step"), **ONCE)
    failures = run(settings, store=Store(file))["failures"]
    assert "labels of two tokens or more" in failures[0]
    assert read(file)["failures"] == failures


def ends_with(name: str, role: Role, expression: str, **more: Any) -> SourcePatch:
    """A patch that has a forward return something else."""

    def edits(method: rewrite.Method) -> list[rewrite.Edit]:
        return [method.replace(method.tree.body[-1].value, expression)]  # type: ignore[attr-defined]

    settings: dict[str, Any] = {"contract": Contract.EXACT, "role": role, "edits": edits, "sites": 1}
    return SourcePatch(name=name, summary="for a test", **{**settings, **more})


@pytest.mark.parametrize(
    ("role", "expression", "said"),
    [
        (Role.BLOCK, "1 / 0", "ZeroDivisionError"),
        (Role.BLOCK, "{}['x']", "KeyError"),
        (Role.NORM, "(self.weight * hidden_states)[..., :-1]", "RuntimeError"),
    ],
)
def test_a_patch_that_breaks_the_model_is_a_row_and_hurts_no_other(
    model: Path, role: Role, expression: str, said: str
) -> None:
    t5fastpatch.register(ends_with("broken", role, expression))
    result = run(Settings(model=str(model), workloads=("forward",), **ONCE))
    rows = {row["variant"]: row for row in result["cells"][0]["rows"]}
    assert (rows["broken"]["measured"], rows["broken"]["state"]) == (False, State.REFUSED.value)
    assert said in rows["broken"]["why"]
    assert rows["layer_norm"]["seconds"]
    assert "broken" not in rows["all"]["patches"]
    assert any(failure.startswith("broken: ") for failure in result["failures"])


def test_patches_that_meet_without_having_said_so_are_not_put_together(model: Path) -> None:
    from t5fastpatch.patches.skip_inf_check import edits

    t5fastpatch.register(ends_with("rival", Role.BLOCK, "", edits=edits, sites=get_patch("skip_inf_check").sites))
    result = run(Settings(model=str(model), workloads=("forward",), **ONCE))
    rows = {row["variant"]: row for row in result["cells"][0]["rows"]}
    assert rows["rival"]["seconds"]
    assert "rival" not in rows["all"]["patches"]
    assert rows["all"]["why"] == "without rival, in conflict with another"


@pytest.mark.usefixtures("process_wide_layer_norm")
@pytest.mark.parametrize(
    "command",
    [
        ["ablate", "--patches", "skip_inf_check"],
        ["profile", "--patches", "stock", "--against", "fp32"],
        ["predict", "--device", "T4"],
    ],
)
def test_nothing_is_stock_where_any_patch_is_on(
    capsys: pytest.CaptureFixture[str], model: Path, command: list[str]
) -> None:
    said = error_of(capsys, *command, "--model", model)
    assert said == "layer_norm is on already, so nothing here is stock: unset T5FASTPATCH"


@pytest.mark.parametrize("options", [["--workload", "greedy"], ["--workload", "decoder_step"], ["--dtype", "tf32"]])
def test_profiling_what_the_model_does_not_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    encoder = save_model(tmp_path, transformers.T5EncoderModel)
    workload = options[1] if options[0] == "--workload" else "decoder_step"
    said = error_of(capsys, "profile", "--model", encoder, *options)
    assert f"has no {workload} in" in said


def test_profiling_an_attention_or_a_selection_that_is_none(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    said = error_of(capsys, "profile", "--model", model, "--attention", "flash")
    assert said.startswith("no attention implementation is called 'flash'")
    said = error_of(capsys, "profile", "--model", model, "--patches", ",")
    assert said == "',' names no patch: 'stock' stands for none"


def test_predicting_a_model_that_wants_more_than_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    zoo.BY_NAME["udop"].build().save_pretrained(tmp_path)
    said = error_of(capsys, "predict", "--model", tmp_path, "--device", "T4")
    assert said.startswith("no prediction for this UdopForConditionalGeneration, which does not run: ")


def damaged(path: str, value: Any) -> str:
    """A result with a value where the path leads."""
    row = {"variant": "stock fp16", "patches": [], "quality": {}, "census": {}, "evaluation": {}}
    cell = {"cell": {}, "rows": [row], "attribution": {"shares": {}}}
    result: Any = {"schema": SCHEMA, "cells": [cell]}
    place = {"": result, "cell": cell, "row": row, "census": row["census"], "evaluation": row["evaluation"]}
    where, _, name = path.rpartition(".")
    place[where][name] = value
    return json.dumps(result)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("notes", 3, "its notes is no list"),
        ("failures", {}, "its failures is no list"),
        ("environment", [], "its environment is no object"),
        ("cells", {}, "its cells is no list"),
        ("cell.attribution", {"shares": {"layer_norm": 3}}, "its cells[0].attribution.shares.layer_norm is no object"),
        ("row.patches", 3, "its cells[0].rows[0].patches is no list"),
        ("row.quality", "good", "its cells[0].rows[0].quality is no object"),
        ("row.categories", [3], "its cells[0].rows[0].categories is no object"),
        ("census.flops_by_dtype", [1], "its cells[0].rows[0].census.flops_by_dtype is no object"),
        ("evaluation.memory", {"load": 3}, "its cells[0].rows[0].evaluation.memory.load is no object"),
        ("row.variant", 3, "a cell lacks its description or rows"),
    ],
)
def test_a_damaged_result_is_told_by_the_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, path: str, value: Any, said: str
) -> None:
    file = tmp_path / "result.json"
    file.write_text(damaged(path, value), encoding="utf-8")
    for command in (["report", file], ["report", file, "--html", tmp_path / "page"], ["compare", file, file]):
        assert error_of(capsys, *command).startswith(f"{str(file)!r} is damaged: {said}")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": ' + "9" * 5000 + "}", "", "\n\n"])
def test_what_is_no_result_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(text, encoding="utf-8")
    assert "is neither JSON nor JSON lines" in error_of(capsys, "report", file)


def test_a_result_may_have_a_byte_order_mark_nulls_and_huge_counts(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("\ufeff" + damaged("census.ops", 10**400), encoding="utf-8")
    assert main(["report", str(file)]) == 0
    file.write_text(json.dumps({"schema": SCHEMA, "cells": None, "subject": None, "notes": None}), encoding="utf-8")
    assert read(file)["cells"] == []


def test_a_line_separator_in_a_name_does_not_end_a_line(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    store = Store(file)
    store.append({"schema": SCHEMA, "subject": {"name": "a\u2028b\x85c"}})
    store.append({"key": "1", "cell": {}, "rows": []})
    assert read(file)["subject"]["name"] == "a\u2028b\x85c"
    assert Store(file).finished("1")


def test_the_model_is_as_it_was_after_an_error_in_the_middle(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from t5fastpatch.measure import ablation

    subjects: list[Any] = []
    make = ablation.subject_for
    monkeypatch.setattr(ablation, "subject_for", lambda *given: subjects.append(make(*given)) or subjects[-1])
    monkeypatch.setattr("t5fastpatch.measure.timing._sample", interrupted)
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run(Settings(model=str(model), workloads=("decoder_step",), attentions=("eager",), **ONCE))
    assert torch.get_num_threads() == threads
    subject = subjects[0]
    for each in map(subject.model, subject._models):
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in each.modules())
        assert stock_status(each)["layer_norm"].state is State.APPLIES


def interrupted(*_: object) -> float:
    raise KeyboardInterrupt
