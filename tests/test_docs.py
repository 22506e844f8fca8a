"""What the documentation says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support_table
import transformers
import zoo

import t5fastpatch
from t5fastpatch import errors, registry
from t5fastpatch.families import FAMILIES
from t5fastpatch.patch import State

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands(text: str) -> list[str]:
    """The lines of the first shell blocks under "Set up"."""
    section = text.split("## Set up")[1].split("\n## ")[0]
    return re.findall(r"```shell\n(.*)\n```", section)


def test_the_readme_has_two_set_up_commands_and_ci_runs_the_second() -> None:
    assert len(commands(README)) == 2
    assert commands(README)[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def table_cells(patch: str) -> dict[str, str]:
    """What docs/support.md says of a patch in the installed release, by family."""
    text = (ROOT / "docs" / "support.md").read_text()
    lines = text.split(f"## `{patch}` by release")[1].strip().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    column = header.index(transformers.__version__)
    return {row[0]: row[column] for row in rows[: len(FAMILIES)]}


def test_the_support_table_is_what_this_release_says() -> None:
    text = (ROOT / "docs" / "support.md").read_text()
    if f" {transformers.__version__} " not in text:
        pytest.skip(f"the table has no column for {transformers.__version__}")
    for patch, found in support_table.probe().items():
        assert table_cells(patch) == found


def test_every_patch_has_its_section_and_row() -> None:
    text = (ROOT / "docs" / "patches.md").read_text()
    for patch in t5fastpatch.list_patches():
        assert f"\n## `{patch.name}`\n" in text
        assert f"| [`{patch.name}`]" in text
        assert f"| `{patch.name}` |" in README


def test_the_patch_in_contributing_works() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "register(" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    exec(compile(code, "contributing.md", "exec"), {})
    model = zoo.BY_NAME["t5"].build()
    report = t5fastpatch.apply(model, ["reshape_only"])
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17):
        assert report["reshape_only"].state is State.ON
        assert report["reshape_only"].sites == 1
    else:
        assert report["reshape_only"].state is State.UPSTREAM


def test_the_snippet_in_usage_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "usage.md").read_text(), re.DOTALL)
    model = zoo.BY_NAME["longt5-local"].build()  # every patch has a place in it, in every release
    exec(compile(code, "usage.md", "exec"), {"model": model})
    assert not any("t5fastpatch" in vars(type(module)) for module in model.modules())


def test_the_documents_name_only_what_there_is() -> None:
    names = {*registry.patch_names(), *registry.PRESETS}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        for call in re.findall(r"T5FASTPATCH=([a-z_,0-9]+)", text):
            assert call in ("1", "name,name", "reshape_only") or set(call.split(",")) <= names, path
        for name in re.findall(r"`(\w+Error)`", text):
            assert name in errors.__all__, path
        for target in re.findall(r"\]\(([\w./-]+\.(?:md|json))", text):
            assert (path.parent / target).exists(), (path, target)
