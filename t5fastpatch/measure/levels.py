"""How the variants of a cell are run, level by level."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..patch import Patch
from .bench import Bench
from .cells import Cell
from .census import Census, census
from .micro import MicroOp, micro_ops
from .precision import Precision, tensor_cores_for_fp32
from .profiling.profiler import profile_variants
from .settings import Settings
from .subject import Subject
from .timing import Entry, Prepare
from .trainer import EvaluationSettings, TrainerEvaluation, TrainerLevel
from .variants import ALL, Plan, Variant

LABEL_SMOOTHING = 0.1
PROFILED_CALLS = 5
FULL_EVAL = {Precision.FP16: "fp16", Precision.BF16: "bf16"}


class Level(contextlib.ExitStack, abc.ABC):
    """The variants of one cell, ready to be timed; as a context it ends with everything as it was."""

    @abc.abstractmethod
    def variants(self, plan: Plan) -> list[Variant]:
        """Those that the cell compares."""

    @abc.abstractmethod
    def entry(self, variant: Variant) -> Entry:
        """The variant as `timing.interleave` takes it."""

    @abc.abstractmethod
    def more(self, variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
        """What else there is to say of each variant, by name, asked for after the timing: fields of its row."""


def level_for(subject: Subject, cell: Cell, settings: Settings, patches: Sequence[Patch]) -> Level:
    """The level of a cell."""
    if cell.level == "micro":
        return Micro(subject, cell, patches, settings.seed)
    if cell.level == "trainer":
        return Trainer(subject, cell, settings)
    return Model(subject, cell, settings)


class Model(Level):
    """Levels `stack` and `generate`: calls of the model itself."""

    def __init__(self, subject: Subject, cell: Cell, settings: Settings) -> None:
        super().__init__()
        self._subject = subject
        self._cell = cell
        self._counts = settings.counts
        self._bench = self.enter_context(Bench(subject, cell, settings.num_beams, settings.seed))

    def variants(self, plan: Plan) -> list[Variant]:
        return plan.measured

    def entry(self, variant: Variant) -> Entry:
        return self._bench.entry(variant)

    def more(self, variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
        # A generation is the same decoder step many times, and a compiled region runs eagerly under a census.
        if not self._counts or self._cell.level != "stack" or self._cell.compiled:
            return {}
        found = {each.name: {"census": _totals(self._bench.census(each))} for each in variants if each.shown}
        ends = [each for each in variants if each.state == "stock" or ALL in (each.name, each.same_as)]
        entries = {each.name: self.entry(each) for each in ends}
        for name, profile in profile_variants(entries, self._subject.device, calls=PROFILED_CALLS).items():
            found[name]["categories"] = profile.by_category()
        return found


def _totals(found: Census) -> dict[str, Any]:
    """Without the modules, which would be most of the file; `t5fastpatch profile` has them."""
    return {name: value for name, value in found.to_dict().items() if name != "by_module"}


class Micro(Level):
    """Level `micro`: one operation alone, in the stock models and as its patch has it."""

    def __init__(self, subject: Subject, cell: Cell, patches: Sequence[Patch], seed: int) -> None:
        super().__init__()
        self._subject = subject
        self._cell = cell
        self._patches = patches
        self._seed = seed
        self._ops: dict[Precision, MicroOp] = {}
        self.enter_context(subject.attention(cell.attention))

    def variants(self, plan: Plan) -> list[Variant]:
        return [variant for variant in plan.measured if variant.patches in ((), (self._cell.workload,))]

    def entry(self, variant: Variant) -> Entry:
        op = self._op(variant.precision)
        call = op.after if variant.patches and op.after else op.before
        input = op.make_input(self._cell.batch_size, self._cell.source_length, self._seed)

        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            yield lambda: lambda: call(input)

        return entered

    def _op(self, precision: Precision) -> MicroOp:
        if precision not in self._ops:
            ops, _ = micro_ops(self._subject.model(precision), self._patches)
            self._ops[precision] = next(op for op in ops if op.name == self._cell.workload)
        return self._ops[precision]

    def more(self, variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
        found = {}
        for variant in variants:
            with self.entry(variant)() as prepare:
                found[variant.name] = {"census": _totals(census(prepare()))}
        return found


class Trainer(Level):
    """Level `trainer`: `Seq2SeqTrainer.evaluate`, in half precision through `fp16_full_eval` or `bf16_full_eval`."""

    def __init__(self, subject: Subject, cell: Cell, settings: Settings) -> None:
        super().__init__()
        self._subject = subject
        self._cell = cell
        self._samples = settings.samples
        self._num_beams = settings.num_beams
        self._evaluations: defaultdict[str, list[TrainerEvaluation]] = defaultdict(list)
        self.enter_context(subject.attention(cell.attention))

    def variants(self, plan: Plan) -> list[Variant]:
        return [variant for variant in plan.measured if variant.shown]

    def entry(self, variant: Variant) -> Entry:
        kind = self._cell.workload.partition("_")[2]
        settings = EvaluationSettings(
            self._cell.batch_size,
            self._cell.source_length,
            self._cell.target_length,
            num_beams=self._num_beams if kind == "beam" else 1,
            label_smoothing=LABEL_SMOOTHING if kind == "smoothed" else 0.0,
            fixed_length=kind == "fixed",
            full_eval=FULL_EVAL.get(variant.precision),
        )
        # What `full_eval` casts is the fp32 model; one loaded in half precision stays as it is.
        model = self._subject.model(Precision.FP32 if variant.precision in FULL_EVAL else variant.precision)
        level = TrainerLevel(
            lambda: copy.deepcopy(model),
            self._subject.tokenizer,
            self._subject.sentences[: self._samples],
            settings,
            self._subject.device,
        )
        entry = level.entry(variant.patches, self._evaluations[variant.name].append)

        @contextlib.contextmanager
        def entered() -> Iterator[Prepare]:
            with tensor_cores_for_fp32(variant.precision is Precision.TF32), entry() as prepare:
                yield prepare

        return entered

    def more(self, variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
        found = {each.name: _typical(self._evaluations[each.name]) for each in variants}
        return {name: {"evaluation": dataclasses.asdict(evaluation)} for name, evaluation in found.items()}


def _typical(evaluations: Sequence[TrainerEvaluation]) -> TrainerEvaluation:
    """The last of a variant's evaluations with the median of all their times; only these and the memory differ."""
    return dataclasses.replace(
        evaluations[-1],
        runtime=statistics.median(each.runtime for each in evaluations),
        samples_per_second=statistics.median(each.samples_per_second for each in evaluations),
    )
