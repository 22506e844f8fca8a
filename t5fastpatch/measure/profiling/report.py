"""One profile, or two side by side, as tables and as plain data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..census import Census
from .categories import CATEGORIES
from .diff import AS_OFTEN, KINDS, Difference, diff
from .host_profile import HostProfile
from .host_report import function_table, module_table
from .modules import module_count_table
from .profile import Profile
from .side_by_side import NOTHING, difference_columns, difference_of, letters_of, milliseconds, new_table, number_text

KERNEL_WIDTH = 60


@dataclasses.dataclass(frozen=True)
class Profiled:
    """A variant and what was found about it.

    Attributes:
        name: of the variant.
        profile: of its ops and kernels.
        census: exact counts of one call.
        host: of its Python functions, if asked for.
    """

    name: str
    profile: Profile
    census: Census
    host: HostProfile | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, strings and numbers."""
        return {
            "name": self.name,
            "profile": self.profile.to_dict(),
            "census": self.census.to_dict(),
            "host": self.host and self.host.to_dict(),
        }


def to_dict(variants: Sequence[Profiled]) -> dict[str, Any]:
    """One variant, or two and their diff, as plain data."""
    differences = diff(*(each.profile for each in variants)) if len(variants) == 2 else []
    return {"variants": [each.to_dict() for each in variants], "diff": [each.to_dict() for each in differences]}


def print_report(variants: Sequence[Profiled], about: Mapping[str, Any], top: int, console: Console) -> None:
    """Prints what was profiled, the tables, and below them what they do not say.

    Args:
        variants: one or two, profiled on the same device.
        about: `model`, `workload`, `batch_size` and `environment` of all of them.
        top: rows per table, or per part of one.
        console: where to.
    """
    for line in header(variants, about):
        console.print(Text(line))
    for table in tables(variants, top):
        # As a line of its own: a table pads its title.
        console.print(Text(f"\n{table.title}", style="bold"))
        table.title = None
        console.print(table)
    for line in footer(variants):
        console.print(Text(line), soft_wrap=True)


def header(variants: Sequence[Profiled], about: Mapping[str, Any]) -> list[str]:
    """What was profiled, and where."""
    where = about["environment"]
    return [
        f"One {about['workload'].replace('_', ' ')} of {about['model']}, batch of {about['batch_size']}, "
        f"as seen in {variants[0].profile.calls} calls of each variant, taken in turn.",
        *(f"{letter}is {each.name}." for letter, each in zip(letters_of(variants), variants) if letter),
        f"transformers {where['transformers']}, torch {where['torch']}, Python {where['python']}, "
        f"on {where['device']} ({where['device_name']}), threads: {where['threads']}.",
    ]


def footer(variants: Sequence[Profiled]) -> list[str]:
    """What the tables do not say."""
    lines = ["Numbers of calls are exact, times are of few calls: `t5fastpatch ablate` says whether a patch is faster."]
    if variants[0].profile.device == "cpu":
        lines.append("Ops of a CPU are no kernels, and their times say nothing of half precision on a GPU.")
    return lines


def tables(variants: Sequence[Profiled], top: int) -> Iterator[Table]:
    """The tables of one variant, or of two side by side, called A and B.

    Args:
        variants: one or two, profiled on the same device.
        top: rows per table, or per part of it.
    """
    profiles = [each.profile for each in variants]
    yield category_table(profiles)
    yield diff_table(diff(*profiles), top) if len(profiles) == 2 else ops_table(profiles[0], top)
    if profiles[0].device == "cuda":
        yield device_table(profiles)
        for letter, profile in zip(letters_of(profiles), profiles):
            yield kernel_table(letter, profile, top)
    yield module_count_table([each.census for each in variants])
    yield sync_table([each.census.sync_sites for each in variants])
    hosts = [each.host for each in variants if each.host is not None]
    if hosts:
        yield function_table(hosts, top)
        yield module_table(hosts, top)


def category_table(profiles: Sequence[Profile]) -> Table:
    """Ops and their time, by category."""
    whose = "kernels" if profiles[0].device == "cuda" else "ops"
    letters = letters_of(profiles)
    table = new_table(
        f"Where the time goes: self time of {whose} by category, per call",
        ["category"],
        [f"{letter}{column}" for letter in letters for column in (whose, "ms", "share")] + difference_columns(letters),
    )
    for name in CATEGORIES:
        seconds = [profile.by_category()[name] for profile in profiles]
        calls = [profile.calls_by_category()[name] for profile in profiles]
        if any(calls) or any(seconds):
            cells = [_cells(*each) for each in zip(calls, seconds, (profile.seconds for profile in profiles))]
            table.add_row(name, *(cell for each in cells for cell in each), *difference_of(seconds))
    totals = [profile.seconds for profile in profiles]
    walls = [profile.wall for profile in profiles]
    rests = [max(0.0, wall - total) for wall, total in zip(walls, totals)]
    table.add_section()
    _add_sum(table, f"all {whose}", totals, [sum(profile.calls_by_category().values()) for profile in profiles])
    casts, cast_seconds = zip(*(profile.casts() for profile in profiles))
    _add_sum(table, "of them casts, norms' too", cast_seconds, casts)
    _add_sum(table, "the device waits" if whose == "kernels" else "Python between them", rests)
    _add_sum(table, "the call, without profiler", walls)
    return table


def ops_table(profile: Profile, top: int) -> Table:
    """The ops that take longest."""
    table = new_table(f"The {top} ops that take longest, per call", ["category", "op"], ["calls", "ms"])
    for op in profile.ops[:top]:
        table.add_row(op.category, op.name, number_text(op.calls), milliseconds(op.seconds))
    return table


def diff_table(differences: Sequence[Difference], top: int) -> Table:
    """What one variant does and the other does not, or not as often, and below that what both do as often."""
    table = new_table(
        "What changed, op by op, per call", ["", "category", "op"], ["A calls", "A ms", "B calls", "B ms", "B - A ms"]
    )
    for kind in KINDS:
        found = [each for each in differences if each.kind == kind]
        shown = found[: top if kind != AS_OFTEN else top // 2]
        for index, each in enumerate(shown):
            table.add_row("" if index else kind, each.a.category, each.a.name, *_pairs([each]))
        rest = found[len(shown) :]
        if rest:
            table.add_row("" if shown else kind, f"and {len(rest)} more", "", *_pairs(rest))
        table.add_section()
    return table


def device_table(profiles: Sequence[Profile]) -> Table:
    """Launches, waits and tensor cores on CUDA."""
    letters = letters_of(profiles)
    table = new_table("On the device, per call", [""], [letter.strip() or "all" for letter in letters])
    kernels = [sum(kernel.calls for kernel in profile.kernels) for profile in profiles]
    shares = [profile.tensor_core_shares() for profile in profiles]
    table.add_row("kernels", *map(number_text, kernels))
    table.add_row("launches by the host", *(number_text(profile.launches) for profile in profiles))
    table.add_row(
        "waits for the device (CUDA's synchronising calls)", *(number_text(profile.waits) for profile in profiles)
    )
    table.add_row("kernels on tensor cores", *(f"{share:.0%}" for share, _ in shares))
    table.add_row("kernels' time on tensor cores", *(f"{share:.0%}" for _, share in shares))
    return table


def kernel_table(letter: str, profile: Profile, top: int) -> Table:
    """The kernels that take longest."""
    table = new_table(
        f"{letter}kernels that take longest, per call", ["category", "kernel", "tensor cores"], ["calls", "ms"]
    )
    for kernel in profile.kernels[:top]:
        name = kernel.name if len(kernel.name) <= KERNEL_WIDTH else f"{kernel.name[: KERNEL_WIDTH - 3]}..."
        on_them = "yes" if kernel.tensor_cores else ""
        table.add_row(kernel.category, name, on_them, number_text(kernel.calls), milliseconds(kernel.seconds))
    return table


def sync_table(sites: Sequence[Counter[str]]) -> Table:
    """Where the host waits for a result on the device."""
    letters = letters_of(sites)
    table = new_table(
        "Where the host waits for the device, or would on a GPU, per call",
        ["line"],
        [f"{each}waits" for each in letters],
    )
    every = sum(sites, Counter())
    for site, _ in every.most_common():
        table.add_row(site, *(str(each[site]) for each in sites))
    if not every:
        table.add_row("nowhere", *("0" for _ in sites))
    return table


def _cells(calls: float, seconds: float, total: float) -> tuple[str, str, str]:
    return number_text(calls), milliseconds(seconds), f"{seconds / total:.0%}" if total else NOTHING


def _add_sum(table: Table, name: str, seconds: Sequence[float], calls: Sequence[float] | None = None) -> None:
    cells = [(number_text(calls[index]) if calls else "", milliseconds(mine), "") for index, mine in enumerate(seconds)]
    table.add_row(name, *(cell for each in cells for cell in each), *difference_of(seconds))


def _pairs(differences: Sequence[Difference]) -> list[str]:
    cells = []
    for side in ("a", "b"):
        ops = [getattr(each, side) for each in differences]
        calls, seconds = sum(op.calls for op in ops), sum(op.seconds for op in ops)
        cells += [number_text(calls), milliseconds(seconds)] if calls else [NOTHING, NOTHING]
    return [*cells, f"{sum(each.seconds for each in differences) * 1000:+.3f}"]
