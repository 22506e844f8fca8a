"""A result as tables of text, which Markdown and the page both show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from .formats import NOTHING, figure, megabytes, ratio, seconds, share
from .naming import (
    STOCK_FP32,
    describe,
    grouped,
    heading_of,
    names,
    patched_row,
    row_of,
    stock_row,
    text_of,
    variants,
    varies,
    varying,
    wording,
)

STATES = {"stock": "", "set": "", "unsafe": "unsafe alone"}
COUNTS = {
    "ops": "ops",
    "leaf_ops": "leaf ops",
    "casts": "casts",
    "syncs": "syncs",
    "host_scalars": "host scalars",
}
QUALITY = {
    "max_difference": ("max diff", "{:.3g}"),
    "mean_difference": ("mean diff", "{:.2e}"),
    "nonfinite": ("not finite", "{:d}"),
    "loss": ("loss", "{:.4f}"),
    "bleu": ("BLEU", "{:.2f}"),
    "gen_len": ("gen_len", "{:.2f}"),
    "agreement": ("tokens as fp32", "{:.2%}"),
}
EVALUATION = {
    "runtime": ("runtime", "{:.2f} s"),
    "samples_per_second": ("samples/s", "{:.2f}"),
    "loss": ("loss", "{:.4f}"),
    "bleu": ("BLEU", "{:.2f}"),
    "gen_len": ("gen_len", "{:.2f}"),
}
MEMORY = {
    "host_delta": "host change",
    "host_peak": "host peak",
    "device_delta": "device change",
    "device_peak": "device peak",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        title: what the table shows.
        columns: the headings.
        rows: as many texts in each as there are columns.
        words: how many columns, from the first, hold words; the others hold numbers.
        note: a sentence on how to read it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Tables under one heading."""

    title: str
    tables: Sequence[Table]


def sections(result: dict[str, Any], brief: bool = False) -> list[Section]:
    """All tables of a result; a section that would be empty is left out.

    Args:
        result: as `reading.read` gives it.
        brief: without times beside fp32, bytes, FLOPs, BLEU by task and settings.
    """
    cells = result["cells"]
    parts = {
        "What one call does": count_tables(cells),
        "Time": time_tables(cells, "to_half") + ([] if brief else time_tables(cells, "to_fp32")),
        "Attribution": attribution_tables(cells),
        "Results": quality_tables(cells) + ([] if brief else task_tables(cells)),
        "Seq2SeqTrainer.evaluate": evaluation_tables(cells),
        "Memory": memory_tables(cells) + peak_tables(cells),
        "Bytes and FLOPs": [] if brief else traffic_tables(cells),
        "Environment": [pairs_table("Environment", result["environment"])],
        "Settings": [] if brief else [pairs_table("Settings", result["settings"])],
    }
    shown = {title: [table for table in tables if table.rows] for title, tables in parts.items()}
    return [Section(title, tables) for title, tables in shown.items() if tables]


def summary(result: dict[str, Any]) -> Table:
    """A line per call that was timed, single operations aside: half precision before and after, beside fp32."""
    calls = [cell for cell in result["cells"] if cell["cell"].get("level") != "micro"]
    cells = [cell for cell in calls if _has(cell, "to_half") or _has(cell, "to_fp32")]
    rows = []
    for cell, name in zip(cells, names(cells)):
        stock, patched, fp32 = stock_row(cell), patched_row(cell), row_of(cell, STOCK_FP32)
        times = (stock.get("to_fp32"), patched.get("to_fp32"), patched.get("to_half"))
        counts = [_arrows(what, fp32, stock, patched) for what in ("ops", "casts")]
        rows.append([name, *map(ratio, times), *counts])
    columns = ["", "stock half / fp32", "patched / fp32", "patched / stock half"]
    return Table(
        "In short",
        [*columns, "ops", "casts"],
        rows,
        note="Ratios of time with 95% intervals: below 1 is faster. Patched is the row with the most patches. "
        "Ops and casts of one call: stock fp32 → stock half → patched.",
    )


def _arrows(what: str, *rows: dict[str, Any]) -> str:
    counts = [row["census"].get(what) for row in rows if row.get("census")]
    return NOTHING if not counts or None in counts else " → ".join(map(str, counts))


def state_table(cells: Sequence[dict[str, Any]]) -> Table:
    """The rows that were not measured, and why."""
    rows = {
        tuple(text_of(each or "") for each in (row["variant"], row.get("state"), row.get("why")))
        for cell in cells
        for row in cell["rows"]
        if not row.get("measured", True)
    }
    return Table("Not measured", ["variant", "state", "why"], sorted(rows), words=3)


def count_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Operations, casts and synchronisations; one table for all shapes at which the counts are the same."""
    tables = []
    groups = grouped([cell for cell in cells if _has(cell, "census")], ["batch", "length", "text"])
    fields = varying([cell for group in groups for cell in group])
    for group in groups:
        alike: dict[str, list[dict[str, Any]]] = {}
        for cell in group:
            alike.setdefault(json.dumps(_counts(cell)), []).append(cell)
        for same in alike.values():
            shape = [field for field in ("batch", "length", "text") if field in fields]
            kind = describe(same[0], ["workload", *(field for field in fields if field not in ("workload", *shape))])
            shapes = [] if len(alike) == 1 else [describe(cell, shape) for cell in same]
            note = "The same at every batch size and length." if len(alike) == 1 < len(same) else ""
            tables.append(
                Table(
                    f"{kind}: what one call does" + (f" ({'; '.join(shapes)})" if shapes else ""),
                    ["variant", "state", *COUNTS.values()],
                    [[_label(row), _state(row), *counts] for row, counts in zip(same[0]["rows"], _counts(same[0]))],
                    words=2,
                    note=note,
                )
            )
    return tables


def _state(row: dict[str, Any]) -> str:
    """What is said of a patch; of a stock model or a set of patches there is nothing to say."""
    state = text_of(row.get("state") or "")
    return STATES.get(state, state)


def _counts(cell: dict[str, Any]) -> list[list[str]]:
    return [[figure((row.get("census") or {}).get(what), "{:d}") for what in COUNTS] for row in cell["rows"]]


def traffic_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Bytes read and written, and floating-point operations by dtype."""
    bytes_ = _across(
        cells, lambda row, _: _bytes(row.get("census") or {}), lambda _: "bytes read / written in one call"
    )
    flops = _across(cells, lambda row, _: _flops(row.get("census") or {}), lambda _: "GFLOP in one call, by dtype")
    return [*bytes_, *flops]


def _bytes(census: dict[str, Any]) -> str:
    read, written = census.get("bytes_read"), census.get("bytes_written")
    return NOTHING if read is None else f"{megabytes(read)} / {megabytes(written)}"


def _flops(census: dict[str, Any]) -> str:
    flops = census.get("flops_by_dtype") or {}
    return " + ".join(f"{figure(count / 1e9)} {text_of(dtype)}" for dtype, count in sorted(flops.items())) or NOTHING


def time_tables(cells: Sequence[dict[str, Any]], field: str) -> list[Table]:
    """Times as ratios to a stock model.

    Args:
        cells: of the result.
        field: `"to_half"` or `"to_fp32"`.
    """

    def baseline(cell: dict[str, Any]) -> Any:
        return STOCK_FP32 if field == "to_fp32" else cell.get("baseline")

    def content(row: dict[str, Any], cell: dict[str, Any]) -> str:
        return seconds(row.get("median")) if row["variant"] == baseline(cell) else ratio(row.get(field))

    timed = [cell for cell in cells if _has(cell, field)]
    note = "With 95% intervals; below 1 is faster."
    return _across(timed, content, lambda cell: f"time as a ratio to {text_of(baseline(cell))}", note)


def attribution_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """The share of the baseline's time that each patch saves (Shapley values), and their sum."""
    attributed = [cell for cell in cells if cell.get("attribution")]
    if not attributed:
        return []
    patches = list(dict.fromkeys(patch for cell in attributed for patch in cell["attribution"]["shares"]))
    rows = []
    for cell, name in zip(attributed, names(attributed)):
        shares = cell["attribution"]["shares"]
        rows.append([name, *(share(each) for each in (*map(shares.get, patches), saved_by_all(cell)))])
    methods = dict.fromkeys(_method(cell["attribution"]) for cell in attributed)
    baselines = dict.fromkeys(text_of(cell.get("baseline")) for cell in attributed)
    return [
        Table(
            f"Share of the time of {', '.join(baselines)} that each patch saves",
            ["", *map(text_of, patches), "all of them"],
            rows,
            note=f"Shapley values over the subsets of the patches ({'; '.join(methods)}), with 95% intervals; "
            "they add up to what all of them save.",
        )
    ]


def saved_by_all(cell: dict[str, Any]) -> dict[str, Any]:
    """What all patches of an attribution save, in the form of a share."""
    saved = cell["attribution"].get("saved") or {}
    return {**saved, "share": saved.get("median")}


def _method(attribution: dict[str, Any]) -> str:
    permutations = attribution.get("permutations")
    return text_of(attribution.get("method")) + (f", {permutations} permutations" if permutations else "")


def quality_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Differences from fp32, loss, BLEU, generated length and agreement."""
    return _figure_tables(cells, "quality", QUALITY, f"beside {STOCK_FP32}")


def evaluation_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """What `Seq2SeqTrainer.evaluate` reported."""
    return _figure_tables(cells, "evaluation", EVALUATION, "what the trainer reported")


def _figure_tables(
    cells: Sequence[dict[str, Any]], part: str, columns: dict[str, tuple[str, str]], what: str
) -> list[Table]:
    here = [cell for cell in cells if _has(cell, part)]
    return [
        Table(
            f"{name}: {what}",
            ["variant", *(heading for heading, _ in columns.values())],
            [
                [_label(row), *(figure(row[part].get(each), form) for each, (_, form) in columns.items())]
                for row in cell["rows"]
                if row.get(part)
            ],
        )
        for cell, name in zip(here, names(here))
    ]


def task_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """BLEU by task, where there are several."""
    tables = []
    here = [cell for cell in cells if _has(cell, "quality")]
    for cell, name in zip(here, names(here)):
        rows = {_label(row): row["quality"].get("bleu_by_task") or {} for row in cell["rows"] if row.get("quality")}
        tasks = list(dict.fromkeys(task for scores in rows.values() for task in scores))
        if len(tasks) > 1:
            scores = [[label, *(figure(row.get(task), "{:.2f}") for task in tasks)] for label, row in rows.items()]
            tables.append(Table(f"{name}: BLEU by task", ["variant", *map(text_of, tasks)], scores))
    return tables


def memory_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Memory of a trainer's evaluation, stage by stage."""
    here = [cell for cell in cells if _has(cell, "evaluation")]
    return [
        Table(
            f"{name}: memory by stage",
            ["variant", "stage", *MEMORY.values()],
            [
                [_label(row), text_of(stage), *(megabytes((figures or {}).get(each)) for each in MEMORY)]
                for row in cell["rows"]
                for stage, figures in ((row.get("evaluation") or {}).get("memory") or {}).items()
            ],
            words=2,
        )
        for cell, name in zip(here, names(here))
    ]


def peak_tables(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Peak memory on the device."""
    return _across(cells, lambda row, _: megabytes(row.get("peak_memory")), lambda _: "peak memory on the device")


def pairs_table(title: str, pairs: dict[str, Any]) -> Table:
    """Names and values."""
    rows = [[text_of(name), NOTHING if value is None else text_of(value)] for name, value in pairs.items()]
    return Table(title, ["", "value"], rows, words=2)


def _across(
    cells: Sequence[dict[str, Any]],
    content: Callable[[dict[str, Any], dict[str, Any]], str],
    what: Callable[[dict[str, Any]], str],
    note: str = "",
) -> list[Table]:
    """Tables with a row per variant, and columns by batch size, length or workload: the first of these that varies.

    Args:
        cells: those to be shown; one without any content is left out.
        content: of a row, in a cell.
        what: is shown of a cell, for the title.
        note: below each table.
    """
    shown = [cell for cell in cells if any(content(row, cell) != NOTHING for row in cell["rows"])]
    tables = []
    for level in dict.fromkeys(map(heading_of, shown)):
        here = [cell for cell in shown if heading_of(cell) == level]
        differing = varying(here)
        column = next((field for field in ("batch", "length") if varies(here, field)), "workload")
        # An encoder has no target: that alone is no reason for a table of its own.
        across = ["workload", "length"] if column == "workload" else [column]
        for group in grouped(here, across):
            fixed = describe(group[0], [field for field in differing if field not in across])
            title = f"{fixed or level}: {what(group[0])}"
            rows = []
            for variant, label in variants(group).items():
                found = [(row_of(cell, variant), cell) for cell in group]
                texts = [content(row, cell) if row else NOTHING for row, cell in found]
                if set(texts) != {NOTHING}:
                    rows.append([label, *texts])
            tables.append(Table(title, ["variant", *(wording(cell, column) for cell in group)], rows, note=note))
    return tables


def _label(row: dict[str, Any]) -> str:
    return text_of(row.get("label") or row["variant"])


def _has(cell: dict[str, Any], part: str) -> bool:
    return any(row.get(part) is not None for row in cell["rows"])
