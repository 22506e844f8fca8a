"""Takes, in one run of a few minutes, the figures that only a GPU can give: docs/gpu.md says which.

    python scripts/gpu_check.py [--budget 420] [--out FOLDER]
    python scripts/gpu_check.py --device cpu --small    # the same at toy size, to try it out

The most telling comes first. Each part is written as soon as it is there, one that fails does not end the others, and
what no time was left for is named at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table

from t5fastpatch import T5FastPatchError, list_patches, status
from t5fastpatch.loading import first_line, quiet
from t5fastpatch.measure.ablation import Progress, run
from t5fastpatch.measure.bench import Bench
from t5fastpatch.measure.cells import Cell
from t5fastpatch.measure.census import census
from t5fastpatch.measure.environment import environment
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.profiling.profiler import profile_call, profile_variants
from t5fastpatch.measure.profiling.report import Profiled, to_dict
from t5fastpatch.measure.record import to_json
from t5fastpatch.measure.settings import Settings
from t5fastpatch.measure.shapes import SHAPES, Shape
from t5fastpatch.measure.store import Store
from t5fastpatch.measure.subject import Subject, attention_of, subject_for
from t5fastpatch.measure.timing import Limits
from t5fastpatch.measure.variants import Variant, plan
from t5fastpatch.reports.formats import ratio
from t5fastpatch.reports.naming import describe, patched_row, stock_row
from t5fastpatch.reports.reading import read

ROOT = Path(__file__).parents[1]
SCHEMA = "t5fastpatch.gpu_check/1"
# No part is begun in the last of the time: the one before must end within it.
RESERVE = 0.08
TEST_SECONDS = 150.0
PROFILED_CALLS = 5

FP16, LOADED, BF16 = ((each.value,) for each in (Precision.FP16, Precision.FP16_LOADED, Precision.BF16))
ON_FP32 = (Precision.FP32.value, Precision.TF32.value)

_TOY = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
TOYS = {
    "toy": Shape("T5ForConditionalGeneration", "T5Config", _TOY),
    "toy-encoder": Shape("T5EncoderModel", "T5Config", {**_TOY, "feed_forward_proj": "gated-gelu"}),
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is measured, and how large it is.

    Attributes:
        models: shapes with a decoder; the first stands for all where one is enough.
        encoder: the shape of an encoder alone.
        batch_sizes: those beside 1.
        lengths: of source and target, in tokens; of the target as many are generated.
        limits: of the timing of a cell.
    """

    models: tuple[str, ...]
    encoder: str
    batch_sizes: tuple[int, ...]
    lengths: tuple[int, int]
    limits: Limits

    @property
    def shapes(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.models, self.encoder)


FULL = Scale(("t5-small", "t5-large"), "t5-xxl-encoder-8", (16, 64), (128, 8), Limits(20, 8, time_budget=1.5))
SMALL = Scale(("toy",), "toy-encoder", (2,), (8, 3), Limits(2, 2, time_budget=0.0))


class Budget:
    """Seconds, counted from now."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds * (1 - RESERVE)

    def is_left(self) -> bool:
        """Whether something may still be begun."""
        return time.monotonic() < self._ends


class Findings:
    """What was found, on disk after each part.

    Args:
        folder: for the files.
        shapes: those whose ablations are in the folder, a file of JSON lines each.
        about: what else the JSON begins with.
        only: parts with none of these in their names are passed over; without any, none is.
    """

    def __init__(self, folder: Path, shapes: tuple[str, ...], about: dict[str, Any], only: Sequence[str] = ()) -> None:
        self.folder = folder
        self.parts: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._shapes = shapes
        self._about = about
        self._only = only

    def add(self, name: str, part: Callable[[], Any]) -> None:
        """Runs a part. One that fails is noted down, and is no reason to end."""
        if not self.wants(name):
            return
        print(name, file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            outcome = {"found": part()}
        except Exception:
            outcome = {"error": traceback.format_exc()}
        self.parts.append({"part": name, "seconds": round(time.monotonic() - started, 2), **outcome})
        self.write()

    def wants(self, name: str) -> bool:
        """Whether a part of this name is asked for."""
        return not self._only or any(each in name for each in self._only)

    def lines_of(self, shape: str) -> Path:
        """The file of a shape's ablation."""
        return self.folder / f"{shape}.jsonl"

    def ablations(self) -> dict[str, Any]:
        """The ablation of each shape, as far as it has come."""
        return {shape: read(file) for shape in self._shapes if (file := self.lines_of(shape)).exists()}

    def write(self) -> None:
        """Writes everything as one JSON file; whoever is stopped meanwhile leaves the one before."""
        found = {"parts": self.parts, "left_out": self.left_out, "ablations": self.ablations()}
        unfinished = self.folder / "gpu_check.json.part"
        unfinished.write_text(to_json({**self._about, **found}, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.folder / "gpu_check.json")


def pieces(scale: Scale, device: torch.device) -> Iterator[Settings]:
    """The ablation in pieces, the most telling first."""
    limits = scale.limits
    settings = Settings(
        preset="gpu_check",
        device=str(device),
        precisions=FP16,
        batch_sizes=(*scale.batch_sizes, 1),
        lengths=(scale.lengths,),
        text="full",
        rounds=limits.rounds,
        min_rounds=limits.min_rounds,
        time_budget=limits.time_budget,
        counts=False,
    )
    calls = dict.fromkeys(scale.models, ("decoder_step", "encoder")) | {scale.encoder: ("forward",)}
    piece = functools.partial(dataclasses.replace, settings)
    for shape in scale.shapes:  # one batch size tells all about counts and profiles
        yield piece(shape=shape, workloads=calls[shape], batch_sizes=(1,), counts=True)
    for shape in scale.shapes:
        workloads = (*calls[shape], "micro", "results")
        yield piece(shape=shape, workloads=workloads, batch_sizes=scale.batch_sizes)
    for shape in scale.shapes:
        yield piece(shape=shape, workloads=(*calls[shape], "results"), precisions=LOADED)
    yield piece(shape=scale.models[0], workloads=("greedy",))
    for shape in scale.shapes:
        yield piece(shape=shape, workloads=(*calls[shape], "results"), precisions=BF16)
    yield piece(shape=scale.models[0], workloads=("encoder",), batch_sizes=scale.batch_sizes[:1], compiled=(True,))
    for shape in scale.models[1:]:
        yield piece(shape=shape, workloads=("greedy",))
    for shape in scale.shapes:
        yield piece(shape=shape, workloads=calls[shape], precisions=ON_FP32)
    for shape in scale.models:
        yield piece(shape=shape, workloads=("greedy",), precisions=(*LOADED, *BF16, *ON_FP32))


def name_of(piece: Settings) -> str:
    """A piece of the ablation in words."""
    batches = "/".join(map(str, sorted(piece.batch_sizes)))
    options = ", compiled" if piece.compiled == (True,) else ""
    return f"{piece.shape}: {', '.join(piece.workloads)}, {', '.join(piece.precisions)}, batch {batches}{options}"


def ablate(piece: Settings, findings: Findings, budget: Budget) -> str:
    """Measures the cells of a piece, as long as there is time.

    Raises:
        T5FastPatchError: some of them could not be measured.
    """

    def wanted(cell: Cell) -> bool:
        if not budget.is_left():
            findings.left_out.append(f"{piece.shape}: {cell}")
            return False
        return True

    result = run(piece, Progress(), Store(findings.lines_of(str(piece.shape))), wanted)
    if result["failures"]:
        raise T5FastPatchError("not measured:\n" + "\n".join(result["failures"]))
    return f"cells: {len(result['cells'])}"


def run_tests(folder: Path) -> str:
    """Runs the tests marked `gpu` in a process of their own, which writes tests.txt.

    Raises:
        T5FastPatchError: some failed.
    """
    if importlib.util.find_spec("pytest") is None:
        return "not run: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-v", "-rs", "--tb=short", "--durations=5"]
    output = folder / "tests.txt"
    with output.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=TEST_SECONDS,
            check=False,
        )
    text = output.read_text(encoding="utf-8")
    if done.returncode != 0:
        raise T5FastPatchError(f"pytest ended with {done.returncode}:\n{text[-6000:]}")
    return text.strip().splitlines()[-1]


def device_facts(device: torch.device) -> dict[str, Any]:
    """The environment and, of a GPU, its size, driver and clocks as they are now."""
    facts: dict[str, Any] = dict(environment(device))
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        facts["capability"] = f"{known.major}.{known.minor}"
        facts["memory"] = known.total_memory
        facts["multiprocessors"] = known.multi_processor_count
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        facts["nvidia_smi"] = (answer.stdout or answer.stderr).strip().splitlines()
    return facts


def scalars(device: torch.device) -> dict[str, Any]:
    """What `torch.where(condition, number, number)` launches, as upstream's clamp calls it: are its numbers fills?"""
    condition = torch.zeros((), dtype=torch.bool, device=device)

    def call() -> torch.Tensor:
        return torch.where(condition, 64504.0, 65504.0)

    profile = profile_call(lambda: call, device, calls=PROFILED_CALLS)
    fills = sum(kernel.calls for kernel in profile.kernels if "Fill" in kernel.name)
    return {"fills": fills, "census": census(call).to_dict(), "profile": profile.to_dict()}


def stock_and_all(subject: Subject) -> list[Variant]:
    """The stock model in fp16, and the one with every patch that goes together."""
    made = plan(status(subject.model(Precision.FP16)), list_patches(), Precision.FP16)
    return [made.of(frozenset()), max(made.measured, key=lambda variant: len(variant.patches))]


def profile(shape: str, scale: Scale, device: torch.device) -> dict[str, Any]:
    """One decoder step, stock beside patched: its ops, kernels, launches, waits and share of tensor cores."""
    subject = subject_for(None, shape, str(device))
    attention = attention_of(subject.fp32)
    cell = Cell("stack", "decoder_step", Precision.FP16.value, attention, False, 1, *scale.lengths, "full")
    variants = stock_and_all(subject)
    with torch.no_grad(), Bench(subject, cell) as bench:
        entries = {variant.name: bench.entry(variant) for variant in variants}
        profiles = profile_variants(entries, device, calls=PROFILED_CALLS)
        found = [Profiled(each.name, profiles[each.name], bench.census(each)) for each in variants]
    return {"model": shape, **dataclasses.asdict(cell), **to_dict(found)}


def check(scale: Scale, device: torch.device, budget: Budget, findings: Findings) -> None:
    """Everything, in the order of what it tells."""
    findings.add("device", lambda: device_facts(device))
    findings.add("tests", lambda: run_tests(findings.folder))
    findings.add("torch.where with numbers", lambda: scalars(device))
    for shape in scale.models:
        findings.add(f"profile of {shape}", lambda shape=shape: profile(shape, scale, device))
    for piece in pieces(scale, device):
        name = name_of(piece)
        if budget.is_left():
            findings.add(name, lambda piece=piece: ablate(piece, findings, budget))
        elif findings.wants(name):
            findings.left_out.append(name)
    findings.add("device afterwards", lambda: device_facts(device))
    findings.write()  # what was left out, too


def time_table(ablations: dict[str, Any]) -> Table:
    """Before and after, a row for each call and precision and a column for each batch size."""
    texts: dict[tuple[str, str], dict[int, str]] = {}
    for shape, result in ablations.items():
        for cell in result["cells"]:
            to_fp32, to_stock = stock_row(cell).get("to_fp32"), patched_row(cell).get("to_half")
            if cell["cell"]["level"] != "micro" and to_fp32 and to_stock:
                fields = ("workload", "precision", *(["compiled"] if cell["cell"]["compiled"] else []))
                row = texts.setdefault((shape, describe(cell, fields)), {})
                row[cell["cell"]["batch_size"]] = f"{to_fp32['median']:.2f}; {ratio(to_stock)}"
    sizes = sorted({size for row in texts.values() for size in row})
    table = Table("shape", "call", *(f"batch {size}" for size in sizes), title="Time: stock / fp32; patched / stock")
    for names, row in texts.items():
        table.add_row(*names, *(row.get(size, "-") for size in sizes))
    return table


def part_table(findings: Findings) -> Table:
    """How each part went."""
    table = Table("part", "seconds", "outcome", title="Parts")
    for part in findings.parts:
        table.add_row(part["part"], f"{part['seconds']:.1f}", outcome_of(part))
    return table


def outcome_of(part: dict[str, Any]) -> str:
    """What a part found, or why it failed, in short."""
    match part:
        case {"error": error}:
            return f"failed: {error.strip().splitlines()[-1]}"
        case {"found": str(text)}:
            return text
        case {"found": {"variants": variants}}:
            return "; ".join(f"{each['name']}: {profile_line(each['profile'])}" for each in variants)
        case {"found": {"fills": fills}}:
            return f"{fills:g} fills"
    return ""


def profile_line(profile: dict[str, Any]) -> str:
    """A profile in short."""
    ops, kernels = (sum(each["calls"] for each in profile[what]) for what in ("ops", "kernels"))
    share = profile["tensor_cores"]["seconds"]
    counts = f"{ops:g} ops, {kernels:g} kernels, {profile['launches']:g} launches, {profile['waits']:g} waits"
    return f"{counts}, {share:.0%} of the time on tensor cores"


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu to try the script out.")] = "cuda",
    budget: Annotated[float, typer.Option(min=0, help="Seconds, after which nothing more is begun.")] = 420.0,
    out: Annotated[Path, typer.Option(help="A folder for the files.")] = Path("gpu_check"),
    small: Annotated[bool, typer.Option("--small", help="Toy size.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only the parts with this in their names, tests or t5-large say; repeatable."),
    ] = None,
) -> None:
    """Runs the tests marked gpu, profiles, and the ablation of models with random weights."""
    left = Budget(budget)
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        print(f"no device {device!r} here ({first_line(error)}): try --device cpu --small", file=sys.stderr)
        raise typer.Exit(2) from None
    quiet()
    SHAPES.update(TOYS)
    scale = SMALL if small else FULL
    out.mkdir(parents=True, exist_ok=True)
    about = {"schema": SCHEMA, "budget": budget, "scale": dataclasses.asdict(scale)}
    findings = Findings(out, scale.shapes, about, only or ())
    check(scale, place, left, findings)
    console = Console(width=110)
    times = time_table(findings.ablations())
    if times.row_count:
        console.print(times)
    if not findings.parts:
        print(f"no part has {' or '.join(only or ())} in its name: see docs/gpu.md", file=sys.stderr)
        raise typer.Exit(2)
    console.print(part_table(findings))
    for each in findings.left_out:
        print(f"left out, there was no time: {each}")
    if any("error" in part for part in findings.parts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
