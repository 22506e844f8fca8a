"""The picture of a check: magnitude by depth, bound and observed, before and after rescaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .drawing import DEEP, INK, WARM, Picture, own_style, panels_of, plain

_SUMS = ("residual stream", "attention output", "feed-forward output")
_HIDDEN = "hidden product"
# The logits have no depth.
_OTHERS = ("attention projections", "attention scores", "feed-forward gate")
_Magnitude = dict[str, Any]
# A panel each.
_KINDS: dict[str, Callable[[_Magnitude], bool]] = {
    "sums and what is added": lambda each: each["place"] in _SUMS,
    "hidden product": lambda each: each["place"] == _HIDDEN and not each["fixed"],
    "out of rescaling's reach": lambda each: each["place"] in _OTHERS or (each["place"] == _HIDDEN and each["fixed"]),
}
_NAMES = {"weights": "bound, for every input", "data": "observed"}
_LOOKS: dict[str, dict[str, Any]] = {
    "weights": {"color": WARM, "linestyle": "--", "marker": "s", "markerfacecolor": "white"},
    "data": {"color": DEEP, "linestyle": "-", "marker": "o"},
}
_AFTER: dict[str, Any] = {"linestyle": ":", "linewidth": 1.2, "markersize": 3}
_TICKS = 8


def headroom_picture(check: Mapping[str, Any]) -> Picture:
    """Three panels for each stack: the sums, the hidden products, and what rescaling does not reach.

    Args:
        check: as `Check.to_dict` gives it.

    Raises:
        T5FastPatchError: matplotlib is missing.
    """
    with own_style():
        figure, panels = panels_of(len(_KINDS) * len(check["stacks"]), columns=len(_KINDS), height=2.4, sharey=True)
        for row, stack in enumerate(check["stacks"]):
            for panel, (title, keep) in zip(panels[row * len(_KINDS) :], _KINDS.items()):
                panel.set_title(plain(f"{stack['name']}: {title}"))
                _draw(panel, stack, keep, check["fp16_max"])
        figure.supxlabel("block; in: what enters the first one", fontsize=9)
        figure.supylabel("largest magnitude", fontsize=9)
        legend = {text: line for panel in panels for line, text in zip(*panel.get_legend_handles_labels())}
        figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=3, frameon=False)
    return Picture(
        "headroom",
        f"Headroom of {check['subject']} in fp16",
        "The largest magnitude by depth; above the line fp16 overflows. Dotted: once rescaled as proposed.",
        figure,
    )


def _draw(panel: Any, stack: Mapping[str, Any], keep: Callable[[_Magnitude], bool], limit: float) -> None:
    panel.set_yscale("log", base=2)
    panel.axhline(limit, color=INK, linewidth=1, label=f"{limit:.0f}, fp16's largest number")
    depths = {0}
    for source in (each for each in _NAMES if each in stack):
        found = [each for each in stack[source]["magnitudes"] if keep(each)]
        before, after = dict(_by_depth(found, "value")), dict(_by_depth(found, "after"))
        depths |= set(before)
        if before:
            panel.plot(list(before), list(before.values()), label=_NAMES[source], markersize=5, **_LOOKS[source])
        if after and after != before:
            label = f"{_NAMES[source].partition(',')[0]}, once rescaled"
            panel.plot(list(after), list(after.values()), label=label, **{**_LOOKS[source], **_AFTER})
    blocks = range(0, max(depths) + 1, math.ceil((max(depths) + 1) / _TICKS))
    entry = {-1: "in"} if -1 in depths else {}
    panel.set_xticks([*entry, *blocks], [*entry.values(), *map(str, blocks)])
    panel.set_xlim(-1.5, max(depths) + 0.5)


def _by_depth(found: list[_Magnitude], field: str) -> Iterator[tuple[int, float]]:
    """The largest finite value above 0 of each block, what enters the first at -1."""
    depths = sorted({-1 if each["layer"] is None else each["layer"] for each in found})
    for depth in depths:
        here = (each[field] for each in found if (-1 if each["layer"] is None else each["layer"]) == depth)
        known = [float(value) for value in here if value is not None and 0 < float(value) < math.inf]
        if known:
            yield depth, max(known)
