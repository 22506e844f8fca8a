"""The command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zoo

import t5fastpatch
from t5fastpatch import autopatch
from t5fastpatch.cli import main
from t5fastpatch.registry import patch_names


def test_list_names_every_patch_and_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for patch in t5fastpatch.list_patches():
        assert patch.name in out
        assert patch.contract.value in out


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_status_reads_a_models_configuration(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = kind.build().config
    config.architectures = [kind.model]
    config.save_pretrained(tmp_path)
    assert main(["status", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert kind.model in out
    assert re.search(r"skip_inf_check\W+unsafe\W+3", out)


def test_show_prints_a_diff_that_applies_to_upstreams_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.models.t5 import modeling_t5

    assert main(["show", "skip_inf_check", "--family", "t5"]) == 0
    diff = capsys.readouterr().out
    target = tmp_path / "transformers/models/t5/modeling_t5.py"
    target.parent.mkdir(parents=True)
    original = Path(modeling_t5.__file__).read_text()
    target.write_text(original)
    subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=tmp_path, check=True, capture_output=True)
    changed = target.read_text()
    assert original.count("isinf") == 3
    assert "isinf" not in changed
    compile(changed, "changed", "exec")


def test_show_without_a_family_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "layer_norm"]) == 0
    out = capsys.readouterr().out
    assert out.count("+++ b/transformers/models/") >= 4
    assert "nn.functional.rms_norm" in out


def one_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_errors_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean 'layer_norm'" in one_line(capsys, "show", "layer_nrm")
    assert f"there are {', '.join(patch_names())}" in one_line(capsys, "show", "all")
    assert "there is no family 't6'" in one_line(capsys, "show", "layer_norm", "--family", "t6")
    assert "there is no model folder" in one_line(capsys, "status", "--model", str(tmp_path / "no" / "model"))
    assert "there is no model folder" in one_line(capsys, "status", "--model", "./nowhere")
    assert "cannot load 'nobody/nothing'" in one_line(capsys, "status", "--model", "nobody/nothing")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "T5 family" in one_line(capsys, "status", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "cannot load" in one_line(capsys, "status", "--model", str(tmp_path))
    assert "there is no model folder '~nobody/x'" in one_line(capsys, "status", "--model", "~nobody/x")


def test_a_patch_that_changes_nothing_here_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    report = t5fastpatch.status(zoo.BY_NAME["t5"].build())
    if report["softmax_dtype"].sites:
        pytest.skip("this release still has the pattern in every family")
    assert "t5: already upstream" in one_line(capsys, "show", "softmax_dtype", "--family", "t5")


def test_the_module_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "t5fastpatch", "--version"], capture_output=True, text=True)
    assert done.stdout == f"t5fastpatch {t5fastpatch.__version__}\n"
    assert done.returncode == 0


def test_names_in_the_variable_are_parted_by_commas_and_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T5FASTPATCH", " layer_norm, softmax_dtype,,skip_inf_check ")
    assert autopatch.requested() == ["layer_norm", "softmax_dtype", "skip_inf_check"]


def test_help_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from t5fastpatch.cli import main; main(['profile', '--help'])\n"
        "sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
