"""Measures how far half precision is from fp32 on models that overflow fp16, stock and patched.

    python scripts/numerics.py

writes docs/results/numerics.json and the tables of docs/numerics.md. Takes some minutes on a CPU and needs sacrebleu.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import transformers
import typer
from planted import ROOT, Batch, Planted
from rich.progress import track
from twin import overflow_twin

from t5fastpatch import patched
from t5fastpatch.headroom.data import observe
from t5fastpatch.headroom.places import Place
from t5fastpatch.measure.cells import Cell
from t5fastpatch.measure.environment import environment
from t5fastpatch.measure.evaluation import Evaluation
from t5fastpatch.measure.precision import Precision, in_precision
from t5fastpatch.measure.quality import Quality
from t5fastpatch.measure.subject import Subject, attention_of, load
from t5fastpatch.measure.variants import STOCK_FP32, Variant

RESULT = ROOT / "docs" / "results" / "numerics.json"
DOCUMENT = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- numerics: begin -->", "<!-- numerics: end -->"

BOTH = ("t5", "mt5", "umt5", "longt5-local", "longt5-global", "udop", "pop2piano")
KINDS: list[tuple[str, bool | None]] = [*itertools.product(BOTH, (False, True)), ("switch", None), ("pix2struct", None)]
DEPTHS_AND_PEAKS = ((2, 1e4), (2, 1e6), (8, 1e5), (8, 1e7), (24, 1e6))
# A model is shown other batches than those it is judged by.
SHOWN, JUDGED = 2, 3

SCALED_MODEL = Planted("t5", True, 8, 1e6)
POWERS = range(4, 23, 2)
TWIN_POWERS = (12, 13)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of running a model in half precision.

    Attributes:
        precision: of the weights; what `from_pretrained` gives, or a cast.
        patches: names of patches and presets; none for stock.
        shown: whether `apply` is given batches.
        rounded: whether only the weights are in this precision, and everything else in fp32.
    """

    precision: Precision
    patches: tuple[str, ...] = ()
    shown: bool = True
    rounded: bool = False

    def __str__(self) -> str:
        if self.rounded:
            return f"fp32 with weights rounded to {self.precision}"
        model = {Precision.FP16: "fp16 `.half()`", Precision.FP16_LOADED: "fp16 `from_pretrained`"}
        names = ", ".join("default" if name == "safe" else name for name in self.patches) or "stock"
        return f"{model.get(self.precision, self.precision.value)}, {names}{'' if self.shown else ', no batches'}"


HALF, LOADED, BF16 = Precision.FP16, Precision.FP16_LOADED, Precision.BF16
CLAMPED, FP32_WO, STOCK_BF16 = Way(HALF), Way(LOADED), Way(BF16)
FAST, ACCURATE, DEFAULT = Way(HALF, ("fast",)), Way(LOADED, ("accurate",)), Way(HALF, ("safe",))
WAYS = (
    CLAMPED,
    Way(HALF, ("skip_inf_check",)),
    FP32_WO,
    STOCK_BF16,
    FAST,
    Way(HALF, ("accurate",)),
    DEFAULT,
    Way(HALF, ("safe",), shown=False),
    Way(LOADED, ("fast",)),
    ACCURATE,
    Way(LOADED, ("safe",)),
    Way(HALF, rounded=True),
    Way(BF16, rounded=True),
)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Distances of logits from fp32's; errors in units of the standard deviation of these.

    Attributes:
        nonfinite: share of logits that are infinite or NaN; the other figures are of the rest, `None` if there is none.
        median, p99, largest, mean: of the absolute errors.
        cosine_min, cosine_mean: cosine between the logits of a position and fp32's.
        agreement: share of positions with fp32's largest logit.
    """

    nonfinite: float
    median: float | None = None
    p99: float | None = None
    largest: float | None = None
    mean: float | None = None
    cosine_min: float | None = None
    cosine_mean: float | None = None
    agreement: float | None = None


def figures(logits: torch.Tensor, reference: torch.Tensor) -> Figures:
    """Compares logits with those of fp32 (positions x vocabulary both)."""
    finite = logits.isfinite().all(-1)
    nonfinite = 1 - logits.isfinite().double().mean().item()
    if not finite.any():
        return Figures(nonfinite)
    mine, theirs = logits[finite].double(), reference[finite].double()
    errors = ((mine - theirs).abs() / reference.double().std()).flatten()
    cosine = torch.cosine_similarity(mine, theirs, -1)
    return Figures(
        nonfinite,
        errors.median().item(),
        errors.quantile(0.99).item(),
        errors.max().item(),
        errors.mean().item(),
        cosine.min().item(),
        cosine.mean().item(),
        (mine.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
    )


class Trial:
    """A planted model in every precision, and its fp32 logits."""

    def __init__(self, planted: Planted) -> None:
        self._fp32 = planted.build()
        self._shown, self._judged = planted.batches(SHOWN), planted.batches(JUDGED, first=SHOWN)
        self._models: dict[Precision, Any] = {}
        self._reference = self._logits(self._fp32, torch.float32)

    def peak(self) -> float:
        """The largest magnitude of a residual stream in fp32, over the batches that the model is judged by."""
        found = observe(self._fp32, self._judged).magnitudes
        return max(each.value for each in found if each.place is Place.STREAM)

    def run(self, way: Way, **options: Any) -> Figures:
        """What comes of one way; `options` are `apply`'s."""
        if way.precision not in self._models:
            self._models[way.precision] = in_precision(self._fp32, way.precision)
        model = self._models[way.precision]
        if way.rounded:
            return self._compare(copy.deepcopy(model).float(), torch.float32)
        if not way.patches:
            return self._compare(model, way.precision.dtype)
        options = {"batches": self._shown if way.shown else None, **options}
        with patched(model, way.patches, **options):
            return self._compare(model, way.precision.dtype)

    def _compare(self, model: Any, dtype: torch.dtype) -> Figures:
        return figures(self._logits(model, dtype), self._reference)

    @torch.no_grad()
    def _logits(self, model: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([model(**_in_dtype(batch, dtype))["logits"].flatten(0, 1) for batch in self._judged])


def _in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    # Udop counts cells of a bounding box, which rounding would move into other cells.
    cast = {name for name, value in batch.items() if value.is_floating_point()} - {"bbox"}
    return {name: value.to(dtype) if name in cast else value for name, value in batch.items()}


def over_scales(planted: Planted, powers: Iterable[int]) -> list[dict[str, float | None]]:
    """The mean error for scales of 2^-power, given as numbers, with the stream in fp16 and in fp32."""
    trial = Trial(planted)
    rows: list[dict[str, float | None]] = []
    for power in powers:
        row: dict[str, float | None] = {"power": power}
        for patch in ("residual_rescale", "residual_fp32"):
            row[patch] = trial.run(Way(HALF, (patch, "layer_norm")), scale=2.0**-power).mean
        rows.append(row)
    return rows


def of_twins(powers: Sequence[int], samples: int | None = None) -> dict[str, Quality]:
    """BLEU, length and loss of the embedded model and of its twins, in fp32 and in fp16, stock and patched."""
    ordinary = load(None, "cpu")
    found = {f"ordinary, {name}": each for name, each in _qualities(ordinary, [CLAMPED, STOCK_BF16], samples).items()}
    for power in powers:
        name = f"twin 2^{power}"
        twin = Subject(name, overflow_twin(ordinary.fp32, power), ordinary.tokenizer, ordinary.sentences)
        ways = [CLAMPED, FP32_WO, FAST, Way(HALF, ("accurate",)), DEFAULT] if power == powers[-1] else [CLAMPED]
        qualities = _qualities(twin, ways, samples)
        found |= {f"{name}, {each}": quality for each, quality in qualities.items()}
    return found


def _qualities(subject: Subject, ways: Iterable[Way], samples: int | None) -> dict[str, Quality]:
    """By the weights alone: the twin's bound is tight enough."""
    variants = [Variant(STOCK_FP32, Precision.FP32)] + [Variant(str(way), way.precision, way.patches) for way in ways]
    cell = Cell("results", "results", "fp16", attention_of(subject.fp32), False, 64, 64, 64, "sentences")
    with torch.no_grad():
        return Evaluation(subject, cell, variants).run(samples, lambda: None)


Row = tuple[Planted, float, Mapping[Way, Figures]]


def sound(rows: Sequence[Row]) -> list[Row]:
    """The models that stock with an fp32 `wo` brings nearer to fp32 than bf16 does: its overflows did no harm."""
    return [row for row in rows if any(value > 1 for value in quotients([row], STOCK_BF16, FP32_WO))]


def quotients(rows: Sequence[Row], of: Way, by: Way) -> list[float]:
    """The mean error of one way by another's, for each model where both are finite."""
    pairs = [(found[of], found[by]) for _, _, found in rows]
    return [a.mean / b.mean for a, b in pairs if not (a.nonfinite or b.nonfinite) and a.mean and b.mean]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def overall(rows: Sequence[Row]) -> str:
    """A row a way, over all models."""
    header = ["", "non-finite", "median", "99%", "largest", "mean", "cosine, least", "cosine, mean", "same token"]
    lines = []
    for way in WAYS:
        found = [each[way] for _, _, each in rows]
        known = [each for each in found if each.mean is not None]
        least = min((each.cosine_min for each in known if each.cosine_min is not None), default=None)
        most = max((each.largest for each in known if each.largest is not None), default=None)
        cells = [_mean(each.median for each in known), _mean(each.p99 for each in known), most]
        agreement = _mean(each.agreement for each in known)
        lines.append([
            str(way),
            _percent(statistics.fmean(each.nonfinite for each in found)),
            *map(_short, [*cells, _mean(each.mean for each in known)]),
            "-" if least is None else f"{least:.3f}",
            "-" if (cosine := _mean(each.cosine_mean for each in known)) is None else f"{cosine:.5f}",
            "-" if agreement is None else _percent(agreement),
        ])  # fmt: skip
    return _table(header, lines)


def grouped(rows: Sequence[Row], name: str, key: Callable[[Planted], str]) -> str:
    """A row a group of models: mean errors, how many models are not finite, and the two quotients."""
    header = [name, "models", "clamp", "fp32 `wo`", "bf16", "`fast`", "`accurate`", "bf16 / `fast`, least"]
    header.append("`accurate` / fp32 `wo`, mean and most")
    lines = []
    for group in dict.fromkeys(key(planted) for planted, _, _ in sorted(rows, key=lambda row: row[0].peak)):
        mine = [row for row in rows if key(row[0]) == group]
        gain, loss = quotients(mine, STOCK_BF16, FAST), quotients(sound(mine), ACCURATE, FP32_WO)
        lines.append([
            group,
            str(len(mine)),
            *(_error([found[way] for _, _, found in mine]) for way in (CLAMPED, FP32_WO, STOCK_BF16, FAST, ACCURATE)),
            f"{min(gain):.1f}" if gain else "-",
            f"{statistics.geometric_mean(loss):.2f}, {max(loss):.2f}" if loss else "-",
        ])  # fmt: skip
    return _table(header, lines)


def _error(found: Sequence[Figures]) -> str:
    """The mean error where it is finite, and how many models are not."""
    broken = sum(each.nonfinite > 0 for each in found)
    finite = _mean(each.mean for each in found if not each.nonfinite)
    return _short(finite) + (f" ({broken} not finite)" if broken else "")


def scales_table(rows: Sequence[Mapping[str, float | None]]) -> str:
    lines = [
        [f"2^-{row['power']}", _short(row["residual_rescale"]), _short(row["residual_fp32"])] for row in rows
    ]  # fmt: skip
    return _table(["scale", "`residual_rescale`", "`residual_fp32`"], lines)


def twins_table(found: Mapping[str, Quality]) -> str:
    header = ["", "BLEU", "gen_len", "loss", "tokens as in fp32", "non-finite logits"]
    lines = []
    for name, each in found.items():
        assert each.bleu is not None
        assert each.agreement is not None
        lines.append([
            name, f"{each.bleu:.2f}", f"{each.gen_len:.2f}", f"{each.loss:.4f}", _percent(each.agreement),
            str(each.nonfinite),
        ])  # fmt: skip
    return _table(header, lines)


def report(rows: Sequence[Row], scales: Sequence[Mapping[str, float | None]], twins: Mapping[str, Quality]) -> str:
    """What the document gets."""
    family = lambda each: each.kind + {True: ", gated", False: ", ReLU", None: ""}[each.gated]  # noqa: E731
    fast, accurate = quotients(rows, STOCK_BF16, FAST), quotients(sound(rows), ACCURATE, FP32_WO)
    peaks = [peak for _, peak, _ in rows]
    summary = (
        f"Over {len(rows)} models, with peaks of {min(peaks):.2g} to {max(peaks):.2g}: bf16's mean error is "
        f"{min(fast):.1f} to {max(fast):.1f} times that of `fast` (geometric mean "
        f"{statistics.geometric_mean(fast):.1f}). Over the {len(accurate)} of them that stock with an fp32 `wo` brings "
        f"nearer to fp32 than bf16 does, the mean error of `accurate` is "
        f"{statistics.geometric_mean(accurate):.2f} times as large as its (geometric mean; at most "
        f"{max(accurate):.2f})."
    )
    parts = [
        summary,
        overall(rows),
        grouped(rows, "peak", lambda each: f"{each.peak:.0e}"),
        grouped(rows, "blocks in a stack", lambda each: str(each.depth)),
        grouped(rows, "family", family),
        "Mean error by scale, t5 gated, 8 blocks, peak 1e6:",
        scales_table(scales),
        "The embedded model and its overflow twins:",
        twins_table(twins),
    ]
    return "\n\n".join(parts)


def write(text: str) -> None:
    before, rest = DOCUMENT.read_text().split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def as_json(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for planted, peak, found in rows:
        ways = {str(way): dataclasses.asdict(each) for way, each in found.items()}
        yield {**dataclasses.asdict(planted), "observed_peak": peak, "ways": ways}


def main(threads: Annotated[int, typer.Option(min=1)] = 1) -> None:
    torch.set_num_threads(threads)
    began = time.monotonic()
    rows: list[Row] = []
    transformers.utils.logging.disable_progress_bar()
    for kind, size in track([*itertools.product(KINDS, DEPTHS_AND_PEAKS)], "models"):
        planted = Planted(*kind, *size)
        trial = Trial(planted)
        rows.append((planted, trial.peak(), {way: trial.run(way) for way in WAYS}))
    scales, twins = over_scales(SCALED_MODEL, POWERS), of_twins(TWIN_POWERS)
    document = {
        "environment": environment(torch.device("cpu")),
        "seconds": round(time.monotonic() - began),
        "models": list(as_json(rows)),
        "scales": scales,
        "twins": {name: dataclasses.asdict(each) for name, each in twins.items()},
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    write(report(rows, scales, twins))


if __name__ == "__main__":
    typer.run(main)
