"""Predictions for a model: stock in fp32 and in half precision, and patched, from its shapes alone."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...engine import patched, status
from ...errors import NotT5Error, T5FastPatchError
from ...loading import described
from ...patch import State
from ..census import Census, census
from ..census.fake import shapes_only, without_data
from ..precision import Precision
from ..variants import STOCK_FP32, check_stock, stock
from ..workloads import Workload, decoder_step, encoder_forward, forward, is_seq2seq
from .devices import Device
from .model import Prediction, predict


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a batch without padding.

    Attributes:
        batch: sequences.
        source: tokens of each source.
        target: tokens of each target; a decoder step is the one in its middle, so the mean over its steps.
    """

    batch: int = 8
    source: int = 128
    target: int = 128


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One predicted time; `prediction` is `None` where the device does not have the dtype.

    `patches` are on; of those that need a proof of headroom, only the ones that were named, as there are no weights.
    """

    device: str
    workload: str
    variant: str
    patches: tuple[str, ...]
    prediction: Prediction | None


def forecast(
    model: nn.Module,
    sizes: Sizes,
    devices: Sequence[Device],
    half: Precision = Precision.FP16,
    patches: str | Sequence[str] | None = None,
    *,
    tf32: bool = False,
) -> list[Forecast]:
    """Predicts the times of stock fp32, stock half and patched half, by device and workload, without running anything.

    Args:
        model: stock, of the T5 family; its weights may be on the meta device.
        sizes: of the batch.
        devices: of `DEVICES`.
        half: `FP16` or `BF16`.
        patches: as for `apply`.
        tf32: as for `cost.predict`.

    Raises:
        NotT5Error: the model is not one of text to text, no T5, or does not run on shapes alone.
        T5FastPatchError: a patch is unknown, has no place in the model, or is on already.
    """
    _check(model)
    check_stock(status(model))
    try:
        counted, on = _censuses(model, sizes, half, patches)
    except T5FastPatchError:
        raise
    except Exception as error:  # whatever a model's own code raises where there is no data, or where it wants more
        kind = type(model).__name__
        raise NotT5Error(f"no prediction for this {kind}, which does not run: {described(error)}") from error
    name = str(half.dtype).removeprefix("torch.")

    def put_on(variant: str) -> tuple[str, ...]:
        return on if variant == _patched(half) else ()

    def prediction(variant: str, work: Census, device: Device) -> Prediction | None:
        there = variant == STOCK_FP32 or name in device.rates
        return predict(work, device, tf32=tf32) if there else None

    return [
        Forecast(device.name, workload, variant, put_on(variant), prediction(variant, work, device))
        for device in devices
        for (workload, variant), work in counted.items()
    ]


def _censuses(
    model: nn.Module, sizes: Sizes, half: Precision, patches: str | Sequence[str] | None
) -> tuple[dict[tuple[str, str], Census], tuple[str, ...]]:
    """By workload and variant; and which patches are on."""
    counted = {}
    with shapes_only():
        fp32, cast = without_data(model, torch.float32).eval(), without_data(model, half.dtype).eval()
        for workload in _workloads(fp32, sizes):
            counted[workload.name, STOCK_FP32] = census(workload.prepare(), fp32)
        for workload in _workloads(cast, sizes):
            counted[workload.name, stock(half)] = census(workload.prepare(), cast)
        with patched(cast, patches) as report:
            for workload in _workloads(cast, sizes):
                counted[workload.name, _patched(half)] = census(workload.prepare(), cast)
    return counted, tuple(row.patch for row in report.rows if row.state is State.ON)


def _patched(half: Precision) -> str:
    return f"patched {half}"


def _workloads(model: Any, sizes: Sizes) -> list[Workload]:
    tokens = torch.zeros(sizes.batch, sizes.source, dtype=torch.int64)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if not is_seq2seq(model):
        return [forward(model, batch)]
    labels = torch.zeros(sizes.batch, sizes.target, dtype=torch.int64)
    return [
        encoder_forward(model, batch),
        decoder_step(model, {**batch, "labels": labels[:, : sizes.target // 2 + 1]}),
        forward(model, {**batch, "labels": labels}),
    ]


def _check(model: nn.Module) -> None:
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes or (is_seq2seq(model) and "labels" not in takes):
        raise NotT5Error(
            f"no prediction for a {type(model).__name__}: there is one for text encoders and models for conditional "
            "generation of text"
        )
