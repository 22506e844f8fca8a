"""The shape of an ablation's result, as it is written: docs/results-format.md says what each field means."""

from __future__ import annotations

from typing import Any, TypedDict

SCHEMA = "t5fastpatch.ablation/2"


class RatioRecord(TypedDict):
    """A `statistics.Ratio`."""

    median: float
    low: float
    high: float
    measurable: bool


class RowRecord(TypedDict):
    """What was measured of one variant in one cell; `None` where that cell does not measure it."""

    variant: str
    label: str
    precision: str
    patches: list[str]
    state: str
    measured: bool
    shown: bool
    why: str
    seconds: list[float] | None
    median: float | None
    to_half: RatioRecord | None
    to_fp32: RatioRecord | None
    census: dict[str, Any] | None
    categories: dict[str, float] | None
    quality: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    peak_memory: int | None


class AttributionRecord(TypedDict):
    """An `attribution.Attribution`."""

    patches: list[str]
    method: str
    permutations: int | None
    saved: RatioRecord
    shares: dict[str, dict[str, Any]]


class CellRecord(TypedDict):
    """One cell: a line of the JSONL file."""

    key: str
    cell: dict[str, Any]
    baseline: str
    rounds: int | None
    calls: int | None
    stopped: str | None
    rows: list[RowRecord]
    attribution: AttributionRecord | None


class Result(TypedDict):
    """An ablation: the JSON file, and without its cells the first line of the JSONL file."""

    schema: str
    subject: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    notes: list[str]
    failures: list[str]
    cells: list[CellRecord]
