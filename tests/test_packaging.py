"""The wheel holds what an installation needs, the start-up hook too."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    subprocess.run([*command, "--wheel-dir", str(folder)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_package_hook_and_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "t5fastpatch_startup.pth" in names
    assert "t5fastpatch/headroom/sentences.txt" in names
    package = {f"t5fastpatch/{path.relative_to(ROOT / 't5fastpatch')}" for path in ROOT.glob("t5fastpatch/**/*.py")}
    model = {"config.json", "model.safetensors", "spiece.model", "heldout.jsonl", "README.md", "LICENSES.md"}
    assert {*package, *(f"t5fastpatch/demo_model/{name}" for name in model), "t5fastpatch/py.typed"} <= names
    assert "t5fastpatch/reports/page.html" in names
    assert not any("tests/" in name or "scripts/" in name for name in names)


def test_the_embedded_model_is_at_most_8_mb() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "t5fastpatch" / "demo_model").iterdir()) <= 8_000_000


@pytest.mark.parametrize("variable", ["layer_norm", ""])
def test_an_installed_hook_patches_and_unset_imports_nothing(wheel: Path, tmp_path: Path, variable: str) -> None:
    """The wheel, not the checkout, in a site folder of its own."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # Before `site` runs the hook, the folder must come first, as site-packages would without the checkout.
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import site; site.addsitedir({str(site)!r})\n"
        "print('t5fastpatch' in sys.modules and sys.modules['t5fastpatch'].__file__)\n"
        "from transformers.models.t5.modeling_t5 import T5LayerNorm\nprint(T5LayerNorm.forward.__module__)\n"
    )
    libraries = os.pathsep.join(path for path in sys.path if path and Path(path).resolve() != ROOT)
    environment = {**os.environ, "PYTHONPATH": libraries, "T5FASTPATCH": variable, "HF_HUB_OFFLINE": "1"}
    # -S: nothing but this hook is run, not that of an editable installation beside it.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if variable:
        assert done.stdout.splitlines() == [str(site / "t5fastpatch" / "__init__.py"), "t5fastpatch.patches.layer_norm"]
        assert "layer_norm on (sites: 1)" in done.stderr
    else:
        assert done.stdout.splitlines() == ["False", "transformers.models.t5.modeling_t5"]
