"""The command `ablate`: options, progress and output; the work is in measure/ablation.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import T5FastPatchError
from .extra import require
from .files import check_outputs, write
from .measure.settings import PRESETS, Settings, preset

if TYPE_CHECKING:
    from .measure.ablation import Progress

WIDTH = 110
# Of a batch or a length: beyond any memory, and within what PyTorch takes as a size.
MOST = 2**31 - 1


def ablate(
    preset: Annotated[str, typer.Option(help=f"What the defaults below are: {', '.join(PRESETS)}.")] = "quick",
    model: Annotated[
        str | None, typer.Option(help="A model's directory, or its name on the hub; the embedded model without it.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model, the shape of one with random weights: t5-small, bert, ...")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = Settings.device,
    precisions: Annotated[
        str | None,
        typer.Option("--dtype", help="In which the patches are tried: fp16, bf16, fp16_from_pretrained, fp32, tf32."),
    ] = None,
    attentions: Annotated[str | None, typer.Option("--attention", help="eager, sdpa, default.")] = None,
    compiled: Annotated[str | None, typer.Option("--compile", help="off, on: torch.compile.")] = None,
    workloads: Annotated[
        str | None, typer.Option(help="micro, block, encoder, decoder_step, forward, greedy, beam, evaluate, ...")
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option("--batch-size", help="Sentences per batch: 1,8,64.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of source and target, in tokens: 128/64,512/512.")] = None,
    text: Annotated[
        str | None, typer.Option(help="sentences: as they come, padded; full: each exactly that long.")
    ] = None,
    num_beams: Annotated[int | None, typer.Option(min=2, help="Of the workloads with beams.")] = None,
    patches: Annotated[str | None, typer.Option(help="Names; every patch without it.")] = None,
    shapley: Annotated[
        bool | None, typer.Option(help="Time every set of patches that fair shares need (free up to three patches).")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Held-out sentences to take results over; all without it.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=2, help="Rounds of timing per cell, at most.")] = None,
    min_rounds: Annotated[int | None, typer.Option(min=2, help="And at least.")] = None,
    width: Annotated[float | None, typer.Option(min=0, help="Of the 95% intervals, at which a cell is done.")] = None,
    time_budget: Annotated[float | None, typer.Option(min=0, help="Seconds for the timing of a cell.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of PyTorch on the CPU; one for the embedded model without it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Of all shuffling and resampling.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file for everything, as JSON.")] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="A file for each cell as it is finished; the same command goes on from there.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="A file for one self-contained page with pictures.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="A file for Markdown to paste into an issue.")] = None,
    figures: Annotated[Path | None, typer.Option(help="A directory for the pictures, as PNG and SVG.")] = None,
) -> None:
    """Measure what each patch buys and what it changes, each alone and together, beside the stock model.

    Options that name several things take them with commas; every combination is measured.
    """
    options = {name: value for name, value in locals().items() if name in Settings.__dataclass_fields__}
    settings = _settings(options)
    if html or figures:
        require("matplotlib", "report")
        require("jinja2", "report")
    check_outputs(json, jsonl, html, markdown, folder=figures)
    result = _run(settings, jsonl)
    _write(result, json, html, markdown, figures)
    if result["failures"]:
        for failure in result["failures"]:
            print(f"not measured: {failure}", file=sys.stderr)
        raise typer.Exit(1)


def _settings(options: dict[str, Any]) -> Settings:
    """The preset's settings, with the options that were given.

    Raises:
        T5FastPatchError: an option's text is not of its form.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, (option, parsed) in _lists().items():
        if name in given:
            given[name] = tuple(map(parsed, _listed(option, given[name])))
    if given.get("text", "full") not in ("full", "sentences"):
        raise T5FastPatchError(f"--text is sentences or full, not {given['text']!r}")
    settings = preset(given.pop("preset"), **given)
    if "min_rounds" in given and settings.min_rounds > settings.rounds:
        raise T5FastPatchError(f"--min-rounds {settings.min_rounds} is more than --rounds {settings.rounds}")
    return settings


def _lists() -> dict[str, tuple[str, Callable[[str], Any]]]:
    """By the setting's name, each option that names several things, and what makes one of them of its text."""
    return {
        "precisions": ("--dtype", str),
        "attentions": ("--attention", str),
        "compiled": ("--compile", _switch),
        "workloads": ("--workloads", str),
        "batch_sizes": ("--batch-size", _batch_size),
        "lengths": ("--lengths", _lengths),
        "patches": ("--patches", str),
    }


def _listed(option: str, text: str) -> list[str]:
    names = [each.strip() for each in text.split(",") if each.strip()]
    if not names:
        raise T5FastPatchError(f"{option} names nothing: leave it out, or say what")
    return names


def _batch_size(text: str) -> int:
    return _number(text, "--batch-size 1,8,64")


def _number(text: str, form: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise T5FastPatchError(f"{text!r} is no number from 1 to {MOST}: write {form}")
    return int(text)


def _lengths(text: str) -> tuple[int, int]:
    form = "--lengths 128/64,512/512"
    source, slash, target = text.partition("/")
    lengths = _number(source, form), _number(target if slash else source, form)
    if lengths[1] < 2:
        raise T5FastPatchError("a target has two tokens or more, the first to fill the cache of a decoder step")
    return lengths


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise T5FastPatchError(f"--compile is on, off or both with a comma, not {text!r}")
    return text == "on"


def _run(settings: Settings, jsonl: Path | None) -> dict[str, Any]:
    """Runs, and prints the tables."""
    # Imported here, so that the command's help needs no torch.
    from rich.console import Console

    from .loading import quiet
    from .measure.ablation import run
    from .measure.record import finite
    from .measure.store import Store
    from .reports.reading import shown
    from .reports.terminal import print_result

    quiet()
    store = None if jsonl is None else Store(jsonl)
    try:
        with _progress() as progress:
            result: dict[str, Any] = finite(run(settings, progress, store))
    except KeyboardInterrupt:
        kept = f": the same command goes on from {str(jsonl)!r}" if jsonl else ", and nothing kept: see --jsonl"
        raise T5FastPatchError(f"stopped{kept}") from None
    console = Console()
    print_result(shown(result), console if console.is_terminal else Console(width=WIDTH))
    return result


def _write(
    result: dict[str, Any], json: Path | None, html: Path | None, markdown: Path | None, figures: Path | None
) -> None:
    from .reports.reading import shown
    from .reports.writing import to_json, write_report

    if json is not None:
        write({json: to_json(result).encode()})
    write_report(shown(result), html=html, markdown=markdown, figures=figures)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar on stderr, or a line for each part of the work where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .measure.ablation import Progress as Told

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    def start(description: str, steps: int) -> Callable[[], None]:
        if not console.is_terminal:
            say(f"{description}: {steps} steps at most")
            return lambda: None
        bars.start()
        for task in bars.task_ids:
            bars.remove_task(task)
        task = bars.add_task(description, total=steps)
        return lambda: bars.advance(task)

    try:
        yield Told(say, start)
    finally:
        if console.is_terminal:
            bars.stop()
