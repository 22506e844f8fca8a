from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import save_model

from t5fastpatch import T5FastPatchError, list_patches, patched, status
from t5fastpatch.measure.attribution import coalitions
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.subject import attention_of, attentions_of, load
from t5fastpatch.measure.trial import Outcome, Trial, no_trial, trial_of
from t5fastpatch.measure.variants import Plan, plan
from t5fastpatch.patch import Contract, Patch, StackPatch, State
from t5fastpatch.report import Report, Row

FP16 = Precision.FP16
APPLIES = State.APPLIES


def made_plan(
    states: dict[str, State],
    conflicts: dict[str, str] | None = None,
    trial: Trial = no_trial,
    *,
    shapley: bool = False,
    tf32: bool = False,
) -> Plan:
    patches = [
        Patch(name, "", Contract.EXACT, conflicts=frozenset(filter(None, [(conflicts or {}).get(name)])))
        for name in states
    ]
    return plan(report_of(states), patches, FP16, trial, shapley=shapley, tf32=tf32)


def report_of(states: dict[str, State]) -> Report:
    return Report("T5", "5.0", tuple(Row(name, state, 1, 1, "exact", f"why {name}") for name, state in states.items()))


def planned(states: dict[str, State], conflicts: dict[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    """Label and patches of each row after the stock models'."""
    return {variant.label: variant.patches for variant in made_plan(states, conflicts).variants[2:]}


def test_a_patched_model_is_not_stock(tmp_path: Path) -> None:
    half = load(str(save_model(tmp_path)), "cpu").model(FP16)
    with (
        patched(half, ["layer_norm"]),
        pytest.raises(T5FastPatchError, match="layer_norm is on already"),
    ):
        plan(status(half), list_patches(), FP16)


def test_the_stock_models_come_first() -> None:
    def stocks(made: Plan) -> list[str]:
        return [variant.name for variant in made.variants if variant.state == "stock"]

    assert stocks(made_plan({"a": APPLIES})) == ["stock fp32", "stock fp16"]
    assert stocks(made_plan({"a": APPLIES}, tf32=True)) == ["stock fp32", "stock tf32", "stock fp16"]
    assert stocks(plan(None, [], Precision.FP32)) == ["stock fp32"]
    assert plan(None, [], Precision.BF16).baseline == "stock bf16"


def test_no_row_is_measured_twice() -> None:
    assert planned({"a": APPLIES}) == {"a (= all)": ("a",)}
    assert planned({"a": APPLIES, "b": State.UPSTREAM, "c": State.UNSAFE}) == {
        "a (= all but c)": ("a",),
        "b": (),
        "c (= all but a)": ("c",),
        "all": ("a", "c"),
    }
    assert planned({"a": APPLIES, "b": APPLIES, "c": APPLIES}) == {
        "a": ("a",),
        "b": ("b",),
        "c": ("c",),
        "all": ("a", "b", "c"),
        "all but a": ("b", "c"),
        "all but b": ("a", "c"),
        "all but c": ("a", "b"),
    }


def test_what_conflicts_is_not_put_together() -> None:
    assert planned({"a": APPLIES, "b": APPLIES, "c": APPLIES}, conflicts={"c": "a"}) == {
        "a (= all but b)": ("a",),
        "b (= all but a)": ("b",),
        "c": ("c",),
        "all": ("a", "b"),
    }


def test_what_changes_no_operation_is_a_row_that_is_not_measured_and_in_no_set() -> None:
    def trial(names: Sequence[str]) -> Outcome:
        return Outcome(idle="the same operations run" * (list(names) == ["c"]))

    made = made_plan(dict.fromkeys("abcd", APPLIES), trial=trial)
    (idle,) = [variant for variant in made.variants if variant.name == "c"]
    assert (idle.measured, idle.state, idle.why) == (False, "applies", "the same operations run")
    assert made.of(frozenset("abd")).name == "all"
    assert len(made.orders) == 6


def test_states_that_leave_nothing_to_measure_say_why() -> None:
    made = made_plan({"a": State.NEEDLESS, "b": State.UPSTREAM, "c": APPLIES})
    assert [(row.name, row.state, row.why) for row in made.variants if not row.measured] == [
        ("a", "not needed", "why a"),
        ("b", "already upstream", "why b"),
    ]
    assert not any(row.refused for row in made.variants)


def needs_headroom(name: str) -> Patch:
    return Patch(name, "", Contract.EXACT, unsafe_alone="it may overflow", needs_proof=True)


def test_what_needs_a_proof_and_has_none_is_not_tried() -> None:
    tried: list[Sequence[str]] = []

    def trial(names: Sequence[str]) -> Outcome:
        tried.append(names)
        return Outcome()

    made = plan(report_of({"half": State.UNSAFE}), [needs_headroom("half")], FP16, trial)
    (row,) = made.variants[2:]
    assert (row.measured, row.state, row.why, tried) == (False, "unsafe", "why half", [])


def rests_on_scale(names: Sequence[str]) -> Outcome:
    """The trial of a model on which `half` needs the headroom that `scale` gives."""
    unproven = "half" in names and "scale" not in names
    return Outcome(unproven="half: too large" * unproven)


def dependent_plan(others: str, *, shapley: bool = False) -> Plan:
    patches = [Patch("scale", "", Contract.EXACT), needs_headroom("half")]
    patches += [Patch(name, "", Contract.EXACT) for name in others]
    states = dict.fromkeys(["scale", "half", *others], APPLIES)
    return plan(report_of(states), patches, FP16, rests_on_scale, shapley=shapley)


def test_what_needs_another_one_s_proof_is_measured_only_beside_it() -> None:
    rows = {row.name: row for row in dependent_plan("a").variants}
    assert rows["all"].patches == ("scale", "half", "a")
    assert (rows["half"].measured, rows["half"].state) == (False, "unsafe")
    assert rows["half"].why == "alone it has no proof of headroom: too large"
    assert not rows["all but scale"].measured
    assert rows["all but scale"].why == "half cannot be on without the headroom that scale gives"
    assert rows["all but a"].patches == ("scale", "half")


@pytest.mark.parametrize("others", ["a", "ab", "abcde"])
def test_it_adds_nothing_to_the_sets_that_it_cannot_be_in(others: str) -> None:
    made = dependent_plan(others, shapley=True)
    for coalition in coalitions(made.orders):
        can_be_on = coalition if "scale" in coalition else coalition - {"half"}
        assert frozenset(made.of(coalition).patches) == can_be_on
    names = [row.name for row in made.variants]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("first", "measured"), [(APPLIES, True), (State.NEEDLESS, False)])
def test_a_fallback_is_measured_where_what_it_stands_in_for_can_be(first: State, measured: bool) -> None:
    conflicts = frozenset({"first"})
    fallback = StackPatch("fallback", "", Contract.EXACT, {}, fallback_for="first", conflicts=conflicts)
    patches = [Patch("first", "", Contract.EXACT), fallback, Patch("a", "", Contract.EXACT)]
    report = report_of({"first": first, "fallback": State.NEEDLESS, "a": APPLIES})
    rows = {row.name: row for row in plan(report, patches, FP16).variants}
    assert rows["fallback"].measured == measured
    assert "fallback" not in rows["all" if measured else "a"].patches
    alone = {row.name: row for row in plan(report, patches[1:], FP16).variants}
    assert alone["all"].patches == ("fallback", "a")


def test_a_trial_tells_what_changes_something_from_what_does_not(tmp_path: Path) -> None:
    subject = load(str(save_model(tmp_path)), "cpu")
    with torch.no_grad():
        trial = trial_of(subject, FP16, attention_of(subject.fp32))
        assert trial(["skip_inf_check"]) == Outcome()
        assert trial(["wo_without_weight"]).idle.startswith("the same operations run as in stock fp16 with ")
        assert "no patch is called" in trial(["no_such_patch"]).error
        assert trial_of(subject, Precision.BF16, attention_of(subject.fp32))(["skip_inf_check"]).idle


def test_whether_eager_scores_change_something_depends_on_the_attention(tmp_path: Path) -> None:
    subject = load(str(save_model(tmp_path)), "cpu")
    if attentions_of(subject.fp32) != ["eager", "sdpa"]:
        pytest.skip("this release has one attention only")
    with torch.no_grad():
        idle = {name: trial_of(subject, FP16, name)(["eager_scores"]).idle for name in ("eager", "sdpa")}
    assert not idle["eager"]
    assert idle["sdpa"]


def test_up_to_three_patches_the_rows_are_all_that_fair_shares_need() -> None:
    for names in ("a", "ab", "abc"):
        made = made_plan(dict.fromkeys(names, APPLIES))
        assert all(variant.shown for variant in made.variants)
        assert {made.of(coalition).patches for coalition in coalitions(made.orders)} == {
            variant.patches for variant in made.measured if variant.name != "stock fp32"
        }


def test_beyond_three_the_further_sets_are_asked_for() -> None:
    states = dict.fromkeys("abcd", APPLIES)
    assert made_plan(states).orders == []
    made = made_plan(states, shapley=True)
    assert len({made.of(coalition) for coalition in coalitions(made.orders)}) == 2**4
    assert [variant.name for variant in made.variants if not variant.shown] == [
        "a + b", "a + c", "a + d", "b + c", "b + d", "c + d",
    ]  # fmt: skip


def test_beyond_five_a_sample_of_sets_is_timed() -> None:
    made = made_plan(dict.fromkeys("abcdefg", APPLIES), shapley=True)
    assert 2 + 7 + 7 + 1 < len(made.variants) < 2**7
    assert all(made.of(coalition).measured for coalition in coalitions(made.orders))


def test_where_nothing_is_t5_there_are_the_stock_models_and_no_shares() -> None:
    made = plan(None, list_patches(), FP16)
    assert [variant.name for variant in made.variants] == ["stock fp32", "stock fp16"]
    assert made.orders == ()
