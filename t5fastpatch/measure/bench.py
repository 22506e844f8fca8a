"""Two models in memory, and the switching between the variants of the one in half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..engine import patched
from .census import Census, census
from .subject import Batch, Subject
from .timing import Entry, Prepare
from .variants import STOCK_FP32, Variant
from .workloads import Workload, workloads_for


class Bench:
    """Makes each variant the one that runs, and gives its workloads on one batch.

    Args:
        subject: the models.
        batch: as for `workloads.forward`; all variants are timed and counted on it.
        new_tokens: of the workload `generate`.
    """

    def __init__(self, subject: Subject, batch: Batch, new_tokens: int) -> None:
        self._subject = subject
        self._fp32 = _by_name(workloads_for(subject.fp32, batch, new_tokens))
        self._half = _by_name(workloads_for(subject.half, batch, new_tokens))

    @property
    def workloads(self) -> list[str]:
        """The names of the workloads."""
        return list(self._half)

    @contextlib.contextmanager
    def model_of(self, variant: Variant) -> Iterator[Any]:
        """The variant's model, patched as long as the `with` block lasts."""
        if variant.patches:
            with patched(self._subject.half, list(variant.patches)):
                yield self._subject.half
        else:
            yield self._subject.fp32 if _is_fp32(variant) else self._subject.half

    def entry(self, variant: Variant, workload: str) -> Entry:
        """The variant's workload as `timing.interleave` takes it."""

        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            with self.model_of(variant):
                yield (self._fp32 if _is_fp32(variant) else self._half)[workload].prepare

        return entered

    def census(self, variant: Variant, workload: str) -> Census:
        """The census of one call."""
        with self.entry(variant, workload)() as prepare:
            return census(prepare())


def _is_fp32(variant: Variant) -> bool:
    return variant.name == STOCK_FP32


def _by_name(workloads: list[Workload]) -> Mapping[str, Workload]:
    return {workload.name: workload for workload in workloads}
