"""How long an ablation will take, said before it begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .bench import Bench
from .cells import RESULTS, Cell
from .evaluation import batch_count
from .precision import Precision
from .settings import Settings
from .subject import Subject, attention_of
from .timing import calls_per_sample, stopwatch_for
from .variants import Variant, stock

# Two small shapes, batch size and length: what a call costs anyway, and what each token adds.
PROBES = ((1, 8), (4, 32))
# Rounds of a warm-up, beside those that are timed.
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a call: `fixed` and so much `per_token`, in the precision that was tried."""

    fixed: float
    per_token: float

    def of(self, tokens: int) -> float:
        """Seconds for so many tokens in all."""
        return self.fixed + self.per_token * tokens


class Estimate:
    """Tries a forward and a decoder step of two small shapes in each precision, and draws a line through them.

    What grows with the square of a length is left out, so it is low for very long inputs.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._costs: dict[tuple[str, str], Cost] = {}

    def seconds(self, cells: Iterable[tuple[Cell, int]], settings: Settings) -> float:
        """Seconds for cells, each with the number of its variants; about."""
        return sum(self._cell(cell, variants, settings) for cell, variants in cells)

    def _cell(self, cell: Cell, variants: int, settings: Settings) -> float:
        call = self._call(cell, settings)
        if cell.level == RESULTS:
            return call * variants * batch_count(self._subject, cell, settings.samples)
        if cell.level == "trainer":
            call *= batch_count(self._subject, cell, settings.samples) + 1  # the first batch also warms up
        calls = calls_per_sample(call)
        one_round = call * (calls + (calls > 1)) * variants
        timed = min(settings.rounds * one_round, max(settings.min_rounds * one_round, settings.time_budget))
        return WARM_UP * call * variants + timed

    def _call(self, cell: Cell, settings: Settings) -> float:
        source, target = cell.batch_size * cell.source_length, cell.batch_size * cell.target_length
        if not self._subject.seq2seq or cell.workload in ("block", "encoder") or cell.level == "micro":
            return self._cost("forward", cell.precision).of(source)
        forward = self._cost("forward", cell.precision).of(source + target)
        step = self._cost("decoder_step", cell.precision)
        if cell.workload == "decoder_step":
            return step.of(cell.batch_size)
        if cell.workload == "forward":
            return forward
        beams = settings.num_beams if cell.workload.startswith("beam") else 1
        generation = cell.target_length * step.of(cell.batch_size * beams)
        return forward + generation

    def _cost(self, workload: str, precision: str) -> Cost:
        if (workload, precision) not in self._costs:
            small, large = (self._probe(workload, Precision(precision), *shape) for shape in PROBES)
            tokens = [batch_size * (2 * length if workload == "forward" else 1) for batch_size, length in PROBES]
            per_token = max(0.0, (large - small) / (tokens[1] - tokens[0]))
            self._costs[workload, precision] = Cost(max(0.0, small - per_token * tokens[0]), per_token)
        return self._costs[workload, precision]

    def _probe(self, workload: str, precision: Precision, batch_size: int, length: int) -> float:
        attention = attention_of(self._subject.fp32)
        cell = Cell("stack", workload, precision.value, attention, False, batch_size, length, length, "full")
        variant = Variant(stock(precision), precision)
        watch = stopwatch_for(self._subject.device)
        with Bench(self._subject, cell) as bench, bench.entry(variant)() as prepare:
            watch(prepare())
            return watch(prepare())


def in_words(seconds: float) -> str:
    """A length of time, about: `"40 s"`, `"12 min"`, `"3.5 h"`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
