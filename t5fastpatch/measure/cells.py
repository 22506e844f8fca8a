"""The grid: which combinations of workload, precision and shape are measured, each of them a cell."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import NotFoundError
from .precision import Precision, precision_of
from .settings import Settings
from .subject import Subject, attention_of, attentions_of
from .workloads import first_block

RESULTS = "results"
LEVELS: Mapping[str, tuple[str, ...]] = {
    "micro": (),
    "stack": ("block", "encoder", "decoder_step", "forward"),
    "generate": ("greedy", "greedy_free", "beam", "beam_free"),
    "trainer": ("evaluate", "evaluate_smoothed", "evaluate_fixed", "evaluate_beam"),
    RESULTS: (RESULTS,),
}
"""The workloads of each level; those of `micro` are the single operations that a model has."""
_WITHOUT_DECODER = frozenset({"block", "encoder"})


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination; all variants of it are timed against each other.

    Attributes:
        level: a key of `LEVELS`.
        workload: one of the level's.
        precision: the one in which the patches are tried.
        attention: `"eager"` or `"sdpa"`.
        compiled: whether through `torch.compile`.
        batch_size: sentences.
        source_length: tokens.
        target_length: tokens; 0 where there is no target.
        text: `"sentences"` or `"full"`, as in `Settings`.
    """

    level: str
    workload: str
    precision: str
    attention: str
    compiled: bool
    batch_size: int
    source_length: int
    target_length: int
    text: str

    def __str__(self) -> str:
        shape = f"{self.batch_size} x {self.source_length}" + (f"/{self.target_length}" if self.target_length else "")
        options = [self.precision, self.attention, *(["compiled"] if self.compiled else [])]
        return f"{self.workload.replace('_', ' ')}, {shape}, {', '.join(options)}"


def key_of(cell: Cell, circumstances: Mapping[str, Any]) -> str:
    """A hash of a cell and of everything else that its figures depend on: 16 hexadecimal digits."""
    defining = json.dumps([dataclasses.asdict(cell), circumstances], sort_keys=True, default=str)
    return hashlib.sha256(defining.encode()).hexdigest()[:16]


def grid(settings: Settings, subject: Subject, micro: Sequence[str]) -> list[Cell]:
    """The cells, those of one precision and attention together.

    Args:
        settings: the axes.
        subject: leaves out what it cannot do: a decoder's workloads, the Trainer without a tokenizer, an attention
            implementation that the release has not, tf32 anywhere but on CUDA.
        micro: the names of the single operations.

    Raises:
        NotFoundError: a name is none of a workload, a level, a precision or an attention implementation.
    """
    precisions = [precision_of(name) for name in settings.precisions]
    on_cuda = subject.device.type == "cuda"
    cells = (
        _cell(settings, precision, attention, compiled, workload, batch_size, lengths)
        for precision in precisions
        if on_cuda or precision is not Precision.TF32
        for attention in _attentions(settings, subject)
        for compiled, workload, batch_size, lengths in itertools.product(
            settings.compiled, _workloads(settings, micro), settings.batch_sizes, settings.lengths
        )
        if _makes_sense(workload, compiled, subject)
    )
    return list(dict.fromkeys(cells))


def left_out(settings: Settings, cells: Sequence[Cell], micro: Sequence[str]) -> list[str]:
    """The workloads, precisions and attentions asked for that no cell has: the model, device or release cannot do them.

    Args:
        settings: what was asked for.
        cells: `grid` of it.
        micro: the names of the single operations.
    """
    asked = [*_workloads(settings, micro), *(precision_of(name).value for name in settings.precisions)]
    asked += [name for name in settings.attentions if name != "default"]
    there = {each for cell in cells for each in (cell.workload, cell.precision, cell.attention)}
    return [each for each in dict.fromkeys(asked) if each not in there]


def _cell(
    settings: Settings,
    precision: Precision,
    attention: str,
    compiled: bool,
    workload: str,
    batch_size: int,
    lengths: tuple[int, int],
) -> Cell:
    level = level_of(workload)
    if level == RESULTS:  # one set of results for all shapes
        batch_size, lengths = settings.batch_sizes[0], settings.lengths[0]
    source, target = lengths
    without_target = workload in _WITHOUT_DECODER or level == "micro"
    text = "sentences" if level in (RESULTS, "trainer") else settings.text
    return Cell(
        level,
        workload,
        precision.value,
        attention,
        compiled,
        batch_size,
        source,
        0 if without_target else target,
        text,
    )


def level_of(workload: str) -> str:
    """The level of a workload; whatever is not known here is an operation, and `micro`."""
    return next((level for level, names in LEVELS.items() if workload in names), "micro")


def _workloads(settings: Settings, micro: Sequence[str]) -> Iterator[str]:
    levels = {**LEVELS, "micro": tuple(micro)}
    for name in settings.workloads:
        if name in levels:
            yield from levels[name]
        elif any(name in workloads for workloads in levels.values()):
            yield name
        else:
            known = [*levels, *(each for workloads in levels.values() for each in workloads)]
            raise NotFoundError(f"no workload or level is called {name!r}: there are {', '.join(dict.fromkeys(known))}")


def _attentions(settings: Settings, subject: Subject) -> list[str]:
    available = attentions_of(subject.fp32)
    wanted = [attention_of(subject.fp32) if name == "default" else name for name in settings.attentions]
    unknown = [name for name in wanted if name not in ("eager", "sdpa", *available)]
    if unknown:
        raise NotFoundError(f"no attention implementation is called {unknown[0]!r}: there are default, eager, sdpa")
    chosen = [name for name in dict.fromkeys(wanted) if name in available]
    if not chosen:
        raise NotFoundError(f"this model's attention is {', '.join(available)} here, not {', '.join(wanted)}")
    return chosen


def _makes_sense(workload: str, compiled: bool, subject: Subject) -> bool:
    level = level_of(workload)
    if compiled and level != "stack":
        return False
    if level == "trainer":
        return subject.seq2seq and subject.tokenizer is not None
    if level == "generate" or workload == "decoder_step":
        return subject.seq2seq
    if workload == "block":
        return first_block(subject.fp32) is not None
    return not (workload == "encoder" and not subject.seq2seq)  # an encoder's forward is its encoder's
