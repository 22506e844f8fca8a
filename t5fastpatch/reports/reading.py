"""An ablation's result read back from its file, JSON or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import T5FastPatchError
from .form import misfit
from .schema import SCHEMA

_NEVER_THE_SAME = frozenset({"load", "cpu_mhz", "gpu_mhz"})


def read(path: str | Path) -> dict[str, Any]:
    """The result in a file, as docs/results-format.md describes it.

    Of JSON lines the last header counts, and of cells with one key the last. What the reader had to decide, such as
    leaving out a line that was cut off, is in `"notes"`, a sentence each.

    Raises:
        T5FastPatchError: the file cannot be read, is neither form, or is of another schema.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise T5FastPatchError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise T5FastPatchError(f"cannot read {str(path)!r}: it is no text; give a file that ablate wrote") from error
    parsed = _parsed(text)
    result = read_lines(text.split("\n"), path) if parsed is None else _checked(parsed, path)
    return {**shown(result), "notes": list(result.get("notes") or [])}


def shown(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result without the rows that were timed for the sake of fair shares alone."""
    cells = [{**cell, "rows": [row for row in cell["rows"] if row.get("shown", True)]} for cell in result["cells"]]
    return {**result, "cells": cells}


def read_lines(lines: Sequence[str], path: str | Path) -> dict[str, Any]:
    """The result in JSON lines, with the rows that are not shown.

    Raises:
        T5FastPatchError: as `read`; `path` is for the message.
    """
    parsed = [_parsed(line) for line in lines]
    headers = [line for line in parsed if _is_header(line)]
    if not headers or not _is_header(parsed[0]):
        raise T5FastPatchError(
            f"{str(path)!r} is neither JSON nor JSON lines: give a file that t5fastpatch ablate wrote"
        )
    notes = _differences(headers)
    cells: dict[str, Any] = {}
    for number, line in enumerate(parsed, start=1):
        if line is None and lines[number - 1].strip():
            # Only where a run ended can a line be cut off.
            if number < len(parsed) and not _is_header(parsed[number]):
                raise T5FastPatchError(
                    f"line {number} of {str(path)!r} is not JSON: take it out, or run the ablation again"
                )
            notes.append(f"Line {number} of the file was cut off, and is left out.")
        elif line is not None and not _is_header(line):
            cells[str(_get(line, "key") or number)] = line
    return _checked(
        {**headers[-1], "cells": list(cells.values()), "notes": [*(headers[-1].get("notes") or []), *notes]}, path
    )


def _parsed(text: str) -> Any:
    """What JSON gives; `None` where it is none, has an endless number, or is nested too deep to be read."""
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return None


def _is_header(line: Any) -> bool:
    return _get(line, "schema") is not None


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _differences(headers: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence where a run was resumed under other circumstances."""
    last = headers[-1]
    changed = {
        name
        for header in headers[:-1]
        for part in ("subject", "settings", "environment")
        for name in {**(header.get(part) or {}), **(last.get(part) or {})}
        if name not in _NEVER_THE_SAME and _get(header.get(part), name) != _get(last.get(part), name)
    }
    if not changed:
        return []
    return [
        "The file was written in several runs, which differ in: "
        f"{', '.join(sorted(changed))}; the last values are shown."
    ]


def _checked(parsed: Any, path: str | Path) -> dict[str, Any]:
    schema = _get(parsed, "schema")
    if schema != SCHEMA:
        said = f"its schema is {schema!r}" if schema else "it names no schema"
        raise T5FastPatchError(
            f"{str(path)!r} is not a result in {SCHEMA} ({said}): run t5fastpatch ablate of this version again"
        )
    if found := misfit(parsed):
        raise T5FastPatchError(f"{str(path)!r} is damaged: its {found}; run the ablation again")
    parts = {part: parsed.get(part) or {} for part in ("subject", "settings", "environment")}
    cells = parsed.get("cells") or []
    if not all(map(_is_cell, cells)):
        raise T5FastPatchError(
            f"{str(path)!r} is damaged: a cell lacks its description or rows; run the ablation again"
        )
    return {**parsed, **parts, "cells": cells}


def _is_cell(cell: Any) -> bool:
    rows = _get(cell, "rows")
    described = isinstance(_get(cell, "cell"), dict) and isinstance(rows, list)
    return described and all(isinstance(_get(row, "variant"), str) for row in rows)
