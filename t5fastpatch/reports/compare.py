"""Two results beside each other: what changed between two machines, releases or versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .formats import NOTHING, figure, ratio
from .naming import STOCK_FP32, is_interval, is_number, names, row_of, stock_row, text_of
from .tables import EVALUATION, QUALITY, Table

SCHEMA = "t5fastpatch.comparison/1"
CHANGED = "changed"
SAME = "no measurable difference"
# The least part of a figure that counts as a change of results: less comes with another order of summation.
FLOOR = 1e-3
NOISE = (
    "Noise is what half precision itself does to a figure: the distance of stock half from stock fp32, in the file "
    f"where it is longer, and {FLOOR:.1%} of the figure at least. Where one is not finite, any change counts."
)
_SPEEDS = ("runtime", "samples_per_second")


class _Cells(NamedTuple):
    """A cell that is in both results."""

    name: str
    a: dict[str, Any]
    b: dict[str, Any]


class _Rows(NamedTuple):
    """A variant that is in both."""

    where: dict[str, str]
    a: dict[str, Any]
    b: dict[str, Any]
    cells: _Cells


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Everything in which two results differ, as plain dicts and lists.

    Cells are the same where their whole description is, whatever their key. Of times only the ratios to the stock
    half-precision model of the same process are compared: seconds of one run beside those of another say little.

    Args:
        a: as `reading.read` gives it.
        b: likewise.

    Returns:
        `"circumstances"` that differ; cells and variants `"only_in_a"` and `"only_in_b"`; `"states"` of variants that
        differ; `"counts"` that differ at all; `"times"`, all of them, each `"changed"` where the two intervals do not
        overlap; `"results"` that differ by more than their `"noise"`. docs/results-format.md has the details.
    """
    called = _names(a, b)
    cells_a, cells_b = _by_identity(a), _by_identity(b)
    both = [_Cells(called[key], cells_a[key], cells_b[key]) for key in cells_a if key in cells_b]
    rows = [pair for cells in both for pair in _rows(cells)]
    return {
        "schema": SCHEMA,
        "cells_in_both": len(both),
        "circumstances": _circumstances(a, b),
        "only_in_a": {
            "cells": [called[key] for key in cells_a if key not in cells_b],
            "variants": [found for cells in both for found in _missing(cells.name, cells.a, cells.b)],
        },
        "only_in_b": {
            "cells": [called[key] for key in cells_b if key not in cells_a],
            "variants": [found for cells in both for found in _missing(cells.name, cells.b, cells.a)],
        },
        "states": _states(rows),
        "counts": [found for pair in rows for found in _counts(pair)],
        "times": [found for pair in rows for found in _times(pair)],
        "results": [found for pair in rows for found in _results(pair)],
    }


def changed_times(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a comparison's times whose intervals do not overlap."""
    return [time for time in found["times"] if time["verdict"] == CHANGED]


def comparison_lines(found: dict[str, Any]) -> list[str]:
    """The comparison in sentences."""
    only = [len(found[which]["cells"]) for which in ("only_in_a", "only_in_b")]
    changed = len(changed_times(found))
    if not found["cells_in_both"]:
        return [f"No cell is in both ({only[0]} only in A, {only[1]} only in B): nothing is compared."]
    return [
        f"Cells in both: {found['cells_in_both']}; only in A: {only[0]}; only in B: {only[1]}.",
        f"Counts that differ: {len(found['counts'])}.",
        f"Time ratios to stock half: {changed} changed, {len(found['times']) - changed} with {SAME}.",
        f"Results that differ beyond noise: {len(found['results'])}.",
    ]


def comparison_tables(found: dict[str, Any]) -> list[Table]:
    """The comparison as tables, those without rows left out."""
    only = [
        [side, text_of(cell), text_of(variant)]
        for side, which in (("A", "only_in_a"), ("B", "only_in_b"))
        for cell, variant in (
            *((cell, "every variant") for cell in found[which]["cells"]),
            *((each["cell"], each["variant"]) for each in found[which]["variants"]),
        )
    ]
    heads = ["cell", "variant"]
    tables = [
        Table("Circumstances that differ", ["", "A", "B"], _lines(found["circumstances"], ("name",), _value), words=3),
        Table("Only in one", ["in", *heads], only, words=3),
        Table("States that differ", ["variant", "A", "B"], _lines(found["states"], ("variant",), _value), words=3),
        Table(
            "Counts that differ", [*heads, "what", "A", "B"], _lines(found["counts"], (*heads, "what"), _value), words=3
        ),
        Table(
            "Time ratios to stock half that changed",
            [*heads, "A", "B"],
            _lines(changed_times(found), heads, ratio),
            words=2,
            note="Their 95% intervals do not overlap.",
        ),
        Table(
            "Results that differ beyond noise",
            [*heads, "what", "A", "B", "noise"],
            [
                [*line, _value(each["noise"])]
                for line, each in zip(_lines(found["results"], (*heads, "what"), _value), found["results"])
            ],
            words=3,
            note=NOISE,
        ),
    ]
    return [table for table in tables if table.rows]


def _lines(found: Sequence[dict[str, Any]], words: Sequence[str], content: Any) -> list[list[str]]:
    return [[*(text_of(each[word]) for word in words), content(each["a"]), content(each["b"])] for each in found]


def _value(value: Any) -> str:
    return NOTHING if value is None else figure(value, "{:.6g}") if is_number(value) else text_of(value)


def _identity(cell: dict[str, Any]) -> str:
    return json.dumps(cell["cell"], sort_keys=True)


def _by_identity(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {_identity(cell): cell for cell in result["cells"]}


def _names(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    cells = list({**_by_identity(b), **_by_identity(a)}.values())
    return dict(zip(map(_identity, cells), names(cells)))


def _rows(cells: _Cells) -> Iterator[_Rows]:
    for row in cells.a["rows"]:
        other = row_of(cells.b, row["variant"])
        if other:
            yield _Rows({"cell": cells.name, "variant": row["variant"]}, row, other, cells)


def _missing(name: str, here: dict[str, Any], there: dict[str, Any]) -> list[dict[str, str]]:
    return [{"cell": name, "variant": row["variant"]} for row in here["rows"] if not row_of(there, row["variant"])]


def _circumstances(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"part": part, "name": name, "a": a[part].get(name), "b": b[part].get(name)}
        for part in ("subject", "environment", "settings")
        for name in {**a[part], **b[part]}
        if a[part].get(name) != b[part].get(name)
    ]


def _states(rows: Sequence[_Rows]) -> list[dict[str, Any]]:
    """A variant's state is the same in every cell, so it is told once."""
    found = {
        pair.a["variant"]: {"variant": pair.a["variant"], "a": pair.a.get("state"), "b": pair.b.get("state")}
        for pair in rows
        if pair.a.get("state") != pair.b.get("state")
    }
    return list(found.values())


def _counts(pair: _Rows) -> Iterator[dict[str, Any]]:
    if pair.a.get("census") and pair.b.get("census"):
        a, b = _flat(pair.a["census"]), _flat(pair.b["census"])
        for what in {**a, **b}:
            if a.get(what) != b.get(what):
                yield {**pair.where, "what": what, "a": a.get(what), "b": b.get(what)}


def _flat(census: dict[str, Any]) -> dict[str, Any]:
    """Every count of a census; what it has by operation or module is the same again, in parts."""
    flops = {f"flops in {dtype}": count for dtype, count in (census.get("flops_by_dtype") or {}).items()}
    return {**{what: count for what, count in census.items() if is_number(count)}, **flops}


def _times(pair: _Rows) -> Iterator[dict[str, Any]]:
    a, b = pair.a.get("to_half"), pair.b.get("to_half")
    if pair.a["variant"] != pair.cells.a.get("baseline") and is_interval(a) and is_interval(b):
        overlap = a["low"] <= b["high"] and b["low"] <= a["high"]
        yield {**pair.where, "a": a, "b": b, "verdict": SAME if overlap else CHANGED}


def _results(pair: _Rows) -> Iterator[dict[str, Any]]:
    for part, columns in (("quality", QUALITY), ("evaluation", EVALUATION)):
        for what in columns:
            a, b = ((row.get(part) or {}).get(what) for row in (pair.a, pair.b))
            if what in _SPEEDS or a is None or b is None or a == b:
                continue
            limit = _noise(pair.cells, part, what, a, b)
            if limit is None or abs(a - b) > limit:
                yield {**pair.where, "what": what, "a": a, "b": b, "noise": limit}


def _noise(cells: _Cells, part: str, what: str, a: Any, b: Any) -> float | None:
    """How far two figures may lie apart; nothing is noise where one is not finite, or counts what is not."""
    if what == "nonfinite" or not (is_number(a) and is_number(b)):
        return None
    limit = FLOOR * max(abs(a), abs(b))
    for cell in (cells.a, cells.b):
        half, fp32 = ((row.get(part) or {}).get(what) for row in (stock_row(cell), row_of(cell, STOCK_FP32)))
        if is_number(half) and is_number(fp32):
            limit = max(limit, abs(half - fp32))
    return limit
