"""Times other ways of running T5 against stock and the patches: same weights, same inputs, one process, interleaved.

    python scripts/bench_peers.py [--workload encoder] [--dtype bf16] [--threads 2] [--json FILE]
    python scripts/bench_peers.py --device cuda --shape t5-xxl-encoder --shape t5-small --time-budget 420

Every peer is first compared with stock in fp64; one that computes something else is not timed. One that is not
installed is named, with the way to get it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from benchmark_norm import keep_memory
from peers import PEERS
from peers.job import Job, Peer, Running, Size, UnavailableError, Work, can, make_job
from peers.judging import Judge, Judgement
from rich.console import Console
from rich.table import Table

from t5fastpatch import T5FastPatchError
from t5fastpatch.loading import first_line, quiet
from t5fastpatch.measure.environment import environment
from t5fastpatch.measure.memory import bracket
from t5fastpatch.measure.precision import precision_of
from t5fastpatch.measure.shapes import SHAPES, Shape
from t5fastpatch.measure.statistics import Ratio
from t5fastpatch.measure.subject import torch_device
from t5fastpatch.measure.timing import Entry, Limits, Prepare, Samples, interleave, stopwatch_for

SCHEMA = "t5fastpatch.bench_peers/1"
BASELINE = "stock"
GATED = {"decoder_start_token_id": 0, "vocab_size": 32128, "feed_forward_proj": "gated-gelu"}
OWN_SHAPES = {
    "encoder-8": Shape("T5EncoderModel", "T5Config", {**GATED, "d_model": 512, "d_ff": 1024, "num_layers": 8}),
}
SIZES = {"t5-xxl-encoder": Size(1, 512, 0), "t5-xxl-encoder-8": Size(1, 512, 0)}
SIZE = Size(4, 256, 32)


@dataclasses.dataclass
class Row:
    """What came of one peer.

    Attributes:
        peer: its name.
        state: `"timed"`, `"wrong"`, `"failed"` or `"skipped"`.
        why: the reason if it was not timed; else what is to be known.
        arithmetic: what it computes in.
        error, bound: of `Judgement`.
        build_seconds: from nothing to the first result, compilation and conversion included.
        seconds: median time of a call.
        to_stock: its ratio to stock's.
        host_peak, device_peak: bytes that one call took, of `Memory`.
    """

    peer: str
    state: str
    why: str = ""
    arithmetic: str = ""
    error: float | None = None
    bound: float | None = None
    build_seconds: float | None = None
    seconds: float | None = None
    to_stock: Ratio | None = None
    host_peak: int | None = None
    device_peak: int | None = None


class Deadline:
    """Seconds, counted from now."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, 0 at the least."""
        return max(0.0, self._ends - time.monotonic())


def compare(job: Job, peers: Sequence[Peer], limits: Limits, deadline: Deadline) -> tuple[list[Row], Samples | None]:
    """Builds all peers, judges them, and times against each other those that do the job; stock comes first."""
    judge = Judge(job)
    rows: list[Row] = []
    running: dict[str, Callable[[], torch.Tensor]] = {}
    for peer in peers:
        row, ready = prepared(peer, job, judge, deadline)
        rows.append(row)
        if ready is not None:
            running[peer.name] = ready.call
    if BASELINE not in running:
        return rows, None
    samples = interleave(
        {name: _entry(call) for name, call in running.items()},
        stopwatch_for(job.device),
        BASELINE,
        dataclasses.replace(limits, time_budget=min(limits.time_budget, deadline.left())),
    )
    for row in rows:
        if row.peer in running:
            row.seconds, row.to_stock = samples.median(row.peer), samples.ratio(row.peer, BASELINE)
            memory = bracket(running[row.peer], job.device)[1]
            row.host_peak, row.device_peak = memory.host_peak, memory.device_peak
    return rows, samples


def prepared(peer: Peer, job: Job, judge: Judge, deadline: Deadline) -> tuple[Row, Running | None]:
    """A peer that is ready and right, or the reason why there is none."""
    if reason := unfit(peer, job, deadline):
        return Row(peer.name, "skipped", reason), None
    started = time.monotonic()
    try:
        ready = peer.build(job)
        result = ready.call()
    except UnavailableError as error:
        return Row(peer.name, "skipped", str(error)), None
    except Exception as error:  # of any library; the others are measured all the same
        return Row(peer.name, "failed", f"{type(error).__name__}: {first_line(error)}"), None
    seconds = time.monotonic() - started
    judgement = judge.judge(result, ready.arithmetic)
    row = Row(peer.name, "timed", ready.note, ready.arithmetic, judgement.error, judgement.bound, seconds)
    if judgement.same:
        return row, ready
    return dataclasses.replace(row, state="wrong", why=_wrong(judgement)), None


def unfit(peer: Peer, job: Job, deadline: Deadline) -> str:
    """Why a peer is not even tried; empty if it is."""
    if job.work not in peer.works:
        return f"does no {job.work}"
    if peer.only_on and peer.only_on != job.device.type:
        return f"on {peer.only_on} only"
    if peer.name != BASELINE and not deadline.left():
        return "no time was left"
    return peer.missing()


def _wrong(judgement: Judgement) -> str:
    return f"computes something else: error {judgement.error:.2g}, rounding explains {judgement.bound:.2g}"


def _entry(call: Callable[[], object]) -> Entry:
    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        yield lambda: call

    return entered


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """The versions of the peers' libraries that are installed."""
    names = dict.fromkeys(peer.version_of for peer in peers if peer.version_of and not peer.missing())
    return {name: metadata.version(name) for name in names}


def chosen(names: Sequence[str]) -> list[Peer]:
    """The peers of these names or libraries, and stock; all if none is named.

    Raises:
        T5FastPatchError: there is no such peer.
    """
    for name in names:
        if not any(_is_called(peer, name) for peer in PEERS):
            raise T5FastPatchError(f"no peer is called {name!r}: there are {'; '.join(peer.name for peer in PEERS)}")
    wanted = [BASELINE, *names] if names else [peer.name for peer in PEERS]
    return [peer for peer in PEERS if any(_is_called(peer, name) for name in wanted)]


def _is_called(peer: Peer, name: str) -> bool:
    return name in (peer.name, peer.version_of)


def table(case: dict[str, Any], rows: Sequence[Row]) -> Table:
    """A row a peer, the fastest last."""
    shown = Table("peer", "computes in", "ms", "time / stock", "error (bound)", "peak MiB", "", title=title(case))
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def title(case: dict[str, Any]) -> str:
    """A case in words."""
    tokens = f", {case['new_tokens']} tokens" if case["workload"] == Work.GENERATE else ""
    return (
        f"{case['shape']}, {case['workload']}, {case['dtype']}, batch {case['batch']} x {case['length']}{tokens}, "
        f"{case['device']}, {case['threads']} threads"
    )


def cells(row: Row) -> list[str]:
    """A row in words."""
    peak = row.host_peak if row.device_peak is None else row.device_peak
    return [
        row.peer,
        row.arithmetic or "-",
        "-" if row.seconds is None else f"{1000 * row.seconds:.4g}",
        "-" if row.to_stock is None else _ratio(row.to_stock),
        "-" if row.error is None else f"{row.error:.1e} ({row.bound:g})",
        "-" if peak is None else f"{peak / 2**20:.0f}",
        row.why if row.state == "timed" else f"{row.state}: {row.why}",
    ]


def _ratio(ratio: Ratio) -> str:
    return "1" if ratio.low == ratio.high == 1 else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def main(
    workload: Annotated[list[Work], typer.Option(help="Repeatable.")] = [Work.ENCODER],
    shape: Annotated[list[str], typer.Option(help="Repeatable.")] = ["encoder-8"],
    dtype: Annotated[list[str], typer.Option(help="fp32, fp16 or bf16; repeatable.")] = ["bf16"],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="On the CPU.")] = 1,
    peers: Annotated[list[str], typer.Option(help="Names of peers or of their libraries; repeatable.")] = [],
    patches: Annotated[list[str], typer.Option(help="Of the patched model; repeatable. The default preset.")] = [],
    batch: Annotated[int | None, typer.Option(min=1, help="Sentences.")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens in the longest of them.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="To be generated.")] = None,
    rounds: Annotated[int, typer.Option(min=2)] = 30,
    time_budget: Annotated[float, typer.Option(min=0, help="Seconds, after which nothing more is begun.")] = math.inf,
    json: Annotated[Path | None, typer.Option(help="A file for the figures.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and text.")] = 0,
) -> None:
    """Compares the peers on every combination of workload, shape and dtype."""
    quiet()
    keep_memory()
    SHAPES.update(OWN_SHAPES)
    torch.set_num_threads(threads)
    place, wanted, deadline = torch_device(device), chosen(peers), Deadline(time_budget)
    console = Console(width=130)
    cases: list[dict[str, Any]] = []
    for each_shape, work, each_dtype in ((s, w, d) for s in shape for w in workload for d in dtype):
        usual = SIZES.get(each_shape, SIZE)
        size = Size(batch or usual.batch, length or usual.length, new_tokens or usual.new_tokens)
        precision = precision_of(each_dtype)
        job = make_job(
            work, each_shape, precision, size, place, threads=threads, patches=tuple(patches) or None, seed=seed
        )
        if not can(job.model, work):
            continue
        with torch.no_grad():
            rows, samples = compare(job, wanted, Limits(rounds, min(rounds, 8)), deadline)
        torch._dynamo.reset()
        case = {
            "workload": work.value,
            "shape": each_shape,
            "dtype": precision.value,
            **dataclasses.asdict(size),
            "lengths": job.lengths,
            "device": str(place),
            "threads": torch.get_num_threads(),
        }
        console.print(table(case, rows))
        rounds_made = None if samples is None else {"rounds": samples.rounds, "calls": samples.calls}
        cases.append({**case, "timing": rounds_made, "peers": [dataclasses.asdict(row) for row in rows]})
        if json is not None:
            about = {"schema": SCHEMA, "environment": environment(place), "versions": versions(wanted)}
            json.write_text(json_module.dumps({**about, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
