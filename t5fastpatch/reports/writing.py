"""A result's reports as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files import make_folder, write
from .figures import pictures
from .markdown import markdown as markdown_of
from .page import page


def write_report(
    result: dict[str, Any], *, html: Path | None = None, markdown: Path | None = None, figures: Path | None = None
) -> None:
    """Writes the reports asked for.

    Args:
        result: as `reading.read` gives it.
        html: a file for the page.
        markdown: a file for the Markdown.
        figures: a directory, made if it is not there, for the pictures as PNG and SVG.

    Raises:
        T5FastPatchError: a file cannot be written, or matplotlib or jinja2 is missing.
    """
    drawn = [] if html is None and figures is None else pictures(result)
    contents: dict[Path, bytes] = {}
    if markdown is not None:
        contents[markdown] = markdown_of(result).encode()
    if html is not None:
        contents[html] = page(result, drawn).encode()
    if figures is not None:
        for picture in drawn:
            contents[figures / f"{picture.name}.svg"] = picture.svg().encode()
            contents[figures / f"{picture.name}.png"] = picture.png()
        make_folder(figures)
    write(contents)


def to_json(plain: Any) -> str:
    """Plain dicts and lists as indented JSON."""
    return json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
