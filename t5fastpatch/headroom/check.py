"""check: how far a model stays from fp16's largest number, and what keeps it there."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import NotT5Error, T5FastPatchError, WrongTypeError
from ..findings import transformers_version
from .beside import beside
from .data import observe
from .decision import Decision, decide
from .places import FP16_MAX, Headroom, Magnitude
from .stacks import stacks_of


def check(model: nn.Module, batches: Iterable[Any] | None = None, *, bound: bool = True) -> Check:
    """Checks the headroom of a model in fp16, from its weights and on data. Changes nothing.

    Args:
        model: a model of the T5 family or one that contains it, in any dtype, patched or not.
        batches: what to run it on, as for `observe`; nothing is run without it.
        bound: whether to bound its magnitudes from the weights.

    Returns:
        What is known of every stack, the scale it needs, and which proof that rests on; `print` gives a table.

    Raises:
        WrongTypeError: the model is no module.
        NotT5Error: it has no stack of the T5 family.
        T5FastPatchError: nothing is to be done (no batches and no bound), or as `observe`.
    """
    if not isinstance(model, nn.Module):
        raise WrongTypeError(f"a model is a torch.nn.Module, not a {type(model).__name__}: give the T5 that it holds")
    if batches is None and not bound:
        raise T5FastPatchError("nothing to check: give batches, or leave the bound from the weights on")
    stacks = stacks_of(model)
    if not stacks:
        raise NotT5Error(f"this {type(model).__name__} has no stack of the T5 family")
    from_weights = _bound(model, stacks) if bound else None
    from_data = observe(model, batches, stacks) if batches is not None else None
    if from_weights is not None and from_data is not None:
        from_weights = beside(from_weights, from_data)
    headrooms = [each for each in (from_weights, from_data) if each is not None]
    families = ", ".join(dict.fromkeys(stack.family for stack in stacks))
    return Check(
        f"{type(model).__name__} ({families})",
        from_weights,
        from_data,
        {stack.name: decide(stack, *headrooms) for stack in stacks},
    )


@dataclasses.dataclass(frozen=True)
class Check:
    """What is known of a model's headroom. `print(report)` gives a table.

    Attributes:
        subject: the model's class and families.
        bound: magnitudes that no input exceeds, or `None`.
        observed: the largest magnitudes on the batches, or `None`.
        decisions: by the stack's name, the scale it needs and what that rests on.
    """

    subject: str
    bound: Headroom | None
    observed: Headroom | None
    decisions: Mapping[str, Decision]

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks' names, encoders first."""
        return tuple(self.decisions)

    @property
    def headrooms(self) -> list[Headroom]:
        """Those of the two that there are, the bound first."""
        return [each for each in (self.bound, self.observed) if each is not None]

    def at_risk(self, stack: str) -> dict[str, list[Magnitude]]:
        """By source, the magnitudes that stock fp16 cannot hold."""
        return {
            headroom.source: [each for each in headroom.of(stack) if not each.value <= FP16_MAX]
            for headroom in self.headrooms
        }

    def __str__(self) -> str:
        from .table import text_of

        return text_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers; a number that is infinite is the string "inf"."""
        return {
            "subject": self.subject,
            "transformers": transformers_version(),
            "fp16_max": FP16_MAX,
            "stacks": [self._stack(name) for name in self.stacks],
        }

    def to_json(self, **options: Any) -> str:
        """`to_dict()` as JSON; `options` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    def _stack(self, name: str) -> dict[str, Any]:
        decision = self.decisions[name]
        sources = {
            each.source: {
                "assumes": list(each.assumes.get(name, ())),
                "unproven": each.unproven.get(name, ""),
                "magnitudes": [_plain(magnitude, decision) for magnitude in each.of(name)],
            }
            for each in self.headrooms
        }
        return {"name": name, "decision": dataclasses.asdict(decision), **sources}


def _plain(magnitude: Magnitude, decision: Decision) -> dict[str, Any]:
    after = None if decision.scaling is None else _number(magnitude.under(decision.scaling))
    return {
        "layer": magnitude.layer,
        "place": magnitude.place.value,
        "fixed": magnitude.fixed,
        "value": _number(magnitude.value),
        "after": after,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _bound(model: nn.Module, stacks: Any) -> Headroom:
    from .weights import bound

    found: Headroom = bound(model, stacks)
    return found
