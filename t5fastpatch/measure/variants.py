"""Which variants an ablation compares: the stock models, each patch alone, all, all but one, and further sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import T5FastPatchError
from ..patch import Patch, State
from ..report import Report
from .attribution import Coalition, Order, coalitions, orders_for
from .precision import Precision

ALL = "all"
_USABLE = (State.APPLIES, State.UNSAFE)
Trial = Callable[[Sequence[str]], str]
"""Puts patches on together and runs the model: why that fails, or nothing."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the ablation.

    Attributes:
        name: a patch's name, `"all"`, `"all but <patch>"`, patches with `" + "` between them, or that of a stock model.
        precision: of the model that it runs on.
        patches: the names that are on; none for the stock models, and for a row that only says why.
        state: what `status` says of a single patch; `"stock"` or `"set"` for the others.
        same_as: another name under which the row would come again.
        measured: whether there is anything to measure; if not, `why` says why.
        shown: whether the tables have the row; the others are timed for the sake of fair shares.
    """

    name: str
    precision: Precision
    patches: tuple[str, ...] = ()
    state: str = "set"
    same_as: str = ""
    measured: bool = True
    why: str = ""
    shown: bool = True

    @property
    def label(self) -> str:
        """The name, and what else the row stands for."""
        return f"{self.name} (= {self.same_as})" if self.same_as else self.name

    @property
    def refused(self) -> bool:
        """Whether the patch should have applied and could not."""
        return self.state in (State.REFUSED.value, State.CONFLICT.value)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The variants of one precision.

    Attributes:
        variants: stock first; the reference, stock in fp32, before all.
        baseline: the name of the stock model in this precision, whose time the patches save.
        orders: of the patches that go together, for their fair shares; empty where these are not to be had.
    """

    variants: Sequence[Variant]
    baseline: str
    orders: Sequence[Order] = ()

    @property
    def measured(self) -> list[Variant]:
        """Those with something to measure."""
        return [variant for variant in self.variants if variant.measured]

    def of(self, coalition: Coalition) -> Variant:
        """The variant in which these patches are on and no others."""
        found = (each for each in self.measured if frozenset(each.patches) == coalition)
        return next(each for each in found if coalition or each.name == self.baseline)


def no_trial(names: Sequence[str]) -> str:
    """The trial that finds no fault."""
    return ""


def stock(precision: Precision) -> str:
    """The name of the stock model in a precision."""
    return f"stock {precision}"


STOCK_FP32 = stock(Precision.FP32)


def plan(
    report: Report | None,
    patches: Iterable[Patch],
    precision: Precision,
    trial: Trial = no_trial,
    *,
    tf32: bool = False,
    shapley: bool = False,
    seed: int = 0,
) -> Plan:
    """The variants for one model.

    Args:
        report: `status` of the stock model in this precision; `None` if it holds nothing of the T5 family.
        patches: those to be ablated.
        precision: the one that the patches are tried in.
        trial: which patches, and which sets of them, can run at all.
        tf32: whether stock in tf32 is compared too.
        shapley: whether the sets that fair shares need are added where they are no rows already.
        seed: of the orders of many patches.

    Raises:
        T5FastPatchError: a patch is on already, so that nothing is stock here.
    """
    stocks = dict.fromkeys([Precision.FP32, *([Precision.TF32] if tf32 else []), precision])
    rows = [Variant(stock(each), each, state="stock") for each in stocks]
    if report is None:
        return Plan(rows, stock(precision))
    check_stock(report)
    patches = list(patches)
    applicable = [patch.name for patch in patches if report[patch.name].state in _USABLE]
    failed = {name: why for name in applicable if (why := trial([name]))}
    usable = [patch for patch in patches if patch.name in applicable and patch.name not in failed]
    together = _compatible(usable, trial)
    rows += _alone(report, patches, precision, usable, together, failed) + _sets(usable, together, precision)
    orders = orders_for(together, seed) if together else []
    rows_are_enough = len(together) <= 3
    if shapley and not rows_are_enough:
        rows += _further(rows, orders, precision)
    return Plan(rows, stock(precision), orders if shapley or rows_are_enough else [])


def check_stock(report: Report) -> None:
    """Raises `T5FastPatchError` where a patch is on, be it one that is not asked for."""
    on = [row.patch for row in report.rows if row.state is State.ON]
    if on:
        raise T5FastPatchError(f"{', '.join(on)} is on already, so nothing here is stock: unset T5FASTPATCH")


def _alone(
    report: Report,
    patches: Sequence[Patch],
    precision: Precision,
    usable: Sequence[Patch],
    together: Sequence[str],
    failed: Mapping[str, str],
) -> list[Variant]:
    rows = []
    for patch in patches:
        found = report[patch.name]
        if patch in usable:
            same_as = _other_name(patch.name, together)
            rows.append(Variant(patch.name, precision, (patch.name,), found.state.value, same_as))
        elif patch.name in failed:
            why = f"a forward with it fails: {failed[patch.name]}"
            rows.append(Variant(patch.name, precision, state=State.REFUSED.value, measured=False, why=why))
        else:
            rows.append(Variant(patch.name, precision, state=found.state.value, measured=False, why=found.why))
    return rows


def _other_name(name: str, together: Sequence[str]) -> str:
    if list(together) == [name]:
        return ALL
    if len(together) == 2 and name in together:
        return f"all but {next(other for other in together if other != name)}"
    return ""


def _sets(usable: Sequence[Patch], together: Sequence[str], precision: Precision) -> list[Variant]:
    if len(together) < 2:
        return []
    left_out = [patch.name for patch in usable if patch.name not in together]
    why = f"without {', '.join(left_out)}, in conflict with another" if left_out else ""
    rows = [Variant(ALL, precision, tuple(together), why=why)]
    if len(together) > 2:
        rows += [
            Variant(f"all but {name}", precision, tuple(each for each in together if each != name)) for name in together
        ]
    return rows


def _further(rows: Sequence[Variant], orders: Sequence[Order], precision: Precision) -> list[Variant]:
    """The coalitions that are no rows yet, each in the order of the first order."""
    there = {frozenset(row.patches) for row in rows}
    sets = [tuple(each for each in orders[0] if each in coalition) for coalition in coalitions(orders)]
    return [Variant(" + ".join(each), precision, each, shown=False) for each in sets if frozenset(each) not in there]


def _compatible(patches: Sequence[Patch], trial: Trial) -> list[str]:
    """As many of the patches, from the first on, as can be on one model together."""
    kept: list[Patch] = []
    for patch in patches:
        conflict = any(patch.name in other.conflicts or other.name in patch.conflicts for other in kept)
        if not conflict and not (kept and trial([each.name for each in (*kept, patch)])):
            kept.append(patch)
    return [patch.name for patch in kept]
