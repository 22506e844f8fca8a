"""The stock model and the patched one, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import torch

import t5fastpatch
from t5fastpatch.measure.workloads import encoder

from .job import Job, Peer, Running, Work


def _stock(job: Job) -> Running:
    return _running(job, job.model)


def _stock_compiled(job: Job) -> Running:
    return _running(job, job.model, compiled=True)


def _patched(job: Job) -> Running:
    model, names = _patched_copy(job)
    return _running(job, model, note=names)


def _patched_compiled(job: Job) -> Running:
    model, names = _patched_copy(job)
    return _running(job, model, compiled=True, note=names)


def _patched_copy(job: Job) -> tuple[Any, str]:
    """A patched copy of the model, and the names of the patches that are on."""
    model = copy.deepcopy(job.model)
    patches = None if job.patches is None else list(job.patches)
    report = t5fastpatch.apply(model, patches)
    on = dict.fromkeys(row.patch for row in report.rows if row.state.value == "on")
    return model, ", ".join(on)


def _running(job: Job, model: Any, compiled: bool = False, note: str = "") -> Running:
    work = {Work.ENCODER: _encoder, Work.GENERATE: _generate}[job.work]
    return Running(work(job, model, compiled), job.precision.value, note)


def _encoder(job: Job, model: Any, compiled: bool) -> Any:
    stack: Any = encoder(model)
    if compiled:
        stack = torch.compile(stack, dynamic=False)
    return lambda: stack(**job.batch).last_hidden_state


def _generate(job: Job, model: Any, compiled: bool) -> Any:
    raise NotImplementedError


PEERS = (
    Peer("stock", _stock),
    Peer("stock, compiled", _stock_compiled),
    Peer("patched", _patched),
    Peer("patched, compiled", _patched_compiled),
)
