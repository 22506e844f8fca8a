"""A result in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .about import environment_line, remarks, subject_line
from .formats import NO_EFFECT
from .tables import (
    Table,
    attribution_tables,
    count_tables,
    evaluation_tables,
    memory_tables,
    peak_tables,
    quality_tables,
    state_table,
    time_tables,
)


def print_result(result: dict[str, Any], console: Console) -> None:
    """Prints the tables of a result, and below them where the figures are from and what they do not say."""
    cells = result["cells"]
    tables = (
        *count_tables(cells),
        *time_tables(cells, "to_half"),
        *time_tables(cells, "to_fp32"),
        *attribution_tables(cells),
        *quality_tables(cells),
        *evaluation_tables(cells),
        *memory_tables(cells),
        *peak_tables(cells),
    )
    for table in tables:
        _print_table(table, console)
    for variant, state, why in state_table(cells).rows:
        console.print(Text(f"{variant} was not measured: {why or f'{state} in this release'}."), soft_wrap=True)
    for line in (f"{subject_line(result)}: {environment_line(result)}.", *remarks(result)):
        console.print(Text(line), soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    # As lines of their own: a table pads its title, and breaks it.
    console.print(Text(table.title[:1].upper() + table.title[1:], style="bold"), soft_wrap=True)
    made = RichTable()
    for at, column in enumerate(table.columns):
        made.add_column(column, justify="left" if at < table.words else "right")
    for row in table.rows:
        made.add_row(*(Text(_broken(cell)) for cell in row))
    console.print(made)
    if table.note:
        console.print(Text(table.note, style="dim"), soft_wrap=True)


def _broken(cell: str) -> str:
    """A text in two lines where it says that there is no effect, beside its interval."""
    return cell.replace(f"{NO_EFFECT} [", f"{NO_EFFECT}\n[").replace(f", {NO_EFFECT}", f"\n{NO_EFFECT}")
