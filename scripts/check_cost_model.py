"""Compares the cost model's predictions with what was published of t5-small in 2021, and says how far off they are.

    python scripts/check_cost_model.py

counts with the transformers that is installed and adds to docs/results/cost_model.json what it predicts under that
release; 4.26 is the one that still synchronises as those of 2021 did. Takes about a minute and no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from t5fastpatch import patched
from t5fastpatch.measure.census import Work, census
from t5fastpatch.measure.census.fake import shapes_only, without_data
from t5fastpatch.measure.cost.devices import DEVICES
from t5fastpatch.measure.cost.model import ASSUMED, Costs, Prediction, predict
from t5fastpatch.measure.workloads import decoder_step, forward, generate

RESULT = Path(__file__).parents[1] / "docs" / "results" / "cost_model.json"
SOURCE_LENGTH, TARGET_LENGTH = 12, 128
# Of one generation: enough that its beginning does not count, few enough for a CPU.
COUNTED_TOKENS = 32
# The range that the launch of an operation is assumed to be in.
OPERATION_COSTS = (5e-6, 10e-6)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published speed of fp16 as a ratio to fp32: samples per second, so above 1 is faster."""

    what: str
    device: str
    batch_size: int
    checks: bool
    ratio: float


EVALUATIONS = [
    Published("evaluation, first report", "RTX 3090", 8, True, 0.77),
    Published("evaluation, a month later", "RTX 3090", 8, True, 0.81),
    Published("evaluation, checks removed", "RTX 3090", 8, False, 1.04),
]
# Published as percent of time that fp16 takes more: 26 to 27, 15 and 13.
STEPS = [
    Published("decoder step", device, batch_size, True, round(1 / time, 3))
    for device in ("RTX 3090", "RTX 2080 Ti")
    for batch_size, time in ((16, 1.265), (64, 1.15), (128, 1.13))
]


def t5_small() -> Any:
    """A model of t5-small's shape, with random weights."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def batch(size: int, target_length: int) -> dict[str, torch.Tensor]:
    """A batch without padding."""
    source = torch.full((size, SOURCE_LENGTH), 5)
    labels = torch.full((size, target_length), 5)
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}


def evaluation(row: Published) -> tuple[Work, Work]:
    """In fp32 and fp16, one batch of an evaluation with `predict_with_generate`: a generation, a forward for the loss.

    Really run, since how a generation goes on depends on its tokens.
    """
    model, inputs = t5_small(), batch(row.batch_size, TARGET_LENGTH)

    def count() -> Work:
        calls = (generate(model, inputs, COUNTED_TOKENS), forward(model, inputs))
        return sum((census(call.prepare(), model) for call in calls), Work())

    fp32 = count()
    model.half()
    with contextlib.nullcontext() if row.checks else patched(model, ["skip_inf_check"]):
        return fp32, count()


def step(row: Published) -> tuple[Work, Work]:
    """In fp32 and fp16, the decoder step in the middle of a generation."""
    stock = t5_small()
    with shapes_only():
        inputs = batch(row.batch_size, TARGET_LENGTH // 2 + 1)
        models = [without_data(stock, dtype) for dtype in (torch.float32, torch.float16)]
        fp32, fp16 = (census(decoder_step(model, inputs).prepare(), model) for model in models)
    return fp32, fp16


def comparison(row: Published, works: tuple[Work, Work]) -> dict[str, Any]:
    """What the model predicts beside what was published."""
    ratio = speed(row, works, ASSUMED)
    ends = [speed(row, works, dataclasses.replace(ASSUMED, operation=cost)) for cost in OPERATION_COSTS]
    fp32, fp16 = (predict(work, DEVICES[row.device]) for work in works)
    return {
        **dataclasses.asdict(row),
        "predicted": round(ratio, 3),
        "predicted_range": sorted(round(each, 3) for each in ends),
        "off_by_percent": round(100 * (ratio / row.ratio - 1), 1),
        "fp32": side(works[0], fp32),
        "fp16": side(works[1], fp16),
    }


def speed(row: Published, works: tuple[Work, Work], costs: Costs) -> float:
    """Of fp16, as a ratio to fp32."""
    fp32, fp16 = (predict(work, DEVICES[row.device], costs=costs).seconds for work in works)
    return fp32 / fp16


def side(work: Work, prediction: Prediction) -> dict[str, Any]:
    """One precision's figures."""
    times = {"host": prediction.host, "device": prediction.device, "syncs": prediction.syncs}
    milliseconds = {f"{name}_ms": round(1000 * seconds, 3) for name, seconds in times.items()}
    return {**work.figures(), **milliseconds, "bound": prediction.bound.value}


def main() -> None:
    rows = [comparison(row, evaluation(row)) for row in EVALUATIONS] + [comparison(row, step(row)) for row in STEPS]
    document = json.loads(RESULT.read_text()) if RESULT.is_file() else {"releases": {}}
    document["what"] = "speed of fp16 as a ratio to fp32: predicted, not measured, beside what was published"
    document["costs"] = dataclasses.asdict(ASSUMED)
    document["operation_range"] = OPERATION_COSTS
    document["releases"][transformers.__version__] = {"torch": torch.__version__, "rows": rows}
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    for row in rows:
        low, high = row["predicted_range"]
        print(
            f"{row['what']:28} {row['device']:12} batch {row['batch_size']:3}: predicted {row['predicted']:.2f} "
            f"({low:.2f} to {high:.2f}), published {row['ratio']:.2f}, off by {row['off_by_percent']:+.0f}%"
        )


if __name__ == "__main__":
    main()
