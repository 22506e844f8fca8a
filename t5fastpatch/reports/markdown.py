"""A result as Markdown, to be pasted into an issue."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .about import opening_line, remarks, subject_line
from .tables import Table, sections, state_table, summary

LIMIT = 64_000  # GitHub takes 65,536 characters
# An underscore within a word is none of it, nor is a bracket that no link follows.
_MARKUP = re.compile(r"[\\`*|~]|(?<!\w)_|_(?!\w)|(?<=\])\(")


def markdown(result: dict[str, Any]) -> str:
    """The report: what matters in one table, the rest folded in `<details>`; the page has more."""
    blocks = [f"### t5fastpatch ablation: {escaped(subject_line(result))}", escaped(opening_line(result))]
    blocks += [escaped(line) for line in remarks(result)]
    blocks += [table_block(table) for table in (summary(result), state_table(result["cells"])) if table.rows]
    left_out = []
    for section in sections(result, brief=True):
        block = _folded(section.title, section.tables)
        if sum(map(len, blocks)) + len(block) < LIMIT:
            blocks.append(block)
        else:
            left_out.append(section.title)
    if left_out:
        blocks.append(f"Left out, as too long for an issue: {', '.join(left_out)}. The page has them.")
    return "\n\n".join(blocks) + "\n"


def table_block(table: Table) -> str:
    """A table with its title in bold above it and its note below."""
    return "\n\n".join(filter(None, (f"**{escaped(table.title)}**", table_lines(table), escaped(table.note))))


def table_lines(table: Table) -> str:
    """The table alone, its columns padded so that it can be read as it is."""
    lines = [[escaped(text) for text in line] for line in (table.columns, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    rule = ["-" * width if at < table.words else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    aligned = [
        [
            text.ljust(width) if at < table.words else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths))
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in a table too."""
    return html.escape(_MARKUP.sub(r"\\\g<0>", text), quote=False)


def _folded(title: str, tables: Iterable[Table]) -> str:
    blocks: Sequence[str] = [table_block(table) for table in tables]
    return "\n\n".join([f"<details><summary>{html.escape(title)}</summary>", *blocks, "</details>"])
