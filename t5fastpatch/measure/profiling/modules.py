"""What each module of a call does, counted exactly: one variant, or two side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table

from ..census import Census, Work
from .side_by_side import letters_of, new_table

FIGURES = ("ops", "casts", "syncs")


def module_count_table(censuses: Sequence[Census]) -> Table:
    """Operations, casts, synchronisations and megabytes moved, modules that differ in an index alone taken together; of
    two variants, where they differ."""
    letters = letters_of(censuses)
    where = "Where the counts differ" if len(censuses) == 2 else "What is counted"
    table = new_table(
        f"{where}, by module, per call",
        ["module (* is any index)"],
        [f"{letter}{column}" for letter in letters for column in (*FIGURES, "MB")],
    )
    by_kind = [_by_kind(each) for each in censuses]
    for kind in dict.fromkeys(kind for each in by_kind for kind in each):
        cells = [_cells(each.get(kind, Work())) for each in by_kind]
        if len(cells) == 1 or cells[0] != cells[1]:
            table.add_row(kind or "outside of any", *(cell for each in cells for cell in each))
    return table


def _by_kind(census: Census) -> dict[str, Work]:
    kinds: dict[str, Work] = {}
    for path, work in census.by_module.items():
        kind = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        kinds[kind] = kinds[kind] + work if kind in kinds else work
    return kinds


def _cells(work: Work) -> list[str]:
    moved = (work.bytes_read + work.bytes_written) / 1e6
    return [*(str(getattr(work, figure)) for figure in FIGURES), f"{moved:.2f}"]
