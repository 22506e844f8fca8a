"""What was measured, as plain data: the records that files and reports are made of."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from ..reports.schema import AttributionRecord, CellRecord, RatioRecord, RowRecord
from .attribution import Attribution, Share
from .cells import Cell
from .statistics import Ratio
from .timing import Samples
from .variants import STOCK_FP32, Plan, Variant

Measured = Mapping[str, Mapping[str, Any]]
"""Of each variant, by name, further fields of its row: `census`, `quality` and so on."""


def cell_record(
    key: str,
    cell: Cell,
    plan: Plan,
    variants: list[Variant],
    samples: Samples | None,
    shares: Attribution | None,
    measured: Measured,
    seed: int,
) -> CellRecord:
    """The record of a cell.

    Args:
        key: of the cell.
        cell: which.
        plan: the variants of its precision.
        variants: those that have a row here.
        samples: the times, where the cell has any.
        shares: the attribution, where there is one.
        measured: whatever else is known of each variant.
        seed: of the resampling.
    """
    return {
        "key": key,
        "cell": dataclasses.asdict(cell),
        "baseline": plan.baseline,
        "rounds": samples.rounds if samples else None,
        "calls": samples.calls if samples else None,
        "stopped": samples.stopped if samples else None,
        "rows": [_row(variant, plan.baseline, samples, measured.get(variant.name, {}), seed) for variant in variants],
        "attribution": None if shares is None else _attribution(shares),
    }


def _row(variant: Variant, baseline: str, samples: Samples | None, measured: Mapping[str, Any], seed: int) -> RowRecord:
    timed = samples if samples and variant.name in samples.seconds else None
    return {
        "variant": variant.name,
        "label": variant.label,
        "precision": variant.precision.value,
        "patches": list(variant.patches),
        "state": variant.state,
        "measured": variant.measured,
        "shown": variant.shown,
        "why": variant.why,
        "seconds": list(timed.seconds[variant.name]) if timed else None,
        "median": timed.median(variant.name) if timed else None,
        "to_half": _ratio(timed.ratio(variant.name, baseline, seed)) if timed else None,
        "to_fp32": _ratio(timed.ratio(variant.name, STOCK_FP32, seed)) if timed else None,
        "census": measured.get("census"),
        "categories": measured.get("categories"),
        "quality": measured.get("quality"),
        "evaluation": measured.get("evaluation"),
        "peak_memory": measured.get("peak_memory"),
    }


def _ratio(ratio: Ratio) -> RatioRecord:
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high, "measurable": ratio.measurable}


def _attribution(shares: Attribution) -> AttributionRecord:
    saved: Share = shares.saved
    return {
        "patches": list(shares.shares),
        "method": "exact" if shares.exact else "sampled",
        "permutations": None if shares.exact else shares.orders,
        "saved": {"median": saved.share, "low": saved.low, "high": saved.high, "measurable": saved.measurable},
        "shares": {patch: dataclasses.asdict(share) for patch, share in shares.shares.items()},
    }


def finite(value: Any) -> Any:
    """Plain data with infinity and NaN as strings, so that JSON holds them."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def to_json(record: Any, indent: int | None = None) -> str:
    """A record as JSON, without a line end."""
    return json.dumps(finite(record), indent=indent, allow_nan=False, ensure_ascii=False)
