"""Fine-tunes the embedded model with patches and without, from the same seed, and says how far the loss curves differ.

    python scripts/train_beside_stock.py

takes 200 steps in fp32, in bf16 and in fp16 autocast, on the model's own held-out sentences, and writes
docs/results/training.json and the table in docs/training.md: about an hour on one core of a CPU, most of it in fp16.
`--steps` and `--out` are for trying it out.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
import transformers
import typer
from torch import nn

import t5fastpatch
from t5fastpatch.headroom.scaling import CHECKED
from t5fastpatch.headroom.stacks import stacks_of
from t5fastpatch.headroom.weights import bound
from t5fastpatch.measure.subject import Batch, Subject, batches, load
from t5fastpatch.measure.workloads import IGNORED_LABEL

DOCS = Path(__file__).parents[1] / "docs"
STEPS, BATCH_SIZE, LONGEST = 200, 4, 32
LEARNING_RATE = 3e-4
SCALE = 2.0**-5
# Gradients of the stream are 1/SCALE as large: this loss scale suits them as they suit stock's 2^16.
LOSS_SCALE = 2.0**10
# The twin's stream is this much larger: past fp16's range.
TWIN = 2.0**13
BOUND_EVERY = 50


@dataclasses.dataclass(frozen=True)
class Run:
    """One fine-tuning.

    Attributes:
        dtype: float32; bfloat16, of the weights too; or float16, by autocast over fp32 weights.
        patches: names of patches and presets; none for stock.
        seed: of the dropout; the order of the batches is always the same.
        twin: whether the stream is scaled up, past fp16's range.
    """

    dtype: torch.dtype
    patches: tuple[str, ...] = ()
    seed: int = 0
    loss_scale: float = LOSS_SCALE
    twin: bool = False

    @property
    def name(self) -> str:
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16 autocast"}[self.dtype]
        details = ["twin"] * self.twin + [f"seed {self.seed}"] * bool(self.seed)
        details += [f"loss scale {self.loss_scale:g}"] * (self.loss_scale != LOSS_SCALE)
        return ", ".join([f"{precision}, {', '.join(self.patches) or 'stock'}", *details])


@dataclasses.dataclass
class Course:
    """What happened in a run.

    Attributes:
        losses: of each step, from logits in fp32.
        non_finite: steps with an infinite or NaN gradient, which the loss scaler skips.
        bounds: the largest magnitude that the weights allow at a place that could overflow, by step.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    non_finite: int = 0
    bounds: dict[int, float] = dataclasses.field(default_factory=dict)

    def distance(self, other: Course) -> float:
        """The root mean square of the losses' differences, step by step; NaN where a loss is none."""
        pairs = list(zip(self.losses, other.losses, strict=True))
        return math.sqrt(sum((mine - yours) ** 2 for mine, yours in pairs) / len(pairs))

    def last(self, steps: int = 20) -> float:
        """The mean loss of the last steps."""
        chosen = self.losses[-steps:]
        return sum(chosen) / len(chosen)


def training_batches(subject: Subject, size: int = BATCH_SIZE, longest: int = LONGEST) -> list[Batch]:
    """All sentences in batches, in an order that is the same for all runs."""
    found = [subject.batch(each, longest, longest) for each in batches(subject.sentences, size)]
    random.Random(0).shuffle(found)
    return found


def scale_up(model: Any, factor: float) -> None:
    """Scales the residual stream up by a power of two: the same function as before, but for the norms' epsilon."""
    with torch.no_grad():
        model.lm_head.weight = nn.Parameter(model.shared.weight.clone())
        model.shared.weight.mul_(factor)
        for name, parameter in model.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                parameter.mul_(factor)


def largest_bound(model: nn.Module) -> float:
    """The largest magnitude that the weights allow at a place that could overflow."""
    found = bound(model, stacks_of(model)).magnitudes
    return max(each.value for each in found if each.place in CHECKED)


def train(fp32: Any, run: Run, given: Sequence[Batch], steps: int, bound_every: int = 0) -> Course:
    """Fine-tunes a copy of the model with AdamW; computes the bound every so many steps, or never."""
    model, half = copy.deepcopy(fp32).train(), run.dtype is torch.float16
    if run.twin:
        scale_up(model, TWIN)
    if not half:
        model.to(run.dtype)
    if run.patches:
        t5fastpatch.apply(model, run.patches, scale=SCALE / TWIN if run.twin else SCALE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=run.loss_scale, enabled=half)
    course = Course()
    torch.manual_seed(run.seed)
    for step in range(steps):
        if bound_every and step % bound_every == 0:
            course.bounds[step] = largest_bound(model)
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = loss_of(model, given[step % len(given)])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        course.losses.append(loss.item())
        course.non_finite += not gradients_are_finite(model)
        scaler.step(optimizer)
        scaler.update()
    if bound_every:
        course.bounds[steps] = largest_bound(model)
    return course


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The cross entropy, of logits in fp32: in bf16 it would have three digits."""
    logits = model(**batch).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)


def gradients_are_finite(model: nn.Module) -> bool:
    return all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)


RESCALE, WIDE, FAST = ("residual_rescale",), ("residual_fp32",), ("fast",)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RUNS = [
    *(Run(FP32, seed=seed) for seed in (0, 1)),
    Run(FP32, RESCALE),
    *(Run(dtype, seed=seed) for dtype in (BF16, FP16) for seed in (0, 1)),
    *(Run(dtype, patches) for dtype in (BF16, FP16) for patches in (RESCALE, WIDE, FAST)),
    Run(FP16, RESCALE, loss_scale=2.0**16),
    Run(FP16, twin=True),
    Run(FP16, RESCALE, twin=True),
]


def row(run: Run, courses: dict[Run, Course]) -> dict[str, Any]:
    """A run's figures, beside stock of its precision and seed 0."""
    course, stock = courses[run], courses[Run(run.dtype)]
    return {
        "run": run.name,
        "patches": list(run.patches),
        "loss_first_20": round(sum(course.losses[:20]) / len(course.losses[:20]), 4),
        "loss_last_20": round(course.last(), 4),
        "distance_to_stock": round(course.distance(stock), 5),
        "distance_to_fp32": round(course.distance(courses[Run(FP32)]), 5),
        "steps_with_non_finite_gradient": course.non_finite,
        "largest_bound": {step: float(f"{value:.4g}") for step, value in course.bounds.items()},
        "losses": [round(loss, 5) for loss in course.losses],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| run | mean loss, first 20 steps | last 20 | distance to stock | to fp32 stock | steps with a non-finite "
        "gradient |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        figures = [f"{each['loss_first_20']:.3f}", f"{each['loss_last_20']:.3f}"]
        figures += [f"{each[name]:.4f}" for name in ("distance_to_stock", "distance_to_fp32")]
        lines.append(" | ".join([f"| {each['run']}", *figures, f"{each['steps_with_non_finite_gradient']} |"]))
    return "\n".join(lines)


def write_table(text: str, path: Path) -> None:
    """Puts the table between its marks."""
    begin, end = "<!-- training: begin -->", "<!-- training: end -->"
    before, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main(
    steps: Annotated[int, typer.Option(help="Of each run.", min=1)] = STEPS,
    out: Annotated[Path | None, typer.Option(help="Another file for the figures; docs/training.md then stays.")] = None,
) -> None:
    """Trains beside stock and writes the figures."""
    subject = load(None, "cpu")
    given = training_batches(subject)
    courses: dict[Run, Course] = {}
    for run in RUNS:
        courses[run] = train(subject.fp32, run, given, steps, BOUND_EVERY)
        typer.echo(f"{run.name}: {courses[run].last():.4f}")
    rows = [row(run, courses) for run in RUNS]
    document = {
        "what": "the embedded model fine-tuned on its held-out sentences, on a CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": steps,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "scale": SCALE,
        "twin": TWIN,
        "runs": rows,
    }
    (out or DOCS / "results" / "training.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if out is None:
        write_table(table(rows), DOCS / "training.md")
    typer.echo(table(rows))


if __name__ == "__main__":
    typer.run(main)
