"""Which variants an ablation compares: the stock models, each patch alone, all of them, all but one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..errors import T5FastPatchError
from ..registry import Patch, State
from ..report import Report

STOCK_FP32 = "stock fp32"
ALL = "all"
_USABLE = (State.APPLIES, State.UNSAFE)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the ablation.

    Attributes:
        name: a patch's name, `"all"`, `"all but <patch>"`, `"stock fp32"` or that of the stock model in half precision.
        patches: the names that are on; none for the stock models, and for a row that only says why.
        state: what `status` says of a single patch; `"stock"` or `"set"` for the others.
        same_as: another name under which the row would come again.
        measured: whether there is anything to measure; if not, `why` says why.
    """

    name: str
    patches: tuple[str, ...] = ()
    state: str = "set"
    same_as: str = ""
    measured: bool = True
    why: str = ""

    @property
    def label(self) -> str:
        """The name, and what else the row stands for."""
        return f"{self.name} (= {self.same_as})" if self.same_as else self.name

    @property
    def refused(self) -> bool:
        """Whether the patch should have applied and could not."""
        return self.state in (State.REFUSED.value, State.CONFLICT.value)


def stock_half(half_name: str) -> str:
    """The name of the stock model in half precision; `half_name` is `"fp16"` or `"bf16"`."""
    return f"stock {half_name}"


def plan(report: Report, patches: Iterable[Patch], half_name: str) -> list[Variant]:
    """The variants for one model, stock first.

    Args:
        report: `status` of the stock model in half precision.
        patches: those to be ablated.
        half_name: `"fp16"` or `"bf16"`.

    Raises:
        T5FastPatchError: a patch is on already, so that nothing is stock here.
    """
    patches = list(patches)
    on = [patch.name for patch in patches if report[patch.name].state is State.ON]
    if on:
        raise T5FastPatchError(f"{', '.join(on)} is on already, so nothing here is stock: unset T5FASTPATCH")
    usable = [patch for patch in patches if report[patch.name].state in _USABLE]
    together = _compatible(usable)
    return [
        Variant(STOCK_FP32, state="stock"),
        Variant(stock_half(half_name), state="stock"),
        *_alone(report, patches, usable, together),
        *_sets(usable, together),
    ]


def _alone(report: Report, patches: Sequence[Patch], usable: Sequence[Patch], together: Sequence[str]) -> list[Variant]:
    rows = []
    for patch in patches:
        found = report[patch.name]
        if patch in usable:
            rows.append(Variant(patch.name, (patch.name,), found.state.value, _other_name(patch.name, together)))
        else:
            rows.append(Variant(patch.name, state=found.state.value, measured=False, why=found.why))
    return rows


def _other_name(name: str, together: Sequence[str]) -> str:
    if list(together) == [name]:
        return ALL
    if len(together) == 2 and name in together:
        return f"all but {next(other for other in together if other != name)}"
    return ""


def _sets(usable: Sequence[Patch], together: Sequence[str]) -> list[Variant]:
    if len(together) < 2:
        return []
    left_out = [patch.name for patch in usable if patch.name not in together]
    why = f"without {', '.join(left_out)}, in conflict with another" if left_out else ""
    rows = [Variant(ALL, tuple(together), why=why)]
    if len(together) > 2:
        rows += [Variant(f"all but {name}", tuple(each for each in together if each != name)) for name in together]
    return rows


def _compatible(patches: Sequence[Patch]) -> list[str]:
    """As many of the patches, from the first on, as can be on one model together."""
    kept: list[Patch] = []
    for patch in patches:
        if not any(patch.name in other.conflicts or other.name in patch.conflicts for other in kept):
            kept.append(patch)
    return [patch.name for patch in kept]
