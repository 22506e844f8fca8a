"""What a comparison of two results says, and what it leaves to noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sample_results as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from t5fastpatch import T5FastPatchError
from t5fastpatch.cli_compare import compare as command
from t5fastpatch.reports.compare import changed_times, compare, comparison_lines, comparison_tables


@pytest.fixture
def a() -> dict[str, Any]:
    return {**samples.rich(), "notes": []}


@pytest.fixture
def b() -> dict[str, Any]:
    return {**samples.rich(), "notes": []}


def row(result: dict[str, Any], cell: int, variant: str) -> dict[str, Any]:
    (found,) = (each for each in result["cells"][cell]["rows"] if each["variant"] == variant)
    return found


def results_cell(result: dict[str, Any]) -> int:
    return next(at for at, cell in enumerate(result["cells"]) if cell["cell"]["level"] == "results")


def test_a_result_beside_itself_has_no_differences(a: dict[str, Any], b: dict[str, Any]) -> None:
    found = compare(a, b)
    assert found["cells_in_both"] == len(a["cells"])
    nothing = {"cells": [], "variants": []}
    assert (found["only_in_a"], found["only_in_b"]) == (nothing, nothing)
    assert [found[part] for part in ("circumstances", "states", "counts", "results")] == [[], [], [], []]
    assert {time["verdict"] for time in found["times"]} == {"no measurable difference"}
    assert comparison_tables(found) == []


def test_circumstances_that_differ_are_in_one_table(a: dict[str, Any], b: dict[str, Any]) -> None:
    b["environment"].update(transformers="5.24.0", device_name="Another processor")
    b["environment"]["scipy"] = "1.17.1"
    b["settings"]["seed"] = 1
    (table,) = comparison_tables(compare(a, b))
    assert table.rows == [
        ["transformers", "5.12.1", "5.24.0"],
        ["device_name", "A processor", "Another processor"],
        ["scipy", "-", "1.17.1"],
        ["seed", "0", "1"],
    ]


def test_counts_are_compared_exactly(a: dict[str, Any], b: dict[str, Any]) -> None:
    row(b, 0, "all")["census"]["casts"] += 1
    row(b, 0, "all")["census"]["flops_by_dtype"]["float32"] += 1
    where = {"cell": "decoder step, batch 1, length 12/128", "variant": "all"}
    assert compare(a, b)["counts"] == [
        {**where, "what": "casts", "a": 5, "b": 6},
        {**where, "what": "flops in float32", "a": 100_000_000, "b": 100_000_001},
    ]


def test_a_time_changed_where_the_intervals_do_not_overlap(a: dict[str, Any], b: dict[str, Any]) -> None:
    row(a, 0, "all")["to_half"] = {"median": 0.7, "low": 0.69, "high": 0.71}
    row(b, 0, "all")["to_half"] = {"median": 0.8, "low": 0.79, "high": 0.81}
    row(a, 1, "all")["to_half"] = {"median": 0.7, "low": 0.69, "high": 0.71}
    row(b, 1, "all")["to_half"] = {"median": 0.72, "low": 0.71, "high": 0.73}
    found = compare(a, b)
    (changed,) = changed_times(found)
    assert (changed["cell"], changed["variant"]) == ("decoder step, batch 1, length 12/128", "all")
    (table,) = comparison_tables(found)
    assert table.rows == [[changed["cell"], "all", "0.70 [0.69, 0.71]", "0.80 [0.79, 0.81]"]]
    assert f"Time ratios to stock half: 1 changed, {len(found['times']) - 1} with no" in "".join(
        comparison_lines(found)
    )
    assert not any(time["variant"] == "stock fp16" for time in found["times"])


def test_what_half_precision_does_itself_is_noise(a: dict[str, Any], b: dict[str, Any]) -> None:
    at = results_cell(a)
    bleu = {name: row(a, at, name)["quality"]["bleu"] for name in ("stock fp32", "stock fp16", "all")}
    half = bleu["stock fp32"] - bleu["stock fp16"]
    floor = 0.001 * bleu["all"]
    assert 0 < half < floor
    row(b, at, "all")["quality"]["bleu"] -= 0.9 * floor
    assert compare(a, b)["results"] == []
    row(b, at, "all")["quality"]["bleu"] -= 0.2 * floor
    (found,) = compare(a, b)["results"]
    assert (found["what"], found["variant"]) == ("bleu", "all")
    assert found["noise"] == pytest.approx(floor)
    row(b, at, "stock fp16")["quality"]["bleu"] -= 1.2 * floor  # now half precision itself is that far off, in B
    assert compare(a, b)["results"] == []


def test_infinities_and_nan_are_differences_but_not_beside_their_like(a: dict[str, Any], b: dict[str, Any]) -> None:
    at = results_cell(a)
    assert row(a, at, "skip_inf_check")["quality"]["loss"] == "nan"
    row(b, at, "skip_inf_check")["quality"].update(loss=2.4, nonfinite=0)
    found = compare(a, b)["results"]
    assert [(each["what"], each["a"], each["b"], each["noise"]) for each in found] == [
        ("nonfinite", 12, 0, None),
        ("loss", "nan", 2.4, None),
    ]


def test_the_trainers_results_are_compared_and_its_speeds_are_not(a: dict[str, Any], b: dict[str, Any]) -> None:
    evaluation = row(b, -1, "all")["evaluation"]
    evaluation.update(loss=5.2, runtime=99.0, samples_per_second=1.0)
    assert [each["what"] for each in compare(a, b)["results"]] == ["loss"]


def test_what_is_in_one_only_is_named(a: dict[str, Any], b: dict[str, Any]) -> None:
    del b["cells"][0]
    b["cells"][0]["rows"] = [each for each in b["cells"][0]["rows"] if each["variant"] != "all but gelu"]
    a["cells"][3]["cell"]["attention"] = "sdpa"
    found = compare(a, b)
    assert found["only_in_a"]["cells"] == [
        "decoder step, eager, batch 1, length 12/128",
        "decoder step, sdpa, batch 1, length 128/128",
    ]
    assert found["only_in_a"]["variants"] == [
        {"cell": "decoder step, eager, batch 8, length 12/128", "variant": "all but gelu"}
    ]
    assert found["only_in_b"]["cells"] == ["decoder step, eager, batch 1, length 128/128"]
    (table,) = (table for table in comparison_tables(found) if table.title == "Only in one")
    assert [line[0] for line in table.rows] == ["A", "A", "A", "B"]


def test_cells_are_told_by_what_they_are_not_by_their_key(a: dict[str, Any], b: dict[str, Any]) -> None:
    for cell in b["cells"]:
        cell["key"] = cell["key"][::-1]
    b["cells"].reverse()
    assert compare(a, b)["cells_in_both"] == len(a["cells"])


def test_a_state_that_differs_is_told_once(a: dict[str, Any], b: dict[str, Any]) -> None:
    for cell in b["cells"]:
        for each in cell["rows"]:
            if each["variant"] == "gelu":
                each.update(state="already upstream", measured=False, to_half=None, census=None)
    found = compare(a, b)
    assert found["states"] == [{"variant": "gelu", "a": "applies", "b": "already upstream"}]
    assert found["counts"] == []


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(5)), st.floats(0.5, 1.5), st.floats(0, 0.3))
def test_a_comparison_the_other_way_round_finds_the_same(order: list[int], middle: float, width: float) -> None:
    a, b = samples.small(), samples.small()
    b["cells"][0]["rows"] = [b["cells"][0]["rows"][at] for at in order]
    row(b, 0, "all")["to_half"] = samples.ratio(middle, width)
    forth, back = compare(a, b), compare(b, a)
    assert len(changed_times(forth)) == len(changed_times(back))
    assert len(forth["counts"]) == len(back["counts"])
    assert forth["only_in_a"] == back["only_in_b"]


def test_the_command_says_it_and_writes_it(
    tmp_path: Path, a: dict[str, Any], b: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    b["environment"]["transformers"] = "5.24.0"
    row(b, 0, "all")["census"]["ops"] = 150
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, result in zip(paths, (a, b)):
        path.write_text(json.dumps(result), encoding="utf-8")
    command(*paths, json=tmp_path / "comparison.json")
    out = capsys.readouterr().out
    assert f"A: {paths[0]}: A processor (cpu), t5fastpatch 0.1.0, transformers 5.12.1" in out
    assert "| decoder step, batch 1, length 12/128 | all     | ops  | 220 | 150 |" in out
    assert "Results that differ beyond noise: 0." in out
    written = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(compare(a, b)))


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps(samples.small()), encoding="utf-8")
    with pytest.raises(T5FastPatchError, match=r"nowhere\.json"):
        command(good, tmp_path / "nowhere.json")
    with pytest.raises(T5FastPatchError, match="cannot write"):
        command(good, good, json=tmp_path / "nowhere" / "comparison.json")
