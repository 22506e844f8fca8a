"""What an ablation gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .census import Census
from .quality import Quality
from .settings import Settings
from .timing import Ratio
from .variants import Variant


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a workload for one variant: median seconds per call, and the ratios to the two stock models."""

    seconds: float
    to_half: Ratio
    to_fp32: Ratio


@dataclasses.dataclass(frozen=True)
class Row:
    """Everything measured of one variant; one that could not be measured has nothing but itself.

    Attributes:
        variant: which.
        census: of the workload that the ablation counts.
        timing: by workload.
        quality: over all sentences.
        peak_memory: on CUDA, bytes: the model's own and the most that a forward or generation added.
    """

    variant: Variant
    census: Census | None = None
    timing: Mapping[str, Timing] = dataclasses.field(default_factory=dict)
    quality: Quality | None = None
    peak_memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Ablation:
    """The result.

    Attributes:
        subject: the model's name.
        half_name: `"fp16"` or `"bf16"`.
        counted: the workload of the census.
        rows: one per variant, stock first.
        batch_size: sentences in the batch that was counted and timed.
        rounds: how many were timed, by workload.
        sentences: how many the results were taken over.
        sentences_from: where they are from.
        settings: what was asked for.
        environment: versions, device, threads, platform.
        failures: what should have been measured and could not be, a line each; empty when everything ran.
    """

    subject: str
    half_name: str
    counted: str
    rows: Sequence[Row]
    batch_size: int
    rounds: Mapping[str, int]
    sentences: int
    sentences_from: str
    settings: Settings
    environment: Mapping[str, str | int]
    failures: Sequence[str]

    @property
    def workloads(self) -> list[str]:
        """The workloads that were timed."""
        return list(self.rounds)
