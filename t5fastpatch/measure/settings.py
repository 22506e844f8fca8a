"""What an ablation is asked for, and the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import NotFoundError


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an ablation is run. Every combination of the tuples is a cell, as far as it makes sense.

    Attributes:
        preset: the name that the other defaults came from.
        model: a local directory or a name on the hub; `None` for the embedded model.
        shape: instead of a model, the shape of a known one with random weights.
        device: as for `torch.device`.
        precisions: those in which the patches are tried, by name.
        attentions: `"eager"`, `"sdpa"`, or `"default"` for what the release takes by itself.
        compiled: whether `torch.compile` is off, on, or each in turn.
        workloads: names of workloads or levels.
        batch_sizes: sentences per batch.
        lengths: of source and target, in tokens; of sentences the most, and of a timed generation the exact length.
        text: `"sentences"`, padded to the longest, or `"full"`: every source and target exactly as long as said.
        num_beams: of the workloads with beams.
        patches: names of patches or presets; `None` for every patch there is.
        shapley: whether all sets of patches are timed that fair shares need; where the rows hold them all the shares
            come without.
        samples: how many held-out sentences the results are taken over; `None` for all.
        rounds: rounds of timing per cell, at most.
        min_rounds: rounds whatever the interval's width and the budget.
        width: of the 95% intervals, at which a cell is done.
        time_budget: seconds for a cell, after which only the least number of rounds is still made.
        counts: whether a model's own calls also have a census and, stock and with all patches, a profile.
        threads: of PyTorch on the CPU; `None` for one with the embedded model, and PyTorch's own number with any other.
        seed: of the order of sentences and variants, of random weights and pieces, and of the resampling.
    """

    preset: str = "quick"
    model: str | None = None
    shape: str | None = None
    device: str = "cpu"
    precisions: tuple[str, ...] = ("fp16",)
    attentions: tuple[str, ...] = ("default",)
    compiled: tuple[bool, ...] = (False,)
    workloads: tuple[str, ...] = ("forward", "decoder_step", "greedy", "results")
    batch_sizes: tuple[int, ...] = (8,)
    lengths: tuple[tuple[int, int], ...] = ((128, 64),)
    text: str = "sentences"
    num_beams: int = 4
    patches: tuple[str, ...] | None = None
    shapley: bool = False
    samples: int | None = None
    rounds: int = 20
    min_rounds: int = 8
    width: float = 0.01
    time_budget: float = 15.0
    counts: bool = True
    threads: int | None = None
    seed: int = 0


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {},
    "report": {
        "workloads": (
            *("micro", "encoder", "decoder_step", "forward", "greedy"),
            *("evaluate", "evaluate_smoothed", "results"),
        ),
        "batch_sizes": (8, 16),
        "lengths": ((12, 128),),
        "text": "full",
        "shapley": True,
        "samples": 100,
        "time_budget": 60.0,
    },
    "full": {
        "precisions": ("fp32", "tf32", "fp16", "fp16_from_pretrained", "bf16"),
        "attentions": ("eager", "sdpa"),
        "compiled": (False, True),
        "workloads": ("micro", "stack", "generate", "trainer", "results"),
        "batch_sizes": (1, 4, 8, 16, 32, 64, 128),
        "lengths": ((12, 128), (128, 128), (512, 512), (1024, 1024)),
        "text": "full",
        "shapley": True,
        "time_budget": 60.0,
    },
}
"""`quick` takes a minute or two on the embedded model; `report` has the settings of the first public report of the
defect (100 samples, batches of 8 and 16, sources of 12 tokens, targets of 128); `full` is the whole grid."""


def preset(name: str, **changes: Any) -> Settings:
    """The settings of a preset, with changes.

    Raises:
        NotFoundError: there is no such preset.
    """
    if name not in PRESETS:
        raise NotFoundError(f"there is no preset {name!r}: there are {', '.join(PRESETS)}")
    return Settings(**{**PRESETS[name], "preset": name, **changes})
