from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_model

from t5fastpatch import T5FastPatchError, list_patches, patched, status
from t5fastpatch.measure.attribution import coalitions
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.subject import load
from t5fastpatch.measure.variants import Plan, plan
from t5fastpatch.patch import Contract, Patch, State
from t5fastpatch.report import Report, Row

FP16 = Precision.FP16
APPLIES = State.APPLIES


def made_plan(
    states: dict[str, State], conflicts: dict[str, str] | None = None, *, shapley: bool = False, tf32: bool = False
) -> Plan:
    patches = [
        Patch(name, "", Contract.EXACT, conflicts=frozenset(filter(None, [(conflicts or {}).get(name)])))
        for name in states
    ]
    rows = tuple(Row(name, state, 1, 1, "exact") for name, state in states.items())
    return plan(Report("T5", "5.0", rows), patches, FP16, shapley=shapley, tf32=tf32)


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
