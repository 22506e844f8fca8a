"""Times two small regions, PyTorch's own operations against one compiled kernel, as interleaved ratios.

The regions are a residual addition with the norm that reads it next, and a gated feed-forward's activation with its
product: what a patch with a compiled, or a third party's fused, kernel would replace.

    python scripts/benchmark_regions.py [--device cuda] [--json FILE]
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from benchmark_norm import keep_memory
from rich.console import Console
from rich.table import Table

from t5fastpatch.measure.environment import environment
from t5fastpatch.measure.timing import Limits, Prepare, interleave, stopwatch_for

SHAPES = ((2, 1, 512), (4, 256, 512), (2, 512, 1024))
DTYPES = (torch.float16, torch.bfloat16)


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return total, F.rms_norm(total, weight.shape, weight, 1e-6)


def gate(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh") * y


def entry(region: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Any:
    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        with torch.no_grad():
            yield lambda: lambda: region(*inputs)

    return entered


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="A file to write the ratios to.")] = None,
    rounds: Annotated[int, typer.Option(min=8)] = 60,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    keep_memory()
    torch.set_num_threads(threads)
    place = torch.device(device)
    table = Table("batch, length, width", "dtype", "add and norm", "gate", title="compiled / eager, time")
    results = []
    compiled = {region: torch.compile(region, dynamic=True) for region in (add_norm, gate)}
    for shape in SHAPES:
        for dtype in DTYPES:
            x, y = (torch.randn(shape, device=place).to(dtype) for _ in range(2))
            inputs = x, y, torch.rand(shape[-1], device=place).to(dtype)
            ratios = []
            for region, fused in compiled.items():
                variants = {"eager": entry(region, inputs), "compiled": entry(fused, inputs)}
                samples = interleave(variants, stopwatch_for(place), "eager", Limits(rounds, width=0))
                ratios.append(samples.ratio("compiled", "eager"))
            table.add_row(str(shape), str(dtype)[6:], *map(str, ratios))
            both = {"add and norm": dataclasses.asdict(ratios[0]), "gate": dataclasses.asdict(ratios[1])}
            results.append({"shape": shape, "dtype": str(dtype)[6:], **both})
    Console(width=100).print(table)
    if json is not None:
        json.write_text(json_module.dumps({"environment": environment(place), "ratios": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
