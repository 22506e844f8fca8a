"""Times the patched RMS norm against stock's, as interleaved ratios, on this machine's CPU or GPU.

python scripts/benchmark_norm.py [--device cuda] [--json FILE]
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import json as json_module
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import t5fastpatch
from t5fastpatch.measure.environment import environment
from t5fastpatch.measure.timing import Limits, Prepare, interleave, stopwatch_for

SHAPES = ((1, 1, 512), (8, 1, 512), (8, 128, 512), (2, 512, 1024), (1, 512, 4096))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def norms(width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A stock norm of `width` elements and an equal one that is patched."""
    config = transformers.T5Config(
        vocab_size=8, d_model=width, d_kv=8, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0
    )
    stock = transformers.T5EncoderModel(config).encoder.final_layer_norm.to(device, dtype)
    patched = copy.deepcopy(stock)
    t5fastpatch.apply(patched, ["layer_norm"])
    return {"stock": stock, "patched": patched}


def entry(norm: Any, x: torch.Tensor, backward: bool) -> Any:
    def call() -> object:
        with torch.set_grad_enabled(backward):
            out = norm(x)
            return torch.autograd.grad(out.sum(), [x, norm.weight]) if backward else out

    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        yield lambda: call

    return entered


def keep_memory() -> None:
    """Keeps glibc from giving large blocks back to the system after every call, and fetching them again page by page.

    Which of the variants pays for that is chance, and would double its time.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        for option in (trim_threshold, mmap_threshold):
            ctypes.CDLL(None).mallopt(option, 1 << 30)


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="A file to write the ratios to.")] = None,
    rounds: Annotated[int, typer.Option(min=8)] = 60,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    keep_memory()
    torch.set_num_threads(threads)
    place = torch.device(device)
    table = Table("batch, length, d_model", "dtype", "forward", "forward and backward", title="patched / stock, time")
    results = []
    for shape in SHAPES:
        for dtype in DTYPES:
            pair = norms(shape[-1], dtype, place)
            x = torch.randn(shape, device=place).to(dtype).requires_grad_()
            ratios = []
            for backward in (False, True):
                variants = {name: entry(norm, x, backward) for name, norm in pair.items()}
                samples = interleave(variants, stopwatch_for(place), "stock", Limits(rounds, width=0))
                ratios.append(samples.ratio("patched", "stock"))
            table.add_row(str(shape), str(dtype)[6:], *map(str, ratios))
            both = {"forward": dataclasses.asdict(ratios[0]), "forward and backward": dataclasses.asdict(ratios[1])}
            results.append({"shape": shape, "dtype": str(dtype)[6:], **both})
    Console(width=100).print(table)
    if json is not None:
        json.write_text(json_module.dumps({"environment": environment(place), "ratios": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
