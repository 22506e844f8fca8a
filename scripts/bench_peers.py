"""Times other ways of running T5 against stock and the patches: same weights, same inputs, one process, interleaved.

    python scripts/bench_peers.py --workload encoder --dtype bf16 --threads 2 --json FILE
    python scripts/bench_peers.py --device cuda --shape t5-xxl-encoder --shape t5-small --time-budget 420 --json FILE
    python scripts/bench_peers.py --read FILE --markdown    # the tables of a stored comparison

Every peer is first compared with stock in fp64; one that computes something else is not timed. One that is not
installed is named, with the way to get it.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import math
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from benchmark_norm import keep_memory
from peers import PEERS
from peers.comparison import BASELINE, Deadline, compare
from peers.job import Job, Peer, Size, Work, make_job
from peers.tables import markdown as as_markdown
from peers.tables import table
from rich.console import Console

from t5fastpatch.errors import NotFoundError, T5FastPatchError
from t5fastpatch.loading import quiet
from t5fastpatch.measure.environment import environment
from t5fastpatch.measure.precision import Precision, precision_of
from t5fastpatch.measure.record import to_json
from t5fastpatch.measure.shapes import SHAPES, Shape
from t5fastpatch.measure.statistics import LEAST_ROUNDS
from t5fastpatch.measure.subject import torch_device
from t5fastpatch.measure.timing import Limits

SCHEMA = "t5fastpatch.bench_peers/1"
# The rounds are what all this is for: some time is left for them.
SHARE_FOR_BUILDING = 0.7
SHAPES["encoder-8"] = Shape(
    "T5EncoderModel",
    "T5Config",
    {
        "vocab_size": 32128,
        "d_model": 512,
        "d_ff": 1024,
        "num_layers": 8,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
    },
)
SIZES = {"t5-xxl-encoder": Size(1, 512, 0), "t5-xxl-encoder-8": Size(1, 512, 0)}
USUAL_SIZE = Size(4, 256, 32)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        workload: what is computed.
        shape: of the model, a key of `SHAPES`.
        precision: of its weights.
        size: of the batch.
    """

    workload: Work
    shape: str
    precision: Precision
    size: Size

    def to_dict(self) -> dict[str, Any]:
        """For the file."""
        names = {"workload": self.workload.value, "shape": self.shape, "dtype": self.precision.value}
        return names | dataclasses.asdict(self.size)


def cases(
    workloads: Sequence[Work], shapes: Sequence[str], precisions: Sequence[Precision], **size: int | None
) -> list[Case]:
    """All combinations, but for generation by an encoder; `size` replaces the usual one of the shape, but for `None`.

    Raises:
        T5FastPatchError: a shape is unknown, or nothing is left.
    """
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        raise NotFoundError(f"no shape is called {unknown[0]!r}: there are {', '.join(SHAPES)}")
    changes = {name: value for name, value in size.items() if value is not None}
    found = [
        Case(work, shape, precision, dataclasses.replace(SIZES.get(shape, USUAL_SIZE), **changes))
        for shape in shapes
        for work in workloads
        for precision in precisions
        if work is Work.ENCODER or not SHAPES[shape].model.endswith("EncoderModel")
    ]
    if not found:
        raise T5FastPatchError(f"{', '.join(shapes)} cannot generate: take --workload encoder, or --shape t5-small")
    return found


def chosen(names: Sequence[str]) -> list[Peer]:
    """The peers of these names, or all of a library's, and stock; all peers if none is named.

    Raises:
        NotFoundError: there is no such peer.
    """
    for name in names:
        if not any(name in (peer.name, peer.version_of) for peer in PEERS):
            raise NotFoundError(f"no peer is called {name!r}: there are {'; '.join(peer.name for peer in PEERS)}")
    wanted = {BASELINE, *names} if names else {peer.name for peer in PEERS}
    return [peer for peer in PEERS if wanted & {peer.name, peer.version_of}]


def measured(case: Case, job: Job, peers: Sequence[Peer], rounds: int, deadline: Deadline) -> dict[str, Any]:
    """A case with all that came of it, as it is written."""
    with torch.no_grad():
        rows, samples = compare(job, peers, Limits(rounds, min(rounds, LEAST_ROUNDS)), deadline)
    torch._dynamo.reset()
    timing = None if samples is None else {name: getattr(samples, name) for name in ("rounds", "calls", "stopped")}
    return {
        **case.to_dict(),
        "lengths": job.lengths,
        "device": str(job.device),
        "threads": torch.get_num_threads(),
        "timing": timing,
        "peers": [dataclasses.asdict(row) for row in rows],
    }


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Of the libraries that are installed."""
    return {
        peer.version_of: metadata.version(peer.version_of) for peer in peers if peer.version_of and not peer.missing()
    }


def main(
    workload: Annotated[list[Work] | None, typer.Option(help="encoder by default; repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="encoder-8 by default, of 8 layers; repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16, or bf16, the default; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="On the CPU, of every peer.")] = 1,
    peers: Annotated[list[str] | None, typer.Option(help="A peer or all of a library; repeatable.")] = None,
    patches: Annotated[list[str] | None, typer.Option(help="A patch or preset; repeatable. Else the default.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sentences.")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens of the longest of them.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="To be generated.")] = None,
    rounds: Annotated[int, typer.Option(min=2)] = 30,
    time_budget: Annotated[float, typer.Option(min=0, help="Seconds, shared by the cases.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Of weights and text.")] = 0,
    json: Annotated[Path | None, typer.Option(help="A file for the figures, written after each case.")] = None,
    read: Annotated[list[Path] | None, typer.Option(help="Measure nothing, show these files; repeatable.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for a page.")] = False,
) -> None:
    """Compares the peers on every combination of workload, shape and dtype."""
    show = (lambda *documents: print(as_markdown(documents))) if markdown else _print
    if read:
        show(*(json_module.loads(file.read_text(encoding="utf-8")) for file in read))
        return
    quiet()
    keep_memory()
    torch.set_num_threads(threads)
    try:
        place, wanted = torch_device(device), chosen(peers or ())
        precisions = [precision_of(each) for each in dtype or ("bf16",)]
        planned = cases(
            workload or [Work.ENCODER],
            shape or ["encoder-8"],
            precisions,
            batch=batch,
            length=length,
            new_tokens=new_tokens,
        )
    except T5FastPatchError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    left = Deadline(time_budget)
    document: dict[str, Any] = {"schema": SCHEMA, "environment": environment(place), "versions": versions(wanted)}
    document["cases"] = []
    for at, case in enumerate(planned):
        share = Deadline(SHARE_FOR_BUILDING * left.left() / (len(planned) - at))
        job = make_job(case.workload, case.shape, case.precision, case.size, place, threads, patches, seed)
        document["cases"].append(measured(case, job, wanted, rounds, share))
        if json is not None:
            json.write_text(to_json(document, indent=1) + "\n", encoding="utf-8")
    show(document)


def _print(*documents: dict[str, Any]) -> None:
    for case in (case for document in documents for case in document["cases"]):
        Console(width=140).print(table(case))


if __name__ == "__main__":
    typer.run(main)
