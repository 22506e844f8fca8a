"""The command `predict`: options and output; the work is in measure/cost/forecast.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import NotFoundError, T5FastPatchError
from .files import check_outputs, write

if TYPE_CHECKING:
    from torch import nn

    from .measure.cost.forecast import Forecast, Sizes
    from .measure.precision import Precision

TITLE = "Predicted, not measured"
WIDTH = 110


def predict(
    model: Annotated[
        str | None, typer.Option(help="A folder with a config.json, or a model's name on the hub; else the embedded.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model: t5-small, t5-large, t5-xxl-encoder, ...")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Names, with commas: T4, V100, 2080 Ti, 3090, A100, H100, H200; all without it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Which half precision: fp16 or bf16.")] = "fp16",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 8,
    source_length: Annotated[int, typer.Option(min=1, help="Tokens of each source.")] = 128,
    target_length: Annotated[
        int, typer.Option(min=2, help="Tokens of each target; the decoder step is the one in its middle.")
    ] = 128,
    patches: Annotated[str, typer.Option(help="Names, with commas, or a preset.")] = "safe",
    tf32: Annotated[bool, typer.Option(help="Products of fp32 on tensor cores, where there is tf32.")] = False,
    json: Annotated[Path | None, typer.Option(help="A file to write everything to, as JSON.")] = None,
) -> None:
    """Predict times on GPUs, stock and patched, from a model's configuration. Needs no GPU and no weights."""
    # Imported here, so that the command's help needs no torch.
    from .measure.cost.devices import DEVICES, device_named
    from .measure.cost.forecast import Sizes, forecast

    check_outputs(json)
    devices = list(DEVICES.values()) if device is None else [device_named(name) for name in device.split(",")]
    sizes = Sizes(batch_size, source_length, target_length)
    name, subject = _subject(model, shape)
    cells = forecast(subject, sizes, devices, _half(dtype), patches, tf32=tf32)
    _print(name, sizes, cells)
    if json is not None:
        write({json: _json(name, sizes, cells).encode()})


def _subject(model: str | None, shape: str | None) -> tuple[str, nn.Module]:
    import torch

    from .loading import from_config
    from .measure.shapes import random_model
    from .measure.subject import DEMO_MODEL

    if shape is None:
        return model or "the embedded model", from_config(model or str(DEMO_MODEL))
    if model is not None:
        raise T5FastPatchError("name a model or a shape, not both")
    return f"a model of the shape of {shape}", random_model(shape, torch.device("meta"))


def _half(name: str) -> Precision:
    from .measure.precision import Precision, precision_of

    precision = precision_of(name)
    if precision not in (Precision.FP16, Precision.BF16):
        raise NotFoundError(f"predictions are for fp16 and bf16, not for {precision}")
    return precision


def _print(name: str, sizes: Sizes, cells: list[Forecast]) -> None:
    import transformers
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    on = ", ".join(cells[-1].patches) or "nothing, since upstream has it all"
    for device in dict.fromkeys(cell.device for cell in cells):
        rows = _rows([cell for cell in cells if cell.device == device])
        variants = list(next(iter(rows.values())))
        half = variants[1].removeprefix("stock ")
        table = Table("workload", title=f"{TITLE}: {device}", title_justify="left")
        for column in (*variants, f"{half} / fp32", "patched / stock", "bound by"):
            table.add_column(column, justify="right")
        for workload, row in rows.items():
            table.add_row(workload.replace("_", " "), *_columns(list(row.values())))
        console.print(table)
    console.print(
        f"{name}, batch {sizes.batch}, source {sizes.source}, target {sizes.target}, transformers "
        f"{transformers.__version__}. Ratios of time: above 1 is slower. Patched with {on}. A configuration proves no "
        "headroom: what needs such a proof is on only where it is named. Where launches bound all, the host sets the "
        "time, and GPUs do not differ.",
        soft_wrap=True,
    )
    console.print(f"{TITLE}: see docs/cost-model.md for the model and how far off it has been.", soft_wrap=True)


def _rows(cells: list[Forecast]) -> dict[str, dict[str, Forecast]]:
    """By workload and variant."""
    rows: dict[str, dict[str, Forecast]] = {}
    for cell in cells:
        rows.setdefault(cell.workload, {})[cell.variant] = cell
    return rows


def _columns(row: list[Forecast]) -> list[str]:
    """Three times, two ratios and what bounds each time."""
    fp32, half, patched = row
    bounds = list(dict.fromkeys(cell.prediction.bound.value for cell in row if cell.prediction))
    return [*map(_time, row), _ratio(half, fp32), _ratio(patched, half), ", ".join(bounds)]


def _time(cell: Forecast) -> str:
    if cell.prediction is None:
        return "not available"
    milliseconds = cell.prediction.seconds * 1000
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds:.0f} ms"


def _ratio(cell: Forecast, baseline: Forecast) -> str:
    if cell.prediction is None or baseline.prediction is None:
        return "-"
    return f"{cell.prediction.seconds / baseline.prediction.seconds:.2f}"


def _json(name: str, sizes: Sizes, cells: list[Forecast]) -> str:
    import dataclasses
    import json

    import torch
    import transformers

    from .measure.cost.model import ASSUMED

    document = {
        "what": TITLE,
        "model": name,
        "sizes": dataclasses.asdict(sizes),
        "costs": dataclasses.asdict(ASSUMED),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cells": [_cell(cell) for cell in cells],
    }
    return json.dumps(document, indent=2) + "\n"


def _cell(cell: Forecast) -> dict[str, Any]:
    """A cell as plain data; nulls where nothing is predicted."""
    found = cell.prediction
    return {
        "device": cell.device,
        "workload": cell.workload,
        "variant": cell.variant,
        "seconds": found and found.seconds,
        "host_seconds": found and found.host,
        "device_seconds": found and found.device,
        "sync_seconds": found and found.syncs,
        "bound": found and found.bound.value,
    }
