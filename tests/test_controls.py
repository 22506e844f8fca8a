"""Where nothing is to be found, nothing is claimed; and what is wrong is seen."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import save_model

import t5fastpatch
from t5fastpatch import Contract, Role, SourcePatch
from t5fastpatch.cli import main
from t5fastpatch.measure.ablation import NOTHING_TO_PATCH, run
from t5fastpatch.measure.settings import Settings
from t5fastpatch.measure.shapes import SHAPES, random_model
from t5fastpatch.measure.subject import Subject
from t5fastpatch.rewrite import Edit, Method

SMALL: dict[str, dict[str, Any]] = {
    "mbart": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64, "forced_eos_token_id": None,
    },
    "bert": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
}  # fmt: skip
EXPECTED = {
    "mbart": ["encoder", "decoder_step", "forward", "greedy", "results"],
    "bert": ["forward", "results"],
    "gpt2": ["forward", "results"],
}
ONCE: dict[str, Any] = {"rounds": 2, "min_rounds": 2, "time_budget": 0, "threads": 1, "lengths": ((8, 4),)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls at a size that a test can afford."""

    def subject(model: None, shape: str, device: str, seed: int) -> Subject:
        return Subject(f"{shape} with random weights", random_model(shape, torch.device(device), seed, **SMALL[shape]))

    monkeypatch.setattr("t5fastpatch.measure.ablation.subject_for", subject)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", SMALL)
def test_other_architectures_are_measured_and_there_is_nothing_to_patch(shape: str) -> None:
    workloads = ("micro", "stack", "greedy", "trainer", "results")
    result = run(Settings(shape=shape, workloads=workloads, **ONCE))
    left_out, nothing = result["notes"]
    assert nothing == NOTHING_TO_PATCH
    assert {"evaluate", "evaluate_smoothed"} <= set(left_out.partition(" left out: ")[2].split(", "))
    assert result["failures"] == []
    assert [cell["cell"]["workload"] for cell in result["cells"]] == EXPECTED[shape]
    for cell in result["cells"]:
        assert [row["variant"] for row in cell["rows"]] == ["stock fp32", "stock fp16"]
        assert cell["attribution"] is None
    forward = next(cell for cell in result["cells"] if cell["cell"]["workload"] == "forward")
    fp32, fp16 = (row["census"] for row in forward["rows"])
    # Stock T5 takes two thirds more in half precision. The older mBART checks its encoder for infinities as well.
    assert fp16["ops"] <= 1.1 * fp32["ops"]
    quality = result["cells"][-1]["rows"][1]["quality"]
    assert 0 < quality["max_difference"] < 0.1


@pytest.mark.usefixtures("small")
def test_the_report_says_that_there_is_nothing_to_patch(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workloads", "forward", "--lengths", "8/4", "--rounds", "2", "--min-rounds", "2", "--threads", "1"]
    assert main(["ablate", "--shape", "bert", *options]) == 0
    captured = capsys.readouterr()
    assert NOTHING_TO_PATCH in captured.out
    assert "bert with random weights" in captured.out


def test_the_controls_have_the_shapes_of_the_real_ones() -> None:
    sizes = {
        name: sum(each.numel() for each in random_model(name, torch.device("meta")).parameters()) for name in SHAPES
    }
    assert sizes["bert"] == pytest.approx(110e6, rel=0.02)
    assert sizes["gpt2"] == pytest.approx(124e6, rel=0.02)
    assert sizes["t5-small"] == pytest.approx(60.5e6, rel=0.01)
    assert sizes["t5-large"] == pytest.approx(738e6, rel=0.01)
    assert sizes["t5-xxl-encoder"] == pytest.approx(4.76e9, rel=0.01)


def wrong_scale(method: Method) -> list[Edit]:
    """The attention's scale as everyone else has it: T5 has none, so the scores come out too small."""
    found = []
    for node in ast.walk(method.tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="query_states")], value=ast.Call() as value) if "transpose" in (
                ast.unparse(value)
            ):
                found.append(method.replace(value, f"{ast.unparse(value)} / 8"))
            case ast.Assign(targets=[ast.Name(id="query_states")], value=ast.Call(func=ast.Name(id="shape")) as value):
                found.append(method.replace(value, f"{ast.unparse(value)} / 8"))
    return found


def test_a_wrong_patch_is_caught_by_the_results(tmp_path: Path) -> None:
    patch = SourcePatch(
        "wrong_scale", "adds a scale that T5 has not", Contract.ROUNDING, Role.ATTENTION, wrong_scale, 1
    )
    t5fastpatch.register(patch)
    folder = save_model(tmp_path, transformers.T5EncoderModel)
    settings = Settings(model=str(folder), patches=("wrong_scale", "layer_norm"), workloads=("results",), **ONCE)
    quality = {row["variant"]: row["quality"] for row in run(settings)["cells"][0]["rows"]}
    stock, right, wrong = (quality[name]["mean_difference"] for name in ("stock fp16", "layer_norm", "wrong_scale"))
    assert right < 1.5 * stock
    assert wrong > 10 * stock
