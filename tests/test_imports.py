"""Imports within the package run one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import t5fastpatch

PACKAGE = Path(t5fastpatch.__file__).parent
# What each part must not know, wherever in a function it is imported.
UNKNOWN_TO = {
    "the core": {"cli", "measure", "reports"},
    "patches": {"cli", "measure", "reports", "engine", "install", "findings", "patches"},
    "reports": {"cli", "measure", "engine", "registry", "loading", "torch", "transformers"},
    "measure": {"cli"},
    "cli": set(),
}


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    if first.startswith(("cli", "__main__")):
        return "cli"
    return first if first in UNKNOWN_TO else "the core"


def imported(path: Path) -> set[str]:
    """The first name of each import below the package, or of one outside of it."""
    parents = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) + 1 - node.level] if node.level else ()
            whole = ([*above, *filter(None, [node.module]), alias.name] for alias in node.names)
            found |= {names[0].partition(".")[0] for names in whole}
    return {"cli" if name.startswith("cli_") else name for name in found}


@pytest.mark.parametrize("part", UNKNOWN_TO)
def test_imports_run_one_way(part: str) -> None:
    files = [path for path in PACKAGE.rglob("*.py") if part_of(path) == part]
    assert files
    for path in files:
        assert not imported(path) & UNKNOWN_TO[part], path
