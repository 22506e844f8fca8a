from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch

from t5fastpatch.measure.ablation import run
from t5fastpatch.measure.settings import Settings
from t5fastpatch.reports.reading import read

CPU = torch.device("cpu")
SCRIPT = Path(gpu_check.__file__)
# Where there is a GPU they may not be installed.
ABSENT = ("scipy", "matplotlib", "jinja2", "accelerate", "hypothesis", "sentencepiece")
WITHOUT_THEM = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FIRST_PIECES = ["toy: decoder_step, encoder, fp16, batch 1", "toy-encoder: forward, fp16, batch 1"]


def findings(folder: Path, only: tuple[str, ...] = ()) -> gpu_check.Findings:
    return gpu_check.Findings(folder, ("toy", "toy-encoder"), {}, only)


def written(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text(), parse_constant=pytest.fail)
    return document


def outcomes(document: dict[str, Any]) -> dict[str, Any]:
    return {part["part"]: part.get("found", part.get("error")) for part in document["parts"]}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in gpu_check.TOYS.items():
        monkeypatch.setitem(gpu_check.SHAPES, name, shape)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of the script without the libraries that may be absent, and its folder."""
    folder = tmp_path_factory.mktemp("out")
    only = [
        part for name in ("device", "tests", "torch.where", "profile", "fp16, batch 1") for part in ("--only", name)
    ]
    command = [
        sys.executable,
        "-c",
        WITHOUT_THEM,
        str(SCRIPT),
        "--device",
        "cpu",
        "--small",
        "--out",
        str(folder),
        *only,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False), folder


def test_the_script_runs_on_a_cpu_without_what_only_reports_and_trainer_need(done: Any) -> None:
    ran, folder = done
    assert ran.returncode == 0, ran.stderr
    assert "patched / stock" in ran.stdout
    assert {each.name for each in folder.iterdir()} == {"gpu_check.json", "tests.txt", "toy.jsonl", "toy-encoder.jsonl"}


def test_everything_is_in_one_file(done: Any) -> None:
    document = written(done[1])
    found = outcomes(document)
    assert document["schema"] == gpu_check.SCHEMA
    assert document["left_out"] == []
    assert not any("error" in part for part in document["parts"])
    assert found["device"]["torch"] == torch.__version__
    assert "skipped" in found["tests"] or "passed" in found["tests"]
    assert found["torch.where with numbers"]["census"]["host_scalars"] == 2
    names = [each["name"] for each in found["profile of toy"]["variants"]]
    assert names[0] == "stock fp16"
    assert found["profile of toy"]["diff"]
    assert list(document["ablations"]) == ["toy", "toy-encoder"]


def test_the_lines_of_a_shape_are_a_result_like_any_other(done: Any) -> None:
    _, folder = done
    result = read(folder / "toy.jsonl")
    assert result["cells"] == written(folder)["ablations"]["toy"]["cells"]
    workloads = [(cell["cell"]["workload"], cell["cell"]["batch_size"]) for cell in result["cells"]]
    assert workloads == [("decoder_step", 1), ("encoder", 1), ("greedy", 2), ("greedy", 1)]
    counted = [all(row["census"] for row in cell["rows"] if row["measured"]) for cell in result["cells"]]
    assert counted == [True, True, False, False]


def test_a_part_that_fails_is_noted_down_and_the_others_go_on(tmp_path: Path) -> None:
    found = findings(tmp_path)

    def failing() -> None:
        raise RuntimeError("no such kernel")

    found.add("first", failing)
    found.add("second", lambda: "done")
    first, second = written(tmp_path)["parts"]
    assert first["error"].endswith("RuntimeError: no such kernel\n")
    assert gpu_check.outcome_of(first) == "failed: RuntimeError: no such kernel"
    assert second["found"] == "done"


def test_a_failure_shows_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "device_facts", lambda device: {}[device])
    with pytest.raises(gpu_check.typer.Exit) as ended:
        gpu_check.main("cpu", budget=0, out=tmp_path, small=True, only=["device"])
    assert ended.value.exit_code == 1
    assert [part["part"] for part in written(tmp_path)["parts"]] == ["device", "device afterwards"]


def test_a_device_that_is_not_there_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(gpu_check.typer.Exit) as ended:
        gpu_check.main("cuda:99", out=tmp_path / "out")
    assert ended.value.exit_code == 2
    assert "no device 'cuda:99' here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_most_telling_comes_first() -> None:
    names = [gpu_check.name_of(piece) for piece in gpu_check.pieces(gpu_check.FULL, CPU)]
    assert names[:3] == [
        "t5-small: decoder_step, encoder, fp16, batch 1",
        "t5-large: decoder_step, encoder, fp16, batch 1",
        "t5-xxl-encoder-8: forward, fp16, batch 1",
    ]


def test_every_combination_is_among_the_pieces() -> None:
    cells = {
        (piece.shape, workload, precision, batch_size)
        for piece in gpu_check.pieces(gpu_check.FULL, CPU)
        for workload in piece.workloads
        for precision in piece.precisions
        for batch_size in piece.batch_sizes
    }
    calls = {
        "t5-small": ("decoder_step", "encoder", "greedy"),
        "t5-large": ("decoder_step", "encoder", "greedy"),
        "t5-xxl-encoder-8": ("forward",),
    }
    precisions = ("fp32", "tf32", "fp16", "fp16_from_pretrained", "bf16")
    for shape, workloads in calls.items():
        for workload in workloads:
            assert {(shape, workload, each, size) for each in precisions for size in (1, 16, 64)} <= cells


def test_what_no_time_is_left_for_is_named(tmp_path: Path) -> None:
    found = findings(tmp_path, (", batch 1",))
    gpu_check.check(gpu_check.SMALL, CPU, gpu_check.Budget(0), found)
    assert found.left_out[:2] == FIRST_PIECES
    assert written(tmp_path)["left_out"] == found.left_out
    assert found.ablations() == {}


def test_so_is_what_is_left_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, budget = findings(tmp_path), gpu_check.Budget(0)
    answers = iter([True, False])
    monkeypatch.setattr(budget, "is_left", lambda: next(answers))
    piece = next(gpu_check.pieces(gpu_check.SMALL, CPU))
    assert gpu_check.ablate(piece, found, budget) == "cells: 1"
    assert [each.partition(",")[0] for each in found.left_out] == ["toy: encoder"]
    assert [cell["cell"]["workload"] for cell in found.ablations()["toy"]["cells"]] == ["decoder_step"]


def test_an_ablation_goes_without_the_cells_that_are_not_wanted() -> None:
    settings = Settings(shape="toy-encoder", workloads=("forward",), batch_sizes=(1, 2), lengths=((4, 4),), rounds=2)
    result = run(settings, wanted=lambda cell: False)
    assert (result["cells"], result["failures"]) == ([], [])


def test_cells_that_cannot_be_measured_make_their_piece_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run", lambda *_: {"cells": [], "failures": ["encoder: out of memory"]})
    with pytest.raises(gpu_check.T5FastPatchError, match="encoder: out of memory"):
        gpu_check.ablate(Settings(shape="toy"), findings(tmp_path), gpu_check.Budget(60))


def test_without_pytest_the_tests_are_said_not_to_have_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert gpu_check.run_tests(tmp_path) == "not run: pytest is not installed"
