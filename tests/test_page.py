"""The page and its pictures, from files alone, and as a browser shows them."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import sample_results as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from t5fastpatch import T5FastPatchError

pytest.importorskip("matplotlib", reason="pictures need the extra `report`")
pytest.importorskip("jinja2", reason="the page needs the extra `report`")

from t5fastpatch import extra
from t5fastpatch.cli_report import report
from t5fastpatch.measure.profiling.categories import CATEGORIES
from t5fastpatch.reports.drawing import Picture
from t5fastpatch.reports.figures import CATEGORY_BARS, pictures
from t5fastpatch.reports.page import page
from t5fastpatch.reports.tables import sections, state_table, summary

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# It asks nobody but this machine, for what it does on its own account.
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def rich() -> dict[str, Any]:
    return samples.rich()


@pytest.fixture(scope="module")
def drawn(rich: dict[str, Any]) -> list[Picture]:
    return pictures(rich)


@pytest.fixture(scope="module")
def figures(drawn: list[Picture]) -> dict[str, Any]:
    return {picture.name: picture.figure for picture in drawn}


@pytest.fixture(scope="module")
def html(rich: dict[str, Any], drawn: list[Picture]) -> str:
    return page(rich, drawn)


def texts(element: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()).replace("\N{NO-BREAK SPACE}", " ") for each in element]


def test_the_page_is_well_formed_and_each_id_is_there_once(html: str) -> None:
    root = ElementTree.fromstring(html)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="|url\()#([^")]+)', html):
        assert target in ids


def test_the_page_loads_nothing_and_runs_nothing(html: str) -> None:
    for element in ElementTree.fromstring(html).iter():
        assert element.tag.rpartition("}")[2] not in ("script", "link", "img", "iframe", "object", "embed")
        for name, value in element.items():
            assert not name.startswith("on")
            if name.rpartition("}")[2] in ("src", "href", "srcset", "data"):
                assert value.startswith("#")
    assert not re.search(r"@import|url\((?!#)", html)


def test_the_tables_of_the_page_hold_what_the_file_says(html: str, rich: dict[str, Any]) -> None:
    shown = [[texts(row) for row in table.iter("tr")] for table in ElementTree.fromstring(html).iter("table")]
    expected = [
        summary(rich),
        state_table(rich["cells"]),
        *(table for section in sections(rich) for table in section.tables),
    ]
    assert shown == [[list(table.columns), *map(list, table.rows)] for table in expected]
    everything = {text for table in shown for row in table for text in row}
    for cell in rich["cells"]:
        for row in cell["rows"]:
            assert row["label"] in everything
            if row["to_fp32"] and row["variant"] != "stock fp32":
                middle, low, high = (row["to_fp32"][part] for part in ("median", "low", "high"))
                assert (
                    any(f"{middle:.{n}f} [{low:.{n}f}, {high:.{n}f}]" in everything for n in (2, 3)) or low <= 1 <= high
                )
            if row["census"]:
                assert str(row["census"]["casts"]) in everything
            if row["evaluation"]:
                assert f"{row['evaluation']['samples_per_second']:.2f}" in everything
    assert {"nan", "inf", "15.4 MB", "262 MB", "library"} - everything == {"library"}


def test_a_grid_has_lines_and_one_shape_has_bars(figures: dict[str, Any]) -> None:
    assert list(figures) == ["contributions", "ratio-batch", "ratio-length", "ratio", "time-split"]
    assert [picture.name for picture in pictures(samples.small())] == ["contributions", "ratio"]


def test_each_picture_has_its_caption(html: str, drawn: list[Picture]) -> None:
    shown = list(ElementTree.fromstring(html).iter("figure"))
    assert len(shown) == len(drawn) == 5
    for element, picture in zip(shown, drawn):
        heading, _, caption = texts(element)
        assert heading == picture.title
        assert caption == picture.caption
        assert "A processor (cpu)" in caption
        assert "transformers 5.12.1" in caption
        assert "say nothing of a GPU's fp16" in caption
        assert "no measurable effect" in caption or picture.name == "time-split"


def drawn_texts(figure: Any) -> list[str]:
    import matplotlib.text

    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_the_shares_are_drawn_with_their_figures() -> None:
    result = samples.small()
    shares = result["cells"][0]["attribution"]["shares"]
    shares["layer_norm"].update(share=0.001, low=-0.01, high=0.012)
    (contributions,) = (picture for picture in pictures(result) if picture.name == "contributions")
    panel = contributions.figure.axes[0]
    hollow = [bar.get_facecolor()[:3] == (1.0, 1.0, 1.0) for bar in panel.patches]
    assert [bar.get_width() for bar in panel.patches][:2] == [100 * share["share"] for share in shares.values()]
    assert hollow == [False, True, False]
    found = drawn_texts(panel)
    assert f"{100 * shares['skip_inf_check']['share']:.1f}%" in found
    assert "no measurable\neffect" in found
    assert {"skip_inf_check", "layer_norm", "all of them", "forward"} <= set(found)


def test_the_lines_go_through_the_ratios_of_the_file(rich: dict[str, Any], figures: dict[str, Any]) -> None:
    panel = figures["ratio-batch"].axes[0]
    lines = [list(line.get_ydata()) for line in panel.lines if line.get_marker() in ("s", "o")]
    for line, variant in zip(lines, ("stock fp16", "all")):
        rows = [row for cell in rich["cells"][:3] for row in cell["rows"] if row["variant"] == variant]
        assert line == [row["to_fp32"]["median"] for row in rows]
    assert {line.get_linestyle() for line in panel.lines if line.get_marker() in ("s", "o")} == {"--", "-"}
    assert {"stock fp16", "all patches", "1", "8", "32"} <= set(drawn_texts(panel))


def test_bars_and_kinds_of_operation_differ_without_colour(figures: dict[str, Any]) -> None:
    assert len({bar.get_hatch() for bar in figures["ratio"].axes[0].patches}) == 2
    kinds = figures["time-split"].legends[0].get_patches()
    assert len({kind.get_hatch() for kind in kinds}) == len(kinds) == 6


def test_no_label_lies_on_another(figures: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for name, figure in figures.items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for panel in figure.axes:
            labels = [*panel.texts, panel.title, *panel.get_yticklabels(), *panel.get_xticklabels()]
            boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels if label.get_text()]
            for at, box in enumerate(boxes):
                assert not any(box.overlaps(other) for other in boxes[at + 1 :]), name


def test_the_same_result_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(samples.small()))
    report(path, html=tmp_path / "a.html", figures=tmp_path / "a")
    program = (
        "import sys; sys.modules['torch'] = None  # nor is it needed\n"
        "from pathlib import Path; from t5fastpatch.cli_report import report; "
        "path, html, figures = map(Path, sys.argv[1:]); report(path, html=html, figures=figures)"
    )
    # A user's own settings of matplotlib change nothing.
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: black\nsvg.fonttype: none\n")
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "MATPLOTLIBRC": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    arguments = [str(path), str(tmp_path / "b.html"), str(tmp_path / "b")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=environment)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    names = sorted(each.name for each in (tmp_path / "a").iterdir())
    assert names == ["contributions.png", "contributions.svg", "ratio.png", "ratio.svg"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "ratio.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.fromstring((tmp_path / "a" / "ratio.svg").read_bytes())


def oddly_named(name: str, other: str) -> dict[str, Any]:
    result = samples.document([samples.with_categories(samples.timed("stack", "forward", patches=samples.PATCHES[:1]))])
    result["subject"]["name"] = f"<b>&{name}"
    (cell,) = result["cells"]
    cell["cell"]["workload"] = f"$<|{other}"
    cell["attribution"]["shares"][f"$_{name}"] = cell["attribution"]["shares"].pop("skip_inf_check")
    for row in cell["rows"]:
        row["label"] = f"</td>{name}{row['label']}"
    return result


@settings(max_examples=40, deadline=None)
@given(st.text(), st.text())
def test_no_name_breaks_the_page(name: str, other: str) -> None:
    root = ElementTree.fromstring(page(oddly_named(name, other), drawn=[]))
    assert not list(root.iter("b"))
    assert any(text.startswith("</td>") for row in root.iter("tr") for text in texts(row))


@pytest.mark.parametrize("name", ["$x^2$ <&\x00", "_\\frac{1}{0}$" * 30, "\N{SNOWMAN}\ud800\n|"])
def test_no_name_breaks_a_picture(name: str) -> None:
    result = oddly_named(name, name)
    assert len(pictures(result)) == 3
    ElementTree.fromstring(page(result))


def test_a_result_with_nothing_in_it_gives_a_page_without_pictures() -> None:
    result = {"schema": samples.SCHEMA, "subject": {}, "settings": {}, "environment": {}, "cells": []}
    assert not list(ElementTree.fromstring(page(result)).iter("figure"))
    unmeasured = samples.document([samples.cell("stack", "forward")])
    root = ElementTree.fromstring(page(unmeasured))
    assert not list(root.iter("figure"))
    assert "this release keeps wo in half precision" in "".join(root.itertext())


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(extra.importlib, "import_module", missing)
    with pytest.raises(T5FastPatchError, match=r'matplotlib is not installed: pip install "t5fastpatch\[report\]"'):
        pictures(samples.small())
    with pytest.raises(T5FastPatchError, match=r'"t5fastpatch\[ablate\]"'):
        extra.require("scipy")


@contextlib.contextmanager
def served(html: str) -> Iterator[str]:
    """Where a page is to be had."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def browse(tmp_path: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def opened(tmp_path: Path, html: str) -> tuple[str, set[str]]:
    """A page's document as the browser has it, and what the page asked for, its icon left out."""
    log = tmp_path / "log.json"
    with served(html) as origin:
        document = browse(tmp_path, f"--log-net-log={log}", "--dump-dom", f"{origin}/page.html")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    asked = {url for line in lines if f'"initiator":"{origin}"' in line for url in re.findall(r'"url":"([^"]*)"', line)}
    return document, asked - {f"{origin}/favicon.ico"}


@in_a_browser
def test_a_browser_shows_every_table_and_picture_and_asks_for_nothing(tmp_path: Path, html: str) -> None:
    document, asked = opened(tmp_path, html)
    assert document.count("<figure>") == 5
    assert document.count("<table>") == html.count("<table>")
    assert asked == set()


@in_a_browser
def test_a_page_that_asks_for_something_would_be_found_out(tmp_path: Path, html: str) -> None:
    elsewhere = "http://elsewhere.invalid/x.png"
    _, asked = opened(tmp_path, html.replace("<figure>", f'<figure><img src="{elsewhere}"/>'))
    assert asked == {elsewhere}


@in_a_browser
def test_a_screenshot_is_a_page_full_of_ink_within_its_width(tmp_path: Path, html: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib brings pillow")
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    shot = tmp_path / "shot.png"
    browse(tmp_path, f"--screenshot={shot}", "--window-size=1100,3000", (tmp_path / "page.html").as_uri())
    grey = image.open(shot).convert("L")
    assert grey.size == (1100, 3000)
    dark = grey.point(lambda value: 255 * (value < 128))
    for top in range(0, 3000, 500):  # every part of it
        assert dark.crop((0, top, 1100, top + 500)).histogram()[255] > 1000
    assert dark.crop((1080, 0, 1100, 3000)).getbbox() is None
    assert dark.crop((0, 0, 20, 3000)).getbbox() is None


def test_every_kind_of_work_has_a_look_of_its_own() -> None:
    assert len(set(CATEGORY_BARS)) == len(CATEGORY_BARS) >= len(CATEGORIES)
