"""A small forward with patches on: whether it runs at all, and whether anything runs that does not run in stock."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from ..engine import patched
from ..errors import UnprovenError
from ..loading import described
from .census import Census, census
from .precision import Precision
from .subject import Subject

# Lengths of source and target at which patches are tried.
TRIED = (8, 4)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial showed.

    Attributes:
        error: why the forward fails; empty if it runs.
        unproven: the proof of headroom without which a patch cannot be on; empty if none is missing.
        idle: where exactly the same operations run as in stock; empty if others run.
    """

    error: str = ""
    unproven: str = ""
    idle: str = ""

    @property
    def runs(self) -> bool:
        """Whether the patches can be measured."""
        return not (self.error or self.unproven)

    @property
    def has_effect(self) -> bool:
        """Whether they are worth measuring, here or beside a patch that gives the proof."""
        return not (self.error or self.idle)


Trial = Callable[[Sequence[str]], Outcome]
"""Puts the patches of these names on together and runs the model."""


def no_trial(names: Sequence[str]) -> Outcome:
    """The trial that finds no fault."""
    return Outcome()


def trial_of(subject: Subject, precision: Precision, attention: str) -> Trial:
    """The trial on a subject's model."""
    model, batch = subject.model(precision), subject.full_batch(1, *TRIED)

    def forward(names: Sequence[str]) -> Census:
        with subject.attention(attention), patched(model, names) if names else contextlib.nullcontext():
            # Twice, for what is kept from one call to the next.
            return census(lambda: [model(**batch) for _ in range(2)])

    try:
        stock = forward(())
    except Exception:  # no patch's fault, and every cell says so
        return no_trial

    def trial(names: Sequence[str]) -> Outcome:
        try:
            found = forward(names)
        except UnprovenError as error:
            return Outcome(unproven=str(error))
        except Exception as error:  # whatever a patch raises
            return Outcome(described(error))
        same = (found.operations, found.syncs) == (stock.operations, stock.syncs)
        return Outcome(idle=f"the same operations run as in stock {precision} with {attention} attention" * same)

    return trial
