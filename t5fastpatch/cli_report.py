"""The command `report`: an ablation's reports made again from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    result: Annotated[Path, typer.Argument(help="What ablate wrote: JSON, or JSON lines.")],
    html: Annotated[Path | None, typer.Option(help="A file for one self-contained page with pictures.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="A file for Markdown to paste into an issue.")] = None,
    figures: Annotated[Path | None, typer.Option(help="A directory for the pictures, as PNG and SVG.")] = None,
) -> None:
    """Make the reports of an ablation from its file; with no option, print the Markdown."""
    from .files import check_outputs
    from .reports.markdown import markdown as markdown_of
    from .reports.reading import read
    from .reports.writing import write_report

    read_result = read(result)
    check_outputs(html, markdown, folder=figures, inputs=(result,))
    if html is None and markdown is None and figures is None:
        print(markdown_of(read_result), end="")
    write_report(read_result, html=html, markdown=markdown, figures=figures)
