"""The guides: every block in them is run, on a stand-in whose residual stream outgrows fp16."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer.testing
from stand_ins import STAND_INS

import t5fastpatch
from t5fastpatch.cli import app
from t5fastpatch.patch import State

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "docs" / "guides"
VARIABLE_LINE = "T5FASTPATCH=safe python your_script.py"


def text(guide: str) -> str:
    return (GUIDES / f"{guide}.md").read_text(encoding="utf-8")


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text(guide), re.DOTALL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stand-ins")
    return {guide: stand_in.save(folder / guide) for guide, stand_in in STAND_INS.items()}


def load(guide: str, folder: Path, **options: Any) -> Any:
    return getattr(transformers, STAND_INS[guide].model).from_pretrained(folder, **options).eval()


def batch(guide: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 16, (4, 24), generator=torch.Generator().manual_seed(1))
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return found if "Encoder" in STAND_INS[guide].model else {**found, "labels": ids[:, :6].contiguous()}


class Pipeline:
    """What of a diffusion pipeline `apply` looks at."""

    def __init__(self, **components: Any) -> None:
        self.components = components


def scope(guide: str, folder: Path) -> dict[str, Any]:
    """What a guide's Python blocks take for granted."""
    encoder = load("diffusion-text-encoder", folder, torch_dtype=torch.float16) if "diffusion" in guide else None
    # T5's own tokenizers give no token types; this one does in older releases.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return {
        "folder": folder,
        "tokenizer": tokenizer,
        "batch": batch(guide),
        "prompt": batch(guide),
        "pipe": Pipeline(text_encoder=encoder, tokenizer=None),
    }


def run(guide: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Runs a guide's Python blocks one after another: their names, and what each printed."""
    names, printed = scope(guide, folder), []
    for block in blocks(guide, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, f"{guide}.md", "exec"), names)
        printed.append(out.getvalue().strip())
    return names, printed


def check_release(guide: str) -> None:
    """Skips where the guide's report and figures are of another release, whose seeded weights are others."""
    if f"transformers {transformers.__version__}\n" not in text(guide):
        pytest.skip("the guide's figures are of another release")


def patched_model(names: dict[str, Any]) -> Any:
    return names["model"] if "model" in names else names["pipe"].components["text_encoder"]


@pytest.mark.parametrize("guide", STAND_INS)
def test_its_lines_put_on_what_the_printed_report_says(guide: str, folders: dict[str, Path]) -> None:
    names, printed = run(guide, folders[guide])
    assert t5fastpatch.status(patched_model(names))["residual_rescale"].state is State.ON
    check_release(guide)
    (report,) = blocks(guide, "text")
    assert re.sub(r"\s+\n", "\n", printed[0]) == report.strip()


def output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)["last_hidden_state" if "labels" not in inputs else "logits"].float()


def errors(guide: str, folder: Path) -> dict[str, float]:
    """The median over its entries of the output's relative error to fp32."""
    inputs, fp32 = batch(guide), load(guide, folder)
    truth, half = output(fp32, inputs), copy.deepcopy(fp32).half()
    loaded = load(guide, folder, torch_dtype=torch.float16)
    found = {"stock": output(half, inputs), "bf16": output(copy.deepcopy(fp32).bfloat16(), inputs)}
    t5fastpatch.apply(loaded)
    found["patched"] = output(loaded, inputs)
    return {name: float(((each - truth) / truth).abs().median()) for name, each in found.items()}


@pytest.mark.parametrize("guide", [guide for guide in STAND_INS if guide != "mt5-fine-tuning"])
def test_its_errors_are_those_of_the_stand_in(guide: str, folders: dict[str, Path]) -> None:
    check_release(guide)
    said = re.search(r"is ([\d.e-]+) patched, ([\d.e-]+) with `half\(\)` alone and ([\d.e-]+) in bf16", text(guide))
    assert said is not None
    found = errors(guide, folders[guide])
    for figure, name in zip(said.groups(), ("patched", "stock", "bf16")):
        assert found[name] == pytest.approx(float(figure), rel=0.3)


def test_stock_s_loss_is_nan_where_the_guide_on_training_says_so(folders: dict[str, Path]) -> None:
    model = load("mt5-fine-tuning", folders["mt5-fine-tuning"]).train()
    with torch.autocast("cpu", torch.float16):
        assert model(**batch("mt5-fine-tuning")).loss.isnan()


def test_the_environment_variable_does_it_as_well(folders: dict[str, Path], tmp_path: Path) -> None:
    assert all(VARIABLE_LINE in block for guide in STAND_INS for block in blocks(guide, "shell")[:1])
    script = tmp_path / "your_script.py"
    lines = ["import torch, transformers, t5fastpatch"]
    for guide, folder in folders.items():
        dtype = "" if guide == "mt5-fine-tuning" else ", torch_dtype=torch.float16"
        lines.append(f"transformers.{STAND_INS[guide].model}.from_pretrained({str(folder)!r}{dtype})")
    script.write_text("\n".join(lines))
    name, value = VARIABLE_LINE.split()[0].split("=")
    environment = {**os.environ, name: value, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("residual_rescale on") == len(folders), done.stderr


@pytest.mark.parametrize("guide", STAND_INS)
def test_check_runs_as_the_guide_has_it(guide: str, folders: dict[str, Path], tmp_path: Path) -> None:
    (line,) = (block.strip() for block in blocks(guide, "shell") if "check" in block)
    program, *words = line.replace("FOLDER", str(folders[guide])).split()
    data = tmp_path / words[-1]
    data.write_text("the page of a user\nplease enter your new password\n")
    done = typer.testing.CliRunner().invoke(app, [*words[:-1], str(data)])
    assert program == "t5fastpatch"
    assert done.exit_code == 0, done.output
    assert "residual stream" in done.output


@pytest.mark.parametrize("guide", STAND_INS)
def test_the_memory_of_wo_is_what_the_shapes_give(guide: str) -> None:
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", text(guide), re.MULTILINE)
    assert rows
    for d_model, d_ff, layers, gigabytes in rows:
        assert float(gigabytes) == round(2 * int(d_model) * int(d_ff) * int(layers) / 1e9, 2)


@pytest.mark.parametrize("guide", STAND_INS)
def test_its_links_lead_somewhere(guide: str) -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", text(guide)):
        assert (GUIDES / target).exists(), target
