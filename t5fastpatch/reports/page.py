"""A result as one self-contained HTML page: pictures as inline SVG, no scripts, nothing to be loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ..extra import require
from .about import opening_line, remarks, subject_line
from .drawing import Picture
from .figures import pictures
from .naming import text_of
from .tables import sections, state_table, summary

_REFERENCE = re.compile(r'(\bid="|url\(#|href="#)')


def page(result: dict[str, Any], drawn: Sequence[Picture] | None = None) -> str:
    """The page, which is well-formed XML too.

    Args:
        result: as `reading.read` gives it.
        drawn: its pictures, where they are drawn already.

    Raises:
        T5FastPatchError: matplotlib or jinja2 is missing.
    """
    jinja2 = require("jinja2", "report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["unbroken"] = _unbroken
    template = environment.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    figures = [
        (picture.title, picture.caption, _inline(picture)) for picture in (pictures(result) if drawn is None else drawn)
    ]
    html: str = template.render(
        subject=subject_line(result),
        opening_line=opening_line(result),
        remarks=remarks(result),
        version=text_of(result["environment"].get("t5fastpatch") or ""),
        opening_tables=[table for table in (summary(result), state_table(result["cells"])) if table.rows],
        figures=figures,
        sections=sections(result),
    )
    return html


def _unbroken(text: str) -> str:
    """Figures with spaces at which no line breaks; it may before an interval and before words."""
    return re.sub(r" (?!\[|no )", "\N{NO-BREAK SPACE}", text)


def _inline(picture: Picture) -> str:
    """The `<svg>` element, as wide as the page, with names of its own: a page may hold each `id` once only."""
    svg = picture.svg()
    svg = _REFERENCE.sub(rf"\g<1>{picture.name}-", svg[svg.index("<svg") :])
    head, rest = svg.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{picture.title}">{rest}'
