"""A cell's workload on every model it compares, and the switching between the variants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..engine import patched
from . import workloads
from .cells import Cell
from .census import Census, census
from .precision import Precision, tensor_cores_for_fp32
from .subject import Batch, Subject
from .timing import Entry, Prepare
from .variants import Variant
from .workloads import Workload

# Each variant of a compiled module is one more set of guards on the same code.
COMPILED_VARIANTS = 128


@contextlib.contextmanager
def model_of(subject: Subject, variant: Variant) -> Iterator[Any]:
    """The variant's model, patched and with its kind of products as long as the `with` block lasts."""
    model = subject.model(variant.precision)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tensor_cores_for_fp32(variant.precision is Precision.TF32))
        if variant.patches:
            stack.enter_context(patched(model, list(variant.patches)))
        yield model


class Bench:
    """One cell's workload, for any variant. Use it in a `with` block, which ends with everything as it was.

    Args:
        subject: the models.
        cell: of the levels `stack` and `generate`.
        num_beams: of the workloads with beams.
        seed: of the text.
    """

    def __init__(self, subject: Subject, cell: Cell, num_beams: int = 4, seed: int = 0) -> None:
        self._subject = subject
        self._cell = cell
        self._num_beams = num_beams
        self._seed = seed
        self._workloads: dict[Precision, Workload] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._subject.attention(self._cell.attention))
            if self._cell.compiled:
                stack.enter_context(_compiling())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batch(self) -> Batch:
        """The cell's inputs, the same for every variant; sentences come again where there are too few."""
        cell, subject = self._cell, self._subject
        if cell.text == "sentences" and subject.sentences:
            sentences = [subject.sentences[at % len(subject.sentences)] for at in range(cell.batch_size)]
            return subject.batch(sentences, cell.source_length, cell.target_length)
        return subject.full_batch(cell.batch_size, cell.source_length, cell.target_length, self._seed)

    def entry(self, variant: Variant) -> Entry:
        """The variant's workload as `timing.interleave` takes it."""

        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            workload = self._workload(variant.precision)
            with model_of(self._subject, variant):
                yield workload.prepare

        return entered

    def census(self, variant: Variant) -> Census:
        """The census of one call."""
        with self.entry(variant)() as prepare:
            return census(prepare(), self._workload(variant.precision).module)

    def _workload(self, precision: Precision) -> Workload:
        """The stock model's, so that every variant of it starts from the same state."""
        if precision not in self._workloads:
            model = self._subject.model(precision)
            workload = self._make(model)
            if self._cell.compiled:
                workload.module.compile(dynamic=False)
                self._stack.callback(setattr, workload.module, "_compiled_call_impl", None)
            self._workloads[precision] = workload
        return self._workloads[precision]

    def _make(self, model: Any) -> Workload:
        cell, batch = self._cell, self.batch()
        match cell.workload:
            case "block":
                return workloads.block(model, batch)
            case "encoder":
                return workloads.encoder_forward(model, batch)
            case "decoder_step":
                return workloads.decoder_step(model, batch)
            case "forward":
                return workloads.forward(model, batch)
        beams = self._num_beams if cell.workload.startswith("beam") else 1
        free = cell.workload.endswith("_free")
        return workloads.generate(model, batch, cell.target_length, num_beams=beams, free=free)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    config: Any = torch._dynamo.config
    # Renamed in torch 2.6 or so; the old name stays for a while.
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({name: COMPILED_VARIANTS}):
        try:
            yield
        finally:
            torch._dynamo.reset()
