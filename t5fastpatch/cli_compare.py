"""The command `compare`: what changed between two results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(help="What ablate wrote: JSON, or JSON lines.")],
    b: Annotated[Path, typer.Argument(help="Another such file.")],
    json: Annotated[Path | None, typer.Option(help="A file to write the whole comparison to, as JSON.")] = None,
) -> None:
    """Say what changed between two machines, releases or versions."""
    from .files import check_outputs, write
    from .reports.about import environment_line
    from .reports.compare import compare as compared
    from .reports.compare import comparison_lines, comparison_tables
    from .reports.markdown import table_block
    from .reports.reading import read
    from .reports.writing import to_json

    check_outputs(json, inputs=(a, b))
    results = {"A": (a, read(a)), "B": (b, read(b))}
    found = compared(results["A"][1], results["B"][1])
    if json is not None:
        write({json: to_json(found).encode()})
    for side, (path, result) in results.items():
        print(f"{side}: {path}: {environment_line(result)}.")
        for note in result["notes"]:
            print(f"   {note}")
    print("\n" + "\n".join(comparison_lines(found)))
    for table in comparison_tables(found):
        print("\n" + table_block(table))
