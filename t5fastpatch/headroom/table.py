"""A check as text: a table of places, and below it what was decided for each stack."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..findings import transformers_version
from .decision import rescalable
from .places import Magnitude, Place, Scaling, bits

if TYPE_CHECKING:
    from .check import Check

WIDTH = 110
_NAMES = {"weights": "bound", "data": "observed"}


def text_of(check: Check) -> str:
    """The table and the sentences."""
    # Imported here: a report is printed now and then, a model is checked in a program that may never print.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("stack", "place", box=box.ASCII)
    for headroom in check.headrooms:
        for column in (_NAMES[headroom.source], "block", "bits", "after"):
            table.add_column(column, justify="right")
    for row in _rows(check):
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=WIDTH)
    title = f"t5fastpatch check: {check.subject}, transformers {transformers_version()}"
    console.print(Text(title), soft_wrap=True)
    console.print(table)
    console.print(
        Text("bits: headroom in fp16, log2(65504 / largest); after: the same once rescaled; block: the largest's")
    )
    for line in itertools.chain.from_iterable(_sentences(check, stack) for stack in check.stacks):
        console.print(Text(line), soft_wrap=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n")


def _rows(check: Check) -> Iterator[list[str]]:
    for stack in check.stacks:
        scaling = check.decisions[stack].scaling
        for place in Place:
            cells = [_cells(list(headroom.of(stack, place)), scaling) for headroom in check.headrooms]
            if any(cell[0] for cell in cells):
                yield [stack, place.value, *itertools.chain.from_iterable(cells)]


def _cells(found: list[Magnitude], scaling: Scaling | None) -> list[str]:
    """The largest value, its block, its headroom, and the least headroom after rescaling."""
    if not found:
        return [""] * 4
    largest = max(found, key=lambda each: each.value)
    after = "" if scaling is None else _bits(max(each.under(scaling) for each in found))
    return [f"{largest.value:.3g}", _block(largest), _bits(largest.value), after]


def _sentences(check: Check, stack: str) -> Iterator[str]:
    decision = check.decisions[stack]
    scaling = decision.scaling
    how = "as it is" if scaling == Scaling() else "once rescaled"
    yield ""
    if decision.rests_on:
        yield f"{stack}: fits into fp16 {how}, which rests on the {decision.rests_on}"
    else:
        yield f"{stack}: nothing shows that it fits into fp16"
    if scaling is not None and scaling != Scaling():
        hidden = f" (the hidden product's: {power(scaling.hidden)})" if scaling.hidden < 1 else ""
        spare = f", with {decision.margin_bits:.0f} bits to spare" if decision.margin_bits else ""
        yield f"  proposed scale: {power(scaling.stream)}{hidden}{spare}"
    for why in decision.why_not:
        yield f"  {why}"
    yield from _risks(check, stack)
    fits = f"fits, which rests on the {decision.others_rest_on}" if decision.others_rest_on else "not shown to fit"
    yield f"  out of rescaling's reach ({_others(check, stack)}): {fits}"
    for headroom in check.headrooms:
        for sentence in headroom.assumes.get(stack, ()):
            yield f"  the {_NAMES[headroom.source]} figures assume: {sentence}"


def _risks(check: Check, stack: str) -> Iterator[str]:
    for source, found in check.at_risk(stack).items():
        if found:
            yield f"  at risk in stock fp16 by the {source}: {_where(found)}"


def _others(check: Check, stack: str) -> str:
    """The places that rescaling does not reach."""
    found = [each for headroom in check.headrooms for each in headroom.of(stack) if not rescalable(each)]
    return ", ".join(place.value for place in Place if any(each.place is place for each in found))


def _where(found: list[Magnitude]) -> str:
    """The blocks of each place, neighbours as ranges."""
    places = dict.fromkeys(each.place for each in found)
    return "; ".join(f"{place.value} ({_blocks(each for each in found if each.place is place)})" for place in places)


def _blocks(found: Iterable[Magnitude]) -> str:
    names, numbers = [], []
    for each in found:
        if each.layer is None:
            names.append(_block(each))
        else:
            numbers.append(each.layer)
    for _, run in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        ends = [number for _, number in run]
        names.append(f"blocks {ends[0]}-{ends[-1]}" if len(ends) > 1 else f"block {ends[0]}")
    return ", ".join(names)


def _block(magnitude: Magnitude) -> str:
    if magnitude.layer is not None:
        return str(magnitude.layer)
    return "end" if magnitude.place is Place.LOGITS else "entry"


def _bits(value: float) -> str:
    return f"{bits(value):.1f}"


def power(factor: float) -> str:
    """A power of two, as one."""
    return f"2^{math.log2(factor):.0f}"
