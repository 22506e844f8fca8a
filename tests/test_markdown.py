"""The Markdown report and the reader, from files alone."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sample_results as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from t5fastpatch import T5FastPatchError
from t5fastpatch.cli_report import report
from t5fastpatch.reports.formats import NO_EFFECT, figure, megabytes, ratio, seconds, share
from t5fastpatch.reports.markdown import LIMIT, escaped, markdown, table_lines
from t5fastpatch.reports.naming import names
from t5fastpatch.reports.reading import read
from t5fastpatch.reports.tables import Table, sections, summary


def written(folder: Path, result: Any, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(result if isinstance(result, str) else json.dumps(result), encoding="utf-8")
    return path


def lines_of(result: dict[str, Any]) -> list[str]:
    """The same result as JSON lines."""
    header = {**result, "cells": None}
    del header["cells"]
    return [json.dumps(each) for each in (header, *result["cells"])]


def cells_of(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line)[1:-1]


def blocks(text: str) -> list[list[str]]:
    """The tables of a Markdown text, each as its lines."""
    return [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]


@pytest.mark.parametrize("result", [samples.small(), samples.rich()], ids=["small", "rich"])
def test_every_row_of_a_table_has_as_many_cells_as_its_heading(result: dict[str, Any]) -> None:
    tables = blocks(markdown({**result, "notes": []}))
    assert len(tables) > 5
    for table in tables:
        assert len({len(cells_of(line)) for line in table}) == 1
        assert len({len(line) for line in table}) == 1


def test_every_variant_and_figure_is_there() -> None:
    text = markdown(samples.rich())
    for cell in samples.rich()["cells"]:
        for row in cell["rows"]:
            assert row["label"] in text
            assert row["census"] is None or f" {row['census']['ops']} |" in text
            baseline = row["variant"] == cell["baseline"]
            assert row["to_half"] is None or (seconds(row["median"]) if baseline else ratio(row["to_half"])) in text
            assert row["quality"] is None or figure(row["quality"]["loss"], "{:.4f}") in text


def test_the_environment_and_what_cpu_times_do_not_say_come_first() -> None:
    opening = markdown(samples.rich()).split("<details>")[0]
    assert "3,871,232 parameters, on A processor (cpu), t5fastpatch 0.1.0, transformers 5.12.1" in opening
    assert "Times on a CPU say nothing of a GPU's fp16" in opening
    assert "An effect is claimed where the 99% interval leaves 1 out" in opening
    assert "Not measured: bias_hoist: upstream's source" in opening
    assert "this release keeps wo in half precision" in opening


def test_times_of_a_gpu_come_without_the_words_on_a_cpu() -> None:
    result = samples.small()
    result["environment"]["device"] = "cuda:0"
    assert "Times on a CPU" not in markdown(result)


def test_everything_but_the_summary_is_folded() -> None:
    text = markdown(samples.rich())
    assert text.count("<details>") == text.count("</details>") == len(sections(samples.rich(), brief=True))
    assert len(blocks(text.split("<details>")[0])) == 2


def test_a_report_too_long_for_an_issue_says_what_it_leaves_out() -> None:
    result = samples.rich()
    result["cells"] *= 4
    for number, cell in enumerate(result["cells"]):
        result["cells"][number] = copy.deepcopy(cell)
        result["cells"][number]["cell"]["attention"] = f"kernel {number // 16}"
    text = markdown(result)
    assert len(text) < LIMIT + 500
    assert re.search(r"Left out, as too long for an issue: Attribution, .*Memory\. The page has them\.", text)


def test_the_summary_has_a_line_per_timed_cell() -> None:
    result = samples.rich()
    table = summary(result)
    assert [row[0] for row in table.rows][:2] == [
        "decoder step, batch 1, length 12/128",
        "decoder step, batch 8, length 12/128",
    ]
    assert len(table.rows) == 13
    first = {row["variant"]: row for row in result["cells"][0]["rows"]}
    assert table.rows[0][1] == ratio(first["stock fp16"]["to_fp32"])
    assert table.rows[0][3] == ratio(first["all"]["to_half"])
    assert table.rows[0][4] == "243 → 472 → 220"


def test_equal_counts_are_shown_once_for_all_shapes() -> None:
    counts = sections(samples.rich())[0].tables
    assert [table.title for table in counts] == [
        f"{workload}: what one call does" for workload in ("decoder step", "forward", "beam free")
    ]
    changed = samples.rich()
    changed["cells"][0]["rows"][0]["census"]["ops"] += 1
    titles = [table.title for table in sections(changed)[0].tables]
    assert titles[0] == "decoder step: what one call does (batch 1, length 12/128)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"median": 0.97, "low": 0.96, "high": 0.98}, "0.97 [0.96, 0.98]"),
        ({"median": 0.9981, "low": 0.9962, "high": 0.9993}, "0.998 [0.996, 0.999]"),
        ({"median": 0.99, "low": 0.9, "high": 1.02}, f"{NO_EFFECT} [0.90, 1.02]"),
        ({"median": "nan", "low": "nan", "high": "inf"}, "-"),
        (None, "-"),
    ],
)
def test_a_ratio_is_never_a_bare_figure(value: Any, text: str) -> None:
    assert ratio(value) == text


def test_numbers_carry_their_units() -> None:
    assert [seconds(value) for value in (2.5, 0.0041, 3.2e-5, "nan", None)] == [
        "2.50 s", "4.10 ms", "32.0 µs", "nan", "-",
    ]  # fmt: skip
    assert megabytes(15_400_000) == "15.4 MB"
    assert figure("inf", "{:.3g}") == "inf"
    sampled = {"share": 0.021, "low": 0.012, "high": 0.03, "sampling_error": 0.004}
    assert share(sampled) == "2.1% [1.2%, 3.0%] ± 0.4% by sampling"
    assert share({**sampled, "low": -0.01, "sampling_error": None}) == f"2.1% [-1.0%, 3.0%], {NO_EFFECT}"


@settings(max_examples=60, deadline=None)
@given(st.text(), st.text())
def test_no_name_breaks_a_table(name: str, other: str) -> None:
    result = samples.document([samples.timed("stack", "forward")], notes=[])
    result["subject"]["name"] = other
    for row in result["cells"][0]["rows"]:
        row["label"] = name + row["label"]
    result["cells"][0]["cell"]["workload"] = other
    text = markdown(result)
    for table in blocks(text):
        assert len({len(cells_of(line)) for line in table}) == 1
    assert text.count("<details>") == text.count("</details>") == len(sections(result, brief=True))


def test_what_markdown_would_read_is_escaped() -> None:
    assert escaped("a|b <i> *x* `y` _z_ skip_inf_check [0.9, 1.1]") == (
        r"a\|b &lt;i&gt; \*x\* \`y\` \_z\_ skip_inf_check [0.9, 1.1]"
    )
    assert table_lines(Table("t", ["a|b", "n"], [["x\\", "1"]])).splitlines() == [
        r"| a\|b |   n |", "| ---- | --: |", r"| x\\  |   1 |",
    ]  # fmt: skip


def test_json_and_json_lines_give_the_same_report(tmp_path: Path) -> None:
    result = samples.rich()
    plain = read(written(tmp_path, result))
    lines = read(written(tmp_path, "\n".join(lines_of(result)) + "\n", "result.jsonl"))
    assert plain["notes"] == lines["notes"] == []
    assert markdown(plain) == markdown(lines)


def test_a_line_that_was_cut_off_is_left_out_with_a_word(tmp_path: Path) -> None:
    lines = lines_of(samples.small())
    result = read(written(tmp_path, "\n".join([*lines[:-1], lines[-1][:100]])))
    assert len(result["cells"]) == len(samples.small()["cells"]) - 1
    assert result["notes"] == [f"Line {len(lines)} of the file was cut off, and is left out."]
    assert result["notes"][0] in markdown(result)


def test_a_resumed_run_shows_the_last_environment_and_says_so(tmp_path: Path) -> None:
    header, *cells = lines_of(samples.small())
    resumed = samples.small()
    resumed["environment"].update(torch="2.14.0", load=3.0, cpu_mhz=2100)
    second = lines_of(resumed)[0]
    text = "\n".join([header, cells[0], cells[1][:50], second, *cells[1:], cells[0]])
    result = read(written(tmp_path, text))
    assert [cell["key"] for cell in result["cells"]] == [cell["key"] for cell in samples.small()["cells"]]
    assert result["environment"]["torch"] == "2.14.0"
    assert result["notes"] == [
        "The file was written in several runs, which differ in: torch; the last values are shown.",
        "Line 3 of the file was cut off, and is left out.",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "it names no schema"),
        ("[]", "it names no schema"),
        ("", "neither JSON nor JSON lines"),
        ("{\n", "neither JSON nor JSON lines"),
        ('{"schema": "t5fastpatch.ablation/1"}', "'t5fastpatch.ablation/1'"),
        ('{"schema": "t5fastpatch.ablation/2", "cells": [{}]}', "a cell lacks"),
        ('{"schema": "t5fastpatch.ablation/2", "cells": [{"cell": {}, "rows": [{}]}]}', "a cell lacks"),
        ('{"schema": "t5fastpatch.ablation/2", "environment": []}', "its environment is no object"),
        ('{"schema": "t5fastpatch.ablation/2"}\n{"cel\n{"cell": {}, "rows": []}\n', "line 2 of"),
    ],
)
def test_a_file_that_is_no_result_is_one_line_with_the_way_out(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(T5FastPatchError) as error:
        read(written(tmp_path, text))
    message = str(error.value)
    assert words in message
    assert "\n" not in message
    assert "ablat" in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(T5FastPatchError, match="cannot read"):
        read(tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(T5FastPatchError, match="cannot read"):
        read(tmp_path / "binary")


def test_the_command_prints_markdown_when_told_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, samples.small())
    report(path)
    assert capsys.readouterr().out == markdown(read(path))
    report(path, markdown=tmp_path / "report.md")
    assert capsys.readouterr().out == ""
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == markdown(read(path))


def test_a_directory_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, samples.small())
    with pytest.raises(T5FastPatchError, match=r"cannot write .*report\.md"):
        report(path, markdown=tmp_path / "nowhere" / "report.md")


def test_workloads_with_and_without_a_target_stand_in_one_table() -> None:
    result = samples.document([samples.timed("stack", "encoder", 8, (128, 0)), samples.timed("stack", "forward")])
    time = next(section for section in sections(result) if section.title == "Time")
    assert list(time.tables[0].columns) == ["variant", "encoder", "forward"]
    assert names(result["cells"]) == ["encoder", "forward"]


def test_what_only_the_95_percent_interval_shows_is_unclear() -> None:
    claimed = {"median": 0.9, "low": 0.85, "high": 0.95, "measurable": True}
    assert ratio(claimed) == "0.90 [0.85, 0.95]"
    assert ratio({**claimed, "measurable": False}) == "0.90 [0.85, 0.95], unclear"
    assert ratio({**claimed, "high": 1.0, "measurable": False}) == "no measurable effect [0.85, 1.00]"
    saved = {"share": 0.1, "low": 0.05, "high": 0.15, "measurable": False}
    assert share(saved) == "10.0% [5.0%, 15.0%], unclear"
    assert share({**saved, "low": -0.05}) == "10.0% [-5.0%, 15.0%], no measurable effect"


def test_json_lines_keep_what_a_reader_must_know(tmp_path: Path) -> None:
    file = tmp_path / "result.jsonl"
    header = {**samples.document([]), "notes": ["nothing to patch"]}
    del header["cells"]
    file.write_text(json.dumps(header) + "\n" + json.dumps(samples.timed("stack", "forward")) + "\n", encoding="utf-8")
    assert read(file)["notes"] == ["nothing to patch"]
