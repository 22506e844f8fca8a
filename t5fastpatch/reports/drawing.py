"""What the pictures are drawn with: a style of their own, panels, labels, and bytes that are the same each time."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..extra import require
from .naming import text_of

WIDTH = 9.0  # inches
INK, DEEP, WARM = "#222222", "#1f5f8b", "#a8480f"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "t5fastpatch",
    "svg.fonttype": "path",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#666666",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.7,
}
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: of its files, without the suffix.
        title: what it is.
        caption: what is seen, on which device and releases, and how to read it.
        figure: the `matplotlib.figure.Figure`.
    """

    name: str
    title: str
    caption: str
    figure: Any

    def svg(self) -> str:
        """The picture as SVG; text is outlines, so that it looks the same everywhere."""
        nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        return self._saved("svg", metadata=nobody).decode()

    def png(self) -> bytes:
        """The picture as PNG, at 150 dots per inch."""
        return self._saved("png", dpi=150, metadata={"Software": None})

    def _saved(self, form: str, **options: Any) -> bytes:
        file = io.BytesIO()
        with own_style():
            self.figure.savefig(file, format=form, **options)
        return file.getvalue()


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Draws in this module's style: the user's own settings must not change the picture."""
    with require("matplotlib.style", "report").context(["default", STYLE]):
        yield


def plain(text: Any) -> str:
    """A label of bearable length, in which a dollar is a dollar and begins no formula."""
    line = text_of(text)
    return (line if len(line) <= 48 else f"{line[:47]}…").replace("$", r"\$")


def arm_pair(ratio: dict[str, float]) -> tuple[float, float]:
    """How far an interval reaches below and above its median."""
    return max(0.0, ratio["median"] - ratio["low"]), max(0.0, ratio["high"] - ratio["median"])


def arms_of(ratio: dict[str, float]) -> list[list[float]]:
    """The same for one bar, as `xerr` takes it."""
    return [[arm] for arm in arm_pair(ratio)]


def write_beside(panel: Any, x: float, y: float, text: str, **look: Any) -> None:
    """A label just right of a bar's end."""
    panel.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", bbox=PAPER, **look)


def leave_room(panels: Sequence[Any], part: float) -> None:
    """Widens the shared horizontal axis for the labels at the ends of the bars."""
    low, high = panels[0].get_xlim()
    for panel in panels:
        panel.set_xlim(low, high + part * (high - low))


def head(panel: Any, name: str) -> None:
    """The workload in bold, and below it what else tells this panel from the others."""
    workload, _, rest = name.partition(", ")
    panel.set_title(plain(workload) + (f"\n{plain(rest)}" if rest else ""))


def panels_of(count: int, columns: int, height: float, **shared: bool) -> tuple[Any, list[Any]]:
    """A figure with `count` panels, each `height` inches high, and the panels in reading order."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    size = (WIDTH, rows * height + 0.5)
    figure = require("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for unused in grid[count:]:
        unused.remove()
    for lowest in grid[count - columns : count]:
        lowest.tick_params(labelbottom=True)
    return figure, grid[:count]
