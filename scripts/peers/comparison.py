"""The peers on one job: built, judged, and those that do it timed against each other."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from t5fastpatch.loading import first_line
from t5fastpatch.measure.memory import bracket
from t5fastpatch.measure.statistics import Ratio
from t5fastpatch.measure.timing import Entry, Limits, Prepare, Samples, interleave, stopwatch_for

from .job import Job, Peer, Running, UnavailableError
from .judging import Judge, Judgement

BASELINE, COMPILED_BASELINE = "stock", "stock, compiled"


@dataclasses.dataclass
class Row:
    """What came of one peer.

    Attributes:
        peer: its name.
        state: `"timed"`, `"wrong"`, `"failed"` or `"skipped"`.
        why: the reason if it was not timed.
        patches: those that are on, by name.
        arithmetic: what it computes in.
        error, bound: of `Judgement`.
        build_seconds: from nothing to the first result, conversion and compilation included.
        seconds: the median time of a call.
        ratios: of its time to those of stock and stock compiled.
        host_peak, device_peak: bytes that one call took, of `Memory`.
    """

    peer: str
    state: str
    why: str = ""
    patches: Sequence[str] = ()
    arithmetic: str = ""
    error: float | None = None
    bound: float | None = None
    build_seconds: float | None = None
    seconds: float | None = None
    ratios: Mapping[str, Ratio] = dataclasses.field(default_factory=dict)
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
    """The rows of all peers for such work on such a device, and the times of those that do the job.

    Args:
        job: what to do.
        peers: stock among them.
        limits: of the rounds.
        deadline: after which no peer but stock is begun, and no round beyond the least number.
    """
    judge = Judge(job)
    rows: list[Row] = []
    running: dict[str, Running] = {}
    for peer in (peer for peer in peers if peer.is_for(job)):
        row, ready = prepared(peer, job, judge, deadline)
        rows.append(row)
        if ready is not None:
            running[peer.name] = ready
    del judge
    if BASELINE not in running:
        return rows, None
    entries = {name: _entry(ready.call) for name, ready in running.items()}
    limits = dataclasses.replace(limits, time_budget=min(limits.time_budget, deadline.left()))
    samples = interleave(entries, stopwatch_for(job.device), BASELINE, limits)
    baselines = [name for name in (BASELINE, COMPILED_BASELINE) if name in running]
    for row in rows:
        if row.peer in running:
            row.seconds = samples.median(row.peer)
            row.ratios = {baseline: samples.ratio(row.peer, baseline) for baseline in baselines}
            row.host_peak, row.device_peak = _peaks(running[row.peer], job.device)
    return rows, samples


def prepared(peer: Peer, job: Job, judge: Judge, deadline: Deadline) -> tuple[Row, Running | None]:
    """A peer that is ready and right, or the reason why there is none."""
    if reason := _unfit(peer, deadline):
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
    found = judge.judge(result, ready.arithmetic)
    row = Row(peer.name, "timed", "", ready.patches, ready.arithmetic, found.error, found.bound, seconds)
    if found.same:
        return row, ready
    return dataclasses.replace(row, state="wrong", why=_wrong(found)), None


def _wrong(found: Judgement) -> str:
    return f"computes something else: error {found.error:.2g}, rounding explains {found.bound:g}"


def _unfit(peer: Peer, deadline: Deadline) -> str:
    """Why a peer is not even tried; empty if it is."""
    if peer.name != BASELINE and not deadline.left():
        return "no time was left"
    return peer.missing()


def _entry(call: Callable[[], object]) -> Entry:
    @contextlib.contextmanager
    def entered() -> Iterator[Prepare]:
        yield lambda: call

    return entered


def _peaks(running: Running, device: torch.device) -> tuple[int | None, int | None]:
    """What one call takes on the host, unless the work is done elsewhere, and on the device."""
    if not running.seen:
        return None, None
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # memory that is kept would be taken unseen
    memory = bracket(running.call, device)[1]
    return (None if device.type == "cuda" else memory.host_peak), memory.device_peak
