"""The command `profile`: options and output; the work is in measure/profiling/profile.py and its neighbours."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import NotFoundError, NotT5Error, T5FastPatchError
from .files import check_outputs, write

if TYPE_CHECKING:
    from .measure.cells import Cell
    from .measure.precision import Precision
    from .measure.profiling.report import Profiled
    from .measure.settings import Settings
    from .measure.subject import Subject
    from .measure.variants import Variant

WIDTH = 110
ALL, STOCK, FP32, NONE = "all", "stock", "fp32", "none"


@dataclasses.dataclass(frozen=True)
class _How:
    """How each variant is profiled."""

    calls: int
    host: bool
    trace: Path | None


def profile(
    model: Annotated[
        str | None, typer.Option(help="A model's directory, or its name on the hub; the embedded model without it.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model, the shape of one with random weights: t5-small, bert, ...")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp16_from_pretrained, fp32.")] = "fp16",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    attention: Annotated[str, typer.Option(help="eager, sdpa, or default: what the release takes.")] = "default",
    workload: Annotated[
        str, typer.Option(help="block, encoder, decoder_step, forward, greedy, beam, greedy_free or beam_free.")
    ] = "decoder_step",
    patches: Annotated[
        str, typer.Option(help="Names of patches or presets, with commas; 'stock' or 'fp32' for none.")
    ] = ALL,
    against: Annotated[str, typer.Option(help="What to put beside it, as for --patches; 'none' for nothing.")] = STOCK,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences per batch.")] = 8,
    source_length: Annotated[int, typer.Option(min=1, help="Longest source, in tokens.")] = 128,
    target_length: Annotated[int, typer.Option(min=2, help="Longest reference and generation, in tokens.")] = 64,
    calls: Annotated[int, typer.Option(min=1, help="How often the workload is called.")] = 20,
    top: Annotated[int, typer.Option(min=1, help="Rows per table, or per part of one.")] = 12,
    host: Annotated[bool, typer.Option("--host", help="Profile the host's Python functions too, by cProfile.")] = False,
    trace: Annotated[Path | None, typer.Option(help="A directory for a Chrome trace of each variant.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file to write everything to, as JSON.")] = None,
) -> None:
    """Show where the time of one call goes, and what patches change in it, op by op."""
    check_outputs(json, folder=trace)
    # Imported here, so that the command's help needs no torch.
    from .headroom.steady import steady_weights
    from .loading import quiet
    from .measure.precision import precision_of
    from .measure.settings import Settings
    from .measure.subject import subject_for

    quiet()
    precision = precision_of(dtype)
    subject = subject_for(model, shape, device)
    settings = Settings(
        precisions=(dtype,),
        attentions=(attention,),
        workloads=(workload,),
        batch_sizes=(batch_size,),
        lengths=((source_length, target_length),),
        text="sentences" if subject.sentences else "full",
    )
    cell = _cell(subject, settings)
    if patches == ALL and not _put_on(subject, precision, ALL):
        print("nothing to patch in this model: it is profiled as it is", file=sys.stderr)
        patches, against = STOCK, NONE if against == STOCK else against
    names = [patches] if against == NONE else [against, patches]
    with steady_weights():
        variants = _profiled(
            subject, cell, [_variant(name, subject, precision) for name in names], _How(calls, host, trace)
        )
    _report(subject, cell, variants, top, json)


def _cell(subject: Subject, settings: Settings) -> Cell:
    """The one cell of the settings, of a stock model.

    Raises:
        T5FastPatchError: there is no such workload, or none for this model and device; a patch is on already.
    """
    from .engine import status
    from .measure.cells import LEVELS, grid
    from .measure.variants import check_stock

    (workload,), (precision,) = settings.workloads, settings.precisions
    if workload not in (known := (*LEVELS["stack"], *LEVELS["generate"])):
        raise NotFoundError(f"no workload is called {workload!r}: there are {', '.join(known)}")
    with contextlib.suppress(NotT5Error):
        check_stock(status(subject.fp32))
    cells = grid(settings, subject, ())
    if not cells:
        raise NotFoundError(f"{subject.name} on {subject.device} has no {workload} in {precision}")
    return cells[0]


def _report(subject: Subject, cell: Cell, variants: Sequence[Profiled], top: int, json: Path | None) -> None:
    from rich.console import Console

    from .measure.environment import environment
    from .measure.profiling.report import print_report, to_dict

    about = {"model": subject.name, **dataclasses.asdict(cell), "environment": environment(subject.device)}
    console = Console()
    print_report(variants, about, top, console if console.is_terminal else Console(width=WIDTH))
    if json is not None:
        write({json: (json_.dumps({**about, **to_dict(variants)}, indent=2) + "\n").encode()})


def _profiled(subject: Subject, cell: Cell, variants: Sequence[Variant], how: _How) -> list[Profiled]:
    """Profiles the variants, one call of each in turn."""
    import torch

    from .measure.bench import Bench
    from .measure.profiling.host_profile import host_profiles
    from .measure.profiling.profiler import profile_variants, write_trace
    from .measure.profiling.report import Profiled

    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise T5FastPatchError(f"{names[0]} stands beside itself: name something else with --patches or --against")
    with torch.no_grad(), Bench(subject, cell) as bench:
        entries = {variant.name: bench.entry(variant) for variant in variants}
        profiles = profile_variants(entries, subject.device, calls=how.calls)
        hosts = host_profiles(entries, calls=how.calls) if how.host else {}
        for name, entry in entries.items():
            if how.trace is not None:
                with entry() as prepare:
                    write_trace(prepare, subject.device, _trace_file(how.trace, cell.workload, name))
        return [Profiled(each.name, profiles[each.name], bench.census(each), hosts.get(each.name)) for each in variants]


def _variant(name: str, subject: Subject, precision: Precision) -> Variant:
    """The variant that an option names: `stock`, `fp32`, or what `apply` takes."""
    from .measure.precision import Precision
    from .measure.variants import STOCK_FP32, Variant, stock
    from .registry import names_of, select

    if name == FP32:
        return Variant(STOCK_FP32, Precision.FP32)
    if name == STOCK:
        return Variant(stock(precision), precision)
    if not select(name).patches:
        raise T5FastPatchError(f"{name!r} names no patch: {STOCK!r} stands for none")
    on = _put_on(subject, precision, name)
    if not on:
        raise T5FastPatchError(f"{name} changes nothing in this model: {STOCK!r} stands for that")
    return Variant(" + ".join(on), precision, tuple(names_of(name)))


def _put_on(subject: Subject, precision: Precision, name: str) -> list[str]:
    """The patches that are on when these names are applied; none where the model is no T5."""
    from .engine import patched
    from .patch import State

    try:
        with patched(subject.model(precision), name) as report:
            return [row.patch for row in report.rows if row.state is State.ON]
    except NotT5Error:
        return []


def _trace_file(folder: Path, workload: str, variant: str) -> Path:
    return folder / f"{workload}-{variant.replace(' ', '')}.json"
