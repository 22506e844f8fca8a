from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from tiny import save_model

from t5fastpatch import T5FastPatchError, list_patches, status
from t5fastpatch.cli import main
from t5fastpatch.measure.ablation import run
from t5fastpatch.measure.record import finite
from t5fastpatch.measure.settings import Settings
from t5fastpatch.measure.subject import attention_of, load
from t5fastpatch.patch import State
from t5fastpatch.report import Report

QUICK = [
    *("--lengths", "16/4", "--batch-size", "4", "--rounds", "2", "--min-rounds", "2"),
    *("--threads", "1", "--time-budget", "0"),
]
ONCE: dict[str, Any] = {"rounds": 2, "min_rounds": 2, "time_budget": 0, "threads": 1, "lengths": ((16, 4),)}
WORKLOADS = ["forward", "decoder_step", "greedy"]
Result = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def result(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes as JSON."""
    file = tmp_path_factory.mktemp("json") / "ablation.json"
    assert main(["ablate", "--model", str(model), "--json", str(file), *QUICK]) == 0
    written: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    return written


def usable(model: Path) -> list[str]:
    """The patches that apply, and under which other operations run than in stock."""
    rows = status(transformers.T5ForConditionalGeneration.from_pretrained(model).half()).rows
    applies = [row.patch for row in rows if row.state is State.APPLIES]
    attention = attention_of(load(str(model), "cpu").fp32)
    # Of ReLU, `gelu` only saves a tensor, and where a census listens, not even that.
    idle = ["wo_without_weight", "gelu", *(["eager_scores"] if attention == "sdpa" else [])]
    return [name for name in applies if name not in idle]


def cell_of(result: Any, workload: str) -> Result:
    found: Result = next(cell for cell in result["cells"] if cell["cell"]["workload"] == workload)
    return found


def rows_of(result: Any, workload: str) -> dict[str, Result]:
    return {row["variant"]: row for row in cell_of(result, workload)["rows"]}


def test_every_workload_is_a_cell_and_every_variant_a_row(model: Path, result: Result) -> None:
    expected = ["stock fp32", "stock fp16", *(patch.name for patch in list_patches()), "all"]
    names = usable(model)
    if len(names) > 2:
        expected += [f"all but {name}" for name in names]
    assert [cell["cell"]["workload"] for cell in result["cells"]] == [*WORKLOADS, "results"]
    for cell in result["cells"]:
        assert [row["variant"] for row in cell["rows"]] == expected
    assert rows_of(result, "forward")["all"]["patches"] == names


def test_a_patch_with_nothing_to_do_has_a_row_that_says_so(model: Path, result: Result) -> None:
    rest = {patch.name for patch in list_patches()} - set(usable(model))
    for cell in result["cells"]:
        assert {row["variant"] for row in cell["rows"] if not row["measured"]} == rest
        for row in cell["rows"]:
            if row["variant"] in rest:
                state = State(row["state"])
                assert state in (State.UPSTREAM, State.ABSENT, State.NEEDLESS, State.APPLIES, State.UNSAFE)
                runs = state in (State.APPLIES, State.UNSAFE)  # unsafe alone, so by its name
                if state is not State.ABSENT:  # which some patches give a reason for
                    assert bool(row["why"]) == (runs or state is State.NEEDLESS)
                assert ("the same operations run as in stock fp16" in row["why"]) == runs
                assert (row["census"], row["seconds"], row["quality"]) == (None, None, None)


def test_every_measured_row_is_complete(result: Result) -> None:
    for workload in WORKLOADS:
        for row in filter(lambda row: row["measured"], cell_of(result, workload)["rows"]):
            assert len(row["seconds"]) == cell_of(result, workload)["rounds"] == 2
            for ratio in (row["to_half"], row["to_fp32"]):
                assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
            assert (row["census"] is None) == (workload == "greedy")
            stock_or_all = row["state"] == "stock" or "all" in (row["variant"], row["label"])
            assert (row["categories"] is None) == (workload == "greedy" or not stock_or_all)
    for row in filter(lambda row: row["measured"], cell_of(result, "results")["rows"]):
        assert None not in row["quality"].values()
        assert set(row["quality"]["bleu_by_task"]) == {
            "translate English to German:",
            "translate English to French:",
        }


def test_the_baselines_are_beside_themselves(result: Result) -> None:
    one = {"median": 1.0, "low": 1.0, "high": 1.0, "measurable": False}
    for workload in WORKLOADS:
        rows = rows_of(result, workload)
        assert rows["stock fp32"]["to_fp32"] == one
        assert rows["stock fp16"]["to_half"] == one
    fp32, fp16 = (rows_of(result, "results")[name]["quality"] for name in ("stock fp32", "stock fp16"))
    assert (fp32["max_difference"], fp32["agreement"]) == (0.0, 1.0)
    assert fp16["max_difference"] > 0
    assert fp16["loss"] == pytest.approx(fp32["loss"], abs=0.05)


def test_all_patches_together_cost_fewer_operations_and_casts_than_stock(result: Result) -> None:
    for workload in ("forward", "decoder_step"):
        stock, everything = (rows_of(result, workload)[name]["census"] for name in ("stock fp16", "all"))
        assert everything["ops"] < stock["ops"]
        assert everything["casts"] < stock["casts"]


def test_the_shares_add_up_to_what_all_patches_save(model: Path, result: Result) -> None:
    for workload in WORKLOADS:
        cell = cell_of(result, workload)
        if len(usable(model)) > 3:  # where attention is always eager: their subsets are more than the table's rows
            assert cell["attribution"] is None
            continue
        shares = cell["attribution"]["shares"]
        assert list(shares) == usable(model)
        saved = 1 - rows_of(result, workload)["all"]["to_half"]["median"]
        assert cell["attribution"]["saved"]["median"] == pytest.approx(saved)
        assert sum(share["share"] for share in shares.values()) == pytest.approx(saved)


def test_the_json_says_where_and_how_it_was_measured(result: Result) -> None:
    about = result["environment"]
    assert about["transformers"] == transformers.__version__
    assert {"python", "torch", "t5fastpatch", "device_name", "threads", "platform", "cores", "load"} <= set(about)
    assert about["threads"] == 1
    assert result["settings"]["lengths"] == [[16, 4]]
    assert result["subject"] == {
        "name": result["settings"]["model"],
        "parameters": result["subject"]["parameters"],
        "seq2seq": True,
        "sentences": str(Path(result["settings"]["model"]) / "heldout.jsonl"),
    }
    assert result["subject"]["parameters"] > 10_000
    assert result["failures"] == []


def test_the_tables_fit_and_name_every_row(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["ablate", "--model", str(model), "--samples", "4", "--seed", "3", *QUICK]) == 0
    assert torch.get_num_threads() == threads
    captured = capsys.readouterr()
    tables = [line for line in captured.out.splitlines() if line.startswith(("│", "┏", "└"))]
    assert max(map(len, tables)) <= 120
    for name in ("stock fp32", "stock fp16", "all", *(patch.name for patch in list_patches())):
        assert any(line.startswith(f"│ {name}") for line in tables)
    assert "say nothing of a GPU's fp16" in captured.out
    assert captured.err.splitlines()[0].startswith("4 cells: up to about ")


def test_chosen_patches_in_bfloat16(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    options = ["--patches", "layer_norm,softmax_dtype", "--dtype", "bfloat16", "--json", str(file), *QUICK]
    assert main(["ablate", "--model", str(model), "--workloads", "forward", *options]) == 0
    names = list(rows_of(json.loads(file.read_text()), "forward"))
    assert names[:4] == ["stock fp32", "stock bf16", "softmax_dtype", "layer_norm"]


def test_an_encoder_alone_is_measured_by_its_forward(tmp_path: Path) -> None:
    folder = save_model(tmp_path, transformers.T5EncoderModel)
    result = run(Settings(model=str(folder), **ONCE))
    assert [cell["cell"]["workload"] for cell in result["cells"]] == ["forward", "results"]
    quality = rows_of(result, "results")["stock fp16"]["quality"]
    assert quality["max_difference"] > 0
    assert (quality["loss"], quality["bleu"], quality["gen_len"], quality["agreement"]) == (None,) * 4


def test_without_references_there_is_neither_loss_nor_bleu(tmp_path: Path) -> None:
    folder = save_model(tmp_path, references=False)
    result = run(Settings(model=str(folder), patches=("layer_norm",), workloads=("results",), **ONCE))
    quality = rows_of(result, "results")["stock fp16"]["quality"]
    assert (quality["loss"], quality["bleu"]) == (None, None)
    assert quality["agreement"] is not None


def test_overflow_is_reported_as_it_is(tmp_path: Path) -> None:
    folder = save_model(tmp_path, scale=1e5)
    settings = Settings(model=str(folder), patches=("skip_inf_check",), workloads=("results",), **ONCE)
    written = json.loads(json.dumps(finite(run(settings)), allow_nan=False))
    quality = rows_of(written, "results")["skip_inf_check"]["quality"]
    assert quality["nonfinite"] > 0
    assert (quality["max_difference"], quality["loss"]) == ("nan", "nan")


def bad(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that the command ends with."""
    capsys.readouterr()
    assert main(["ablate", *options, *QUICK]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_model_directory_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "nowhere")
    assert bad(capsys, "--model", folder) == f"error: there is no model folder {folder!r}"
    assert bad(capsys, "--model", "./nowhere") == "error: there is no model folder './nowhere'"


def test_a_directory_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bad(capsys, "--model", str(tmp_path)).startswith(f"error: cannot load {str(tmp_path)!r}: ")


def test_a_hub_name_without_a_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert bad(capsys, "--model", "nobody/no-such-model").startswith("error: cannot load 'nobody/no-such-model': ")


def test_an_unknown_dtype(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    line = bad(capsys, "--model", str(model), "--dtype", "float8")
    assert line.startswith("error: no precision is called 'float8': there are fp32, ")


def test_an_unknown_device(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert bad(capsys, "--model", str(model), "--device", "abacus").startswith("error: no device 'abacus' here: ")
    assert "not on 'meta'" in bad(capsys, "--model", str(model), "--device", "meta")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workloads", "forwards"], "no workload or level is called 'forwards': there are micro, stack, "),
        (["--attention", "flash"], "no attention implementation is called 'flash': there are default, eager, sdpa"),
        (["--preset", "fast"], "there is no preset 'fast': there are quick, report, full"),
        (["--shape", "t5-tiny"], "name a model or a shape, not both"),
        (["--batch-size", "0"], "'0' is no number from 1 to 2147483647: write --batch-size 1,8,64"),
        (["--lengths", "12x128"], "'12x128' is no number from 1 to 2147483647: write --lengths 128/64,512/512"),
        (["--lengths", "12/1"], "a target has two tokens or more"),
        (["--compile", "yes"], "--compile is on, off or both with a comma, not 'yes'"),
        (["--text", "random"], "--text is sentences or full, not 'random'"),
        (["--workloads", "decoder_step", "--compile", "on", "--dtype", "tf32"], "none of these workloads makes sense"),
    ],
)
def test_what_cannot_be_measured(
    capsys: pytest.CaptureFixture[str], model: Path, options: list[str], said: str
) -> None:
    capsys.readouterr()
    assert main(["ablate", "--model", str(model), *QUICK, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {said}")
    assert len(captured.err.splitlines()) == 1


def test_an_unknown_patch(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    line = bad(capsys, "--model", str(model), "--patches", "layer_norm,softmax_type")
    assert "'softmax_type'" in line
    assert "softmax_dtype" in line


def test_a_json_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "ablation.json"
    assert "cannot write" in bad(capsys, "--model", str(model), "--json", str(file))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(T5FastPatchError, match=r"sacrebleu is not installed: .*t5fastpatch\[ablate\]"):
        run(Settings(model=str(model)))
    assert run(Settings(model=str(model), workloads=("forward",), **ONCE))["failures"] == []


def test_the_script_is_the_command() -> None:
    script = Path(__file__).parents[1] / "scripts" / "ablate.py"
    command = [sys.executable, str(script), "--model", "./nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no model folder './nowhere'\n"


def test_a_refused_patch_is_a_failure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(model: Any) -> Report:
        rows = [
            dataclasses.replace(row, state=State.REFUSED, why="not as known") if row.patch == "layer_norm" else row
            for row in status(model).rows
        ]
        return Report("T5", transformers.__version__, tuple(rows))

    monkeypatch.setattr("t5fastpatch.measure.ablation.status", refusing)
    assert main(["ablate", "--model", str(model), *QUICK]) == 1


def test_presets_are_sets_of_candidates(model: Path) -> None:
    for preset in ("safe", "fast", "accurate", "exact"):
        result = run(Settings(model=str(model), patches=(preset,), workloads=("forward",), counts=False, **ONCE))
        rows = rows_of(result, "forward")
        assert result["failures"] == []
        assert ("residual_rescale" in rows) == (preset in ("safe", "fast"))
        assert ("residual_fp32" in rows) == (preset in ("safe", "accurate"))
        assert ("layer_norm" in rows) == (preset != "exact")
        if "residual_fp32" in rows:
            # Where residual_rescale is asked for too, it says of both that they are not needed.
            assert rows["residual_fp32"]["measured"] == (preset == "accurate")


def test_what_has_no_proof_is_measured_by_name_alone_and_said_to_be(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, scale=1e5))
    result = run(Settings(model=folder, workloads=("forward",), precisions=("fp16_from_pretrained",), **ONCE))
    rows = rows_of(result, "forward")
    assert (rows["skip_inf_check"]["state"], rows["skip_inf_check"]["measured"]) == ("unsafe", True)
    said = "skip_inf_check: on by its name alone, as in no preset: its proof of headroom rests on residual_rescale."
    assert said in result["notes"]
    assert {"residual_rescale", "wo_half", "skip_inf_check"} <= set(rows["all"]["patches"])
    assert rows["residual_fp32"]["measured"]
    assert "residual_fp32" not in rows["all"]["patches"]
    stock, everything = rows["stock fp16_from_pretrained"]["census"], rows["all"]["census"]
    assert everything["fp32_share"] == 0 < stock["fp32_share"]
