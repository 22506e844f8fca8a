"""The command `check`: options and output; the work is in headroom/check.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import T5FastPatchError
from .extra import require
from .files import check_outputs, write

if TYPE_CHECKING:
    import torch

    from .headroom.check import Check

DTYPES = ("float32", "bfloat16", "auto")
PICTURES = (".png", ".svg")


def check(
    model: Annotated[
        str | None, typer.Option(help="A model's directory, or its name on the hub; the embedded model without it.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A text file in UTF-8, a text a line; else the package's own texts.")
    ] = None,
    no_data: Annotated[bool, typer.Option("--no-data", help="Only the bound from the weights; runs nothing.")] = False,
    dtype: Annotated[
        str, typer.Option(help=f"In which the weights are held: {', '.join(DTYPES)}; all is computed in fp32.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per batch.")] = 8,
    max_length: Annotated[int, typer.Option(min=1, help="Longest text, in tokens; the rest is cut off.")] = 512,
    limit: Annotated[int | None, typer.Option(min=1, help="Lines to take at most; all without it.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file for everything, as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="A file for a picture of magnitude by depth: .png or .svg.")
    ] = None,
) -> None:
    """Check how far a model stays from fp16's largest number: for every input, by its weights, and on texts.

    A model that makes text of text generates a few tokens for each.
    """
    _check_options(data, no_data, dtype, picture)
    check_outputs(json, picture, inputs=(data,) if data else ())
    # Imported here, so that the command's help needs no torch.
    from .headroom.check import check as check_model
    from .headroom.sentences import DEFAULT, read_lines
    from .loading import checked_name, quiet
    from .measure.subject import DEMO_MODEL, pretrained, torch_device

    quiet()
    texts = None if no_data else read_lines(data or DEFAULT, limit)
    place = torch_device(device)
    name = str(DEMO_MODEL) if model is None else checked_name(model)
    loaded, tokenizer = pretrained(name, place, _dtype(dtype))
    report = check_model(loaded, None if texts is None else _batches(tokenizer, texts, batch_size, max_length, place))
    print(report)
    _write(report, json, picture)


def _check_options(data: Path | None, no_data: bool, dtype: str, picture: Path | None) -> None:
    if dtype not in DTYPES:
        raise T5FastPatchError(f"--dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    if no_data and data is not None:
        raise T5FastPatchError("--data and --no-data exclude each other: leave one out")
    if picture is not None:
        if picture.suffix not in PICTURES:
            raise T5FastPatchError(f"a picture is a {' or '.join(PICTURES)} file, not {str(picture)!r}")
        require("matplotlib", "report")


def _dtype(name: str) -> torch.dtype | str:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name, name)


def _batches(
    tokenizer: Any, texts: Sequence[str], size: int, max_length: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of like length, so that little is padded."""
    by_length = sorted(texts, key=len)
    for start in range(0, len(by_length), size):
        part = by_length[start : start + size]
        tokens = tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        yield {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}


def _write(report: Check, json: Path | None, picture: Path | None) -> None:
    contents = {}
    if json is not None:
        contents[json] = (report.to_json(indent=1, ensure_ascii=False) + "\n").encode()
    if picture is not None:
        from .reports.headroom import headroom_picture

        drawn = headroom_picture(report.to_dict())
        contents[picture] = drawn.svg().encode() if picture.suffix == ".svg" else drawn.png()
    write(contents)
