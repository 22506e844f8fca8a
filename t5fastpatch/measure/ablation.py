"""The ablation: what each patch buys, and what it changes, on one model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..engine import status
from ..registry import list_patches, select
from .bench import Bench
from .environment import environment
from .evaluation import Evaluation
from .extra import require
from .results import Ablation, Row, Timing
from .settings import Settings
from .subject import Subject, held_out, held_out_source, load, shuffled
from .timing import Samples, interleave, stopwatch_for
from .variants import STOCK_FP32, Variant, plan, stock_half

Start = Callable[[str, int], Callable[[], None]]
"""Begins a part of the work, by its description and number of steps, and gives what is to be called after each."""


def run(settings: Settings, start: Start = lambda description, steps: lambda: None) -> Ablation:
    """Runs an ablation: a census, times and results of every variant, with one fp32 and one half model in memory.

    Args:
        settings: what to run.
        start: tells of the progress.

    Raises:
        T5FastPatchError: a setting names a model, dtype, device or patch that is not there, the model is not T5, is
            patched already, or scipy or sacrebleu is missing.
    """
    with torch.no_grad(), _threads(settings):
        return _run(settings, start)


def _run(settings: Settings, start: Start) -> Ablation:
    for library in ("scipy.stats", "sacrebleu"):
        require(library)
    patches = list_patches() if settings.patches is None else select(settings.patches).patches
    subject = load(settings.model, settings.dtype, settings.device)
    variants = plan(status(subject.half), patches, subject.half_name)
    sentences = shuffled(held_out(settings.model), settings.seed)[: settings.samples]
    timed = sentences[: settings.batch_size]
    batch = subject.batch(timed, settings.max_source_length, settings.max_new_tokens)
    bench = Bench(subject, batch, settings.max_new_tokens)
    measured = [variant for variant in variants if variant.measured]

    counted = "decoder_step" if subject.seq2seq else "forward"
    censuses = {variant.name: bench.census(variant, counted) for variant in measured}
    samples = _time(bench, measured, subject, settings, start)
    evaluation = Evaluation(subject, bench, settings, measured)
    steps = -(-len(sentences) // settings.batch_size) * len(measured)
    qualities = evaluation.run(sentences, start("results", steps))

    def row(variant: Variant) -> Row:
        if not variant.measured:
            return Row(variant)
        timing = _timing(samples, variant, stock_half(subject.half_name), settings.seed)
        peak = evaluation.peak_memory(variant)
        return Row(variant, censuses[variant.name], timing, qualities[variant.name], peak)

    return Ablation(
        subject=subject.name,
        half_name=subject.half_name,
        counted=counted,
        rows=[row(variant) for variant in variants],
        batch_size=len(timed),
        rounds={workload: each.rounds for workload, each in samples.items()},
        sentences=len(sentences),
        sentences_from=held_out_source(settings.model),
        settings=settings,
        environment=environment(subject.device),
        failures=[f"{variant.name}: {variant.why}" for variant in variants if variant.refused],
    )


def _time(
    bench: Bench, variants: Sequence[Variant], subject: Subject, settings: Settings, start: Start
) -> dict[str, Samples]:
    """Times each workload, with an equal share of what is left of the budget."""
    samples = {}
    ends = time.monotonic() + settings.time_budget
    for done, workload in enumerate(bench.workloads):
        samples[workload] = interleave(
            {variant.name: bench.entry(variant, workload) for variant in variants},
            stopwatch_for(subject.device),
            rounds=settings.rounds,
            budget_s=(ends - time.monotonic()) / (len(bench.workloads) - done),
            seed=settings.seed,
            advance=start(f"time of {workload}", settings.rounds * len(variants)),
        )
    return samples


def _timing(samples: Mapping[str, Samples], variant: Variant, half: str, seed: int) -> dict[str, Timing]:
    return {
        workload: Timing(
            each.median(variant.name),
            each.ratio(variant.name, half, seed),
            each.ratio(variant.name, STOCK_FP32, seed),
        )
        for workload, each in samples.items()
    }


@contextlib.contextmanager
def _threads(settings: Settings) -> Iterator[None]:
    before = torch.get_num_threads()
    # The embedded model's products are too small to share out: more threads would mostly wait for each other.
    torch.set_num_threads(settings.threads or (1 if settings.model is None else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
