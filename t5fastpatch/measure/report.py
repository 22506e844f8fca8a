"""An ablation as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..registry import State
from .results import Ablation, Row
from .variants import STOCK_FP32, stock_half

NOTHING = "-"
# What a row of the table is said to be; a stock model and a set of patches need no word.
_STATES = {"stock": "", "set": "", State.APPLIES.value: "applied", State.UNSAFE.value: "applied (unsafe alone)"}


def print_report(ablation: Ablation, console: Console) -> None:
    """Prints the tables, and below them where the figures are from and what they do not say."""
    for table in (operations_table(ablation), *time_tables(ablation), results_table(ablation)):
        # As a line of its own: a table pads its title.
        console.print(Text(str(table.title), style="bold"))
        table.title = None
        console.print(table)
    for line in footer(ablation):
        console.print(Text(line), soft_wrap=True)


def operations_table(ablation: Ablation) -> Table:
    """Operations, casts and synchronisations of one call."""
    call = ablation.counted.replace("_", " ")
    table = _table(
        f"What one {call} does (batch of {ablation.batch_size})",
        ["state", "ops", "leaf ops", "casts", "syncs", "host scalars"],
    )
    for row in ablation.rows:
        counts = row.census and (
            row.census.ops,
            row.census.leaf_ops,
            row.census.casts,
            row.census.syncs,
            row.census.host_scalars,
        )
        state = _STATES.get(row.variant.state, row.variant.state)
        table.add_row(row.variant.label, state, *map(str, counts or [NOTHING] * 5))
    return table


def time_tables(ablation: Ablation) -> list[Table]:
    """Times as ratios to stock in half precision, and to stock in fp32; with peak memory where it is known."""
    baselines = {stock_half(ablation.half_name): "to_half", STOCK_FP32: "to_fp32"}
    return [_time_table(ablation, baseline, field) for baseline, field in baselines.items()]


def _time_table(ablation: Ablation, baseline: str, field: str) -> Table:
    names = [workload.replace("_", " ") for workload in ablation.workloads]
    with_memory = any(row.peak_memory is not None for row in ablation.rows)
    title = f"Time as a ratio to {baseline}, with its 95% interval (below 1 is faster)"
    table = _table(title, [*names, "peak MB"] if with_memory else names)
    for row in _measured(ablation):
        cells = [_ratio(row, workload, baseline, field) for workload in ablation.workloads]
        memory = [f"{row.peak_memory / 1e6:.1f}"] if row.peak_memory is not None else []
        table.add_row(row.variant.label, *cells, *memory)
    return table


def _ratio(row: Row, workload: str, baseline: str, field: str) -> str:
    timing = row.timing[workload]
    if row.variant.name == baseline:
        return f"{timing.seconds * 1000:.3g} ms"
    return str(getattr(timing, field))


def results_table(ablation: Ablation) -> Table:
    """Differences from fp32, loss, BLEU, generated length and agreement."""
    table = _table(
        f"Results over {ablation.sentences} held-out sentences, beside {STOCK_FP32}",
        ["max diff", "mean diff", "loss", "BLEU", "gen_len", "tokens as fp32"],
    )
    for row in _measured(ablation):
        quality = row.quality
        assert quality is not None
        table.add_row(
            row.variant.label,
            _figure(quality.max_difference, "{:.3g}"),
            _figure(quality.mean_difference, "{:.2e}"),
            _figure(quality.loss, "{:.4f}"),
            _figure(quality.bleu, "{:.2f}"),
            _figure(quality.gen_len, "{:.2f}"),
            _figure(quality.agreement, "{:.2%}"),
        )
    return table


def footer(ablation: Ablation) -> list[str]:
    """Where the figures are from, and what they do not say."""
    about = ablation.environment
    rounds = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in ablation.rounds.items())
    lines = [
        f"{ablation.subject}, transformers {about['transformers']}, torch {about['torch']}, Python {about['python']}, "
        f"on {about['device']} ({about['device_name']}), threads: {about['threads']}.",
        f"Sentences: {ablation.sentences_from}.",
        f"Interleaved, shuffled rounds: {rounds}. An interval that holds 1 is no measurable effect.",
    ]
    if not str(about["device"]).startswith("cuda"):
        lines.append(
            "Times on a CPU say nothing of half precision on a GPU. Ops, casts and syncs are counted, not timed."
        )
    unsafe = [row.variant.name for row in ablation.rows if row.variant.state == State.UNSAFE.value]
    lines += [f"{name} is named here; the presets of t5fastpatch, all too, leave it out." for name in unsafe]
    not_measured = [row.variant for row in ablation.rows if not row.variant.measured]
    lines += [f"{each.name} was not measured: {each.why or each.state} in this release." for each in not_measured]
    return lines


def to_dict(ablation: Ablation) -> dict[str, Any]:
    """The ablation as plain dicts, lists, strings and numbers; infinity and NaN as strings, so that JSON holds them."""
    plain = dataclasses.asdict(dataclasses.replace(ablation, rows=[]))
    plain["rows"] = [_row_dict(row) for row in ablation.rows]
    result: dict[str, Any] = _finite(plain)
    return result


def to_json(ablation: Ablation) -> str:
    """`to_dict` as JSON."""
    return json.dumps(to_dict(ablation), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _row_dict(row: Row) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row.variant),
        "census": row.census and row.census.to_dict(),
        "timing": {workload: dataclasses.asdict(timing) for workload, timing in row.timing.items()},
        "quality": row.quality and dataclasses.asdict(row.quality),
        "peak_memory": row.peak_memory,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _measured(ablation: Ablation) -> list[Row]:
    return [row for row in ablation.rows if row.variant.measured]


def _figure(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title)
    table.add_column("variant")
    for column in columns:
        table.add_column(column, justify="right")
    return table
