"""The comparison as tables, of what the JSON file holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from .comparison import BASELINE, COMPILED_BASELINE

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
HEADER = ("", "computes in", "ms", "time / stock", "/ stock compiled", "error, bound", "peak MiB")

Case = Mapping[str, Any]
Document = Mapping[str, Any]


def table(case: Case) -> Table:
    """A case for the terminal, a row a peer."""
    shown = Table(*HEADER, title=title(case), caption=patches_in(case))
    for row in case["peers"]:
        shown.add_row(*cells(row))
    return shown


def markdown(documents: Sequence[Document]) -> str:
    """Every case of every document, between the marks that a page has for them."""
    parts = [part for document in documents for part in _parts(document)]
    return "\n\n".join([BEGIN, *parts, END])


def _parts(document: Document) -> Iterator[str]:
    about, versions = document["environment"], document["versions"]
    known = {name: about[name] for name in ("torch", "transformers") if name in about} | dict(versions)
    yield f"On {about['device_name']}, with {', '.join(f'{name} {version}' for name, version in known.items())}."
    for case in document["cases"]:
        rows = [HEADER, ["---"] * len(HEADER), *map(cells, case["peers"])]
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        yield f"**{title(case)}**\n\n{lines}\n\n{patches_in(case)}"


def title(case: Case) -> str:
    """A case in words."""
    tokens = f", {case['new_tokens']} new tokens" if case["workload"] == "generate" else ""
    size = f"batch {case['batch']} x {case['length']}{' padded' if len(set(case['lengths'])) > 1 else ''}"
    threads = f", threads: {case['threads']}" if case["device"] == "cpu" else ""
    rounds = f", rounds: {case['timing']['rounds']}" if case["timing"] else ""
    return f"{case['shape']}, {case['workload']}, {case['dtype']}, {size}{tokens}, {case['device']}{threads}{rounds}"


def cells(row: Mapping[str, Any]) -> list[str]:
    """A peer in words."""
    if row["state"] != "timed":
        return [row["peer"], f"{row['state']}: {row['why']}", *[""] * (len(HEADER) - 2)]
    peak = row["host_peak"] if row["device_peak"] is None else row["device_peak"]
    return [
        row["peer"],
        row["arithmetic"],
        f"{1000 * row['seconds']:.4g}",
        *(_ratio(row["ratios"].get(baseline)) for baseline in (BASELINE, COMPILED_BASELINE)),
        f"{row['error']:.1e}, {row['bound']:g}",
        "-" if peak is None else f"{peak / 2**20:.0f}",
    ]


def patches_in(case: Case) -> str:
    """The patches of the patched model, in words."""
    on = next((row["patches"] for row in case["peers"] if row["patches"]), ())
    return f"Patched: {', '.join(on)}." if on else "Patched: nothing."


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    if ratio["low"] == ratio["high"] == 1:
        return "1"
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
