"""Which variants an ablation compares: the stock models, each patch alone, all, all but one, and further sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ..errors import T5FastPatchError
from ..patch import Patch, StackPatch, State
from ..registry import list_patches, rival
from ..report import Report, Row
from .attribution import Coalition, Order, coalitions, orders_for
from .precision import Precision
from .trial import Outcome, Trial, no_trial

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the ablation.

    Attributes:
        name: a patch's name, `"all"`, `"all but <patch>"`, patches with `" + "` between them, or that of a stock model.
        precision: of the model that it runs on.
        patches: the names that are on; none for the stock models, and for a row that only says why.
        state: what `status` says of a single patch; `"stock"` or `"set"` for the others.
        same_as: another name under which the row would come again.
        measured: whether there is anything to measure.
        why: why not; or what else must be known of a row that is measured.
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
        dependent: those of them that cannot be on alone, for want of a proof of headroom that another one gives.
    """

    variants: Sequence[Variant]
    baseline: str
    orders: Sequence[Order] = ()
    dependent: Coalition = frozenset()

    @property
    def measured(self) -> list[Variant]:
        """Those with something to measure."""
        return [variant for variant in self.variants if variant.measured]

    def of(self, coalition: Coalition) -> Variant:
        """The variant in which these patches are on and no others; without the dependent ones where they cannot be."""
        found = (each for each in self.measured if frozenset(each.patches) == coalition)
        exact = next((each for each in found if coalition or each.name == self.baseline), None)
        return exact or self.of(coalition - self.dependent)


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
        trial: which patches, and which sets of them, can run at all, and which change nothing.
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
    tried = {patch.name: trial([patch.name]) for patch in _candidates(report, patches)}
    usable = [patch for patch in patches if patch.name in tried and tried[patch.name].has_effect]
    together = _compatible(usable, tried, trial)
    dependent = frozenset(name for name in together if tried[name].unproven)
    sets = _Sets(precision, together, dependent, trial)
    rows += _alone(report, patches, precision, tried, together) + sets.rows(usable)
    orders = orders_for(together, seed) if together else []
    rows_are_enough = len(together) <= 3
    if shapley and not rows_are_enough:
        rows += sets.further(rows, orders)
    return Plan(rows, stock(precision), orders if shapley or rows_are_enough else [], dependent)


def check_stock(report: Report) -> None:
    """Raises `T5FastPatchError` where a patch is on, be it one that is not asked for."""
    on = [row.patch for row in report.rows if row.state is State.ON]
    if on:
        raise T5FastPatchError(f"{', '.join(on)} is on already, so nothing here is stock: unset T5FASTPATCH")


def _candidates(report: Report, patches: Sequence[Patch]) -> list[Patch]:
    """The patches that can be put on by name."""
    found: list[Patch] = []
    for patch in patches:
        state = report[patch.name].state
        by_name = state is State.UNSAFE and not patch.needs_proof and not _scales(patch)
        if state is State.APPLIES or by_name or (state is State.NEEDLESS and _stands_in(patch, patches, found)):
            found.append(patch)
    return found


def _stands_in(patch: Patch, patches: Sequence[Patch], candidates: Sequence[Patch]) -> bool:
    """Whether a fallback is not needed only because the patch that it stands in for can be had."""
    first = patch.fallback_for if isinstance(patch, StackPatch) else ""
    return bool(first) and (first in _names(candidates) or first not in _names(patches))


def _scales(patch: Patch) -> bool:
    return isinstance(patch, StackPatch) and bool(patch.scales)


def _names(patches: Iterable[Patch]) -> list[str]:
    return [patch.name for patch in patches]


def _alone(
    report: Report,
    patches: Sequence[Patch],
    precision: Precision,
    tried: Mapping[str, Outcome],
    together: Sequence[str],
) -> list[Variant]:
    rows = []
    for patch in patches:
        found = report[patch.name]
        outcome = tried.get(patch.name)
        state, why = _said(patch, found, outcome, report)
        if outcome is not None and outcome.runs and outcome.has_effect:
            same_as = _other_name(patch.name, together)
            rows.append(Variant(patch.name, precision, (patch.name,), state.value, same_as, why=why))
        else:
            rows.append(Variant(patch.name, precision, state=state.value, measured=False, why=why))
    return rows


def _said(patch: Patch, found: Row, outcome: Outcome | None, report: Report) -> tuple[State, str]:
    """The state of a patch that is on alone, and what must be known of it."""
    if outcome is None:
        return found.state, found.why
    if outcome.error:
        return State.REFUSED, f"a forward with it fails: {outcome.error}"
    if outcome.unproven:
        return State.UNSAFE, f"alone it has no proof of headroom: {outcome.unproven.removeprefix(f'{patch.name}: ')}"
    if outcome.idle:
        return found.state, outcome.idle
    if found.state is State.UNSAFE:
        return State.UNSAFE, f"on by its name alone, as in no preset: {found.why}"
    if found.state is State.NEEDLESS and isinstance(patch, StackPatch):
        return State.NEEDLESS, f"a fallback for {patch.fallback_for}, measured in its place"
    scaled = [each.name for each in list_patches() if _scales(each) and _applies(report, each)]
    if patch.needs_proof and scaled:
        return found.state, f"alone it is on only where there is headroom without {scaled[0]}"
    if patch.unsafe_alone and scaled:
        return State.UNSAFE, f"on by its name alone, as in no preset: its proof of headroom rests on {scaled[0]}"
    return found.state, found.why


def _applies(report: Report, patch: Patch) -> bool:
    return any(row.patch == patch.name and row.state is State.APPLIES for row in report.rows)


def _other_name(name: str, together: Sequence[str]) -> str:
    if list(together) == [name]:
        return ALL
    if len(together) == 2 and name in together:
        return f"all but {next(other for other in together if other != name)}"
    return ""


@dataclasses.dataclass(frozen=True)
class _Sets:
    """The sets of several patches in one precision.

    Attributes:
        together: all that go together.
        dependent: those of them that need the proof of headroom that another one gives.
        trial: asked of the sets that hold a dependent one.
    """

    precision: Precision
    together: Sequence[str]
    dependent: Coalition
    trial: Trial

    def rows(self, usable: Sequence[Patch]) -> list[Variant]:
        """All, and all but one."""
        if len(self.together) < 2:
            return []
        left_out = [patch.name for patch in usable if patch.name not in self.together]
        why = f"without {', '.join(left_out)}, in conflict with another" if left_out else ""
        rows = [Variant(ALL, self.precision, tuple(self.together), why=why)]
        return rows + ([self._all_but(name) for name in self.together] if len(self.together) > 2 else [])

    def _all_but(self, name: str) -> Variant:
        rest = tuple(each for each in self.together if each != name)
        if self._possible(frozenset(rest)) == frozenset(rest):
            return Variant(f"all but {name}", self.precision, rest)
        needy = ", ".join(each for each in rest if each in self.dependent)
        why = f"{needy} cannot be on without the headroom that {name} gives"
        return Variant(f"all but {name}", self.precision, measured=False, why=why)

    def further(self, rows: Sequence[Variant], orders: Sequence[Order]) -> list[Variant]:
        """The coalitions that are no rows yet, each in the order of the first order."""
        there = {frozenset(row.patches) for row in rows}
        wanted = dict.fromkeys(map(self._possible, coalitions(orders)))
        sets = [
            tuple(each for each in orders[0] if each in coalition) for coalition in wanted if coalition not in there
        ]
        return [Variant(" + ".join(each), self.precision, each, shown=False) for each in sets]

    def _possible(self, coalition: Coalition) -> Coalition:
        """Those of the patches that can be on together."""
        names = [each for each in self.together if each in coalition]
        runs = not coalition & self.dependent or self.trial(names).runs
        return coalition if runs else coalition - self.dependent


def _compatible(patches: Sequence[Patch], tried: Mapping[str, Outcome], trial: Trial) -> list[str]:
    """As many of the patches, from the first on, as can be on one model together."""
    kept: list[Patch] = []
    for patch in patches:
        if rival(patch, kept) is not None:
            continue
        outcome = trial(_names([*kept, patch])) if kept else tried[patch.name]
        if outcome.runs:
            kept.append(patch)
    return _names(kept)
