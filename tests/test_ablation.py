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
from t5fastpatch.measure.report import to_dict, to_json
from tiny import save_model, save_tokenizer

from t5fastpatch import T5FastPatchError, list_patches, patched, status
from t5fastpatch.cli import main
from t5fastpatch.measure.ablation import run
from t5fastpatch.measure.quality import OutputTally, agreement, trimmed
from t5fastpatch.measure.settings import Settings
from t5fastpatch.measure.subject import load
from t5fastpatch.measure.variants import plan
from t5fastpatch.registry import Contract, Patch, Role, State
from t5fastpatch.report import Report
from t5fastpatch.report import Row as ReportRow

QUICK = ["--max-new-tokens", "4", "--batch-size", "4", "--rounds", "2", "--threads", "1", "--time-budget", "0"]
WORKLOADS = ["forward", "decoder_step", "generate"]


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
    rows = status(transformers.T5ForConditionalGeneration.from_pretrained(model).half()).rows
    return [row.patch for row in rows if row.state in (State.APPLIES, State.UNSAFE)]


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def test_every_variant_has_a_row(model: Path, result: dict[str, Any]) -> None:
    expected = ["stock fp32", "stock fp16", *(patch.name for patch in list_patches()), "all"]
    names = usable(model)
    if len(names) > 2:
        expected += [f"all but {name}" for name in names]
    assert [row["name"] for row in result["rows"]] == expected
    assert rows_of(result)["all"]["patches"] == names


def test_a_patch_with_nothing_to_do_has_a_row_that_says_so(model: Path, result: dict[str, Any]) -> None:
    rest = {patch.name for patch in list_patches()} - set(usable(model))
    assert {row["name"] for row in result["rows"] if not row["measured"]} == rest
    for name in rest:
        row = rows_of(result)[name]
        assert row["state"] in (State.UPSTREAM.value, State.ABSENT.value)
        assert (row["census"], row["timing"], row["quality"]) == (None, {}, None)


def test_every_measured_row_is_complete(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["measured"]:
            assert list(row["timing"]) == WORKLOADS
            for timing in row["timing"].values():
                for ratio in (timing["to_half"], timing["to_fp32"]):
                    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
            assert None not in row["quality"].values()
            assert row["census"]["ops"] > 0
            assert set(row["quality"]["bleu_by_task"]) == {
                "translate English to German:",
                "translate English to French:",
            }


def test_the_baselines_are_beside_themselves(result: dict[str, Any]) -> None:
    fp32, fp16 = rows_of(result)["stock fp32"], rows_of(result)["stock fp16"]
    for workload in WORKLOADS:
        assert fp32["timing"][workload]["to_fp32"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert fp16["timing"][workload]["to_half"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (fp32["quality"]["max_difference"], fp32["quality"]["agreement"]) == (0.0, 1.0)
    assert fp16["quality"]["max_difference"] > 0
    assert fp16["quality"]["loss"] == pytest.approx(fp32["quality"]["loss"], abs=0.05)


def test_all_patches_together_cost_fewer_operations_and_casts_than_stock(result: dict[str, Any]) -> None:
    stock, everything = (rows_of(result)[name]["census"] for name in ("stock fp16", "all"))
    assert everything["ops"] < stock["ops"]
    assert everything["casts"] < stock["casts"]


def test_the_json_says_where_and_how_it_was_measured(result: dict[str, Any]) -> None:
    assert result["environment"]["transformers"] == transformers.__version__
    assert {"python", "torch", "t5fastpatch", "device_name", "threads", "platform"} <= set(result["environment"])
    assert result["environment"]["threads"] == 1
    assert result["settings"]["max_new_tokens"] == 4
    assert (result["sentences"], result["batch_size"]) == (10, 4)
    assert result["rounds"] == dict.fromkeys(WORKLOADS, 2)
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
    assert "say nothing of half precision on a GPU" in captured.out
    assert "Results over 4 held-out sentences" in captured.out


def test_chosen_patches_in_bfloat16(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    options = ["--patches", "layer_norm,softmax_dtype", "--dtype", "bfloat16", "--json", str(file), *QUICK]
    assert main(["ablate", "--model", str(model), *options]) == 0
    names = [row["name"] for row in json.loads(file.read_text())["rows"]]
    assert names[:4] == ["stock fp32", "stock bf16", "softmax_dtype", "layer_norm"]


def test_an_encoder_alone_is_measured_by_its_forward(tmp_path: Path) -> None:
    folder = save_model(tmp_path, transformers.T5EncoderModel)
    result = run(Settings(str(folder), rounds=2, time_budget=0, threads=1))
    assert result.workloads == ["forward"]
    assert result.counted == "forward"
    quality = result.rows[1].quality
    assert quality is not None
    assert quality.max_difference > 0
    assert (quality.loss, quality.bleu, quality.gen_len, quality.agreement) == (None,) * 4


def test_without_references_there_is_neither_loss_nor_bleu(tmp_path: Path) -> None:
    folder = save_model(tmp_path, references=False)
    result = run(Settings(str(folder), patches=("layer_norm",), rounds=2, time_budget=0, max_new_tokens=4, threads=1))
    quality = result.rows[1].quality
    assert quality is not None
    assert (quality.loss, quality.bleu) == (None, None)
    assert quality.agreement is not None


def test_overflow_is_reported_as_it_is(tmp_path: Path) -> None:
    folder = save_model(tmp_path, scale=1e5)
    settings = Settings(str(folder), patches=("skip_inf_check",), rounds=2, time_budget=0, max_new_tokens=4, threads=1)
    result = run(settings)
    written = json.loads(to_json(result), parse_constant=pytest.fail)
    quality = rows_of(written)["skip_inf_check"]["quality"]
    assert quality["nonfinite"] > 0
    assert (quality["max_difference"], quality["loss"]) == ("nan", "nan")
    assert to_dict(result) == written


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


def test_a_model_that_is_not_t5(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16
    )
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "no module of the T5 family" in bad(capsys, "--model", str(tmp_path))


def test_an_unknown_dtype(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    line = bad(capsys, "--model", str(model), "--dtype", "float8")
    assert line.startswith("error: no half-precision dtype is called 'float8': there are float16, ")


def test_an_unknown_device(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert bad(capsys, "--model", str(model), "--device", "abacus").startswith("error: no device 'abacus' here: ")
    assert "not on 'meta'" in bad(capsys, "--model", str(model), "--device", "meta")


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
        run(Settings(str(model)))


def test_the_script_is_the_command() -> None:
    script = Path(__file__).parents[1] / "scripts" / "ablate.py"
    command = [sys.executable, str(script), "--model", "./nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no model folder './nowhere'\n"


def test_a_patched_model_is_not_stock(model: Path) -> None:
    half = load(str(model), "float16", "cpu").half
    with (
        patched(half, ["layer_norm"]),
        pytest.raises(T5FastPatchError, match="layer_norm is on already"),
    ):
        plan(status(half), list_patches(), "fp16")


def planned(states: dict[str, State], conflicts: dict[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    """Label and patches of each row after the stock models'."""
    patches = [
        Patch(name, "", Contract.EXACT, Role.NORM, conflicts=frozenset(filter(None, [(conflicts or {}).get(name)])))
        for name in states
    ]
    rows = tuple(ReportRow(name, state, 1, 1, "exact") for name, state in states.items())
    variants = plan(Report("T5", "5.0", rows), patches, "fp16")[2:]
    return {variant.label: variant.patches for variant in variants}


def test_no_row_is_measured_twice() -> None:
    applies = State.APPLIES
    assert planned({"a": applies}) == {"a (= all)": ("a",)}
    assert planned({"a": applies, "b": State.UPSTREAM, "c": State.UNSAFE}) == {
        "a (= all but c)": ("a",),
        "b": (),
        "c (= all but a)": ("c",),
        "all": ("a", "c"),
    }
    assert planned({"a": applies, "b": applies, "c": applies}) == {
        "a": ("a",),
        "b": ("b",),
        "c": ("c",),
        "all": ("a", "b", "c"),
        "all but a": ("b", "c"),
        "all but b": ("a", "c"),
        "all but c": ("a", "b"),
    }


def test_what_conflicts_is_not_put_together() -> None:
    applies = State.APPLIES
    assert planned({"a": applies, "b": applies, "c": applies}, conflicts={"c": "a"}) == {
        "a (= all but b)": ("a",),
        "b (= all but a)": ("b",),
        "c": ("c",),
        "all": ("a", "b"),
    }


def test_a_refused_patch_is_a_failure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(model: Any) -> Report:
        rows = [
            dataclasses.replace(row, state=State.REFUSED, why="not as known") if row.patch == "layer_norm" else row
            for row in status(model).rows
        ]
        return Report("T5", transformers.__version__, tuple(rows))

    monkeypatch.setattr("t5fastpatch.measure.ablation.status", refusing)
    assert main(["ablate", "--model", str(model), *QUICK]) == 1


def test_generations_end_with_the_end_of_sentence() -> None:
    tokens = torch.tensor([[0, 5, 6, 1, 0], [0, 5, 0, 7, 8], [0, 1, 0, 0, 0], [0, 5, 0, 0, 0]])
    assert trimmed(tokens, end=1, padding=0) == [[5, 6, 1], [5, 0, 7, 8], [1], [5]]


def test_agreement_is_over_the_longer_generation() -> None:
    assert agreement([[5, 6, 1]], [[5, 6, 1]]) == 1.0
    assert agreement([[5, 6, 1], [7]], [[5, 1], [7, 8]]) == 2 / 5
    assert agreement([[]], [[]]) == 1.0


def test_differences_are_taken_at_valid_positions_only() -> None:
    tally = OutputTally()
    mine = torch.tensor([[[1.0, 2.0], [9.0, 9.0]]])
    tally.add(mine, torch.tensor([[[1.5, 2.0], [0.0, 0.0]]]), torch.tensor([[True, False]]))
    tally.add(mine, mine, torch.tensor([[True, True]]))
    quality = tally.quality()
    assert (quality.max_difference, quality.mean_difference, quality.nonfinite) == (0.5, 0.5 / 6, 0)
