"""Pictures of a result. They read in grey too: by hatches, markers, line styles, and labels at the thing itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..extra import require
from .about import environment_line, on_cpu
from .drawing import (
    DEEP,
    INK,
    PAPER,
    WARM,
    Picture,
    arm_pair,
    arms_of,
    head,
    leave_room,
    own_style,
    panels_of,
    plain,
    write_beside,
)
from .formats import NO_EFFECT, measurable, seconds
from .naming import (
    FIELDS,
    STOCK_FP32,
    describe,
    grouped,
    is_interval,
    is_number,
    names,
    patched_row,
    row_of,
    stock_row,
    varies,
    varying,
    wording,
)
from .tables import saved_by_all

STOCK_LINE = {"color": WARM, "linestyle": "--", "marker": "s", "markerfacecolor": "white"}
PATCHED_LINE = {"color": DEEP, "linestyle": "-", "marker": "o"}
STOCK_BAR = {"facecolor": "#f3dccb", "hatch": "////", "edgecolor": WARM}
PATCHED_BAR = {"facecolor": "#6fa3c8", "edgecolor": DEEP}
TOTAL_BAR = {"facecolor": "#a3a3a3", "edgecolor": INK}
WHISKER = {"ecolor": INK, "elinewidth": 1.1, "capsize": 2.5}
# Neighbours differ in darkness and in hatch; in the order of the categories' time.
CATEGORY_BARS = (
    ("#1f5f8b", ""),
    ("#f3dccb", "////"),
    ("#8fb8d6", "...."),
    ("#ffffff", "\\\\\\\\"),
    ("#5b7a3a", "xxx"),
    ("#e8e3c3", "---"),
    ("#999999", ""),
    ("#ffffff", "ooo"),
    ("#222222", ""),
    ("#d9a441", "++++"),
)

SERIES = {"batch": "batch size", "length": "source/target length"}
_RATIOS = (
    "Below the line at 1, half precision is faster than fp32. The bars are 95% intervals; one that holds 1 is no "
    "measurable effect."
)


def pictures(result: dict[str, Any]) -> list[Picture]:
    """All pictures that a result has figures for.

    Raises:
        T5FastPatchError: matplotlib is missing.
    """
    cells = result["cells"]
    with own_style():
        drawn = (contributions(cells), *ratio_lines(cells), ratio_bars(cells), time_split(cells))
        found = [picture for picture in drawn if picture is not None]
    about = [f"Measured on {environment_line(result)}."]
    if on_cpu(result):
        about.append("Times on a CPU say nothing of a GPU's fp16.")
    return [dataclasses.replace(picture, caption=" ".join([picture.caption, *about])) for picture in found]


def contributions(cells: Sequence[dict[str, Any]]) -> Picture | None:
    """Bars of the time that each patch saves, a panel per cell."""
    attributed = [cell for cell in cells if cell.get("attribution")]
    if not attributed:
        return None
    bars = max(len(cell["attribution"]["shares"]) for cell in attributed) + 1
    figure, panels = panels_of(len(attributed), columns=3, height=0.7 + 0.27 * bars, sharex=True)
    for panel, cell, name in zip(panels, attributed, names(attributed)):
        _draw_shares(panel, cell)
        head(panel, name)
    leave_room(panels, 0.55)
    figure.supxlabel("% of stock's time saved", fontsize=9)
    return Picture(
        "contributions",
        "What each patch contributes",
        "Share of the stock half-precision time that each patch saves (Shapley values, which add up to what all of "
        "them save), with 95% intervals. A hollow bar's 99% interval holds 0 (a ratio of 1): no measurable effect.",
        figure,
    )


def _draw_shares(panel: Any, cell: dict[str, Any]) -> None:
    shares = [*cell["attribution"]["shares"].items(), ("all of them", saved_by_all(cell))]
    for at, (_, share) in enumerate(shares):
        if not is_number(share.get("share")):
            continue
        middle = 100 * share["share"]
        low, high = (100 * share[end] if is_number(share.get(end)) else middle for end in ("low", "high"))
        claimed = measurable({**share, "low": low, "high": high}, 0.0)
        look = TOTAL_BAR if at == len(shares) - 1 else PATCHED_BAR
        look = look if claimed else {**look, "facecolor": "white"}
        arms = arms_of({"median": middle, "low": low, "high": high})
        panel.barh(at, middle, height=0.62, xerr=arms, error_kw=WHISKER, **look)
        text, size = (f"{middle:.1f}%", 8) if claimed else (NO_EFFECT.replace("ble ", "ble\n"), 6.5)
        write_beside(panel, max(high, 0), at, text, fontsize=size, linespacing=0.95)
    panel.set_yticks(range(len(shares)), [plain(patch) for patch, _ in shares])
    panel.set_ylim(len(shares) - 0.5, -0.5)
    panel.axvline(0, color="#666666", linewidth=0.8)
    panel.axhline(len(shares) - 1.5, color="#bbbbbb", linewidth=0.8, linestyle=":")
    panel.tick_params(axis="y", length=0)


def ratio_lines(cells: Sequence[dict[str, Any]]) -> list[Picture]:
    """Half precision beside fp32 against batch size, and against length, where a cell has several."""
    drawn = []
    for field, label in SERIES.items():
        series = _series(_beside_fp32(cells), field)
        if not series:
            continue
        figure, panels = panels_of(len(series), columns=3, height=2.1, sharey=True)
        firsts = [group[0] for group in series]
        fixed = [each for each in FIELDS[1:] if each != field and varies(firsts, each)]
        for panel, group in zip(panels, series):
            _draw_lines(panel, group, field)
            head(panel, describe(group[0], ["workload", *fixed]))
            panel.set_xlabel(label)
            panel.margins(y=0.2)
        figure.supylabel("time / stock fp32", fontsize=9)
        caption = f"Time of stock and of patched half precision as a ratio to stock fp32, against {label}. {_RATIOS}"
        drawn.append(Picture(f"ratio-{field}", f"Half precision beside fp32, by {label}", caption, figure))
    return drawn


def _draw_lines(panel: Any, group: Sequence[dict[str, Any]], field: str) -> None:
    panel.axhline(1, color="#666666", linewidth=0.9)
    ends = {}
    for shift, look, find in ((-0.04, STOCK_LINE, stock_row), (0.04, PATCHED_LINE, patched_row)):
        found = [find(cell).get("to_fp32") for cell in group]
        points = [(at + shift, ratio) for at, ratio in enumerate(found) if is_interval(ratio)]
        if not points:
            continue
        x, ratios = zip(*points)
        middle = [ratio["median"] for ratio in ratios]
        arms = list(zip(*(arm_pair(ratio) for ratio in ratios)))
        panel.errorbar(x, middle, yerr=arms, markersize=3.5, linewidth=1.4, elinewidth=1.1, capsize=2.5, **look)
        ends[_name(find(group[-1]))] = (x[-1], middle[-1], look["color"])
    # The upper line's name above its end, the lower one's below: they never meet.
    for lower, (name, (x, y, colour)) in enumerate(sorted(ends.items(), key=lambda end: -end[1][1])):
        place = {"xytext": (6, -3), "va": "top"} if lower else {"xytext": (6, 3), "va": "bottom"}
        panel.annotate(name, (x, y), textcoords="offset points", color=colour, fontsize=8, **place)
    ticks = [wording(cell, field).removeprefix(field).strip() for cell in group]
    panel.set_xticks(range(len(group)), [plain(tick) for tick in ticks])
    panel.set_xlim(-0.3, len(group) - 1 + 0.5 * len(group))


def ratio_bars(cells: Sequence[dict[str, Any]]) -> Picture | None:
    """Half precision beside fp32 for the cells that are part of no series."""
    timed = _beside_fp32(cells)
    in_series = [cell for field in SERIES for group in _series(timed, field) for cell in group]
    alone = [cell for cell in timed if not any(cell is other for other in in_series)]
    if not alone:
        return None
    figure, (panel,) = panels_of(1, columns=1, height=0.7 + 0.62 * len(alone))
    for at, cell in enumerate(alone):
        for shift, look, row in ((-0.19, STOCK_BAR, stock_row(cell)), (0.19, PATCHED_BAR, patched_row(cell))):
            ratio = row.get("to_fp32")
            if is_interval(ratio):
                panel.barh(at + shift, ratio["median"], height=0.34, xerr=arms_of(ratio), error_kw=WHISKER, **look)
                write_beside(panel, ratio["high"], at + shift, f"{_name(row)}  {ratio['median']:.2f}", fontsize=8)
    panel.axvline(1, color="#666666", linewidth=0.9)
    panel.text(1, -0.62, "stock fp32 = 1", ha="center", va="bottom", fontsize=8, color="#555555")
    panel.set_yticks(range(len(alone)), [plain(name) for name in names(alone)])
    panel.set_ylim(len(alone) - 0.5, -0.55)
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("time / stock fp32")
    leave_room([panel], 0.25)
    return Picture(
        "ratio",
        "Half precision beside fp32",
        "Time of stock half precision (hatched) and of patched (solid) as a ratio to stock fp32. "
        + _RATIOS.replace("Below the line", "Left of the line"),
        figure,
    )


def time_split(cells: Sequence[dict[str, Any]]) -> Picture | None:
    """Stacked bars of where the time of one call goes, before and after."""
    split = [cell for cell in cells if _split_rows(cell)]
    if not split:
        return None
    totals: dict[str, float] = {}
    for cell in split:
        for row in _split_rows(cell):
            for category, value in row["categories"].items():
                totals[category] = totals.get(category, 0) + (value if is_number(value) else 0)
    categories = sorted(filter(totals.get, totals), key=lambda category: -totals[category])
    looks = {category: CATEGORY_BARS[at % len(CATEGORY_BARS)] for at, category in enumerate(categories)}
    figure, panels = panels_of(len(split), columns=2, height=1.35)
    for panel, cell, name in zip(panels, split, names(split)):
        _draw_split(panel, cell, looks)
        head(panel, name)
    handles = [
        require("matplotlib.patches", "report").Patch(facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.6)
        for colour, hatch in looks.values()
    ]
    figure.legend(
        handles, [plain(each) for each in looks], loc="outside upper left", ncols=6, frameon=False, fontsize=8
    )
    figure.supxlabel("ms per call", fontsize=9)
    return Picture(
        "time-split",
        "Where the time goes, before and after",
        "Self time of one call by kind of operation, under a profiler, which adds its own cost: read the parts against "
        "each other, and take times from the tables.",
        figure,
    )


def _draw_split(panel: Any, cell: dict[str, Any], looks: dict[str, tuple[str, str]]) -> None:
    rows = _split_rows(cell)
    longest = max(sum(filter(is_number, row["categories"].values())) for row in rows) * 1000
    for at, row in enumerate(rows):
        left, total = 0.0, 1000 * sum(filter(is_number, row["categories"].values()))
        for category, (colour, hatch) in looks.items():
            value = row["categories"].get(category)
            if not is_number(value):
                continue
            width = 1000 * value
            panel.barh(at, width, left=left, height=0.66, facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.6)
            if width > 0.09 * longest:
                part = f"{width / total:.0%}"
                panel.text(left + width / 2, at, part, ha="center", va="center", fontsize=7, bbox=PAPER)
            left += width
        write_beside(panel, left, at, seconds(left / 1000), fontsize=8)
    panel.set_xlim(0, (longest or 1) * 1.22)
    panel.set_yticks(range(len(rows)), [_name(row) for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)


def _split_rows(cell: dict[str, Any]) -> list[dict[str, Any]]:
    rows = {row["variant"]: row for row in (row_of(cell, STOCK_FP32), stock_row(cell), patched_row(cell)) if row}
    return [row for row in rows.values() if row.get("categories")]


def _beside_fp32(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a time beside fp32, but for single operations: some take next to no time in fp32."""
    calls = [cell for cell in cells if cell["cell"].get("level") != "micro"]
    return [cell for cell in calls if any(is_interval(row(cell).get("to_fp32")) for row in (stock_row, patched_row))]


def _series(cells: Sequence[dict[str, Any]], field: str) -> list[list[dict[str, Any]]]:
    """Groups of cells that differ in this field alone, of several values."""
    groups = grouped(cells, [field])
    return [group for group in groups if varying(group, [field])]


def _name(row: dict[str, Any]) -> str:
    return "all patches" if row.get("variant") == "all" else plain(row.get("variant", ""))
