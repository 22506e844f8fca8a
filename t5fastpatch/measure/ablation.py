"""The ablation: what each patch buys, and what it changes, cell by cell."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..engine import status
from ..errors import NotT5Error, T5FastPatchError
from ..extra import require
from ..headroom.steady import steady_weights
from ..loading import described
from ..registry import list_patches, select
from ..report import Report
from ..reports.schema import SCHEMA, CellRecord, Result
from .attribution import Attribution, attribution, coalitions
from .cells import RESULTS, Cell, grid, key_of, left_out
from .environment import environment, fixed_environment
from .estimate import Estimate, in_words
from .evaluation import Evaluation, batch_count
from .levels import level_for
from .micro import micro_ops
from .precision import Precision
from .record import cell_record
from .settings import Settings
from .store import Store
from .subject import subject_for
from .timing import Limits, Samples, interleave, stopwatch_for
from .trial import no_trial, trial_of
from .variants import Plan, Variant, plan

NOTHING_TO_PATCH = "nothing to patch: the model holds no module of the T5 family"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Whom to tell how far the work is.

    Attributes:
        say: is given a line.
        start: is given the description of a cell and its number of steps, and gives what to call after each step.
    """

    say: Callable[[str], object] = lambda line: None
    start: Callable[[str, int], Callable[[], None]] = lambda description, steps: lambda: None


def run(
    settings: Settings,
    progress: Progress = Progress(),
    store: Store | None = None,
    wanted: Callable[[Cell], bool] = lambda cell: True,
) -> Result:
    """Runs an ablation: every cell's times, counts and results, all variants of a cell against each other.

    Args:
        settings: what to run.
        progress: told how long it will take, and how far it is.
        store: gets each cell when it is finished; those that it has already are not measured again.
        wanted: asked before each cell is measured; the result goes without those that it refuses.

    Raises:
        T5FastPatchError: a setting names something that is not there, a patch is on already, or a library is missing:
            sacrebleu for results and the Trainer, accelerate for the Trainer.
    """
    with torch.no_grad(), _threads(settings), steady_weights():
        return _Run(settings, progress, store, wanted).result()


class _Run:
    def __init__(
        self, settings: Settings, progress: Progress, store: Store | None, wanted: Callable[[Cell], bool]
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._store = store
        self._wanted = wanted
        self._patches = list_patches() if settings.patches is None else list(select(settings.patches).patches)
        self._subject = subject_for(settings.model, settings.shape, settings.device, settings.seed)
        self._notes: list[str] = []
        self._failures: list[str] = []
        self._reports: dict[Precision, Report | None] = {}
        self._plans: dict[tuple[Precision, str], Plan] = {}
        micro = self._micro()
        self._cells = grid(settings, self._subject, micro)
        if missing := left_out(settings, self._cells, micro):
            self._notes.append(f"not for this model, device or release, and left out: {', '.join(missing)}")
        for cell in self._cells:
            self._plan(cell)
        for level, library in ((RESULTS, "sacrebleu"), ("trainer", "sacrebleu"), ("trainer", "accelerate")):
            if any(cell.level == level for cell in self._cells):
                require(library)
        if not self._cells:
            raise T5FastPatchError("none of these workloads makes sense for this model, device and release")

    def result(self) -> Result:
        found: Result = {
            "schema": SCHEMA,
            "subject": {
                "name": self._subject.name,
                "parameters": self._subject.parameters,
                "seq2seq": self._subject.seq2seq,
                "sentences": self._subject.sentences_from,
            },
            "settings": dataclasses.asdict(self._settings),
            "environment": environment(self._subject.device),
            "notes": self._notes,
            "failures": self._failures,
            "cells": [],
        }
        circumstances = self._circumstances()
        keys = {cell: key_of(cell, circumstances) for cell in self._cells}
        left = [cell for cell in self._cells if not self._finished(keys[cell])]
        self._announce(left)
        if left:
            self._append_header(found)
        for cell in self._cells:
            record = self._finished(keys[cell])
            if record is None and self._wanted(cell):
                record = self._try(cell, keys[cell])
            if record is not None:
                found["cells"].append(record)
        if self._failures:  # which the last header has all
            self._append_header(found)
        return found

    def _append_header(self, found: Result) -> None:
        if self._store:
            self._store.append({name: value for name, value in found.items() if name != "cells"})

    def _micro(self) -> list[str]:
        """The operations that can be run alone."""
        if self._status(Precision.FP32) is None:
            return []
        ops, reasons = micro_ops(self._subject.fp32, self._patches)
        if "micro" in self._settings.workloads:
            self._notes += [f"{name} is not measured alone: {why}" for name, why in reasons.items()]
        return [op.name for op in ops]

    def _status(self, precision: Precision) -> Report | None:
        if precision not in self._reports:
            self._reports[precision] = None
            with contextlib.suppress(NotT5Error):
                self._reports[precision] = status(self._subject.model(precision))
        return self._reports[precision]

    def _plan(self, cell: Cell) -> Plan:
        """The variants of a cell; which patches change anything also depends on the attention."""
        kind = Precision(cell.precision), cell.attention
        if kind not in self._plans:
            self._plans[kind] = made = self._planned(*kind)
            refused = [f"{each.name}: {each.why}" for each in made.variants if each.refused]
            self._failures += [each for each in refused if each not in self._failures]
            for each in made.measured:
                if each.why:
                    self._note(f"{each.name}: {each.why}.")
        return self._plans[kind]

    def _planned(self, precision: Precision, attention: str) -> Plan:
        report = self._status(precision)
        if report is None:
            self._note(NOTHING_TO_PATCH)
        return plan(
            report,
            self._patches,
            precision,
            no_trial if report is None else trial_of(self._subject, precision, attention),
            tf32=self._subject.device.type == "cuda",
            shapley=self._settings.shapley,
            seed=self._settings.seed,
        )

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)

    def _circumstances(self) -> dict[str, Any]:
        """What a cell's figures depend on beside the cell."""
        settings = self._settings
        how_long = ("rounds", "min_rounds", "width", "time_budget")
        names = ("patches", "shapley", "samples", "counts", "num_beams", "seed", *how_long)
        return {
            **{name: getattr(settings, name) for name in names},
            # By name: the settings say `None` for all that are registered.
            "patches": [patch.name for patch in self._patches],
            "subject": self._subject.fingerprint(),
            "environment": fixed_environment(self._subject.device),
        }

    def _finished(self, key: str) -> CellRecord | None:
        return self._store.finished(key) if self._store else None

    def _announce(self, left: Sequence[Cell]) -> None:
        done = len(self._cells) - len(left)
        if left:
            counts = [(cell, len(self._plan(cell).measured)) for cell in left]
            finished = f", {done} finished already" if done else ""
            self._progress.say(f"{len(self._cells)} cells{finished}: {self._about(counts)}")
        else:
            self._progress.say(f"{done} cells, all finished already")

    def _about(self, counts: Sequence[tuple[Cell, int]]) -> str:
        try:
            return f"up to about {in_words(Estimate(self._subject).seconds(counts, self._settings))}"
        except Exception as error:  # as in a cell, which will say so
            return f"how long they take is not known: {described(error)}"

    def _try(self, cell: Cell, key: str) -> CellRecord | None:
        """Measures a cell; one that cannot be run is a failure, and the others go on."""
        self._subject.keep({Precision(cell.precision)})
        try:
            record = self._measure(cell, key)
        except Exception as error:  # upstream's, PyTorch's or that of a patch of someone else's
            self._failures.append(f"{cell}: {described(error)}")
            return None
        if self._store:
            self._store.append(record)
        return record

    def _measure(self, cell: Cell, key: str) -> CellRecord:
        made = self._plan(cell)
        settings = self._settings
        if cell.level == RESULTS:
            return cell_record(key, cell, made, _shown(made), None, None, self._results(cell, made), settings.seed)
        with level_for(self._subject, cell, settings, self._patches) as level:
            variants = level.variants(made)
            samples = interleave(
                {variant.name: level.entry(variant) for variant in variants},
                stopwatch_for(self._subject.device),
                made.baseline,
                Limits(settings.rounds, settings.min_rounds, settings.width, settings.time_budget),
                seed=settings.seed,
                advance=self._progress.start(str(cell), settings.rounds * len(variants)),
            )
            measured = level.more(variants)
        rows = variants if cell.level == "micro" else made.variants
        return cell_record(
            key, cell, made, list(rows), samples, _shares(made, samples, settings.seed), measured, settings.seed
        )

    def _results(self, cell: Cell, made: Plan) -> dict[str, dict[str, Any]]:
        variants = [variant for variant in made.measured if variant.shown]
        with self._subject.attention(cell.attention):
            evaluation = Evaluation(self._subject, cell, variants)
            steps = batch_count(self._subject, cell, self._settings.samples) * len(variants)
            qualities = evaluation.run(self._settings.samples, self._progress.start(str(cell), steps))
            return {
                variant.name: {
                    "quality": dataclasses.asdict(qualities[variant.name]),
                    "peak_memory": evaluation.peak_memory(variant),
                }
                for variant in variants
            }


def _shown(made: Plan) -> list[Variant]:
    return [variant for variant in made.variants if variant.shown]


def _shares(made: Plan, samples: Samples, seed: int) -> Attribution | None:
    """The shares, where every set of patches that they need was timed."""
    if not made.orders:
        return None
    names = {coalition: made.of(coalition).name for coalition in coalitions(made.orders)}
    if any(name not in samples.seconds for name in names.values()):
        return None
    seconds: Mapping[frozenset[str], Sequence[float]] = {
        coalition: samples.seconds[name] for coalition, name in names.items()
    }
    return attribution(seconds, made.orders, seed)


@contextlib.contextmanager
def _threads(settings: Settings) -> Iterator[None]:
    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    if settings.threads is not None and not 1 <= settings.threads <= cores:
        raise T5FastPatchError(f"there are {cores} cores here: name 1 to {cores} threads, not {settings.threads}")
    # The embedded model's products are too small to share out: more threads would mostly wait for each other.
    one = settings.model is None and settings.shape is None
    torch.set_num_threads(settings.threads or (1 if one else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
