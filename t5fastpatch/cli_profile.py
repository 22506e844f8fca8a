"""The command `profile`: options and output; the work is in measure/profile.py and its neighbours."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import NotFoundError, NothingToPatchError, T5FastPatchError
from .measure.settings import Settings

if TYPE_CHECKING:
    from .measure.profile_report import Profiled
    from .measure.subject import Subject
    from .measure.variants import Variant

WIDTH = 110
ALL, STOCK, FP32, NONE = "all", "stock", "fp32", "none"


@dataclasses.dataclass(frozen=True)
class _How:
    """How each variant is profiled."""

    workload: str
    calls: int
    host: bool
    trace: Path | None


def profile(
    model: Annotated[
        str | None, typer.Option(help="A model's directory, or its name on the hub; the embedded model without it.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Which half precision: float16 (fp16, half) or bfloat16 (bf16).")
    ] = Settings.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = Settings.device,
    workload: Annotated[str, typer.Option(help="forward, encoder, decoder_step or generate.")] = "decoder_step",
    patches: Annotated[
        str, typer.Option(help="Names, with commas; 'all' that apply; 'stock' or 'fp32' for none of them.")
    ] = ALL,
    against: Annotated[str, typer.Option(help="What to put beside it, as for --patches; 'none' for nothing.")] = STOCK,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences per batch.")] = Settings.batch_size,
    max_source_length: Annotated[int, typer.Option(min=1, help="Longest source, in tokens.")] = (
        Settings.max_source_length
    ),
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest reference and generation, in tokens.")] = (
        Settings.max_new_tokens
    ),
    calls: Annotated[int, typer.Option(min=1, help="How often the workload is called.")] = 20,
    top: Annotated[int, typer.Option(min=1, help="Rows per table, or per part of one.")] = 12,
    host: Annotated[bool, typer.Option("--host", help="Profile the host's Python functions too, by cProfile.")] = False,
    trace: Annotated[Path | None, typer.Option(help="A directory for a Chrome trace of each variant.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file to write everything to, as JSON.")] = None,
) -> None:
    """Show where the time of one call goes, and what patches change in it, op by op."""
    for path in (trace, json):
        if path is not None and not path.parent.is_dir():
            raise T5FastPatchError(f"cannot write {str(path)!r}: there is no directory {str(path.parent)!r}")
    settings = Settings(
        model=model,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        max_source_length=max_source_length,
        max_new_tokens=max_new_tokens,
    )
    names = [patches] if against == NONE else [against, patches]
    _run(settings, names, _How(workload, calls, host, trace), top, json)


def _run(settings: Settings, names: Sequence[str], how: _How, top: int, json: Path | None) -> None:
    # Imported here, so that the command's help needs no torch.
    import torch
    import transformers
    from rich.console import Console

    from .measure.environment import environment
    from .measure.profile_report import print_report, to_dict

    transformers.utils.logging.set_verbosity_error()
    # Where the hub cannot be reached it would announce each try.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with contextlib.suppress(AttributeError):
        transformers.utils.logging.disable_progress_bar()
    variants = _profiled(settings, names, how)
    about = {
        "model": settings.model or "the embedded model",
        "workload": how.workload,
        "batch_size": settings.batch_size,
        "max_source_length": settings.max_source_length,
        "max_new_tokens": settings.max_new_tokens,
        "environment": environment(torch.device(settings.device)),
    }
    console = Console()
    print_report(variants, about, top, console if console.is_terminal else Console(width=WIDTH))
    if json is not None:
        json.write_text(json_.dumps({**about, **to_dict(variants)}, indent=2) + "\n", encoding="utf-8")


def _profiled(settings: Settings, names: Sequence[str], how: _How) -> list[Profiled]:
    """Loads the model and profiles the variants of these names."""
    from .measure.bench import Bench
    from .measure.census import census
    from .measure.host_profile import host_profiles
    from .measure.profile_report import Profiled
    from .measure.profiler import profile_variants, write_trace
    from .measure.subject import held_out, load, shuffled

    subject = load(settings.model, settings.dtype, settings.device)
    sentences = shuffled(held_out(settings.model), settings.seed)[: settings.batch_size]
    batch = subject.batch(sentences, settings.max_source_length, settings.max_new_tokens)
    bench = Bench(subject, batch, settings.max_new_tokens)
    if how.workload not in bench.workloads:
        raise NotFoundError(f"this model has no workload {how.workload!r}: there are {', '.join(bench.workloads)}")
    if len(set(names)) < len(names):
        raise T5FastPatchError(f"{names[0]} stands beside itself: name something else with --patches or --against")
    variants = {
        variant.name: bench.entry(variant, how.workload) for variant in (_variant(name, subject) for name in names)
    }
    profiles = profile_variants(variants, subject.device, calls=how.calls)
    hosts = host_profiles(variants, calls=how.calls) if how.host else {}
    profiled = []
    for name, entry in variants.items():
        with entry() as prepare:
            if how.trace is not None:
                write_trace(prepare, subject.device, _trace_file(how.trace, how.workload, name))
            sites = census(prepare()).sync_sites
        profiled.append(Profiled(name, profiles[name], sites, hosts.get(name)))
    return profiled


def _variant(name: str, subject: Subject) -> Variant:
    """The variant that an option names: `stock`, `fp32`, `all` or patches."""
    from .engine import status
    from .measure.variants import STOCK_FP32, Variant, plan, stock_half
    from .registry import list_patches, select

    if name == FP32:
        return Variant(STOCK_FP32)
    if name == STOCK:
        return Variant(stock_half(subject.half_name))
    if name == ALL:
        # The largest set; a preset would leave out what is unsafe alone.
        rows = plan(status(subject.half), list_patches(), subject.half_name)
        patches = max(rows, key=lambda row: len(row.patches)).patches
        if not patches:
            raise NothingToPatchError("no patch applies to this model: profile it with --patches stock --against none")
    else:
        patches = tuple(patch.name for patch in select(name).patches)
    return Variant(" + ".join(patches), patches)


def _trace_file(folder: Path, workload: str, variant: str) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / f"{workload}-{variant.replace(' ', '')}.json"
