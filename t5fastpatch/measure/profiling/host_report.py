"""Host profiles as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .host_profile import Function, HostProfile
from .side_by_side import NOTHING, difference_columns, difference_of, letters_of, milliseconds, new_table, number_text


def function_table(hosts: Sequence[HostProfile], top: int) -> Table:
    """The functions of the host that take longest by themselves."""
    letters = letters_of(hosts)
    table = new_table(
        "The host: functions by their own time, under cProfile, per call",
        ["function", "module"],
        [f"{letter}{column}" for letter in letters for column in ("calls", "ms")] + difference_columns(letters),
    )
    by_place = [{(each.module, each.name): each for each in host.functions} for host in hosts]
    most = {place: max(host[place].seconds for host in by_place if place in host) for place in _keys(by_place)}
    for place in sorted(most, key=lambda place: -most[place])[:top]:
        found = [host.get(place) for host in by_place]
        cells = [cell for each in found for cell in _cells(each)]
        module, name = place
        table.add_row(
            name,
            "/".join(module.split("/")[-2:]),
            *cells,
            *difference_of([each.seconds if each else 0.0 for each in found]),
        )
    return table


def module_table(hosts: Sequence[HostProfile], top: int) -> Table:
    """The host's time by the module whose own functions spend it."""
    letters = letters_of(hosts)
    table = new_table(
        "The host: modules by the time of their own functions, under cProfile, per call",
        ["module"],
        [f"{letter}{column}" for letter in letters for column in ("ms", "share")] + difference_columns(letters),
    )
    modules = [host.by_module() for host in hosts]
    for name in sorted(_keys(modules), key=lambda name: -max(each.get(name, 0.0) for each in modules))[:top]:
        seconds = [each.get(name, 0.0) for each in modules]
        cells = [
            cell for host, mine in zip(hosts, seconds) for cell in (milliseconds(mine), f"{mine / host.seconds:.0%}")
        ]
        table.add_row(name, *cells, *difference_of(seconds))
    return table


def _cells(function: Function | None) -> tuple[str, str]:
    return (number_text(function.calls), milliseconds(function.seconds)) if function else (NOTHING, NOTHING)


def _keys(dicts: Sequence[dict[Any, Any]]) -> list[Any]:
    return list({key: None for each in dicts for key in each})
