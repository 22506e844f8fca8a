"""The command `ablate`: options, progress and output; the work is in measure/ablation.py."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from .errors import T5FastPatchError
from .measure.settings import Settings

WIDTH = 110


def ablate(
    model: Annotated[
        str | None, typer.Option(help="A model's directory, or its name on the hub; the embedded model without it.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Which half precision: float16 (fp16, half) or bfloat16 (bf16).")
    ] = Settings.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = Settings.device,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences per batch.")] = Settings.batch_size,
    max_source_length: Annotated[int, typer.Option(min=1, help="Longest source, in tokens.")] = (
        Settings.max_source_length
    ),
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Longest generation and reference, in tokens; timed generations are as long.")
    ] = Settings.max_new_tokens,
    patches: Annotated[str | None, typer.Option(help="Names, with commas; every patch without it.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file to write everything to, as JSON.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of timing per workload, at most.")] = Settings.rounds,
    time_budget: Annotated[float, typer.Option(min=0, help="Seconds for the timing, as a rule.")] = (
        Settings.time_budget
    ),
    samples: Annotated[
        int | None, typer.Option(min=1, help="Held-out sentences to take results over; all without it.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of PyTorch on the CPU; one for the embedded model without it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all shuffling and resampling.")] = Settings.seed,
) -> None:
    """Measure what each patch buys and what it changes, each alone and together, beside the stock model."""
    if json is not None and not json.parent.is_dir():
        raise T5FastPatchError(f"cannot write {str(json)!r}: there is no directory {str(json.parent)!r}")
    settings = Settings(
        model=model,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        max_source_length=max_source_length,
        max_new_tokens=max_new_tokens,
        patches=None if patches is None else tuple(name.strip() for name in patches.split(",") if name.strip()),
        samples=samples,
        rounds=rounds,
        time_budget=time_budget,
        threads=threads,
        seed=seed,
    )
    if not _run(settings, json):
        raise typer.Exit(1)


def _run(settings: Settings, json: Path | None) -> bool:
    """Runs, prints and writes; gives whether everything that should have been measured was."""
    # Imported here, so that the command's help needs no torch.
    import transformers
    from rich.console import Console

    from .measure.ablation import run
    from .measure.report import print_report, to_json

    transformers.utils.logging.set_verbosity_error()
    # Where the hub cannot be reached it would announce each try.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with contextlib.suppress(AttributeError):
        transformers.utils.logging.disable_progress_bar()
    with _progress() as start:
        ablation = run(settings, start)
    console = Console()
    print_report(ablation, console if console.is_terminal else Console(width=WIDTH))
    if json is not None:
        json.write_text(to_json(ablation), encoding="utf-8")
    for failure in ablation.failures:
        print(f"not measured: {failure}", file=sys.stderr)
    return not ablation.failures


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """A progress bar on stderr, or a line for each part of the work where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)

    def start(description: str, steps: int) -> Callable[[], None]:
        if not console.is_terminal:
            print(f"{description}: {steps} steps at most", file=sys.stderr)
            return lambda: None
        progress.start()
        task = progress.add_task(description, total=steps)
        return lambda: progress.advance(task)

    try:
        yield start
    finally:
        if console.is_terminal:
            progress.stop()
