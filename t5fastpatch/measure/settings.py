"""What an ablation is asked for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an ablation is run.

    Attributes:
        model: a local directory or a name on the hub; `None` for the embedded model.
        dtype: the half precision, `"float16"` or `"bfloat16"`.
        device: as for `torch.device`.
        batch_size: sentences per batch.
        max_source_length: longest source, in tokens; the rest is cut off.
        max_new_tokens: longest generation and reference, in tokens; every timed generation is exactly that long.
        patches: names of patches or presets; `None` for every patch there is.
        samples: how many held-out sentences the results are taken over; `None` for all.
        rounds: rounds of timing per workload, at most.
        time_budget: seconds for all the timing, after which only the least number of rounds is still made.
        threads: of PyTorch on the CPU; `None` for one with the embedded model, and PyTorch's own number with any other.
        seed: of the order of sentences and variants, and of the resampling.
    """

    model: str | None = None
    dtype: str = "float16"
    device: str = "cpu"
    batch_size: int = 8
    max_source_length: int = 128
    max_new_tokens: int = 64
    patches: tuple[str, ...] | None = None
    samples: int | None = None
    rounds: int = 20
    time_budget: float = 45.0
    threads: int | None = None
    seed: int = 0
