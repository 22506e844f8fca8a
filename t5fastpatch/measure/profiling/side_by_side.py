"""What tables of one variant, or of two side by side, have in common."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from rich.table import Table

NOTHING = "-"


def letters_of(variants: Sized) -> list[str]:
    """What the columns of each variant begin with."""
    return ["A ", "B "] if len(variants) == 2 else [""]


def difference_columns(letters: Sized) -> list[str]:
    """The name of the column for what B takes more, where there is a B."""
    return ["B - A ms"] if len(letters) == 2 else []


def difference_of(seconds: Sequence[float]) -> list[str]:
    """The cell of that column."""
    return [f"{(seconds[1] - seconds[0]) * 1000:+.3f}"] if len(seconds) == 2 else []


def number_text(number: float) -> str:
    """A mean of whole numbers, which as a rule is one."""
    return f"{number:.0f}" if number == round(number) else f"{number:.1f}"


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds."""
    return f"{seconds * 1000:.3f}"


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table of columns of text, which are folded where they are too long, and of numbers."""
    table = Table(title=title)
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table
