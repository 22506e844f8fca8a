"""The cells of a result: what each is called, and which of them stand together in a table or picture."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

STOCK_FP32 = "stock fp32"
FIELDS = ("workload", "precision", "attention", "compiled", "batch", "length", "text")
HEADINGS = {
    "micro": "One operation",
    "stack": "Calls of the model",
    "generate": "Calls of the model",
    "trainer": "Seq2SeqTrainer.evaluate",
    "results": "Results",
}


def text_of(value: Any) -> str:
    """A value as one line of printable characters, as tables, XML and fonts need it."""
    line = " ".join(str(value).split())
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def heading_of(cell: dict[str, Any]) -> str:
    """The level of a cell, in words; those that stand in one table have the same."""
    level = cell["cell"].get("level")
    return HEADINGS.get(level, text_of(level))


def field_value(cell: dict[str, Any], field: str) -> Any:
    """The value of one of `FIELDS`; the two lengths are one."""
    inner = cell["cell"]
    if field == "batch":
        return inner.get("batch_size")
    if field == "length":
        return (inner.get("source_length"), inner.get("target_length"))
    return inner.get(field)


def wording(cell: dict[str, Any], field: str) -> str:
    """The value in words: `"batch 8"`, `"length 128/64"` (source, target)."""
    value = field_value(cell, field)
    if field == "length":
        lengths = [str(each) for each in value if each]
        return f"length {text_of('/'.join(lengths))}" if lengths else ""
    if value is None:
        return ""
    if field == "compiled":
        return "compiled" if value else "not compiled"
    if field == "workload":
        return text_of(value).replace("_", " ")
    prefix = {"batch": "batch ", "text": "text: "}.get(field, "")
    return prefix + text_of(value)


def describe(cell: dict[str, Any], fields: Iterable[str]) -> str:
    """The values of some fields in words, with commas."""
    return ", ".join(filter(None, (wording(cell, field) for field in fields)))


def varying(cells: Sequence[dict[str, Any]], fields: Sequence[str] = FIELDS) -> list[str]:
    """The fields in which the cells differ."""
    return [field for field in fields if len({wording(cell, field) for cell in cells}) > 1]


def varies(cells: Sequence[dict[str, Any]], field: str) -> bool:
    """Whether one workload comes with several values of the field."""
    values: dict[str, set[str]] = {}
    for cell in cells:
        values.setdefault(wording(cell, "workload"), set()).add(wording(cell, field))
    return any(len(each) > 1 for each in values.values())


def names(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What tells each cell from the others here, its workload first."""
    fields = ["workload", *(field for field in FIELDS[1:] if varies(cells, field))]
    return [describe(cell, fields) for cell in cells]


def grouped(cells: Sequence[dict[str, Any]], across: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Cells that differ in nothing but the fields `across`, in order of these."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        fixed = [heading_of(cell), cell.get("baseline")]
        fixed += [wording(cell, field) for field in FIELDS if field not in across]
        groups.setdefault(tuple(map(str, fixed)), []).append(cell)
    return [sorted(group, key=lambda cell: [_order(cell, field) for field in across]) for group in groups.values()]


def _order(cell: dict[str, Any], field: str) -> list[float]:
    """Sorts batch sizes and lengths by number, and leaves everything else in the file's order."""
    value = field_value(cell, field)
    values = value if isinstance(value, tuple) else (value,)
    return [float(each) if isinstance(each, int | float) else -1.0 for each in values]


def row_of(cell: dict[str, Any], variant: Any) -> dict[str, Any]:
    """The row of a variant; an empty one where there is none."""
    return next((row for row in cell["rows"] if row["variant"] == variant), {})


def patched_row(cell: dict[str, Any]) -> dict[str, Any]:
    """The measured row with the most patches; an empty one where nothing is patched."""
    rows = [row for row in cell["rows"] if row.get("patches") and row.get("measured", True)]
    return max(rows, key=lambda row: len(row["patches"]), default={})


def stock_row(cell: dict[str, Any]) -> dict[str, Any]:
    """The baseline's row."""
    return row_of(cell, cell.get("baseline"))


def variants(cells: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The label of each variant, in order of appearance."""
    return {row["variant"]: text_of(row.get("label") or row["variant"]) for cell in cells for row in cell["rows"]}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; the file has infinity and NaN as strings."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_interval(value: Any) -> TypeGuard[dict[str, float]]:
    """Whether a value is a ratio with an interval of finite numbers."""
    return isinstance(value, dict) and all(is_number(value.get(part)) for part in ("median", "low", "high"))
